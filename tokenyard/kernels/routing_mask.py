"""route_mask: the maps of a [T,E] mask, without a sort. No atomics decide a row; no host sync.

A tile holds tokens by experts; running sums along the experts give a choice's slot, along the tokens
its row. Three launches: count, scan and place, as in `routing`. Bytes: twice the mask, the maps.
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
from tokenyard.kernels.tiles import cdiv, next_power_of_2

_MASK_ELEMENTS = 4096
"""Tokens by experts of a tile."""


@triton.jit
def _load_mask(
    mask_ptr,
    tokens,
    num_tokens,
    stride_t,
    stride_e,
    NUM_EXPERTS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """[TOKENS,EXPERTS] int32, whether a token goes to an expert; and which of its choices that is."""
    if CONTIGUOUS:
        stride_t, stride_e = NUM_EXPERTS, 1
    experts = tl.arange(0, EXPERTS)
    at = tokens.to(tl.int64)[:, None] * stride_t + experts.to(tl.int64)[None, :] * stride_e
    held = (tokens < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    routed = (tl.load(mask_ptr + at, mask=held, other=0) != 0).to(tl.int32)
    return routed, tl.cumsum(routed, 1) - routed


@triton.jit(do_not_specialize=["num_tokens", "stride_t", "stride_e"])
def _count_kernel(
    mask_ptr,
    tile_counts_ptr,
    num_tokens,
    stride_t,
    stride_e,
    NUM_EXPERTS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Choices by expert; one more column counts those beyond TOP_K."""
    tile = tl.program_id(0)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    routed, k = _load_mask(
        mask_ptr, tokens, num_tokens, stride_t, stride_e, NUM_EXPERTS, CONTIGUOUS, EXPERTS
    )
    count = tl.sum(tl.where(k < TOP_K, routed, 0), 0)
    beyond = tl.sum(tl.sum(tl.where(k < TOP_K, 0, routed), 1), 0)
    bins = tl.arange(0, EXPERTS)
    at = tile_counts_ptr + tile.to(tl.int64) * (NUM_EXPERTS + 1)
    tl.store(at + bins, count, mask=bins < NUM_EXPERTS)
    tl.store(at + NUM_EXPERTS, beyond)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "stride_t", "stride_e"])
def _place_kernel(
    mask_ptr,
    tile_counts_ptr,
    total_ptr,
    topk_indices_ptr,
    row_of_slot_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    counts_ptr,
    dropped_ptr,
    num_tokens,
    num_rows,
    stride_t,
    stride_e,
    NUM_EXPERTS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The slots of a token are its experts in ascending order."""
    tile = tl.program_id(0)
    bins = tl.arange(0, EXPERTS)
    listed = bins < NUM_EXPERTS
    kept = tl.load(total_ptr + bins, mask=listed, other=0)
    at = tile_counts_ptr + tile.to(tl.int64) * (NUM_EXPERTS + 1) + bins
    earlier = tl.load(at, mask=listed, other=0)
    first, end = row_ranges(kept, ALIGNMENT)

    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    routed, k = _load_mask(
        mask_ptr, tokens, num_tokens, stride_t, stride_e, NUM_EXPERTS, CONTIGUOUS, EXPERTS
    )
    routed = tl.where(k < TOP_K, routed, 0)
    row = (first + earlier)[None, :] + tl.cumsum(routed, 0) - routed
    slot = tokens[:, None] * TOP_K + k
    fits = (routed > 0) & (row < num_rows)
    tl.store(topk_indices_ptr + slot, tl.where(fits, bins[None, :], -1), mask=routed > 0)
    tl.store(row_of_slot_ptr + slot, tl.where(fits, row, -1), mask=routed > 0)
    tl.store(slot_of_row_ptr + row, slot, mask=fits)
    ks = tl.arange(0, SLOTS)
    unused = (ks[None, :] >= tl.sum(routed, 1)[:, None]) & (ks < TOP_K)[None, :]
    unused = unused & (tokens < num_tokens)[:, None]
    slot = tokens[:, None] * TOP_K + ks[None, :]
    none = tl.full((TOKENS, SLOTS), -1, tl.int32)
    tl.store(topk_indices_ptr + slot, none, mask=unused)
    tl.store(row_of_slot_ptr + slot, none, mask=unused)
    store_groups(
        tl.where(bins == NUM_EXPERTS, tl.load(total_ptr + NUM_EXPERTS), kept),
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


@cache
def _launchers(
    dtype: torch.dtype, num_experts: int, contiguous: bool, top_k: int, row_alignment: int
) -> tuple[Launcher, Launcher, Launcher, int]:
    """Count, scan and place, and the tokens of a tile."""
    experts = bins_of(num_experts)
    tokens = max(_MASK_ELEMENTS // experts, 1)
    constants = {
        "NUM_EXPERTS": num_experts,
        "CONTIGUOUS": contiguous,
        "TOP_K": top_k,
    }
    tile = {"EXPERTS": experts, "TOKENS": tokens}
    place = {"SLOTS": next_power_of_2(top_k), "ALIGNMENT": row_alignment}
    return (
        Launcher(_count_kernel, constants | tile, num_warps=8),
        scan_launcher(num_experts + 1),
        Launcher(_place_kernel, constants | place | tile, num_warps=8),
        tokens,
    )


def route_mask(
    routing_map: Tensor, top_k: int, row_alignment: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `route`, from a [T,E] mask of any strides; `top_k` bounds the choices of a token."""
    num_tokens, num_experts = routing_map.shape
    if routing_map.dtype == torch.bool:
        routing_map = routing_map.view(torch.uint8)
    results = empty_maps(routing_map, num_tokens, top_k, num_rows, num_experts)
    if max(routing_map.stride()) >= 2**31:
        routing_map = routing_map.contiguous()
    strides = routing_map.stride()
    count, scan, place, tokens = _launchers(
        routing_map.dtype, num_experts, routing_map.is_contiguous(), top_k, row_alignment
    )
    num_tiles = max(cdiv(num_tokens, tokens), 1)
    tile_counts = int32(routing_map, num_tiles, num_experts + 1)
    total = int32(routing_map, num_experts + 1)
    count(num_tiles, (routing_map, tile_counts), (num_tokens, *strides))
    scan(cdiv(num_experts + 1, SCAN_EXPERTS), (tile_counts, total), (num_tiles,))
    maps = (routing_map, tile_counts, total, *results)
    place(num_tiles, maps, (num_tokens, num_rows, *strides))
    return results
