"""Which rows a rank sends to which, in three ways.

AllToAll               a row for each choice, exactly
Capacity               the same in buffers of a fixed size
either, deduplicated   a row for each rank that a token chose an expert of; the experts there add up
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tokenyard import check, conventions
from tokenyard.routing import Routing, route


@dataclass(frozen=True)
class AllToAll:
    """Exact splits, nothing dropped. The host reads the counts, once a dispatch.

    deduplicate   send a token once to each rank that has experts of its choice, and bring back the
                  partial sum that is made there, in place of a row for each choice
    """

    deduplicate: bool = False


@dataclass(frozen=True)
class Capacity:
    """Static shapes: every rank sends `rows` rows to every other, whatever the routing.

    No host sync, so a CUDA graph can hold it; no counts are exchanged. Choices that find no room are
    dropped and counted.

    rows          rows for each destination, the same on all ranks. T * K / W is the mean of W ranks;
                  T * min(K, experts of a rank) drops nothing, with `deduplicate` T drops nothing
    drop          which go: the latest tokens' ("position"), or those of the least weight ("weight"; of
                  the least sum of weights with `deduplicate`), as in `tokenyard.route`
    deduplicate   as in `AllToAll`
    """

    rows: int
    drop: Literal["position", "weight"] = "position"
    deduplicate: bool = False


Transport = AllToAll | Capacity


def check_transport(operator: str, transport: object) -> None:
    if not isinstance(transport, AllToAll | Capacity):
        check.fail(operator, "transport", "AllToAll() or Capacity(rows)", check.describe(transport))
    if isinstance(transport, Capacity):
        check.at_least(operator, "transport.rows", transport.rows, 0)
        check.choice(operator, "transport.drop", transport.drop, ("position", "weight"))


class Plan(NamedTuple):
    """What is sent.

    sent                [R] rows ordered by the rank that they go to. Its experts are the global ones, or
                        with `deduplicate` the ranks
    topk_indices        [T,K] int32, the choices that go anywhere; -1 = none
    tokens_per_expert   [E] int32, the same counted
    num_dropped         [] int32
    rows_per_rank       [W] int64, on the device
    """

    sent: Routing
    topk_indices: Tensor
    tokens_per_expert: Tensor
    num_dropped: Tensor
    rows_per_rank: Tensor


def plan(
    routing: Routing, topk_weights: Tensor, per_rank: int, num_ranks: int, transport: Transport
) -> Plan:
    """`routing` is over the global experts, of which rank r has those from r * per_rank on."""
    if transport.deduplicate:
        return _plan_once_a_rank(routing, topk_weights, per_rank, num_ranks, transport)
    if isinstance(transport, AllToAll):
        counts = _by_rank(routing.tokens_per_expert, per_rank, num_ranks)
        return Plan(
            routing, routing.topk_indices, routing.tokens_per_expert, routing.num_dropped, counts
        )
    ranks = torch.where(routing.topk_indices >= 0, routing.topk_indices // per_rank, -1)
    kept = _route_within(ranks, num_ranks, topk_weights, transport)
    ids = routing.topk_indices.masked_fill(kept.topk_indices < 0, -1)
    sent = _spread(route(ids, routing.num_experts, validate=False), per_rank, transport.rows)
    dropped = routing.num_dropped + kept.num_dropped
    return Plan(sent, ids, sent.tokens_per_expert, dropped, kept.tokens_per_expert.long())


def _plan_once_a_rank(
    routing: Routing, topk_weights: Tensor, per_rank: int, num_ranks: int, transport: Transport
) -> Plan:
    ids, top_k = routing.topk_indices, routing.top_k
    ranks = torch.where(ids >= 0, ids // per_rank, -1)
    same = (ranks[:, :, None] == ranks[:, None, :]) & (ids >= 0)[:, :, None]
    earlier = same & torch.ones(top_k, top_k, dtype=torch.bool, device=ids.device).tril(-1)
    first = ranks.masked_fill(earlier.any(2), -1)
    if isinstance(transport, AllToAll):
        num_rows = routing.num_tokens * min(top_k, num_ranks)
        sent = route(first, num_ranks, num_rows=num_rows, validate=False)
        counts = routing.tokens_per_expert, routing.num_dropped
        return Plan(sent, ids, *counts, sent.tokens_per_expert.long())
    weights = (same * topk_weights.detach()[:, None, :]).sum(2)
    sent = _route_within(first, num_ranks, weights, transport)
    gone = ~(same & (sent.topk_indices >= 0)[:, None, :]).any(2)
    kept = ids.masked_fill(gone, -1)
    dropped = routing.num_dropped + ((ids >= 0) & gone).sum(dtype=torch.int32)
    counted = route(kept, routing.num_experts, validate=False).tokens_per_expert
    spread = _spread(sent, 1, transport.rows)
    return Plan(spread, kept, counted, dropped, sent.tokens_per_expert.long())


def _route_within(
    ranks: Tensor, num_ranks: int, topk_weights: Tensor, transport: Capacity
) -> Routing:
    return route(
        ranks,
        num_ranks,
        capacity=transport.rows,
        drop=transport.drop,
        topk_weights=topk_weights,
        validate=False,
    )


def _by_rank(tokens_per_expert: Tensor, per_rank: int, num_ranks: int) -> Tensor:
    missing = per_rank * num_ranks - tokens_per_expert.shape[0]
    counts = torch.nn.functional.pad(tokens_per_expert.long(), (0, missing))
    return counts.view(num_ranks, per_rank).sum(1)


def _spread(routing: Routing, per_rank: int, rows: int) -> Routing:
    """The same with the rows of rank r, which has `per_rank` experts, from r * rows on."""
    starts = routing.expert_offsets[:-1:per_rank].long()
    shift = torch.arange(starts.shape[0], device=starts.device) * rows - starts
    rank_of_expert = torch.arange(routing.num_experts, device=starts.device) // per_rank
    offsets = routing.expert_offsets[:-1] + shift[rank_of_expert]
    num_rows = starts.shape[0] * rows
    moved = routing.row_of_slot + shift[routing.topk_indices.clamp(min=0) // per_rank]
    moved = torch.where(routing.topk_indices >= 0, moved, -1)
    return conventions.from_scatter_indices(
        moved.flatten(),
        torch.nn.functional.pad(offsets, (0, 1), value=num_rows),
        routing.top_k,
        num_rows=num_rows,
    )


def cut(routing: Routing, num_rows: int) -> Routing:
    """The same without the padding rows from `num_rows` on."""
    if num_rows == routing.num_rows:
        return routing
    return replace(routing, slot_of_row=routing.slot_of_row[:num_rows])
