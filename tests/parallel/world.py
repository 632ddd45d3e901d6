"""Worlds of a few processes: each runs the checks of a module, in order, and says which failed.

A process starts in a fraction of a second, since all are forked from one that has imported torch.
"""

import importlib
import json
import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tokenyard.parallel import fail_together

PATIENCE = 30.0
"""Seconds that any wait for another process may take."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    folder: Path

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def _main(rank: int, size: int, folder: str, module: str, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    world, outcome = World(rank, size, Path(folder)), {}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    checks, failed = importlib.import_module(module), False
    for name in names:
        torch.manual_seed(7)
        started = time.perf_counter()
        try:
            with fail_together(world.group, timeout=PATIENCE):
                getattr(checks, name)(world)
        except BaseException:
            outcome[name] = traceback.format_exc()
            failed = True
            break
        outcome[name] = f"passed in {time.perf_counter() - started:.1f} s"
    (world.folder / f"rank{rank}.json").write_text(json.dumps(outcome))
    if failed:
        os._exit(1)  # without waiting for the others
    dist.destroy_process_group()


def run_world(size: int, folder: Path, module: str, names: tuple[str, ...]) -> None:
    """Fail unless every process passes every check."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tokenyard.parallel", "torch.distributed.tensor", __name__])
    arguments = (size, str(folder), module, names)
    processes = [context.Process(target=_main, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    until = time.monotonic() + 4 * PATIENCE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    failures = []
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
            failures.append(f"rank {rank} hangs")
            continue
        report = folder / f"rank{rank}.json"
        outcome = json.loads(report.read_text()) if report.exists() else {}
        if rank == 0:
            print(*(f"{name}: {said}" for name, said in outcome.items()), sep="\n")
        failures += [
            f"rank {rank}, {name}: {said}"
            for name, said in outcome.items()
            if not said.startswith("passed")
        ]
        if not failures and len(outcome) < len(names):
            failures.append(f"rank {rank} stopped after {len(outcome)} checks")
    assert not failures, "\n".join(failures)
