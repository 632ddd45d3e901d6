"""The metrics file survives crashes and holds what was measured, exactly."""

from pathlib import Path

import pytest

from tokenyard.cli.errors import CommandError
from tokenyard.cli.metrics import MetricsLog, StepMetrics, read_metrics


def record(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        bits_per_byte=0.1 + step / 3,
        balance_loss=1.0,
        z_loss=0.0,
        gradient_norm=1e-30,
        learning_rate=1e-3,
        tokens_per_second=10.0,
        tokens_per_expert=[[1, 3], [2, 2]],
    )


def test_lines_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, []) as log:
        for step in (1, 2, 3):
            log.append(record(step))
    assert read_metrics(path, 99) == [record(1), record(2), record(3)]
    assert read_metrics(path, 2) == [record(1), record(2)]
    with MetricsLog(path, [record(1)]) as log:
        log.append(record(2))
    assert read_metrics(path, 99) == [record(1), record(2)]


def test_every_line_is_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, []) as log:
        log.append(record(1))
        assert read_metrics(path, 99) == [record(1)]


def test_half_a_last_line_is_dropped_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, [record(1), record(2)]).__exit__(None, None, None)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert read_metrics(path, 99) == [record(1)]


def test_a_line_that_is_no_metrics_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(CommandError, match=r"metrics.jsonl, line 1"):
        read_metrics(path, 99)


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "absent", 99) == []


def test_imbalance_is_the_busiest_over_the_mean_averaged_over_layers() -> None:
    assert record(1).imbalance == pytest.approx((3 / 2 + 1) / 2)
