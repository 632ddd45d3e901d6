"""What every kernel over experts' groups of rows does on the host: operands, and the list of tiles."""

import importlib
from functools import cache
from types import ModuleType

import torch
import triton
from torch import Tensor

from tokenyard.kernels.device.gemm import schedule_kernel
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import architecture, next_power_of_2

GROUP = 8
"""Row tiles that go over all columns together."""
GLUON = ("3.6", "3.7")
"""Versions of Triton whose Gluon, which is experimental, the kernels for Hopper are known to work with."""
_SCHEDULERS = 16
"""Programs that list tiles, so that one expert with all rows is listed as quickly."""


@cache
def hopper_kernels(device: torch.device) -> ModuleType | None:
    """The kernels for sm_90 that are written in Gluon, where they can run."""
    known = triton.__version__.rpartition(".")[0] in GLUON
    if not known or device.type != "cuda" or architecture(device) != "sm_90":
        return None
    return importlib.import_module("tokenyard.kernels.hopper_gemm")


def precision_of(dtype: torch.dtype) -> str:
    """fp32 products are exact unless torch's own GEMMs may use tf32."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


def unit_of(*rows: Tensor) -> int:
    """The elements of 16 bytes where row strides are multiples of that, so that loads can be as wide."""
    unit = 16 // rows[0].itemsize
    return 1 if any(tensor.stride(0) % unit for tensor in rows) else unit


def unit_stride(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def stored_matrix(matrix: Tensor, out_major: bool) -> tuple[Tensor, bool, int, int]:
    """Contiguous [E,OUT,IN] if `out_major`, else [E,IN,OUT], transposed rather than copied; IN and OUT."""
    if not matrix.is_contiguous() and matrix.mT.is_contiguous():
        matrix, out_major = matrix.mT, not out_major
    first, second = matrix.shape[1:]
    sizes = (second, first) if out_major else (first, second)
    return matrix.contiguous(), out_major, *sizes


@cache
def _launcher(dtypes: tuple[torch.dtype, ...], num_experts: int, tokens: int) -> Launcher:
    constants = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": next_power_of_2(num_experts),
        "TOKENS": tokens,
    }
    return Launcher(schedule_kernel, constants)


def list_tiles(
    offsets: Tensor, counts: Tensor, num_rows: int, tile_rows: int
) -> tuple[Tensor, Tensor]:
    """tiles [.,4] and totals [2] of `schedule_kernel`."""
    num_experts = counts.shape[0]
    tiles = offsets.new_empty((num_experts + num_rows // tile_rows, 4), dtype=torch.int32)
    totals = offsets.new_empty(2, dtype=torch.int32)
    launch = _launcher((offsets.dtype, counts.dtype), num_experts, tile_rows)
    launch(_SCHEDULERS, (offsets, counts, tiles, totals), ())
    return tiles, totals
