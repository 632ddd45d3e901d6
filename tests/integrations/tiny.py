"""Every experts class that transformers decorates, found in its source, and tiny instances of them."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"^@use_experts_implementation(?:\(.*?\))?\s*\nclass (\w+)", re.M | re.S)
SIZES = {
    r"experts_per_tok|(?<!_)top_?k(?!_)|moe_topk|moe_k$|num_selected": 2,
    r"num.*experts$|n_routed_experts|num_experts": 4,
    r"hidden_size$|hidden_size_per_layer_input$|hidden_dim$|d_model$|latent_size$": 16,
    r"intermediate|ffn|expert_dim": 8,
}


def decorated() -> Iterator[tuple[str, str]]:
    """(module, class) of every experts class."""
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        for name in DECORATED.findall(file.read_text(encoding="utf-8")):
            yield f"transformers.models.{file.parent.name}.{file.stem}", name


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif value is None or type(value) is int:
            for pattern, size in SIZES.items():
                if re.search(pattern, name) and "shared" not in name:
                    setattr(config, name, size)
                    break
    return config


def configs(module: Any, experts: type[nn.Module]) -> Iterator[PreTrainedConfig]:
    """Of the constructor's annotation, then of the module, those for text first."""
    (annotation, *_) = [
        parameter.annotation
        for parameter in list(inspect.signature(experts.__init__).parameters.values())[1:]
    ]
    found = [
        value
        for value in [annotation, *vars(module).values()]
        if inspect.isclass(value)
        and issubclass(value, PreTrainedConfig)
        and value is not PreTrainedConfig
    ]
    found[1:] = sorted(found[1:], key=lambda value: "Text" not in value.__name__)
    for kind in found:
        config = kind()
        yield shrink(config)
        for part in vars(config).values():
            if isinstance(part, PreTrainedConfig):
                yield part


LAYERS = {
    r"^num_hidden_layers$": 2,
    r"num_(attention|key_value)_heads$|num_heads$|mamba_n_heads$": 4,
    r"^vocab_size|max_position_embeddings$": 64,
    r"^qk_head_dim$": 16,
    r"head_dim$|lora_rank$|mamba_d_head$": 8,
    r"^n_groups$": 2,
    r"^n_group$|^topk_group$|num_nextn|num_mtp|(pad|bos|eos)_token_id$": 1,
    r"first_k_dense|num_dense_layers": 0,
}
TINY_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "flint": {"mlp_only_layers": []},
    "gemma4": {"enable_moe_block": True, **TINY_EXPERTS},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"]},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "mimo_v2_flash": {"head_dim": 24, "layer_types": ["full_attention", "full_attention"]},
    "mistral4": {"head_dim": 16},
    "qwen3_5_moe": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Where sizes alone do not make a model, or one with experts."""


def model_of(module_name: str) -> nn.Module | None:
    """A tiny causal language model of a module, or None if it has none."""
    module = importlib.import_module(module_name)
    names = [name for name in vars(module) if name.endswith("ForCausalLM")]
    if not names:
        return None
    model = getattr(module, names[0])
    sizes = {}
    for name, value in model.config_class().to_dict().items():
        if type(value) is int or (value is None and "experts" in name):
            patterns = (p for p in LAYERS | SIZES if re.search(p, name) and "shared" not in name)
            if (pattern := next(patterns, None)) is not None:
                sizes[name] = (LAYERS | SIZES)[pattern]
    sizes |= OVERRIDES.get(module_name.split(".")[-2], {})
    return model(model.config_class(**sizes)).eval()


def experts_of(module_name: str, name: str) -> nn.Module:
    """A tiny instance, whose parameters are random."""
    module = importlib.import_module(module_name)
    experts = getattr(module, name)
    failures = []
    for config in configs(module, experts):
        parameters = list(inspect.signature(experts.__init__).parameters)[2:]
        sizes = {"intermediate_size": 8} if "intermediate_size" in parameters else {}
        try:
            made = experts(config, **sizes)
        except Exception as failure:
            failures.append(f"{type(config).__name__}: {failure!r}")
            continue
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
        return made
    raise RuntimeError("; ".join(failures) or "no config")
