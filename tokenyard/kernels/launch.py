"""Launching with little host time."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction
from triton.testing import do_bench


class Launcher:
    """A kernel with its constants. A launcher serves one combination of dtypes.

    Triton looks at every argument of every launch to find the compiled kernel. Here the constants, the
    dtypes and the alignment of pointers are known to be the same each time, and integers are not
    specialised on, so all launches on a device but the first go straight to the compiled kernel.
    """

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int | None = None,
        enable_fp_fusion: bool = True,
    ) -> None:
        self.kernel = kernel
        self.constants = constants
        self.options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
        if num_stages is not None:
            self.options["num_stages"] = num_stages
        self.compiled: dict[int, Any] = {}

    def __call__(
        self, programs: int, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]
    ) -> None:
        """Launch `programs` programs on the device of the first of `tensors`.

        These are tensors, descriptors of tensors, or None.
        """
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, tensors, numbers)
            return
        special = _special(tensors)
        compiled = None if special else self.compiled.get(device.index)
        if compiled is not None:
            compiled[(programs, 1, 1)](*tensors, *numbers, *self.constants.values())
            return
        compiled = self.kernel[(programs,)](*tensors, *numbers, **self.constants, **self.options)
        if not special and isinstance(self.kernel, JITFunction):
            self.compiled[device.index] = compiled


def _special(tensors: tuple[Any, ...]) -> bool:
    """Whether Triton may specialise on these pointers otherwise than on most."""
    addresses = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):  # descriptors are aligned
            addresses |= tensor.data_ptr()
            # AMD's back end takes 32-bit offsets for what lies within 2 GiB
            if torch.version.hip is not None and tensor.untyped_storage().size() >= 2**31:
                return True
    return addresses % 16 != 0


def or_none(call: Callable[[], Tensor]) -> Tensor | None:
    """The result, or None where a tile takes more of the device than there is."""
    try:
        return call()
    except OutOfResources:
        return None


def milliseconds(call: Callable[[], Tensor]) -> float:
    """Median time on the GPU, the L2 cache flushed before each call."""
    return float(do_bench(call, warmup=10, rep=40, return_mode="median"))
