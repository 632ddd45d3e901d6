"""Bring the rows of a token's experts together again: the weighted sum, in a stated order.

c[t,k]  = acc(rows[row_of_slot[t,k]]) * acc(w[t,k])     rounded on its own; no product without weights
out[t]  = sum of c[t,k] in the order of `reduction`, a chain from zero, rounded once to rows' dtype
d_rows[row_of_slot[t,k]] = round(acc(g[t]) * acc(w[t,k]))      zero in padding rows
d_w[t,k] = sum over d of acc(rows[row_of_slot[t,k], d]) * acc(g[t,d])   zero where there is no row

Orders: "slot" k = 0, 1, ...; "expert" ascending expert id; "expert_descending"; or a `RankTree`.
Slots of one expert (a duplicate) keep slot order in each of them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tokenyard import backend, check
from tokenyard.ops.rows import (
    accumulation_dtype,
    check_routing,
    check_topk_weights,
    gather_rows,
    sum_rows,
    term,
)
from tokenyard.registration import Operator
from tokenyard.routing import Routing

ORDERS = ("slot", "expert", "expert_descending")
WITHIN_RANK = ("fp32", "fp64", "fma_bf16")
ACROSS_RANKS = ("fp32", "fp64", "none")


@dataclass(frozen=True)
class RankTree:
    """The summation tree of Megatron-Core's batch-invariant mode on `ep_size` ranks.

    Experts are sharded contiguously. Within a rank, ascending in rank, slots are added from zero in
    ascending expert id; then the ranks' partial sums are added from zero, ascending.

    within_rank   "fp32" a chain in fp32; "fp64" a chain in fp64, the partial rounded to fp32;
                  "fma_bf16" slots in slot order, fp32 fused multiply-add from zero, the partial
                  rounded to bf16 (Megatron's BF16_RANK_PARTIALS; needs weights)
    across_ranks  "fp32" a chain in fp32; "fp64" a chain in fp64, the sum rounded to fp32 first;
                  "none" with ep_size 1: the partial sum as it goes to the sum over ranks, in fp32
                  (bf16 with "fma_bf16", fp64 for fp64 rows) whatever the dtype of the rows

    fp64 rows are accumulated in fp64 throughout, except for "fma_bf16", which refuses them.
    """

    ep_size: int
    within_rank: Literal["fp32", "fp64", "fma_bf16"] = "fp32"
    across_ranks: Literal["fp32", "fp64", "none"] = "fp32"


Reduction = Literal["slot", "expert", "expert_descending"] | RankTree


def unpermute_reference(
    rows: Tensor,
    routing: Routing,
    topk_weights: Tensor | None = None,
    *,
    reduction: Reduction = "slot",
) -> Tensor:
    """The definition of `unpermute`."""
    return combine_reference(
        rows,
        topk_weights,
        routing.row_of_slot,
        routing.topk_indices,
        routing.num_experts,
        *encode_reduction(reduction),
    )


def encode_reduction(reduction: Reduction) -> tuple[str, int, str, str]:
    """(order, ep_size, within_rank, across_ranks): a reduction as an op's schema can carry it."""
    if isinstance(reduction, RankTree):
        order = "slot" if reduction.within_rank == "fma_bf16" else "expert"
        return order, reduction.ep_size, reduction.within_rank, reduction.across_ranks
    return reduction, 0, "fp32", "fp32"


def sum_dtype(dtype: torch.dtype, within_rank: str, across_ranks: str) -> torch.dtype:
    """The dtype of the sum of rows of `dtype`."""
    if across_ranks != "none":
        return dtype
    return torch.bfloat16 if within_rank == "fma_bf16" else accumulation_dtype(dtype)


def combine_reference(
    rows: Tensor,
    topk_weights: Tensor | None,
    row_of_slot: Tensor,
    topk_indices: Tensor,
    num_experts: int,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
) -> Tensor:
    """`unpermute_reference` of a routing's tensors, the reduction being encoded."""
    if order != "slot":
        by_expert = topk_indices.argsort(
            dim=1, stable=True, descending=order == "expert_descending"
        )
        row_of_slot = row_of_slot.gather(1, by_expert)
        topk_indices = topk_indices.gather(1, by_expert)
        if topk_weights is not None:
            topk_weights = topk_weights.gather(1, by_expert)
    if ep_size == 0:
        return sum_rows(rows, row_of_slot, topk_weights).to(rows.dtype)

    acc = accumulation_dtype(rows.dtype)
    chain_dtype = torch.float64 if within_rank == "fp64" else acc
    total_dtype = torch.float64 if across_ranks == "fp64" else acc
    rank_of_slot = topk_indices // (num_experts // ep_size)
    total = torch.zeros(row_of_slot.shape[0], rows.shape[1], dtype=total_dtype, device=rows.device)
    for rank in range(ep_size):
        on_rank = row_of_slot.masked_fill(rank_of_slot != rank, -1)
        partial = torch.zeros_like(total, dtype=chain_dtype)
        for k in range(on_rank.shape[1]):
            weights = None if topk_weights is None else topk_weights[:, k]
            if within_rank == "fma_bf16":
                assert weights is not None
                row = gather_rows(rows, on_rank[:, k]).float()
                weight = weights.float().masked_fill(on_rank[:, k] < 0, 0)[:, None]
                partial = torch.where(
                    on_rank[:, k, None] >= 0, _fma_fp32(row, weight, partial), partial
                )
            else:
                partial += term(rows, on_rank[:, k], weights, acc)
        if within_rank == "fma_bf16":
            partial = partial.bfloat16()
        total += partial.to(acc)
    return total.to(acc).to(sum_dtype(rows.dtype, within_rank, across_ranks))


def _fma_fp32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 tensors, rounded once.

    The product is exact in fp64. The fp64 sum is rounded to odd by its exact error (Knuth's two-sum),
    so that the rounding to fp32 sees every bit (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)
    odd = bits + torch.where(away, 1, -1)
    inexact = total.isfinite() & (error != 0) & (bits % 2 == 0)
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def _forward(
    rows: Tensor,
    topk_weights: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    topk_indices: Tensor,
    num_experts: int,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
) -> Tensor:
    kernels = backend.kernels("unpermute", rows)
    combine = combine_reference if kernels is None else kernels.combine
    return combine(
        rows,
        topk_weights,
        row_of_slot,
        topk_indices,
        num_experts,
        order,
        ep_size,
        within_rank,
        across_ranks,
    )


def _fake(
    rows: Tensor,
    topk_weights: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    topk_indices: Tensor,
    num_experts: int,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
) -> Tensor:
    dtype = sum_dtype(rows.dtype, within_rank, across_ranks)
    return rows.new_empty(row_of_slot.shape[0], rows.shape[1], dtype=dtype)


def _backward(
    grad: Tensor,
    rows: Tensor | None,
    topk_weights: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
) -> tuple[Tensor, Tensor]:
    """d_rows and d_weights; the latter is empty when there are no weights."""
    token_of_row = slot_of_row // row_of_slot.shape[1]
    if rows is None or topk_weights is None:
        # every row belongs to one token: a plain gather, and no collision
        kernels = backend.kernels("permute", grad)
        if kernels is not None:
            return kernels.permute(grad, row_of_slot, slot_of_row), grad.new_empty(0)
        return gather_rows(grad, token_of_row), grad.new_empty(0)
    kernels = backend.kernels("unpermute", rows)
    if kernels is not None:
        return kernels.unpermute_backward(grad, rows, topk_weights, row_of_slot, slot_of_row)
    acc = accumulation_dtype(rows.dtype)
    grad_of_row = gather_rows(grad, token_of_row).to(acc)
    weight_of_row = gather_rows(topk_weights.flatten(), slot_of_row).to(acc)
    d_weight_of_row = (rows.to(acc) * grad_of_row).sum(1)
    d_rows = (grad_of_row * weight_of_row[:, None]).to(rows.dtype)
    d_weights = gather_rows(d_weight_of_row, row_of_slot.flatten()).view(row_of_slot.shape)
    return d_rows, d_weights.to(topk_weights.dtype)


def _backward_fake(
    grad: Tensor,
    rows: Tensor | None,
    topk_weights: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
) -> tuple[Tensor, Tensor]:
    d_rows = grad.new_empty(slot_of_row.shape[0], grad.shape[1])
    if topk_weights is None:
        return d_rows, grad.new_empty(0)
    return d_rows, topk_weights.new_empty(topk_weights.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, topk_weights, row_of_slot, slot_of_row, *_ = inputs
    ctx.dtype = rows.dtype
    if topk_weights is None:
        rows = None
    ctx.save_for_backward(rows, topk_weights, row_of_slot, slot_of_row)


def _gradient(ctx: Any, backward: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    d_rows, d_weights = backward(grad.to(ctx.dtype), *saved)
    return d_rows, None if saved[1] is None else d_weights, *[None] * 8


_unpermute = Operator(
    "unpermute",
    _forward,
    _fake,
    save=_save,
    gradient=_gradient,
    backward=_backward,
    backward_fake=_backward_fake,
)


def check_reduction(
    operator: str,
    reduction: Reduction,
    routing: Routing,
    argument: str,
    rows: Tensor,
    weighted: bool,
) -> None:
    if not isinstance(reduction, RankTree):
        if reduction not in ORDERS:
            expected = ", ".join(repr(order) for order in ORDERS) + " or a RankTree"
            check.fail(operator, "reduction", expected, repr(reduction))
        return
    check.at_least(operator, "reduction.ep_size", reduction.ep_size, 1)
    if routing.num_experts % reduction.ep_size != 0:
        expected = f"a divisor of num_experts = {routing.num_experts}"
        check.fail(operator, "reduction.ep_size", expected, reduction.ep_size)
    check.choice(operator, "reduction.within_rank", reduction.within_rank, WITHIN_RANK)
    check.choice(operator, "reduction.across_ranks", reduction.across_ranks, ACROSS_RANKS)
    if reduction.across_ranks == "none" and reduction.ep_size != 1:
        check.fail(operator, "reduction.ep_size", "1, for across_ranks 'none'", reduction.ep_size)
    if reduction.within_rank == "fma_bf16":
        if not weighted:
            check.fail(operator, "topk_weights", "weights, for within_rank 'fma_bf16'", None)
        if rows.dtype == torch.float64:
            check.fail(operator, argument, "no fp64 for within_rank 'fma_bf16'", rows.dtype)


def unpermute(
    rows: Tensor,
    routing: Routing,
    topk_weights: Tensor | None = None,
    *,
    reduction: Reduction = "slot",
) -> Tensor:
    """Sum the rows of each token's experts, weighted: rows [R,D] -> [T,D], dtype of rows.

    routing        as for the `permute` that made the rows
    topk_weights   [T,K] any floating-point dtype, or None for the plain sum
    reduction      the order of the additions: "slot", "expert", "expert_descending" or a `RankTree`,
                   which may keep the precision of the sum

    Accumulates in fp32 (fp64 for fp64 rows) and rounds once. Padding rows are never read; a slot
    without a row adds nothing and its weight's gradient is exactly zero. Differentiable in rows and
    weights; saves rows only when there are weights. Raises ArgumentError.
    """
    check.tensor("unpermute", "rows", rows)
    check_routing("unpermute", routing, rows.device)
    check.tensor("unpermute", "rows", rows, [routing.num_rows, "D"], dtypes=check.FLOAT_DTYPES)
    if topk_weights is not None:
        check_topk_weights("unpermute", topk_weights, routing)
    check_reduction("unpermute", reduction, routing, "rows", rows, topk_weights is not None)
    return _unpermute(
        rows,
        topk_weights,
        routing.row_of_slot,
        routing.slot_of_row,
        routing.topk_indices,
        routing.num_experts,
        *encode_reduction(reduction),
    )
