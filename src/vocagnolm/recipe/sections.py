"""The sections of a recipe: one small class per stage, every key with its help text and its range.

No torch here: a recipe is read by the command line, by `check` and by programs that only look.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vocagnolm.methods import CHOOSABLE_WEIGHTINGS, METHODS
from vocagnolm.recipe.schema import Number, OneOf, Schema, key

Attention = Literal[
    "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
]
HubKernel = Annotated[str, Field(pattern=r".+/.+")]


class StudentSection(Schema):
    """The model that learns."""

    model: str | None = key("folder, hub id or GGUF file; leave out to start from `config`")
    config: dict[str, Any] | None = key(
        "from scratch: keys of a Hugging Face config, `model_type` first; random weights by seed"
    )
    tokenizer: str | None = key("folder, tokenizer.json or hub id; default: the model's own")
    revision: str | None = key("hub revision of the model")
    chat_template: str | None = key(
        "conversations: a Jinja file, a folder with one, or plain (`role: content`); default: the "
        "model's own, or plain where it has none"
    )
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
    bits_per_byte: Number | None = key(
        "its bits per byte on this kind of text, where they are known; otherwise `check` and "
        "`train` measure them, and warn of a teacher that is not clearly better",
        gt=0,
    )


class TeacherSection(Schema):
    """The model that guides. Scored once into a store, or held in memory (`online`)."""

    model: str | None = key("folder, hub id or GGUF file")
    tokenizer: str | None = key("folder, tokenizer.json or hub id; default: the model's own")
    revision: str | None = key("hub revision of the model")
    chat_template: str | None = key(
        "conversations: a Jinja file, a folder with one, or plain (`role: content`); default: the "
        "model's own, or plain where it has none"
    )
    template_options: dict[str, Any] = key(
        "conversations: further variables of the template, for example enable_thinking: false", {}
    )
    online: bool = key("hold the teacher in memory while training instead of using a store", False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "dtype of the teacher's weights when it is online", "auto"
    )


class KeepDocuments(Schema):
    """Whole documents, chosen by what the teacher thinks of them."""

    by: Literal["difference", "bits_per_byte", "random"] = key(
        "difference: bits per byte of `against` minus the teacher's, the largest first (MiniPLM); "
        "bits_per_byte: the teacher's, the smallest first; random: a control",
        "difference",
    )
    share: Number = key("share of the text that is kept, by bytes", 0.5, gt=0, le=1)
    against: str | None = key("difference: loss store of a small reference model")


class CorpusSection(Schema):
    """The documents. The same section serves `score` and `prepare`."""

    files: list[str] = key(
        "jsonl, jsonl.gz, jsonl.zst, parquet, text, folders, addresses of these (s3://, gs://, "
        "hf://, https://) or a hub dataset",
        [],
    )
    text_field: str = key("the field that holds the text; --text-field of the commands", "text")
    format: Literal["auto", "text", "messages", "prompt_completion"] = key(
        "what a record holds: a text, or a conversation as `messages`, or as `prompt` and "
        "`completion`; auto: by the fields of the first",
        "auto",
    )
    split: Literal["none", "blank_line", "line"] = key(
        "a text file (.txt) is one document: none; or one for each blank_line between, or each "
        "line",
        "none",
    )
    limit_documents: int | None = key("read only so many documents", ge=1)
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
    weights: list[Number] | None = key(
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


class ObjectiveSection(Schema):
    """What is minimised. See docs/how-it-works.md for the equations."""

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
    floor: Number = key("reducible: what a token counts at least", 0.2, ge=0, le=1)
    keep: Number | None = key(
        "share of the tokens that are kept, by excess loss; null: 0.4, and all for distill",
        ge=0,
        le=1,
    )
    aggregation: Literal["max", "mean", "sum"] = key(
        "Phi: how the losses of the teacher tokens behind one student token become one", "max"
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
    mix: Number = key(
        "distill: how far the targets are the teacher's instead of the text's; 0 is plain training",
        0.5,
        ge=0,
        le=1,
    )
    mix_end: Number | None = key(
        "distill: the mix at the last step, which is reached linearly; null: it stays", ge=0, le=1
    )
    mix_hold: Number = key(
        "distill: share of the run before the mix begins to change", 0.0, ge=0, lt=1
    )
    mix_by: Literal["constant", "reducible"] = key(
        "distill: the same mix for every token, or the mix times the share of its loss that the "
        "teacher shows to be reducible",
        "constant",
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
    distill_weight: Number = key(
        "kld, uld, alm: weight (lambda) of the distillation term", 0.5, ge=0
    )
    cross_entropy: Number = key(
        "alm: weight of the cross entropy; 0: the distance alone, as published", 1.0, ge=0
    )
    temperature: Number = key("alm: tau, probabilities are compared as p^(1/tau)", 100.0, gt=0)
    positive: bool = key("alm: cut off negative weights", False)
    kl_direction: Literal["forward", "reverse"] = key(
        "kld: forward is KL(teacher || student); reverse is KL(student || teacher), as equation 5 "
        "of the paper prints it",
        "forward",
    )
    pairing: Literal["bytes", "index"] = key(
        "uld: compare predictions of tokens that begin at the same byte, or the n-th with the n-th "
        "of a document, cut to the shorter, as its authors do",
        "bytes",
    )
    entropy_keep: Number | None = key(
        "rho1: share of the tokens, those of lowest teacher entropy, that may be selected",
        ge=0,
        le=1,
    )
    n_chunks: int = key("chunk: pieces per sequence", 16, ge=1)
    chunk_choice: Literal["teacher", "random"] = key(
        "chunk: pieces kept by excess over the teacher, or by chance", "teacher"
    )

    @model_validator(mode="after")
    def _method_decides(self) -> "ObjectiveSection":
        """So that a recipe that is written down says what was trained."""
        if self.keep is None:
            self.keep = METHODS[self.method].keep
        return self


class OptimizerSection(Schema):
    """AdamW with a warm-up and a cosine that ends at `min_learning_rate`."""

    name: str = key(
        "optimizer name as in transformers' TrainingArguments; adamw_torch is fused on a GPU",
        "adamw_torch",
    )
    learning_rate: Number = key("peak learning rate", 8e-5, gt=0)
    min_learning_rate: Number = key("learning rate at the last step", 8e-6, ge=0)
    warmup_steps: int = key("steps of linear warm-up", 0, ge=0)
    weight_decay: Number = key("decoupled weight decay", 0.1, ge=0)
    beta1: Number = key("AdamW's beta1", 0.9, ge=0, lt=1)
    beta2: Number = key("AdamW's beta2", 0.95, ge=0, lt=1)
    max_grad_norm: Number = key("gradients are clipped to this norm; 0: no clipping", 1.0, ge=0)


class LoraSection(Schema):
    """Low-rank adapters through peft (extra). The result is merged into an ordinary model."""

    rank: int = key("rank of the adapters; 0: train all weights", 0, ge=0)
    alpha: Number = key("scale of the adapters (peft's lora_alpha)", 16.0, gt=0)
    dropout: Number = key("dropout before the adapters", 0.0, ge=0, lt=1)
    targets: list[str] | str = key("module names to adapt, or all-linear", "all-linear")


class TrainSection(Schema):
    """The loop: how much, in which batches, in which arithmetic."""

    tokens: int | None = key("student tokens to train on; null: `epochs` decides", ge=1)
    epochs: Number = key(
        "passes over the blocks when `tokens` is null; may be a fraction", 1.0, gt=0
    )
    batch_blocks: int = key("blocks in one optimizer step, over all devices", 64, ge=1)
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = key(
        "blocks on one device at a time; the rest is accumulation; auto: as many as make it "
        "faster, measured before the first step",
        8,
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
