"""The activations of an expert and their slopes, in fp32."""

import triton
import triton.language as tl

from tokenyard.kernels.device.scores import tanh

FUNCTION_OF_GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "clamped_swiglu": "clamped",
}
"""The function of the gate, of each gated kind."""


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
def slopes(gate, up, KIND: tl.constexpr, FUNCTION: tl.constexpr):
    """a, and its derivatives by gate and by up. An ungated kind, "", has its whole input as gate."""
    if KIND == "clamped_swiglu":
        g = tl.where(gate > 7.0, 7.0, gate)
        sigmoid = 1.0 / (1.0 + tl.exp(-1.702 * g))
        act = g * sigmoid
        slope = tl.where(gate > 7.0, 0.0, sigmoid + 1.702 * act * (1.0 - sigmoid))
        factor = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        return act * factor, factor * slope, tl.where(tl.abs(up) > 7.0, 0.0, act)
    else:
        act, slope = act_and_slope(gate, FUNCTION)
        if KIND == "":
            return act, slope, slope
        else:
            return act * up, up * slope, act


@triton.jit
def load_gate_up(
    z_ptr, rows, first, num_rows, SIZE, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, COLUMNS
):
    """Gate and up [ROWS,COLUMNS] in fp32, 0 past the end; an ungated kind has its whole input as gate."""
    columns = first + tl.arange(0, COLUMNS)
    held = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    if KIND == "":
        gate = tl.load(z_ptr + rows[:, None] * SIZE + columns[None, :], mask=held, other=0.0)
        up = gate
    elif INTERLEAVED:
        pairs = 2 * first + tl.arange(0, 2 * COLUMNS)
        at = z_ptr + rows[:, None] * (2 * SIZE) + pairs[None, :]
        both = tl.load(at, (rows < num_rows)[:, None] & (pairs < 2 * SIZE)[None, :], other=0.0)
        gate, up = tl.split(tl.reshape(both, (rows.shape[0], COLUMNS, 2)))
    else:
        at = z_ptr + rows[:, None] * (2 * SIZE) + columns[None, :]
        gate = tl.load(at, mask=held, other=0.0)
        up = tl.load(at + SIZE, mask=held, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def store_gate_up(
    z_ptr, gate, up, rows, first, num_rows, SIZE, KIND: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The other way round, rounded before."""
    COLUMNS: tl.constexpr = gate.shape[1]
    columns = first + tl.arange(0, COLUMNS)
    held = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    if KIND == "":
        tl.store(z_ptr + rows[:, None] * SIZE + columns[None, :], gate, mask=held)
    elif INTERLEAVED:
        pairs = 2 * first + tl.arange(0, 2 * COLUMNS)
        at = z_ptr + rows[:, None] * (2 * SIZE) + pairs[None, :]
        both = tl.reshape(tl.join(gate, up), (rows.shape[0], 2 * COLUMNS))
        tl.store(at, both, (rows < num_rows)[:, None] & (pairs < 2 * SIZE)[None, :])
    else:
        at = z_ptr + rows[:, None] * (2 * SIZE) + columns[None, :]
        tl.store(at, gate, mask=held)
        tl.store(at + SIZE, up, mask=held)
