"""The grouped GEMM for sm_90, plain or with the activation of the expert MLP, and its weight gradient.

The same order of sums and the same bits as the kernels in Triton; but one warp loads, and results are stored
while others are multiplied. `usable` and `usable_up` say whether they serve: for 2-byte elements that
descriptors can describe. Bytes: as there.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenyard.kernels.device.activation import FUNCTION_OF_GATED
from tokenyard.kernels.device.hopper import multiply_kernel
from tokenyard.kernels.device.hopper_weight import weight_gradient_kernel
from tokenyard.kernels.groups import GROUP, list_tiles
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv, describable, multiprocessors

ROWS, COLUMNS, DEPTH, STAGES = 64, 256, 64, 4
"""Each of two consumers multiplies ROWS x COLUMNS of a tile, DEPTH at a time, out of STAGES stages."""
SIDE = 128
"""Rows and columns of a tile of the weight gradient, which one consumer takes whole."""
FEW_ROWS = 512
"""Rows per expert up to which the weight gradient halves DEPTH, so that less of a last step is empty."""


def usable(x: Tensor, matrix: Tensor, size_out: int) -> bool:
    """Whether `multiply` can take them; x [R,IN] and matrix as `stored_matrix` returns it."""
    return size_out % 8 == 0 and x.shape[0] <= 1 << 30 and describable("sm_90", x, matrix)


def usable_up(
    x: Tensor, matrix: Tensor, out_major: bool, width: int, kind: str, layout: str
) -> bool:
    """Whether `up` can. Of gate and up apart, half a tile each is loaded side by side; interleaved, they stay
    with Triton's kernel: here their result would take too many registers."""
    if kind in FUNCTION_OF_GATED and (layout, out_major, width % COLUMNS) != (
        "concatenated",
        True,
        0,
    ):
        return False
    return usable(x, matrix, width)


def _describe(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return TensorDescriptor(tensor, shape, strides, block, layout)


def _plain(tensor: Tensor, block: list[int]) -> Any:
    return _describe(tensor, list(tensor.shape), list(tensor.stride()), block)


def _ragged(tensor: Tensor, block: list[int]) -> Any:
    """As `triton.tools.ragged_tma`: element [2^30, end, 2^30 - n, c] is [end - n, c], for n > 0 only."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, *shape[1:]]
    strides = [(1 << 34) - strides[0], strides[0], *strides]
    return _describe(tensor, shape, strides, [1, 1, *block])


@cache
def _launcher(
    dtype: torch.dtype,
    size_in: int,
    size_out: int,
    kind: str | None,
    out_major: bool,
    given: tuple[bool, ...],
) -> Launcher:
    is_gated = kind in FUNCTION_OF_GATED
    constants = {
        "SIZE_IN": size_in,
        "SIZE_OUT": size_out,
        "SIZE_A": size_out // 2 if is_gated else size_out,
        "KIND": kind if is_gated else "",
        "FUNCTION": FUNCTION_OF_GATED.get(kind, kind) if kind is not None else "",
        "OUT_MAJOR": out_major,
        "PAIRED": is_gated,
        "GROUP": GROUP,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "DEPTH": DEPTH,
        "STAGES": STAGES,
    }
    return Launcher(multiply_kernel, constants, num_warps=4)


def _launch(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counts: Tensor,
    out_major: bool,
    z: Tensor | None,
    a: Tensor | None,
    kind: str | None,
) -> None:
    num_rows, size_in = x.shape
    size_out = matrix.shape[1 if out_major else 2]
    given = bias is not None, z is not None, a is not None
    launch = _launcher(x.dtype, size_in, size_out, kind, out_major, given)
    block = [COLUMNS, DEPTH] if out_major else [DEPTH, COLUMNS]
    if launch.constants["PAIRED"]:
        matrix, block = matrix.view(-1, 2, size_out // 2, size_in), [2, COLUMNS // 2, DEPTH]
    tiles, totals = list_tiles(offsets, counts, num_rows, 2 * ROWS)
    part = [ROWS, COLUMNS // 2]
    operands = (
        _plain(x, [ROWS, DEPTH]),
        _plain(matrix, [1, *block]),
        bias,
        None if z is None else _ragged(z, part),
        z,
        None if a is None else _ragged(a, part),
        a,
    )
    most_tiles = tiles.shape[0] * cdiv(size_out, COLUMNS)
    programs = min(multiprocessors(x.device), most_tiles)
    launch(programs, (tiles, totals, *operands), (num_rows,))


def multiply(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counts: Tensor,
    out_major: bool,
    out: Tensor,
) -> None:
    """out [R,OUT]; matrix [E,OUT,IN] if out_major, else [E,IN,OUT], contiguous; all `usable`."""
    _launch(x, matrix, bias, offsets, counts, out_major, out, None, None)


def up(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counts: Tensor,
    out_major: bool,
    z: Tensor | None,
    a: Tensor,
    kind: str,
) -> None:
    """z [R,2I], or None if it is not to be kept, and a [R,I]; all `usable_up`."""
    _launch(x, matrix, bias, offsets, counts, out_major, z, a, kind)


@cache
def _weight_launcher(
    dtypes: tuple[torch.dtype, ...], num_experts: int, size_a: int, size_b: int, depth: int
) -> Launcher:
    constants = {
        "NUM_EXPERTS": num_experts,
        "SIZE_A": size_a,
        "SIZE_B": size_b,
        "GROUP": GROUP,
        "ROWS": SIDE,
        "COLUMNS": SIDE,
        "DEPTH": depth,
        "STAGES": 5 * DEPTH // depth,
    }
    return Launcher(weight_gradient_kernel, constants, num_warps=4)


def weight_gradient(a: Tensor, b: Tensor, offsets: Tensor, counts: Tensor, out: Tensor) -> None:
    """out [E,A,B] = sum over the rows r of each expert of a[r] b[r]^T; all describable."""
    num_experts, size_a, size_b = out.shape
    dtypes = (a.dtype, offsets.dtype, counts.dtype)
    depth = DEPTH // 2 if a.shape[0] <= FEW_ROWS * num_experts else DEPTH
    launch = _weight_launcher(dtypes, num_experts, size_a, size_b, depth)
    box = [depth, SIDE]
    operands = _ragged(a, box), _ragged(b, box), _plain(out, [1, SIDE, SIDE])
    num_tiles = num_experts * cdiv(size_a, SIDE) * cdiv(size_b, SIDE)
    programs = min(multiprocessors(a.device), num_tiles)
    launch(programs, (offsets, counts, *operands), ())
