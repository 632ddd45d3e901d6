"""Transformers models with few and narrow layers, for checks that take seconds."""

import re
from typing import Any

from transformers import PreTrainedConfig

NUM_LAYERS = 2
SIZES: dict[str, int] = {
    r"^num_hidden_layers$": NUM_LAYERS,
    r"num_(attention|key_value)_heads$|num_heads$|mamba_n_heads$": 4,
    r"^vocab_size|max_position_embeddings$": 64,
    r"^qk_head_dim$": 16,
    r"head_dim$|lora_rank$|mamba_d_head$": 8,
    r"^n_groups$": 2,
    r"^n_group$|^topk_group$|num_nextn|num_mtp|(pad|bos|eos)_token_id$": 1,
    r"first_k_dense|num_dense_layers": 0,
    r"experts_per_tok|(?<!_)top_?k(?!_)|moe_topk|moe_k$|num_selected": 2,
    r"num.*experts$|n_routed_experts|num_experts": 4,
    r"hidden_size$|hidden_size_per_layer_input$|hidden_dim$|d_model$|latent_size$": 16,
    r"intermediate|ffn|expert_dim": 8,
}
"""By the name of an attribute of a config; the first that matches."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
    },
    "glm4v_moe_text": {"head_dim": 128},
    "glm5_next_text": {"mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"]},
    "hy_v4_vl_text": {"head_dim": 64, "index_head_dim": 64, "qk_rope_head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"use_mamba_kernels": False},
    "kolibri1_1": {"head_dim": 16, "index_num_heads": 1, "mlp_only_layers": []},
    "lfm2_moe": {"layer_types": ["full_attention"] * NUM_LAYERS},
    "mimo_v2_flash": {"head_dim": 24, "layer_types": ["full_attention"] * NUM_LAYERS},
    "mistral4": {"head_dim": 16},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""By model type, where sizes alone do not make a model, or none with experts."""


def size_of(name: str, value: object) -> int | None:
    """The size for an attribute; None to leave it as it is, as a head of size 0 is, which is not there."""
    if value == 0 and name.endswith("head_dim"):
        return None
    if "shared" in name or not (type(value) is int or (value is None and "experts" in name)):
        return None
    return next((size for pattern, size in SIZES.items() if re.search(pattern, name)), None)


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same kind and the same choices, but for sizes. Lists by layer go."""
    num_layers = getattr(config, "num_hidden_layers", None)
    chosen: dict[str, Any] = {}
    default = type(config)().to_dict()
    for name, value in config.to_dict().items():
        size = size_of(name, value)
        if size is not None:
            chosen[name] = size
        elif isinstance(value, bool | float | str) and value != default.get(name):
            chosen[name] = value
        elif isinstance(value, list) and len(value) == num_layers and value != default.get(name):
            chosen[name] = value[-NUM_LAYERS:]
    chosen.pop("model_type", None)
    return type(config)(**(chosen | OVERRIDES.get(config.model_type, {})))
