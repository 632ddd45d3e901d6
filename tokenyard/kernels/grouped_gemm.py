"""grouped_gemm: out[r] = M[e] x[r] for the rows r of each expert e, accumulated in fp32, DEPTH by DEPTH.

few rows    one launch, a program a tile; a program finds its tile among the experts
otherwise   one small launch lists the tiles of all experts, then one persistent program a multiprocessor
            walks through (tile of tokens, tile of columns)
Tiles belong to one expert each. Rows between an expert's count and its end, and past the last expert, are
not used, and come out zero. Bytes: M of every expert with rows, x and out, each once if the L2 holds them.

weight gradient: d[e] = sum over the rows r of e of a[r] b[r]^T, persistent over (e, tile); an empty
expert's tiles are zeros. No atomics; the order of every sum is fixed by DEPTH.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenyard.kernels.device.gemm import (
    bias_gradient_kernel,
    found_tile,
    listed_tile,
    load_group,
    product_tile,
    store_tile,
    tile_of,
    zero_rows_after,
)
from tokenyard.kernels.groups import (
    GROUP,
    hopper_kernels,
    list_tiles,
    precision_of,
    stored_matrix,
    unit_of,
    unit_stride,
)
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import (
    CHOSEN,
    GemmTile,
    architecture,
    bucket_of,
    by_pointers,
    cdiv,
    describable,
    gemm_tile,
    multiprocessors,
    next_power_of_2,
)


@triton.jit(do_not_specialize=["num_rows", "x_stride"])
def _grouped_gemm_kernel(
    tiles_ptr,
    totals_ptr,
    x,
    matrix,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column_tiles: tl.constexpr = (SIZE_OUT + COLUMNS - 1) // COLUMNS
    token_tiles = tl.load(totals_ptr)
    start, step = tl.program_id(0), tl.num_programs(0)
    for index in tl.range(start, token_tiles * column_tiles, step, flatten=True):
        token_tile, column_tile = tile_of(index, token_tiles, column_tiles, GROUP)
        expert, row, valid, end = listed_tile(tiles_ptr, token_tile)
        column = column_tile * COLUMNS
        acc = product_tile(
            x, matrix, bias_ptr, expert, row, None, column, num_rows, x_stride,
            SIZE_IN, SIZE_OUT, OUT_MAJOR, False, TMA, TMA, UNIT, False, PRECISION, TOKENS, COLUMNS, DEPTH,
        )  # fmt: skip
        store_tile(out_ptr, acc, row, valid, end, column, SIZE_OUT, SIZE_OUT)
    zero_rows_after(out_ptr, tl.load(totals_ptr + 1), num_rows, SIZE_OUT)


@triton.jit(do_not_specialize=["num_rows", "x_stride"])
def _direct_kernel(
    offsets_ptr,
    counts_ptr,
    x,
    matrix,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column_tiles: tl.constexpr = (SIZE_OUT + COLUMNS - 1) // COLUMNS
    index = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * COLUMNS
    expert, row, valid, end, last = found_tile(
        offsets_ptr, counts_ptr, index, NUM_EXPERTS, EXPERTS, TOKENS
    )
    if expert < NUM_EXPERTS:
        acc = product_tile(
            x, matrix, bias_ptr, expert, row, None, column, num_rows, x_stride,
            SIZE_IN, SIZE_OUT, OUT_MAJOR, False, TMA, TMA, UNIT, True, PRECISION, TOKENS, COLUMNS, DEPTH,
        )  # fmt: skip
        store_tile(out_ptr, acc, row, valid, end, column, SIZE_OUT, SIZE_OUT)
    zero_rows_after(out_ptr, last, num_rows, SIZE_OUT)


@triton.jit(do_not_specialize=["a_stride", "b_stride"])
def _weight_gradient_kernel(
    offsets_ptr,
    counts_ptr,
    a,
    b,
    out,
    a_stride,
    b_stride,
    NUM_EXPERTS: tl.constexpr,
    SIZE_A: tl.constexpr,
    SIZE_B: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    a_tiles: tl.constexpr = (SIZE_A + ROWS - 1) // ROWS
    b_tiles: tl.constexpr = (SIZE_B + COLUMNS - 1) // COLUMNS
    total: tl.constexpr = NUM_EXPERTS * a_tiles * b_tiles
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        expert = index // (a_tiles * b_tiles)
        a_tile, b_tile = tile_of(index % (a_tiles * b_tiles), a_tiles, b_tiles, GROUP)
        first = tl.load(offsets_ptr + expert).to(tl.int32)
        count = tl.load(counts_ptr + expert).to(tl.int32)
        i, j = a_tile * ROWS, b_tile * COLUMNS
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for row in range(0, count, DEPTH):
            a_rows = load_group(a, first, count, row, i, a_stride, SIZE_A, TMA, UNIT, DEPTH, ROWS)
            b_rows = load_group(
                b, first, count, row, j, b_stride, SIZE_B, TMA, UNIT, DEPTH, COLUMNS
            )
            acc = tl.dot(a_rows.T, b_rows, acc, input_precision=PRECISION)
        if TMA:
            out.store([expert, i, j], acc.to(out.dtype).reshape(1, ROWS, COLUMNS))
        else:
            rows, columns = i + tl.arange(0, ROWS), j + tl.arange(0, COLUMNS)
            at = out + (expert.to(tl.int64) * SIZE_A + rows)[:, None] * SIZE_B + columns[None, :]
            held = (rows < SIZE_A)[:, None] & (columns < SIZE_B)[None, :]
            if ACCUMULATE:
                acc += tl.load(at, mask=held, other=0.0).to(tl.float32)
            tl.store(at, acc.to(out.dtype.element_ty), mask=held)


@cache
def _multiply_launcher(
    dtypes: tuple[torch.dtype, ...],
    num_experts: int,
    size_in: int,
    size_out: int,
    out_major: bool,
    biased: bool,
    tma: bool,
    unit: int,
    precision: str,
    tile: GemmTile,
) -> Launcher:
    """Of the direct kernel if the number of experts is given, else 0."""
    experts = {"NUM_EXPERTS": num_experts, "EXPERTS": next_power_of_2(num_experts)}
    constants: dict[str, Any] = {
        **(experts if num_experts else {}),
        "SIZE_IN": size_in,
        "SIZE_OUT": size_out,
        "OUT_MAJOR": out_major,
        "TMA": tma,
        "UNIT": unit,
        "PRECISION": precision,
        **({} if num_experts else {"GROUP": GROUP}),
        "TOKENS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
    }
    return Launcher(
        _direct_kernel if num_experts else _grouped_gemm_kernel,
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _way(
    x: Tensor, matrix: Tensor, size_in: int, size_out: int
) -> tuple[ModuleType | None, GemmTile, str, bool, bool]:
    """The kernels for Hopper if they serve; else a tile, whence, if for few rows, if by descriptors."""
    arch, bucket = architecture(x.device), bucket_of(cdiv(x.shape[0], matrix.shape[0]))
    tile, source = gemm_tile(arch, x.dtype, bucket, size_in, size_out)
    few, tma = bucket != "many", describable(arch, x, matrix)
    hopper = None if few or source in CHOSEN else hopper_kernels(x.device)
    if hopper is not None and not hopper.usable(x, matrix, size_out):
        hopper = None
    return hopper, tile if tma else by_pointers(arch, tile), source, few, tma


def explain(rows: Tensor, weight: Tensor) -> str:
    """The kernel and the tile that serve rows [R,K] and weight [E,N,K] or [E,K,N]."""
    matrix, _, size_in, size_out = stored_matrix(weight, weight.shape[2] == rows.shape[1])
    hopper, tile, source, _, tma = _way(unit_stride(rows), matrix, size_in, size_out)
    if hopper is not None:
        return (
            f"in Gluon, {2 * hopper.ROWS} x {hopper.COLUMNS} x {hopper.DEPTH}, one warp that loads"
        )
    size = f"{tile.rows} x {tile.columns} x {tile.depth}"
    how = "descriptors" if tma else "pointers"
    return f"{size} by {how}, {tile.num_warps} warps, {tile.num_stages} stages; {source}"


def _multiply(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counts: Tensor,
    out_major: bool,
) -> Tensor:
    """[R,SIZE_OUT]; matrix [E,SIZE_OUT,SIZE_IN] if out_major, else [E,SIZE_IN,SIZE_OUT]."""
    num_experts, num_rows, x = matrix.shape[0], x.shape[0], unit_stride(x)
    matrix, out_major, size_in, size_out = stored_matrix(matrix, out_major)
    out = x.new_empty(num_rows, size_out)
    if out.numel() == 0:
        return out
    hopper, tile, _, direct, tma = _way(x, matrix, size_in, size_out)
    if hopper is not None:
        hopper.multiply(x, matrix, bias, offsets, counts, out_major, out)
        return out
    launch = _multiply_launcher(
        (x.dtype, offsets.dtype, counts.dtype),
        num_experts if direct else 0,
        size_in,
        size_out,
        out_major,
        bias is not None,
        tma,
        unit := unit_of(x),
        precision_of(x.dtype),
        tile,
    )
    x_source: Any = x
    m_source: Any = matrix
    if tma:
        block = [tile.columns, tile.depth] if out_major else [tile.depth, tile.columns]
        x_source = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        m_source = TensorDescriptor.from_tensor(matrix, [1, *block])
    operands = (x_source, m_source, bias, out)
    numbers = (num_rows, x.stride(0) // unit)
    column_tiles = cdiv(size_out, tile.columns)
    if direct:
        most_tiles = min(num_experts, num_rows) + num_rows // tile.rows
        launch(most_tiles * column_tiles, (offsets, counts, *operands), numbers)
        return out
    tiles, totals = list_tiles(offsets, counts, num_rows, tile.rows)
    programs = min(multiprocessors(x.device), tiles.shape[0] * column_tiles)
    launch(programs, (tiles, totals, *operands), numbers)
    return out


@cache
def _weight_launcher(
    dtypes: tuple[torch.dtype, ...],
    num_experts: int,
    sizes: tuple[int, int],
    tma: bool,
    unit: int,
    accumulate: bool,
    precision: str,
    tile: GemmTile,
) -> Launcher:
    constants = {
        "NUM_EXPERTS": num_experts,
        "SIZE_A": sizes[0],
        "SIZE_B": sizes[1],
        "TMA": tma,
        "UNIT": unit,
        "ACCUMULATE": accumulate,
        "PRECISION": precision,
        "GROUP": GROUP,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
    }
    return Launcher(
        _weight_gradient_kernel,
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def weight_gradient(
    a: Tensor, b: Tensor, offsets: Tensor, counts: Tensor, out: Tensor, accumulate: bool
) -> None:
    """out[e] (+)= sum over the rows r of e of a[r] b[r]^T: a [R,A], b [R,B], out [E,A,B] contiguous."""
    a, b = unit_stride(a), unit_stride(b)
    num_experts, size_a, size_b = out.shape
    if out.numel() == 0:
        return
    arch = architecture(a.device)
    tma = describable(arch, a, b, out) and not accumulate
    bucket = "weight" if tma else "weight by pointers"
    tile, source = gemm_tile(arch, a.dtype, bucket, size_a, size_b)
    hopper = hopper_kernels(a.device) if tma and source not in CHOSEN else None
    if hopper is not None:
        hopper.weight_gradient(a, b, offsets, counts, out)
        return
    launch = _weight_launcher(
        (a.dtype, out.dtype, offsets.dtype, counts.dtype),
        num_experts,
        (size_a, size_b),
        tma,
        unit := unit_of(a, b),
        accumulate,
        precision_of(a.dtype),
        tile,
    )
    operands: tuple[Any, ...] = (a, b, out)
    if tma:
        describe: Callable[..., Any] = create_ragged_descriptor
        operands = (
            describe(a, [tile.depth, tile.rows]),
            describe(b, [tile.depth, tile.columns]),
            TensorDescriptor.from_tensor(out, [1, tile.rows, tile.columns]),
        )
    num_tiles = num_experts * cdiv(size_a, tile.rows) * cdiv(size_b, tile.columns)
    programs = min(multiprocessors(a.device), num_tiles)
    launch(programs, (offsets, counts, *operands), (a.stride(0) // unit, b.stride(0) // unit))


@cache
def _bias_launcher(dtypes: tuple[torch.dtype | None, ...], size: int) -> tuple[Launcher, int]:
    constants = {"SIZE": size, "ROWS": 32, "COLUMNS": min(next_power_of_2(size), 128)}
    return Launcher(bias_gradient_kernel, constants), cdiv(size, constants["COLUMNS"])


def bias_gradient(
    d_out: Tensor, offsets: Tensor, counts: Tensor, weight_of_row: Tensor | None = None
) -> Tensor:
    """[E,N], the sum of each expert's rows of d_out [R,N], each times its weight if given."""
    d_out = unit_stride(d_out)
    num_experts, size = counts.shape[0], d_out.shape[1]
    d_bias = d_out.new_empty(num_experts, size)
    weight_dtype = None if weight_of_row is None else weight_of_row.dtype
    dtypes = (d_out.dtype, weight_dtype, offsets.dtype, counts.dtype)
    launch, column_tiles = _bias_launcher(dtypes, size)
    tensors = (offsets, counts, d_out, weight_of_row, d_bias)
    launch(num_experts * column_tiles, tensors, (d_out.stride(0),))
    return d_bias


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    layout: str,
) -> Tensor:
    """[R,N]; see the operator."""
    bias = None if bias is None else bias.contiguous()
    groups = expert_offsets, tokens_per_expert
    return _multiply(rows, weight, bias, *groups, layout == "ENK")


def grouped_gemm_backward(
    d_out: Tensor,
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    layout: str,
    need_rows: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor for each other."""
    groups = expert_offsets, tokens_per_expert
    d_rows = d_weight = d_bias = rows.new_empty(0)
    if need_rows:
        d_rows = _multiply(d_out, weight, None, *groups, layout != "ENK")
    if need_weight:
        d_weight = weight.new_empty(weight.shape)
        operands = (d_out, rows) if layout == "ENK" else (rows, d_out)
        weight_gradient(*operands, *groups, d_weight, False)
    if need_bias:
        d_bias = bias_gradient(d_out, *groups)
    return d_rows, d_weight, d_bias
