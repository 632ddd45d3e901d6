"""The command line itself: help, versions, and a real process that is told to stop."""

import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tokenyard.cli.checkpoint import checkpoint_folders
from tokenyard.cli.errors import CommandError, one_line_errors
from tokenyard.cli.main import app


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "train" in result.output and "env" in result.output


def test_env_shows_versions_device_and_backend() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["env"])
    assert result.exit_code == 0, result.output
    for word in (platform.python_version(), torch.__version__, "triton", "device", "permute"):
        assert word in result.output


def test_out_of_memory_and_os_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for error, word in (
        (torch.OutOfMemoryError("CUDA\nout of memory"), "--batch-size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "--batch-size"),
        (MemoryError(), "--batch-size"),
        (OSError(5, "Input/output error", "disk"), "disk: Input/output error"),
        (CommandError("first\nsecond"), "first second"),
    ):
        with pytest.raises(Exception) as caught, one_line_errors():
            raise error
        assert getattr(caught.value, "exit_code", None) == 1
        printed = capsys.readouterr().err
        assert word in printed
        assert printed.count("\n") == 1


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"), one_line_errors():
        raise RuntimeError("a bug")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows processes cannot be sent SIGTERM")
def test_a_terminated_process_saves_and_exits_with_130(text: Path, out: Path) -> None:
    options = f"--steps 100000 --hidden-size 32 --layers 1 --text {text} --out {out} --device cpu"
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenyard.cli", "train", *options.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Stopped by SIGTERM" in output
    assert errors == ""
    assert len(checkpoint_folders(out / "checkpoints")) >= 1


@pytest.mark.parametrize("missing", ["typer", "safetensors", "matplotlib"])
def test_a_missing_library_names_the_extra(missing: str) -> None:
    """Before anything else: training must not end in a picture that cannot be drawn."""
    script = (
        "import importlib.util, sys; find = importlib.util.find_spec; "
        f"importlib.util.find_spec = lambda name: None if name == {missing!r} else find(name); "
        "from tokenyard.cli import main; sys.argv = ['tokenyard', 'env']; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 1 and not result.stdout
    assert result.stderr == f"Error: needs {missing}: pip install 'tokenyard[cli]'\n"
