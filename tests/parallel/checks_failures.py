"""What one rank does wrong is an error on all, in time and with its cause."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from layers import E, made, together
from torch.distributed.device_mesh import init_device_mesh
from world import World

from tokenyard import ArgumentError, RankTree, parallel
from tokenyard.parallel import AllToAll, Capacity, PeerError, fail_together, failures


def fresh(_: World) -> dist.ProcessGroup:
    """A group to spoil."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    assert isinstance(group, dist.ProcessGroup)
    return group


def send(world: World, group: dist.ProcessGroup, num_experts: int = E, width: int = 4) -> None:
    ids = torch.arange(3)[:, None] % E
    parallel.dispatch(
        torch.ones(3, width), ids, torch.ones(3, 1), group, num_global_experts=num_experts
    )


def a_rank_that_raises(world: World) -> None:
    group, started = fresh(world), time.monotonic()
    if world.rank == 1:
        with pytest.raises(ValueError, match="no more coal"), fail_together(group, timeout=15):
            send(world, group)
            raise ValueError("no more coal")
    else:
        with (
            pytest.raises(PeerError, match="rank 1 raised ValueError: no more coal"),
            fail_together(group, timeout=15),
        ):
            send(world, group)
            send(world, group)
    assert time.monotonic() - started < 5


def a_rank_with_a_bad_argument(world: World) -> None:
    """Found before it sends anything."""
    group = fresh(world)
    expected = (
        (ArgumentError, "topk_weights") if world.rank == 0 else (PeerError, "rank 0 raised Arg")
    )
    with pytest.raises(expected[0], match=expected[1]), fail_together(group, timeout=15):
        weights = torch.ones(3, 2 if world.rank == 0 else 1)
        ids = torch.zeros(3, 1, dtype=torch.int64)
        parallel.dispatch(torch.ones(3, 4), ids, weights, group, num_global_experts=E)


def a_rank_that_does_not_come(world: World) -> None:
    group, started = fresh(world), time.monotonic()
    if world.rank == 1:
        time.sleep(1.5)
        return
    with pytest.raises(PeerError, match=r"waited 0\.5 s"), fail_together(group, timeout=0.5):
        send(world, group)
    assert time.monotonic() - started < 1.5


def a_failure_of_another_library_is_traced_back(world: World) -> None:
    group = fresh(world)
    if world.rank == 1:
        with pytest.raises(KeyError), fail_together(group, timeout=15):
            raise KeyError("points")
        dist.barrier()
        return
    with pytest.raises(PeerError, match="KeyError: 'points'"), fail_together(group, timeout=15):
        raise RuntimeError("connection closed")
    dist.barrier()


def a_group_within_is_served_by_all_processes(world: World) -> None:
    """A mesh has a group for each dimension, and ranks wait in any of them."""
    group, started = fresh(world), time.monotonic()
    outer = failures._watches.pop(world.group.group_name)
    try:
        if world.rank == 1:
            with pytest.raises(ValueError), fail_together(timeout=15):
                raise ValueError("no steam")
        else:
            with (
                pytest.raises(PeerError, match="rank 1 raised ValueError: no steam"),
                fail_together(timeout=15),
            ):
                send(world, group)
    finally:
        failures._watches[world.group.group_name] = outer
    assert time.monotonic() - started < 5


def ranks_that_disagree(world: World) -> None:
    group = fresh(world)
    for name, arguments in {
        "num_global_experts": {"num_experts": E + 2 * (world.rank == 1)},
        "H": {"width": 4 + (world.rank == 1)},
    }.items():
        with pytest.raises(ArgumentError, match=f"`group`: expected {name} the same on all ranks"):
            send(world, group, **arguments)
        dist.barrier()


def what_cannot_be_is_refused(world: World) -> None:
    x, ids, weights = torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)

    def refused(
        argument: str, expected: str, x: torch.Tensor = x, group: object = None, **options: object
    ) -> None:
        with pytest.raises(ArgumentError, match=rf"parallel\.dispatch: `{argument}`.*{expected}"):
            parallel.dispatch(x, ids, weights, group, **({"num_global_experts": E} | options))

    refused("num_global_experts", "experts for each of the", num_global_experts=1)
    refused("num_global_experts", "at least 1", num_global_experts=0)
    refused("x", r"shape \[T, H\]", x=torch.ones(3))
    refused("x", "a real dtype", x=torch.ones(3, 4, dtype=torch.complex64))
    refused("transport", "AllToAll", transport="fast")
    refused(r"transport\.rows", "at least 0", transport=Capacity(-1))
    refused(r"transport\.drop", "position", transport=Capacity(1, "all"))
    refused("weights_at", "'expert', for a dedup", transport=AllToAll(deduplicate=True))
    refused("weights_at", "'later'", weights_at="never")
    refused(r"extras\[0\]", "3 rows", extras=[torch.ones(2)])
    refused("group", "a process group", group="ep")
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("dp", "ep"))
    refused("group", "one dimension", group=mesh)
    alone = [dist.new_group([rank]) for rank in range(world.size)]
    refused("group", "this process is a member", group=alone[world.rank - 1])

    sent = parallel.dispatch(x, ids, weights, mesh["ep"], num_global_experts=E)
    with pytest.raises(ArgumentError, match=r"parallel\.combine: `out`: expected shape"):
        parallel.combine(sent.x[:0] if len(sent.x) else torch.ones(1, 4), sent)
    with pytest.raises(ArgumentError, match=r"parallel\.combine: `dispatched`"):
        parallel.combine(sent.x, sent.x)
    dist.barrier()
    with pytest.raises(ArgumentError, match="a RankTree of ep_size"):
        together(made(world), world, AllToAll(deduplicate=True), "expert", RankTree(1))
