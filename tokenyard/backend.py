"""The one place that chooses an implementation: the plain-PyTorch definition, or a Triton kernel.

The choice is process-wide, because autograd runs the backward of CUDA tensors on threads of its own.
"""

import importlib
import importlib.util
import os
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType, TracebackType

from torch import Tensor

from tokenyard import check

BACKENDS = ("auto", "reference", "triton")
KERNELS = frozenset(
    {"grouped_gemm", "permute", "routing", "routing_mask", "sort_chunks", "topk", "unpermute"}
)
"""Operators that have a module of the same name under `tokenyard.kernels`."""

_backend = "auto"


class use(AbstractContextManager[None]):
    """Choose the backend of every operator: `"auto"`, `"reference"` or `"triton"`.

    `"auto"` takes the Triton kernel for tensors on a GPU where one exists, else the definition.
    `"reference"` always takes the definition; `"triton"` raises where no kernel can run.
    Takes effect at once; as a context manager it restores the previous choice at the end.

    >>> import tokenyard
    >>> with tokenyard.use("reference"):
    ...     tokenyard.explain("permute")
    'permute: definition (backend "reference" is in use)'
    """

    def __init__(self, backend: str) -> None:
        global _backend
        check.choice("use", "backend", backend, BACKENDS)
        self._previous = _backend
        _backend = backend

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _backend
        _backend = self._previous


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _choose(operator: str, device: str) -> tuple[bool, str]:
    if _backend == "reference":
        return False, 'backend "reference" is in use'
    if operator not in KERNELS:
        return False, "it has no Triton kernel"
    if not _triton_installed():
        return False, "Triton is not installed"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False, f"Triton kernels do not run on {device}"
    if _backend == "auto" and device != "cuda":
        return False, f"definitions serve {device}"
    return True, f"{device} tensors"


def kernels(operator: str, tensor: Tensor) -> ModuleType | None:
    """The Triton module of `operator` for such a tensor, or None where the definition serves."""
    return _kernels(operator, tensor.device.type, _backend)


@cache
def _kernels(operator: str, device: str, backend: str) -> ModuleType | None:
    chosen, reason = _choose(operator, device)
    if chosen:
        return importlib.import_module(f"tokenyard.kernels.{operator}")
    if backend == "triton":
        raise RuntimeError(f"tokenyard.{operator}: backend 'triton' cannot be used: {reason}")
    return None


def explain(operator: str, tensor: Tensor | None = None) -> str:
    """Say in one line which implementation `operator` takes for `tensor` (default: a CPU tensor), and why."""
    chosen, reason = _choose(operator, "cpu" if tensor is None else tensor.device.type)
    return f"{operator}: {'Triton kernel' if chosen else 'definition'} ({reason})"
