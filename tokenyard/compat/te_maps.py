"""Routings for the mask and index maps of TransformerEngine, shared by its drop-in and those of its kin."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard import check, conventions
from tokenyard.ops.permute import permute, permute_slots
from tokenyard.routing import Routing


def route_mask(
    routing_map: Tensor,
    num_out_tokens: int | Tensor,
    topk: int | None,
    row_alignment: int = 1,
) -> Routing:
    """The routing of a mask [T,E] with R = num_out_tokens rows; negative: one row per routed pair."""
    num_rows = int(num_out_tokens) if isinstance(num_out_tokens, Tensor) else num_out_tokens
    if num_rows < 0:
        num_rows = int((routing_map != 0).sum())
    if topk is None and routing_map.dim() == 2 and isinstance(num_rows, int):
        # a token's first R experts are all that can have a row
        topk = max(min(routing_map.shape[1], num_rows), 1)
    return conventions.from_routing_map(
        routing_map, top_k=topk, num_rows=num_rows, row_alignment=row_alignment
    )


def read_mask_map(
    function: str,
    row_id_map: Tensor,
    num_rows: int,
    topk: int | None = None,
    pad_offsets: Tensor | None = None,
) -> tuple[Routing, Tensor]:
    """A routing with the slots in the order of the mask map, and their experts [T,K], 0 where none.

    The order is what sums need: descending expert ids. The experts serve to look up probabilities, so
    the routing itself takes all rows for those of one expert.
    """
    check.tensor(
        function,
        "row_id_map",
        row_id_map,
        ["T", "2E+1"],
        dtypes=frozenset({torch.int32, torch.int64}),
    )
    num_experts = row_id_map.shape[1] // 2
    if row_id_map.shape[1] % 2 == 0 or num_experts == 0:
        check.fail(function, "row_id_map", "shape [T, 2E+1]", check.describe(row_id_map))
    bound = num_experts if topk is None else max(min(topk, num_experts), 1)
    rows, experts, fan_out = row_id_map.split([num_experts, num_experts, 1], dim=1)
    rows, experts = rows[:, :bound], experts[:, :bound].long()
    listed = torch.arange(bound, device=rows.device) < fan_out
    listed = listed & (experts >= 0) & (experts < num_experts)
    experts = torch.where(listed, experts, 0)
    if pad_offsets is not None:
        check.tensor(
            function,
            "pad_offsets",
            pad_offsets,
            [num_experts],
            dtypes=check.INTEGER_DTYPES,
            device=row_id_map.device,
        )
        rows = rows + pad_offsets[experts]
    rows = torch.where(listed, rows, -1)
    routing = conventions.from_scatter_indices(
        rows.flatten(), all_rows(num_rows, rows), bound, num_rows=num_rows
    )
    return routing, experts


def route_ids(ids: Tensor, num_out_tokens: int | Tensor | None) -> Routing:
    """The routing of ids [T,K], negative for none, with R rows; None, 0 and less: T*K.

    Only their values would tell a bound of the ids, so all rows are taken for those of one expert.
    """
    num_tokens, top_k = ids.shape
    num_slots = num_tokens * top_k
    num_rows = 0 if num_out_tokens is None else num_out_tokens
    num_rows = int(num_rows) if isinstance(num_rows, Tensor) else num_rows
    num_rows = num_slots if num_rows <= 0 else num_rows
    ids = ids.flatten()
    ids = ids if ids.dtype == torch.int64 else ids.to(torch.int32)
    slots = torch.where(ids >= 0, ids, torch.iinfo(ids.dtype).max).argsort(stable=True)
    slots = torch.where(ids[slots] >= 0, slots, -1)[:num_rows]
    slots = pad(slots, (0, num_rows - slots.shape[0]), value=-1)
    return conventions.from_sorted_slots(slots, all_rows(num_rows, ids), top_k, num_tokens)


def read_index_map(row_id_map: Tensor, num_rows: int, topk: int) -> Routing:
    """A routing of the index map [K*T], all rows being taken for those of one expert."""
    return conventions.from_row_id_map(
        row_id_map, all_rows(num_rows, row_id_map), topk, num_rows=num_rows
    )


def all_rows(num_rows: int, like: Tensor) -> Tensor:
    """The offsets of one expert that has all the rows, made without a copy from the host."""
    return torch.arange(2, device=like.device) * num_rows


def permute_with_weights(inp: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """(rows [R,H], weights [R]) of weights [T,K]; rows whose weight is exactly 0 are zero."""
    row_weights = permute_slots(weights, routing)
    absent = row_weights.detach() == 0  # padding rows too
    of_slot = routing.row_of_slot
    dropped = (weights.detach() == 0) | (of_slot < 0)
    kept = replace(
        routing,
        row_of_slot=torch.where(dropped, -1, of_slot),
        slot_of_row=torch.where(absent, -1, routing.slot_of_row),
    )
    return permute(inp, kept), row_weights


def slot_weights(function: str, argument: str, probs: Tensor, routing: Routing) -> Tensor:
    """[T,K] the probability of each slot's expert; some expert's where there is none."""
    check.tensor(
        function,
        argument,
        probs,
        [routing.num_tokens, routing.num_experts],
        dtypes=check.FLOAT_DTYPES,
        device=routing.device,
    )
    return probs.gather(1, routing.topk_indices.clamp(min=0).long())
