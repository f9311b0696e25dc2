"""Every setting there is, one small class per stage: its type, default, limits and help text.

Recipes consist of these, the options of the command line are made from them, and the classes that
do the work (`ObjectiveConfig`, `ScoreSettings`, `Questions` ...) inherit from them. No torch here:
the command line reads this at its start, and `check` what an objective means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vocagnolm.errors import SettingError
from vocagnolm.recipe.methods import (
    CHOOSABLE_WEIGHTINGS,
    DIVERGENCES,
    METHODS,
    Divergence,
    Method,
)
from vocagnolm.recipe.schema import REQUIRED, Limits, OneOf, Schema, key

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
Grading = Literal["number", "mixed", "math", "choice"]

CHAT_TEMPLATE = (
    "chat template for conversations: a Jinja file, a folder with one, plain (`role: content`), "
    "or concatenate (joins a prompt and a completion that are strings)"
)
OWN_TEMPLATE = "the model's own, or plain if it has none"


class StudentSection(Schema):
    """The model to train."""

    model: str | None = key("model folder, hub id or GGUF file; omit it to start from `config`")
    config: dict[str, Any] | None = key(
        "start from random weights: keys of a Hugging Face config, including `model_type`"
    )
    tokenizer: str | None = key(
        "tokenizer folder, tokenizer.json or hub id; default: the model's own"
    )
    revision: str | None = key("hub revision of the model")
    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: dict[str, Any] = key(
        "conversations: more variables for the template, for example enable_thinking: false", {}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "dtype of the weights; train.dtype sets that of the arithmetic", "float32"
    )
    attention: Attention | HubKernel | None = key(
        "attention implementation of transformers, or a kernel from the hub (owner/name); null: "
        "transformers' default; auto: the same, but flex_attention on a GPU if documents in a "
        "block are masked from each other",
        "auto",
    )
    bits_per_byte: float | None = key(
        "the student's bits per byte on this kind of text, if known; otherwise `check` and "
        "`train` measure them; used to warn about a teacher that is not clearly better",
        gt=0,
    )


class TeacherSection(Schema):
    """The teacher: it scores the corpus once into a store, or stays in memory (`online`)."""

    model: str | None = key("model folder, hub id (owner/name) or GGUF file")
    tokenizer: str | None = key(
        "tokenizer folder, tokenizer.json or hub id; default: the model's own"
    )
    revision: str | None = key("hub revision of the model")
    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: dict[str, Any] = key(
        "conversations: more variables for the template, for example enable_thinking: false", {}
    )
    online: bool = key("keep the teacher in memory during training instead of using a store", False)
    dtype: Dtype = key("dtype of the teacher's weights when it is online, or in rounds", "auto")
    system: str | None = key("rounds: system message for the teacher, which the student never sees")
    examples: str | None = key(
        "rounds: file with worked examples, earlier turns for the teacher, which the student never "
        "sees"
    )
    server: str | list[str] | None = key(
        "rounds: address of a vLLM or SGLang server that runs the teacher, or several; its "
        "tokenizer is read from `model`"
    )


class KeepDocuments(Schema):
    """Selects whole documents by the teacher's losses."""

    by: Literal["difference", "bits_per_byte", "random"] = key(
        "difference: bits per byte of `against` minus the teacher's, largest first (MiniPLM); "
        "bits_per_byte: the teacher's, smallest first; random: a control",
        "difference",
    )
    share: float = key("share of the text to keep, by bytes", 0.5, gt=0, le=1)
    against: str | None = key("difference: the loss store of a small reference model")


