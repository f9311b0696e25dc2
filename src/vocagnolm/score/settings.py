"""How a corpus is scored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vocagnolm.alternatives import AlternativesSpec

DEFAULT_CONTEXT = 2048
CUDA_BATCH_TOKENS = 16384
CPU_BATCH_TOKENS = 4096
SERVER_REQUEST_TOKENS = 16384
MOST_THREADS = 16
# Below this a stride gives hardly any context; an eighth of the window costs at most 1/7 more work.
STRIDE_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that has a teacher's weights, and how it is asked. The key, where it wants one, is
    in the environment of every process that asks."""

    url: str
    model: str | None = None
    """As the server calls it; the only one it has."""
    requests: int = 4
    """Under way at a time, by one process."""
    patience_seconds: float = 600.0
    """So long a server may be silent or broken before the run ends."""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests must be at least 1, not {self.requests}")
        if not self.patience_seconds > 0:
            raise ValueError(f"patience_seconds must be above 0, not {self.patience_seconds}")


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Settings of `vocagnolm score`. None means: chosen by model and device, and written down in
    the manifest."""

    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto (float32 on a CPU, the model's half precision on a GPU), float32, bfloat16, float16, or
    fp8: the products of decoder and head in e4m3, the rest in bfloat16, on Hopper and newer."""
    context: int | None = None
    """Longest window in tokens; 2048, or less where the model ends earlier."""
    stride: int | None = None
    """Tokens of context that every token of a long document has at least; context / 8."""
    batch_tokens: int | None = None
    """Tokens that pass through the model together, or in one request to a server; 16384, on a CPU
    4096."""
    shard_documents: int = 1024
    """Documents of the corpus in a shard: when a run is killed, the one that is scored is lost, and
    the one before it while it is still being written."""
    bos: str = "auto"
    """Before every window: auto (what the tokenizer itself adds), none, or a token's string."""
    chat_template: str | None = None
    """Conversations: a Jinja file, a folder with one, or plain; the model's own."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Conversations: further variables of the template."""
    alternatives: int | str = 0
    """Of every token also keep so many of the teacher's likeliest tokens at its place, for
    distillation (`4`), or so many drawn from its distribution (`sampled:4`)."""
    compiled: bool | None = None
    """Compile the layers; on a GPU."""
    threads: int | None = None
    """Threads on a CPU; all there are, at most 16. Their number can change the last bit of a sum,
    so it is the same however many processes share the work."""
    shard_teacher: int | Literal["auto"] = 1
    """GPUs of one machine that hold one teacher together, under torchrun; auto: as few as hold its
    weights."""
    strict: bool = False
    """Stop at the first document that cannot be scored, instead of counting it."""
    max_nonfinite_share: float = 0.01
    """Share of a shard's tokens that may be NaN or infinite before scoring stops."""

    def __post_init__(self) -> None:
        for name in (
            *("context", "stride", "batch_tokens", "shard_documents", "threads", "shard_teacher"),
        ):
            value = getattr(self, name)
            if value not in (None, "auto") and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.max_nonfinite_share <= 1:
            raise ValueError(
                f"max_nonfinite_share must be from 0 to 1, not {self.max_nonfinite_share}"
            )
        AlternativesSpec.parse(self.alternatives)

    @property
    def kept_alternatives(self) -> AlternativesSpec | None:
        return AlternativesSpec.parse(self.alternatives)
