"""The ranks of a run over torch.distributed: data parallel, with the experts spread over `--ep` of them."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tokenyard.cli.errors import CommandError
from tokenyard.cli.model import ByteModel
from tokenyard.cli.options import TrainOptions, choose_device
from tokenyard.cli.ranks import Ranks
from tokenyard.parallel import ExpertParallel, PeerError, fail_together
from tokenyard.parallel.failures import wait

PATIENCE = 600.0
"""Seconds that ranks wait for one another, for instance for the one that writes a checkpoint."""


class Processes(Ranks):
    """The ranks of a mesh "dp" x "ep", each with its part of the batch."""

    def __init__(self, device: torch.device, mesh: DeviceMesh) -> None:
        super().__init__(device)
        self.mesh, self.rank, self.size = mesh, dist.get_rank(), dist.get_world_size()
        self.first = self.rank == 0
        assert dist.group.WORLD is not None
        self.everyone: dist.ProcessGroup = dist.group.WORLD

    def spread(self, model: ByteModel) -> None:
        if self.mesh["ep"].size() > 1:
            parallelize_module(model, self.mesh["ep"], {"blocks.*.moe": ExpertParallel()})

    def part(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.size)[self.rank]

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values.detach()) / self.size

    def total(self, counts: Tensor) -> Tensor:
        return _sum(counts.clone(), self.everyone)

    def average_gradients(self, model: ByteModel) -> None:
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        self._average(whole, self.everyone)
        # of the tokens of its own row of the mesh, a shard has the sum already
        self._average([shard.to_local() for shard in sharded], self.mesh["dp"].get_group())

    def _average(self, gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            averages = (_sum(flat, group) / self.size).split([x.numel() for x in gradients])
            for gradient, average in zip(gradients, averages):
                gradient.copy_(average.view_as(gradient))

    def agree(self, request: signal.Signals | None) -> signal.Signals | None:
        number = torch.tensor(request or 0, device=self.device)
        number = _reduce(number, dist.ReduceOp.MAX, self.everyone)
        return signal.Signals(int(number)) if number else None

    def __str__(self) -> str:
        ep = self.mesh["ep"].size()
        experts = f", the experts over {ep}" if ep > 1 else ""
        return f"{self.size} x {self.device.type}{experts}"


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _reduce(values, dist.ReduceOp.SUM, group)


def _reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    """In place."""
    work = dist.all_reduce(values, op, group=group, async_op=True)
    assert work is not None
    wait(group, work, values.device)
    return values


@contextmanager
def joined(options: TrainOptions, size: int) -> Iterator[Processes]:
    """This process among the `size` of torchrun; an error of another ends it with that one's words."""
    device = own_device(options.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE))
    try:
        with fail_together(timeout=PATIENCE):
            sizes = size // options.ep, options.ep
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "ep"))
            ranks = Processes(device, mesh)
            ranks.agree(None)  # so that none writes before all have looked whether a run is there
            yield ranks
    except PeerError as error:
        raise CommandError(str(error)) from error
    dist.destroy_process_group()


def own_device(name: str) -> torch.device:
    """The device called `name`; of the GPUs the one for this process."""
    device = choose_device(name)
    if device.type != "cuda":
        return device
    local, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if ":" in name:
        raise CommandError(f"--device {name} is one GPU for several processes; give cuda")
    if local >= found:
        raise CommandError(
            f"every process needs a GPU of its own, and there are {found}: lower --nproc-per-node, "
            f"or give --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
