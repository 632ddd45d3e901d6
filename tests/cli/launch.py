"""`tokenyard train` on several processes, started as torchrun does but forked, which is faster."""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tokenyard.cli import processes, train
from tokenyard.cli.main import app

PATIENCE = 60.0
"""Seconds that a run may take."""


@dataclass(frozen=True)
class Result:
    """Of one rank."""

    exit_code: int
    output: str
    stderr: str


def _nothing(rank: int) -> None:
    pass


def in_step(wanted: int, step: int, action: Callable[[], None], rank: int) -> None:
    """Have rank `wanted` do `action` before it takes that step; `rank` is this one."""
    take_step = train.take_step

    def act_and_take_step(training: train.Training) -> Any:
        if rank == wanted and training.step + 1 == step:
            action()
        return take_step(training)

    train.take_step = act_and_take_step


def _main(
    rank: int, size: int, port: int, folder: str, line: list[str], prepare: Callable[[int], None]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "launch",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.set_num_threads(1)
    train.write_report = lambda setup, console: None  # its pictures take seconds
    processes.PATIENCE = PATIENCE / 2
    prepare(rank)
    result = CliRunner().invoke(app, line)
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        trace = "".join(traceback.format_exception(error))
        outcome = Result(1, result.output, result.stderr + trace)
    else:
        outcome = Result(result.exit_code, result.output, result.stderr)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(vars(outcome)))


def launch(
    size: int, folder: Path, *line: str, prepare: Callable[[int], None] = _nothing
) -> list[Result]:
    """Run the line on `size` processes, each after `prepare(rank)`; what became of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tokenyard.cli.processes", "tokenyard.cli.main", __name__])
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = (size, store.port, str(folder), list(line), prepare)
    started = [context.Process(target=_main, args=(rank, *arguments)) for rank in range(size)]
    for process in started:
        process.start()
    until = time.monotonic() + PATIENCE
    for process in started:
        process.join(max(0.0, until - time.monotonic()))
    hanging = [rank for rank, process in enumerate(started) if process.is_alive()]
    for process in started:
        process.kill()
    assert not hanging, f"ranks {hanging} hang"
    reports = [folder / f"rank{rank}.json" for rank in range(size)]
    return [Result(**json.loads(report.read_text())) for report in reports]
