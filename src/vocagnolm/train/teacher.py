"""A teacher held in memory: it reads the same text as the block, aligned on the fly.

Two halves. `TeacherView` is data: it tokenises a block's text with the teacher's tokenizer and
aligns it, in the loader's processes. `OnlineTeacher` is the model: it turns that view into
guidance (guided, rho1, chunk), into targets (distill) or into hidden states to compare
distributions with (kld, uld).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.alignment import (
    Alignment,
    TextTokenizer,
    align,
    carry,
    stretch_alignment,
    stretches,
    whole_sums,
)
from vocagnolm.alignment.alignment import Aggregation
from vocagnolm.alternatives import NOTHING, AlternativesSpec
from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.blocks import Block, TrainingOrder
from vocagnolm.data.guidance import (
    Laid,
    LaidTeacher,
    TargetsPlan,
    carry_targets,
    cut_stretches,
    unbroken,
)
from vocagnolm.data.packing import chunk_guidance
from vocagnolm.errors import TrainingError
from vocagnolm.model.nll import AlternativeChoice, losses_through_logits, token_scores
from vocagnolm.model.runtime import head_form, last_hidden
from vocagnolm.objective import (
    IGNORE_INDEX,
    ObjectiveConfig,
    Pairing,
    Teacher,
    token_losses,
)
from vocagnolm.objective.head import RowLosses, Transform


def refuse_other_vocabulary(student: dict[str, int], teacher: dict[str, int]) -> None:
    """kld and rho1 presuppose one vocabulary; the teacher may have more tokens (Llemma's 16)."""
    other = [token for token, index in student.items() if teacher.get(token) != index]
    if other:
        raise TrainingError(
            f"This method needs one vocabulary, but {len(other):,} of the student's "
            f"{len(student):,} tokens are not the teacher's (for example {other[0]!r}). "
            "Use method guided or uld."
        )


class TeacherView:
    """A training order whose blocks also carry the teacher's tokens of the same text."""

    def __init__(
        self,
        order: TrainingOrder,
        tokenizer: TextTokenizer,
        prefix: Sequence[int],
        *,
        pairing: Pairing = "bytes",
        by_stretch: bool = False,
        with_text: bool = False,
    ):
        """`with_text`: blocks also carry the text and the spans in it, for targets."""
        self.with_text = with_text
        self.order = order
        self.tokenizer = tokenizer
        self.prefix = list(prefix)
        self.pairing: Pairing = pairing
        self.by_stretch = by_stretch

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Block:
        block = self.order[position]
        view: dict[str, Any]
        if self.order.blocks.conversations:
            assert isinstance(self.tokenizer, ChatTokenizer)
            view = conversation_view(
                self.order.blocks.conversation_texts(block["block"]),
                block["trained"],
                self.tokenizer,
                pairing=self.pairing,
                by_stretch=self.by_stretch,
            )
        else:
            text, spans = self.order.blocks.text(block["block"])
            view = teacher_view(
                text,
                spans,
                block["document"],
                self.tokenizer,
                self.prefix,
                pairing=self.pairing,
                by_stretch=self.by_stretch,
            )
        laid = view.pop("laid")
        return {**block, **view, **({"laid": laid} if self.with_text else {})}


@dataclass(frozen=True)
class LaidText:
    """A block's text with the tokens of both sides, on one axis of bytes."""

    text: NDArray[np.uint8]
    spans: NDArray[np.int64]
    """[L + 1, 2] Of the student's tokens."""
    teacher_spans: NDArray[np.int64]
    """[U, 2]"""
    begins: NDArray[np.int64]
    """Where the teacher begins to read a text."""


def teacher_view(
    text: bytes,
    spans: NDArray[np.int64],
    document: NDArray[np.int64],
    tokenizer: TextTokenizer,
    prefix: Sequence[int],
    *,
    pairing: Pairing = "bytes",
    by_stretch: bool = False,
) -> dict[str, Any]:
    """The teacher's tokens of a block and, per student token, the range that covers it (or, by
    stretch, its whole stretch) and the one teacher token that its prediction is compared with.

    Every document of the block is tokenised on its own, behind the teacher's own prefix (its BOS).
    A block may begin or end inside a character: those bytes are not text to the teacher.
    """
    ids: list[NDArray[Any]] = []
    teacher_spans: list[NDArray[Any]] = []
    owners: list[NDArray[Any]] = []
    of_text: list[NDArray[Any]] = []
    by_index = np.full(len(spans), -1, np.int64)
    before, begins = 0, []
    for number in np.unique(document):
        here = np.flatnonzero(document == number)
        own = spans[here]
        low, high = _whole_characters(text, int(own[0, 0]), int(own[-1, 1]))
        piece = tokenizer.spans(text[low:high].decode())
        begins.append(low)
        ids += [np.array(prefix, np.int64), piece.ids.astype(np.int64)]
        teacher_spans += [np.full((len(prefix), 2), low, np.int64), piece.spans + low]
        owners.append(np.full(len(prefix) + len(piece), number, np.int64))
        of_text.append(before + len(prefix) + np.arange(len(piece)))
        with_text = here[own[:, 0] < own[:, 1]][: len(piece)]
        by_index[with_text] = before + len(prefix) + np.arange(len(with_text))
        before += len(prefix) + len(piece)
    placed = np.concatenate(teacher_spans)
    alignment = align(spans, placed)
    pair = by_index
    if pairing == "bytes":
        starts = np.where(alignment.mapped, placed[alignment.first, 0], -1) if len(placed) else -1
        pair = np.where(alignment.mapped & (starts == spans[:, 0]), alignment.first, -1)
    view = {
        "teacher_ids": np.concatenate(ids),
        "teacher_document": np.concatenate(owners),
        "teacher_range": np.stack([alignment.first, alignment.last], axis=1),
        "teacher_pair": pair,
        "laid": LaidText(np.frombuffer(text, np.uint8), spans, placed, np.array(begins)),
    }
    if by_stretch:
        view |= _stretch_view(spans, placed, np.concatenate(of_text))
    return view


def conversation_view(
    conversations: Sequence[tuple[str, NDArray[np.int64]]],
    trained: NDArray[np.bool_],
    tokenizer: ChatTokenizer,
    *,
    pairing: Pairing = "bytes",
    by_stretch: bool = False,
) -> dict[str, Any]:
    """The same for a block of conversations, each in the teacher's template. Only tokens that are
    trained on meet the teacher's: as in blocks that are made from a store. `teacher_counts`: the
    teacher's tokens over what is trained on."""
    theirs = tokenizer.outcomes([text for text, _ in conversations])
    ids, owners, placed = [], [], [np.zeros((0, 2), np.int64)]
    spans = np.zeros((len(trained), 2), np.int64)
    pair = np.full(len(trained), -1, np.int64)
    tokens = before = origin = 0
    for number, ((text, own), found) in enumerate(zip(conversations, theirs, strict=True)):
        here = np.arange(tokens, tokens + len(own))
        spans[here] = own + origin
        if not isinstance(found, str):  # else its template refuses it: no guidance
            # what stands behind the last token of a conversation that was cut is not needed
            count = int(np.searchsorted(found.spans[:, 0], own[-1, 1], side="left"))
            ids.append(found.ids[:count].astype(np.int64))
            owners.append(np.full(count, number, np.int64))
            placed.append(found.spans[:count] + origin)
            with_text = np.flatnonzero(found.token_bytes[:count] > 0)
            ours = here[own[:, 0] < own[:, 1]][: len(with_text)]
            pair[ours] = before + with_text[: len(ours)]
            before += count
        tokens += len(own)
        origin += len(text.encode()) + 1
    spans[tokens:] = origin  # padding, behind all text
    laid = np.concatenate(placed)
    axis = b"\0".join(text.encode() for text, _ in conversations) + b"\0"
    view = _trained_view(
        ids, owners, laid, spans, np.flatnonzero(trained), pair, pairing, by_stretch
    )
    none = np.zeros(0, np.int64)  # a template stands before every content
    return {**view, "laid": LaidText(np.frombuffer(axis, np.uint8), spans, laid, none)}


def _trained_view(
    ids: list[NDArray[np.int64]],
    owners: list[NDArray[np.int64]],
    laid: NDArray[np.int64],
    spans: NDArray[np.int64],
    where: NDArray[np.int64],
    pair: NDArray[np.int64],
    pairing: Pairing,
    by_stretch: bool,
) -> dict[str, Any]:
    ours = spans[where]
    alignment = align(ours, laid)
    if pairing == "bytes":
        pair[:] = -1
        if len(laid):
            meets = alignment.mapped & (laid[alignment.first, 0] == ours[:, 0])
            pair[where] = np.where(meets, alignment.first, -1)
    ranges = np.full((len(spans), 2), -1, np.int64)
    ranges[where] = np.stack([alignment.first, alignment.last], axis=1)
    edges = np.zeros(len(laid) + 1, np.int64)
    np.add.at(edges, alignment.first[alignment.mapped], 1)
    np.add.at(edges, alignment.last[alignment.mapped] + 1, -1)
    counts = (np.cumsum(edges[:-1]) > 0) & (laid[:, 0] < laid[:, 1])
    none = np.zeros(0, np.int64)
    view: dict[str, Any] = {
        "teacher_ids": np.concatenate([none, *ids]),
        "teacher_document": np.concatenate([none, *owners]),
        "teacher_range": ranges,
        "teacher_pair": pair,
        "teacher_counts": counts.astype(np.int64),
    }
    if by_stretch:
        of_text = np.flatnonzero(laid[:, 0] < laid[:, 1])
        found = stretches(ours, laid[of_text])
        behind = stretch_alignment(found, laid[of_text])
        whole = ~np.isnan(
            unbroken(np.where(behind.mapped, 0.0, np.nan), behind.mapped & ~found.begins, where)
        )
        ranges = np.full((len(spans), 2), -1, np.int64)
        ranges[where[whole]] = of_text[np.stack([behind.first, behind.last], axis=1)[whole]]
        begins = np.ones(len(spans), np.int64)
        begins[where[whole & ~found.begins]] = 0  # every other token is a stretch of its own
        number = np.cumsum(begins)
        view |= {"teacher_range": ranges, "stretch": np.maximum(number - number[1], 0)}
    return view


def _stretch_view(
    spans: NDArray[np.int64], placed: NDArray[np.int64], of_text: NDArray[np.int64]
) -> dict[str, Any]:
    """The student's stretches, and the teacher tokens of each. `of_text`: the teacher's tokens
    without its prefixes."""
    found = stretches(spans, placed[of_text])
    theirs = stretch_alignment(found, placed[of_text])
    known = theirs.mapped
    whole, number = cut_stretches(
        np.where(known, 0.0, np.nan), known & ~found.begins, cut_at_end=False
    )
    ranges = np.full((len(spans), 2), -1, np.int64)
    kept = ~np.isnan(whole)
    ranges[kept] = of_text[np.stack([theirs.first, theirs.last], axis=1)[kept]]
    return {"teacher_range": ranges, "stretch": number}


def _whole_characters(text: bytes, low: int, high: int) -> tuple[int, int]:
    """The largest range inside `low..high` that does not cut a UTF-8 character."""
    while low < high and text[low] & 0xC0 == 0x80:
        low += 1
    end = high
    while end > low and text[end - 1] & 0xC0 == 0x80:
        end -= 1
    if end > low and text[end - 1] >= 0xC0:  # a lead byte: is its character complete?
        lead = text[end - 1]
        length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        return low, high if high - (end - 1) == length else end - 1
    return low, end


class OnlineTeacher:
    """A frozen causal LM beside the student."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: ObjectiveConfig,
        aggregation: Aggregation = "max",
        targets: TargetsPlan | None = None,
    ):
        """`targets`: what becomes of its alternatives, for distill."""
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.targets = targets
        self.aggregation: Aggregation = aggregation
        # where the head is not understood the model's own logits speak, at their price in memory
        self.form = head_form(model)

    def to(self, device: torch.device) -> None:
        self.model.to(device)

    @property
    def distils(self) -> bool:
        return self.config.rule.distribution

    @torch.no_grad()
    def guide(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """What the batch gains by the teacher, for the tokens that are predicted: `guidance`
        [B, T], and `entropy` [B, T] or `teacher_sums` [B, 2] where the objective reads them."""
        if "teacher_ids" not in inputs:  # one vocabulary: the teacher reads the student's ids
            wanted = self.config.entropy_keep is not None
            nll, entropy = self._losses(
                inputs["input_ids"], inputs.get("position_ids"), inputs["labels"], wanted
            )
            guidance = nll.masked_fill(inputs["labels"] == IGNORE_INDEX, torch.nan)
            found = {"guidance": guidance}
            if entropy is not None:
                found["entropy"] = entropy
            if self.config.by_stretch:  # every token is a stretch
                found["stretch"] = torch.arange(nll.shape[1], device=nll.device).expand_as(nll)
            return found
        ids, follows = inputs["teacher_ids"], inputs["teacher_follows"]
        # teacher token u is predicted at u - 1, where that is of the same text
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[:, :-1] = torch.where(follows[:, 1:], ids[:, 1:], IGNORE_INDEX)
        positions = inputs.get("teacher_position_ids")
        packed = None
        if self.targets is None:
            nll, _ = self._losses(ids, positions, labels)
        else:
            nll, packed = self._scores(ids, positions, labels, self.targets.spec)
        of_token = torch.full(ids.shape, torch.nan, device=ids.device)
        of_token[:, 1:] = torch.where(follows[:, 1:], nll[:, :-1].float(), torch.nan)
        ranges = inputs["teacher_range"].cpu().numpy()
        known = ~torch.isnan(of_token)
        if "teacher_counts" in inputs:  # what a template prints between contents is no part of them
            known &= inputs["teacher_counts"]
            blank = 0.0 if self.config.by_stretch else torch.nan
            of_token = of_token.masked_fill(~inputs["teacher_counts"], blank)
        values = of_token.cpu().numpy()
        carried = [self._carry(r, v) for r, v in zip(ranges, values, strict=True)]
        guidance = torch.from_numpy(np.stack(carried).astype(np.float32)).to(ids.device)
        total = torch.where(known, of_token.double(), 0.0).sum(1)
        found = {"guidance": guidance, "teacher_sums": torch.stack([total, known.sum(1)], dim=1)}
        if packed is not None:
            found |= self._carried_targets(inputs, follows, nll, packed)
        return found

    def _scores(
        self, ids: Tensor, position_ids: Tensor | None, labels: Tensor, spec: AlternativesSpec
    ) -> tuple[Tensor, Tensor]:
        """(nll [B, U], packed alternatives [B, U, K]) of what every position predicts."""
        flat = labels.flatten()
        if self.form is None:
            choice = AlternativeChoice.of(spec, len(flat), ids.device)

            def see(first: int, last: int, x: Tensor, losses: RowLosses) -> None:
                choice.choose(first, last, x, losses.lse_N, Transform())

            nll, _ = losses_through_logits(self.model, ids, labels, position_ids, see=see)
            return nll, choice.finish(flat).view(*ids.shape, -1)
        hidden = last_hidden(self.model, ids, position_ids).flatten(0, 1)
        head = self.form.head(self.model)
        found = token_scores(hidden, head, flat.clamp(min=0), alternatives=spec)
        assert found.packed_NK is not None
        return found.nll_N.view(ids.shape), found.packed_NK.view(*ids.shape, -1)

    def _carried_targets(
        self, inputs: dict[str, Any], follows: Tensor, nll: Tensor, packed: Tensor
    ) -> dict[str, Tensor]:
        """Targets of the tokens that are predicted, as blocks from a store hold them."""
        assert self.targets is not None
        labels, device = inputs["labels"].cpu().numpy(), nll.device
        losses, others = nll.float().cpu().numpy(), packed.cpu().numpy().view(np.uint32)
        known = follows.cpu().numpy()
        ids, probability = [], []
        for row, laid in enumerate(inputs["laid"]):
            count = len(laid.teacher_spans)
            # teacher token u is predicted at u - 1, where that is of the same text
            rows = np.full((count, others.shape[2]), NOTHING, np.uint32)
            values = np.full(count, np.nan, np.float32)
            where = np.flatnonzero(known[row, :count])
            rows[where], values[where] = others[row, where - 1], losses[row, where - 1]
            spans = laid.spans[1:]
            teacher = LaidTeacher(laid.teacher_spans, values, np.zeros(0), rows)
            found = carry_targets(
                np.maximum(labels[row], 0),
                Laid(spans, np.zeros(0, np.int64), laid.begins),
                [teacher],
                [align(spans, laid.teacher_spans)],
                laid.text,
                self.targets,
            )
            ids.append(found.ids)
            probability.append(found.probability)
        return {
            "target_ids": torch.from_numpy(np.stack(ids)).to(device),
            "target_p": torch.from_numpy(np.stack(probability)).to(device),
        }

    def _carry(self, ranges: NDArray[Any], nll: NDArray[Any]) -> NDArray[Any]:
        if self.config.by_stretch:
            return whole_sums(Alignment(ranges[:, 0], ranges[:, 1]), nll)
        if self.config.rule.unit == "chunk":
            return chunk_guidance(ranges, nll, self.config.n_chunks, self.aggregation)
        return carry(Alignment(ranges[:, 0], ranges[:, 1]), nll, self.aggregation)

    def _losses(
        self,
        ids: Tensor,
        position_ids: Tensor | None,
        labels: Tensor,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.form is None:
            return losses_through_logits(self.model, ids, labels, position_ids, with_entropy)
        hidden = last_hidden(self.model, ids, position_ids)
        return token_losses(hidden, self.form.head(self.model), labels, with_entropy=with_entropy)

    @torch.no_grad()
    def distribution(self, inputs: dict[str, Any]) -> Teacher:
        """The teacher's predictions for kld and uld. With two vocabularies they are compared where
        `teacher_pair` says (`objective.pairing`), if the teacher had something to predict from."""
        if "teacher_ids" not in inputs:
            return self._distribution(inputs["input_ids"], inputs.get("position_ids"), None)
        pair = inputs["teacher_pair"]
        follows = inputs["teacher_follows"].gather(1, pair.clamp(min=0))
        position = torch.where((pair >= 0) & follows, pair - 1, -1)
        return self._distribution(
            inputs["teacher_ids"], inputs.get("teacher_position_ids"), position
        )

    def _distribution(
        self, ids: Tensor, position_ids: Tensor | None, position_BT: Tensor | None
    ) -> Teacher:
        if self.form is None:
            where = {} if position_ids is None else {"position_ids": position_ids}
            logits = self.model(input_ids=ids, use_cache=False, **where).logits
            return Teacher(hidden=logits, head=None, position_BT=position_BT)
        head = self.form.head(self.model)
        hidden = last_hidden(self.model, ids, position_ids)
        return Teacher(hidden=hidden, head=head, position_BT=position_BT)
