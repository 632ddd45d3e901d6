"""sort_chunks: move every row once, 2 * N * D * element_size bytes; bit-exact, any dtype.

A program finds the chunk of each of its rows among the running sums of the sizes, which it computes
itself (C integers), so one launch does it all; the gradient is the same launch with inverse lists.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv, next_power_of_2, slot_tile


@triton.jit(do_not_specialize=["num_rows"])
def _sort_chunks_kernel(
    x_ptr,
    sizes_ptr,
    order_ptr,
    out_ptr,
    num_rows,
    NUM_CHUNKS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    chunks = tl.arange(0, CHUNKS)
    listed = chunks < NUM_CHUNKS
    # chunk i of x starts at start[i]; the j-th of out ends at end[j] and shifts by shift[j]
    size = tl.load(sizes_ptr + chunks, mask=listed, other=0).to(tl.int64)
    start = tl.cumsum(size, 0) - size
    order = tl.load(order_ptr + chunks, mask=listed, other=0).to(tl.int32)
    out_size = tl.where(listed, tl.gather(size, order, 0), 0)
    end = tl.cumsum(out_size, 0)
    shift = tl.gather(start, order, 0) - (end - out_size)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    chunk = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    at_chunk = chunk[:, None] == chunks[None, :]
    source = row + tl.sum(tl.where(at_chunk, shift[None, :], 0), 1)
    source = tl.where(row < tl.sum(size, 0), source, row)
    for start in range(0, NUM_COLUMNS, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        mask = (row < num_rows)[:, None] & (columns < NUM_COLUMNS)[None, :]
        value = tl.load(x_ptr + source[:, None] * X_STRIDE + columns[None, :], mask=mask)
        tl.store(out_ptr + row[:, None] * NUM_COLUMNS + columns[None, :], value, mask=mask)


@cache
def _launcher(
    dtype: torch.dtype,
    lists_dtypes: tuple[torch.dtype, torch.dtype],
    num_chunks: int,
    num_columns: int,
    x_stride: int,
) -> tuple[Launcher, int]:
    """The launcher and its rows a program."""
    tile = slot_tile(num_columns, dtype.itemsize, rows=8)
    constants = {
        "NUM_CHUNKS": num_chunks,
        "NUM_COLUMNS": num_columns,
        "X_STRIDE": x_stride,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "CHUNKS": next_power_of_2(num_chunks),
    }
    return Launcher(_sort_chunks_kernel, constants, num_warps=tile.num_warps), tile.rows


def sort_chunks(x: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    """x [N,...] -> the same shape; the lists are on the device of x."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0 or order.numel() == 0:
        return out.copy_(x)
    flat = x.reshape(x.shape[0], -1)
    num_rows, num_columns = flat.shape
    if num_columns > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    launch, rows = _launcher(
        x.dtype, (split_sizes.dtype, order.dtype), order.numel(), num_columns, flat.stride(0)
    )
    if x.element_size() == 1:
        flat, bits = flat.view(torch.uint8), out.view(torch.uint8)
    else:
        bits = out
    tensors = (flat, split_sizes.contiguous(), order.contiguous(), bits)
    launch(cdiv(num_rows, rows), tensors, (num_rows,))
    return out
