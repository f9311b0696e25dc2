"""A teacher held in memory: it reads the same text as the block, aligned on the fly.

Two halves. `TeacherView` is data: it tokenises a block's text with the teacher's tokenizer and
aligns it, in the loader's processes. `OnlineTeacher` is the model: it turns that view into
guidance (guided, rho1, chunk), into targets (distill) or into hidden states to compare
distributions with (kld, uld).
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
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
    stretch_alignment,
    stretches,
    token_texts,
)
from vocagnolm.alignment.alignment import Aggregation
from vocagnolm.alternatives import NOTHING, AlternativesSpec
from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.blocks import Block, TrainingOrder
from vocagnolm.data.guidance import (
    CarryRule,
    Laid,
    LaidTeacher,
    TargetsPlan,
    carry_losses,
    carry_targets,
    cut_stretches,
    target_table,
    unbroken,
)
from vocagnolm.data.materials import student_chat, teacher_chat, teacher_tokenizer
from vocagnolm.errors import TrainingError
from vocagnolm.model import open_model
from vocagnolm.model.nll import AlternativeChoice, losses_through_logits, token_scores
from vocagnolm.model.runtime import head_form, last_hidden
from vocagnolm.objective import IGNORE_INDEX, ObjectiveConfig, Pairing, Teacher, token_losses
from vocagnolm.objective.head import RowLosses, Transform
from vocagnolm.recipe import Recipe
from vocagnolm.train.settings import objective_config, uses_accelerator

ONLINE_ALTERNATIVES = 4
_CONTINUATION = bytes(range(0x80, 0xC0))
"""The bytes of a UTF-8 character but its first."""


def online_teacher(
    recipe: Recipe, order: TrainingOrder, student: TextTokenizer
) -> "tuple[OnlineTeacher, TrainingOrder | TeacherView]":
    """A recipe's teacher, and the blocks as it needs them. `student`: the tokenizer."""
    if recipe.teacher.model is None:
        raise TrainingError(
            f"Method {recipe.objective.method} needs an online teacher: set teacher.model."
        )
    dtype = recipe.teacher.dtype
    if dtype == "auto":  # half precision beside a student on an accelerator
        dtype = "bfloat16" if uses_accelerator(recipe) else "float32"
    revision = recipe.teacher.revision
    files = open_model(recipe.teacher.model, device="cpu", dtype=dtype, revision=revision)
    tokenizer, conversations = teacher_tokenizer(recipe), order.blocks.conversations
    by_text = recipe.needs_block_text
    reader = teacher_chat(recipe, tokenizer) if conversations and by_text else tokenizer
    targets = None
    if recipe.needs_targets:  # as from a store: the same table, the same rounding
        ends = set(files.end_ids)
        if isinstance(reader, ChatTokenizer) and reader.end_of_turn is not None:
            ends.add(reader.end_of_turn)
        eos = order.blocks.manifest["settings"]["eos"]
        ours = student_chat(recipe, student) if conversations else student
        targets = TargetsPlan(
            tables=(target_table(ours, token_texts(tokenizer, ends), eos),),
            spec=AlternativesSpec(recipe.objective.alternatives or ONLINE_ALTERNATIVES),
            inside=recipe.objective.inside,
            weights=(1.0,),
        )
    teacher = OnlineTeacher(
        files.load(),
        config=objective_config(recipe),
        aggregation=recipe.objective.aggregation,
        targets=targets,
    )
    if not by_text:
        refuse_other_vocabulary(student.vocabulary, tokenizer.vocabulary)
        return teacher, order
    view = TeacherView(
        order,
        reader,
        reader.prefix_ids,
        pairing=recipe.objective.pairing,
        by_stretch=recipe.needs_stretches,
        with_text=recipe.needs_targets,
    )
    return teacher, view


def refuse_other_vocabulary(student: dict[str, int], teacher: dict[str, int]) -> None:
    """kld and rho1 presuppose one vocabulary; the teacher may have more tokens (Llemma's 16)."""
    other = [token for token, index in student.items() if teacher.get(token) != index]
    if other:
        raise TrainingError(
            f"This method needs one vocabulary, but {len(other):,} of the student's "
            f"{len(student):,} tokens are not the teacher's (for example {other[0]!r}). "
            "Use method guided or uld."
        )


