"""Load a causal language model without running anybody's code.

Weights come from safetensors or GGUF, which hold numbers only. Pickled checkpoints (`.bin`, `.pt`)
can run code when they are opened and are refused, and so is a model's own Python code unless the
user asks for it.
"""

import hashlib
import importlib.util
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.alignment.tokenizer import from_hub
from vocagnolm.base.files import model_damage, model_folder_name, require_nameable
from vocagnolm.base.strangers import read_config, read_stranger, require_file, require_weights
from vocagnolm.errors import ModelError, UsageError, optional
from vocagnolm.model.fp8 import require_fp8, to_fp8

# ---- quantised weights ----

# what config.json calls the kind -> packages, where not one of that name
_PACKAGES = {"awq": ["gptqmodel"], "gptq": ["optimum", "gptqmodel"]}
_OWN_PACKAGE = ("aqlm", "auto-round", "bitsandbytes", "compressed-tensors", "hqq", "torchao")
# their matrix products are kernels that this package fetches; a CPU gets plain weights instead
_KERNELS = {"fp8": ["kernels"], "mxfp8": ["kernels"]}


def quantisation_of(config: Any) -> str | None:
    """The kind of quantization, as config.json names it; None for plain weights."""
    about = getattr(config, "quantization_config", None)
    if about is None:
        return None
    values = about if isinstance(about, dict) else about.to_dict()
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"  # older ones do not name themselves
    method = values.get("quant_method")
    return str(getattr(method, "value", method))


def require_packages(name: str, config: Any, device: torch.device) -> None:
    """Refuse quantized weights whose packages are not installed."""
    kind = quantisation_of(config)
    if kind is None:
        return
    known = _PACKAGES | (_KERNELS if device.type == "cuda" else {})
    needed = [kind] if kind in _OWN_PACKAGE else known.get(kind, [])
    missing = [p for p in needed if importlib.util.find_spec(p.replace("-", "_")) is None]
    if missing:
        raise ModelError(
            f"{name} has {kind} weights, which transformers loads with {' and '.join(missing)}, "
            f"not installed here. Install with: pip install {' '.join(missing)}. Or use the "
            f"unquantized weights."
        )


# ---- a model over several GPUs ----

# All processes of a group hold a model together, by the plan that transformers has for its
# architecture: each has a part of every matrix, and all of them pass through it together.
_HEADS = ("num_attention_heads", "num_key_value_heads")


def _hold_whole_head(model: PreTrainedModel) -> None:
    """Give every process all rows of the head, which the plan has split. Its logits are then
    computed as on one GPU, in float32, and nothing else has to know of the other processes."""
    head: Any = model.get_output_embeddings()
    if not isinstance(head.weight, DTensor):
        return
    whole = torch.nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
    for name, tensor in head.named_parameters():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        setattr(whole, name, torch.nn.Parameter(full.detach(), requires_grad=False))
    model.set_output_embeddings(whole)


# ---- loading ----


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
# The fingerprint reads this many evenly spaced blocks of every weight file: a 140 GB model is
# distinguished from its fine-tuned version in a second.
_FINGERPRINT_BLOCKS = 1024
_FINGERPRINT_BLOCK_BYTES = 16 * 1024
_HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_HUB_IGNORED = ["consolidated*", "original/*"]

