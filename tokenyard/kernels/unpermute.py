"""unpermute: read every row once, in a stated order of additions, write every token once.

forward    (T + R) * D * element_size bytes; K loads are in flight before the first addition
backward   (T + 2R) * D * element_size bytes: a program reads the gradient of its tokens once, writes
           the gradient of their rows, and reduces the weights' gradient in a tree fixed by D alone
Compiled without fused multiply-add: the forward equals the definition bit for bit.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.device.rows import count_slots, zero_padding_rows
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv, next_power_of_2, row_tile, slot_tile

_GROUP = 8
"""Slots whose loads are in flight together."""


@triton.jit
def _pick(values, position, at):
    """[TOKENS]: the value whose position is `at`, of [TOKENS,SLOTS] tensors."""
    return tl.sum(tl.where(position == at, values, 0), 1)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    rows_ptr,
    weights_ptr,
    row_of_slot_ptr,
    expert_of_slot_ptr,
    out_ptr,
    num_tokens,
    NUM_COLUMNS: tl.constexpr,
    ROWS_STRIDE: tl.constexpr,
    EXPERTS_PER_RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    ORDER: tl.constexpr,
    TREE: tl.constexpr,
    FMA_BF16: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACC: tl.constexpr,
    CHAIN: tl.constexpr,
    TOTAL: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column_blocks: tl.constexpr = (NUM_COLUMNS + COLUMNS - 1) // COLUMNS
    token_block = tl.program_id(0) // column_blocks
    columns = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    tokens = token_block * TOKENS + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    inside = columns < NUM_COLUMNS
    first_slot = tokens.to(tl.int64) * TOP_K

    if ORDER != "slot":
        # the position of every slot in the order (key, slot); rows are then picked by position
        ks = tl.arange(0, SLOTS)
        held = present[:, None] & (ks < TOP_K)[None, :]
        slots = first_slot[:, None] + ks[None, :]
        expert_ks = tl.load(expert_of_slot_ptr + slots, mask=held, other=2147483647)
        row_ks = tl.load(row_of_slot_ptr + slots, mask=held, other=-1)
        key = expert_ks
        if ORDER == "rank":
            key = expert_ks // EXPERTS_PER_RANK
        if ORDER == "expert_descending":
            key = -expert_ks
        mine, other = key[:, :, None], key[:, None, :]
        before = (other < mine) | ((other == mine) & (ks[None, None, :] < ks[None, :, None]))
        before = before & held[:, None, :]
        position = tl.where(held, tl.sum(before.to(tl.int32), 2), SLOTS)
        if WEIGHTED:
            weight_ks = tl.load(weights_ptr + slots, mask=row_ks >= 0, other=0).to(ACC)

    partial = tl.zeros((TOKENS, COLUMNS), CHAIN)
    total = tl.zeros((TOKENS, COLUMNS), TOTAL)
    open_rank = tl.full((TOKENS,), -1, tl.int32)
    if ORDER == "slot" and SLOTS > 32:
        stop = count_slots(row_of_slot_ptr, tokens, present, TOP_K, SLOTS)
    else:
        stop = TOP_K
    for k0 in range(0, stop, GROUP):
        for j in tl.static_range(GROUP):
            k = k0 + j
            if ORDER == "slot":
                row = tl.load(
                    row_of_slot_ptr + first_slot + k, mask=present & (k < TOP_K), other=-1
                )
                if WEIGHTED:
                    weight = tl.load(weights_ptr + first_slot + k, mask=row >= 0, other=0).to(ACC)
            else:
                found = present & (k < TOP_K)
                row = tl.where(found, _pick(row_ks, position, k), -1)
                if WEIGHTED:
                    weight = _pick(weight_ks, position, k)
            owned = row >= 0
            at = row.to(tl.int64)[:, None] * ROWS_STRIDE + columns[None, :]
            term = tl.load(rows_ptr + at, mask=owned[:, None] & inside[None, :], other=0).to(ACC)
            if TREE:
                # a slot of another rank closes the partial sum of the rank before it
                if ORDER == "slot":
                    expert = tl.load(expert_of_slot_ptr + first_slot + k, mask=owned, other=-1)
                else:
                    expert = _pick(expert_ks, position, k)
                rank = expert // EXPERTS_PER_RANK
                rank = tl.where(owned, rank, open_rank)
                closes = (rank != open_rank)[:, None]
                if FMA_BF16:
                    closed = partial.to(tl.bfloat16).to(ACC)
                else:
                    closed = partial.to(ACC)
                total = tl.where(closes, total + closed.to(TOTAL), total)
                partial = tl.where(closes, 0.0, partial)
                open_rank = rank
            if FMA_BF16:
                factor = tl.broadcast_to(weight[:, None], (TOKENS, COLUMNS))
                partial = tl.where(owned[:, None], tl.fma(term, factor, partial), partial)
            elif WEIGHTED:
                partial += (term * weight[:, None]).to(CHAIN)
            else:
                partial += term.to(CHAIN)
    if TREE:
        if FMA_BF16:
            partial = partial.to(tl.bfloat16).to(ACC)
        total += partial.to(ACC).to(TOTAL)
        result = total.to(ACC)
    else:
        result = partial
    at = tokens.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    mask = present[:, None] & inside[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


@cache
def _combine_launcher(
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
    num_columns: int,
    rows_stride: int,
    top_k: int,
    experts_per_rank: int,
    order: str,
    tree: bool,
    within_rank: str,
    across_ranks: str,
) -> tuple[Launcher, int, int]:
    """The launcher, its tokens a program, and its programs along the columns."""
    acc = tl.float64 if dtype == torch.float64 else tl.float32
    tile = row_tile(num_columns, dtype.itemsize, 2048)
    slots = next_power_of_2(top_k)
    # all pairs of a token's slots are compared to put them in order
    tokens = tile.rows if order == "slot" else min(tile.rows, max(4096 // slots**2, 1))
    constants = {
        "NUM_COLUMNS": num_columns,
        "ROWS_STRIDE": rows_stride,
        "EXPERTS_PER_RANK": experts_per_rank,
        "TOP_K": top_k,
        "SLOTS": slots,
        "GROUP": min(_GROUP, slots),
        "ORDER": order,
        "TREE": tree,
        "FMA_BF16": within_rank == "fma_bf16",
        "WEIGHTED": weights_dtype is not None,
        "ACC": acc,
        "CHAIN": tl.float64 if within_rank == "fp64" else acc,
        "TOTAL": tl.float64 if across_ranks == "fp64" else acc,
        "TOKENS": tokens,
        "COLUMNS": tile.columns,
    }
    launcher = Launcher(
        _combine_kernel, constants, num_warps=tile.num_warps, enable_fp_fusion=False
    )
    return launcher, tokens, cdiv(num_columns, tile.columns)


def _sum_dtype(rows: Tensor, within_rank: str, across_ranks: str) -> torch.dtype:
    if across_ranks != "none":
        return rows.dtype
    if within_rank == "fma_bf16":
        return torch.bfloat16
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def combine(
    rows: Tensor,
    topk_weights: Tensor | None,
    row_of_slot: Tensor,
    topk_indices: Tensor | None,
    num_experts: int,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
) -> Tensor:
    """rows [R,D] -> [T,D]; the arguments of `combine_reference`."""
    num_tokens, top_k = row_of_slot.shape
    num_rows, num_columns = rows.shape
    out = rows.new_empty(num_tokens, num_columns, dtype=_sum_dtype(rows, within_rank, across_ranks))
    if num_tokens == 0 or num_columns == 0:
        return out
    if num_rows == 0:
        return out.zero_()
    if num_columns > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    tree = ep_size > 0
    # the fused chain takes slots rank by rank, in slot order within a rank
    order = "rank" if within_rank == "fma_bf16" else order
    if order != "slot" and top_k > 32:  # too many to compare all pairs of slots
        assert topk_indices is not None
        key = topk_indices // (num_experts // ep_size) if order == "rank" else topk_indices
        by_key = key.argsort(dim=1, stable=True, descending=order == "expert_descending")
        row_of_slot, topk_indices = row_of_slot.gather(1, by_key), topk_indices.gather(1, by_key)
        topk_weights = None if topk_weights is None else topk_weights.gather(1, by_key)
        order = "slot"
    topk_weights = None if topk_weights is None else topk_weights.contiguous()
    launch, tokens, column_blocks = _combine_launcher(
        rows.dtype,
        None if topk_weights is None else topk_weights.dtype,
        num_columns,
        rows.stride(0),
        top_k,
        num_experts // ep_size if tree else 1,
        order,
        tree,
        within_rank,
        across_ranks,
    )
    experts = topk_indices if order != "slot" or tree else None
    experts = None if experts is None else experts.contiguous()
    tensors = (rows, topk_weights, row_of_slot.contiguous(), experts, out)
    launch(cdiv(num_tokens, tokens) * column_blocks, tensors, (num_tokens,))
    return out


def sum_rows(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """The plain sum in slot order: the gradient of `permute`."""
    return combine(rows, None, row_of_slot, None, 1, "slot", 0, "fp32", "fp32")


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _backward_kernel(
    grad_ptr,
    rows_ptr,
    weights_ptr,
    row_of_slot_ptr,
    slot_of_row_ptr,
    d_rows_ptr,
    d_weights_ptr,
    num_slots,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    GRAD_STRIDE: tl.constexpr,
    ROWS_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    ACC: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    block = tl.program_id(0)
    slot = block.to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    row = tl.load(row_of_slot_ptr + slot, mask=slot < num_slots, other=-1)
    owned = row >= 0
    weight = tl.load(weights_ptr + slot, mask=owned, other=0).to(ACC)
    grad_at = (slot // TOP_K)[:, None] * GRAD_STRIDE
    row = row.to(tl.int64)[:, None]
    products = tl.zeros((SLOTS, COLUMNS), ACC)
    for start in tl.range(0, NUM_COLUMNS, COLUMNS, num_stages=2):
        columns = start + tl.arange(0, COLUMNS)
        mask = owned[:, None] & (columns < NUM_COLUMNS)[None, :]
        # the slots of a token read its gradient together: once from memory
        grad = tl.load(grad_ptr + grad_at + columns[None, :], mask=mask, other=0).to(ACC)
        value = tl.load(rows_ptr + row * ROWS_STRIDE + columns[None, :], mask=mask, other=0).to(ACC)
        d_row = (grad * weight[:, None]).to(d_rows_ptr.dtype.element_ty)
        tl.store(d_rows_ptr + row * NUM_COLUMNS + columns[None, :], d_row, mask=mask)
        products += value * grad
    zero_padding_rows(
        d_rows_ptr,
        slot_of_row_ptr,
        num_rows,
        block,
        tl.num_programs(0),
        0,
        NUM_COLUMNS,
        NUM_COLUMNS,
        COLUMNS,
        CHUNK,
    )
    d_weight = tl.sum(products, 1).to(d_weights_ptr.dtype.element_ty)
    tl.store(d_weights_ptr + slot, d_weight, mask=slot < num_slots)


@cache
def _backward_launcher(
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
    num_columns: int,
    grad_stride: int,
    rows_stride: int,
    top_k: int,
) -> tuple[Launcher, int]:
    """The launcher and its slots a program."""
    tile = slot_tile(num_columns, dtype.itemsize, rows=4)
    constants = {
        "NUM_COLUMNS": num_columns,
        "GRAD_STRIDE": grad_stride,
        "ROWS_STRIDE": rows_stride,
        "TOP_K": top_k,
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "SLOTS": tile.rows,
        "COLUMNS": tile.columns,
        "CHUNK": 16,
    }
    launcher = Launcher(
        _backward_kernel, constants, num_warps=tile.num_warps, enable_fp_fusion=False
    )
    return launcher, tile.rows


def unpermute_backward(
    grad: Tensor, rows: Tensor, topk_weights: Tensor, row_of_slot: Tensor, slot_of_row: Tensor
) -> tuple[Tensor, Tensor]:
    """(d_rows [R,D], d_weights [T,K])."""
    num_tokens, top_k = row_of_slot.shape
    num_rows, num_columns = rows.shape
    d_rows = rows.new_empty(num_rows, num_columns)
    d_weights = topk_weights.new_empty(num_tokens, top_k)
    if num_tokens == 0 or num_rows == 0 or num_columns == 0:
        return d_rows.zero_(), d_weights.zero_()
    if num_columns > 1:
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
    launch, slots = _backward_launcher(
        rows.dtype, topk_weights.dtype, num_columns, grad.stride(0), rows.stride(0), top_k
    )
    num_slots = num_tokens * top_k
    launch(
        cdiv(num_slots, slots),
        (
            grad,
            rows,
            topk_weights.contiguous(),
            row_of_slot.contiguous(),
            slot_of_row,
            d_rows,
            d_weights,
        ),
        (num_slots, num_rows),
    )
    return d_rows, d_weights