class CorpusSection(Schema):
    """The documents, for both `score` and `prepare`."""

    files: list[str] = key(
        "jsonl (.gz, .zst), parquet or text files, folders, addresses (s3://, gs://, hf://, "
        "https://) or hub datasets (owner/name, owner/name:split)",
        [],
        option="--corpus",
    )
    text_field: str = key("field of a record that contains the text", "text", min_length=1)
    format: Format = key(
        "content of a record: a text, or a conversation in the field `messages` or in `prompt` "
        "and `completion`; auto: decided by the fields of the first record",
        "auto",
    )
    split: Split = key(
        "how to split a text file (.txt, .md, ...) into documents: not at all, at blank lines, or "
        "at every line",
        "none",
    )
    limit_documents: int | None = key("maximum number of documents to read", ge=1)
    answers: Literal["all", "right"] = key(
        "folders that a teacher wrote: train on all answers, or only on those that `write --grade` "
        "has marked as right",
        "all",
    )
    keep_documents: KeepDocuments | None = key(
        "train on selected documents only; keys: `by` (difference, bits_per_byte or random), "
        "`share`, `against`"
    )


class StoreSection(Schema):
    """The teacher's losses on this corpus, written by `vocagnolm score`."""

    path: str | list[str] | None = key(
        "folder or address of the loss store (s3://, gs://, az://, hf://datasets/OWNER/NAME), or a "
        "list of them for several teachers; omit it for methods without a teacher"
    )
    combine: Literal["min", "best_document"] | None = key(
        "several stores: which loss to use for each token or stretch; min: the smallest; "
        "best_document: that of the teacher with the fewest bits per byte on the document; null: "
        "min"
    )
    weights: list[float] | None = key(
        "distill with several stores: the weight of each teacher's targets; null: equal weights"
    )


class NamedCorpusSection(CorpusSection):
    """One of several corpora, by its name: `corpora: {web: {...}, answers: {...}}`. It has the keys
    of `corpus`, and these."""

    share: float = key(
        "how much of the run this corpus is, by blocks, in relation to the shares of the others: "
        "0.7 and 0.3 say the same as 7 and 3",
        REQUIRED,
        gt=0,
    )
    store: StoreSection = key(
        "the teacher's losses on this corpus, with the keys of `store`; omit it to train on the "
        "corpus plainly",
        StoreSection,
    )


class DataSection(Schema):
    """Packing documents into blocks (`vocagnolm prepare`)."""

    blocks: str | None = key("folder for the packed blocks, or an address (s3://, gs://, az://)")
    cache: str | None = key(
        "remote blocks: the local folder to copy them to before training, once per machine; "
        "null: the user's cache folder"
    )
    block_size: int = key(
        "sequence length: the number of tokens that a block reads and predicts", 2048, ge=2
    )
    document_mask: bool = key(
        "restrict attention and positions to one document; false: contiguous packing, as in "
        "LitGPT; conversations are always separate",
        False,
    )
    train_on: Literal["assistant", "last", "all"] = key(
        "conversations: which messages to train on, with the ends of their turns: those of the "
        "assistant, its last one, or all; the others are context",
        "assistant",
    )
    bos: str | None = key(
        "token before every document; auto: what the tokenizer adds itself (for conversations: "
        "the template); null: none",
        "auto",
    )
    eos: str | None = key(
        "token after every document; auto: the tokenizer's own; null: none", "auto"
    )
    missing: Literal["error", "drop", "keep"] = key(
        "what to do with documents missing from the store: stop, drop them, or keep them unguided",
        "error",
    )
    extra_columns: list[Literal["text", "teacher_losses", "stretch", "targets"]] = key(
        "columns for other runs that share the blocks: the text (for an online teacher), all "
        "teacher losses (for method chunk and unmapped: mean), the losses of stretches (for "
        "compare: stretch and alm) or the targets (for distill)",
        [],
    )
    part_documents: int = key("documents per part file; parts are written in parallel", 4096, ge=1)


