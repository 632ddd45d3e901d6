"""The activation between the two GEMMs of an expert.

gated      out = act(gate) * up             gate_up holds both, [R,2I]
ungated    out = act(gate_up)               [R,I]
d_gate = d_out * up * act'(gate),   d_up = d_out * act(gate)

kind               act(g)                               source
"swiglu"           g * sigmoid(g)                       Shazeer, 2020 (GLU variants)
"geglu"            g * Phi(g), exact                    Shazeer, 2020
"geglu_tanh"       the tanh approximation of it         Hendrycks and Gimpel, 2016
"reglu"            max(g, 0)                            Shazeer, 2020
"clamped_swiglu"   g * sigmoid(1.702 g), g <= 7         gpt-oss; out = act(g) * (clamp(up, -7, 7) + 1)
"silu" "gelu" "gelu_tanh" "relu" "relu2"                ungated; relu2 is max(g, 0)^2 (Nemotron)

Computed in fp32 (fp64 for fp64 inputs), rounded once.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenyard import backend, check
from tokenyard.ops.rows import accumulation_dtype
from tokenyard.registration import Operator

GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
UNGATED = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
LAYOUTS = ("concatenated", "interleaved")

Activation = Literal[
    "swiglu",
    "geglu",
    "geglu_tanh",
    "reglu",
    "clamped_swiglu",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
]
GateUpLayout = Literal["concatenated", "interleaved"]

_FUNCTION = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
}
CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _act(g: Tensor, function: str) -> Tensor:
    if function == "silu":
        return F.silu(g)
    if function == "gelu":
        return F.gelu(g)
    if function == "gelu_tanh":
        return F.gelu(g, approximate="tanh")
    return F.relu(g) if function == "relu" else F.relu(g).square()


def _act_and_slope(g: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """act(g) and act'(g)."""
    if function == "silu":
        sigmoid = g.sigmoid()
        act = g * sigmoid
        return act, sigmoid + act * (1 - sigmoid)
    if function == "gelu":
        cdf = 0.5 * (1 + torch.erf(g / math.sqrt(2)))
        return g * cdf, cdf + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    if function == "gelu_tanh":
        tanh = torch.tanh(_TANH_SCALE * (g + _TANH_CUBIC * g**3))
        inner = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * g * g)
        return 0.5 * g * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * g * (1 - tanh * tanh) * inner
    positive = F.relu(g)
    if function == "relu":
        return positive, (g > 0).to(g.dtype)
    return positive.square(), 2 * positive


