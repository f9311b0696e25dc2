"""A language model's last linear layer, as the objective and the scorer see it."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from vocagnolm.objective.rows import Transform


@dataclass(frozen=True, kw_only=True)
class Head:
    """A language model's last linear layer: `logits = softcap(scale * (hidden @ weight.T + bias))`.

        head = Head(weight=model.lm_head.weight)                # Llama, Qwen, Mistral, ...
        head = Head(weight=model.lm_head.weight, softcap=30.0)  # Gemma 2
        head.logits(hidden)                                     # [..., V]: the model's own

    Pass the model's parameter itself: `objective_loss` gives it its gradient. `weight` may be tied
    to the embedding: the gradient of the head is then added to the embedding's as usual. It must
    be an ordinary tensor on the hidden states' device. Under FSDP2 the parameter is a sharded
    DTensor outside the root module's forward: call the objective from inside that forward (where
    the root's parameters are gathered), so that FSDP's own hooks reduce the gradient.
    """

    weight: Tensor
    """[V, D]. Rows beyond the tokenizer (padding of the embedding) count in the softmax, as they
    do in transformers; labels never point there."""
    bias: Tensor | None = None
    """[V] or None."""
    softcap: float | None = None
    """Gemma's soft cap: `cap * tanh(logits / cap)`."""
    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    vocabulary_size: int | None = None
    """Number of rows the tokenizer can produce; None: all of them. Only kld reads it."""

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise ValueError(f"Head.weight must be [vocabulary, hidden], got {self.weight.shape}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"Head.bias must be [{self.weight.shape[0]}], got {list(self.bias.shape)}"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"Head.softcap must be positive or None, got {self.softcap}")

    @property
    def rows(self) -> int:
        """Tokens that the distribution is over: those of the tokenizer where that is known."""
        return self.vocabulary_size or self.weight.shape[0]

    @property
    def transform(self) -> Transform:
        return Transform(self.bias, self.softcap, self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V], fp32 unless the model is fp64: all of them at once."""
        return self.transform(linear(hidden, self.weight))
