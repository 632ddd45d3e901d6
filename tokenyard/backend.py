"""The one place that chooses an implementation: the plain-PyTorch definition, or a Triton kernel.

The choice is process-wide, because autograd runs the backward of CUDA tensors on threads of its own.
"""

import importlib
import importlib.util
import os
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType, TracebackType

import torch
from torch import Tensor

from tokenyard import check

BACKENDS = ("auto", "reference", "triton")
KERNELS: dict[str, str | None] = {
    "activation": "activation",
    "conventions.from_routing_map": "routing_mask",
    "expert_mlp": "expert_mlp",
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm_add_weight_gradient": "grouped_gemm",
    "load_balance_loss": None,
    "permute": "permute",
    "permute_slots": "permute",
    "route": "routing",
    "router_logits": None,
    "sort_chunks": "sort_chunks",
    "topk": "topk",
    "unpermute": "unpermute",
    "update_selection_bias": None,
    "z_loss": None,
}
"""Every operator, and the module under `tokenyard.kernels` that holds its kernels."""
WITHOUT_FP64 = frozenset(
    {"activation", "expert_mlp", "grouped_gemm", "grouped_gemm_add_weight_gradient", "topk"}
)
"""Operators whose kernels do not compute in fp64: there the definition serves, whatever the backend."""

_backend = "auto"


class use(AbstractContextManager[None]):
    """Choose the backend of every operator: `"auto"`, `"reference"` or `"triton"`.

    `"auto"` takes the Triton kernel for tensors on a GPU where one exists, else the definition.
    `"reference"` always takes the definition; `"triton"` raises where no kernel can run, but for
    fp64 in `topk`, `activation` and the GEMMs and drop="weight" in `route`, which always take the
    definition.
    Takes effect at once; as a context manager it restores the previous choice at the end.

    >>> import tokenyard
    >>> with tokenyard.use("reference"):
    ...     tokenyard.explain("permute")
    'permute: definition (backend "reference" is in use)'
    """

    def __init__(self, backend: str) -> None:
        check.choice("use", "backend", backend, BACKENDS)
        self._backend = backend
        self._previous: list[str] = []
        self._switch()
        self._switched = True

    def _switch(self) -> None:
        global _backend
        self._previous.append(_backend)
        _backend = self._backend

    def __enter__(self) -> None:
        if not self._switched:
            self._switch()
        self._switched = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _backend
        _backend = self._previous.pop()
        self._switched = False


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _choose(operator: str, device: str) -> tuple[bool, str]:
    if _backend == "reference":
        return False, 'backend "reference" is in use'
    if KERNELS.get(operator) is None:
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
    if tensor.dtype == torch.float64 and operator in WITHOUT_FP64:
        return None
    return _kernels(operator, tensor.device.type, _backend)


@cache
def _kernels(operator: str, device: str, backend: str) -> ModuleType | None:
    chosen, reason = _choose(operator, device)
    if chosen:
        return importlib.import_module(f"tokenyard.kernels.{KERNELS[operator]}")
    if backend == "triton":
        raise RuntimeError(f"tokenyard.{operator}: backend 'triton' cannot be used: {reason}")
    return None


def explain(operator: str, tensor: Tensor | None = None, weight: Tensor | None = None) -> str:
    """Say in one line which implementation `operator` takes for `tensor` (default: a CPU tensor), and why.

    For `grouped_gemm` of rows [R,K] with `weight` [E,N,K] or [E,K,N], name the kernel's tile too.
    `use` says which arguments take the definition in spite of a kernel. Raises ArgumentError.

    >>> explain("z_loss")
    'z_loss: definition (it has no Triton kernel)'
    """
    check.choice("explain", "operator", operator, tuple(KERNELS))
    chosen, reason = _choose(operator, "cpu" if tensor is None else tensor.device.type)
    fp64 = tensor is not None and tensor.dtype == torch.float64
    if chosen and fp64 and operator in WITHOUT_FP64:
        chosen, reason = False, "its kernels do not compute in fp64"
    if chosen and operator == "grouped_gemm" and tensor is not None and weight is not None:
        module = kernels(operator, tensor)
        reason = reason if module is None else f"{reason}; {module.explain(tensor, weight)}"
    return f"{operator}: {'Triton kernel' if chosen else 'definition'} ({reason})"
