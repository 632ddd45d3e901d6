"""Seeing which kernels ran."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import tokenyard
from tokenyard.kernels.launch import Launcher

T = TypeVar("T")


def launched(call: Callable[[], T]) -> tuple[T, list[str]]:
    """The result of `call()` with kernels, and the names of the kernels that ran."""
    names = []
    launch = Launcher.__call__

    def record(self: Launcher, *args: Any) -> None:
        names.append(self.kernel.fn.__name__)
        launch(self, *args)

    with tokenyard.use("triton"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "__call__", record)
        return call(), names
