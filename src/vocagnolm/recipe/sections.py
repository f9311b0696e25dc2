"""Every setting there is, one small class per stage: its type, default, limits and help text.

Recipes consist of these, the options of the command line are made from them, and the classes that
do the work (`ObjectiveConfig`, `ScoreSettings`, `Questions` ...) inherit from them. No torch here:
the command line reads this at its start, and `check` what an objective means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from vocagnolm.errors import SettingError
from vocagnolm.methods import CHOOSABLE_WEIGHTINGS, METHODS, UsesMethod
from vocagnolm.recipe.schema import Limits, OneOf, Schema, key

Attention = Literal[
    "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
]
HubKernel = Annotated[str, Limits(pattern=".+/.+")]
Device = Annotated[str, OneOf(("auto", "cpu", "cuda"))]
Dtype = Annotated[str, OneOf(("auto", "float32", "bfloat16", "float16"))]
ScoreDtype = Annotated[str, OneOf(("auto", "float32", "bfloat16", "float16", "fp8"))]
Format = Literal["auto", "text", "messages", "prompt_completion"]
Split = Literal["none", "blank_line", "line"]
KlDirection = Literal["forward", "reverse"]
Pairing = Literal["bytes", "index"]
Choices = Literal["generate", "likelihood"]
Protocol = Literal["strict", "paper"]

CHAT_TEMPLATE = (
    "conversations: a chat template: a Jinja file, a folder with one, plain (`role: content`), "
    "or concatenate (prompt and completion, which are texts, end to end)"
)
OWN_TEMPLATE = "the model's own, or plain where it has none"


class StudentSection(Schema):
    """The model that learns."""

    model: str | None = key("folder, hub id or GGUF file; leave out to start from `config`")
    config: dict[str, Any] | None = key(
        "from scratch: keys of a Hugging Face config, `model_type` first; random weights by seed"
    )
    tokenizer: str | None = key("folder, tokenizer.json or hub id; default: the model's own")
    revision: str | None = key("hub revision of the model")
    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: dict[str, Any] = key(
        "conversations: further variables of the template, for example enable_thinking: false", {}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "dtype of the weights; with train.bf16 the arithmetic is bfloat16 anyway", "float32"
    )
    attention: Attention | HubKernel | None = key(
        "attention implementation of transformers, or a kernel of the hub (owner/name); auto: "
        "transformers' choice, and on a GPU flex_attention where blocks hold documents apart; "
        "null: transformers' choice",
        "auto",
    )
    bits_per_byte: float | None = key(
        "its bits per byte on this kind of text, where they are known; otherwise `check` and "
        "`train` measure them, and warn of a teacher that is not clearly better",
        gt=0,
    )


class TeacherSection(Schema):
    """The model that guides. Scored once into a store, or held in memory (`online`)."""

    model: str | None = key("model folder, hub id (owner/name) or GGUF file")
    tokenizer: str | None = key("folder, tokenizer.json or hub id; default: the model's own")
    revision: str | None = key("hub revision of the model")
    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: dict[str, Any] = key(
        "conversations: further variables of the template, for example enable_thinking: false", {}
    )
    online: bool = key("hold the teacher in memory while training instead of using a store", False)
    dtype: Dtype = key("dtype of the teacher's weights when it is online", "auto")


class KeepDocuments(Schema):
    """Whole documents, chosen by what the teacher thinks of them."""

    by: Literal["difference", "bits_per_byte", "random"] = key(
        "difference: bits per byte of `against` minus the teacher's, the largest first (MiniPLM); "
        "bits_per_byte: the teacher's, the smallest first; random: a control",
        "difference",
    )
    share: float = key("share of the text that is kept, by bytes", 0.5, gt=0, le=1)
    against: str | None = key("difference: loss store of a small reference model")


class CorpusSection(Schema):
    """The documents. The same section serves `score` and `prepare`."""

    files: list[str] = key(
        "the documents: jsonl (.gz, .zst), parquet or text files, folders of those, addresses of "
        "these (s3://, gs://, hf://, https://), or hub datasets (owner/name, owner/name:split)",
        [],
        option="--corpus",
    )
    text_field: str = key("the field of a record that holds the text", "text", min_length=1)
    format: Format = key(
        "what a record holds: a text, or a conversation as `messages`, or as `prompt` and "
        "`completion`; auto: by the fields of the first",
        "auto",
    )
    split: Split = key(
        "a text file (.txt, .md, ...) is one document: none; or one for each blank_line between, "
        "or each line",
        "none",
    )
    limit_documents: int | None = key("read at most so many documents", ge=1)
    keep_documents: KeepDocuments | None = key(
        "train on the documents worth reading: `by` difference, bits_per_byte or random, `share`, "
        "`against`"
    )


class StoreSection(Schema):
    """The teacher's losses for this corpus, written by `vocagnolm score`."""

    path: str | list[str] | None = key(
        "folder of the loss store, or its address (s3://, gs://, az://, hf://datasets/OWNER/NAME); "
        "or a list of them, of several teachers; leave out for methods without a teacher"
    )
    combine: Literal["min", "mean", "median", "max", "best_document"] | None = key(
        "several stores: how their losses become one, token by token (stretch by stretch), or by "
        "the teacher with the fewest bits per byte on the document; null: min"
    )
    weights: list[float] | None = key(
        "distill, several stores: what each teacher's targets count; null: all the same"
    )


