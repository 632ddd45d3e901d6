"""`tokenyard train` on several processes: the run of one, however it is split, stopped or continued."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Result, in_step, launch

from tokenyard.cli.checkpoint import load_newest
from tokenyard.cli.errors import CommandError
from tokenyard.cli.metrics import read_metrics
from tokenyard.cli.options import TrainOptions
from tokenyard.cli.ranks import check_size

OPTIONS = {
    "--hidden-size": "32",
    "--layers": "2",
    "--experts": "5",  # uneven over 2
    "--batch-size": "4",
    "--sequence-length": "16",
    "--steps": "12",
    "--selection-bias": "0.01",
    "--device": "cpu",
}
Command = Callable[..., Any]
Launch = Callable[..., list[Result]]


@pytest.fixture
def alone(train: Command, tmp_path: Path) -> Path:
    """The folder of the run of one process."""
    out = tmp_path / "alone"
    options = [part for option in OPTIONS.items() for part in option]
    assert train(*options, "--out", str(out)).exit_code == 0
    return out


@pytest.fixture
def together(text: Path, out: Path, tmp_path: Path) -> Launch:
    """The same options on several processes, or as a run in `out` has them."""

    def run(size: int, *line: str, **options: Any) -> list[Result]:
        given = {} if "--resume" in line else OPTIONS
        named = {**given, "--device": "cpu", "--text": str(text), "--out": str(out)}
        parts = [part for option in named.items() if option[0] not in line for part in option]
        return launch(size, tmp_path, "train", *parts, *line, **options)

    return run


def same_but_for_rounding(first: Path, second: Path) -> None:
    """Losses and gradients to 1e-5, loads exactly, and what the checkpoints hold."""
    ours, theirs = (read_metrics(path / "metrics.jsonl", 99) for path in (first, second))
    assert [record.step for record in ours] == list(range(1, 13))
    for got, want in zip(ours, theirs, strict=True):
        assert got.tokens_per_expert == want.tokens_per_expert
        for name in ("bits_per_byte", "balance_loss", "z_loss", "gradient_norm"):
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-5)
        assert got.validation_bits_per_byte == pytest.approx(
            want.validation_bits_per_byte, rel=1e-5
        )
    got_state, want_state = (load_newest(path / "checkpoints") for path in (first, second))
    assert got_state.run == want_state.run
    for name in ("model", "optimizer"):
        tensors, wanted = getattr(got_state, name), getattr(want_state, name)
        assert tensors.keys() == wanted.keys()
        for key in tensors:
            torch.testing.assert_close(tensors[key], wanted[key], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("size", "ep"), [(2, 2), (4, 2), (2, 1)])
def test_several_processes_learn_what_one_does(
    size: int, ep: int, together: Launch, alone: Path, out: Path
) -> None:
    results = together(size, "--ep", str(ep))
    assert [result.exit_code for result in results] == [0] * size, results
    assert f"on {size} x cpu" in results[0].output
    assert not any(result.output for result in results[1:])
    same_but_for_rounding(out, alone)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_stops_all_and_one_process_continues(
    number: signal.Signals, together: Launch, train: Command, alone: Path, out: Path
) -> None:
    stop = partial(in_step, 1, 5, partial(signal.raise_signal, number))
    results = together(2, "--ep", "2", prepare=stop)
    assert [result.exit_code for result in results] == [130, 130], results
    assert f"Stopped by {number.name} after step 5 of 12" in results[0].output
    assert load_newest(out / "checkpoints").step == 5
    assert train("--resume", small=False).exit_code == 0
    same_but_for_rounding(out, alone)


def test_several_processes_continue_the_run_of_one(
    together: Launch, train: Command, alone: Path, out: Path
) -> None:
    options = [part for option in OPTIONS.items() for part in option]
    stop = partial(in_step, 0, 5, partial(signal.raise_signal, signal.SIGINT))
    assert together(1, prepare=stop)[0].exit_code == 130
    results = together(4, "--resume", "--ep", "2")
    assert [result.exit_code for result in results] == [0] * 4, results
    assert "Continuing after step 5" in results[0].output
    same_but_for_rounding(out, alone)
    assert train(*options, "--resume", "--steps", "13").exit_code == 0
    assert load_newest(out / "checkpoints").step == 13


def run_out_of_coal() -> None:
    raise ValueError("no more coal")


def test_a_rank_that_fails_ends_the_others_with_its_words(together: Launch) -> None:
    started = time.monotonic()
    results = together(4, "--ep", "2", prepare=partial(in_step, 3, 4, run_out_of_coal))
    assert time.monotonic() - started < 20
    assert [result.exit_code for result in results] == [1] * 4
    assert "ValueError: no more coal" in results[3].stderr
    for result in results[:3]:
        assert result.stderr == "Error: rank 3 raised ValueError: no more coal\n"


def test_a_run_that_is_there_is_kept(together: Launch, out: Path) -> None:
    assert together(2, "--ep", "2", "--steps", "1")[0].exit_code == 0
    for result in together(2, "--ep", "2"):
        assert result.exit_code == 1 and "already holds a run" in result.stderr
    assert together(2, "--ep", "2", "--steps", "2", "--overwrite")[1].exit_code == 0
    assert load_newest(out / "checkpoints").step == 2


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [
        (1, {"ep": 2}, "torchrun --nproc-per-node 2 -m tokenyard.cli train --ep 2"),
        (3, {"ep": 2}, "--ep 2 needs a multiple of 2 processes, and there are 3"),
        (4, {"ep": 4, "experts": 5}, "--experts 5 are too few: some of --ep 4 would get none"),
        (3, {"ep": 3}, "--batch-size must be a multiple of the 3 processes, got 8"),
    ],
)
def test_what_processes_cannot_share(size: int, options: dict[str, int], reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        check_size(TrainOptions(**options), size)  # type: ignore[arg-type]


def test_without_torchrun_ep_names_the_line_to_type(refused: Command, out: Path) -> None:
    assert "torchrun --nproc-per-node 2" in refused("--ep", "2")
    assert not out.exists()


def test_torchrun_writes_one_report(text: Path, out: Path) -> None:
    options = [part for option in OPTIONS.items() for part in option]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = ["-m", "tokenyard.cli", "train", *options, "--text", str(text), "--out", str(out)]
    done = subprocess.run(
        [*torchrun, *line, "--ep", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Validation text") == done.stdout.count("The model continues") == 1
    assert "ep" not in json.loads((out / "report.json").read_text())["options"]
    assert {path.name for path in out.iterdir()} == {
        *("checkpoints", "expert_load.png", "loss.png", "metrics.jsonl"),
        *("report.json", "routing.png", "sample.txt"),
    }
