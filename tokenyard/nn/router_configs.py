"""Which router a config of Hugging Face transformers describes.

Configs are read by attribute; transformers is not needed. See docs/routers.md for the formulas.
"""

from collections.abc import Callable
from typing import Any

from tokenyard import check

_EXPERTS = ("n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")

Options = dict[str, Any]


def router_options(config: Any) -> Options:
    """The arguments of `Router` for a config: its sizes, and options of `topk`. ArgumentError if unknown."""
    text = getattr(config, "text_config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _ROUTERS and text is not None:
        config, kind = text, getattr(text, "model_type", None)
    if kind not in _ROUTERS:
        known = ", ".join(sorted(_ROUTERS))
        check.fail("nn.Router.from_config", "config", f"a model_type of {known}", repr(kind))
    options = _ROUTERS[kind](config)
    sizes = {
        "hidden_size": _first(config, "hidden_size", "d_model"),
        "num_experts": _first(config, *_EXPERTS),
        "top_k": _first(config, *_TOP_K),
    }
    return sizes | options


def _first(config: Any, *names: str) -> Any:
    """The first attribute that is there and is not None; of several that could be a list, its first."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value[0] if isinstance(value, list | tuple) else value
    return None


def _norm(config: Any, default: bool = True) -> Options:
    renormalised = getattr(config, "norm_topk_prob", default)
    return {"normalize": "sum" if renormalised else "none"}


def _scale(config: Any) -> Options:
    names = (
        "routed_scaling_factor",
        "router_scaling_factor",
        "route_scale",
        "moe_router_scale",
        "moe_routed_scaling_factor",
    )
    return {"scale": float(_first(config, *names) or 1.0)}


def _groups(config: Any) -> Options:
    num_groups = _first(config, "n_group", "num_expert_group") or 1
    kept = _first(config, "topk_group") or 1
    return {"num_groups": num_groups, "topk_groups": kept} if num_groups > 1 else {}


def _softmax(config: Any) -> Options:
    return _norm(config, default=False)


def _renormalised(config: Any) -> Options:
    return {"normalize": "sum"}


def _plain(config: Any) -> Options:
    return {}


def _of_selected(config: Any) -> Options:
    return {"score": "softmax_of_selected"}


def _gpt_oss(config: Any) -> Options:
    return {"score": "softmax_of_selected", "bias": True}


def _privacy_filter(config: Any) -> Options:
    return _gpt_oss(config) | {"scale": 1 / config.num_experts_per_tok}


def _biased_sigmoid(config: Any) -> Options:
    """DeepSeek-V3 and its kin."""
    groups = _groups(config)
    if groups:
        groups["group_score"] = "sum_of_top2"
    norm = _norm(config) | {"eps": 1e-20}
    return {"score": "sigmoid", "selection_bias": True} | groups | norm | _scale(config)


def _always_biased_sigmoid(config: Any) -> Options:
    return _biased_sigmoid(config) | {"normalize": "sum"}


def _deepseek_v2(config: Any) -> Options:
    limited = getattr(config, "topk_method", "greedy") == "group_limited_greedy"
    return (_groups(config) if limited else {}) | _scale(config)


def _deepseek_v4(config: Any) -> Options:
    return _always_biased_sigmoid(config) | {"score": config.scoring_func}


def _mistral4(config: Any) -> Options:
    options = _always_biased_sigmoid(config) | _norm(config)
    return options | {"score": "softmax", "selection_bias": False}


def _ernie(config: Any) -> Options:
    eps = getattr(config, "moe_norm_min", 1e-12)
    return {"selection_bias": True, "normalize": "sum", "eps": eps, "eps_mode": "clamp"}


def _minimax_m2(config: Any) -> Options:
    return {"score": "sigmoid", "selection_bias": True, "normalize": "sum"}


def _laguna(config: Any) -> Options:
    softcap = getattr(config, "moe_router_logit_softcapping", 0.0)
    return _minimax_m2(config) | ({"softcap": softcap} if softcap > 0 else {})


def _lfm2(config: Any) -> Options:
    biased = {"score": "sigmoid", "selection_bias": config.use_expert_bias, "eps": 1e-6}
    return biased | _norm(config) | _scale(config)


def _cohere2(config: Any) -> Options:
    if config.expert_selection_fn == "softmax":
        return _of_selected(config)
    return {"score": "sigmoid"} | _norm(config)


def _kolibri(config: Any) -> Options:
    chosen = {"score": "sigmoid", "selection_bias": True, "choose_by": "logit"}
    return chosen | _norm(config)


def _flint(config: Any) -> Options:
    return {"score": "sigmoid"} | _norm(config)


def _beam(config: Any) -> Options:
    return _biased_sigmoid(config) | {"scale": 1.0}


def _llama4(config: Any) -> Options:
    return {"score": "sigmoid"}


def _longcat(config: Any) -> Options:
    """Ids from the number of real experts on are identity experts."""
    num_experts = config.n_routed_experts + (config.zero_expert_num or 0)
    return {"num_experts": num_experts, "selection_bias": True} | _scale(config)


def _switch(config: Any) -> Options:
    return {"top_k": 1}


def _dbrx(config: Any) -> Options:
    ffn = config.ffn_config
    power = getattr(ffn, "moe_normalize_expert_weights", None)
    norm = {} if power is None else {"normalize": "norm", "norm_p": float(power)}
    return {"num_experts": ffn.moe_num_experts, "top_k": ffn.moe_top_k} | norm


_ROUTERS: dict[str, Callable[[Any], Options]] = {
    **dict.fromkeys(
        (
            *("flex_olmo", "lara_mini", "mellum", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
            *("qwen3_omni_moe_text", "qwen3_omni_moe_talker_text", "qwen4_exp_text"),
        ),
        _softmax,
    ),
    **dict.fromkeys(
        (
            *("gemma4_text", "hunyuan_v1_moe", "minimax", "mixtral", "qwen3_5_moe_text"),
            "qwen3_vl_moe_text",
        ),
        _renormalised,
    ),
    **dict.fromkeys(
        (
            *("aria_text", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
            "jetmoe",
        ),
        _of_selected,
    ),
    **dict.fromkeys(
        (
            *("axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "dots1"),
            *("exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm5_next_text"),
            *("glm_moe_dsa", "hy_v4", "kimi_linear", "mimo_v2_flash", "minicpm5_moe", "nemotron_h"),
            "solar_open",
        ),
        _biased_sigmoid,
    ),
    **dict.fromkeys(("afmoe", "dots3_note_text", "ergo", "hy_v3"), _always_biased_sigmoid),
    **dict.fromkeys(("deepseek_ocr2_text", "deepseek_v2", "unlimited_ocr_text"), _deepseek_v2),
    **dict.fromkeys(("deepseek_v4", "inkling2_text", "inkling2_loop_text"), _deepseek_v4),
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe_text"), _ernie),
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    **dict.fromkeys(("minimax_m2", "minimax_m3_vl_text"), _minimax_m2),
    **dict.fromkeys(("mistral4", "mistral_large4_text"), _mistral4),
    "beam": _beam,
    "cohere2_moe": _cohere2,
    "dbrx": _dbrx,
    "flint": _flint,
    "gpt_oss": _gpt_oss,
    "jamba": _plain,
    "kolibri1": _kolibri,
    "kolibri1_1": _kolibri,
    "laguna": _laguna,
    "lfm2_moe": _lfm2,
    "longcat_flash": _longcat,
    "openai_privacy_filter": _privacy_filter,
    "switch_transformers": _switch,
}
"""By model type."""
