"""Tokens to the ranks of their experts, and what the experts made of them back.

dispatch   choices -> rows for every rank -> exchange -> on each rank tokens with a routing over its experts
combine    out of these -> exchange back -> the weighted sum of each token's rows, on the token's rank

What arrives is, for `expert_mlp` or any other operator, tokens as on one device: rank 0's first, each
rank's in slot order, so that an expert's rows are in the order of one process with all ranks' tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import check
from tokenyard.ops.permute import permute, permute_slots
from tokenyard.ops.rows import accumulation_dtype, autocast_dtype, check_moved, check_topk_weights
from tokenyard.ops.unpermute import RankTree, Reduction, unpermute
from tokenyard.parallel.exchange import exchange_choices, exchange_rows
from tokenyard.parallel.failures import read
from tokenyard.parallel.groups import Group, experts_per_rank, process_group
from tokenyard.parallel.transports import (
    AllToAll,
    Capacity,
    Plan,
    Transport,
    check_transport,
    cut,
    plan,
)
from tokenyard.routing import Routing, route

WeightsAt = Literal["source", "expert", "later"]
WEIGHTS_AT = ("source", "expert", "later")


class Journey(NamedTuple):
    """How rows went, and so how they come back.

    sent       rows of this rank in the order in which they went; over the global experts, or with a
               deduplicating transport over the ranks
    weights    [T,K] to weigh by on the return, or None
    """

    sent: Routing
    weights: Tensor | None
    weights_at: str
    send: list[int]
    receive: list[int]
    group: str
    num_ranks: int
    deduplicated: bool
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """The N tokens that reached this rank's experts, as if they were its own.

    x                   [N,H], bit for bit as sent
    routing             over this rank's experts: N tokens, K = 1 (with a deduplicating transport the K
                        of the model)
    topk_weights        for `expert_mlp`, as its routing
    extras              what was given as extras, [N,...] each
    topk_indices        [T,K] int32, this rank's choices that went anywhere; -1 = none
    tokens_per_expert   [E] int32, the same counted, over the global experts
    num_dropped         [] int32, choices that named an expert and went nowhere
    bytes_sent          bytes of rows, with their ids and weights, that left this rank for others
    """

    x: Tensor
    routing: Routing
    topk_weights: Tensor
    extras: tuple[Tensor, ...]
    topk_indices: Tensor
    tokens_per_expert: Tensor
    num_dropped: Tensor
    bytes_sent: int
    journey: Journey


def dispatch(
    x: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    group: Group = None,
    *,
    num_global_experts: int,
    transport: Transport | None = None,
    weights_at: WeightsAt = "source",
    extras: Sequence[Tensor] = (),
) -> Dispatched:
    """Send tokens to the ranks of their experts; a collective of all ranks of `group`.

    x                    [T,H] any real dtype, T of each rank's own; fp8 and integers move as they are; under
                         autocast floating point takes its dtype first
    topk_indices         [T,K] any integer dtype, global ids; -1 and E mean none
    topk_weights         [T,K] any floating-point dtype
    group                a process group, a device mesh of one dimension, or None for all processes
    num_global_experts   E. Rank r has ceil(E / W) experts, from r * ceil(E / W) on, the last one the rest
    transport            `AllToAll()` (the default) or `Capacity(rows)`
    weights_at           "source": the token's rank weighs what comes back, and saves it for the gradient;
                         "expert": `expert_mlp` weighs by the weights that travel along, rounding once more
                         in 16 bits; "later": the weights travel along for `expert_mlp(...,
                         weights_on="later")`, and the token's rank weighs: the bits of one process,
                         forward and backward, and nothing saved. A deduplicating transport takes "expert"
    extras               tensors [T,...] whose rows go with those of x, such as scales

    Then `out = expert_mlp(d.x, d.routing, d.topk_weights, ...)` and `combine(out, d)`.
    Differentiable in x, topk_weights and extras; the backward exchanges gradients. A rank without tokens,
    or whose experts get none, takes part like any other. Raises ArgumentError, with `AllToAll` also where
    the ranks disagree on E, H, K or dtypes.
    """
    name = "parallel.dispatch"
    check.tensor(name, "x", x, ["T", "H"])
    check.tensor(name, "topk_indices", topk_indices, [x.shape[0], "K"], dtypes=check.INTEGER_DTYPES)
    check.at_least(name, "num_global_experts", num_global_experts, 1)
    routing = route(topk_indices, num_global_experts)
    return dispatch_routed(
        name,
        x,
        routing,
        topk_weights,
        process_group(name, group),
        transport or AllToAll(),
        weights_at,
        extras,
    )


def dispatch_routed(
    name: str,
    x: Tensor,
    routing: Routing,
    topk_weights: Tensor,
    group: dist.ProcessGroup,
    transport: Transport,
    weights_at: WeightsAt,
    extras: Sequence[Tensor] = (),
) -> Dispatched:
    """`dispatch` of choices that are routed already, over the global experts."""
    check_moved(name, "x", x)
    if x.dtype in check.FLOAT_DTYPES:
        x = x.to(autocast_dtype(x) or x.dtype)
    check_topk_weights(name, topk_weights, routing)
    check_transport(name, transport)
    check.choice(name, "weights_at", weights_at, WEIGHTS_AT)
    for number, extra in enumerate(extras):
        check.tensor(name, f"extras[{number}]", extra, device=x.device)
        if extra.dim() < 1 or extra.shape[0] != x.shape[0]:
            check.fail(name, f"extras[{number}]", f"{x.shape[0]} rows, as x", check.describe(extra))
    num_ranks, rank = group.size(), group.rank()
    per_rank = experts_per_rank(name, routing.num_experts, num_ranks)
    if transport.deduplicate and weights_at != "expert":
        check.fail(name, "weights_at", "'expert', for a deduplicating transport", repr(weights_at))
    planned = plan(routing, topk_weights, per_rank, num_ranks, transport)

    send, receive = _splits(name, planned, x, topk_weights, routing, transport, group)
    sent = cut(planned.sent, sum(send))
    journey = (send, receive, group.group_name)
    moved = tuple(exchange_rows(_permuted(value, sent), *journey) for value in (x, *extras))
    if transport.deduplicate:
        ids = permute(planned.topk_indices + 1, sent)
        weights = permute(topk_weights, sent)
    else:
        ids = (sent.expert_of_row + 1)[:, None]
        weights = permute_slots(topk_weights, sent)[:, None]
    if weights_at == "source":
        ids = exchange_rows(ids, *journey)
        weights = weights.new_ones(ids.shape)
    else:
        weights, ids = exchange_choices(weights, ids, *journey)
    # ids count from 1, so that a row of padding names no expert
    local, mine = ids - (1 + rank * per_rank), min(per_rank, routing.num_experts - rank * per_rank)
    local = torch.where((local >= 0) & (local < mine), local, -1)
    row_bytes = sum(value.shape[1:].numel() * value.element_size() for value in moved)
    row_bytes += ids.shape[1] * (4 + (0 if weights_at == "source" else weights.element_size()))
    return Dispatched(
        x=moved[0],
        routing=route(local, mine, validate=False),
        topk_weights=weights,
        extras=moved[1:],
        topk_indices=planned.topk_indices,
        tokens_per_expert=planned.tokens_per_expert,
        num_dropped=planned.num_dropped,
        bytes_sent=(sum(send) - send[rank]) * row_bytes,
        journey=Journey(
            sent=sent,
            weights=None if weights_at == "expert" else topk_weights,
            weights_at=weights_at,
            send=send,
            receive=receive,
            group=group.group_name,
            num_ranks=num_ranks,
            deduplicated=transport.deduplicate,
            dtype=x.dtype,
        ),
    )


def _permuted(value: Tensor, sent: Routing) -> Tensor:
    """[T,...] -> [R,...]"""
    rows = permute(value.reshape(value.shape[0], value.shape[1:].numel()), sent)
    return rows.view(rows.shape[0], *value.shape[1:])


_AGREED = ("num_global_experts", "H", "K", "bytes of a row of x", "bytes of a weight", "transport")


@cache
def _terms(values: tuple[int, ...], num_ranks: int, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).expand(num_ranks, -1)


def _splits(
    name: str,
    planned: Plan,
    x: Tensor,
    topk_weights: Tensor,
    routing: Routing,
    transport: Transport,
    group: dist.ProcessGroup,
) -> tuple[list[int], list[int]]:
    """Rows for every rank, and from every rank."""
    num_ranks = group.size()
    if isinstance(transport, Capacity):
        return [transport.rows] * num_ranks, [transport.rows] * num_ranks
    values = (
        routing.num_experts,
        x.shape[1],
        routing.top_k,
        x.shape[1] * x.element_size(),
        topk_weights.element_size(),
        int(transport.deduplicate),
    )
    mine = torch.cat([planned.rows_per_rank[:, None], _terms(values, num_ranks, x.device)], dim=1)
    theirs = exchange_rows(mine, [1] * num_ranks, [1] * num_ranks, group.group_name)
    counts = read(group, torch.cat([mine[:, :1], theirs], dim=1))
    for rank, (_, _, *others) in enumerate(counts):
        for what, other, own in zip(_AGREED, others, values):
            if other != own:
                expected = f"{what} the same on all ranks, {own} on rank {group.rank()}"
                check.fail(name, "group", expected, f"{other} on rank {rank}")
    return [row[0] for row in counts], [row[1] for row in counts]


class _Return(torch.autograd.Function):
    """Rows back to their tokens. The gradient goes out once for each row, whatever the weights were.

    That is the gradient of a plain sum, and with weights what `weights_on="later"` wants.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, journey: Journey, weights: Tensor | None, reduction: Reduction
    ) -> Tensor:
        ctx.journey, ctx.dtype = journey, out.dtype
        rows = exchange_rows(out, journey.receive, journey.send, journey.group)
        if journey.deduplicated:
            rows = rows.to(accumulation_dtype(journey.dtype))
        return unpermute(rows, journey.sent, weights, reduction=reduction).to(journey.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        journey = ctx.journey
        d_rows = permute(grad, journey.sent)
        d_out = exchange_rows(d_rows, journey.send, journey.receive, journey.group)
        return d_out.to(ctx.dtype), None, None, None


def combine(out: Tensor, dispatched: Dispatched, *, reduction: Reduction | None = None) -> Tensor:
    """Bring back what the experts made of the tokens that `dispatch` brought: [N,H] -> [T,H].

    out          [N,H] floating point, a row for each row of `dispatched.x`: the output of `expert_mlp`;
                 with a deduplicating transport its partial sums, best unrounded, from
                 `expert_mlp(..., reduction=RankTree(1, within_rank, "none"))`
    dispatched   what `dispatch` returned on this rank
    reduction    the order of the sum over a token's rows, see `unpermute`; default "slot". With a
                 deduplicating transport the sum is that of ranks: a `RankTree` of ep_size W, whose
                 across_ranks counts here; default `RankTree(W)`

    Returns the dtype of out, with a deduplicating transport that of x. All ranks of the group take part,
    and all in the backward. Raises ArgumentError.
    """
    name = "parallel.combine"
    if not isinstance(dispatched, Dispatched):
        check.fail(name, "dispatched", "what dispatch returned", check.describe(dispatched))
    journey = dispatched.journey
    check.tensor(name, "out", out, [sum(journey.receive), "H"], dtypes=check.FLOAT_DTYPES)
    if not journey.deduplicated or journey.dtype not in check.FLOAT_DTYPES:
        journey = journey._replace(dtype=out.dtype)
    if journey.deduplicated:
        reduction = RankTree(journey.num_ranks) if reduction is None else reduction
        if not isinstance(reduction, RankTree) or reduction.ep_size != journey.num_ranks:
            expected = f"a RankTree of ep_size {journey.num_ranks}, for a deduplicating transport"
            check.fail(name, "reduction", expected, repr(reduction))
        reduction = RankTree(journey.num_ranks, "fp32", reduction.across_ranks)
    reduction = "slot" if reduction is None else reduction
    if journey.weights_at != "source":
        weights = None if journey.weights is None else journey.weights.detach()
        inputs = out, journey._replace(weights=None), weights, reduction
        total: Tensor = _Return.apply(*inputs)  # type: ignore[no-untyped-call]
        return total
    rows = exchange_rows(out, journey.receive, journey.send, journey.group)
    return unpermute(rows, journey.sent, journey.weights, reduction=reduction)
