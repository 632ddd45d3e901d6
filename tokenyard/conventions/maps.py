"""Routing <-> the row maps of other libraries."""

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard import check
from tokenyard.conventions.groups import aligned_offsets, check_ints, checked, to_int32
from tokenyard.routing import Routing, route_mask

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Layout(TypedDict, total=False):
    """Keyword arguments of the `from_` functions: what a map does not say."""

    num_rows: int | None  # R, the rows of the peer's buffer; default T*K, or the map's own length
    row_alignment: int  # what the expert offsets are multiples of; default 1
    num_dropped: Tensor | int  # slots that named an expert and got no row; default 0


def _num_tokens(function: str, argument: str, row_map: Tensor, top_k: int) -> int:
    check_ints(function, argument, row_map, ["T*K"])
    check.at_least(f"conventions.{function}", "top_k", top_k, 1)
    num_slots = row_map.shape[0]
    check.multiple_of(f"conventions.{function}", f"len({argument})", num_slots, top_k, "top_k")
    return num_slots // top_k


def _inverse(targets: Tensor, size: int) -> Tensor:
    """[size] int64, the i with targets[i] == position; -1 = none. Targets outside are skipped."""
    targets = targets.flatten().long()
    inside = (targets >= 0) & (targets < size)
    inverse = targets.new_full((size + 1,), -1)  # the last entry takes what is outside
    positions = torch.arange(targets.shape[0], device=targets.device)
    inverse[torch.where(inside, targets, size)] = positions
    return inverse[:size]


def _expert_or_end(routing: Routing) -> Tensor:
    """[T,K] int64, the expert of each slot; E = none."""
    return torch.where(routing.topk_indices >= 0, routing.topk_indices, routing.num_experts).long()


def _dropped(function: str, num_dropped: Tensor | int, like: Tensor) -> Tensor:
    """[] `num_dropped`, on the device of `like`."""
    if isinstance(num_dropped, Tensor):
        check_ints(function, "num_dropped", num_dropped, [], like)
        return num_dropped
    check.at_least(f"conventions.{function}", "num_dropped", num_dropped, 0)
    return torch.full((), num_dropped, device=like.device)


def _record(
    function: str,
    row_of_slot: Tensor,
    expert_offsets: Tensor,
    experts: Tensor | None = None,
    *,
    num_rows: int | None = None,
    row_alignment: int = 1,
    num_dropped: Tensor | int = 0,
) -> Routing:
    """The record of `row_of_slot` [T,K]; rows outside the range of `experts` [T,K] do not count."""
    operator = f"conventions.{function}"
    num_slots = row_of_slot.numel()
    num_rows = num_slots if num_rows is None else num_rows
    check_ints(function, "expert_offsets", expert_offsets, ["E+1"], row_of_slot)
    check.at_least(operator, "len(expert_offsets)", expert_offsets.shape[0], 2)
    num_experts = expert_offsets.shape[0] - 1
    check.at_least(operator, "row_alignment", row_alignment, 1)
    check.at_least(operator, "num_rows", num_rows, 0)
    check.multiple_of(operator, "num_rows", num_rows, row_alignment, "row_alignment")
    check.fits_int32(operator, "num_rows", num_rows, "R")
    check.fits_int32(operator, "top_k", num_slots, "T*K")
    num_dropped = _dropped(function, num_dropped, row_of_slot)

    offsets = expert_offsets.long().clamp(0, num_rows)
    rows = row_of_slot.long().contiguous()
    expert_of_slot = torch.searchsorted(offsets[1:], rows, right=True)
    has_row = (rows >= offsets[0]) & (expert_of_slot < num_experts)
    if experts is not None:
        has_row = has_row & (experts == expert_of_slot)
    rows = torch.where(has_row, rows, -1)
    slot_of_row = _inverse(rows, num_rows)
    owned_before = pad((slot_of_row >= 0).cumsum(0), (1, 0))
    return Routing(
        topk_indices=torch.where(has_row, expert_of_slot, -1).to(torch.int32),
        row_of_slot=rows.to(torch.int32),
        slot_of_row=slot_of_row.to(torch.int32),
        expert_offsets=offsets.to(torch.int32),
        tokens_per_expert=owned_before[offsets].diff().clamp(min=0).to(torch.int32),
        num_dropped=to_int32(num_dropped),
        num_experts=num_experts,
        row_alignment=row_alignment,
    )


