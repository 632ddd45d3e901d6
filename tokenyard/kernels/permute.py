"""permute: read every token once, write its K rows; zero the padding rows in the same launch.

(T + R) * D * element_size bytes, and the two maps. A program holds a tile of tokens by columns.
Data is moved as integers of its size, so any dtype travels bit for bit.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.device.rows import count_slots, zero_padding_rows
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv, next_power_of_2, row_tile

_CHUNK = 16
"""Rows whose padding one step looks for."""


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _permute_kernel(
    x_ptr,
    row_of_slot_ptr,
    slot_of_row_ptr,
    rows_ptr,
    num_tokens,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    column_blocks: tl.constexpr = (NUM_COLUMNS + COLUMNS - 1) // COLUMNS
    token_block = tl.program_id(0) // column_blocks
    first_column = (tl.program_id(0) % column_blocks) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    tokens = token_block * TOKENS + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    inside = columns < NUM_COLUMNS
    at = tokens.to(tl.int64)[:, None] * X_STRIDE + columns[None, :]
    x = tl.load(x_ptr + at, mask=present[:, None] & inside[None, :])
    if SLOTS > 32:
        stop = count_slots(row_of_slot_ptr, tokens, present, TOP_K, SLOTS)
    else:
        stop = TOP_K
    for k in range(stop):
        row = tl.load(row_of_slot_ptr + tokens.to(tl.int64) * TOP_K + k, mask=present, other=-1)
        at = row.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        tl.store(rows_ptr + at, x, mask=(row >= 0)[:, None] & inside[None, :])
    token_blocks = tl.num_programs(0) // column_blocks
    zero_padding_rows(
        rows_ptr,
        slot_of_row_ptr,
        num_rows,
        token_block,
        token_blocks,
        first_column,
        first_column + COLUMNS,
        NUM_COLUMNS,
        COLUMNS,
        CHUNK,
    )


@cache
def _permute_launcher(
    dtype: torch.dtype, num_columns: int, x_stride: int, top_k: int
) -> tuple[Launcher, int, int]:
    """The launcher, its tokens a program, and its programs along the columns."""
    tile = row_tile(num_columns, dtype.itemsize)
    constants = {
        "NUM_COLUMNS": num_columns,
        "X_STRIDE": x_stride,
        "TOP_K": top_k,
        "SLOTS": next_power_of_2(top_k),
        "TOKENS": tile.rows,
        "COLUMNS": tile.columns,
        "CHUNK": _CHUNK,
    }
    launcher = Launcher(_permute_kernel, constants, num_warps=tile.num_warps)
    return launcher, tile.rows, cdiv(num_columns, tile.columns)


def _as_bits(x: Tensor) -> Tensor:
    """A view in a dtype that Triton moves without arithmetic."""
    if x.element_size() == 1:
        return x.view(torch.uint8)
    return x


def permute(x: Tensor, row_of_slot: Tensor, slot_of_row: Tensor) -> Tensor:
    """x [T,D] -> rows [R,D]."""
    num_tokens, num_columns = x.shape
    num_rows, top_k = slot_of_row.shape[0], row_of_slot.shape[1]
    rows = x.new_empty(num_rows, num_columns)
    if num_rows == 0 or num_columns == 0:
        return rows
    if num_columns > 1 and x.stride(1) != 1:
        x = x.contiguous()
    launch, tokens, column_blocks = _permute_launcher(x.dtype, num_columns, x.stride(0), top_k)
    # with no token at all, a single block zeroes the rows
    programs = max(cdiv(num_tokens, tokens), 1) * column_blocks
    tensors = (_as_bits(x), row_of_slot.contiguous(), slot_of_row, _as_bits(rows))
    launch(programs, tensors, (num_tokens, num_rows))
    return rows


@triton.jit(do_not_specialize=["num_out"])
def _gather_kernel(values_ptr, index_ptr, out_ptr, num_out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, mask=at < num_out, other=-1)
    value = tl.load(values_ptr + index, mask=index >= 0, other=0)
    tl.store(out_ptr + at, value, mask=at < num_out)


@cache
def _gather_launcher(dtype: torch.dtype) -> Launcher:
    return Launcher(_gather_kernel, {"BLOCK": 1024})


def gather_values(values: Tensor, index: Tensor) -> Tensor:
    """out[i] = values[index[i]], zero where index[i] is -1; values and index flat."""
    num_out = index.shape[0]
    out = values.new_empty(num_out)
    if values.numel() == 0:
        return out.zero_()
    tensors = (_as_bits(values.contiguous()), index.contiguous(), _as_bits(out))
    if num_out > 0:
        _gather_launcher(values.dtype)(cdiv(num_out, 1024), tensors, (num_out,))
    return out
