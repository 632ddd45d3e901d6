"""Drop-in for Megatron-Core's `transformer.moe.batch_invariant` and the moves of `transformer.moe.moe_utils`.

T tokens, H hidden size, E experts, K experts per token, R rows of the permuted buffer. Rows are grouped
by expert, and in token order within an expert.

sorted_indices  [R] int64, the token of each row, -1 for a row without one; with `fused` the mask map
                [T,2E+1] of `tokenyard.compat.transformer_engine`
inverse_map     [2,T,K] int64, the row and the expert of each slot, in ascending expert id, or -1

Sums are in fp32 (fp64 for fp64 rows) and rounded once. Peer: the unfused `unpermute` adds up in the dtype
of the rows (of the probabilities if wider), in an order that its scatter decides on a GPU.
`topk` is an addition: the most experts that any token has, when known; it keeps maps small on a GPU.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tokenyard import check, conventions
from tokenyard.compat import transformer_engine
from tokenyard.compat.te_maps import all_rows, route_mask, slot_weights
from tokenyard.ops.permute import permute as permute_rows
from tokenyard.ops.permute import permute_slots
from tokenyard.ops.rows import accumulation_dtype
from tokenyard.ops.sort_chunks import sort_chunks
from tokenyard.ops.unpermute import RankTree
from tokenyard.ops.unpermute import unpermute as unpermute_rows
from tokenyard.routing import Routing

__all__ = [
    "build_inverse_permutation_map",
    "permute",
    "sort_chunks_by_idxs",
    "unpermute",
    "unpermute_loop",
    "unpermute_with_bf16_rank_partials",
]

WithinRank = Literal["fp32", "fp64"]
AcrossRanks = Literal["fp32", "fp64"]


def _name(function: str) -> str:
    return f"compat.megatron.{function}"


def build_inverse_permutation_map(
    routing_map: Tensor, flat_sorted: Tensor, sorted_indices: Tensor, num_out_tokens: int
) -> Tensor:
    """Token -> (row, expert): [2,T,K] int64, slots in ascending expert id; K = num_out_tokens / T.

    routing_map     [T,E] bool or any integer dtype; its shape alone is used
    flat_sorted     [R] integers expert * T + token, of each row
    sorted_indices  [R] integers, the token of each row
    num_out_tokens  R, a multiple of T

    Slots without a row are last, -1 in both. K is 1 if T or R is 0. No host sync.
    A token with more than K rows keeps the first K. Peer: overwrites the slots of the next token.
    """
    name = _name("build_inverse_permutation_map")
    check.tensor(name, "routing_map", routing_map, ["T", "E"])
    check.at_least(name, "num_out_tokens", num_out_tokens, 0)
    for argument, value in (("flat_sorted", flat_sorted), ("sorted_indices", sorted_indices)):
        check.tensor(name, argument, value, [num_out_tokens], dtypes=check.INTEGER_DTYPES)
    num_tokens, num_experts = routing_map.shape
    check.multiple_of(name, "num_out_tokens", num_out_tokens, max(num_tokens, 1), "T")
    expert_of_row = flat_sorted // max(num_tokens, 1)
    offsets, _ = conventions.from_expert_of_row(expert_of_row, num_experts)
    top_k = max(num_out_tokens // max(num_tokens, 1), 1)
    routing = conventions.from_sorted_tokens(sorted_indices, offsets, num_tokens, top_k)
    return conventions.to_inverse_map(routing)


def _read_inverse_map(
    function: str, inverse_map: Tensor, num_rows: int, num_experts: int
) -> Routing:
    """A routing with the slots of the map; its padding rows may be anywhere."""
    check.tensor(function, "inverse_map", inverse_map, [2, "T", "K"], dtypes=check.INTEGER_DTYPES)
    rows, experts = inverse_map.long().flatten(1)
    valid = (rows >= 0) & (rows < num_rows) & (experts >= 0) & (experts < num_experts)
    expert_of_row = rows.new_full((num_rows + 1,), -1)  # the last entry takes the rest
    expert_of_row.scatter_(0, torch.where(valid, rows, num_rows), experts)
    offsets, _ = conventions.from_expert_of_row(expert_of_row[:num_rows], num_experts)
    return conventions.from_inverse_map(inverse_map, offsets, num_rows=num_rows)


def _check_shape(
    function: str, restore_shape: Sequence[int], num_tokens: int, like: Tensor
) -> None:
    shape = [num_tokens, like.shape[1]]
    if list(restore_shape) != shape:
        check.fail(function, "restore_shape", f"{shape}, as the map has it", list(restore_shape))


@overload
def unpermute(
    permuted_tokens: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None,
    num_experts: int,
    inverse_map: Tensor,
    ep_size: int = 1,
    within_rank: WithinRank = "fp32",
    across_ranks: AcrossRanks = "fp32",
) -> Tensor: ...


@overload
def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
    batch_invariant_inverse_map: Tensor | None = None,
    *,
    ep_size: int = 1,
    topk: int | None = None,
) -> Tensor: ...


def unpermute(permuted_tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Sum the rows of each token, weighted if probabilities are given: [R,H] -> [T,H], dtype of the rows.

    With `inverse_map` as in `batch_invariant`, the fixed summation tree of expert parallelism:

    permuted_tokens  [R,H]; its padding rows are not read
    restore_shape    (T, H), which must agree with the map
    probs            [T,E] any float dtype, or None; only routed entries are read
    num_experts      E, a multiple of ep_size
    inverse_map      [2,T,K] of `build_inverse_permutation_map`
    ep_size          ranks that experts are sharded over, contiguously. Peer: asks its process groups
    within_rank      a rank's partial sum: "fp32", or "fp64" rounded to fp32
    across_ranks     the sum of the partial sums, by ascending rank: "fp32", or "fp64"

    Without it, as in `moe_utils`:

    sorted_indices   what `permute` returned third
    probs            [T,E], needs routing_map unless fused
    routing_map      [T,E] bool or any integer dtype. Without it (and without fused) the most rows of one
                     token are counted, which costs a host read; `topk` saves it
    fused            a mask map, summed in descending expert order; otherwise the order is ascending
    drop_and_pad     as for `permute`
    pad_offsets      [E] of a fused, padded `permute`
    batch_invariant_inverse_map    [2,T,K], needs routing_map: the summation tree for `ep_size` ranks

    Differentiable in rows and probs; no atomics.
    """
    form = _unpermute_tree if "inverse_map" in kwargs else _unpermute_sorted
    return form(permuted_tokens, *args, **kwargs)


