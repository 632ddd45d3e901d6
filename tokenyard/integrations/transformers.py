"""The experts of Hugging Face transformers (5.0 and later) by Tokenyard.

`register()` adds the experts implementation "tokenyard":

    tokenyard.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tokenyard")

`use(model)` switches a model that is there already, in every version: `experts_implementation` takes names of
others from 5.7 on.
"""

from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import tokenyard
from tokenyard import check
from tokenyard.ops.activation import CLAMPED_ALPHA, CLAMPED_LIMIT, Activation

NAME = "tokenyard"

_GATED: dict[object, Activation] = {
    **{type(ACT2FN[name]): "swiglu" for name in ("silu", "swish")},
    F.silu: "swiglu",
    type(ACT2FN["gelu"]): "geglu",
    type(ACT2FN["gelu_pytorch_tanh"]): "geglu_tanh",
    type(ACT2FN["relu"]): "reglu",
}
"""By the class of a gate's activation, or the function itself."""
_UNGATED: dict[object, Activation] = {
    **{type(ACT2FN[name]): "silu" for name in ("silu", "swish")},
    type(ACT2FN["gelu"]): "gelu",
    type(ACT2FN["relu"]): "relu",
    type(ACT2FN["relu2"]): "relu2",
}


def register() -> None:
    """Add "tokenyard" to the experts implementations of transformers. Again does no harm.

    And to the implementations of expert parallelism, in versions that have any.
    """
    ExpertsInterface.register(NAME, experts_forward)
    if find_spec("transformers.distributed.expert_parallel") is not None:
        from tokenyard.integrations import transformers_ep

        transformers_ep.register(NAME)


def use(model: nn.Module) -> nn.Module:
    """Let all experts of a transformers model run by Tokenyard, and return the model.

    Raises ArgumentError for a model without experts that can be switched.
    """
    register()
    configs: dict[int, Any] = {
        id(module.config): module.config
        for module in model.modules()
        if hasattr(type(module), "_apply_gate") and hasattr(module, "config")
    }
    if not configs:
        expected = "a model with experts that take an experts_implementation"
        check.fail("integrations.transformers.use", "model", expected, type(model).__name__)
    if hasattr(model, "config"):
        configs[id(model.config)] = model.config
    for config in configs.values():
        config._experts_implementation = NAME
    return model


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls as the forward of its experts.

    hidden_states [T,H], top_k_index [T,K] int64 (num_experts: none, as with expert parallelism),
    top_k_weights [T,K] -> [T,H] in the dtype of hidden_states; computed in that of the weights, or of
    autocast. One fused operator where the gate is known, else a grouped GEMM on each side of the module's
    own gate. Each parameter is read once.
    """
    experts: Any = self
    is_gated = getattr(experts, "has_gate", True)
    first = "gate_up_proj" if is_gated else "up_proj"
    w_gate_up, w_down = getattr(experts, first), experts.down_proj
    b_gate_up, b_down = getattr(experts, f"{first}_bias", None), _bias(experts)
    layout = "EKN" if getattr(experts, "is_transposed", False) else "ENK"
    routing = tokenyard.route(top_k_index, w_gate_up.shape[0])
    x = hidden_states  # in fp32 beside 16-bit weights, as after a norm in fp32
    if w_gate_up.dtype in check.FLOAT_DTYPES:
        x = x.to(w_gate_up.dtype)
    kind = known_activation(experts)
    if kind is not None:
        out = tokenyard.expert_mlp(
            x,
            routing,
            top_k_weights,
            w_gate_up,
            w_down,
            b_gate_up=b_gate_up,
            b_down=b_down,
            activation=kind,
            gate_up_layout="interleaved" if kind == "clamped_swiglu" else "concatenated",
            weight_layout=layout,  # type: ignore[arg-type]
        )
        return out.to(hidden_states.dtype)
    rows = tokenyard.permute(x, routing)
    z = tokenyard.grouped_gemm(rows, w_gate_up, routing, layout=layout, bias=b_gate_up)  # type: ignore[arg-type]
    a = experts._apply_gate(z) if is_gated else experts.act_fn(z)
    y = tokenyard.grouped_gemm(a, w_down, routing, layout=layout, bias=b_down)  # type: ignore[arg-type]
    if getattr(experts, "has_post_expert_norm", False):
        y = experts.post_expert_norm(y)
    return tokenyard.unpermute(y, routing, top_k_weights).to(hidden_states.dtype)


def _bias(experts: Any) -> Tensor | None:
    return getattr(experts, "down_proj_bias", None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def known_activation(experts: nn.Module) -> Activation | None:
    """The activation of `expert_mlp` that these experts have, or None where the gate must be called.

    A gate is known by its code, an activation by its class: no subclass, no function that looks alike.
    """
    module: Any = experts
    if getattr(module, "has_post_expert_norm", False):
        return None
    if not getattr(module, "has_gate", True):
        return _UNGATED.get(_key(module.act_fn))
    gate = type(module)._apply_gate
    if _same(gate, GptOssExperts._apply_gate):  # interleaved
        is_clamped = (module.alpha, module.limit) == (CLAMPED_ALPHA, CLAMPED_LIMIT)
        return "clamped_swiglu" if is_clamped else None
    if _same(gate, _default_apply_gate) and getattr(module, "is_concatenated", True):
        return _GATED.get(_key(module.act_fn))
    return None


def _key(activation: object) -> object:
    return type(activation) if isinstance(activation, nn.Module) else activation


def _same(first: FunctionType, second: FunctionType) -> bool:
    """Whether two functions are one, or are written alike."""

    def text(code: CodeType) -> tuple[object, ...]:
        constants = tuple(value for value in code.co_consts if not isinstance(value, str))
        return code.co_code, constants, code.co_names, code.co_varnames

    return first is second or text(first.__code__) == text(second.__code__)
