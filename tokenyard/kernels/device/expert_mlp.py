"""The epilogues of the fused GEMMs of the expert MLP, and what is left of the routing weights' gradient."""

import triton
import triton.language as tl

from tokenyard.kernels.device.activation import load_gate_up, slopes, store_gate_up
from tokenyard.kernels.device.gemm import (
    product_tile,
    rows_of_tile,
    store_tile,
)


@triton.jit
def halves(tile):
    """Its left and its right columns; where one thread holds a row of the MMA's result, no data moves."""
    parts = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def up_tile(
    x,
    matrix,
    bias_ptr,
    z_ptr,
    a_ptr,
    slot_of_row_ptr,
    expert,
    row,
    valid,
    end,
    column,
    x_rows,
    x_stride,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    X_TMA: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """COLUMNS columns of a from `column` on, and what of z they follow from. SIZE is the width of a."""
    dtype = a_ptr.dtype.element_ty
    rows = rows_of_tile(row, valid, slot_of_row_ptr, TOP_K, TOKENS)
    WIDTH: tl.constexpr = SIZE if KIND == "" else 2 * SIZE
    WIDER: tl.constexpr = COLUMNS if KIND == "" else 2 * COLUMNS
    PAIRED: tl.constexpr = KIND != "" and not INTERLEAVED
    first = 2 * column if INTERLEAVED else column
    z = product_tile(
        x, matrix, bias_ptr, expert, row, rows, first, x_rows, x_stride, SIZE_IN, WIDTH,
        OUT_MAJOR, PAIRED, X_TMA, TMA, UNIT, TOKENS_LAST, PRECISION, WIDER, DEPTH,
    ).to(dtype)  # fmt: skip
    if PAIRED:
        gate, up = halves(z)
        if z_ptr is not None:
            store_tile(z_ptr, gate, row, valid, end, column, WIDTH, SIZE)
            store_tile(z_ptr, up, row, valid, end, SIZE + column, WIDTH, WIDTH)
    else:
        if z_ptr is not None:
            store_tile(z_ptr, z, row, valid, end, first, WIDTH, WIDTH)
        if INTERLEAVED:
            gate, up = tl.split(tl.reshape(z, (TOKENS, COLUMNS, 2)))
        else:
            gate, up = z, z
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    a, _, _ = slopes(gate, up, KIND, FUNCTION)
    store_tile(a_ptr, a, row, valid, end, column, SIZE, SIZE)


@triton.jit
def slope_tile(
    d_a,
    z_ptr,
    d_z_ptr,
    weighted_ptr,
    weight,
    row,
    valid,
    end,
    column,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write d_z and w a for these columns, a few at a time to save registers; the sum of d_a a over them."""
    dtype = d_z_ptr.dtype.element_ty
    COLUMNS: tl.constexpr = d_a.shape[1]
    if COLUMNS > 32:
        left, right = halves(d_a)
        dots = slope_tile(
            left, z_ptr, d_z_ptr, weighted_ptr, weight, row, valid, end, column,
            SIZE, KIND, FUNCTION, INTERLEAVED,
        )  # fmt: skip
        dots += slope_tile(
            right, z_ptr, d_z_ptr, weighted_ptr, weight, row, valid, end, column + COLUMNS // 2,
            SIZE, KIND, FUNCTION, INTERLEAVED,
        )  # fmt: skip
    else:
        rows = row.to(tl.int64) + tl.arange(0, d_a.shape[0])
        columns = column + tl.arange(0, COLUMNS)
        held = (rows < valid)[:, None] & (columns < SIZE)[None, :]
        gate, up = load_gate_up(z_ptr, rows, column, valid, SIZE, KIND, INTERLEAVED, COLUMNS)
        a, gate_slope, up_slope = slopes(gate, up, KIND, FUNCTION)
        a = a.to(dtype).to(tl.float32)
        d = tl.where(held, d_a.to(dtype).to(tl.float32), 0.0)
        store_tile(weighted_ptr, a * weight[:, None], row, valid, end, column, SIZE, SIZE)
        dots = tl.sum(d * a, 1)
        d *= weight[:, None]
        d_gate, d_up = (d * gate_slope).to(dtype), (d * up_slope).to(dtype)
        store_gate_up(d_z_ptr, d_gate, d_up, rows, column, end, SIZE, KIND, INTERLEAVED)
    return dots


@triton.jit(do_not_specialize=["num_slots", "num_rows", "g_stride"])
def weights_gradient_kernel(
    dots_ptr,
    row_of_slot_ptr,
    g_ptr,
    bias_ptr,
    topk_indices_ptr,
    d_weights_ptr,
    num_slots,
    num_rows,
    g_stride,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of each slot: the sum of its row's `dots`, in order, and <g[t], bias[e]>."""
    slots = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    rows = tl.load(row_of_slot_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int64)
    owned = rows >= 0
    total = tl.zeros((SLOTS,), tl.float32)
    for part in range(PARTS):
        total += tl.load(dots_ptr + part * num_rows.to(tl.int64) + rows, mask=owned, other=0.0)
    if bias_ptr is not None:
        experts = tl.load(topk_indices_ptr + slots, mask=owned, other=0).to(tl.int64)
        products = tl.zeros((SLOTS, COLUMNS), tl.float32)
        for start in range(0, SIZE, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            held = owned[:, None] & (columns < SIZE)[None, :]
            g_at = g_ptr + (slots // TOP_K)[:, None] * g_stride + columns[None, :]
            bias_at = bias_ptr + experts[:, None] * SIZE + columns[None, :]
            g = tl.load(g_at, mask=held, other=0.0).to(tl.float32)
            products += g * tl.load(bias_at, mask=held, other=0.0).to(tl.float32)
        total += tl.sum(products, 1)
    total = total.to(d_weights_ptr.dtype.element_ty)
    tl.store(d_weights_ptr + slots, total, mask=slots < num_slots)