def _unpermute_tree(
    permuted_tokens: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None,
    num_experts: int,
    inverse_map: Tensor,
    ep_size: int = 1,
    within_rank: WithinRank = "fp32",
    across_ranks: AcrossRanks = "fp32",
) -> Tensor:
    name = _name("unpermute")
    check.tensor(name, "permuted_tokens", permuted_tokens, ["R", "H"], dtypes=check.FLOAT_DTYPES)
    routing = _read_inverse_map(name, inverse_map, permuted_tokens.shape[0], num_experts)
    _check_shape(name, restore_shape, routing.num_tokens, permuted_tokens)
    weights = None if probs is None else slot_weights(name, "probs", probs, routing)
    tree = RankTree(ep_size, within_rank, across_ranks)
    return unpermute_rows(permuted_tokens, routing, weights, reduction=tree)


def _unpermute_sorted(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
    batch_invariant_inverse_map: Tensor | None = None,
    *,
    ep_size: int = 1,
    topk: int | None = None,
) -> Tensor:
    name = _name("unpermute")
    if batch_invariant_inverse_map is not None:
        if routing_map is None or fused or drop_and_pad:
            check.fail(
                name,
                "batch_invariant_inverse_map",
                "a routing_map beside it, and neither fused nor drop_and_pad",
                f"fused={fused}, drop_and_pad={drop_and_pad}",
            )
        return _unpermute_tree(
            permuted_tokens,
            restore_shape,
            probs=probs,
            num_experts=routing_map.shape[1],
            inverse_map=batch_invariant_inverse_map,
            ep_size=ep_size,
        )
    if fused:
        return transformer_engine.moe_unpermute(
            permuted_tokens,
            sorted_indices,
            merging_probs=probs,
            restore_shape=restore_shape,
            pad_offsets=pad_offsets,
            topk=topk,
        )
    num_rows = permuted_tokens.shape[0]
    weights = None
    if routing_map is not None:
        routing = _route(routing_map, num_rows, drop_and_pad, topk)
        if probs is not None:
            weights = slot_weights(name, "probs", probs, routing)
    elif probs is not None:
        check.fail(name, "routing_map", "a mask [T,E], with `probs`", None)
    else:
        check.tensor(name, "sorted_indices", sorted_indices, ["R"], dtypes=check.INTEGER_DTYPES)
        num_tokens = restore_shape[0]
        if topk is None:
            owned = sorted_indices[sorted_indices >= 0]
            topk = int(torch.bincount(owned, minlength=1).max())
        routing = conventions.from_sorted_tokens(
            sorted_indices, all_rows(num_rows, sorted_indices), num_tokens, max(topk, 1)
        )
    _check_shape(name, restore_shape, routing.num_tokens, permuted_tokens)
    return unpermute_rows(permuted_tokens, routing, weights)


