"""-log p of every token of every document, in the order and shapes of a fixed plan."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.errors import ModelError
from vocagnolm.model.arriving import Arriving
from vocagnolm.model.compiled import compile_layers
from vocagnolm.model.fp8 import Fp8Linear, head_to_fp8
from vocagnolm.model.lm_head import head_form, last_hidden
from vocagnolm.model.sharding import VocabularyPart
from vocagnolm.model.windows import Batch, plan_batches
from vocagnolm.objective import IGNORE_INDEX, two_phase
from vocagnolm.objective.head import Head
from vocagnolm.objective.rows import TORCH_ROWS, Transform, row_operations

# float32 logits alive at a time. On a CPU a tile should stay near the caches; on a GPU it must be
# large enough to keep the matrix units busy.
_CPU_TILE_BYTES = 32 * 2**20
_CUDA_TILE_BYTES = 1280 * 2**20
# Batches that a device has before it while the host makes the next: it must never run dry.
_BATCHES_AHEAD = 3


@torch.no_grad()
def token_nll(
    hidden_ND: torch.Tensor,
    head: Head,
    labels_N: torch.Tensor,
    *,
    chunk: int | None = None,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """-log p(label) of every token, float32 [N], without the logits of the whole batch: they are
    made `chunk` tokens at a time, in float32 whatever the inputs are (bfloat16 logits would cost
    up to 0.08 nats). `part`: the head has some rows of the vocabulary only, other processes have
    the others."""
    work = two_phase.Workspace.of(
        hidden_ND, head, row_operations("auto", hidden_ND), hidden_ND.dtype, widen=False
    )
    if chunk is None and (hidden_ND.is_cuda or hidden_ND.dtype == torch.float32):
        chunk = _tile_tokens(head.weight.shape[0], hidden_ND.is_cuda)
    if part is None:
        return two_phase.token_losses(work, labels_N, chunk=chunk).nll_N
    losses = two_phase.token_losses(work, part.local(labels_N), chunk=chunk)
    return part.combine(losses.nll_N, losses.lse_N, labels_N)


def _tile_tokens(rows: int, on_gpu: bool) -> int:
    if on_gpu:  # whole tiles of the matrix kernels
        return max(1, _CUDA_TILE_BYTES // (4 * rows) // 256) * 256
    return max(1, _CPU_TILE_BYTES // (4 * rows))


class NllModel:
    """A causal language model and the plan by which it reads documents.

    Every window starts with `prefix_ids` (beginning-of-text), also inside a long document: models
    that were trained with such a token lean on it. Without a prefix the first token of a document
    has nothing before it and stays NaN.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        context: int,
        stride: int,
        batch_tokens: int,
        prefix_ids: Sequence[int] = (),
        compiled: bool = False,
        fp8_head: bool = False,
    ):
        """`fp8_head`: exchange the model's head by one in fp8, where it is understood."""
        room = context - len(prefix_ids)
        if not 1 <= stride < room:
            raise ValueError(f"stride must be from 1 to {room - 1}, not {stride}")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, not {batch_tokens}")
        self.model = model
        self.context = context
        self.stride = stride
        self.batch_tokens = batch_tokens
        self.prefix_ids = tuple(prefix_ids)
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary_rows = int(embeddings.weight.shape[0])
        # A model whose head we do not know scores through its own logits, a row at a time.
        self.form = head_form(model)
        self.part = None if self.form is None else VocabularyPart.of(model)
        if fp8_head and self.form is not None:
            head_to_fp8(model)
        self._full_rows = max(1, batch_tokens // context)
        self._warm = True
        if compiled:
            self._warm = not compile_layers(model, (self._full_rows, context))

    def plan(self, token_counts: Sequence[int]) -> list[Batch]:
        return plan_batches(
            token_counts,
            context=self.context,
            stride=self.stride,
            prefix_tokens=len(self.prefix_ids),
            batch_tokens=self.batch_tokens,
        )

    def document_nll(
        self,
        documents: Sequence[np.ndarray],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[np.ndarray]:
        """float32 nll in nats for the token ids of every document; NaN where there is no context.
        `on_tokens` is told how many tokens are under way, batch by batch."""
        return self.start(documents, on_tokens)()

    @torch.inference_mode()
    def start(
        self,
        documents: Sequence[np.ndarray],
        on_tokens: Callable[[int], None] | None = None,
    ) -> Callable[[], list[np.ndarray]]:
        """The same in two steps: when this returns, the last batches are on their way through the
        device, and the function it returns waits for them, in any thread."""
        largest = max((int(ids.max(initial=0)) for ids in documents), default=0)
        if largest >= self.vocabulary_rows:
            raise ModelError(
                f"token id {largest} is outside the model's {self.vocabulary_rows:,} embedding "
                "rows: the tokenizer does not belong to this model."
            )
        self.warm_up()
        batches = self.plan([len(ids) for ids in documents])
        arriving: list[Arriving] = []
        for batch in batches:
            if len(arriving) >= _BATCHES_AHEAD:
                arriving[-_BATCHES_AHEAD].numpy()
            arriving.append(Arriving(self.batch_nll(batch, documents)))
            if on_tokens is not None:
                on_tokens(sum(w.stop - w.first_scored for w in batch.windows))
        counts = [len(ids) for ids in documents]
        return lambda: self._placed(batches, arriving, counts)

    def _placed(
        self, batches: Sequence[Batch], arriving: Sequence[Arriving], counts: Sequence[int]
    ) -> list[np.ndarray]:
        nll = [np.full(count, np.nan, np.float32) for count in counts]
        for batch, values in zip(batches, arriving, strict=True):
            flat = values.numpy()
            for window in batch.windows:
                first = max(window.first_scored, window.start + self._first_target)
                count = window.stop - first
                nll[window.document][first : window.stop] = flat[:count]
                flat = flat[count:]
        return nll

    @property
    def _first_target(self) -> int:
        """A window's first token has a predecessor only where a prefix stands before it."""
        return 0 if self.prefix_ids else 1

    def batch_nll(self, batch: Batch, documents: Sequence[np.ndarray]) -> torch.Tensor:
        """nll of the scored tokens of a batch, window after window, on the model's device."""
        prefix = len(self.prefix_ids)
        input_ids = np.zeros((len(batch.windows), batch.row_tokens), np.int64)
        input_ids[:, :prefix] = self.prefix_ids
        positions, labels = [], []
        for row, window in enumerate(batch.windows):
            ids = documents[window.document]
            input_ids[row, prefix : prefix + len(window)] = ids[window.start : window.stop]
            first = max(window.first_scored, window.start + self._first_target)
            # the hidden state before a token predicts it
            before = row * batch.row_tokens + prefix - window.start - 1
            positions.append(np.arange(first, window.stop) + before)
            labels.append(ids[first : window.stop])
        device = self.model.device
        return self.rows_nll(
            _sent(input_ids, device),
            _sent(np.concatenate(positions), device),
            _sent(np.concatenate(labels).astype(np.int64), device),
        )

    def rows_nll(
        self, input_ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """nll of `labels` [N] as predicted at the flat `positions` [N] of `input_ids` [B, T]."""
        if self.form is None:
            targets = torch.full_like(input_ids, IGNORE_INDEX).flatten()
            targets[positions] = labels
            nll, _ = losses_through_logits(self.model, input_ids, targets.view(input_ids.shape))
            return nll.flatten()[positions]
        hidden = last_hidden(self.model, input_ids).flatten(0, 1)
        if len(positions) != len(hidden):
            hidden = hidden[positions]
        head: Any = self.model.get_output_embeddings()
        if isinstance(head, Fp8Linear):
            chunk = _tile_tokens(self.vocabulary_rows, hidden.is_cuda)
            return head.token_nll(hidden, labels, self.form.transform(head.bias), chunk)
        return token_nll(hidden, self.form.head(self.model), labels, part=self.part)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Once, before the first documents. The graph for all other shapes is made for one example,
        whatever comes first; and a device loads its kernels when they are first used."""
        if self._warm:
            return
        self._warm = True
        shape = (self._full_rows + 1, max(2, self.context // 2))
        zeros = torch.zeros(shape, dtype=torch.int64, device=self.model.device)
        positions = torch.arange(zeros.numel(), device=self.model.device)
        Arriving(self.rows_nll(zeros, positions, zeros.flatten())).numpy()


def _sent(values: np.ndarray, device: torch.device) -> Tensor:
    """On the device, in its own time: from ordinary memory the host would wait until the device
    has done all before it."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def losses_through_logits(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    labels_BT: Tensor,
    position_ids_BT: Tensor | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(nll, entropy or None) [B, T] for heads that are not understood: a row at a time through the
    model's own logits; 0 where the label is ignored."""
    nll, entropy = [], []
    for row, labels in enumerate(labels_BT):
        one = slice(row, row + 1)
        where = {} if position_ids_BT is None else {"position_ids": position_ids_BT[one]}
        logits = model(input_ids=input_ids_BT[one], use_cache=False, **where).logits[0]
        losses = TORCH_ROWS.losses(logits, labels.clamp(min=0), Transform(), with_entropy)
        nll.append(torch.where(labels >= 0, losses.nll_N, 0.0))
        entropy.append(losses.entropy_N)
    found = [e for e in entropy if e is not None]
    return torch.stack(nll), torch.stack(found) if found else None