def to_sorted_slots(routing: Routing) -> Tensor:
    """Map A, row -> slot: [R] int64, -1 = padding row.

    xtuner's torch path (`row_id_map`), scattermoe `sorted_scattered_idxs`, unsloth
    `gather_indices`, sonic-moe scatter index.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_sorted_slots(routing).tolist()
    [1, 3, 6, 0, 5, 7, 8, 2, 4, 9]
    """
    return checked("to_sorted_slots", routing).slot_of_row.long()


def from_sorted_slots(
    sorted_slots: Tensor,
    expert_offsets: Tensor,
    top_k: int,
    num_tokens: int | None = None,
    **layout: "Unpack[Layout]",
) -> Routing:
    """Map A [R]; `num_tokens` is needed with dropped slots or padding rows.

    >>> sorted_slots = torch.tensor([1, 3, 6, 0, 5, 7, 8, 2, 4, 9])
    >>> from_sorted_slots(sorted_slots, torch.tensor([0, 3, 7, 10]), 2).row_of_slot.tolist()
    [[3, 0], [7, 1], [8, 4], [2, 5], [6, 9]]
    """
    name = "from_sorted_slots"
    check_ints(name, "sorted_slots", sorted_slots, ["R"])
    if num_tokens is None:
        num_tokens = _num_tokens(name, "sorted_slots", sorted_slots, top_k)
    check.at_least(f"conventions.{name}", "top_k", top_k, 1)
    check.at_least(f"conventions.{name}", "num_tokens", num_tokens, 0)
    row_of_slot = _inverse(sorted_slots, num_tokens * top_k).view(num_tokens, top_k)
    layout.setdefault("num_rows", sorted_slots.shape[0])
    return _record(name, row_of_slot, expert_offsets, **layout)


def to_row_id_map(routing: Routing) -> Tensor:
    """Map B, slot -> row at index k*T + t: [K*T] int32, -1 = no row.

    xtuner's CUDA path (`row_id_map`), grouped_gemm, TransformerEngine's "index" map.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_row_id_map(routing).tolist()
    [3, 7, 8, 2, 6, 0, 1, 4, 5, 9]
    """
    return checked("to_row_id_map", routing).row_of_slot.t().flatten()


def from_row_id_map(
    row_id_map: Tensor, expert_offsets: Tensor, top_k: int, **layout: "Unpack[Layout]"
) -> Routing:
    """Map B [K*T]; not to be mixed up with map A, which bears the same name in xtuner.

    >>> row_id_map = torch.tensor([3, 7, 8, 2, 6, 0, 1, 4, 5, 9], dtype=torch.int32)
    >>> from_row_id_map(row_id_map, torch.tensor([0, 3, 7, 10]), 2).topk_indices.tolist()
    [[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]
    """
    num_tokens = _num_tokens("from_row_id_map", "row_id_map", row_id_map, top_k)
    row_of_slot = row_id_map.reshape(top_k, num_tokens).t()
    return _record("from_row_id_map", row_of_slot, expert_offsets, **layout)


def to_scatter_indices(routing: Routing) -> Tensor:
    """Map C, slot -> row at index t*K + k: [T*K] int32, -1 = no row.

    unsloth `scatter_indices`, sonic-moe reverse index, flashinfer.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_scatter_indices(routing).tolist()
    [3, 0, 7, 1, 8, 4, 2, 5, 6, 9]
    """
    return checked("to_scatter_indices", routing).row_of_slot.flatten()