def _route(
    routing_map: Tensor, num_rows: int | Tensor, drop_and_pad: bool, topk: int | None
) -> Routing:
    """The routing of a mask [T,E]; with drop_and_pad every expert has R / E rows."""
    if not drop_and_pad:
        return route_mask(routing_map, num_rows, topk)
    name = _name("permute")
    dtypes = check.INTEGER_DTYPES | {torch.bool}
    check.tensor(name, "routing_map", routing_map, ["T", "E"], dtypes=dtypes)
    num_rows, num_experts = int(num_rows), routing_map.shape[1]
    capacity = num_rows // num_experts
    routed = routing_map != 0
    rank = routed.cumsum(0) - 1
    experts = torch.arange(num_experts + 1, device=routing_map.device)
    rows = torch.where(routed & (rank < capacity), rank + experts[:-1] * capacity, -1)
    return conventions.from_scatter_indices(
        rows.flatten(), experts * capacity, num_experts, num_rows=num_experts * capacity
    )


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
    return_batch_invariant_inverse_map: bool = False,
    *,
    topk: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Copy every token to the rows of its experts: permuted tokens [R,H] and four more, see below.

    tokens             [T,H] any dtype and strides
    routing_map        [T,E] bool or any integer dtype, any strides
    probs              [T,E] any float dtype, or None; only routed entries are read
    num_out_tokens     R; a smaller one drops the highest experts, a larger one leaves zero rows (peer:
                       copies of unrouted tokens). None drops nothing, and costs a host read of the map
    fused              as TransformerEngine: a mask map, and a zero row where a probability is 0
    drop_and_pad       not with fused: every expert has R // E rows, its first tokens being kept and its
                       missing ones zero rows (peer: copies of unrouted tokens)
    tokens_per_expert  [E] counts; with fused, probs and align_size > 0 each expert is padded to a
    align_size         multiple of align_size
    return_batch_invariant_inverse_map    neither with fused nor with drop_and_pad

    Returns permuted tokens, permuted probs [R] or None, sorted_indices, then the pad offsets (padded) or
    the inverse map [2,T,K] (asked for) or None, and the padded counts (padded) or tokens_per_expert.
    Differentiable in tokens and probs.
    """
    name = _name("permute")
    if return_batch_invariant_inverse_map and (fused or drop_and_pad):
        expected = "False with fused or drop_and_pad"
        check.fail(name, "return_batch_invariant_inverse_map", expected, True)
    num_rows: int | Tensor = -1 if num_out_tokens is None else num_out_tokens
    if fused and probs is not None:
        if tokens_per_expert is not None and align_size > 0:
            return transformer_engine.moe_permute_and_pad_with_probs(
                tokens, probs, routing_map, tokens_per_expert, align_size, topk=topk
            )
        output, permuted_probs, row_id_map = transformer_engine.moe_permute_with_probs(
            tokens, probs, routing_map, num_rows, topk=topk
        )
        return output, permuted_probs, row_id_map, None, tokens_per_expert
    if fused:
        output, row_id_map = transformer_engine.moe_permute(
            tokens, routing_map, num_rows, topk=topk
        )
        return output, None, row_id_map, None, tokens_per_expert
    capacity = drop_and_pad and num_out_tokens is not None
    routing = _route(routing_map, num_rows, capacity, topk)
    check.tensor(name, "tokens", tokens, [routing.num_tokens, "H"], device=routing.device)
    output = permute_rows(tokens, routing)
    row_probs = inverse_map = None
    if probs is not None:
        row_probs = permute_slots(slot_weights(name, "probs", probs, routing), routing)
    if return_batch_invariant_inverse_map:
        num_tokens = max(routing.num_tokens, 1)
        check.multiple_of(name, "num_out_tokens", routing.num_rows, num_tokens, "T")
        inverse_map = conventions.to_inverse_map(routing)
        inverse_map = inverse_map[:, :, : max(routing.num_rows // num_tokens, 1)]
    sorted_indices = conventions.to_sorted_tokens(routing)
    return output, row_probs, sorted_indices, inverse_map, tokens_per_expert


def unpermute_loop(
    permuted_tokens: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None,
    num_experts: int,
    inverse_map: Tensor,
    ep_size: int = 1,
    within_rank: WithinRank = "fp32",
    across_ranks: AcrossRanks = "fp32",
) -> Tensor:
    """The summation tree of `unpermute` as plain loops over tokens, ranks and slots: its slow reference.

    permuted_tokens, restore_shape, probs, num_experts, inverse_map, ep_size, within_rank, across_ranks
    as there. Differentiated by autograd; reads the map on the host.
    """
    acc = accumulation_dtype(permuted_tokens.dtype)
    experts_per_rank = num_experts // ep_size
    rows, experts = inverse_map.tolist()
    output = []
    for token in range(restore_shape[0]):
        total = permuted_tokens.new_zeros(
            restore_shape[1], dtype=torch.float64 if across_ranks == "fp64" else acc
        )
        for rank in range(ep_size):
            partial = torch.zeros_like(total, dtype=torch.float64 if within_rank == "fp64" else acc)
            for row, expert in zip(rows[token], experts[token]):
                if row >= 0 and expert >= 0 and expert // experts_per_rank == rank:
                    term = permuted_tokens[row].to(acc)
                    if probs is not None:
                        term = term * probs[token, expert].to(acc)
                    partial = partial + term
            total = total + partial.to(acc)
        output.append(total.to(acc).to(permuted_tokens.dtype))
    return torch.stack(output) if output else permuted_tokens.new_zeros(tuple(restore_shape))


@torch.no_grad()
def unpermute_with_bf16_rank_partials(
    permuted_tokens: Tensor,
    route_rows: Tensor,
    route_experts: Tensor,
    probs: Tensor,
    num_experts: int,
    ep_size: int,
) -> Tensor:
    """The weighted sum with each rank's partial sum rounded to bf16: [T,H]. Forward only.

    permuted_tokens  [R,H]
    route_rows       [T,K] integers, the row of each slot; -1 for none
    route_experts    [T,K] integers, its expert
    probs            [T,K] fp32, its weight
    num_experts      E, a multiple of ep_size; experts are sharded contiguously
    ep_size          number of ranks

    Within a rank, slots in the order given, by fp32 fused multiply-add from zero; then the partial sums
    are added in fp32 by ascending rank.
    """
    name = _name("unpermute_with_bf16_rank_partials")
    check.tensor(name, "route_rows", route_rows, ["T", "K"], dtypes=check.INTEGER_DTYPES)
    shape = list(route_rows.shape)
    check.tensor(name, "route_experts", route_experts, shape, dtypes=check.INTEGER_DTYPES)
    check.tensor(name, "probs", probs, shape, dtypes=frozenset({torch.float32}))
    inverse_map = torch.stack([route_rows.long(), route_experts.long()])
    routing = _read_inverse_map(name, inverse_map, permuted_tokens.shape[0], num_experts)
    tree = RankTree(ep_size, within_rank="fma_bf16")
    return unpermute_rows(permuted_tokens, routing, probs, reduction=tree)


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Put the chunks of input [N,...] into the given order, those of probs [N,...] too: both results.

    split_sizes  [C] integers, on the CPU or the device of input; rows past their sum stay where they are
    sorted_idxs  [C] integers, a permutation: the chunk that comes first, second, ...
    probs        or None, as is the second result then
    fused        ignored: one way serves both. No host sync; peer: reads both lists unless fused

    Differentiable in input and probs.
    """
    output = sort_chunks(input, split_sizes, sorted_idxs)
    return output, None if probs is None else sort_chunks(probs, split_sizes, sorted_idxs)
