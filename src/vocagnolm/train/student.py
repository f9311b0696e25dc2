"""The student: loaded from a folder, the hub or a GGUF file, or made from a configuration."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from vocagnolm.alignment.tokenizer import gguf_tokenizer
from vocagnolm.errors import MissingExtraError, TrainingError
from vocagnolm.model.load import DTYPES, load_causal_lm
from vocagnolm.model.runtime import find_layers, prepare_compiler
from vocagnolm.recipe import LoraSection, Recipe
from vocagnolm.train.arguments import uses_accelerator

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
    if section.model is not None:
        if section.config is not None:
            raise TrainingError("Give either student.model or student.config, not both.")
        model = load_causal_lm(
            section.model, device="cpu", dtype=section.dtype, revision=section.revision
        )
        if Path(section.model).suffix.lower() == ".gguf":
            forget_quantisation(model)
    elif section.config is not None:
        set_seed(recipe.run.seed)
        model = model_from_config(section.config, DTYPES[section.dtype])
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


def model_from_config(settings: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config(settings), dtype=dtype)
    return model


def add_lora(model: PreTrainedModel, section: LoraSection) -> nn.Module:
    """The model with low-rank adapters, or the model itself when the rank is 0."""
    if section.rank == 0:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingExtraError("peft", "peft", "training with LoRA (lora.rank > 0)") from None
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=section.targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = get_peft_model(model, config)
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