def _split(gate_up: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up columns."""
    if layout == "interleaved":
        return gate_up[:, 0::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, 1)
    return gate, up


def _definition(gate_up: Tensor, kind: str, layout: str) -> Tensor:
    acc = accumulation_dtype(gate_up.dtype)
    if kind in UNGATED:
        return _act(gate_up.to(acc), kind).to(gate_up.dtype)
    gate, up = (part.to(acc) for part in _split(gate_up, layout))
    if kind == "clamped_swiglu":
        gate = gate.clamp(max=CLAMPED_LIMIT)
        up = up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT) + 1
        return (gate * (CLAMPED_ALPHA * gate).sigmoid() * up).to(gate_up.dtype)
    return (_act(gate, _FUNCTION[kind]) * up).to(gate_up.dtype)


def activation_reference(
    gate_up: Tensor, kind: Activation = "swiglu", layout: GateUpLayout = "concatenated"
) -> Tensor:
    """The definition of `activation`."""
    return _definition(gate_up, kind, layout)


def activation_backward_reference(
    d_out: Tensor, gate_up: Tensor, kind: Activation, layout: GateUpLayout
) -> tuple[Tensor, Tensor]:
    """d_gate_up, and the activation's output once more, both in the dtype of gate_up.

    d_out may be in the accumulation dtype already.
    """
    acc = accumulation_dtype(gate_up.dtype)
    d_out = d_out.to(acc)
    if kind in UNGATED:
        out, slope = _act_and_slope(gate_up.to(acc), kind)
        return (d_out * slope).to(gate_up.dtype), out.to(gate_up.dtype)

    gate_raw, up_raw = (part.to(acc) for part in _split(gate_up, layout))
    if kind == "clamped_swiglu":
        gate, up = gate_raw.clamp(max=CLAMPED_LIMIT), up_raw.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        sigmoid = (CLAMPED_ALPHA * gate).sigmoid()
        act = gate * sigmoid
        slope = sigmoid + CLAMPED_ALPHA * act * (1 - sigmoid)
        slope = slope.masked_fill(gate_raw > CLAMPED_LIMIT, 0)
        d_up = (d_out * act).masked_fill(up_raw.abs() > CLAMPED_LIMIT, 0)
        up = up + 1
    else:
        up = up_raw
        act, slope = _act_and_slope(gate_raw, _FUNCTION[kind])
        d_up = d_out * act
    d_gate_up = gate_up.new_empty(gate_up.shape)
    d_gate_view, d_up_view = _split(d_gate_up, layout)
    torch.mul(d_out * up, slope, out=slope)
    d_gate_view.copy_(slope)
    d_up_view.copy_(d_up)
    return d_gate_up, (act * up).to(gate_up.dtype)


def _forward(gate_up: Tensor, kind: str, layout: str) -> Tensor:
    kernels = backend.kernels("activation", gate_up)
    if kernels is not None:
        return kernels.activation(gate_up, kind, layout)
    return _definition(gate_up, kind, layout).contiguous()


def activation_size(gate_up_size: int, kind: str) -> int:
    """I: the columns that remain of `gate_up_size` columns."""
    return gate_up_size if kind in UNGATED else gate_up_size // 2


def _fake(gate_up: Tensor, kind: str, layout: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], activation_size(gate_up.shape[1], kind))


def _backward(d_out: Tensor, gate_up: Tensor, kind: str, layout: str) -> Tensor:
    kernels = backend.kernels("activation", gate_up)
    if kernels is not None:
        return kernels.activation_backward(d_out, gate_up, kind, layout)
    d_gate_up, _ = activation_backward_reference(d_out, gate_up, kind, layout)  # type: ignore[arg-type]
    return d_gate_up.contiguous()


def _backward_fake(d_out: Tensor, gate_up: Tensor, kind: str, layout: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, ctx.kind, ctx.layout = inputs
    ctx.save_for_backward(gate_up)


def _gradient(ctx: Any, backward: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
    return backward(d_out, *ctx.saved_tensors, ctx.kind, ctx.layout), None, None


_activation = Operator(
    "activation",
    _forward,
    _fake,
    save=_save,
    gradient=_gradient,
    backward=_backward,
    backward_fake=_backward_fake,
)


def activation(
    gate_up: Tensor, kind: Activation = "swiglu", layout: GateUpLayout = "concatenated"
) -> Tensor:
    """Apply the activation of an expert: gate_up [R,2I] (ungated kinds [R,I]) -> [R,I].

    kind     see the table at the head of this module
    layout   "concatenated": gate columns, then up columns; "interleaved": gate, up, gate, up, ...
             (ungated kinds have no layout)

    Differentiable; saves gate_up. Raises ArgumentError.
    """
    check.tensor("activation", "gate_up", gate_up, ["R", "2I"], dtypes=check.FLOAT_DTYPES)
    check_activation("activation", "kind", kind, "layout", layout)
    if kind in GATED:
        check.multiple_of("activation", "gate_up.shape[1]", gate_up.shape[1], 2, "gate and up")
    return _activation(gate_up, kind, layout)


def check_activation(
    operator: str, kind_argument: str, kind: str, layout_argument: str, layout: str
) -> None:
    check.choice(operator, kind_argument, kind, GATED + UNGATED)
    check.choice(operator, layout_argument, layout, LAYOUTS)
