"""The activations of an expert and their slopes, in fp32."""

import triton
import triton.language as tl

from tokenyard.kernels.device.scores import tanh


@triton.jit
def act_and_slope(g, FUNCTION: tl.constexpr):
    """act(g) and act'(g)."""
    if FUNCTION == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        act = g * sigmoid
        slope = sigmoid + act * (1.0 - sigmoid)
    elif FUNCTION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        act = g * cdf
        slope = cdf + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
    elif FUNCTION == "gelu_tanh":
        t = tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))
        inner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
        act = 0.5 * g * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * inner
    else:
        positive = tl.where(g > 0, g, 0.0)
        positive = tl.where(g == g, positive, g)  # NaN stays
        if FUNCTION == "relu":
            act = positive
            slope = (g > 0).to(tl.float32)
        else:
            act = positive * positive
            slope = 2.0 * positive
    return act, slope


@triton.jit
def gated(gate, up, KIND: tl.constexpr, FUNCTION: tl.constexpr):
    """act(gate) and its slope, the factor from `up`, and whether each lies inside its clamp."""
    if KIND == "clamped_swiglu":
        g = tl.where(gate > 7.0, 7.0, gate)
        sigmoid = 1.0 / (1.0 + tl.exp(-1.702 * g))
        act = g * sigmoid
        slope = tl.where(gate > 7.0, 0.0, sigmoid + 1.702 * act * (1.0 - sigmoid))
        u = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        up_slope = tl.where(tl.abs(up) > 7.0, 0.0, 1.0)
    else:
        act, slope = act_and_slope(gate, FUNCTION)
        u = up
        up_slope = 1.0
    return act, slope, u, up_slope
