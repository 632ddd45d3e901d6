"""`tokenyard tune`: find the fastest tiles of grouped_gemm for a model's sizes on this GPU."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from tokenyard.kernels import grouped_gemm as kernels
from tokenyard.kernels import tiles
from tokenyard.kernels.launch import milliseconds, or_none
from tokenyard.kernels.tiles import GemmTile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GAIN = 1.02
"""How much faster than the table's a tile must be to be kept."""
ROWS = {**{str(bound): bound for bound in tiles.BUCKETS}, "many": 512}
"""Rows per expert that stand for each bucket."""
_WIDTHS = (64, 128, 256)
_DEPTHS = (32, 64, 128)


@dataclass(frozen=True)
class Problem:
    """One GEMM at one bucket of rows per expert, with the tile that it has now."""

    name: str
    bucket: str
    key: str
    tile: GemmTile
    run: Callable[[], Tensor]


def candidates(bucket: str, table: GemmTile) -> Iterator[GemmTile]:
    """Tiles worth a trial, the table's own first. Those that do not fit fail to compile."""
    yield table
    heights = (int(bucket),) if bucket.isdigit() else (64, 128, 256)
    for rows in heights:
        for columns in _WIDTHS:
            for depth in _DEPTHS:
                for num_stages in (2, 3, 4, 5):
                    num_warps = 8 if rows * columns >= 128 * 128 else 4
                    tile = GemmTile(rows, columns, depth, num_warps, num_stages)
                    held = (rows + columns) * depth * num_stages * 2
                    if rows * columns <= 128 * 256 and 2**14 < held < 2**18 and tile != table:
                        yield tile


def problems(
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Problem]:
    """Up and down projection: forward and input gradient by bucket, and the weight gradient."""
    arch = tiles.architecture(device)

    def problem(bucket: str, size_in: int, size_out: int, run: Callable[[], Tensor]) -> Problem:
        key = tiles.tile_key(arch, dtype, bucket, size_in, size_out)
        tile, _ = tiles.gemm_tile(arch, dtype, bucket, size_in, size_out)
        return Problem(f"{size_in} x {size_out}", bucket, key, tile, run)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    for size_in, size_out in (
        (hidden_size, 2 * intermediate_size),
        (intermediate_size, hidden_size),
    ):
        weight = randn(num_experts, size_out, size_in)
        for bucket, rows in ROWS.items():
            groups = _groups(num_experts, rows, device)
            x, d_out = randn(num_experts * rows, size_in), randn(num_experts * rows, size_out)
            forward = partial(kernels.grouped_gemm, x, weight, None, *groups, "ENK")
            backward = partial(kernels.grouped_gemm, d_out, weight, None, *groups, "EKN")
            yield problem(bucket, size_in, size_out, forward)
            yield problem(bucket, size_out, size_in, backward)
        out = torch.empty_like(weight)
        through_tma = tiles.describable(arch, d_out, x, out)
        bucket = "weight" if through_tma else "weight by pointers"
        weigh = partial(_weigh, d_out, x, groups, out)
        yield problem(bucket, size_out, size_in, weigh)


def _weigh(d_out: Tensor, x: Tensor, groups: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    kernels.weight_gradient(d_out, x, *groups, out, False)
    return out


def _groups(num_experts: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    offsets = torch.arange(num_experts + 1, dtype=torch.int32, device=device) * rows
    return offsets, offsets.diff()


def fastest(problem: Problem, step: Callable[[], None]) -> tuple[GemmTile, float, float]:
    """The fastest tile with the right result, its milliseconds, and those of what runs at present."""
    want = problem.run().clone()
    before, times = milliseconds(problem.run), {}
    for tile in candidates(problem.bucket, problem.tile):
        with tiles.trying({problem.key: tile}):
            got = or_none(problem.run)
            if got is not None and torch.allclose(got.float(), want.float(), rtol=2e-2, atol=1e-2):
                times[tile] = milliseconds(problem.run)
        step()
    best = min(times, key=lambda tile: times[tile])
    return best, times[best], before


def tune(
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    dtype: str,
    device: torch.device,
    console: Console,
) -> Path:
    """Measure, show and save; the path of the table."""
    kept = {}
    table = Table("GEMM", "rows per expert", "tile", "ms", "gain")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        sizes = hidden_size, intermediate_size, num_experts, DTYPES[dtype], device
        for problem in problems(*sizes):
            total = len(list(candidates(problem.bucket, problem.tile)))
            task = progress.add_task(f"{problem.name}, {problem.bucket}", total=total)
            best, took, before = fastest(problem, partial(progress.advance, task))
            progress.remove_task(task)
            if took * GAIN < before:
                kept[problem.key] = best
            described = "{rows} x {columns} x {depth}, {num_warps} warps, {num_stages} stages"
            tile = described.format(**asdict(best))
            table.add_row(problem.name, problem.bucket, tile, f"{took:.3f}", f"{before / took:.2f}")
    console.print(table)
    return tiles.save_tuned(kept)
