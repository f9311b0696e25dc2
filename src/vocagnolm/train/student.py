"""The student: how it is loaded, adapted, and made ready to train."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.neftune import neftune_post_forward_hook

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alignment.tokenizer import gguf_tokenizer
from vocagnolm.base.strangers import config_problem
from vocagnolm.errors import TrainingError, VocagnolmWarning, first_line, optional
from vocagnolm.model.fp8 import FP8_WIDTH, require_fp8, train_in_fp8
from vocagnolm.model.load import DTYPES, load_causal_lm
from vocagnolm.model.runtime import (
    HeadForm,
    find_layers,
    head_form,
    prepare_compiler,
    separates_documents,
)
from vocagnolm.objective.loss import FLOAT16
from vocagnolm.recipe import LoraSection, Recipe
from vocagnolm.train.settings import uses_accelerator

# Flex attention takes rows and columns of a mask together in squares of this size.
_FLEX_TILE = 128
# The files that make up a tokenizer in a model folder.
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


# ---- loading ----


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
            _forget_quantisation(model)
    elif section.config is not None:
        config = model_config(section.config)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[section.dtype])
    else:
        raise TrainingError("The recipe names no student: set student.model or student.config.")
    if section.attention not in (None, "auto"):
        model.set_attn_implementation(section.attention)
    model.train().requires_grad_(True)
    return model


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Let transformers train and save a model that was read from a GGUF file: its weights were
    dequantized when they were loaded."""
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.__dict__["hf_quantizer"] = None


def model_config(settings: dict[str, Any]) -> Any:
    """A transformers configuration from the keys of `student.config`."""
    if problem := config_problem(settings):
        raise TrainingError(f"student.config: {problem}.")
    settings = dict(settings)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise TrainingError("student.config needs `model_type`, for example llama.")
    try:
        return AutoConfig.for_model(kind, **settings)
    except Exception as error:  # transformers checks with a dozen kinds
        raise TrainingError(f"student.config: {first_line(error):.300}") from error


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


# ---- before the first step ----


def adapt_student(
    recipe: Recipe, arguments: TrainingArguments, tokenizer: TextTokenizer, model: PreTrainedModel
) -> nn.Module:
    """The loaded student with fp8 layers and adapters, where the recipe asks for them."""
    embeddings: Any = model.get_input_embeddings()
    (rows, width), largest = embeddings.weight.shape, max(tokenizer.vocabulary.values())
    if largest >= rows:
        raise TrainingError(
            f"The student has {rows:,} embedding rows, its tokenizer has ids up to {largest:,}. "
            "They do not belong together."
        )
    if recipe.train.dtype == "fp8":
        require_fp8(arguments.device, "train.dtype:")
        train_in_fp8(model)
        if width < FP8_WIDTH:
            warnings.warn(
                f"train.dtype: fp8 is slower than bfloat16 for a student that is {width} wide. It "
                f"pays from about {FP8_WIDTH:,} on.",
                VocagnolmWarning,
                stacklevel=2,
            )
    return add_lora(model, recipe.lora)


def set_up_layers(
    recipe: Recipe, arguments: TrainingArguments, model: nn.Module, *, documents: bool
) -> None:
    """Choose how the student's layers run. Comes after the probes of its head, whose inputs have a
    shape that training never has. `documents`: those of a block are kept apart."""
    student, train = causal_lm_of(model), recipe.train
    choose_attention(student, recipe, documents=documents)
    if train.compile:
        compile_layers(student)
    if train.liger:
        from transformers.integrations.liger import apply_liger_kernel

        # its fused loss would replace the objective's
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    if train.gradient_checkpointing:
        # the second is its name before transformers 5.23
        enable: Any = getattr(student, "activation_checkpointing_enable", None)
        (enable or student.gradient_checkpointing_enable)({"use_reentrant": False})
    if arguments.neftune_noise_alpha is not None:
        embeddings: Any = student.get_input_embeddings()
        embeddings.neftune_noise_alpha = arguments.neftune_noise_alpha
        embeddings.register_forward_hook(neftune_post_forward_hook)


def autocast_dtype(recipe: Recipe, arguments: TrainingArguments) -> torch.dtype | None:
    """The dtype of the student's arithmetic; None: that of its weights. Sharded weights are
    gathered in bfloat16 and need no autocast."""
    if arguments.fp16:
        return torch.float16
    whole = recipe.train.parallel == "ddp"
    return torch.bfloat16 if recipe.train.half_precision and whole else None


def choose_attention(model: PreTrainedModel, recipe: Recipe, *, documents: bool) -> None:
    """Use flex attention for `student.attention: auto` where documents are kept apart on a GPU: it
    skips what a mask hides, and a mask keeps torch from its fast kernels."""
    wanted = recipe.student.attention == "auto" and documents and uses_accelerator(recipe)
    tiles = recipe.data.block_size % _FLEX_TILE == 0
    if wanted and tiles and getattr(model, "_supports_flex_attn", False):
        model.set_attn_implementation("flex_attention")


def compile_layers(model: PreTrainedModel, **options: Any) -> None:
    """torch.compile each decoder layer: as fast as compiling the whole model, in seconds instead of
    minutes, and without touching the objective."""
    layers = find_layers(model)
    if layers is None:
        raise TrainingError(
            f"train.compile: no stack of decoder layers found in {type(model).__name__}."
        )
    prepare_compiler()
    for layer in layers:
        layer.compile(dynamic=False, **options)  # all micro-batches of a run have one shape


# ---- after the last step ----


def save_tokenizer(recipe: Recipe, folder: Path) -> None:
    """Put the student's tokenizer into its model folder: its own files where there are any."""
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


# ---- what the objective asks of a model ----


def understood_head(model: PreTrainedModel) -> HeadForm:
    """The form of the student's head, which the objective reads directly."""
    form = head_form(model)
    if form is None:
        raise TrainingError(
            f"{type(model).__name__} computes its logits in an unsupported way (weight, "
            "bias, scale and soft cap of the head do not explain them). "
            "Please report the architecture."
        )
    return form


def require_precision(model: nn.Module) -> None:
    """Refuse float16 weights, which cannot be trained: half of their updates round to nothing."""
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
    """Refuse an architecture that cannot keep the documents of a block apart."""
    if not separates_documents(model):
        raise TrainingError(
            f"{who} ({type(model).__name__}) lets a document see the one packed before it: its "
            f"architecture does not support restarting positions. Set data.document_mask to false, "
            "or use another model."
        )
