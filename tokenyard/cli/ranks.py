"""The processes of a run: which one this is, and what they find out together."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tokenyard.cli.errors import CommandError
from tokenyard.cli.model import ByteModel
from tokenyard.cli.options import TrainOptions, choose_device


class Ranks:
    """One process, which has nobody to ask.

    first   whether this is the rank that prints and writes
    """

    size, first = 1, True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def spread(self, model: ByteModel) -> None:
        """Keep this rank's share of the experts."""

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows."""
        return batch

    def mean(self, values: Tensor) -> Tensor:
        """Over the ranks, detached."""
        return values.detach()

    def total(self, counts: Tensor) -> Tensor:
        """Over the ranks."""
        return counts

    def average_gradients(self, model: ByteModel) -> None:
        """Out of the gradients of each rank's loss make those of the mean of all."""

    def agree(self, request: signal.Signals | None) -> signal.Signals | None:
        """The same on all ranks: a signal that one of them got."""
        return request

    def __str__(self) -> str:
        return str(self.device)


@contextmanager
def join(options: TrainOptions) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone; refuses options that they cannot run."""
    size = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    check_size(options, size)
    if size == 1:
        yield Ranks(choose_device(options.device))
        return
    from tokenyard.cli.processes import joined  # DTensors take half a second to import

    with joined(options, size) as ranks:
        yield ranks


def check_size(options: TrainOptions, size: int) -> None:
    """Can `size` processes share the batch and the experts?"""
    ep, experts = options.ep, options.experts
    if size == 1 and ep > 1:
        raise CommandError(
            f"--ep {ep} needs {ep} processes, or a multiple: torchrun --nproc-per-node {ep} "
            f"-m tokenyard.cli train --ep {ep}, and the other options"
        )
    if size % ep:
        raise CommandError(f"--ep {ep} needs a multiple of {ep} processes, and there are {size}")
    if len(torch.empty(experts).chunk(ep)) < ep:
        raise CommandError(f"--experts {experts} are too few: some of --ep {ep} would get none")
    if options.batch_size % size:
        raise CommandError(
            f"--batch-size must be a multiple of the {size} processes, got {options.batch_size}"
        )