class LossSection(Schema):
    """The settings of the objective that the loss itself uses."""

    method: Annotated[str, OneOf(METHODS)] = key("how the student is trained", "guided")
    compare: Literal["token", "stretch"] = key(
        "what to compare: the losses of a token, as published, or of a stretch, the smallest "
        "piece of text at whose ends both tokenizations have a boundary",
        "token",
    )
    weighting: Annotated[str, OneOf(CHOOSABLE_WEIGHTINGS)] = key(
        "guided, distill, rho1: top_k: the top `keep` have weight 1, the others 0; reducible: "
        "weight every token by the share of its loss that the teacher shows to be reducible",
        "top_k",
    )
    floor: float = key("reducible: the smallest weight of a token", 0.2, ge=0, le=1)
    keep: float = key(
        "share of the tokens to keep, by excess loss", unset="0.4; for distill all", ge=0, le=1
    )
    unmapped: Literal["include", "exclude", "mean"] = key(
        "tokens without guidance: always kept, never kept, or compared with the teacher's mean "
        "loss",
        "include",
    )
    scope: Literal["sequence", "batch", "global"] = key(
        "tokens compete to be kept within a sequence, a device's micro-batch, or the whole step",
        "batch",
    )
    normalise: Literal["all", "selected"] = key(
        "divide the loss by all tokens (equation 3 of the paper) or by the selected ones", "all"
    )
    mix: float = key(
        "distill: weight of the teacher's targets against the text; 0 is plain training",
        0.5,
        ge=0,
        le=1,
    )
    mix_end: float | None = key(
        "distill: the mix at the last step, reached linearly; null: constant", ge=0, le=1
    )
    mix_hold: float = key(
        "distill: fraction of the run before the mix begins to change", 0.0, ge=0, lt=1
    )
    mix_by: Literal["constant", "reducible"] = key(
        "distill: the same mix for every token, or multiplied by the share of the token's loss "
        "that the teacher shows to be reducible",
        "constant",
    )
    distill_weight: float = key(
        "kld, uld, alm: weight (lambda) of the distillation term", 0.5, ge=0
    )
    cross_entropy: float = key(
        "alm: weight of the cross entropy; 0: only the distance, as published", 1.0, ge=0
    )
    temperature: float = key("alm: tau; probabilities are compared as p^(1/tau)", 100.0, gt=0)
    positive: bool = key("alm: clip negative weights to 0", False)
    kl_direction: KlDirection = key(
        "kld: forward is KL(teacher || student); reverse is KL(student || teacher), as in equation "
        "5 of the paper",
        "forward",
    )
    entropy_keep: float | None = key(
        "rho1: select only among this share of the tokens, those with the lowest teacher entropy",
        ge=0,
        le=1,
    )
    n_chunks: int = key("chunk: number of chunks per sequence", 16, ge=1)
    chunk_choice: Literal["teacher", "random"] = key(
        "chunk: keep chunks by excess over the teacher, or at random", "teacher"
    )
    divergence: Annotated[str, OneOf(DIVERGENCES)] = key(
        "on_policy: forward is KL(teacher || student), reverse KL(student || teacher), both over "
        "the teacher's alternatives and everything else as one; sampled_token estimates the "
        "reverse one by the tokens that the student drew",
        "reverse",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is None:  # so that a recipe that is written down says what was trained
            self.__dict__["keep"] = self.rule.keep

    @property
    def rule(self) -> Method:
        return METHODS[self.method]

    @property
    def towards(self) -> Divergence | None:
        """What an on-policy method minimizes; None for all others."""
        return DIVERGENCES[self.divergence] if self.rule.on_policy else None

    @property
    def by_stretch(self) -> bool:
        weighs_stretches = self.towards is not None and self.towards.weighting is not None
        return self.compare == "stretch" or self.rule.by_stretch or weighs_stretches

    @property
    def by_chance(self) -> bool:
        """No teacher is asked, whatever the method is called."""
        return self.rule.unit == "chunk" and self.chunk_choice == "random"


class ObjectiveConfig(LossSection, frozen=True):  # type: ignore[misc]  # the recipe's is not
    """A training objective: the keys of a recipe's `objective` that the loss uses, with the same
    names and defaults, and a seed. The guidance itself (which teacher, and max, mean or sum over
    its tokens) is decided earlier, when teacher losses are assigned to student tokens.

    Of n tokens (for chunk: of n chunks), `keep * n` are kept, rounded half up, and at least 1 if
    `keep` and n are not 0. reducible: a token has weight `floor + (1 - floor) * max(0, 1 - T / S)`,
    with the student's loss S and the teacher's T; `keep` is not used. distill: the loss is the
    cross entropy against `(1 - mix) * label + mix * targets`, where the targets are the teacher's
    alternatives and the label gets the rest; `mix_by` reducible multiplies the mix by `max(0, 1 - T
    / S)`. rho1 with `entropy_keep`: `keep` stays a share of all mapped tokens, so that both
    variants train on the same number. on_policy: the mean of `divergence` over the tokens that the
    student drew and the teacher can judge."""

    seed: int = key("random choices depend on (seed, step, sequence, position) alone", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting != "top_k" and not self.rule.by_excess:
            raise ValueError(f"weighting {self.weighting} belongs to guided, distill and rho1")
        if self.compare == "stretch" and not self.rule.guidance:
            raise ValueError(f"compare stretch needs a method with guidance, not {self.method}")
        own_weighting = self.rule.weighting or (self.towards and self.towards.weighting)
        if own_weighting and self.normalise == "selected":
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
        """The objective after this fraction of a run, from 0 at the first step to 1 at the last."""
        if self.mix_end is None or not self.rule.alternatives:
            return self
        moved = max(0.0, progress - self.mix_hold) / (1.0 - self.mix_hold)
        return replace(self, mix=self.mix + (self.mix_end - self.mix) * moved, mix_end=None)

    @property
    def graded_by(self) -> str | None:
        """The weighting that gives every token a weight based on its own stretch; None: some tokens
        are selected and have equal weights."""
        if self.towards is not None:
            return self.towards.weighting
        return self.rule.weighting or (None if self.weighting == "top_k" else self.weighting)

    @property
    def graded(self) -> bool:
        return self.graded_by is not None

    @property
    def reaches_over_step(self) -> bool:
        """Whether the weights of a micro-batch depend on the other micro-batches and ranks of its
        step."""
        return self.scope == "global" and self._competes

    @property
    def depends_on_micro_batch(self) -> bool:
        """Whether a different micro-batch size would change the weights of the tokens."""
        return self.scope == "batch" and self._competes

    @property
    def _competes(self) -> bool:
        """What a token counts depends on more than its own stretch."""
        return not self.selects_all and (not self.graded or self.unmapped == "mean")

    @property
    def counts_by_losses(self) -> bool:
        """Whether the divisor of the loss depends on the losses."""
        whole_units = self.graded or self.by_stretch or self.rule.unit == "chunk"
        return self.normalise == "selected" and whole_units and not self.selects_all

    @property
    def selects_all(self) -> bool:
        """Whether every predicted token counts fully, whatever the losses: no first phase is
        needed."""
        if self.graded:
            return False
        if self.rule.ranking is None:
            return True
        return self.keep == 1.0 and self.unmapped != "exclude" and self.entropy_keep in (None, 1.0)


class ObjectiveSection(LossSection):
    """What is minimized. See docs/how-it-works.md for the equations."""

    aggregation: Literal["max", "mean", "sum"] = key(
        "Phi: how to combine the losses of the teacher tokens that cover one student token", "max"
    )
    alternatives: int | None = key(
        "distill, on_policy: number of teacher alternatives per token; null: all in the store, 4 "
        "with an online teacher, 16 in rounds",
        ge=1,
        le=64,
    )
    inside: bool = key(
        "distill: also use targets for tokens that begin inside a teacher token: the alternatives "
        "that continue the bytes already read",
        True,
    )
    pairing: Pairing = key(
        "uld: compare predictions that begin at the same byte, or those with the same index in a "
        "document, truncated to the shorter, as ULD's authors do",
        "bytes",
    )


class RoundsSection(Schema):
    """Rounds on policy: the student writes, the teacher reads, some optimizer steps follow."""

    prompts: list[str] = key(
        "what the student is asked: files, folders, addresses or hub datasets, as for `write`", []
    )
    answer_field: str | None = key("field of a record that contains the expected answer")
    grade: Grading | None = key(
        "measure how many answers are right, by the expected answer: a number; a number or a short "
        "text; an expression in LaTeX; the letter of an option"
    )
    rounds: int = key("number of rounds", 100, ge=1)
    prompts_per_round: int = key("prompts in a round", 256, ge=1)
    samples: int = key("answers to every prompt of a round", 1, ge=1, le=1024)
    updates_per_round: int = key(
        "optimizer steps in a round, each on an equal part of its answers", 1, ge=1
    )
    temperature: float = key("temperature of the student's draws", 1.0, gt=0, le=10)
    max_new_tokens: int = key("tokens of an answer, at most", 512, ge=1)
    prefix_tokens: int | None = key(
        "write and train only the first tokens of every answer; null: whole answers", ge=1
    )
    offline_share: float = key(
        "share of a round's answers that come from the corpus and its store instead of the student",
        0.0,
        ge=0,
        lt=1,
    )
    held_out: list[str] = key(
        "prompts with expected answers, for the accuracy of greedy answers during the run", []
    )
    held_out_every: int = key("rounds between two such measurements", 10, ge=1)

    @property
    def limit(self) -> int:
        """Tokens that are written of an answer, at most."""
        return min(self.max_new_tokens, self.prefix_tokens or self.max_new_tokens)


class OptimizerSection(Schema):
    """AdamW with warm-up and a cosine schedule down to `min_learning_rate`."""

    name: str = key(
        "optimizer name as in transformers' TrainingArguments; adamw_torch is fused on a GPU",
        "adamw_torch",
    )
    learning_rate: float = key("peak learning rate", 8e-5, gt=0, le=10**6)
    min_learning_rate: float = key(
        "learning rate that the cosine would reach one step after the last", 8e-6, ge=0
    )
    warmup_steps: int = key(
        "steps of linear warm-up from 0: the first step of a warm-up changes no weight", 0, ge=0
    )
    weight_decay: float = key("decoupled weight decay", 0.1, ge=0)
    beta1: float = key("AdamW's beta1", 0.9, ge=0, lt=1)
    beta2: float = key("AdamW's beta2", 0.95, ge=0, lt=1)
    max_grad_norm: float = key("gradients are clipped to this norm; 0: no clipping", 1.0, ge=0)


class LoraSection(Schema):
    """Low-rank adapters with peft (extra). The result is merged into an ordinary model."""

    rank: int = key("rank of the adapters; 0: no adapters, train all weights", 0, ge=0)
    alpha: float = key("scale of the adapters (peft's lora_alpha)", 16.0, gt=0)
    dropout: float = key("dropout before the adapters", 0.0, ge=0, lt=1)
    targets: list[str] | str = key("module names to adapt, or all-linear", "all-linear")


class TrainSection(Schema):
    """The training loop: its length, batches and precision."""

    tokens: int | None = key(
        "number of student tokens to train on; null: use `epochs`", ge=1, le=10**18
    )
    epochs: float = key(
        "passes over the blocks if `tokens` is null; may be fractional", 1.0, gt=0, le=10**6
    )
    batch_blocks: int = key("blocks per optimizer step, over all devices", 64, ge=1)
    micro_batch: Annotated[int, Limits(ge=1)] | Literal["auto"] = key(
        "blocks on one device at a time; gradients are accumulated over the rest; auto: the "
        "fastest number, measured before the first step",
        8,
    )
    dtype: Literal["float32", "bfloat16", "fp8"] = key(
        "arithmetic; the weights stay in student.dtype. bfloat16: by autocast; fp8: as bfloat16, "
        "with the linear layers of all decoder layers but the first and the last in e4m3 (H100 and "
        "newer; for students that are wider than 1,024)",
        "float32",
    )
    gradient_checkpointing: bool = key("recompute activations to save memory", False)
    compile: bool = key("torch.compile each decoder layer", False)
    liger: bool = key("Liger's fused layers (extra, GPU)", False)
    parallel: Literal["ddp", "fsdp2", "hsdp"] = key(
        "how processes share the model: each holds all of it, a shard of it, or a shard of one "
        "copy per machine (hsdp)",
        "ddp",
    )
    device: Literal["auto", "cpu"] = key("auto: the accelerator, if there is one", "auto")
    router_loss: bool | None = key(
        "mixture of experts: add the load-balancing loss; null: as in the student's "
        "configuration (output_router_logits)"
    )
    loader_workers: int = key("number of processes that prefetch blocks", 0, ge=0)
    arguments: dict[str, Any] = key("more TrainingArguments of transformers, by name", {})

    renamed: ClassVar[Mapping[str, str]] = {
        "bf16": "train.dtype: bfloat16 for `bf16: true`, and nothing for false"
    }

    @property
    def half_precision(self) -> bool:
        """Whether arithmetic that is not in fp8 is in bfloat16."""
        return self.dtype != "float32"


class RunSection(Schema):
    """The folder, seed and logging of the run."""

    folder: str | None = key("run folder: recipe, metrics, checkpoints, model")
    seed: int = key(
        "seed for the order of the blocks, random selection and random weights", 0, ge=0, lt=2**32
    )
    save_every: int = key("steps between checkpoints; 0: only at the end", 500, ge=0)
    save_minutes: float = key(
        "also write a checkpoint when the newest is so many minutes old; 0: never", 10.0, ge=0
    )
    keep_checkpoints: int = key("number of complete checkpoints to keep", 2, ge=1)
    log_every: int = key(
        "steps between lines on the console and in trackers; metrics.jsonl has every step", 10, ge=1
    )
    report_to: list[str] = key("trackers: tensorboard, wandb, trackio, ...", [])


class ScoreSection(Schema, frozen=True):
    """How a corpus is scored. None: chosen by model and device, and recorded in the manifest."""

    device: Device = key("where the teacher runs", "auto")
    dtype: ScoreDtype = key(
        "auto: float32 on a CPU, the model's half precision on a GPU. fp8: matrix products of "
        "decoder and head in e4m3, the rest in bfloat16, on Hopper and newer: faster, less memory, "
        "less exact losses",
        "auto",
    )
    context: int | None = key(
        "maximum window in tokens", unset="2048, or the model's limit if that is less", ge=2
    )
    stride: int | None = key(
        "minimum number of context tokens for every token of a long document",
        unset="context / 8",
        ge=1,
    )
    batch_tokens: int | None = key(
        "tokens per batch, or per request to a server", unset="16384; 4096 on a CPU", ge=1
    )
    shard_documents: int = key(
        "documents per shard; a killed run loses at most two unfinished shards", 1024, ge=1
    )
    bos: str = key(
        "token before every window: auto (as the tokenizer does), none, or a token", "auto"
    )
    alternatives: int | str = key(
        "also keep the teacher's K most likely tokens (1 to 64) at every position, to distill "
        "students of any vocabulary from the store; sampled:K: K tokens sampled from its "
        "distribution. Four bytes each",
        0,
        unset="0; 4 for a recipe with method distill",
        metavar="K",
    )
    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: Mapping[str, Any] = key(
        "conversations: another variable for the template, name=value",
        {},
        option="--template-option",
    )
    compiled: bool | None = key(
        "compile the layers", unset="on a GPU", option="--compile/--no-compile"
    )
    threads: int | None = key(
        "threads on a CPU; use the same number for every process, since it can change the last "
        "bit of a sum",
        unset="all, at most 16",
        ge=1,
        le=1024,
    )
    shard_teacher: bool = key(
        "hold one teacher in all processes of torchrun together, each on a GPU of its own, for "
        "teachers that no single GPU can hold",
        False,
    )
    strict: bool = key("stop at the first document that cannot be scored", False)
    max_nonfinite_share: float = key(
        "stop when more than this share of a shard's losses is NaN or infinite", 0.01, ge=0, le=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternatives != 0:
            from vocagnolm.alternatives import AlternativesSpec

            try:
                AlternativesSpec.parse(self.alternatives)
            except ValueError as error:
                raise SettingError(str(error)) from None


class PromptsSection(Schema, frozen=True):
    """What a teacher is asked."""

    files: list[str] = key(
        "prompts: jsonl (.gz, .zst), parquet or text files, folders, addresses or hub datasets. A "
        "record is a conversation that ends with the user (`messages`, ShareGPT), a `prompt`, an "
        "instruction (Alpaca), or a text",
        [],
        option="--prompts",
    )
    text_field: str = key(
        "field of a record that contains the prompt as a text", "text", min_length=1
    )
    answer_field: str | None = key("field of a record that contains the expected answer")
    instruction: str | None = key(
        "ask for something to be done with each text: an instruction with {text} in it"
    )
    drop_answers: bool = key(
        "remove what the assistant says last in a conversation", False, option="--drop-answers"
    )
    continues: bool = key(
        "continue the first tokens of each text instead of answering", False, option="--continue"
    )
    prompt_tokens: int = key(
        "with --continue: number of tokens of each text that are the prompt", 128, ge=1
    )
    split: Split = key(
        "how to split a text file (.txt, .md, ...) into prompts: not at all, at blank lines, or at "
        "every line",
        "none",
    )
    limit_prompts: int | None = key("maximum number of prompts to read", ge=1)
    without: list[str] = key(
        "leave out prompts that share 13 words in a row with the questions of this benchmark "
        "(gsm8k, math500, ..., or a YAML file)",
        [],
    )


class WriteSection(Schema, frozen=True):
    """How a teacher writes. None: chosen by model and device, and recorded in the manifest."""

    samples: int = key("answers to every prompt", 4, ge=1, le=1024)
    temperature: float = key(
        "0: the most likely token every time (with one answer to every prompt)", 0.7, ge=0, le=10
    )
    top_p: float = key(
        "draw among the likeliest tokens that together hold this probability", 1.0, gt=0, le=1
    )
    max_new_tokens: int = key("tokens of an answer, at most", 512, ge=1)
    alternatives: int = key(
        "keep the teacher's K most likely tokens at every position, to distill students of any "
        "vocabulary. Four bytes each",
        16,
        ge=0,
        le=64,
        metavar="K",
    )
    seed: int = key("seed of the draws", 0, ge=0, lt=2**32)
    system: str | None = key("system message for the teacher, which the students never see")
    examples: str | None = key(
        "file with worked examples (records with a prompt and an answer), earlier turns for the "
        "teacher, which the students never see"
    )
    stop: list[str] = key("an answer also ends where one of these texts appears", [])
    cut: Literal["drop", "keep"] = key(
        "answers that were broken off at the limit: leave them out, or keep them, without an end",
        "drop",
    )
    grade: Grading | None = key(
        "mark answers as right or wrong by the expected answer: a number; a number or a short "
        "text; an expression in LaTeX; the letter of an option"
    )
    chat_template: str | None = key(CHAT_TEMPLATE, unset="the model's own")
    template_options: Mapping[str, Any] = key(
        "another variable for the template, name=value", {}, option="--template-option"
    )
    keep_reasoning: bool = key(
        "with --server: also keep the answers of a model that thinks before it answers; its "
        "alternatives then depend on what stands in no answer",
        False,
        option="--keep-reasoning",
    )
    server_options: Mapping[str, Any] = key(
        "with --server alone: another field of its requests, name=value; null leaves a field out",
        {},
        option="--server-option",
    )
    device: Device = key("where the teacher runs", "auto")
    dtype: Dtype = key("auto: float32 on a CPU, the model's half precision on a GPU", "auto")
    context: int | None = key(
        "tokens of a prompt and its answer, at most; longer prompts are left out",
        unset="1,536 and the answer's, or the model's limit",
        ge=2,
    )
    rows: int | None = key(
        "answers that are written at once on a GPU", unset="as many as its memory holds", ge=1
    )
    compiled: bool | None = key(
        "compile the layers", unset="on a GPU", option="--compile/--no-compile"
    )
    threads: int | None = key(
        "threads on a CPU; the last bit of a sum depends on them", unset="all, at most 16", ge=1
    )
    shard_prompts: int | None = key(
        "prompts per shard; a killed run loses at most two unfinished shards",
        unset="1,024 on a GPU, 32 on a CPU, 256 with a server",
        ge=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.stop):
            raise SettingError("stop is '', expected a text that is not empty")
        if self.temperature == 0 and self.samples > 1:
            raise SettingError(
                f"temperature is 0, expected more with samples {self.samples}: all answers to a "
                "prompt would be the same"
            )


class ServerSection(Schema, frozen=True):
    """A server that runs the model, and how requests are sent to it."""

    model: str | None = key(
        "name of the model on the server", unset="its only model", option="--server-model,--model"
    )
    requests: int | None = key(
        "concurrent requests to each server, per process",
        unset="4; 16 when writing",
        option="--server-requests",
        ge=1,
    )
    patience_seconds: float = key(
        "give up after this many seconds without a usable response",
        600.0,
        option="--server-patience",
        gt=0,
    )


class SpendingSection(Schema, frozen=True):
    """What a server may be asked for in one run, and what that costs."""

    max_requests: int | None = key(
        "end after this many requests; the same command goes on", ge=1, unset="no limit"
    )
    max_server_tokens: int | None = key(
        "end when the server has read and written this many tokens; the same command goes on",
        ge=1,
        unset="no limit",
    )
    price_input: float | None = key(
        "price of a million tokens that the server reads, for --dry-run", ge=0
    )
    price_output: float | None = key(
        "price of a million tokens that the server writes, for --dry-run", ge=0
    )


class RaySection(Schema, frozen=True):
    """The workers of a Ray cluster."""

    workers: int | None = key(
        "number of workers on the Ray cluster", unset="as many as fit", option="--ray-workers", ge=1
    )
    patience_seconds: float = key(
        "give up after this many seconds without a sign of life from any worker; a worker that "
        "gets no step further in half this time is replaced",
        600.0,
        option="--ray-patience",
        gt=0,
    )


class QuestionsSection(Schema, frozen=True):
    """The questions: some tasks, or a whole suite."""

    suite: str | None = key("a named set of tasks", unset="math, the paper's ten tasks")
    tasks: str | Sequence[str] | None = key(
        "run only these tasks, for example gsm8k,math500,mmlu_stem; math is all of MATH",
        option="--tasks,--task",
    )
    benchmarks: str | Path | None = key(
        "folder with the benchmark files", unset="they are downloaded"
    )
    limit: int | None = key("number of questions per task, spread evenly", ge=1)
    choices: Choices = key(
        "answer multiple-choice questions by generation, or by the likelihood of the options (for "
        "small models)",
        "generate",
    )
    protocol: Protocol = key(
        "paper: the prompts, the limit of 1,024 tokens and the grading of the paper's harness, as "
        "far as they are available",
        "strict",
    )
    chat: bool = key(
        "ask questions as conversations in the model's chat template, worked examples as turns",
        False,
        option="--chat",
    )
    shots: int | None = key(
        "with --chat: number of worked examples; 0: none", unset="the task's own number", ge=0
    )
    max_new_tokens: int | None = key(
        "limit the length of answers, in tokens",
        unset="the task's own, 256 or 512; paper: 1,024",
        ge=1,
    )


class EngineSection(Schema, frozen=True):
    """How the evaluated model runs."""

    chat_template: str | None = key(CHAT_TEMPLATE, unset=OWN_TEMPLATE)
    template_options: Mapping[str, Any] = key(
        "conversations: another variable for the template, name=value, for example "
        "enable_thinking=false",
        {},
        option="--template-option",
    )
    batch_size: int | None = key(
        "prompts per batch, or per request to a server",
        unset="32; by available memory on a GPU",
        ge=1,
    )
    device: Device = key("where the model runs", "auto")
    dtype: Dtype = key("auto: float32 on a CPU, the model's half precision on a GPU", "auto")
    revision: str | None = key("branch, tag or commit of a hub model")
    trust_remote_code: bool = key("allow Python code that comes with a model", False)
