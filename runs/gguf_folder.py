"""A GGUF file as an ordinary model folder: dequantised to bfloat16 on all cores.

    python runs/gguf_folder.py MODEL.gguf SKELETON OUT

SKELETON holds config.json and the tokenizer's files. transformers can read GGUF too, but on one
core and with results that depend on its version (since 5.2x weights may stay packed); a study
wants the same plain weights everywhere. Architectures: llama, qwen2, gemma3_text.
"""

import json
import os
import re
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from vocagnolm.alignment import load_tokenizer
from vocagnolm.alignment.tokenizer import metadata

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def target_name(name: str, kind: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None:
        raise ValueError(f"unknown tensor {name}")
    names = GEMMA_NAMES if kind == "gemma3_text" else NAMES
    return f"model.layers.{match[1]}.{names[match[2]]}.{suffix}"


def tensor_table(path: str) -> list[dict[str, Any]]:
    """Where the tensors lie in the file. Reading it walks through the whole vocabulary in Python,
    which takes seconds: done once, and kept beside a skeleton as tensors.json if you like."""
    return [
        {
            "name": tensor.name,
            "type": int(tensor.tensor_type),
            "shape": [int(n) for n in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "bytes": int(tensor.n_bytes),
        }
        for tensor in gguf.GGUFReader(path).tensors
    ]


def convert(task: tuple[str, dict[str, Any], dict[str, Any]]) -> tuple[str, np.ndarray]:
    path, tensor, config = task
    torch.set_num_threads(1)
    kind_of_data = gguf.GGMLQuantizationType(tensor["type"])
    raw = np.memmap(path, np.uint8, "r", tensor["offset"], (tensor["bytes"],))
    if kind_of_data == gguf.GGMLQuantizationType.F32:
        weights = raw.view(np.float32).reshape(tensor["shape"])
    else:
        rows = raw.reshape(tensor["shape"][0], -1)
        weights = gguf.quants.dequantize(rows, kind_of_data).astype(np.float32)
    name = tensor["name"]
    kind = config["model_type"]
    if kind == "llama" and re.search(r"attn_[qk]\.", name):
        heads = config["num_attention_heads"]
        if "attn_k." in name:
            heads = config["num_key_value_heads"]
        half = weights.shape[0] // heads // 2  # llama.cpp interleaves the rotary halves
        weights = weights.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weights.shape)
    if kind == "gemma3_text" and "norm" in name:
        weights = weights - 1.0  # llama.cpp stores 1 + weight
    # as integers: NumPy has no bfloat16, and plain arrays travel between processes
    half_bits = torch.from_numpy(weights.copy()).bfloat16().view(torch.int16).numpy()
    return target_name(name, kind), half_bits


def refuse_other_beginning(path: str, skeleton: str) -> None:
    """A tokenizer saved by transformers from a GGUF file has lost the token that begins a text."""
    begins = bool(load_tokenizer(skeleton).prefix_ids)
    wanted = metadata(Path(path), "tokenizer.ggml.add_bos_token")
    if wanted is not None and begins != wanted:
        sys.exit(f"{skeleton}: texts begin with a token: {begins}; {path} says: {wanted}.")


def main(path: str, skeleton: str, out: str, workers: int | None = None) -> None:
    refuse_other_beginning(path, skeleton)
    config = json.loads((Path(skeleton) / "config.json").read_text("utf-8"))
    kept = Path(skeleton) / "tensors.json"
    table = json.loads(kept.read_text("utf-8")) if kept.is_file() else tensor_table(path)
    table.sort(key=lambda tensor: -tensor["bytes"])  # the largest first
    with get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        bits = dict(pool.imap_unordered(convert, [(path, t, config) for t in table]))
    tensors = {name: torch.from_numpy(b).view(torch.bfloat16) for name, b in bits.items()}
    folder = Path(f"{out}.part")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(skeleton, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    os.replace(folder, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *(int(n) for n in sys.argv[4:5]))
