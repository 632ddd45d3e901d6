"""activation: one pass over the pre-activation z, 3 R I elements gated (2 R I ungated).

backward   reads z and the gradient, writes the gradient of z: 5 R I elements gated (3 R I ungated)
experts    the same for `expert_mlp`, whose rows are weighted after the down projection. With d_a the
           gradient of a = activation(z) before the weight w of its row, one pass also writes w a, for the
           gradient of the down projection, and the weight's gradient <d_a, a>: 6 R I elements gated
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.device.activation import act_and_slope, gated
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv, next_power_of_2

_FUNCTION = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "clamped_swiglu": "clamped",
}
"""The function of the gate, of each gated kind."""


@triton.jit
def _load(
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
def _store(
    z_ptr, gate, up, rows, first, num_rows, SIZE, KIND: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The other way round."""
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


@triton.jit(do_not_specialize=["num_rows"])
def _activation_kernel(
    z_ptr,
    out_ptr,
    num_rows,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % blocks) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    held = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    gate, up = _load(z_ptr, rows, first, num_rows, SIZE, KIND, INTERLEAVED, COLUMNS)
    if KIND == "":
        out, _ = act_and_slope(gate, FUNCTION)
    else:
        act, _, factor, _ = gated(gate, up, KIND, FUNCTION)
        out = act * factor
    at = out_ptr + rows[:, None] * SIZE + columns[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def _activation_backward_kernel(
    d_out_ptr,
    z_ptr,
    d_z_ptr,
    weight_ptr,
    weighted_ptr,
    d_weight_ptr,
    num_rows,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program takes whole rows, so that <d_a, a> is one sum in the order of the columns."""
    dtype = d_z_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < num_rows
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + rows, mask=present, other=0.0).to(tl.float32)
        dots = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        held = present[:, None] & (columns < SIZE)[None, :]
        gate, up = _load(z_ptr, rows, start, num_rows, SIZE, KIND, INTERLEAVED, COLUMNS)
        at = rows[:, None] * SIZE + columns[None, :]
        d = tl.load(d_out_ptr + at, mask=held, other=0.0).to(tl.float32)
        if KIND == "":
            out, slope = act_and_slope(gate, FUNCTION)
            factor, act, up_slope = 1.0, 0.0, 0.0
        else:
            act, slope, factor, up_slope = gated(gate, up, KIND, FUNCTION)
            out = act * factor
        if weight_ptr is not None:
            a = out.to(dtype).to(tl.float32)
            dots += d * a
            tl.store(weighted_ptr + at, (a * weight[:, None]).to(dtype), mask=held)
            d = d * weight[:, None]
        d_gate, d_up = (d * factor * slope).to(dtype), (d * act * up_slope).to(dtype)
        _store(d_z_ptr, d_gate, d_up, rows, start, num_rows, SIZE, KIND, INTERLEAVED)
    if weight_ptr is not None:
        tl.store(d_weight_ptr + rows, tl.sum(dots, 1), mask=present)


@cache
def _launchers(
    dtypes: tuple[torch.dtype, ...], size: int, kind: str, layout: str, weighted: bool
) -> tuple[Launcher, Launcher, int, int]:
    """Forward and backward, their rows a program, and the forward's column blocks."""
    columns = min(next_power_of_2(size), 512)
    rows = max(2048 // columns, 1)
    constants = {
        "SIZE": size,
        "KIND": kind if kind in _FUNCTION else "",
        "FUNCTION": _FUNCTION.get(kind, kind),
        "INTERLEAVED": layout == "interleaved" and kind in _FUNCTION,
        "ROWS": rows,
        "COLUMNS": columns,
    }
    forward = Launcher(_activation_kernel, constants)
    return forward, Launcher(_activation_backward_kernel, constants), rows, cdiv(size, columns)


def _size(gate_up: Tensor, kind: str) -> int:
    return gate_up.shape[1] // 2 if kind in _FUNCTION else gate_up.shape[1]


def activation(gate_up: Tensor, kind: str, layout: str) -> Tensor:
    """[R,I]; see the operator."""
    gate_up, size = gate_up.contiguous(), _size(gate_up, kind)
    num_rows = gate_up.shape[0]
    out = gate_up.new_empty(num_rows, size)
    if out.numel() == 0:
        return out
    launch, _, rows, blocks = _launchers((gate_up.dtype,), size, kind, layout, False)
    launch(cdiv(num_rows, rows) * blocks, (gate_up, out), (num_rows,))
    return out


def activation_backward(d_out: Tensor, gate_up: Tensor, kind: str, layout: str) -> Tensor:
    """d_gate_up."""
    d_out, gate_up, size = d_out.contiguous(), gate_up.contiguous(), _size(gate_up, kind)
    num_rows = gate_up.shape[0]
    d_gate_up = torch.empty_like(gate_up)
    if gate_up.numel() == 0:
        return d_gate_up
    _, launch, rows, _ = _launchers((gate_up.dtype, d_out.dtype), size, kind, layout, False)
    launch(cdiv(num_rows, rows), (d_out, gate_up, d_gate_up, None, None, None), (num_rows,))
    return d_gate_up


def experts_backward(
    d_a: Tensor, z: Tensor, weight_of_row: Tensor, kind: str, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """d_z, w a, and <d_a, a> of every row in fp32; all contiguous."""
    size, num_rows = d_a.shape[1], d_a.shape[0]
    d_z, weighted = torch.empty_like(z), torch.empty_like(d_a)
    d_weight = d_a.new_zeros(num_rows, dtype=torch.float32)
    if z.numel() == 0:
        return d_z, weighted, d_weight
    _, launch, rows, _ = _launchers((z.dtype, weight_of_row.dtype), size, kind, layout, True)
    tensors = (d_a, z, d_z, weight_of_row, weighted, d_weight)
    launch(cdiv(num_rows, rows), tensors, (num_rows,))
    return d_z, weighted, d_weight
