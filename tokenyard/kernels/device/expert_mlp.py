"""The up GEMM of the expert MLP, with the activation in its epilogue."""

import triton
import triton.language as tl

from tokenyard.kernels.device.activation import slopes
from tokenyard.kernels.device.gemm import (
    product_tile,
    store_tile,
    tokens_of_tile,
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
    tokens = tokens_of_tile(row, valid, slot_of_row_ptr, TOP_K, TOKENS)
    WIDTH: tl.constexpr = SIZE if KIND == "" else 2 * SIZE
    WIDER: tl.constexpr = COLUMNS if KIND == "" else 2 * COLUMNS
    PAIRED: tl.constexpr = KIND != "" and not INTERLEAVED
    first = 2 * column if INTERLEAVED else column
    z = product_tile(
        x, matrix, bias_ptr, expert, row, tokens, first, x_rows, x_stride, SIZE_IN, WIDTH,
        OUT_MAJOR, PAIRED, X_TMA, TMA, UNIT, TOKENS_LAST, PRECISION, TOKENS, WIDER, DEPTH,
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