# transformers' list of optional packages is long; these logs are not for our users
logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found and identified, but whose weights are not loaded yet."""

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
    """Whether the decoder's products are in fp8; `dtype` is that of everything else."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts before a text (beginning-of-text), as in the model's
        training."""
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
        """Tokens with which the model ends its output, according to its files."""
        generation = self.folder / "generation_config.json"
        named = [self.tokenizer.eos_id, self.config.get_text_config().eos_token_id]
        if self.gguf_file is None and generation.is_file():
            named.append(read_stranger(generation, ModelError).get("eos_token_id"))
        lists = [value if isinstance(value, list) else [value] for value in named]
        return tuple(sorted({id for ids in lists for id in ids if isinstance(id, int)}))

    def describe(self) -> dict[str, Any]:
        """The facts by which the model is recognized."""
        config_file = () if self.gguf_file else (self.folder / "config.json",)
        return {
            "name": self.name,
            "revision": self.revision,
            "architecture": (self.config.architectures or [self.config.model_type])[0],
            "fingerprint": weights_fingerprint([*config_file, *self.weight_files]),
        }

    def require_shardable(self, shards: int) -> None:
        """Refuse a model that cannot be split over this many processes."""
        if self.fp8:
            raise UsageError(
                "--shard-teacher and --dtype fp8 cannot be combined: remove one of them."
            )
        if self.gguf_file:
            raise UsageError(
                f"--shard-teacher: {self.name} is a GGUF file, which is loaded whole. Use the "
                "model's safetensors, or remove --shard-teacher."
            )
        text = self.config.get_text_config()
        if not getattr(text, "base_model_tp_plan", None):
            raise UsageError(
                f"--shard-teacher: transformers has no tensor-parallel plan for {self.name} "
                f"({text.model_type}), so it cannot be split over GPUs. Remove --shard-teacher: "
                "one GPU must hold all of it."
            )
        heads = {key: n for key in _HEADS if isinstance(n := getattr(text, key, None), int)}
        if (common := math.gcd(*heads.values())) % shards:
            named = ", ".join(f"{count} {key}" for key, count in heads.items())
            possible = [str(size) for size in range(1, common + 1) if common % size == 0]
            raise UsageError(
                f"--shard-teacher: the heads of {self.name} ({named}) cannot be shared by {shards} "
                f"processes. Start torchrun with --nproc_per_node {', '.join(possible)}."
            )

    def load(self, shards: int = 1) -> PreTrainedModel:
        """Load the model on its device, in evaluation mode. Only safetensors and GGUF files are
        opened. `shards`: so many processes hold it together, and this one loads its part."""
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.gguf_file:
            options |= {"gguf_file": self.gguf_file}
        else:
            options |= {"use_safetensors": True, "trust_remote_code": self.trust_remote_code}
        if shards > 1:
            if importlib.util.find_spec("transformers.distributed.mixin") is None:
                raise ModelError(
                    "--shard-teacher needs a newer transformers: pip install --upgrade transformers"
                )
            from transformers.distributed.configuration_utils import DistributedConfig

            options["distributed_config"] = DistributedConfig(tp_size=shards)
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
                "all). It is truncated, or not a causal language model."
            )
        if model.get_output_embeddings() is None:
            raise ModelError(f"{self.folder}: {type(model).__name__} has no language-model head.")
        if quantisation_of(self.config) is None:
            model = model.to(self.device)  # quantised ones are there, and some cannot be moved
        if shards > 1:
            _hold_whole_head(model)
        if self.fp8:
            to_fp8(model)
        ready: PreTrainedModel = model.eval().requires_grad_(False)
        return ready


def load_causal_lm(source: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model folder, a hub model (`owner/name`) or a GGUF file; options as in
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
    """Find a model and its tokenizer without loading the weights. With `weights=False` the weights
    need not exist and are not downloaded.

    `dtype="auto"`: float32 on a CPU; on a GPU the checkpoint's own half precision, or bfloat16.
    """
    require_nameable(source)
    torch_device, path = resolve_device(device), Path(source)
    gguf_file = path.name if path.suffix.lower() == ".gguf" else None
    if gguf_file is not None:
        config, files, name, revision = gguf_config(path), [path], path.name, None
        tokenizer, path, trust_remote_code = load_tokenizer(path), path.parent, False
    else:
        hub_id = None if path.is_dir() else str(source)
        name = hub_id or model_folder_name(path)
        if hub_id is not None:  # what is safe to open; nothing else even reaches this machine
            path = from_hub(
                hub_id,
                ModelError,
                "a model folder, a .gguf file",
                revision=revision,
                allow_patterns=[*_HUB_PATTERNS, *["*.py"] * trust_remote_code],
                ignore_patterns=[*_HUB_IGNORED, *["*.safetensors"] * (not weights)],
            )
            revision = path.name
        if weights and (wrong := model_damage(path)):
            raise ModelError(wrong)
        files = _weight_files(path, hub_id) if weights else []
        if (path / "config.json").is_file():
            read_config(path, ModelError)
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise ModelError(_loading_message(path, error)) from error
        require_packages(name, config, torch_device)
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        tokenizer.name = name
    return ModelFiles(
        folder=path,
        gguf_file=gguf_file,
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
    """A digest of the size and of evenly spaced blocks of every file (all of a small file)."""
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


def gguf_config(path: Path) -> Any:
    """The transformers configuration of a GGUF file."""
    try:
        require_file(path, ModelError)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{path} does not exist.") from None
    optional("gguf", "gguf", f"reading {path.name}")
    try:
        return AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(f"{path} cannot be read as a GGUF model: {error}") from error


def _weight_files(folder: Path, hub_id: str | None) -> list[Path]:
    name = hub_id or str(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json: it is not a model folder.")
    require_weights(folder, ModelError)
    files = sorted(folder.glob("model*.safetensors"))
    if files:
        return files
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if hub_id is None and not pickled:
        raise ModelError(
            f"{name} has no safetensors weights. Expected model.safetensors or "
            "model-00001-of-0000N.safetensors."
        )
    where = " on the hub" if hub_id else f", only {', '.join(pickled[:3])}"
    hint = "Often a pull request there adds them: give it as the revision, refs/pr/N. Or convert"
    raise ModelError(
        f"{name} has no safetensors weights{where}: pickled files can run code when they are "
        f"opened and are not loaded. {hint if hub_id else 'Convert'} the model once with "
        "save_pretrained(folder) where you trust it, and pass the folder."
    )


def _loading_message(folder: Path, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return (
            f"{folder} has its own Python code, which is not run by default. Review that code, "
            f"and pass --trust-remote-code to `score` or `evaluate` if you trust it."
        )
    return (
        f"{folder} cannot be loaded as a causal language model: {type(error).__name__}: {text:.600}"
    )
