"""route: a stable counting sort of the slots by expert. No atomics decide a row; no host sync.

A tile of slots is sorted by (expert, slot); then
row = the expert's first row + its slots in earlier tiles + the position in its run of the sorted tile

direct      few slots, one launch: every tile counts all experts, and those of earlier tiles, itself
otherwise   three launches
  count     the slots of every tile by expert [tiles,E]
  scan      each expert's counts over the tiles: its slots in earlier tiles, and in all
  place     sort, and write the maps
Bytes: twice the ids, twice tiles * E counts, three maps written: a few hundred KB, so launches and
the depth of the sort decide the time.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.device.groups import (
    SCAN_EXPERTS,
    bins_of,
    empty_maps,
    int32,
    row_ranges,
    scan_launcher,
    store_groups,
)
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv

DIRECT_SLOTS = 2048
"""Most slots that are routed in one launch."""
_DIRECT_TILE, _TILE = 128, 512
"""Slots that a program sorts."""
_DIRECT_CHUNK = 1024
"""Slots whose experts are counted at a time."""
_SIZES = ["num_slots", "num_rows", "capacity"]


@triton.jit
def _load_experts(ids_ptr, slots, num_slots, NUM_EXPERTS: tl.constexpr):
    """Expert ids as int32; E stands for "no expert"."""
    listed = slots < num_slots
    ids = tl.load(ids_ptr + slots, mask=listed, other=0).to(tl.int64)
    return tl.where(listed & (ids >= 0) & (ids < NUM_EXPERTS), ids, NUM_EXPERTS).to(tl.int32)


@triton.jit
def _place_tile(
    ids_ptr,
    first_slot,
    total,
    earlier,
    topk_indices_ptr,
    row_of_slot_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    counts_ptr,
    dropped_ptr,
    num_slots,
    num_rows,
    capacity,
    NUM_EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the maps of a tile's slots, given all counts and those of earlier tiles by expert."""
    kept = tl.minimum(total, capacity)
    first, end = row_ranges(kept, ALIGNMENT)

    local = tl.arange(0, TILE)
    experts = _load_experts(ids_ptr, first_slot + local, num_slots, NUM_EXPERTS)
    count = tl.histogram(experts, EXPERTS)
    run = tl.cumsum(count, 0) - count
    ordered = tl.sort(experts * TILE + local)
    expert, slot = ordered // TILE, first_slot + ordered % TILE
    rank = local + tl.gather(earlier - run, expert, 0)
    row = rank + tl.gather(first, expert, 0)
    routed = (expert < NUM_EXPERTS) & (rank < capacity) & (row < num_rows)
    inside = slot < num_slots
    tl.store(topk_indices_ptr + slot, tl.where(routed, expert, -1), mask=inside)
    tl.store(row_of_slot_ptr + slot, tl.where(routed, row, -1), mask=inside)
    tl.store(slot_of_row_ptr + row, slot, mask=routed & inside)
    store_groups(
        total,
        kept,
        first,
        end,
        slot_of_row_ptr,
        offsets_ptr,
        counts_ptr,
        dropped_ptr,
        num_rows,
        NUM_EXPERTS,
        EXPERTS,
    )


