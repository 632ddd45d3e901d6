"""A small text, and the command run on it with a model small enough for tests."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tokenyard.cli.main import app

SMALL = {
    "--hidden-size": "32",
    "--layers": "2",
    "--experts": "4",
    "--top-k": "2",
    "--batch-size": "2",
    "--sequence-length": "16",
    "--steps": "4",
    "--device": "cpu",
}

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread only slows models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """About 6 KB of sentences that no bigram model foresees."""
    words = ["wagon", "points", "signal", "yard", "siding", "platform", "engine", "driver"]
    generator = random.Random(0)
    lines = [" ".join(generator.choices(words, k=8)) for _ in range(120)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def train_fully(text: Path, out: Path) -> Command:
    """Run `tokenyard train`; small options stand in for those not given (`small=False`: none do)."""

    def run(*arguments: str, small: bool = True) -> Any:
        defaults = {"--out": str(out)}
        if small:
            defaults |= {**SMALL, "--text": str(text)}
        missing = [item for item in defaults.items() if item[0] not in arguments]
        line = ["train", *(part for item in missing for part in item), *arguments]
        result = CliRunner().invoke(app, line)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def train(train_fully: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same without the report at the end, whose pictures take seconds."""
    monkeypatch.setattr("tokenyard.cli.train.write_report", lambda setup, console: None)
    return train_fully


@pytest.fixture
def refused(train: Command) -> Command:
    """Run `tokenyard train`, which fails with one line on stderr; return that line."""

    def run(*arguments: str, small: bool = True) -> str:
        result = train(*arguments, small=small)
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        return str(result.stderr)

    return run
