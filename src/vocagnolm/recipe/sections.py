"""The sections of a recipe: one small dataclass per stage, every key with its help text.

No torch here: a recipe is read by the command line, by `check` and by programs that only look.
"""
# ruff: noqa: RUF009  (`key` is `dataclasses.field` with the help text first)

from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["cpt", "guided", "kld", "uld", "rho1", "random", "chunk", "no_teacher"]


def key(help_text: str, default: Any = None) -> Any:
    """A recipe key. Mutable defaults are copied per recipe."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help_text})
    return field(default=default, metadata={"help": help_text})


@dataclass(kw_only=True)
class StudentSection:
    """The model that learns."""

    model: str | None = key("folder, hub id or GGUF file; leave out to start from `config`")
    config: dict[str, Any] | None = key(
        "from scratch: keys of a Hugging Face config, `model_type` first; random weights by seed"
    )
    tokenizer: str | None = key("folder, tokenizer.json or hub id; default: the model's own")
    revision: str | None = key("hub revision of the model")
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "dtype of the weights; with train.bf16 the arithmetic is bfloat16 anyway", "float32"
    )
    attention: str | None = key("attention implementation of transformers; default: its choice")
    bits_per_byte: float | None = key(
        "what `vocagnolm evaluate --text` gave for it on this kind of text; `check` then warns "
        "of a teacher that is not clearly better"
    )


@dataclass(kw_only=True)
class TeacherSection:
    """The model that guides. Scored once into a store, or held in memory (`online`)."""

    model: str | None = key("folder, hub id or GGUF file")
    tokenizer: str | None = key("folder, tokenizer.json or hub id; default: the model's own")
    revision: str | None = key("hub revision of the model")
    online: bool = key("hold the teacher in memory while training instead of using a store", False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "dtype of the teacher's weights when it is online", "auto"
    )


@dataclass(kw_only=True)
class CorpusSection:
    """The documents. The same section serves `score` and `prepare`."""

    files: list[str] = key(
        "jsonl, jsonl.gz, jsonl.zst, parquet, text, folders or a hub dataset", []
    )
    text_field: str = key("the field that holds the text", "text")
    limit_documents: int | None = key("read only so many documents")


@dataclass(kw_only=True)
class StoreSection:
    """The teacher's losses for this corpus, written by `vocagnolm score`."""

    path: str | None = key("folder of the loss store; leave out for methods without a teacher")


@dataclass(kw_only=True)
class DataSection:
    """Packing documents into blocks (`vocagnolm prepare`)."""

    blocks: str | None = key("folder for the packed blocks")
    block_size: int = key("tokens in a block: the student's sequence length", 2048)
    document_mask: bool = key(
        "keep attention and positions inside one document; false: contiguous, as LitGPT packs",
        False,
    )
    bos: str | None = key(
        "token put before every document; auto: what the tokenizer puts there itself; null: none",
        "auto",
    )
    eos: str | None = key(
        "token put after every document; auto: the tokenizer's own; null: none", "auto"
    )
    missing: Literal["error", "drop", "keep"] = key(
        "documents that the store does not hold: stop, leave them out, or keep them unguided",
        "error",
    )
    extra_columns: list[Literal["text", "teacher_losses"]] = key(
        "keep the text (for an online teacher) or all teacher losses (for method chunk) although "
        "this recipe does not need them, so that other runs can share the blocks",
        [],
    )
    part_documents: int = key("documents in one part file; parts are made in parallel", 4096)