@triton.jit(do_not_specialize=_SIZES)
def _direct_kernel(
    ids_ptr,
    topk_indices_ptr,
    row_of_slot_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    counts_ptr,
    dropped_ptr,
    num_slots,
    num_rows,
    capacity,
    NUM_EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    first_slot = tl.program_id(0) * TILE
    total = tl.zeros((EXPERTS,), tl.int32)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_slots, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        experts = _load_experts(ids_ptr, slots, num_slots, NUM_EXPERTS)
        total += tl.histogram(experts, EXPERTS)
        if start < first_slot:
            before = tl.where(slots < first_slot, experts, NUM_EXPERTS)
            earlier += tl.histogram(before, EXPERTS)
    total = tl.where(tl.arange(0, EXPERTS) < NUM_EXPERTS, total, 0)
    _place_tile(
        ids_ptr,
        first_slot,
        total,
        earlier,
        topk_indices_ptr,
        row_of_slot_ptr,
        slot_of_row_ptr,
        offsets_ptr,
        counts_ptr,
        dropped_ptr,
        num_slots,
        num_rows,
        capacity,
        NUM_EXPERTS,
        ALIGNMENT,
        EXPERTS,
        TILE,
    )


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(
    ids_ptr,
    tile_counts_ptr,
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    slots = tile * TILE + tl.arange(0, TILE)
    count = tl.histogram(_load_experts(ids_ptr, slots, num_slots, NUM_EXPERTS), EXPERTS)
    bins = tl.arange(0, EXPERTS)
    at = tile_counts_ptr + tile.to(tl.int64) * NUM_EXPERTS + bins
    tl.store(at, count, mask=bins < NUM_EXPERTS)


@triton.jit(do_not_specialize=_SIZES)
def _place_kernel(
    ids_ptr,
    tile_counts_ptr,
    total_ptr,
    topk_indices_ptr,
    row_of_slot_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    counts_ptr,
    dropped_ptr,
    num_slots,
    num_rows,
    capacity,
    NUM_EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    bins = tl.arange(0, EXPERTS)
    listed = bins < NUM_EXPERTS
    total = tl.load(total_ptr + bins, mask=listed, other=0)
    at = tile_counts_ptr + tile.to(tl.int64) * NUM_EXPERTS + bins
    earlier = tl.load(at, mask=listed, other=0)
    _place_tile(
        ids_ptr,
        tile * TILE,
        total,
        earlier,
        topk_indices_ptr,
        row_of_slot_ptr,
        slot_of_row_ptr,
        offsets_ptr,
        counts_ptr,
        dropped_ptr,
        num_slots,
        num_rows,
        capacity,
        NUM_EXPERTS,
        ALIGNMENT,
        EXPERTS,
        TILE,
    )


@cache
def _direct_launcher(ids_dtype: torch.dtype, num_experts: int, row_alignment: int) -> Launcher:
    constants = {
        "NUM_EXPERTS": num_experts,
        "ALIGNMENT": row_alignment,
        "EXPERTS": bins_of(num_experts),
        "TILE": _DIRECT_TILE,
        "CHUNK": _DIRECT_CHUNK,
    }
    return Launcher(_direct_kernel, constants)


@cache
def _launchers(
    ids_dtype: torch.dtype, num_experts: int, row_alignment: int
) -> tuple[Launcher, Launcher, Launcher]:
    """Count, scan and place."""
    experts = {"NUM_EXPERTS": num_experts}
    tile = {"EXPERTS": bins_of(num_experts), "TILE": _TILE}
    return (
        Launcher(_count_kernel, experts | tile),
        scan_launcher(num_experts),
        Launcher(_place_kernel, experts | {"ALIGNMENT": row_alignment} | tile),
    )


def route(
    topk_indices: Tensor, num_experts: int, row_alignment: int, num_rows: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tensors of a `Routing`, in the order of its fields."""
    ids = topk_indices.contiguous()
    num_slots = ids.numel()
    num_tokens, top_k = ids.shape
    results = empty_maps(ids, num_tokens, top_k, num_rows, num_experts)
    numbers = (num_slots, num_rows, 2**31 - 1 if capacity is None else capacity)
    if num_slots <= DIRECT_SLOTS:
        launch = _direct_launcher(ids.dtype, num_experts, row_alignment)
        launch(max(cdiv(num_slots, _DIRECT_TILE), 1), (ids, *results), numbers)
        return results
    count, scan, place = _launchers(ids.dtype, num_experts, row_alignment)
    num_tiles = cdiv(num_slots, _TILE)
    tile_counts = int32(ids, num_tiles, num_experts)
    total = int32(ids, num_experts)
    count(num_tiles, (ids, tile_counts), (num_slots,))
    scan(cdiv(num_experts, SCAN_EXPERTS), (tile_counts, total), (num_tiles,))
    place(num_tiles, (ids, tile_counts, total, *results), numbers)
    return results
