"""activation: one pass over the pre-activation z, 3 R I elements gated (2 R I ungated).

backward   reads z and the gradient, writes the gradient of z: 5 R I elements gated (3 R I ungated)
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.device.activation import (
    FUNCTION_OF_GATED,
    load_gate_up,
    slopes,
    store_gate_up,
)
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv, next_power_of_2


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
    gate, up = load_gate_up(z_ptr, rows, first, num_rows, SIZE, KIND, INTERLEAVED, COLUMNS)
    out, _, _ = slopes(gate, up, KIND, FUNCTION)
    at = out_ptr + rows[:, None] * SIZE + columns[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def _activation_backward_kernel(
    d_out_ptr,
    z_ptr,
    d_z_ptr,
    num_rows,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    dtype = d_z_ptr.dtype.element_ty
    blocks: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % blocks) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    held = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    gate, up = load_gate_up(z_ptr, rows, first, num_rows, SIZE, KIND, INTERLEAVED, COLUMNS)
    d = tl.load(d_out_ptr + rows[:, None] * SIZE + columns[None, :], mask=held, other=0.0)
    _, gate_slope, up_slope = slopes(gate, up, KIND, FUNCTION)
    d = d.to(tl.float32)
    d_gate, d_up = (d * gate_slope).to(dtype), (d * up_slope).to(dtype)
    store_gate_up(d_z_ptr, d_gate, d_up, rows, first, num_rows, SIZE, KIND, INTERLEAVED)


@cache
def _launchers(
    dtypes: tuple[torch.dtype, ...], size: int, kind: str, layout: str
) -> tuple[Launcher, Launcher, int, int]:
    """Forward and backward, their rows a program, and their column blocks."""
    columns = min(next_power_of_2(size), 512)
    rows = max(2048 // columns, 1)
    constants = {
        "SIZE": size,
        "KIND": kind if kind in FUNCTION_OF_GATED else "",
        "FUNCTION": FUNCTION_OF_GATED.get(kind, kind),
        "INTERLEAVED": layout == "interleaved" and kind in FUNCTION_OF_GATED,
        "ROWS": rows,
        "COLUMNS": columns,
    }
    forward = Launcher(_activation_kernel, constants)
    backward = Launcher(_activation_backward_kernel, constants)
    return forward, backward, rows, cdiv(size, columns)


def _size(gate_up: Tensor, kind: str) -> int:
    return gate_up.shape[1] // 2 if kind in FUNCTION_OF_GATED else gate_up.shape[1]


def activation(gate_up: Tensor, kind: str, layout: str) -> Tensor:
    """[R,I]; see the operator."""
    gate_up, size = gate_up.contiguous(), _size(gate_up, kind)
    num_rows = gate_up.shape[0]
    out = gate_up.new_empty(num_rows, size)
    if out.numel() == 0:
        return out
    launch, _, rows, blocks = _launchers((gate_up.dtype,), size, kind, layout)
    launch(cdiv(num_rows, rows) * blocks, (gate_up, out), (num_rows,))
    return out


def activation_backward(d_out: Tensor, gate_up: Tensor, kind: str, layout: str) -> Tensor:
    """d_gate_up."""
    d_out, gate_up, size = d_out.contiguous(), gate_up.contiguous(), _size(gate_up, kind)
    num_rows = gate_up.shape[0]
    d_gate_up = torch.empty_like(gate_up)
    if gate_up.numel() == 0:
        return d_gate_up
    _, launch, rows, blocks = _launchers((gate_up.dtype, d_out.dtype), size, kind, layout)
    launch(cdiv(num_rows, rows) * blocks, (d_out, gate_up, d_gate_up), (num_rows,))
    return d_gate_up
