"""What `tokenyard env` shows."""

import importlib.metadata
import platform

import torch
from rich.console import Console
from rich.table import Table

import tokenyard

OPERATORS_SHOWN = ("topk", "permute", "grouped_gemm")


def version_of(distribution: str) -> str:
    """The installed version of a package, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_name() -> str:
    """The device that `--device auto` takes."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} (cuda, {torch.cuda.device_count()} in all)"
    return f"{platform.machine()} (cpu, {torch.get_num_threads()} threads)"


def print_environment(console: Console) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table(show_header=False)
    table.add_row("tokenyard", version_of("tokenyard"))
    table.add_row("python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    table.add_row("torch", str(torch.__version__))
    table.add_row("triton", version_of("triton"))
    table.add_row("device", device_name())
    for operator in OPERATORS_SHOWN:
        reason = tokenyard.explain(operator, torch.empty(0, device=device))
        table.add_row("backend", reason)
    console.print(table)
