"""A 7B teacher of Qwen2.5's shape with random weights, documents for it, and what its losses should
be."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Every 4th percentile of document lengths in tokens: nLab, 2,210 documents, mean 1,589. The
# longest is cut to 40,000: one document of 181,391 would be a tenth of the work.
LENGTH_QUANTILES = (
    *(1, 18, 45, 102, 153, 187, 226, 269, 307, 358, 416, 482, 550, 626, 733, 833, 966, 1108),
    *(1287, 1510, 1797, 2220, 2965, 3995, 6384, 40000),
)


def teacher_config(smoke: bool) -> Qwen2Config:
    small: dict[str, Any] = {
        "vocab_size": 640,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    large: dict[str, Any] = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    shape = small if smoke else large
    return Qwen2Config(
        **shape, max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False
    )


def build(config: Qwen2Config) -> Any:
    torch.manual_seed(0)
    # bf16 on a CPU can be very slow
    dtype = torch.bfloat16 if CUDA else torch.float32
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def flops_per_token(model: Any, length: int) -> float:
    """Forward: two per weight outside the embeddings, and causal attention."""
    config = model.config
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    attention = 2 * config.num_hidden_layers * length * config.hidden_size
    return float(2 * weights + attention)


def mixed_lengths(documents: int, scale: float) -> list[int]:
    """Lengths with the corpus's quantiles, in a fixed random order."""
    draw = np.random.default_rng(0)
    places = draw.random(documents) * (len(LENGTH_QUANTILES) - 1)
    lengths = np.interp(places, np.arange(len(LENGTH_QUANTILES)), LENGTH_QUANTILES)
    whole: list[int] = np.maximum(2, lengths * scale).astype(int).tolist()
    return whole


def full_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    flat = logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none")


def exact_head(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 products of the model's own hidden states, a few tokens at a time."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    weight = model.lm_head.weight.float()
    parts = [
        F.cross_entropy(h.float() @ weight.T, y, reduction="none")
        for h, y in zip(hidden.split(512), labels.split(512), strict=True)
    ]
    return torch.cat(parts)
