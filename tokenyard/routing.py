"""The one routing record, and how expert choices become it.

slot = t * K + k   token t, its k-th choice
row                position in the expert-sorted buffer
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tokenyard import backend, check
from tokenyard.registration import Operator


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Routing:
    """Where every token goes: the one record from which every row map is derived.

    topk_indices      [T,K]  int32   expert of each slot; -1 = none (dropped, or not on this rank)
    row_of_slot       [T,K]  int32   row of each slot; -1 = no row
    slot_of_row       [R]    int32   slot of each row; -1 = padding row
    expert_offsets    [E+1]  int32   rows of expert e are offsets[e] : offsets[e+1]
    tokens_per_expert [E]    int32   valid rows, at the head of that range
    num_dropped       []     int32   slots that named an expert and got no row
    num_experts, row_alignment       static ints; T, K, R are shapes

    Rows of one expert are in increasing slot order; padding rows are the tail of each expert's
    range, and all rows past `expert_offsets[E]`. Immutable; made by `route` or `conventions.from_*`.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> routing
    Routing(num_tokens=5, top_k=2, num_experts=3, num_rows=10, row_alignment=1, device=cpu)
    >>> routing.validate().slot_of_row.tolist()
    [1, 3, 6, 0, 5, 7, 8, 2, 4, 9]
    >>> routing.row_of_slot.tolist()
    [[3, 0], [7, 1], [8, 4], [2, 5], [6, 9]]
    >>> routing.expert_offsets.tolist(), routing.tokens_per_expert.tolist()
    ([0, 3, 7, 10], [3, 4, 3])
    >>> routing.token_of_row.tolist()
    [0, 1, 3, 0, 2, 3, 4, 1, 2, 4]
    """

    topk_indices: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor
    expert_offsets: Tensor
    tokens_per_expert: Tensor
    num_dropped: Tensor
    num_experts: int
    row_alignment: int = 1

    @property
    def num_tokens(self) -> int:
        return self.topk_indices.shape[0]

    @property
    def top_k(self) -> int:
        return self.topk_indices.shape[1]

    @property
    def num_rows(self) -> int:
        return self.slot_of_row.shape[0]

    @property
    def device(self) -> torch.device:
        return self.topk_indices.device

    @property
    def token_of_row(self) -> Tensor:
        """[R] int32, the token whose copy each row holds; -1 = padding row."""
        return self.slot_of_row // self.top_k

    @property
    def expert_of_row(self) -> Tensor:
        """[R] int32, the expert that each row belongs to; -1 = padding row."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.device)
        experts = torch.searchsorted(self.expert_offsets[1:], rows, right=True, out_int32=True)
        return experts.masked_fill(self.slot_of_row < 0, -1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Routing":
        """The same record on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in _TENSOR_FIELDS
        }
        return replace(self, **moved)

    def validate(self) -> "Routing":
        """Check every invariant and return self; reads all values, so it synchronises a GPU.

        Raises ValueError naming the invariant that does not hold.
        """
        _validate(self)
        return self

    def __repr__(self) -> str:
        return (
            f"Routing(num_tokens={self.num_tokens}, top_k={self.top_k}, "
            f"num_experts={self.num_experts}, num_rows={self.num_rows}, "
            f"row_alignment={self.row_alignment}, device={self.device})"
        )


_TENSOR_FIELDS = tuple(field.name for field in fields(Routing) if field.type is Tensor)


def _flatten(routing: Routing) -> tuple[list[Any], tuple[int, int]]:
    tensors = [getattr(routing, name) for name in _TENSOR_FIELDS]
    return tensors, (routing.num_experts, routing.row_alignment)


def _flatten_with_keys(routing: Routing) -> tuple[list[Any], tuple[int, int]]:
    tensors, context = _flatten(routing)
    return [(pytree.GetAttrKey(n), t) for n, t in zip(_TENSOR_FIELDS, tensors)], context


def _unflatten(tensors: Any, context: tuple[int, int]) -> Routing:
    num_experts, row_alignment = context
    return Routing(
        **dict(zip(_TENSOR_FIELDS, tensors)), num_experts=num_experts, row_alignment=row_alignment
    )


pytree.register_pytree_node(
    Routing,
    _flatten,
    _unflatten,
    serialized_type_name="tokenyard.Routing",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)


def _validate(routing: Routing) -> None:
    num_experts = routing.num_experts
    shapes: dict[str, list[int | str]] = {
        "topk_indices": ["T", "K"],
        "row_of_slot": list(routing.topk_indices.shape),
        "slot_of_row": ["R"],
        "expert_offsets": [num_experts + 1],
        "tokens_per_expert": [num_experts],
        "num_dropped": [],
    }

    def require(holds: Tensor | bool, invariant: str) -> None:
        if not bool(holds):
            raise ValueError(f"tokenyard.Routing: invariant broken: {invariant}")

    for name, shape in shapes.items():
        value = getattr(routing, name)
        require(value.dtype == torch.int32, f"{name} is int32, not {value.dtype}")
        wanted, got = check.shape_text(shape), list(value.shape)
        require(check.has_shape(value, shape), f"{name} has shape {wanted}, not {got}")
        require(value.device == routing.device, f"{name} is on {routing.device}")

    num_rows, num_slots = routing.num_rows, routing.num_tokens * routing.top_k
    experts = routing.topk_indices.flatten()
    rows, slots = routing.row_of_slot.flatten(), routing.slot_of_row
    offsets, counts = routing.expert_offsets, routing.tokens_per_expert
    capacity = offsets.diff()
    require(((experts >= -1) & (experts < num_experts)).all(), "-1 <= topk_indices < num_experts")
    require(((rows >= -1) & (rows < num_rows)).all(), "-1 <= row_of_slot < num_rows")
    require(((slots >= -1) & (slots < num_slots)).all(), "-1 <= slot_of_row < T*K")
    require(offsets[0] == 0, "expert_offsets[0] == 0")
    require((capacity >= 0).all(), "expert_offsets never decreases")
    require(offsets[-1] <= num_rows, "expert_offsets[E] <= num_rows")
    require((offsets % routing.row_alignment == 0).all(), "expert_offsets are aligned")
    require(((counts >= 0) & (counts <= capacity)).all(), "tokens_per_expert fits its range")
    require(((experts >= 0) == (rows >= 0)).all(), "a slot has a row exactly if it has an expert")

    require(routing.num_dropped >= 0, "num_dropped >= 0")

    routed = (rows >= 0).nonzero().flatten()
    require(
        (slots[rows[routed].long()] == routed).all(),
        "slot_of_row[row_of_slot[s]] == s for every routed slot",
    )
    owned = (slots >= 0).nonzero().flatten()
    require(owned.numel() == routed.numel(), "every row that names a slot is that slot's row")
    expert_of_row = routing.expert_of_row
    require(
        (experts[slots[owned].long()] == expert_of_row[owned]).all(),
        "a row lies in the range of its slot's expert",
    )
    head = owned - offsets[expert_of_row[owned].long()]
    require((head < counts[expert_of_row[owned].long()]).all(), "padding is each range's tail")
    require(counts.sum() == owned.numel(), "tokens_per_expert counts the valid rows")
    together = expert_of_row[owned][1:] == expert_of_row[owned][:-1]
    require(
        (slots[owned].diff()[together] > 0).all(), "rows of one expert are in increasing slot order"
    )


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


def _route_definition(
    topk_indices: Tensor,
    num_experts: int,
    row_alignment: int,
    num_rows: int,
    capacity: int | None,
    drop_weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
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


def _route_forward(
    topk_indices: Tensor,
    num_experts: int,
    row_alignment: int,
    num_rows: int,
    capacity: int | None,
    drop_weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels = backend.kernels("route", topk_indices)
    if kernels is not None and drop_weights is None:
        return kernels.route(topk_indices, num_experts, row_alignment, num_rows, capacity)
    return _route_definition(
        topk_indices, num_experts, row_alignment, num_rows, capacity, drop_weights
    )


def _route_fake(
    topk_indices: Tensor, num_experts: int, row_alignment: int, num_rows: int, *rest: Any
) -> Any:
    shape = topk_indices.shape
    sizes = (shape, shape, (num_rows,), (num_experts + 1,), (num_experts,), ())
    return tuple(topk_indices.new_empty(size, dtype=torch.int32) for size in sizes)


_route = Operator("route", _route_forward, _route_fake)


def route(
    topk_indices: Tensor,
    num_experts: int,
    *,
    row_alignment: int = 1,
    num_rows: int | None = None,
    capacity: int | None = None,
    drop: Literal["position", "weight"] = "position",
    topk_weights: Tensor | None = None,
    validate: bool | None = None,
) -> Routing:
    """Sort the slots by expert, stably: expert choices -> `Routing`.

    topk_indices   [T,K] any integer dtype; -1 (DeepEP) and E (Hugging Face) both mean "no expert"
    num_experts    E
    row_alignment  each expert's rows start at a multiple of it; an empty expert gets no row
    num_rows       R; default T*K, or with alignment the least static bound that always suffices:
                   T*K + min(E, T*K) * (row_alignment - 1), rounded down to a multiple of it.
                   Slots past a smaller R get no row (the tail: the highest experts), and are counted
                   in `num_dropped`; rows past the last expert of a larger R are padding
    capacity       most slots that one expert takes; the others are dropped and counted
    drop           which slots go beyond the capacity: the latest ("position", Switch and GShard) or
                   those with the least of `topk_weights` [T,K] ("weight"; ties drop the later slot,
                   NaN counts as least)
    validate       check the ids; default only on the CPU, since it synchronises a GPU. Unchecked
                   ids outside -1..E mean "no expert": they never write anywhere

    No host sync, no atomics; not differentiable. Raises ArgumentError for a bad argument.
    """
    check.tensor("route", "topk_indices", topk_indices, ["T", "K"], dtypes=check.INTEGER_DTYPES)
    check.at_least("route", "num_experts", num_experts, 1)
    check.fits_int32("route", "num_experts", num_experts + 1, "E + 1")
    num_tokens, top_k = topk_indices.shape
    check.at_least("route", "topk_indices.shape[1]", top_k, 1)
    num_rows = _checked_rows("route", num_tokens * top_k, num_experts, row_alignment, num_rows)
    check.choice("route", "drop", drop, ("position", "weight"))
    drop_weights = None
    if capacity is not None:
        check.at_least("route", "capacity", capacity, 0)
    if drop == "weight":
        check.tensor(
            "route",
            "topk_weights",
            topk_weights,
            list(topk_indices.shape),
            dtypes=check.FLOAT_DTYPES,
            device=topk_indices.device,
        )
        assert topk_weights is not None
        drop_weights = topk_weights.detach()
    if validate or (validate is None and _readable(topk_indices)):
        _check_ids(topk_indices, num_experts)
    results = _route(topk_indices, num_experts, row_alignment, num_rows, capacity, drop_weights)
    return Routing(
        **dict(zip(_TENSOR_FIELDS, results)), num_experts=num_experts, row_alignment=row_alignment
    )


def _route_mask_definition(
    routing_map: Tensor, top_k: int, row_alignment: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The slots of a token are its experts in ascending order, those from `top_k` on being dropped."""
    num_tokens, num_experts = routing_map.shape
    routed = routing_map != 0
    choice = routed.cumsum(1) - 1
    fits = routed & (choice < top_k)
    experts = torch.arange(num_experts, device=routing_map.device).expand(num_tokens, -1)
    indices = choice.new_full((num_tokens, top_k + 1), -1)  # the last column takes the rest
    indices.scatter_(1, torch.where(fits, choice, top_k), experts)
    *maps, dropped = _route_definition(
        indices[:, :top_k], num_experts, row_alignment, num_rows, None, None
    )
    return *maps, dropped + (routed & ~fits).sum(dtype=torch.int32)  # type: ignore[return-value]


def _route_mask_forward(
    routing_map: Tensor, top_k: int, row_alignment: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels = backend.kernels("conventions.from_routing_map", routing_map)
    route_mask = _route_mask_definition if kernels is None else kernels.route_mask
    return route_mask(routing_map, top_k, row_alignment, num_rows)


def _route_mask_fake(routing_map: Tensor, top_k: int, row_alignment: int, num_rows: int) -> Any:
    num_tokens, num_experts = routing_map.shape
    indices = routing_map.new_empty(num_tokens, top_k)
    return _route_fake(indices, num_experts, row_alignment, num_rows)


_route_mask = Operator("route_mask", _route_mask_forward, _route_mask_fake)


def route_mask(
    operator: str,
    routing_map: Tensor,
    *,
    top_k: int | None,
    row_alignment: int,
    num_rows: int | None,
) -> Routing:
    """`conventions.from_routing_map`; `operator` is the name in its errors."""
    dtypes = check.INTEGER_DTYPES | {torch.bool}
    check.tensor(operator, "routing_map", routing_map, ["T", "E"], dtypes=dtypes)
    num_tokens, num_experts = routing_map.shape
    check.at_least(operator, "routing_map.shape[1]", num_experts, 1)
    top_k = num_experts if top_k is None else top_k
    check.at_least(operator, "top_k", top_k, 1)
    num_rows = _checked_rows(operator, num_tokens * top_k, num_experts, row_alignment, num_rows)
    results = _route_mask(routing_map, top_k, row_alignment, num_rows)
    return Routing(
        **dict(zip(_TENSOR_FIELDS, results)), num_experts=num_experts, row_alignment=row_alignment
    )


def _checked_rows(
    operator: str, num_slots: int, num_experts: int, row_alignment: int, num_rows: int | None
) -> int:
    """R, or an error. Rows of all slots are counted in int32, also where fewer are kept."""
    check.at_least(operator, "row_alignment", row_alignment, 1)
    most = num_slots + torch.sym_min(num_experts, num_slots) * (row_alignment - 1)
    check.fits_int32(operator, "T*K", num_slots, "T*K")
    check.fits_int32(operator, "row_alignment", most, "T*K + min(E, T*K) * (row_alignment - 1)")
    if num_rows is None:
        num_rows = most // row_alignment * row_alignment
    check.at_least(operator, "num_rows", num_rows, 0)
    check.multiple_of(operator, "num_rows", num_rows, row_alignment, "row_alignment")
    check.fits_int32(operator, "num_rows", num_rows, "R")
    return num_rows


def _readable(tensor: Tensor) -> bool:
    """Whether its values can be read at no cost: a plain CPU tensor, outside a traced program."""
    return not torch.compiler.is_compiling() and tensor.is_cpu and type(tensor) is Tensor


def _check_ids(topk_indices: Tensor, num_experts: int) -> None:
    if topk_indices.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.aminmax(topk_indices))
    if least < -1 or most > num_experts:
        check.fail(
            "route", "topk_indices", f"ids from -1 to {num_experts}", f"ids from {least} to {most}"
        )
