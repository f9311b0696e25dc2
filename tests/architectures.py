"""Tiny random models of many architectures, made on the spot."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_LLAMA: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 160,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}

# The heads' constants are large, so that a wrong one shows on random weights.
SEPARATING: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mistral": _LLAMA,
    "phi": _LLAMA,
    "phi3": _LLAMA,
    "olmo2": _LLAMA,
    "starcoder2": _LLAMA,
    "stablelm": _LLAMA,
    "smollm3": _LLAMA,
    "exaone4": _LLAMA,
    "glm4": _LLAMA,
    "ernie4_5": _LLAMA,
    "nemotron": _LLAMA,
    "gpt_neox": _LLAMA,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "gpt2": _GPT2,
    "gemma2": _LLAMA | {"head_dim": 8, "final_logit_softcapping": 0.3},
    "gemma3_text": _LLAMA | {"head_dim": 8},
    "granite": _LLAMA | {"logits_scaling": 4.0},
    "hyperclovax": _LLAMA | {"logits_scaling": 4.0},
    "cohere": _LLAMA | {"logit_scale": 0.25},
    "mixtral": _LLAMA | _EXPERTS,
    "qwen3_moe": _LLAMA | _EXPERTS,
    "qwen2_moe": _LLAMA | _EXPERTS,
    "olmoe": _LLAMA | _EXPERTS,
    "granitemoe": _LLAMA | _EXPERTS | {"logits_scaling": 4.0},
    "jetmoe": _LLAMA | _EXPERTS,
    "llama4_text": _LLAMA | _EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 64},
}
LEAKING: dict[str, dict[str, Any]] = {
    "opt": {
        **_LLAMA,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"vocab_size": 160, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": 160, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "xglm": {
        "vocab_size": 160,
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "falcon": {**_LLAMA, "alibi": False},
    "gpt_oss": _LLAMA | _EXPERTS,
    "mamba": {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "vocab_size": 160,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "head_dim": 8,
        "num_heads": 8,
        "n_groups": 1,
    },
    "falcon_h1": _LLAMA | _MAMBA | {"mamba_d_ssm": 64, "head_dim": 8, "lm_head_multiplier": 2.5},
    "bamba": _LLAMA | _MAMBA | {"attn_layer_indices": [1]},
    "jamba": _LLAMA
    | _EXPERTS
    | {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "granitemoehybrid": _LLAMA
    | _EXPERTS
    | _MAMBA
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "qwen3_next": _LLAMA
    | _EXPERTS
    | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": _LLAMA | {"layer_types": ["conv", "full_attention"]},
    "rwkv": {
        "vocab_size": 160,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "num_hidden_layers": 2,
        "context_length": 128,
    },
    "recurrent_gemma": {
        "vocab_size": 160,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "lru_width": 32,
        "attention_window_size": 64,
        "logits_soft_cap": 0.3,
    },
    "xlstm": {
        "vocab_size": 160,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "output_logit_soft_cap": 0.3,
        "chunkwise_kernel": "chunkwise--native_autograd",
        "sequence_kernel": "native_sequence__native",
        "step_kernel": "native",
    },
}
ARCHITECTURES = SEPARATING | LEAKING


def tiny(name: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(ARCHITECTURES[name] | settings))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()
