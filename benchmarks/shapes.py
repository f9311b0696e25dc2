"""Models of known shapes with random weights, and what a forward pass of one costs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float32
"""bfloat16 on a CPU can be very slow."""


_NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


def _shape(kind: Callable[..., PretrainedConfig], *sizes: int, **more: Any) -> PretrainedConfig:
    return kind(**dict(zip(_NAMES, sizes, strict=True)), **more)


def config_of(name: str, smoke: bool = False, vocabulary: int = 320) -> PretrainedConfig:
    """The configuration of a model; with `smoke` a tiny one of the same kind, whose vocabulary has
    the given size."""
    tiny = (vocabulary, 64, 128, 2, 4, 2)
    if name == "smollm2-135m":
        sizes = (49152, 576, 1536, 30, 9, 3)
        more: dict[str, Any] = {"max_position_embeddings": 8192, "rope_theta": 100000.0}
        return _shape(LlamaConfig, *(tiny if smoke else sizes), tie_word_embeddings=True, **more)
    if name == "tinyllama":
        sizes = (32000, 2048, 5632, 22, 32, 4)
        return _shape(LlamaConfig, *(tiny if smoke else sizes), max_position_embeddings=2048)
    if name == "qwen2.5-1.5b":
        sizes = (151936, 1536, 8960, 28, 12, 2)
        return _shape(Qwen2Config, *(tiny if smoke else sizes), tie_word_embeddings=True)
    if name == "qwen2.5-7b":
        sizes = (152064, 3584, 18944, 28, 28, 4)
        return _shape(Qwen2Config, *(tiny if smoke else sizes), max_position_embeddings=4096)
    raise SystemExit(f"no shape {name}: smollm2-135m, tinyllama, qwen2.5-1.5b or qwen2.5-7b")


def random_model(config: PretrainedConfig, dtype: torch.dtype = HALF, device: str = DEVICE) -> Any:
    """A model with random weights, the same ones every time, made on the device."""
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(usual)


def random_teacher(name: str, smoke: bool, **more: Any) -> Any:
    """A model that is only read."""
    return random_model(config_of(name, smoke, **more)).eval().requires_grad_(False)


def tiny_model(folder: Path, vocabulary: int, layers: int) -> str:
    """Save a tiny model with random weights and a tokenizer made from the built-in sample."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from vocagnolm.report.comparison import SAMPLE

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    torch.manual_seed(vocabulary)
    config = LlamaConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 16) * 16,  # or fp8 would leave the head alone
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # at the usual range, all tokens are equally likely and nothing can go wrong
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def forward_flops(config: PretrainedConfig, length: int) -> float:
    """Multiplications and additions per token of a forward pass, causal attention included."""
    d, heads = config.hidden_size, config.num_attention_heads
    kv = config.num_key_value_heads * (d // heads)
    layer = 2 * d * d + 2 * d * kv + 3 * d * config.intermediate_size
    products = config.num_hidden_layers * layer + d * config.vocab_size
    return float(2 * products + 2 * config.num_hidden_layers * length * d)
