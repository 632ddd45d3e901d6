"""What both ways to route share: the scan over tiles, the rows of each expert, what concerns experts."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import next_power_of_2

SCAN_TILES, SCAN_EXPERTS = 256, 8
"""Tiles by experts that one step of the scan holds."""


@triton.jit
def row_ranges(count, ALIGNMENT: tl.constexpr):
    """The first row of each expert that holds `count` slots, and the row past its range."""
    aligned = (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    end = tl.cumsum(aligned, 0)
    return end - aligned, end


@triton.jit
def store_groups(
    total,
    kept,
    first,
    end,
    slot_of_row_ptr,
    offsets_ptr,
    counts_ptr,
    dropped_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write what concerns experts, not slots: padding rows, offsets and counts."""
    # padding rows, shared out over the programs: each expert's tail, then what follows the last expert
    bins = tl.arange(0, EXPERTS)
    none = tl.full((EXPERTS,), -1, tl.int32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    most_padding = tl.max(end - first - kept, 0)
    for j in range(program, most_padding, programs):
        tail = first + kept + j
        inside_range = (tail < end) & (tail < num_rows)
        tl.store(slot_of_row_ptr + tail, none, mask=inside_range)
    for start in range(tl.max(end, 0) + program * EXPERTS, num_rows, programs * EXPERTS):
        after = start + bins
        tl.store(slot_of_row_ptr + after, none, mask=after < num_rows)

    if program == 0:
        first, end = tl.minimum(first, num_rows), tl.minimum(end, num_rows)
        kept = tl.minimum(kept, end - first)
        tl.store(offsets_ptr + bins, first, mask=bins <= NUM_EXPERTS)
        tl.store(counts_ptr + bins, kept, mask=bins < NUM_EXPERTS)
        tl.store(dropped_ptr, tl.sum(total, 0) - tl.sum(kept, 0))


@triton.jit(do_not_specialize=["num_tiles"])
def scan_kernel(
    tile_counts_ptr,
    total_ptr,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < num_tiles)[:, None] & (expert < NUM_EXPERTS)[None, :]
        at = tile_counts_ptr + tile.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
        count = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + before[None, :], mask=mask)
        before += tl.sum(count, 0)
    tl.store(total_ptr + expert, before, mask=expert < NUM_EXPERTS)


def bins_of(num_experts: int) -> int:
    """Bins of a histogram of expert ids and "no expert"; not fewer than a warp has threads."""
    return max(next_power_of_2(num_experts + 1), 64)


@cache
def scan_launcher(num_columns: int) -> Launcher:
    constants = {"NUM_EXPERTS": num_columns, "TILES": SCAN_TILES, "EXPERTS": SCAN_EXPERTS}
    return Launcher(scan_kernel, constants)


def int32(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised, on the device of `like`; half the host time of `torch.empty`."""
    return like.new_empty(shape, dtype=torch.int32)


def empty_maps(
    like: Tensor, num_tokens: int, top_k: int, num_rows: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        int32(like, num_tokens, top_k),
        int32(like, num_tokens, top_k),
        int32(like, num_rows),
        int32(like, num_experts + 1),
        int32(like, num_experts),
        int32(like),
    )
