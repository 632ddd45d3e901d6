"""What the expert MLP has besides its moves and plain GEMMs.

up         z[r] = W1[e] x[t] + b1[e] and a[r] = activation(z[r]), in the epilogue of one GEMM, scheduled as
           `grouped_gemm`; z is written only if it is kept. Gathers tokens as it multiplies (pointer loads
           of x[t]), or reads rows that `permute` has put side by side, through descriptors.
           3 R I elements written, R I without z, besides the bytes that the GEMM reads
slopes     one pass over d_a[r] = W2[e]^T g[t] and z: d_z[r], w a[r] in place of d_a[r], and <d_a[r], a[r]>;
           6 R I elements
weights    the gradient of a routing weight: that dot of its row, and <g[t], b2[e]>
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenyard.kernels.device.activation import (
    FUNCTION_OF_GATED,
    load_gate_up,
    slopes,
    store_gate_up,
)
from tokenyard.kernels.device.expert_mlp import up_tile
from tokenyard.kernels.device.gemm import (
    found_tile,
    listed_tile,
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


@triton.jit(do_not_specialize=["num_rows", "x_rows", "x_stride"])
def _up_kernel(
    tiles_ptr,
    totals_ptr,
    x,
    matrix,
    bias_ptr,
    z_ptr,
    a_ptr,
    slot_of_row_ptr,
    num_rows,
    x_rows,
    x_stride,
    GROUP: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    X_TMA: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column_tiles: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    token_tiles = tl.load(totals_ptr)
    start, step = tl.program_id(0), tl.num_programs(0)
    for index in tl.range(start, token_tiles * column_tiles, step, flatten=True):
        token_tile, column_tile = tile_of(index, token_tiles, column_tiles, GROUP)
        expert, row, valid, end = listed_tile(tiles_ptr, token_tile)
        up_tile(
            x, matrix, bias_ptr, z_ptr, a_ptr, slot_of_row_ptr,
            expert, row, valid, end, column_tile * COLUMNS, x_rows, x_stride,
            SIZE_IN, SIZE, KIND, FUNCTION, INTERLEAVED, TOP_K, OUT_MAJOR, X_TMA, TMA, UNIT, False,
            PRECISION, TOKENS, COLUMNS, DEPTH,
        )  # fmt: skip
    last = tl.load(totals_ptr + 1)
    zero_rows_after(a_ptr, last, num_rows, SIZE)
    if z_ptr is not None:
        zero_rows_after(z_ptr, last, num_rows, SIZE if KIND == "" else 2 * SIZE)


@triton.jit(do_not_specialize=["num_rows", "x_rows", "x_stride"])
def _up_direct_kernel(
    offsets_ptr,
    counts_ptr,
    x,
    matrix,
    bias_ptr,
    z_ptr,
    a_ptr,
    slot_of_row_ptr,
    num_rows,
    x_rows,
    x_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    X_TMA: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column_tiles: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    index = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * COLUMNS
    expert, row, valid, end, last = found_tile(
        offsets_ptr, counts_ptr, index, NUM_EXPERTS, EXPERTS, TOKENS
    )
    if expert < NUM_EXPERTS:
        up_tile(
            x, matrix, bias_ptr, z_ptr, a_ptr, slot_of_row_ptr,
            expert, row, valid, end, column, x_rows, x_stride,
            SIZE_IN, SIZE, KIND, FUNCTION, INTERLEAVED, TOP_K, OUT_MAJOR, X_TMA, TMA, UNIT, True,
            PRECISION, TOKENS, COLUMNS, DEPTH,
        )  # fmt: skip
    zero_rows_after(a_ptr, last, num_rows, SIZE)
    if z_ptr is not None:
        zero_rows_after(z_ptr, last, num_rows, SIZE if KIND == "" else 2 * SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def _slopes_kernel(
    d_a_ptr,
    z_ptr,
    topk_weights_ptr,
    slot_of_row_ptr,
    d_z_ptr,
    dots_ptr,
    num_rows,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program takes whole rows, so that <d_a, a> is one sum in the order of the columns."""
    dtype = d_z_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slot_of_row_ptr + rows, mask=rows < num_rows, other=-1)
    weight = tl.load(topk_weights_ptr + slots, mask=slots >= 0, other=0.0).to(tl.float32)[:, None]
    dots = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        held = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
        gate, up = load_gate_up(z_ptr, rows, start, num_rows, SIZE, KIND, INTERLEAVED, COLUMNS)
        at = d_a_ptr + rows[:, None] * SIZE + columns[None, :]
        d = tl.load(at, mask=held, other=0.0).to(tl.float32)
        a, gate_slope, up_slope = slopes(gate, up, KIND, FUNCTION)
        a = a.to(dtype).to(tl.float32)
        dots += d * a
        tl.store(at, (a * weight).to(dtype), mask=held)
        d *= weight
        d_gate, d_up = (d * gate_slope).to(dtype), (d * up_slope).to(dtype)
        store_gate_up(d_z_ptr, d_gate, d_up, rows, start, num_rows, SIZE, KIND, INTERLEAVED)
    tl.store(dots_ptr + rows, tl.sum(dots, 1), mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_slots", "g_stride"])
def _weights_gradient_kernel(
    dots_ptr,
    row_of_slot_ptr,
    g_ptr,
    bias_ptr,
    topk_indices_ptr,
    d_weights_ptr,
    num_slots,
    g_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of each slot: its row's dot and <g[t], bias[e]>."""
    slots = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    rows = tl.load(row_of_slot_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int64)
    owned = rows >= 0
    total = tl.load(dots_ptr + rows, mask=owned, other=0.0)
    if bias_ptr is not None:
        experts = tl.load(topk_indices_ptr + slots, mask=owned, other=0).to(tl.int64)
        products = tl.zeros((SLOTS, COLUMNS), tl.float32)
        for start in range(0, SIZE, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            held = owned[:, None] & (columns < SIZE)[None, :]
            g_at = g_ptr + (slots // TOP_K)[:, None] * g_stride + columns[None, :]
            bias_at = bias_ptr + experts[:, None] * SIZE + columns[None, :]
            g = tl.load(g_at, mask=held, other=0.0).to(tl.float32)
            products += g * tl.load(bias_at, mask=held, other=0.0).to(tl.float32)
        total += tl.sum(products, 1)
    total = total.to(d_weights_ptr.dtype.element_ty)
    tl.store(d_weights_ptr + slots, total, mask=slots < num_slots)


def _form(kind: str, layout: str) -> dict[str, Any]:
    is_gated = kind in FUNCTION_OF_GATED
    return {
        "KIND": kind if is_gated else "",
        "FUNCTION": FUNCTION_OF_GATED.get(kind, kind),
        "INTERLEAVED": is_gated and layout == "interleaved",
    }


@cache
def _launcher(
    kernel: Any,
    dtypes: tuple[torch.dtype | bool, ...],
    experts: tuple[tuple[str, int], ...],
    size_in: int,
    size: int,
    kind: str,
    layout: str,
    top_k: int,
    out_major: bool,
    x_tma: bool,
    tma: bool,
    unit: int,
    precision: str,
    tile: GemmTile,
) -> Launcher:
    constants = {
        **dict(experts),
        "SIZE_IN": size_in,
        "SIZE": size,
        **_form(kind, layout),
        "TOP_K": top_k,
        "OUT_MAJOR": out_major,
        "X_TMA": x_tma,
        "TMA": tma,
        "UNIT": unit,
        "PRECISION": precision,
        "TOKENS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
    }
    return Launcher(kernel, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _sources(
    x: Tensor, matrix: Tensor, x_tma: bool, tma: bool, block: list[int], tile: GemmTile
) -> tuple[Any, Any]:
    """Descriptors, or the tensors."""
    return (
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]) if x_tma else x,
        TensorDescriptor.from_tensor(matrix, block) if tma else matrix,
    )


def _split(matrix: Tensor, out_major: bool) -> Tensor:
    """Gate and up on a dimension of their own, so that one descriptor loads columns of both."""
    num_experts, first, second = matrix.shape
    shape = (2, first // 2, second) if out_major else (first, 2, second // 2)
    return matrix.view(num_experts, *shape)


def gathers(x: Tensor, num_rows: int, w_gate_up: Tensor) -> bool:
    """Whether `up` is faster with tokens that it gathers than after a permutation: at few rows."""
    return bucket_of(cdiv(num_rows, w_gate_up.shape[0])) != "many"


def up(
    x: Tensor,
    slot_of_row: Tensor | None,
    top_k: int,
    matrix: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counts: Tensor,
    out_major: bool,
    kind: str,
    layout: str,
    num_rows: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(a [R,I], z [R,2I] or empty) of the tokens x [T,H] at these slots, or of rows x [R,H] without slots."""
    num_experts, x = matrix.shape[0], unit_stride(x)
    matrix, out_major, size_in, width = stored_matrix(matrix, out_major)
    is_gated = kind in FUNCTION_OF_GATED
    size = width // 2 if is_gated else width
    a = x.new_empty(num_rows, size)
    z = x.new_empty(num_rows, width) if keep else x.new_empty(0)
    if a.numel() == 0:
        return a, z
    arch, bucket = architecture(x.device), bucket_of(cdiv(num_rows, num_experts))
    direct = bucket != "many"
    tile, source = gemm_tile(arch, x.dtype, f"up {bucket}", size_in, size)
    together = slot_of_row is None and not direct and source not in CHOSEN
    hopper = hopper_kernels(x.device) if together else None
    if hopper is not None and hopper.usable_up(x, matrix, out_major, width, kind, layout):
        hopper.up(x, matrix, bias, offsets, counts, out_major, z if keep else None, a, kind)
        return a, z
    paired = is_gated and layout == "concatenated"
    matrix = _split(matrix, out_major) if paired else matrix
    tma = describable(arch, matrix)
    tile = tile if tma else by_pointers(arch, tile)
    columns = [2, tile.columns] if paired else [2 * tile.columns if is_gated else tile.columns]
    x_tma = slot_of_row is None and tma and describable(arch, x)
    listed = (("NUM_EXPERTS", num_experts), ("EXPERTS", next_power_of_2(num_experts)))
    launch = _launcher(
        _up_direct_kernel if direct else _up_kernel,
        (x.dtype, bias is not None, keep, slot_of_row is None, offsets.dtype, counts.dtype),
        listed if direct else (("GROUP", GROUP),),
        size_in,
        size,
        kind,
        layout,
        top_k,
        out_major,
        x_tma,
        tma,
        unit := unit_of(x),
        precision_of(x.dtype),
        tile,
    )
    block = [1, *columns, tile.depth] if out_major else [1, tile.depth, *columns]
    sources = _sources(x, matrix, x_tma, tma, block, tile)
    operands = (*sources, bias, z if keep else None, a, slot_of_row)
    numbers = num_rows, x.shape[0], x.stride(0) // unit
    column_tiles = cdiv(size, tile.columns)
    if direct:
        most_tiles = min(num_experts, num_rows) + num_rows // tile.rows
        launch(most_tiles * column_tiles, (offsets, counts, *operands), numbers)
        return a, z
    tiles, totals = list_tiles(offsets, counts, num_rows, tile.rows)
    programs = min(multiprocessors(x.device), tiles.shape[0] * column_tiles)
    launch(programs, (tiles, totals, *operands), numbers)
    return a, z


@cache
def _slopes_launcher(
    dtypes: tuple[torch.dtype, ...], size: int, kind: str, layout: str
) -> tuple[Launcher, int]:
    columns = min(next_power_of_2(size), 512)
    rows = max(2048 // columns, 1)
    tile = {"ROWS": rows, "COLUMNS": columns}
    return Launcher(_slopes_kernel, {"SIZE": size, **_form(kind, layout), **tile}), rows


def activation_gradient(
    d_a: Tensor, z: Tensor, topk_weights: Tensor, slot_of_row: Tensor, kind: str, layout: str
) -> tuple[Tensor, Tensor]:
    """d_z [R,2I], and <d_a, a> of every row [R] in fp32. d_a [R,I], contiguous, becomes w a."""
    num_rows, size = d_a.shape
    d_z, dots = torch.empty_like(z), z.new_empty(num_rows, dtype=torch.float32)
    if z.numel() == 0:
        return d_z, dots.zero_()
    dtypes = (z.dtype, topk_weights.dtype, slot_of_row.dtype)
    launch, rows = _slopes_launcher(dtypes, size, kind, layout)
    tensors = (d_a, z, topk_weights.contiguous(), slot_of_row, d_z, dots)
    launch(cdiv(num_rows, rows), tensors, (num_rows,))
    return d_z, dots


@cache
def _weights_launcher(
    dtypes: tuple[torch.dtype, ...], size: int, top_k: int
) -> tuple[Launcher, int]:
    columns = min(next_power_of_2(size), 256)
    slots = max(2048 // columns, 8)
    constants = {"SIZE": size, "TOP_K": top_k, "SLOTS": slots, "COLUMNS": columns}
    return Launcher(_weights_gradient_kernel, constants), slots


def weights_gradient(
    dots: Tensor,
    row_of_slot: Tensor,
    g: Tensor,
    bias: Tensor | None,
    topk_indices: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """[T,K], from the dots of rows, the gradients g [T,H] of tokens, and b2 [E,H] or None."""
    d_weights = dots.new_empty(row_of_slot.shape, dtype=dtype)
    num_slots, top_k = row_of_slot.numel(), row_of_slot.shape[1]
    if num_slots == 0:
        return d_weights
    g, bias = unit_stride(g), None if bias is None else bias.contiguous()
    dtypes = (dtype, g.dtype, topk_indices.dtype, torch.bool if bias is None else bias.dtype)
    launch, slots = _weights_launcher(dtypes, g.shape[1], top_k)
    tensors = (dots, row_of_slot, g, bias, topk_indices.contiguous(), d_weights)
    launch(cdiv(num_slots, slots), tensors, (num_slots, g.stride(0)))
    return d_weights
