"""Tensors of which each process may hold a shard (DTensors), beside those that it holds whole."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def whole(value: Any) -> Tensor:
    """All of a tensor; of a sharded one the ranks bring it together."""
    return value.full_tensor() if sharded(value) else value


def placed_like(value: Tensor, like: Any) -> Tensor:
    """A whole tensor, which every rank has, sharded as `like` is."""
    if not sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor  # takes half a second to import

    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def alike(parameters: Iterable[Any]) -> list[list[Any]]:
    """Those held whole, and those sharded: no operation on many tensors takes both."""
    groups: dict[bool, list[Any]] = {}
    for parameter in parameters:
        groups.setdefault(sharded(parameter), []).append(parameter)
    return list(groups.values())
