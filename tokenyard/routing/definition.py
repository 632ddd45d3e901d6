"""How expert choices become a routing record's tensors, in plain PyTorch."""

import torch
from torch import Tensor

Maps = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""In the order of the record's fields."""


def _rank_in_expert(experts: Tensor, order: Tensor, num_experts: int) -> Tensor:
    """[S] how many slots of the same expert come before each slot, in the given order of slots."""
    by_expert = order[experts[order].argsort(stable=True)]
    experts_sorted = experts[by_expert]
    first = torch.searchsorted(
        experts_sorted, torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device)
    )
    rank = torch.empty_like(by_expert)
    rank[by_expert] = (
        torch.arange(experts.numel(), device=experts.device) - first[experts_sorted.long()]
    )
    return rank


def route_definition(
    topk_indices: Tensor,
    num_experts: int,
    row_alignment: int,
    num_rows: int,
    capacity: int | None,
    drop_weights: Tensor | None,
) -> Maps:
    """A stable sort of the slots by expert; E stands for "no expert" and sorts to the tail."""
    device = topk_indices.device
    experts = topk_indices.flatten().long()  # ids past int32 must not wrap into the valid range
    experts = torch.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    experts = experts.to(torch.int32)
    wanted = (experts < num_experts).sum()
    num_slots = experts.numel()

    if capacity is not None:
        order = torch.arange(num_slots, device=device)
        if drop_weights is not None:
            weights = drop_weights.flatten().nan_to_num(nan=-torch.inf)
            order = weights.argsort(descending=True, stable=True)
        rank = _rank_in_expert(experts, order, num_experts)
        experts = torch.where(rank < capacity, experts, num_experts)

    slots = experts.argsort(stable=True)
    experts_sorted = experts[slots]
    bounds = torch.searchsorted(
        experts_sorted, torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    )
    counts = bounds.diff()
    aligned = (counts + (row_alignment - 1)) // row_alignment * row_alignment
    offsets = torch.nn.functional.pad(aligned.cumsum(0), (1, 0))
    padding_before = torch.nn.functional.pad(offsets[:-1] - bounds[:-1], (0, 1))
    rows = torch.arange(num_slots, device=device) + padding_before[experts_sorted.long()]
    rows = torch.where((experts_sorted < num_experts) & (rows < num_rows), rows, -1)

    row_of_slot = torch.empty_like(rows)
    row_of_slot[slots] = rows
    # one row more than there is takes the slots that have none
    slot_of_row = rows.new_full((num_rows + 1,), -1)
    slot_of_row[torch.where(rows >= 0, rows, num_rows)] = slots
    slot_of_row = slot_of_row[:num_rows]

    offsets = offsets.clamp(max=num_rows)
    counts = torch.minimum(counts, offsets.diff())
    experts = torch.where(row_of_slot >= 0, experts, -1)
    return (
        experts.view(topk_indices.shape),
        row_of_slot.to(torch.int32).view(topk_indices.shape),
        slot_of_row.to(torch.int32),
        offsets.to(torch.int32),
        counts.to(torch.int32),
        (wanted - counts.sum()).to(torch.int32),
    )


def route_few(
    topk_indices: Tensor, num_experts: int, row_alignment: int, num_rows: int, capacity: int | None
) -> Maps:
    """The definition slot by slot, for fewer slots on a CPU than the calls of its tensor operations cost."""
    ids: list[int] = topk_indices.flatten().tolist()
    wanted: dict[int, list[int]] = {}
    for slot, expert in enumerate(ids):
        if 0 <= expert < num_experts:
            wanted.setdefault(expert, []).append(slot)
    experts, row_of_slot, slot_of_row = [-1] * len(ids), [-1] * len(ids), [-1] * num_rows
    counts, offsets, end = [0] * num_experts, [0], 0
    for expert in sorted(wanted):
        offsets += [min(end, num_rows)] * (expert + 1 - len(offsets))
        kept = wanted[expert][:capacity]
        fitting = kept[: max(num_rows - end, 0)]
        for row, slot in enumerate(fitting, end):
            experts[slot], row_of_slot[slot], slot_of_row[row] = expert, row, slot
        counts[expert] = len(fitting)
        end += -(-len(kept) // row_alignment) * row_alignment
    offsets += [min(end, num_rows)] * (num_experts + 1 - len(offsets))
    dropped = sum(map(len, wanted.values())) - sum(counts)
    lists = experts, row_of_slot, slot_of_row, offsets, counts, dropped
    maps = [torch.tensor(values, dtype=torch.int32) for values in lists]
    shape = topk_indices.shape
    return maps[0].view(shape), maps[1].view(shape), *maps[2:]  # type: ignore[return-value]


def route_mask_definition(
    routing_map: Tensor, top_k: int, row_alignment: int, num_rows: int
) -> Maps:
    """The slots of a token are its experts in ascending order, those from `top_k` on being dropped."""
    num_tokens, num_experts = routing_map.shape
    routed = routing_map != 0
    choice = routed.cumsum(1) - 1
    fits = routed & (choice < top_k)
    experts = torch.arange(num_experts, device=routing_map.device).expand(num_tokens, -1)
    indices = choice.new_full((num_tokens, top_k + 1), -1)  # the last column takes the rest
    indices.scatter_(1, torch.where(fits, choice, top_k), experts)
    *maps, dropped = route_definition(
        indices[:, :top_k], num_experts, row_alignment, num_rows, None, None
    )
    return *maps, dropped + (routed & ~fits).sum(dtype=torch.int32)  # type: ignore[return-value]
