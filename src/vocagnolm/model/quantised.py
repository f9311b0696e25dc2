"""Weights that are quantised on the hub: transformers loads them with packages of their makers."""

import importlib.util
from typing import Any

import torch

from vocagnolm.errors import ModelError

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