class DataSection(Schema):
    """Packing documents into blocks (`vocagnolm prepare`)."""

    blocks: str | None = key("folder for the packed blocks, or an address (s3://, gs://, az://)")
    cache: str | None = key(
        "blocks at an address: the local folder that they are copied to before training, once a "
        "machine; null: the user's cache folder"
    )
    block_size: int = key(
        "tokens that a block reads, and predicts: the sequence length", 2048, ge=2
    )
    document_mask: bool = key(
        "keep attention and positions inside one document; false: contiguous, as LitGPT packs; "
        "conversations are always kept apart",
        False,
    )
    train_on: Literal["assistant", "last", "all"] = key(
        "conversations: the messages that are trained on, with the ends of their turns: the "
        "assistant's, its last, or all; the others are context",
        "assistant",
    )
    bos: str | None = key(
        "token put before every document; auto: what the tokenizer puts there itself (a "
        "conversation's template does); null: none",
        "auto",
    )
    eos: str | None = key(
        "token put after every document; auto: the tokenizer's own; null: none", "auto"
    )
    missing: Literal["error", "drop", "keep"] = key(
        "documents that the store does not hold: stop, leave them out, or keep them unguided",
        "error",
    )
    extra_columns: list[Literal["text", "teacher_losses", "stretch", "targets"]] = key(
        "keep the text (for an online teacher), all teacher losses (for method chunk and unmapped: "
        "mean), the losses of stretches (for compare: stretch and alm) or the targets (for "
        "distill) although this recipe does not need them, so that other runs can share the blocks",
        [],
    )
    part_documents: int = key("documents in one part file; parts are made in parallel", 4096, ge=1)


