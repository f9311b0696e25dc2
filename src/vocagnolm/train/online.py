"""A teacher held in memory: it reads the same text as the block, aligned on the fly.

Two halves. `TeacherView` is data: it tokenises a block's text with the teacher's tokenizer and
aligns it, in the loader's processes. `OnlineTeacher` is the model: it turns that view into
guidance (guided, rho1, chunk) or into hidden states to compare distributions with (kld, uld).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.align import Alignment, TextTokenizer, align, carry
from vocagnolm.align.alignment import Aggregation
from vocagnolm.data.blocks import Block, TrainingOrder
from vocagnolm.data.packing import chunk_guidance
from vocagnolm.objective import IGNORE_INDEX, ObjectiveConfig, Teacher, token_losses
from vocagnolm.train.forward import last_hidden, objective_head


class TeacherView:
    """A training order whose blocks also carry the teacher's tokens of the same text."""

    def __init__(self, order: TrainingOrder, tokenizer: TextTokenizer, prefix: Sequence[int]):
        self.order = order
        self.tokenizer = tokenizer
        self.prefix = list(prefix)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Block:
        block = self.order[position]
        text, spans = self.order.blocks.text(block["block"])
        return {
            **block,
            **teacher_view(text, spans, block["document"], self.tokenizer, self.prefix),
        }


def teacher_view(
    text: bytes,
    spans: NDArray[np.int64],
    document: NDArray[np.int64],
    tokenizer: TextTokenizer,
    prefix: Sequence[int],
) -> dict[str, Any]:
    """The teacher's tokens of a block and, per student token, the range that covers it.

    Every document of the block is tokenised on its own, behind the teacher's own prefix (its BOS).
    A block may begin or end inside a character: those bytes are not text to the teacher.
    """
    ids: list[NDArray[Any]] = []
    teacher_spans: list[NDArray[Any]] = []
    owners: list[NDArray[Any]] = []
    for number in np.unique(document):
        own = spans[document == number]
        low, high = _whole_characters(text, int(own[0, 0]), int(own[-1, 1]))
        piece = tokenizer.spans(text[low:high].decode())
        ids += [np.array(prefix, np.int64), piece.ids.astype(np.int64)]
        teacher_spans += [np.full((len(prefix), 2), low, np.int64), piece.spans + low]
        owners.append(np.full(len(prefix) + len(piece), number, np.int64))
    placed = np.concatenate(teacher_spans)
    alignment = align(spans, placed)
    starts = np.where(alignment.mapped, placed[alignment.first, 0], -1) if len(placed) else -1
    return {
        "teacher_ids": np.concatenate(ids),
        "teacher_document": np.concatenate(owners),
        "teacher_range": np.stack([alignment.first, alignment.last], axis=1),
        "teacher_same_start": alignment.mapped & (starts == spans[:, 0]),
    }


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
        vocabulary_size: int | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.aggregation = aggregation
        self.head = objective_head(model, vocabulary_size)

    def to(self, device: torch.device) -> None:
        self.model.to(device)
        self.head = objective_head(self.model, self.head.vocabulary_size)

    @property
    def distils(self) -> bool:
        return self.config.method in ("kld", "uld")

    @torch.no_grad()
    def guide(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """(guidance, entropy or None), both [B, T] and shifted like the labels."""
        if "teacher_ids" not in inputs:  # one vocabulary: the teacher reads the student's ids
            hidden = self._hidden(inputs["input_ids"], inputs.get("position_ids"))
            wanted = self.config.entropy_keep is not None
            nll, entropy = token_losses(hidden, self.head, inputs["labels"], with_entropy=wanted)
            ignored = inputs["labels"] == IGNORE_INDEX
            return nll.masked_fill(ignored, torch.nan), entropy
        ids = inputs["teacher_ids"]
        hidden = self._hidden(ids, inputs.get("teacher_position_ids"))
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[:, :-1] = ids[:, 1:]
        nll, _ = token_losses(hidden, self.head, labels)
        # teacher token u is predicted at u - 1; the first has nothing before it
        by_token = np.full(ids.shape, np.nan, np.float32)
        by_token[:, 1:] = nll[:, :-1].float().cpu().numpy()
        ranges = inputs["teacher_range"].cpu().numpy()
        carried = np.stack(
            [self._carry(r, v) for r, v in zip(ranges, by_token, strict=True)]
        ).astype(np.float32)
        guidance = np.full(carried.shape, np.nan, np.float32)
        guidance[:, :-1] = carried[:, 1:]
        return torch.from_numpy(guidance).to(ids.device), None

    def _carry(self, ranges: NDArray[Any], nll: NDArray[Any]) -> NDArray[Any]:
        if self.config.method == "chunk":
            by_position = chunk_guidance(ranges, nll, self.config.n_chunks)
            return np.concatenate([by_position[:1], by_position[:-1]])
        return carry(Alignment(ranges[:, 0], ranges[:, 1]), nll, self.aggregation)

    @torch.no_grad()
    def distribution(self, inputs: dict[str, Any]) -> Teacher:
        """Hidden states for kld and uld. With two vocabularies the two predictions are compared
        where both models stand at the same place in the text: the student's token and the
        teacher's first token behind it begin at the same byte."""
        if "teacher_ids" not in inputs:
            hidden = self._hidden(inputs["input_ids"], inputs.get("position_ids"))
            return Teacher(hidden=hidden, head=self.head)
        hidden = self._hidden(inputs["teacher_ids"], inputs.get("teacher_position_ids"))
        first = inputs["teacher_range"][..., 0]
        before = torch.where(inputs["teacher_same_start"] & (first > 0), first - 1, -1)
        position = torch.full_like(before, -1)
        position[:, :-1] = before[:, 1:]
        return Teacher(hidden=hidden, head=self.head, position_BT=position)

    def _hidden(self, ids: Tensor, position_ids: Tensor | None) -> Tensor:
        return last_hidden(self.model, ids, position_ids)
