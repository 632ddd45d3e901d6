"""The report at the end: table, sample, pictures, for text and for any bytes."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenyard.cli.report import varied_passage

Command = Callable[..., Any]
PICTURES = ("loss.png", "expert_load.png", "routing.png")
PNG = b"\x89PNG\r\n\x1a\n"


def test_the_model_beats_the_bigram_and_everything_is_written(
    train_fully: Command, out: Path
) -> None:
    result = train_fully("--steps", "200", "--batch-size", "8", "--learning-rate", "0.01")
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_text())
    assert report["validation_bits_per_byte"] < 0.75 * report["bigram_bits_per_byte"]
    assert f"{report['validation_bits_per_byte']:.3f}" in result.output
    assert f"{report['bigram_bits_per_byte']:.3f}" in result.output
    assert 1.0 <= report["expert_imbalance"] < 4.0
    assert report["training_bytes"] == 200 * 8 * 16
    for name in PICTURES:
        assert (out / name).read_bytes().startswith(PNG)
        assert name in result.output
    sample = (out / "sample.txt").read_text()
    assert "wagon" in sample
    assert len(sample) > 300


@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, on a glyph that is missing
@pytest.mark.parametrize("kind", ["random", "zeros", "dollars", "every byte"])
def test_any_bytes_train_and_are_shown_safely(
    kind: str, train_fully: Command, out: Path, tmp_path: Path
) -> None:
    junk = {
        "random": random.Random(0).randbytes(3000),
        "zeros": bytes(3000),
        "dollars": b"$\\frac{$ [red]x[/red] ^_{" * 100,
        "every byte": bytes(range(256)) * 12,
    }[kind]
    path = tmp_path / "junk.bin"
    path.write_bytes(junk)
    result = train_fully("--text", str(path), "--steps", "2")
    assert result.exit_code == 0, result.output
    hidden = {chr(code) for code in (*range(32), *range(127, 160))} - {"\n"}
    assert not hidden & set(result.output)
    assert not hidden & set((out / "sample.txt").read_text())
    for name in PICTURES:
        assert (out / name).read_bytes().startswith(PNG)


def test_a_full_disk_under_the_pictures_names_the_picture(
    train_fully: Command, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokenyard.cli.report.replace_file", no_space)
    result = train_fully("--steps", "1")
    assert result.exit_code == 1
    assert "report.json: No space left on device" in result.stderr
    assert "the trained model is in the last checkpoint" in result.stderr
    assert (out / "checkpoints" / "step-00000001").is_dir()


def test_the_passage_is_the_most_varied_and_begins_a_line() -> None:
    dull = b"aaaa\n" * 500
    passage = varied_passage(dull + b"The quick brown fox.\n" + dull)
    assert b"The quick brown fox.\n" in passage
    assert passage[:5] in (b"aaaa\n", b"The q")
    assert varied_passage(b"x" * 10) == b"x" * 10