class LossSection(UsesMethod, Schema):
    """What the loss itself reads of the objective."""

    method: Annotated[str, OneOf(METHODS)] = key("how the student is trained", "guided")
    compare: Literal["token", "stretch"] = key(
        "a token's loss against the teacher's loss carried to it, as published, or both models' "
        "losses of the smallest piece of text at whose ends both have a boundary",
        "token",
    )
    weighting: Annotated[str, OneOf(CHOOSABLE_WEIGHTINGS)] = key(
        "guided, distill, rho1: the top `keep` count and the rest does not, or every token counts "
        "by the share of its loss that the teacher shows to be reducible",
        "top_k",
    )
    floor: float = key("reducible: what a token counts at least", 0.2, ge=0, le=1)
    keep: float = key(
        "share of the tokens that are kept, by excess loss",
        unset="0.4, and all for distill",
        ge=0,
        le=1,
    )
    unmapped: Literal["include", "exclude", "mean"] = key(
        "tokens without guidance: always kept, never kept, or compete with the mean loss of the "
        "teacher's tokens",
        "include",
    )
    scope: Literal["sequence", "batch", "global"] = key(
        "the tokens that compete: of a sequence, of a device's micro-batch, or of the whole step",
        "batch",
    )
    normalise: Literal["all", "selected"] = key(
        "divide by all tokens (equation 3 as printed) or by the selected ones", "all"
    )
    mix: float = key(
        "distill: how far the targets are the teacher's instead of the text's; 0 is plain training",
        0.5,
        ge=0,
        le=1,
    )
    mix_end: float | None = key(
        "distill: the mix at the last step, which is reached linearly; null: it stays", ge=0, le=1
    )
    mix_hold: float = key(
        "distill: share of the run before the mix begins to change", 0.0, ge=0, lt=1
    )
    mix_by: Literal["constant", "reducible"] = key(
        "distill: the same mix for every token, or the mix times the share of its loss that the "
        "teacher shows to be reducible",
        "constant",
    )
    distill_weight: float = key(
        "kld, uld, uld_counted, alm: weight (lambda) of the distillation term", 0.5, ge=0
    )
    cross_entropy: float = key(
        "alm: weight of the cross entropy; 0: the distance alone, as published", 1.0, ge=0
    )
    temperature: float = key("alm: tau, probabilities are compared as p^(1/tau)", 100.0, gt=0)
    positive: bool = key("alm: cut off negative weights", False)
    kl_direction: KlDirection = key(
        "kld: forward is KL(teacher || student); reverse is KL(student || teacher), as equation 5 "
        "of the paper prints it",
        "forward",
    )
    entropy_keep: float | None = key(
        "rho1: share of the tokens, those of lowest teacher entropy, that may be selected",
        ge=0,
        le=1,
    )
    n_chunks: int = key("chunk: pieces per sequence", 16, ge=1)
    chunk_choice: Literal["teacher", "random"] = key(
        "chunk: pieces kept by excess over the teacher, or by chance", "teacher"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is None:  # so that a recipe that is written down says what was trained
            self.__dict__["keep"] = self.rule.keep


class ObjectiveConfig(LossSection, frozen=True):  # type: ignore[misc]  # the recipe's is not
    """One training objective: the keys of a recipe's `objective` that the loss reads, by the same
    names and with the same defaults, and a seed. The guidance itself (which teacher, max / mean /
    sum over the teacher's tokens) is decided before, when teacher losses are carried to student
    tokens.

    Of n tokens `keep * n` are kept, rounded half up, and at least 1 where `keep` and n are not 0;
    for chunk, of the chunks. reducible: a token counts `floor + (1 - floor) * max(0, 1 - T / S)`,
    by the student's loss S and the teacher's T; `keep` is not read. distill: the loss is the cross
    entropy against `(1 - mix) * label + mix * targets`, where the targets are the teacher's
    alternatives and the label has what they leave; `mix_by` reducible multiplies the mix with
    `max(0, 1 - T / S)`. rho1 with `entropy_keep`: `keep` stays a share of all mapped tokens, so
    that both variants train on equally many."""

    seed: int = key("random choices depend on (seed, step, sequence, position) alone", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting != "top_k" and not self.rule.by_excess:
            raise ValueError(f"weighting {self.weighting} belongs to guided, distill and rho1")
        if self.compare == "stretch" and not self.rule.guidance:
            raise ValueError(f"compare stretch needs a method with guidance, not {self.method}")
        if self.rule.weighting is not None and self.normalise == "selected":
            raise ValueError(
                f"{self.method} may have weights of both signs: normalise by all tokens"
            )
        if self.entropy_keep is not None:
            if not self.rule.entropy:
                raise ValueError(f"entropy_keep belongs to method rho1, not {self.method}")
            if not self.keep <= self.entropy_keep:
                raise ValueError(
                    f"entropy_keep must lie between keep ({self.keep}) and 1, "
                    f"got {self.entropy_keep}"
                )

    def at(self, progress: float) -> "ObjectiveConfig":
        """As it is after this share of a run, from 0 at the first step to 1 at the last."""
        if self.mix_end is None or not self.rule.alternatives:
            return self
        moved = max(0.0, progress - self.mix_hold) / (1.0 - self.mix_hold)
        return replace(self, mix=self.mix + (self.mix_end - self.mix) * moved, mix_end=None)

    @property
    def graded_by(self) -> str | None:
        """The weighting by which every token counts, as its own stretch decides; None: some tokens
        are chosen, and count alike."""
        if self.rule.weighting is not None:
            return self.rule.weighting
        return self.weighting if self.rule.selects and self.weighting != "top_k" else None

    @property
    def graded(self) -> bool:
        return self.graded_by is not None

    @property
    def reaches_over_step(self) -> bool:
        """The weights of a micro-batch depend on the other micro-batches and ranks of its step."""
        return self.scope == "global" and self._competes

    @property
    def depends_on_micro_batch(self) -> bool:
        """A step of other micro-batches would give its tokens other weights."""
        return self.scope == "batch" and self._competes

    @property
    def _competes(self) -> bool:
        """What a token counts depends on more than its own stretch."""
        return not self.selects_all and (not self.graded or self.unmapped == "mean")

    @property
    def counts_by_losses(self) -> bool:
        """What the loss is divided by is known only when the losses are."""
        whole_units = self.graded or self.by_stretch or self.rule.unit == "chunk"
        return self.normalise == "selected" and whole_units and not self.selects_all

    @property
    def selects_all(self) -> bool:
        """Every predicted token counts fully, whatever the losses are: no first phase needed."""
        if self.graded:
            return False
        if not self.rule.selects:
            return True
        return self.keep == 1.0 and self.unmapped != "exclude" and self.entropy_keep in (None, 1.0)


class ObjectiveSection(LossSection):
    """What is minimised. See docs/how-it-works.md for the equations."""

    aggregation: Literal["max", "mean", "sum"] = key(
        "Phi: how the losses of the teacher tokens behind one student token become one", "max"
    )
    alternatives: int | None = key(
        "distill: how many of the teacher's alternatives a token has; null: all that the store "
        "holds, and 4 of an online teacher",
        ge=1,
        le=64,
    )
    inside: bool = key(
        "distill: tokens that begin inside a teacher token have targets too: what goes on from the "
        "bytes already read",
        True,
    )
    pairing: Pairing = key(
        "uld: compare predictions of tokens that begin at the same byte, or the n-th with the n-th "
        "of a document, cut to the shorter, as its authors do",
        "bytes",
    )


class OptimizerSection(Schema):
    """AdamW with a warm-up and a cosine that ends at `min_learning_rate`."""

    name: str = key(
        "optimizer name as in transformers' TrainingArguments; adamw_torch is fused on a GPU",
        "adamw_torch",
    )
    learning_rate: float = key("peak learning rate", 8e-5, gt=0)
    min_learning_rate: float = key("learning rate at the last step", 8e-6, ge=0)
    warmup_steps: int = key("steps of linear warm-up", 0, ge=0)
    weight_decay: float = key("decoupled weight decay", 0.1, ge=0)
    beta1: float = key("AdamW's beta1", 0.9, ge=0, lt=1)
    beta2: float = key("AdamW's beta2", 0.95, ge=0, lt=1)
    max_grad_norm: float = key("gradients are clipped to this norm; 0: no clipping", 1.0, ge=0)


class LoraSection(Schema):
    """Low-rank adapters through peft (extra). The result is merged into an ordinary model."""

    rank: int = key("rank of the adapters; 0: train all weights", 0, ge=0)
    alpha: float = key("scale of the adapters (peft's lora_alpha)", 16.0, gt=0)
    dropout: float = key("dropout before the adapters", 0.0, ge=0, lt=1)
    targets: list[str] | str = key("module names to adapt, or all-linear", "all-linear")


class TrainSection(Schema):
    """The loop: how much, in which batches, in which arithmetic."""

    tokens: int | None = key("student tokens to train on; null: `epochs` decides", ge=1)
    epochs: float = key(
        "passes over the blocks when `tokens` is null; may be a fraction", 1.0, gt=0
    )
    batch_blocks: int = key("blocks in one optimizer step, over all devices", 64, ge=1)
    micro_batch: Annotated[int, Limits(ge=1)] | Literal["auto"] = key(
        "blocks on one device at a time; the rest is accumulation; auto: as many as make it "
        "faster, measured before the first step",
        8,
    )
    dtype: Literal["float32", "bfloat16", "fp8"] | None = key(
        "arithmetic; the weights stay in student.dtype. bfloat16: by autocast; fp8: as bfloat16, "
        "with the decoder's linear layers in e4m3 (H100 and newer); null: as `bf16` says"
    )
    bf16: bool = key("bfloat16 arithmetic (autocast)", False)
    gradient_checkpointing: bool = key("recompute activations to save memory", False)
    compile: bool = key("torch.compile each decoder layer", False)
    liger: bool = key("Liger's fused layers (extra, GPU)", False)
    parallel: Literal["ddp", "fsdp2", "hsdp"] = key(
        "how processes share the model: each has all of it, a shard of it, or a shard of its "
        "machine's copy (hsdp)",
        "ddp",
    )
    device: Literal["auto", "cpu"] = key("auto: the accelerator if there is one", "auto")
    router_loss: bool | None = key(
        "mixtures of experts: add the loss that balances them; null: as the student's "
        "configuration says (output_router_logits)"
    )
    loader_workers: int = key("processes that load blocks ahead", 0, ge=0)
    arguments: dict[str, Any] = key("further TrainingArguments of transformers, by name", {})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None:
            self.__dict__["bf16"] = self.dtype != "float32"


class RunSection(Schema):
    """Where the run lives and what it leaves behind."""

    folder: str | None = key("run folder: recipe, metrics, checkpoints, model")
    seed: int = key(
        "decides the order of the blocks, random selection and random weights", 0, ge=0, lt=2**32
    )
    save_every: int = key("steps between checkpoints; 0: only at the end", 500, ge=0)
    keep_checkpoints: int = key("newest complete checkpoints to keep", 2, ge=1)
    log_every: int = key(
        "steps between console and tracker lines; metrics.jsonl has every one", 10, ge=1
    )
    report_to: list[str] = key("trackers: tensorboard, wandb, trackio, ...", [])


class ScoreSection(Schema, frozen=True):
    """How a corpus is scored. None: chosen by model and device, and kept in the manifest."""

    device: Device = key("where the teacher runs", "auto")
    dtype: ScoreDtype = key(
        "auto: float32 on a CPU, the model's half precision on a GPU. fp8: all matrix products of "
        "decoder and head in e4m3, the rest in bfloat16, on Hopper and newer: faster, less memory, "
        "losses less exact",
        "auto",
    )
    context: int | None = key(
        "longest window in tokens", unset="2048, or the model's limit where that is less", ge=2
    )
    stride: int | None = key(
        "tokens of context that every token of a long document has at least",
        unset="context / 8",
        ge=1,
    )
    batch_tokens: int | None = key(
        "tokens in a batch, or in a request to a server", unset="16384, on a CPU 4096", ge=1
    )
    shard_documents: int = key(
        "documents in a shard: a run that is killed loses at most two unfinished shards", 1024, ge=1
    )
    bos: str = key("before every window: auto (as the tokenizer does), none, or a token", "auto")
    alternatives: int | str = key(
        "of every token also keep the teacher's K likeliest tokens at its place, 1 to 64, so that "
        "students of any vocabulary can be distilled from the store; sampled:K: K tokens drawn "
        "from its distribution. Four bytes each",
        0,
        unset="0; 4 for a recipe that distils",
        metavar="K",
    )
    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: Mapping[str, Any] = key(
        "conversations: a further variable of the template, name=value",
        {},
        option="--template-option",
    )
    compiled: bool | None = key(
        "compile the layers", unset="on a GPU", option="--compile/--no-compile"
    )
    threads: int | None = key(
        "threads on a CPU; the same for every process, since their number can change the last bit "
        "of a sum",
        unset="all, at most 16",
        ge=1,
        le=1024,
    )
    shard_teacher: Annotated[int, Limits(ge=1)] | Literal["auto"] = key(
        "GPUs of one machine that hold one teacher together, under torchrun or --ray; auto: as few "
        "as hold its weights",
        1,
        metavar="N",
    )
    strict: bool = key("stop at the first document that cannot be scored", False)
    max_nonfinite_share: float = key(
        "share of a shard's tokens that may be NaN or infinite before scoring stops",
        0.01,
        ge=0,
        le=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternatives != 0:
            from vocagnolm.alternatives import AlternativesSpec

            try:
                AlternativesSpec.parse(self.alternatives)
            except ValueError as error:
                raise SettingError(str(error)) from None


class ServerSection(Schema, frozen=True):
    """A server that has a model's weights, and how it is asked."""

    model: str | None = key(
        "the model, as the server calls it",
        unset="the only one it has",
        option="--server-model,--model",
    )
    requests: int = key(
        "requests of one process under way at a time", 4, option="--server-requests", ge=1
    )
    patience_seconds: float = key(
        "end when the server has been of no use for so many seconds",
        600.0,
        option="--server-patience",
        gt=0,
    )


class RaySection(Schema, frozen=True):
    """The workers of a Ray cluster."""

    workers: int | None = key(
        "workers of the Ray cluster",
        unset="as many as have room",
        option="--ray-workers",
        ge=1,
    )
    patience_seconds: float = key(
        "end when no worker has been alive for so many seconds",
        600.0,
        option="--ray-patience",
        gt=0,
    )


class QuestionsSection(Schema, frozen=True):
    """What a model is asked: some tasks, or a whole suite."""

    suite: str | None = key("a named set of tasks", unset="math, the paper's ten")
    tasks: str | Sequence[str] | None = key(
        "some tasks only, for example gsm8k,math500,mmlu_stem; math is all of MATH",
        option="--tasks,--task",
    )
    benchmarks: str | Path | None = key(
        "folder with the benchmarks' files", unset="they are downloaded"
    )
    limit: int | None = key("questions of each task, spread evenly: a quick look", ge=1)
    choices: Choices = key(
        "multiple choice by a generated answer, or by the likelihood of the options (for small "
        "models)",
        "generate",
    )
    protocol: Protocol = key(
        "paper: the prompts, the 1,024 tokens and the grading of the paper's harness, as far as "
        "they can be had",
        "strict",
    )
    chat: bool = key(
        "the benchmarks as conversations in the model's own template, worked examples as turns",
        False,
        option="--chat",
    )
    shots: int | None = key(
        "with --chat: worked examples; 0: none", unset="the task's own number", ge=0
    )
    max_new_tokens: int | None = key(
        "shorter answers, in tokens", unset="the task's own, 256 or 512; paper: 1,024", ge=1
    )


class EngineSection(Schema, frozen=True):
    """How the model that is asked runs."""

    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: Mapping[str, Any] = key(
        "conversations: a further variable of the template, name=value, for example "
        "enable_thinking=false",
        {},
        option="--template-option",
    )
    batch_size: int | None = key(
        "prompts at a time, or in a request to a server",
        unset="32, by memory on a GPU",
        ge=1,
    )
    device: Device = key("where the model runs", "auto")
    dtype: Dtype = key("auto: float32 on a CPU, the model's half precision on a GPU", "auto")
    revision: str | None = key("branch, tag or commit of a hub model")
    trust_remote_code: bool = key("run Python code that a model brings", False)
