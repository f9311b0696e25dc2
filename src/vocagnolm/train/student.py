"""The student: how it is loaded, what it reads (blocks become batches), how its loss is made."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from vocagnolm.alignment.tokenizer import gguf_tokenizer
from vocagnolm.data.blocks import Block
from vocagnolm.errors import TrainingError, optional
from vocagnolm.model.load import DTYPES, load_causal_lm
from vocagnolm.model.runtime import (
    HeadForm,
    RouterLoss,
    find_layers,
    head_form,
    prepare_compiler,
    router_loss_of,
    run_decoder,
    separates_documents,
)
from vocagnolm.objective import (
    COLUMNS,
    IGNORE_INDEX,
    Counts,
    Decided,
    Implementation,
    ObjectiveConfig,
    Targets,
    Teacher,
    guided_loss,
    objective_loss,
    student_nll,
)
from vocagnolm.objective.loss import FLOAT16
from vocagnolm.recipe import LoraSection, Recipe
from vocagnolm.train.settings import uses_accelerator

# Rows and columns of a mask are taken together in squares of this size.
_FLEX_TILE = 128
# What makes up a tokenizer in a model folder.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def build_student(recipe: Recipe) -> PreTrainedModel:
    """The student on the CPU, its weights ready to train."""
    section = recipe.student
    set_seed(recipe.run.seed)  # random weights, and later those of adapters
    if section.model is not None:
        if section.config is not None:
            raise TrainingError("Give either student.model or student.config, not both.")
        model = load_causal_lm(
            section.model, device="cpu", dtype=section.dtype, revision=section.revision
        )
        if Path(section.model).suffix.lower() == ".gguf":
            forget_quantisation(model)
    elif section.config is not None:
        config = model_config(section.config)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[section.dtype])
    else:
        raise TrainingError("The recipe names no student: set student.model or student.config.")
    if section.attention not in (None, "auto"):
        model.set_attn_implementation(section.attention)
    model.train().requires_grad_(True)
    return model


def choose_attention(model: PreTrainedModel, recipe: Recipe, *, documents: bool) -> None:
    """`student.attention: auto`. A mask of documents keeps torch from its fast kernels; flex
    attention passes over what the mask hides."""
    wanted = recipe.student.attention == "auto" and documents and uses_accelerator(recipe)
    tiles = recipe.data.block_size % _FLEX_TILE == 0
    if wanted and tiles and getattr(model, "_supports_flex_attn", False):
        model.set_attn_implementation("flex_attention")


def forget_quantisation(model: PreTrainedModel) -> None:
    """A GGUF file is dequantised when it is loaded: from here on it is an ordinary model, but
    transformers would refuse to train or save it."""
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.__dict__["hf_quantizer"] = None
    if "is_quantized" in model.__dict__:  # an attribute in older versions, now a property
        model.__dict__["is_quantized"] = False


def model_config(settings: dict[str, Any]) -> Any:
    """A transformers configuration from the keys of `student.config`."""
    settings = dict(settings)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise TrainingError("student.config needs `model_type`, for example llama.")
    try:
        return AutoConfig.for_model(kind, **settings)
    except (ValueError, KeyError) as error:
        raise TrainingError(f"student.config: {error}") from error


def add_lora(model: PreTrainedModel, section: LoraSection) -> nn.Module:
    """The model with low-rank adapters, or the model itself when the rank is 0."""
    if section.rank == 0:
        return model
    peft = optional("peft", "peft", "training with LoRA (lora.rank > 0)")
    config = peft.LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=section.targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise TrainingError(f"lora.targets {section.targets!r}: {error}") from error
    return adapted


def compile_layers(model: PreTrainedModel, **options: Any) -> None:
    """torch.compile each decoder layer: all of the speed of compiling the model, in seconds
    instead of minutes, and the objective stays as it is."""
    layers = find_layers(model)
    if layers is None:
        raise TrainingError(
            f"train.compile: no stack of decoder layers found in {type(model).__name__}."
        )
    prepare_compiler()
    for layer in layers:
        layer.compile(dynamic=False, **options)  # all micro-batches of a run have one shape


def save_tokenizer(recipe: Recipe, folder: Path) -> None:
    """The student's tokenizer into its model folder: its own files where there are any."""
    source = recipe.student_tokenizer
    if source is None:
        return
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        gguf_tokenizer(path).save_pretrained(folder)
        return
    if path.is_file():
        shutil.copyfile(path, folder / ("tokenizer.json" if path.suffix == ".json" else path.name))
        return
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(source, local_files_only=True))
    for name in TOKENIZER_FILES:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)