def from_scatter_indices(
    scatter_indices: Tensor, expert_offsets: Tensor, top_k: int, **layout: "Unpack[Layout]"
) -> Routing:
    """Map C [T*K].

    >>> scatter_indices = torch.tensor([3, 0, 7, 1, 8, 4, 2, 5, 6, 9])
    >>> from_scatter_indices(scatter_indices, torch.tensor([0, 3, 7, 10]), 2).slot_of_row.tolist()
    [1, 3, 6, 0, 5, 7, 8, 2, 4, 9]
    """
    num_tokens = _num_tokens("from_scatter_indices", "scatter_indices", scatter_indices, top_k)
    row_of_slot = scatter_indices.reshape(num_tokens, top_k)
    return _record("from_scatter_indices", row_of_slot, expert_offsets, **layout)


def to_moe_ops_map(routing: Routing) -> tuple[Tensor, Tensor]:
    """Map D of moe_ops: map B [K*T] int32, and the offsets [E+1] int32 that go with it.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> [result.tolist() for result in to_moe_ops_map(routing)]
    [[3, 7, 8, 2, 6, 0, 1, 4, 5, 9], [0, 3, 7, 10]]
    """
    row_of_slot = checked("to_moe_ops_map", routing).row_of_slot
    return row_of_slot.t().flatten(), routing.expert_offsets


def from_moe_ops_map(
    row_id_map: Tensor, expert_offsets: Tensor, top_k: int, **layout: "Unpack[Layout]"
) -> tuple[Routing, Tensor]:
    """Map D [K*T]: as B, but the rows of one expert are in any order.

    The record is in slot order, so the second result, `their_row_of_row` [R] int64, says where the
    peer has each row of the record: `rows = their_rows[their_row_of_row]`.

    >>> row_id_map = torch.tensor([3, 7, 8, 0, 6, 2, 1, 4, 5, 9])  # two rows of expert 0 swapped
    >>> routing, their_row_of_row = from_moe_ops_map(row_id_map, torch.tensor([0, 3, 7, 10]), 2)
    >>> to_row_id_map(routing).tolist(), their_row_of_row.tolist()
    ([3, 7, 8, 2, 6, 0, 1, 4, 5, 9], [2, 1, 0, 3, 4, 5, 6, 7, 8, 9])
    """
    num_tokens = _num_tokens("from_moe_ops_map", "row_id_map", row_id_map, top_k)
    theirs = _record(
        "from_moe_ops_map", row_id_map.reshape(top_k, num_tokens).t(), expert_offsets, **layout
    )
    num_slots = num_tokens * top_k
    rows = torch.arange(theirs.num_rows, device=theirs.device)
    experts = torch.searchsorted(theirs.expert_offsets[1:].long(), rows, right=True)
    slots = torch.where(theirs.slot_of_row >= 0, theirs.slot_of_row, num_slots)
    their_row_of_row = (experts * (num_slots + 1) + slots).argsort(stable=True)
    row_of_slot = _inverse(theirs.slot_of_row[their_row_of_row], num_slots)
    routing = _record(
        "from_moe_ops_map", row_of_slot.view(num_tokens, top_k), expert_offsets, **layout
    )
    return routing, their_row_of_row


def to_mask_map(routing: Routing) -> Tensor:
    """Map E, token -> rows: [T,2E+1] int32, the "mask" map of TransformerEngine and d9d.

    The n rows of a token from column 0 on, descending; their experts from column E on; n in the
    last column. Cells that the peers leave undefined are -1. Lost: the order of a token's slots,
    and all rows but the first of a duplicated expert.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_mask_map(routing).tolist()[:3]
    [[3, 0, -1, 1, 0, -1, 2], [7, 1, -1, 2, 0, -1, 2], [8, 4, -1, 2, 1, -1, 2]]
    >>> to_mask_map(routing).tolist()[3:]
    [[5, 2, -1, 1, 0, -1, 2], [9, 6, -1, 2, 1, -1, 2]]
    """
    experts = _expert_or_end(checked("to_mask_map", routing))
    none = check.INT32_MAX
    rows = experts.new_full((routing.num_tokens, routing.num_experts + 1), none, dtype=torch.int32)
    rows = rows.scatter_reduce(1, experts, routing.row_of_slot, "amin")[:, :-1]
    rows, experts = rows.masked_fill(rows == none, -1).sort(dim=1, descending=True)
    experts = experts.to(torch.int32).masked_fill(rows < 0, -1)
    return torch.cat([rows, experts, (rows >= 0).sum(1, keepdim=True, dtype=torch.int32)], dim=1)


