"""The one routing record, from which every row map is derived.

slot = t * K + k   token t, its k-th choice
row                position in the expert-sorted buffer
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tokenyard import check


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
            for name in TENSOR_FIELDS
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


TENSOR_FIELDS = tuple(field.name for field in fields(Routing) if field.type is Tensor)


def _flatten(routing: Routing) -> tuple[list[Any], tuple[int, int]]:
    tensors = [getattr(routing, name) for name in TENSOR_FIELDS]
    return tensors, (routing.num_experts, routing.row_alignment)


def _flatten_with_keys(routing: Routing) -> tuple[list[Any], tuple[int, int]]:
    tensors, context = _flatten(routing)
    return [(pytree.GetAttrKey(n), t) for n, t in zip(TENSOR_FIELDS, tensors)], context


def _unflatten(tensors: Any, context: tuple[int, int]) -> Routing:
    num_experts, row_alignment = context
    return Routing(
        **dict(zip(TENSOR_FIELDS, tensors)), num_experts=num_experts, row_alignment=row_alignment
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