@dataclass(frozen=True)
class TeacherView:
    """A training order whose blocks also carry the teacher's tokens of the same text."""

    order: TrainingOrder
    tokenizer: TextTokenizer
    prefix: Sequence[int]
    _: KW_ONLY
    pairing: Pairing = "bytes"
    by_stretch: bool = False
    with_text: bool = False
    """Blocks also carry the text and the spans in it, for targets."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Block:
        block, blocks = self.order[position], self.order.blocks
        how: dict[str, Any] = {"pairing": self.pairing, "by_stretch": self.by_stretch}
        if blocks.conversations:
            assert isinstance(self.tokenizer, ChatTokenizer)
            texts = blocks.conversation_texts(block["block"])
            view = conversation_view(texts, block["trained"], self.tokenizer, **how)
        else:
            text, spans = blocks.text(block["block"])
            view = teacher_view(text, spans, block["document"], self.tokenizer, self.prefix, **how)
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
    """Indices of the teacher's tokens with which it begins to read a text."""


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
    ids, owners, placed, of_text, begins = [], [], [], [], []
    pair = np.full(len(spans), -1, np.int64)
    before = 0
    for number in np.unique(document):
        here = np.flatnonzero(document == number)
        own = spans[here]
        inside = text[own[0, 0] : own[-1, 1]].lstrip(_CONTINUATION)
        low = int(own[-1, 1]) - len(inside)
        piece = tokenizer.spans(inside.decode(errors="ignore"))
        if len(piece):
            begins.append(before + len(prefix))
        ids += [np.array(prefix, np.int64), piece.ids.astype(np.int64)]
        placed += [np.full((len(prefix), 2), low, np.int64), piece.spans + low]
        owners.append(np.full(len(prefix) + len(piece), number, np.int64))
        of_text.append(before + len(prefix) + np.arange(len(piece)))
        with_text = here[own[:, 0] < own[:, 1]][: len(piece)]
        pair[with_text] = before + len(prefix) + np.arange(len(with_text))
        before += len(prefix) + len(piece)
    laid, where = np.concatenate(placed), np.arange(len(spans))
    view = _aligned_view(spans, where, laid, pair, pairing)
    if by_stretch:
        view |= _stretch_view(spans, where, laid, np.concatenate(of_text))
    return {
        "teacher_ids": np.concatenate(ids),
        "teacher_document": np.concatenate(owners),
        **view,
        "laid": LaidText(np.frombuffer(text, np.uint8), spans, laid, np.array(begins, np.int64)),
    }


def conversation_view(
    conversations: Sequence[tuple[str, NDArray[np.int64]]],
    trained: NDArray[np.bool_],
    tokenizer: ChatTokenizer,
    *,
    pairing: Pairing = "bytes",
    by_stretch: bool = False,
) -> dict[str, Any]:
    """What the teacher reads for a block of conversations, each in its own template. Only tokens
    that are trained on meet the teacher's, like in blocks that are made from a store.
    `teacher_counts`: the teacher's tokens over what is trained on."""
    theirs = tokenizer.outcomes([text for text, _ in conversations])
    none = np.zeros(0, np.int64)
    ids, owners, placed = [none], [none], [np.zeros((0, 2), np.int64)]
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
    laid, where = np.concatenate(placed), np.flatnonzero(trained)
    view = _aligned_view(spans, where, laid, pair, pairing)
    of_text = laid[:, 0] < laid[:, 1]
    ranges = view["teacher_range"][view["teacher_range"][:, 0] >= 0]
    begun = np.bincount(ranges[:, 0], minlength=len(laid) + 1)
    ended = np.bincount(ranges[:, 1] + 1, minlength=len(laid) + 1)
    counts = (np.cumsum(begun - ended)[:-1] > 0) & of_text
    if by_stretch:
        view |= _stretch_view(spans, where, laid, np.flatnonzero(of_text))
    axis = b"\0".join(text.encode() for text, _ in conversations) + b"\0"
    return {
        "teacher_ids": np.concatenate(ids),
        "teacher_document": np.concatenate(owners),
        **view,
        "teacher_counts": counts.astype(np.int64),
        # `none`: a template stands before every content
        "laid": LaidText(np.frombuffer(axis, np.uint8), spans, laid, none),
    }