def from_mask_map(
    mask_map: Tensor,
    expert_offsets: Tensor | None = None,
    top_k: int | None = None,
    **layout: "Unpack[Layout]",
) -> Routing:
    """Map E [T,2E+1]. Slots are in ascending expert id, -1 after the last.

    `top_k` bounds the fan-out (default E); without `expert_offsets` the entries are counted, and
    aligned. Entries whose row is past `num_rows` add to `num_dropped`.

    >>> mask_map = torch.tensor([[3, 0, 99, 1, 0, 99, 2], [2, 99, 99, 1, 99, 99, 1]])
    >>> from_mask_map(mask_map, torch.tensor([0, 2, 4, 4]), top_k=2).row_of_slot.tolist()
    [[0, 3], [2, -1]]
    """
    name = "from_mask_map"
    check_ints(name, "mask_map", mask_map, ["T", "2E+1"])
    num_experts = mask_map.shape[1] // 2
    if mask_map.shape[1] % 2 == 0 or num_experts == 0:
        check.fail(f"conventions.{name}", "mask_map", "shape [T, 2E+1]", check.describe(mask_map))
    if expert_offsets is not None:
        check_ints(name, "expert_offsets", expert_offsets, [num_experts + 1], mask_map)
    top_k = num_experts if top_k is None else top_k
    check.at_least(f"conventions.{name}", "top_k", top_k, 1)
    num_rows = layout.get("num_rows")
    num_rows = mask_map.shape[0] * top_k if num_rows is None else num_rows

    rows, experts, fan_out = mask_map.long().split([num_experts, num_experts, 1], dim=1)
    listed = torch.arange(num_experts, device=mask_map.device) < fan_out
    listed = listed & (experts >= 0) & (experts < num_experts)
    key = torch.where(listed, experts, num_experts)
    if expert_offsets is None:
        counts = key.new_zeros(num_experts + 1)
        counts.scatter_add_(0, key.flatten(), torch.ones_like(key).flatten())
        expert_offsets = aligned_offsets(name, counts[:-1], layout.get("row_alignment", 1))
    layout["num_rows"] = num_rows
    num_dropped = _dropped(name, layout.get("num_dropped", 0), mask_map)
    layout["num_dropped"] = num_dropped + (listed & (rows >= num_rows)).sum()
    key, order = key.sort(dim=1, stable=True)
    rows = torch.where(listed, rows, -1).gather(1, order)
    short = (0, max(top_k - num_experts, 0))
    rows, experts = pad(rows, short, value=-1)[:, :top_k], pad(key, short)[:, :top_k]
    return _record(name, rows, expert_offsets, experts, **layout)


def to_sorted_tokens(routing: Routing) -> Tensor:
    """Map F, row -> token: [R] int64, -1 = padding row. Megatron `sorted_indices`.

    Lost: the order of a token's slots. A duplicated expert keeps its rows.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_sorted_tokens(routing).tolist()
    [0, 1, 3, 0, 2, 3, 4, 1, 2, 4]
    """
    return checked("to_sorted_tokens", routing).token_of_row.long()


