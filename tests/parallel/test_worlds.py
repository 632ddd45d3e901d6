"""Expert parallelism in worlds of two and four processes."""

import importlib
import inspect
from pathlib import Path

import pytest
from world import run_world


def checks_of(module: str) -> tuple[str, ...]:
    """The functions that a world runs: those of one argument, a world, in the order of the file."""
    members = inspect.getmembers(importlib.import_module(module), inspect.isfunction)
    found = [
        (function.__code__.co_firstlineno, name)
        for name, function in members
        if function.__module__ == module
        and list(inspect.signature(function).parameters) == ["world"]
    ]
    return tuple(name for _, name in sorted(found))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("module", ["checks_exchange", "checks_failures", "checks_moe"])
def test_world(module: str, size: int, tmp_path: Path) -> None:
    run_world(size, tmp_path, module, checks_of(module))