# ---- blocks become batches ----


class BlockCollator:
    """Stacks blocks of N tokens into batches of N - 1 positions: position t reads token t and
    predicts token t + 1. Everything except `input_ids` and `position_ids` belongs to the predicted
    token.

    `document_mask`: positions restart with each document, which makes transformers restrict
    attention to it, and the first token of a document is not predicted from the previous one.
    Tokens of conversations that are not `trained` on are read but not predicted. Rows of different
    lengths, from a dataset that is not made of blocks, are padded; if they have `labels`, those are
    predicted.
    """

    def __init__(self, document_mask: bool = False):
        self.document_mask = document_mask

    def __call__(self, blocks: Sequence[Block]) -> dict[str, Any]:
        ids = padded(blocks, "input_ids")
        labels = padded(blocks, "labels" if "labels" in blocks[0] else "input_ids", IGNORE_INDEX)
        labels = labels[:, 1:].copy()
        batch: dict[str, Any] = {"input_ids": torch.from_numpy(ids[:, :-1].copy())}
        if self.document_mask:
            document = padded(blocks, "document", -1)
            labels[document[:, 1:] != document[:, :-1]] = IGNORE_INDEX
            batch["position_ids"] = torch.from_numpy(positions_in_document(document[:, :-1]))
        if "trained" in blocks[0]:
            labels[~padded(blocks, "trained")[:, 1:]] = IGNORE_INDEX
        batch["labels"] = torch.from_numpy(labels)
        for name, (_, filling) in COLUMNS.items():
            if name in blocks[0]:
                batch[name] = _predicted(blocks, name, filling)
        batch["counts"] = token_counts(batch)
        for name in ("block", "teacher_sums"):
            if name in blocks[0]:
                batch[name] = torch.from_numpy(np.stack([block[name] for block in blocks]))
        if "teacher_ids" in blocks[0]:
            batch.update(self._teacher(blocks))
        return batch

    def _teacher(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """The teacher's view of the same text, padded on the right (causal: the pad is unseen)."""
        document = padded(blocks, "teacher_document", -1)
        view: dict[str, Any] = {
            "teacher_ids": torch.from_numpy(padded(blocks, "teacher_ids")),
            "teacher_range": _predicted(blocks, "teacher_range", -1),
            "teacher_pair": _predicted(blocks, "teacher_pair", -1),
        }
        if "laid" in blocks[0]:
            view["laid"] = [block["laid"] for block in blocks]
        if "teacher_counts" in blocks[0]:
            view["teacher_counts"] = torch.from_numpy(padded(blocks, "teacher_counts") > 0)
        # what a teacher token is predicted from must be of its own document where those are apart
        follows = document >= 0
        follows[:, 0] = False
        if self.document_mask:
            follows[:, 1:] &= document[:, 1:] == document[:, :-1]
            view["teacher_position_ids"] = torch.from_numpy(positions_in_document(document))
        view["teacher_follows"] = torch.from_numpy(follows)
        return view


def batch_targets(batch: dict[str, Any], sequence_index_B: Tensor | None = None) -> Targets:
    """What the objective is given of a batch."""
    return Targets(
        labels_BT=batch["labels"],
        guidance_BT=batch.get("guidance"),
        entropy_BT=batch.get("entropy"),
        stretch_BT=batch.get("stretch"),
        teacher_sums_B2=batch.get("teacher_sums"),
        soft_ids_BTK=batch.get("target_ids"),
        soft_p_BTK=batch.get("target_p"),
        sequence_index_B=sequence_index_B,
    )


def token_counts(batch: dict[str, Any]) -> Counts:
    """Counted here, as plain numbers: on a device they would have to be waited for."""
    targets = batch_targets(batch)
    counted = torch.stack([targets.valid_BT.sum(1), targets.mapped_BT.sum(1)], dim=1)
    return [(predicted, mapped) for predicted, mapped in counted.tolist()]


def _predicted(blocks: Sequence[Block], name: str, filling: float) -> Tensor:
    """A column of the blocks without its first token, which is read and not predicted."""
    return torch.from_numpy(padded(blocks, name, filling)[:, 1:].copy())


def padded(
    rows: Sequence[Mapping[str, Any]], name: str, filling: float = 0, width: int = 0
) -> NDArray[Any]:
    """A column of rows, which may be lists of unequal length, as one array at least so wide."""
    arrays = [np.asarray(row[name]) for row in rows]
    if arrays[0].dtype == np.float64:  # a list of Python's numbers
        arrays = [array.astype(np.float32) for array in arrays]
    elif name in ("input_ids", "labels"):
        arrays = [array.astype(np.int64, copy=False) for array in arrays]
    width = max(width, *(len(array) for array in arrays))
    if all(len(array) == width for array in arrays):
        return np.stack(arrays)
    whole = np.full((len(arrays), width, *arrays[0].shape[1:]), filling, arrays[0].dtype)
    for row, array in zip(whole, arrays, strict=True):
        row[: len(array)] = array
    return whole


def positions_in_document(document_BT: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each run of equal document numbers."""
    index = np.arange(document_BT.shape[1])[None]
    new = np.ones(document_BT.shape, bool)
    new[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    start = np.maximum.accumulate(np.where(new, index, 0), axis=1)
    return index - start


class GuidedCollator:
    """Collates rows of `vocagnolm.guide` for transformers models. All columns are truncated, padded
    or packed together, so `labels` and guidance stay with their tokens.

    Packed rows have no padding between documents. Positions restart with each document, which makes
    transformers restrict attention to it (if the model uses no cache, as in its trainers:
    `use_cache=False`), and its first token is not predicted. A row that was already packed (by
    `trl.pack_dataset`) has `seq_lengths`; a list of rows in place of a row, as from axolotl's
    sampler, is packed here.
    """

    def __init__(
        self, *, max_length: int | None = None, packing: bool = False, pad_to_multiple_of: int = 1
    ):
        """`max_length`: longer documents are cut. `packing`: all rows of a batch become one."""
        self.max_length, self.packing = max_length, packing
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        groups = [row if isinstance(row, list) else [row] for row in rows]
        if self.packing:
            groups = [[row for group in groups for row in group]]
        first = groups[0][0]
        packed = self.packing or any(len(g) > 1 for g in groups) or "seq_lengths" in first
        together = [self._together(group) for group in groups]
        longest = max(len(row["input_ids"]) for row in together)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fillings = {"labels": IGNORE_INDEX, **{name: fill for name, (_, fill) in COLUMNS.items()}}
        batch = {
            name: torch.from_numpy(padded(together, name, fillings.get(name, 0), width))
            for name in together[0]
            if name != "position_ids" or packed
        }
        if not packed:
            lengths = torch.tensor([len(row["input_ids"]) for row in together])
            batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch

    def _together(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
        """Documents end to end."""
        lengths = [n for row in rows for n in row.get("seq_lengths", [len(row["input_ids"])])]
        cuts = np.cumsum(lengths)[:-1]
        names = [name for name in ("input_ids", *COLUMNS) if name in rows[0]]
        columns = {name: [np.asarray(row[name]) for row in rows] for name in names}
        columns["labels"] = [np.asarray(row.get("labels", row["input_ids"])) for row in rows]
        columns["position_ids"] = [np.concatenate([np.arange(n) for n in lengths])]
        found: dict[str, NDArray[Any]] = {}
        for name, values in columns.items():
            documents = np.split(np.concatenate(values), cuts)
            found[name] = np.concatenate([one[: self.max_length] for one in documents])
        found["labels"][found["position_ids"] == 0] = IGNORE_INDEX
        return found


# ---- the forward pass ----


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One call of the guided forward: what the student reads, and how its loss is made."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None = None
    targets: Targets
    config: ObjectiveConfig
    step: int = 0
    teacher: Teacher | None = None
    decided: Decided = field(default_factory=Decided)
    only_nll: bool = False
    """First pass of a selection over several micro-batches: nll alone, without gradient."""
    impl: Implementation = "auto"

    @classmethod
    def of(
        cls, batch: dict[str, Any], targets: Targets, config: ObjectiveConfig, **more: Any
    ) -> "MicroBatch":
        return cls(
            input_ids_BT=batch["input_ids"],
            position_ids_BT=batch.get("position_ids"),
            targets=targets,
            config=config,
            **more,
        )


class GuidedStudent(nn.Module):
    """A causal LM, or its peft wrapper, whose forward takes a `MicroBatch` and gives its loss: the
    module that DDP and FSDP wrap."""

    def __init__(self, model: nn.Module, *, router_loss: bool | None = None):
        """`router_loss`: whether a mixture of experts also learns to balance them; None: as its
        configuration says."""
        super().__init__()
        self.model = model
        require_precision(model)
        self.form = understood_head(self.causal_lm)
        self.router = router_loss_of(self.causal_lm, router_loss)

    @property
    def causal_lm(self) -> PreTrainedModel:
        return causal_lm_of(self.model)

    def forward(self, batch: MicroBatch) -> dict[str, Any]:
        return guided_forward(self.causal_lm, self.form, self.router, batch)


def understood_head(model: PreTrainedModel) -> HeadForm:
    """The student's head, which the objective reads directly."""
    form = head_form(model)
    if form is None:
        raise TrainingError(
            f"{type(model).__name__} computes its logits in an unsupported way (weight, "
            "bias, scale and soft cap of the head do not explain them). "
            "Please report the architecture."
        )
    return form


def use_guided_loss(model: nn.Module, config: ObjectiveConfig) -> None:
    """Let a model of transformers, with or without adapters, make this loss out of its labels."""
    require_precision(model)
    causal_lm_of(model).loss_function = partial(guided_loss, config=config)


def require_precision(model: nn.Module) -> None:
    """Refuse weights that cannot be trained: half of a float16 model's updates round to nothing."""
    if any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters()):
        raise TrainingError(FLOAT16)


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a peft wrapper, or the model itself."""
    unwrap: Any = getattr(model, "get_base_model", None)
    inner = model if unwrap is None else unwrap()
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise TrainingError(
            f"{type(inner).__name__} is not a causal language model of transformers with a head. "
            "Load the student with AutoModelForCausalLM."
        )
    if hasattr(inner.get_output_embeddings(), "base_layer"):
        raise TrainingError(
            "An adapter sits on the language-model head, which the objective reads directly. "
            "Leave the head out of lora.targets."
        )
    return inner


def require_separation(model: PreTrainedModel, who: str) -> None:
    """For `document_mask`: not every architecture keeps packed documents apart."""
    if not separates_documents(model):
        raise TrainingError(
            f"{who} ({type(model).__name__}) lets a document see the one packed before it: its "
            f"architecture does not support restarting positions. Set data.document_mask to false, "
            "or use another model."
        )


def guided_forward(
    model: PreTrainedModel, form: HeadForm, router: RouterLoss | None, batch: MicroBatch
) -> dict[str, Any]:
    options = {} if router is None or batch.only_nll else {"output_router_logits": True}
    decoded = run_decoder(model, batch.input_ids_BT, batch.position_ids_BT, **options)
    hidden = decoded.last_hidden_state
    head = form.head(model)
    if batch.only_nll:
        return {"nll": student_nll(hidden, head, batch.targets.labels_BT, impl=batch.impl)}
    output = objective_loss(
        hidden,
        head,
        batch.targets,
        batch.config,
        step=batch.step,
        teacher=batch.teacher,
        decided=batch.decided,
        impl=batch.impl,
    )
    loss, means = output.loss, dict(output.distill_stats)
    if router is not None:
        balance = router(decoded.router_logits)
        loss = loss + balance / batch.decided.micro_batches
        means["router_loss"] = balance.detach()
    # a plain dictionary: the only shape in which FSDP finds the tensors that its hooks hang on
    weights = output.weights_BT.detach()
    return {"loss": loss, "sums": output.sums, "means": means, "weights": weights}
