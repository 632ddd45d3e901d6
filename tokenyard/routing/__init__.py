"""Routing: the record, and how expert choices become it."""

from typing import Any, Literal

import torch
from torch import Tensor

from tokenyard import backend, check
from tokenyard.registration import Operator
from tokenyard.routing.definition import Maps, route_definition, route_few, route_mask_definition
from tokenyard.routing.record import TENSOR_FIELDS, Routing

__all__ = ["Routing", "route", "route_mask"]

FEW_SLOTS = 128
"""Slots up to which a CPU routes them one by one."""


def _route_forward(
    topk_indices: Tensor,
    num_experts: int,
    row_alignment: int,
    num_rows: int,
    capacity: int | None,
    drop_weights: Tensor | None,
) -> Maps:
    kernels = backend.kernels("route", topk_indices)
    if kernels is not None and drop_weights is None:
        return kernels.route(topk_indices, num_experts, row_alignment, num_rows, capacity)
    if topk_indices.is_cpu and topk_indices.numel() <= FEW_SLOTS and drop_weights is None:
        return route_few(topk_indices, num_experts, row_alignment, num_rows, capacity)
    return route_definition(
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
        **dict(zip(TENSOR_FIELDS, results)), num_experts=num_experts, row_alignment=row_alignment
    )


def _route_mask_forward(routing_map: Tensor, top_k: int, row_alignment: int, num_rows: int) -> Maps:
    kernels = backend.kernels("conventions.from_routing_map", routing_map)
    route_mask = route_mask_definition if kernels is None else kernels.route_mask
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
        **dict(zip(TENSOR_FIELDS, results)), num_experts=num_experts, row_alignment=row_alignment
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
