"""The ranks of a run: where each is, what they measure together, and how they stop together."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

L2 = 256 << 20
"""Bytes that empty the cache before a call."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    size: int
    device: torch.device
    repeats: int

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """That speed is measured in."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @cached_property
    def _flushed(self) -> Tensor:
        return torch.empty(L2 if self.on_gpu else 0, dtype=torch.uint8, device=self.device)

    @cached_property
    def _one(self) -> Tensor:
        return torch.ones(1, device=self.device)

    def seed(self, number: int, rank: int = 0) -> None:
        torch.manual_seed(1000 * number + rank)

    def randn(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=dtype or self.dtype)

    def numbers(self, values: list[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        """Reduced over the ranks, each by itself."""
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, how)
        return reduced.tolist()

    def mean(self, value: float) -> float:
        return self.numbers([value], dist.ReduceOp.SUM)[0] / self.size

    def most(self, value: float) -> float:
        return self.numbers([value], dist.ReduceOp.MAX)[0]

    def agree(self, problems: list[str]) -> None:
        """Stop on every rank if there is a problem on any."""
        found: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(found, problems)
        lines = [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines]
        if lines:
            raise SystemExit("\n".join(["checks failed, nothing is timed:", *lines]))

    def milliseconds(
        self, functions: Mapping[str, Callable[[], object]], *, own: bool = False
    ) -> dict[str, float]:
        """Median time of each call, in turns; of the slowest rank each time, or with `own` of this one.

        All ranks begin a call together, with the cache empty on a GPU.
        """
        for function in functions.values():
            for _ in range(2):
                function()
        names, times = list(functions), {name: [0.0] * self.repeats for name in functions}
        for turn in range(self.repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name][turn] = self._once(functions[name])
        if own:
            return {name: median(values) for name, values in times.items()}
        slowest = dist.ReduceOp.MAX
        return {name: median(self.numbers(values, slowest)) for name, values in times.items()}

    def _once(self, function: Callable[[], object]) -> float:
        if not self.on_gpu:
            dist.barrier()
            started = time.perf_counter()
            function()
            return (time.perf_counter() - started) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        # on every rank's stream, so that all of them go on together
        dist.all_reduce(self._one, dist.ReduceOp.MAX)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