@dataclass(kw_only=True)
class ObjectiveSection:
    """What is minimised. See docs/how-it-works.md for the equations."""

    method: Method = key("cpt, guided, kld, uld, rho1, random, chunk or no_teacher", "guided")
    keep: float = key("share of the tokens that are kept, by excess loss", 0.4)
    aggregation: Literal["max", "mean", "sum"] = key(
        "Phi: how the losses of the teacher tokens behind one student token become one", "max"
    )
    unmapped: Literal["include", "exclude", "mean"] = key(
        "tokens without guidance: always kept, never kept, or compete with the mean guidance",
        "include",
    )
    scope: Literal["sequence", "batch", "global"] = key(
        "the tokens that compete: of a sequence, of a device's micro-batch, or of the whole step",
        "batch",
    )
    normalise: Literal["all", "selected"] = key(
        "divide by all tokens (equation 3 as printed) or by the selected ones", "all"
    )
    distill_weight: float = key("kld and uld: weight (lambda) of the distillation term", 0.5)
    entropy_keep: float | None = key(
        "rho1: share of the tokens, those of lowest teacher entropy, that may be selected"
    )
    n_chunks: int = key("chunk: pieces per sequence", 16)
    chunk_choice: Literal["teacher", "random"] = key(
        "chunk: pieces kept by excess over the teacher, or by chance", "teacher"
    )


@dataclass(kw_only=True)
class OptimizerSection:
    """AdamW with a warm-up and a cosine that ends at `min_learning_rate`."""

    name: str = key("optimizer name as in transformers' TrainingArguments", "adamw_torch")
    learning_rate: float = key("peak learning rate", 8e-5)
    min_learning_rate: float = key("learning rate at the last step", 8e-6)
    warmup_steps: int = key("steps of linear warm-up", 0)
    weight_decay: float = key("decoupled weight decay", 0.1)
    beta1: float = key("AdamW's beta1", 0.9)
    beta2: float = key("AdamW's beta2", 0.95)
    max_grad_norm: float = key("gradients are clipped to this norm; 0: no clipping", 1.0)


@dataclass(kw_only=True)
class LoraSection:
    """Low-rank adapters through peft (extra). The result is merged into an ordinary model."""

    rank: int = key("rank of the adapters; 0: train all weights", 0)
    alpha: float = key("scale of the adapters (peft's lora_alpha)", 16.0)
    dropout: float = key("dropout before the adapters", 0.0)
    targets: list[str] | str = key("module names to adapt, or all-linear", "all-linear")


@dataclass(kw_only=True)
class TrainSection:
    """The loop: how much, in which batches, in which arithmetic."""

    tokens: int | None = key("student tokens to train on; null: `epochs` decides")
    epochs: float = key("passes over the blocks when `tokens` is null; may be a fraction", 1.0)
    batch_blocks: int = key("blocks in one optimizer step, over all devices", 64)
    micro_batch: int = key("blocks on one device at a time; the rest is accumulation", 8)
    bf16: bool = key("bfloat16 arithmetic (autocast)", False)
    gradient_checkpointing: bool = key("recompute activations to save memory", False)
    compile: bool = key("torch.compile each decoder layer", False)
    liger: bool = key("Liger's fused layers (extra, GPU)", False)
    parallel: Literal["ddp", "fsdp2"] = key("how several processes share the model", "ddp")
    device: Literal["auto", "cpu"] = key("auto: the accelerator if there is one", "auto")
    loader_workers: int = key("processes that load blocks ahead", 0)
    arguments: dict[str, Any] = key("further TrainingArguments of transformers, by name", {})


@dataclass(kw_only=True)
class RunSection:
    """Where the run lives and what it leaves behind."""

    folder: str | None = key("run folder: recipe, metrics, checkpoints, model")
    seed: int = key("decides the order of the blocks, random selection and random weights", 0)
    save_every: int = key("steps between checkpoints; 0: only at the end", 500)
    keep_checkpoints: int = key("newest complete checkpoints to keep", 2)
    log_every: int = key("steps between console and tracker lines; metrics.jsonl has every one", 10)
    report_to: list[str] = key("trackers: tensorboard, wandb, trackio, ...", [])


SECTIONS: dict[str, type] = {
    "student": StudentSection,
    "teacher": TeacherSection,
    "corpus": CorpusSection,
    "store": StoreSection,
    "data": DataSection,
    "objective": ObjectiveSection,
    "optimizer": OptimizerSection,
    "lora": LoraSection,
    "train": TrainSection,
    "run": RunSection,
}
