"""`tokenyard train` as a whole: what it writes, how it stops, how it continues."""

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenyard.cli import metrics
from tokenyard.cli import train as training
from tokenyard.cli.checkpoint import Checkpoint, checkpoint_folders, load_newest, step_of
from tokenyard.cli.metrics import MetricsLog, StepMetrics, read_metrics
from tokenyard.cli.train import learning_rate

Command = Callable[..., Any]


def saved_steps(out: Path) -> list[int]:
    return [step_of(folder) for folder in checkpoint_folders(out / "checkpoints")]


def timeless(records: list[StepMetrics]) -> list[StepMetrics]:
    return [replace(record, tokens_per_second=0.0) for record in records]


def signal_after(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Raise a signal in this process while `step` is being recorded."""
    append = MetricsLog.append

    def append_then_signal(log: MetricsLog, record: StepMetrics) -> None:
        append(log, record)
        if record.step == step:
            signal.raise_signal(number)

    monkeypatch.setattr(MetricsLog, "append", append_then_signal)


def assert_same_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def same_run(first: Path, second: Path) -> None:
    ours, theirs = load_newest(first / "checkpoints"), load_newest(second / "checkpoints")
    assert ours.step == theirs.step
    assert_same_tensors(ours.model, theirs.model)
    assert_same_tensors(ours.optimizer, theirs.optimizer)
    records = read_metrics(first / "metrics.jsonl", ours.step)
    assert [record.step for record in records] == list(range(1, ours.step + 1))
    assert timeless(records) == timeless(read_metrics(second / "metrics.jsonl", ours.step))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("bias", ["0", "0.01"])
def test_ten_steps_equal_five_and_five_resumed_bit_for_bit(
    number: signal.Signals,
    bias: str,
    train: Command,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    straight = tmp_path / "straight"
    options = ("--steps", "10", "--selection-bias", bias)
    assert train(*options, "--out", str(straight)).exit_code == 0

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        signal_after(patch, 5, number)
        stopped = train(*options)
    assert stopped.exit_code == 130
    assert f"Stopped by {number.name} after step 5 of 10" in stopped.output
    assert saved_steps(out) == [5]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers

    resumed = train("--resume", small=False)
    assert resumed.exit_code == 0
    assert "Continuing after step 5" in resumed.output
    same_run(out, straight)


def test_another_seed_gives_other_weights(train: Command, out: Path, tmp_path: Path) -> None:
    train("--steps", "1")
    train("--steps", "1", "--seed", "1", "--out", str(tmp_path / "other"))
    first, second = (load_newest(path / "checkpoints") for path in (out, tmp_path / "other"))
    assert not torch.equal(first.model["embedding.weight"], second.model["embedding.weight"])


def test_training_leaves_the_random_state_alone(train: Command) -> None:
    before = torch.get_rng_state()
    train("--steps", "1")
    assert torch.equal(torch.get_rng_state(), before)


def test_lines_past_the_checkpoint_and_half_a_line_are_dropped(
    train: Command, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = tmp_path / "straight"
    train("--steps", "8", "--out", str(straight))
    with monkeypatch.context() as patch:
        signal_after(patch, 4, signal.SIGINT)
        train("--steps", "8")
    log = out / "metrics.jsonl"
    line = log.read_bytes().splitlines(keepends=True)[-1]
    later = json.dumps({**json.loads(line), "step": 5, "bits_per_byte": 99.0}).encode()
    with log.open("ab") as file:
        file.write(later + b"\n" + b'{"step":6,"bits_per')
    assert train("--resume", small=False).exit_code == 0
    same_run(out, straight)


def test_a_finished_run_may_be_extended(train: Command, out: Path) -> None:
    train("--steps", "2")
    done = train("--resume", small=False)
    assert done.exit_code == 0
    assert "All 2 steps are done" in done.output
    assert train("--resume", "--steps", "3", small=False).exit_code == 0
    assert saved_steps(out) == [2, 3]
    assert len(read_metrics(out / "metrics.jsonl", 3)) == 3


def test_resume_with_other_options_names_the_option(
    train: Command, refused: Command, text: Path, out: Path
) -> None:
    train()
    before = load_newest(out / "checkpoints")
    assert "--experts was 4 in this run and is 8 now" in refused("--resume", "--experts", "8")
    assert "--learning-rate was" in refused("--resume", "--learning-rate", "0.5")
    assert "--steps 3 lies behind" in refused("--resume", "--steps", "3")
    text.write_bytes(text.read_bytes() + b"!")
    assert "--text differs" in refused("--resume", small=False)
    after = load_newest(out / "checkpoints")
    assert_same_tensors(before.model, after.model)


def test_resume_needs_a_checkpoint(refused: Command) -> None:
    assert "no checkpoint in" in refused("--resume")


def test_a_run_is_not_overwritten_unasked(train: Command, refused: Command, out: Path) -> None:
    train()
    (out / "mine.txt").write_text("kept")
    before = (out / "metrics.jsonl").read_bytes()
    message = refused("--seed", "1")
    assert "already holds a run" in message
    assert "--resume" in message and "--overwrite" in message
    assert (out / "metrics.jsonl").read_bytes() == before

    assert "contradict" in refused("--resume", "--overwrite")
    assert "no such file" in refused("--overwrite", "--text", str(out / "absent"))
    assert (out / "metrics.jsonl").read_bytes() == before

    assert train("--overwrite", "--steps", "2").exit_code == 0
    assert saved_steps(out) == [2]
    assert len(read_metrics(out / "metrics.jsonl", 99)) == 2
    assert (out / "mine.txt").read_text() == "kept"


def test_out_may_not_be_a_file(refused: Command, text: Path) -> None:
    assert str(text) in refused("--out", str(text))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--experts", "2", "--top-k", "3"), "--top-k 3 needs at least as many experts"),
        (("--hidden-size", "48"), "--hidden-size must be a multiple of 32"),
        (("--learning-rate", "inf"), "--learning-rate must be finite"),
        (("--balance-loss", "inf"), "--balance-loss must be finite"),
        (("--device", "cuda:99"), "--device cuda:99 cannot be used"),
        (("--device", "wagon"), "--device wagon cannot be used"),
        (("--sequence-length", "100000"), "the text is too short"),
    ],
)
def test_options_that_cannot_work(
    options: tuple[str, ...], reason: str, refused: Command, out: Path
) -> None:
    assert reason in refused(*options)
    assert not out.exists()


@pytest.mark.parametrize("option", [("--top-k", "0"), ("--seed", "-1"), ("--seed", str(2**64))])
def test_an_option_out_of_range_is_a_usage_error(option: tuple[str, str], train: Command) -> None:
    assert train(*option).exit_code == 2


def test_the_largest_seed_works(train: Command) -> None:
    assert train("--steps", "1", "--seed", str(2**63 - 1)).exit_code == 0


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    refused: Command, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = training.bits_per_byte
    calls = 0

    def nan_in_step_4(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return measure(logits, targets) * (float("nan") if calls == 4 else 1.0)

    monkeypatch.setattr(training, "bits_per_byte", nan_in_step_4)
    message = refused("--checkpoint-every", "2")
    assert "the loss became nan in step 4" in message
    assert "step-00000002 is kept" in message
    assert saved_steps(out) == [2]
    kept = load_newest(out / "checkpoints")
    assert all(value.isfinite().all() for value in kept.model.values())
    assert [record.step for record in read_metrics(out / "metrics.jsonl", 99)] == [1, 2, 3]


def no_space(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` that meets a full disk once it was called `calls` times."""
    done = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        return no_space() if done > calls else function(*arguments, **options)

    return wrapped


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_resumes(
    failing: str,
    train: Command,
    refused: Command,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    straight = tmp_path / "straight"
    train("--steps", "6", "--out", str(straight))
    with monkeypatch.context() as patch:
        if failing == "write":
            write = failing_after(4, training.save_checkpoint.__globals__["write_through"])
            patch.setattr("tokenyard.cli.checkpoint.write_through", write)
        else:
            saved = training.save_checkpoint

            def save_second_on_full_disk(parent: Path, checkpoint: Checkpoint) -> Path:
                if checkpoint.step == 4:
                    patch.setattr(os, failing, no_space)
                return saved(parent, checkpoint)

            patch.setattr(training, "save_checkpoint", save_second_on_full_disk)
        message = refused("--steps", "6", "--checkpoint-every", "2")
    assert "No space left on device" in message
    assert "step-00000002 is intact" in message
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert train("--resume", small=False).exit_code == 0
    same_run(out, straight)


def test_a_full_disk_under_the_metrics(
    train: Command, refused: Command, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "_line", failing_after(3, metrics._line))
        message = refused("--checkpoint-every", "2")
    assert "metrics.jsonl: No space left on device" in message
    assert saved_steps(out) == [2]
    assert train("--resume", small=False).exit_code == 0


def test_a_crash_while_writing_leaves_no_half_checkpoint(
    train: Command, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: object) -> None:
        raise SystemError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(SystemError):
            train("--steps", "1")
    assert saved_steps(out) == []


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(1, 101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert learning_rate(1, 1, 1.0) == 1.0


def test_a_run_without_a_checkpoint_is_not_told_to_resume(refused: Command) -> None:
    assert "became" in refused("--learning-rate", "1e30")
    message = refused()
    assert "--overwrite" in message and "--resume" not in message


def test_divergence_in_the_last_step_is_found(refused: Command, out: Path) -> None:
    message = refused("--steps", "1", "--learning-rate", "1e38")
    assert "became" in message
    assert not (out / "checkpoints").exists() and not (out / "report.json").exists()


def test_a_stored_option_of_another_type_is_named(
    train: Command, refused: Command, out: Path
) -> None:
    train()
    (run,) = out.glob("checkpoints/*/run.json")
    state = json.loads(run.read_text())
    state["run"]["options"]["hidden_size"] = "x"
    run.write_text(json.dumps(state))
    assert "--hidden-size is 'x', not of type int" in refused("--resume")