def _aligned_view(
    spans: NDArray[np.int64],
    where: NDArray[np.int64],
    laid: NDArray[np.int64],
    pair: NDArray[np.int64],
    pairing: Pairing,
) -> dict[str, Any]:
    """The teacher's tokens for the student's tokens at `where`; the others meet none. `pair`: the
    partners where `pairing` is "index"."""
    ours = spans[where]
    alignment = align(ours, laid)
    if pairing == "bytes":
        pair = np.full(len(spans), -1, np.int64)
        if len(laid):
            meets = alignment.mapped & (laid[alignment.first, 0] == ours[:, 0])
            pair[where] = np.where(meets, alignment.first, -1)
    ranges = np.full((len(spans), 2), -1, np.int64)
    ranges[where] = np.stack([alignment.first, alignment.last], axis=1)
    return {"teacher_range": ranges, "teacher_pair": pair}


def _stretch_view(
    spans: NDArray[np.int64],
    where: NDArray[np.int64],
    laid: NDArray[np.int64],
    of_text: NDArray[np.int64],
) -> dict[str, Any]:
    """The student's stretches, and the teacher tokens of each. `of_text`: the teacher's tokens
    without its prefixes or its template."""
    found = stretches(spans[where], laid[of_text])
    theirs = stretch_alignment(found, laid[of_text])
    goes_on = theirs.mapped & ~found.begins
    known = unbroken(np.where(theirs.mapped, 0.0, np.nan), goes_on, where)
    losses, inner = np.full(len(spans), np.nan), np.zeros(len(spans), bool)
    losses[where], inner[where] = known, goes_on & ~np.isnan(known)
    losses, number = cut_stretches(losses, inner, cut_at_end=False)
    whole = ~np.isnan(losses[where])
    ranges = np.full((len(spans), 2), -1, np.int64)
    ranges[where[whole]] = of_text[np.stack([theirs.first, theirs.last], axis=1)[whole]]
    return {"teacher_range": ranges, "stretch": number}


class OnlineTeacher:
    """A frozen causal LM that runs next to the student."""

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
        self.rule = CarryRule.of(config, aggregation)
        # where the head is not understood the model's own logits speak, at their price in memory
        self.form = head_form(model)

    def to(self, device: torch.device) -> None:
        self.model.to(device)

    @property
    def distils(self) -> bool:
        return self.config.rule.distance is not None

    @torch.no_grad()
    def guide(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The teacher's columns for the predicted tokens of a batch: `guidance` [B, T], and
        `entropy` [B, T] or `teacher_sums` [B, 2] if the objective needs them."""
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
        carried = [
            carry_losses(Alignment(r[:, 0], r[:, 1]), v, self.rule)
            for r, v in zip(ranges, values, strict=True)
        ]
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

            def on_chunk(first: int, last: int, x: Tensor, losses: RowLosses) -> None:
                choice.choose(first, last, x, losses.lse_N, Transform())

            nll, _ = losses_through_logits(self.model, ids, labels, position_ids, on_chunk=on_chunk)
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
            teacher = LaidTeacher(laid.teacher_spans, values, np.zeros(0), rows, laid.begins)
            found, _ = carry_targets(
                np.maximum(labels[row], 0),
                Laid(spans, np.zeros(0, np.int64), np.zeros(0, np.int64)),
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

    def _losses(
        self, ids: Tensor, position_ids: Tensor | None, labels: Tensor, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if self.form is None:
            return losses_through_logits(self.model, ids, labels, position_ids, with_entropy)
        hidden = last_hidden(self.model, ids, position_ids)
        return token_losses(hidden, self.form.head(self.model), labels, with_entropy=with_entropy)

    @torch.no_grad()
    def distribution(self, inputs: dict[str, Any]) -> Teacher:
        """The teacher's predictions for kld and uld. With two vocabularies they are compared
        according to `teacher_pair` (`objective.pairing`), if the teacher had context to predict
        from."""
        ids, where, position = inputs["input_ids"], inputs.get("position_ids"), None
        if "teacher_ids" in inputs:
            ids, where = inputs["teacher_ids"], inputs.get("teacher_position_ids")
            pair = inputs["teacher_pair"]
            follows = inputs["teacher_follows"].gather(1, pair.clamp(min=0))
            position = torch.where((pair >= 0) & follows, pair - 1, -1)
        if self.form is None:
            options = {} if where is None else {"position_ids": where}
            logits = self.model(input_ids=ids, use_cache=False, **options).logits
            return Teacher(hidden=logits, head=None, position_BT=position)
        hidden = last_hidden(self.model, ids, where)
        return Teacher(hidden=hidden, head=self.form.head(self.model), position_BT=position)
