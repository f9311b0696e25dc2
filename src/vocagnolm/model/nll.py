"""-log p of every token of every document, in the order and shapes of a fixed plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from vocagnolm.errors import ModelError
from vocagnolm.model.compiled import compile_layers
from vocagnolm.model.head import token_nll
from vocagnolm.model.windows import Batch, plan_batches

_PROBE_TOKENS = 16


@dataclass(frozen=True)
class Head:
    """The last step of a model, from hidden states to logits."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_of(model: PreTrainedModel) -> Head:
    """Read the head off a model: softcap (Gemma), scale (Cohere multiplies, Granite divides)."""
    config: Any = model.config.get_text_config()
    linear: Any = model.get_output_embeddings()
    scale = 1.0
    for name, power in (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1)):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            scale *= float(value) ** power
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(linear.weight, getattr(linear, "bias", None), softcap or None, scale)


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
    ):
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
        self._head = head_of(model)
        # A model whose head we do not know scores through its own logits, a row at a time.
        self._through_logits = not self._head_is_right()
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

    @torch.inference_mode()
    def document_nll(
        self,
        documents: Sequence[np.ndarray],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[np.ndarray]:
        """float32 nll in nats for the token ids of every document; NaN where there is no context.
        `on_tokens` is told how many tokens were scored, batch by batch."""
        largest = max((int(ids.max(initial=0)) for ids in documents), default=0)
        if largest >= self.vocabulary_rows:
            raise ModelError(
                f"token id {largest} is outside the model's {self.vocabulary_rows:,} embedding "
                "rows: the tokenizer does not belong to this model."
            )
        nll = [np.full(len(ids), np.nan, np.float32) for ids in documents]
        self._warm_up()
        # The numbers stay on the device until all batches are under way: no waiting in between.
        pending: list[tuple[Batch, torch.Tensor]] = []
        for batch in self.plan([len(ids) for ids in documents]):
            pending.append((batch, self.batch_nll(batch, documents)))
            if on_tokens is not None:
                on_tokens(sum(w.stop - w.first_scored for w in batch.windows))
        for batch, values in pending:
            flat = values.cpu().numpy()
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
            torch.from_numpy(input_ids).to(device),
            torch.from_numpy(np.concatenate(positions)).to(device),
            torch.from_numpy(np.concatenate(labels).astype(np.int64)).to(device),
        )

    def rows_nll(
        self, input_ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """nll of `labels` [N] as predicted at the flat `positions` [N] of `input_ids` [B, T]."""
        if self._through_logits:
            return self._nll_through_logits(input_ids, positions, labels)
        hidden = self._hidden(input_ids).flatten(0, 1)
        if len(positions) != len(hidden):
            hidden = hidden[positions]
        head = self._head
        return token_nll(
            hidden,
            head.weight,
            labels,
            bias=head.bias,
            softcap=head.softcap,
            scale=head.scale,
        )

    def _hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        backbone: Any = self.model.base_model
        # Rows are padded on the right only, so causal attention needs no mask: without one the
        # fastest kernels apply.
        return backbone(input_ids=input_ids, use_cache=False).last_hidden_state

    def _nll_through_logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        row_tokens = input_ids.shape[1]
        nll = torch.empty(len(labels), dtype=torch.float32, device=input_ids.device)
        for row in range(len(input_ids)):
            here = (positions // row_tokens == row).nonzero().squeeze(1)
            logits = self.model(input_ids=input_ids[row : row + 1], use_cache=False).logits[0]
            log_p = torch.log_softmax(logits[positions[here] % row_tokens].float(), dim=-1)
            nll[here] = -log_p.gather(1, labels[here, None]).squeeze(1)
        return nll

    @torch.inference_mode()
    def _head_is_right(self) -> bool:
        """Ours against the model's own logits on a few tokens: architectures end in many ways."""
        ids = np.random.default_rng(0).integers(0, self.vocabulary_rows, (1, _PROBE_TOKENS))
        probe = torch.from_numpy(ids).to(self.model.device)
        own = self.model(input_ids=probe, use_cache=False).logits.float()
        try:
            ours = self._head.logits(self._hidden(probe))
        except (AttributeError, RuntimeError, TypeError):
            return False
        if own.shape != ours.shape:
            return False
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 2e-2
        return bool((own - ours).abs().max() <= tolerance * own.abs().max().clamp(min=1e-6))

    def _warm_up(self) -> None:
        """The graph for all other shapes is made for one example, whatever comes first."""
        if self._warm:
            return
        self._warm = True
        shape = (self._full_rows + 1, max(2, self.context // 2))
        self._hidden(torch.zeros(shape, dtype=torch.int64, device=self.model.device))
