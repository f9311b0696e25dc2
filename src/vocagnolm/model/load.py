"""Load a causal language model without running anybody's code.

Weights come from safetensors or GGUF, which hold numbers only. Pickled checkpoints (`.bin`, `.pt`)
can run code when they are opened and are refused, and so is a model's own Python code unless the
user asks for it.
"""

import hashlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.errors import MissingExtraError, ModelError, UsageError
from vocagnolm.files import parse_json
from vocagnolm.model.fp8 import require_fp8, to_fp8
from vocagnolm.model.sharding import fewest_parts, loaded_bytes, loading_options, require_divisible

# ---- quantised weights ----

# what config.json calls the kind: {module: what pip calls it}
_PACKAGES = {
    "aqlm": {"aqlm": "aqlm"},
    "auto-round": {"auto_round": "auto-round"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "hqq": {"hqq": "hqq"},
    "torchao": {"torchao": "torchao"},
}
# their matrix products are kernels that this package fetches; a CPU gets plain weights instead
_KERNELS = {"fp8": {"kernels": "kernels"}, "mxfp8": {"kernels": "kernels"}}


def quantisation_of(config: Any) -> str | None:
    """The kind, as config.json names it; None for plain weights."""
    about = getattr(config, "quantization_config", None)
    if about is None:
        return None
    values = about if isinstance(about, dict) else about.to_dict()
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"  # older ones do not name themselves
    method = values.get("quant_method")
    return str(getattr(method, "value", method))


def require_packages(name: str, config: Any, device: torch.device) -> None:
    kind = quantisation_of(config)
    if kind is None:
        return
    needed = _PACKAGES | (_KERNELS if device.type == "cuda" else {})
    missing = [
        package
        for module, package in needed.get(kind, {}).items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ModelError(
            f"{name} has {kind} weights, which transformers loads with {' and '.join(missing)}, "
            f"not installed here. Install with: pip install {' '.join(missing)}. Or use the "
            "model's weights that are not quantised."
        )


# ---- loading ----


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
# The fingerprint reads this many evenly spaced blocks of every weight file: a 140 GB model is
# told from its fine-tuned sister in a second.
_FINGERPRINT_BLOCKS = 1024
_FINGERPRINT_BLOCK_BYTES = 16 * 1024
_HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_HUB_IGNORED = ["consolidated*", "original/*"]

# transformers' list of optional packages is long; these logs are not for our users
logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found and identified, its weights not yet in memory."""

    folder: Path
    gguf_file: str | None
    weight_files: tuple[Path, ...]
    config: Any
    tokenizer: TextTokenizer
    name: str
    revision: str | None
    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False
    fp8: bool = False
    """The decoder's products, where `dtype` is that of everything else."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text (beginning-of-text), as the model was trained."""
        return self.tokenizer.prefix_ids

    @property
    def dtype_name(self) -> str:
        return "fp8" if self.fp8 else str(self.dtype).removeprefix("torch.")

    @property
    def max_context(self) -> int | None:
        text_config = self.config.get_text_config()
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            value = getattr(text_config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        return None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens with which the model ends what it writes, as its files say."""
        generation = self.folder / "generation_config.json"
        told = [self.tokenizer.eos_id, self.config.get_text_config().eos_token_id]
        if self.gguf_file is None and generation.is_file():
            told.append(parse_json(generation.read_text(encoding="utf-8")).get("eos_token_id"))
        flat = [one for value in told for one in (value if isinstance(value, list) else [value])]
        return tuple(sorted({index for index in flat if isinstance(index, int)}))

    def describe(self) -> dict[str, Any]:
        """What is needed to know the model again."""
        config_file = () if self.gguf_file else (self.folder / "config.json",)
        return {
            "name": self.name,
            "revision": self.revision,
            "architecture": (self.config.architectures or [self.config.model_type])[0],
            "fingerprint": weights_fingerprint([*config_file, *self.weight_files]),
        }

    def require_shardable(self, shards: int) -> None:
        if self.fp8:
            raise UsageError("--shard-teacher and --dtype fp8 do not go together: leave one out.")
        if self.gguf_file:
            raise UsageError(
                f"--shard-teacher: {self.name} is a GGUF file, which is loaded whole. Use the "
                "model's safetensors, or leave --shard-teacher out."
            )
        require_divisible(self.name, self.config, shards)

    def fewest_shards(self) -> int:
        """As few GPUs of this machine as hold the weights; 1 on a CPU."""
        if self.device.type != "cuda":
            return 1
        self.require_shardable(1)
        gpus = range(torch.cuda.device_count())
        memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
        weights = loaded_bytes(self.weight_files, self.dtype)
        return fewest_parts(self.name, self.config, weights, memory)

    def load(self, shards: int = 1) -> PreTrainedModel:
        """The model, in evaluation mode, on its device. Only safetensors or GGUF are opened.
        `shards`: this process's part of it, in a group of so many processes."""
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.gguf_file:
            options |= {"gguf_file": self.gguf_file}
        else:
            options |= {"use_safetensors": True, "trust_remote_code": self.trust_remote_code}
        if shards > 1:
            options |= loading_options(shards)
        elif self.device.type == "cuda":
            options["device_map"] = {"": self.device}
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(self.folder), output_loading_info=True, **options
            )
            model, report = loaded
        except Exception as error:
            raise ModelError(_loading_message(self.folder, error)) from error
        if missing := sorted(report["missing_keys"]):
            # transformers fills them with random numbers and only warns
            raise ModelError(
                f"{self.folder} lacks the weights of {', '.join(missing[:3])} ({len(missing)} in "
                "all). It is cut short, or not a causal language model."
            )
        if model.get_output_embeddings() is None:
            raise ModelError(f"{self.folder}: {type(model).__name__} has no language-model head.")
        if quantisation_of(self.config) is None:
            model = model.to(self.device)  # quantised ones are there, and some cannot be moved
        if self.fp8:
            to_fp8(model)
        ready: PreTrainedModel = model.eval().requires_grad_(False)
        return ready


def load_causal_lm(source: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model folder, a model of the hub (`owner/name`) or a GGUF file; options as in
    `open_model`."""
    return open_model(source, **options).load()


def open_model(
    source: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> ModelFiles:
    """Find a model and its tokenizer, without loading the weights; with `weights=False` they need
    not be there, and are not downloaded.

    `dtype="auto"`: float32 on a CPU; on a GPU the checkpoint's own half precision, else bfloat16.
    """
    torch_device = resolve_device(device)
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path, torch_device, dtype)
    name = path.resolve().name if path.is_dir() else str(source)
    from_hub = not path.is_dir()
    if from_hub:
        path, revision = _from_hub(str(source), revision, trust_remote_code, weights)
    files = _weight_files(path, name if from_hub else None) if weights else []
    config = _load_config(path, trust_remote_code)
    require_packages(name, config, torch_device)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    tokenizer.name = name
    return ModelFiles(
        folder=path,
        gguf_file=None,
        weight_files=tuple(files),
        config=config,
        tokenizer=tokenizer,
        name=name,
        revision=revision,
        device=torch_device,
        dtype=resolve_dtype(dtype, torch_device, config),
        trust_remote_code=trust_remote_code,
        fp8=dtype == "fp8",
    )


def resolve_device(device: str) -> torch.device:
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no GPU here. Use --device cpu.")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(dtype: str, device: torch.device, config: Any) -> torch.dtype:
    if dtype == "fp8":
        require_fp8(device)
        if (kind := quantisation_of(config)) is not None:
            raise UsageError(f"--dtype fp8: the weights are quantised already ({kind}).")
        return torch.bfloat16
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16


def weights_fingerprint(files: list[Path]) -> str:
    """Size and evenly spaced blocks of every file (all of it when it is small)."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.suffix} {size}\n".encode())
        with open(path, "rb") as file:
            if size <= _FINGERPRINT_BLOCKS * _FINGERPRINT_BLOCK_BYTES:
                digest.update(file.read())
                continue
            for block in range(_FINGERPRINT_BLOCKS):
                file.seek((size - _FINGERPRINT_BLOCK_BYTES) * block // (_FINGERPRINT_BLOCKS - 1))
                digest.update(file.read(_FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()


def _open_gguf(path: Path, device: torch.device, dtype: str) -> ModelFiles:
    if not path.is_file():
        raise ModelError(f"{path} does not exist.")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf", f"reading {path.name}")
    try:
        config = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(f"{path} cannot be read as a GGUF model: {error}") from error
    tokenizer = load_tokenizer(path)
    return ModelFiles(
        folder=path.parent,
        gguf_file=path.name,
        weight_files=(path,),
        config=config,
        tokenizer=tokenizer,
        name=path.name,
        revision=None,
        device=device,
        dtype=resolve_dtype(dtype, device, config),
        fp8=dtype == "fp8",
    )


def _from_hub(
    name: str, revision: str | None, trust_remote_code: bool, weights: bool
) -> tuple[Path, str]:
    """Download what is safe to open; nothing else even reaches this machine."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"{name} does not exist. Expected a model folder, a .gguf file or a hub id such as "
            "Qwen/Qwen2.5-Math-7B."
        )
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_PATTERNS, "*.py"] if trust_remote_code else _HUB_PATTERNS
    ignored = _HUB_IGNORED if weights else [*_HUB_IGNORED, "*.safetensors"]
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored
        )
    except Exception as error:  # network, authorisation, cache: many types, one meaning here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"'{name}' is neither a folder here nor a model that the hub gave: "
            f"{reason.rstrip('.')}. "
            "Check the spelling, or download it and pass the folder."
        ) from None
    return Path(folder), Path(folder).name


def _weight_files(folder: Path, hub_id: str | None = None) -> list[Path]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{hub_id or folder} has no config.json: it is not a model folder.")
    files = sorted(folder.glob("model*.safetensors"))
    if not files and hub_id is not None:
        raise ModelError(
            f"{hub_id} has no safetensors weights on the hub; pickled files can run code when they "
            "are opened and are not loaded. Often a pull request on the model's page adds "
            "safetensors: give its number as the revision, refs/pr/N. Or convert the model once "
            "with save_pretrained(folder) where you trust it, and pass the folder."
        )
    if not files:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        raise ModelError(
            f"{folder} has no safetensors weights"
            + (
                f", only {', '.join(pickled[:3])}: pickled files can run code when they are opened "
                "and are not loaded. Convert the model once with "
                "save_pretrained(folder, safe_serialization=True) where you trust it."
                if pickled
                else ". Expected model.safetensors or model-00001-of-0000N.safetensors."
            )
        )
    return files


def _load_config(folder: Path, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(_loading_message(folder, error)) from error


def _loading_message(folder: Path, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return (
            f"{folder} needs Python code of its own, which is not run by default. Read that code, "
            "and pass --trust-remote-code to `score` or `evaluate` if you trust it."
        )
    return f"{folder} cannot be loaded as a causal language model: {type(error).__name__}: {text}"