def from_sorted_tokens(
    sorted_tokens: Tensor,
    expert_offsets: Tensor,
    num_tokens: int,
    top_k: int,
    **layout: "Unpack[Layout]",
) -> Routing:
    """Map F [R]; `top_k` bounds the rows of a token. Slots in ascending expert id, -1 at the end.

    >>> sorted_tokens = torch.tensor([0, 1, 3, 0, 2, 3, 4, 1, 2, 4])
    >>> from_sorted_tokens(sorted_tokens, torch.tensor([0, 3, 7, 10]), 5, 2).row_of_slot.tolist()
    [[0, 3], [1, 7], [4, 8], [2, 5], [6, 9]]
    """
    name = "from_sorted_tokens"
    check_ints(name, "sorted_tokens", sorted_tokens, ["R"])
    check.at_least(f"conventions.{name}", "num_tokens", num_tokens, 0)
    check.at_least(f"conventions.{name}", "top_k", top_k, 1)
    num_rows, device = sorted_tokens.shape[0], sorted_tokens.device
    tokens = sorted_tokens.long()
    tokens, rows = torch.where(tokens >= 0, tokens, num_tokens).sort(stable=True)
    bounds = torch.searchsorted(tokens, torch.arange(num_tokens + 1, device=device))
    index = bounds[:-1, None] + torch.arange(top_k, device=device)
    rows = pad(rows, (0, 1))[index.clamp(max=num_rows)]
    layout.setdefault("num_rows", num_rows)
    return _record(name, torch.where(index < bounds[1:, None], rows, -1), expert_offsets, **layout)


def to_inverse_map(routing: Routing) -> Tensor:
    """Map G, token -> (row, expert): [2,T,K] int64, rows then experts, in ascending expert id.

    Inverse map of Megatron's batch-invariant mode. Slots without a row come last, -1 in both.
    Lost: the order of a token's slots. A duplicated expert keeps its rows.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_inverse_map(routing)[0].tolist()
    [[0, 3], [1, 7], [4, 8], [2, 5], [6, 9]]
    >>> to_inverse_map(routing)[1].tolist()
    [[0, 1], [0, 2], [1, 2], [0, 1], [1, 2]]
    """
    order = _expert_or_end(checked("to_inverse_map", routing)).argsort(dim=1, stable=True)
    both = torch.stack([routing.row_of_slot, routing.topk_indices]).long()
    return both.gather(2, order.expand(both.shape))


def from_inverse_map(
    inverse_map: Tensor, expert_offsets: Tensor, **layout: "Unpack[Layout]"
) -> Routing:
    """Map G [2,T,K]. Slots are in the order of the map.

    >>> rows = [[0, 3], [1, 7], [4, 8], [2, 5], [6, 9]]
    >>> experts = [[0, 1], [0, 2], [1, 2], [0, 1], [1, 2]]
    >>> routing = from_inverse_map(torch.tensor([rows, experts]), torch.tensor([0, 3, 7, 10]))
    >>> routing.slot_of_row.tolist()
    [0, 2, 6, 1, 4, 7, 8, 3, 5, 9]
    """
    name = "from_inverse_map"
    check_ints(name, "inverse_map", inverse_map, [2, "T", "K"])
    check.at_least(f"conventions.{name}", "inverse_map.shape[2]", inverse_map.shape[2], 1)
    return _record(name, inverse_map[0], expert_offsets, inverse_map[1], **layout)


def to_routing_map(routing: Routing) -> Tensor:
    """The dense mask: [T,E] bool, true where the token has a row of the expert.

    Megatron and TransformerEngine `routing_map`. Lost: the order of a token's slots, duplicates.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_routing_map(routing).int().tolist()
    [[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]]
    """
    experts = _expert_or_end(checked("to_routing_map", routing))
    shape = (routing.num_tokens, routing.num_experts + 1)
    return experts.new_zeros(shape, dtype=torch.bool).scatter(1, experts, True)[:, :-1]


def from_routing_map(
    routing_map: Tensor,
    *,
    top_k: int | None = None,
    row_alignment: int = 1,
    num_rows: int | None = None,
) -> Routing:
    """The dense mask [T,E], bool or any integer dtype, any strides, true where not 0.

    Slots are in ascending expert id, -1 after the last. `top_k` bounds the fan-out (default E);
    experts past it are dropped, highest first, and counted. `num_rows` as in `route`, where K is
    `top_k`: give one or the other, since T*E rows are many.

    >>> routing_map = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]])
    >>> from_routing_map(routing_map, top_k=2).topk_indices.tolist()
    [[0, 1], [0, 2], [1, 2], [0, 1], [1, 2]]
    """
    return route_mask(
        "conventions.from_routing_map",
        routing_map,
        top_k=top_k,
        row_alignment=row_alignment,
        num_rows=num_rows,
    )
