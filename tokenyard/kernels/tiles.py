"""Which tile each kernel takes: frozen records, chosen by static sizes alone.

Moves of rows compute theirs. GEMMs look theirs up, by architecture, size of an element, and a coarse
bucket of rows per expert that the host knows; a table that `tokenyard tune` measured comes first.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class RowTile:
    """A tile of `rows` rows by `columns` columns, held by `num_warps` warps."""

    rows: int
    columns: int
    num_warps: int = 4


def row_tile(num_columns: int, element_size: int, elements: int = 1024) -> RowTile:
    """About `elements` 2-byte elements: a slice of one wide row, or several narrow rows."""
    elements = elements * 2 // max(element_size, 2)
    columns = min(next_power_of_2(num_columns), elements)
    return RowTile(rows=min(elements // columns, 128), columns=columns)


def slot_tile(num_columns: int, element_size: int, rows: int) -> RowTile:
    """`rows` rows of at most 512 2-byte columns, or more of narrow ones."""
    widest = 512 * 2 // max(element_size, 2)
    columns = min(next_power_of_2(num_columns), widest)
    return RowTile(rows=min(rows * widest // columns, 128), columns=columns)


@dataclass(frozen=True)
class GemmTile:
    """rows x columns of the result, `depth` of the inner size at a time, `num_stages` of these in flight.

    Rows are tokens; for the weight gradient they are the first size of the weight. "up" tiles count columns
    after the activation, of which each stands for one of gate and one of up.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


ON_TRIAL, TUNED = "on trial", "tuned"
CHOSEN = (ON_TRIAL, TUNED)
"""Where a tile comes from that no table of ours and no other kernel is to replace."""
BUCKETS = (16, 32, 64)
"""Rows per expert up to which a tile of that many rows serves; beyond, "many"."""
DESCRIPTORS = frozenset({"sm_90", "sm_100", "sm_103"})
"""Architectures whose tiles of 2-byte elements are loaded through tensor descriptors (TMA)."""

_HOPPER = {
    "16": GemmTile(16, 64, 128, 4, 5),
    "32": GemmTile(32, 64, 128, 4, 4),
    "64": GemmTile(64, 128, 64, 4, 4),
    "many": GemmTile(128, 256, 64, 8, 3),
    "weight": GemmTile(128, 256, 32, 8, 6),
    "weight by pointers": GemmTile(128, 128, 64, 8, 3),
    "up 16": GemmTile(16, 32, 128, 4, 5),
    "up 32": GemmTile(32, 32, 128, 4, 4),
    "up 64": GemmTile(64, 64, 64, 4, 4),
    "up many": GemmTile(128, 128, 64, 8, 3),
}
_AMPERE = {  # 163 KB of shared memory
    "16": GemmTile(16, 64, 128, 4, 4),
    "32": GemmTile(32, 64, 128, 4, 4),
    "64": GemmTile(64, 128, 32, 4, 4),
    "many": GemmTile(128, 128, 64, 8, 3),
    "weight": GemmTile(128, 128, 64, 8, 3),
    "weight by pointers": GemmTile(128, 128, 64, 8, 3),
    "up 16": GemmTile(16, 32, 128, 4, 4),
    "up 32": GemmTile(32, 32, 128, 4, 4),
    "up 64": GemmTile(64, 64, 32, 4, 4),
    "up many": GemmTile(128, 64, 64, 8, 3),
}
_ADA = {  # 99 KB; consumer Blackwell too
    "16": GemmTile(16, 64, 128, 4, 3),
    "32": GemmTile(32, 64, 64, 4, 4),
    "64": GemmTile(64, 128, 32, 4, 4),
    "many": GemmTile(128, 128, 32, 8, 4),
    "weight": GemmTile(128, 128, 32, 8, 3),
    "weight by pointers": GemmTile(128, 128, 32, 8, 3),
    "up 16": GemmTile(16, 32, 128, 4, 3),
    "up 32": GemmTile(32, 32, 64, 4, 4),
    "up 64": GemmTile(64, 64, 32, 4, 4),
    "up many": GemmTile(128, 64, 32, 8, 4),
}
_CDNA = {  # 64 KB
    "16": GemmTile(16, 64, 64, 4, 2),
    "32": GemmTile(32, 64, 64, 4, 2),
    "64": GemmTile(64, 64, 64, 4, 2),
    "many": GemmTile(128, 128, 32, 8, 2),
    "weight": GemmTile(128, 128, 32, 8, 2),
    "weight by pointers": GemmTile(128, 128, 32, 8, 2),
    "up 16": GemmTile(16, 32, 64, 4, 2),
    "up 32": GemmTile(32, 32, 64, 4, 2),
    "up 64": GemmTile(64, 32, 64, 4, 2),
    "up many": GemmTile(128, 64, 32, 8, 2),
}
_FP32 = {
    "16": GemmTile(16, 64, 32, 4, 3),
    "32": GemmTile(32, 64, 32, 4, 3),
    "64": GemmTile(64, 64, 16, 8, 3),
    "many": GemmTile(64, 64, 16, 8, 3),
    "weight": GemmTile(64, 64, 16, 8, 3),
    "weight by pointers": GemmTile(64, 64, 16, 8, 3),
    "up 16": GemmTile(16, 32, 32, 4, 3),
    "up 32": GemmTile(32, 32, 32, 4, 3),
    "up 64": GemmTile(64, 32, 16, 8, 3),
    "up many": GemmTile(64, 32, 16, 8, 3),
}
_GEMM_TILES = {
    "sm_80": _AMPERE,
    "sm_90": _HOPPER,
    "sm_100": _HOPPER,
    "sm_103": _HOPPER,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
}


@cache
def architecture(device: torch.device) -> str:
    """sm_90, gfx942 and the like; sm_90 for the interpreter."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side, one on each; 3 for the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def describable(arch: str, *tensors: Tensor) -> bool:
    """Whether descriptors can and should describe them: 2-byte elements, 16-byte rows, nothing empty."""
    if arch not in DESCRIPTORS:
        return False
    for tensor in tensors:
        *outer, inner = tensor.stride()
        addresses = [tensor.data_ptr(), *(stride * tensor.itemsize for stride in outer)]
        if tensor.itemsize != 2 or inner != 1 or tensor.numel() == 0:
            return False
        if any(address % 16 for address in addresses):
            return False
    return True


def by_pointers(arch: str, tile: GemmTile) -> GemmTile:
    """A tile made for descriptors at half its width, since addresses take registers."""
    if arch not in DESCRIPTORS or tile.rows < 128:
        return tile
    return replace(tile, columns=tile.columns // 2)


def bucket_of(rows_per_expert: int) -> str:
    return next((str(bound) for bound in BUCKETS if rows_per_expert <= bound), "many")


@cache
def gemm_tile(
    arch: str, dtype: torch.dtype, bucket: str, size_in: int, size_out: int
) -> tuple[GemmTile, str]:
    """The tile, and where it comes from.

    bucket  of `bucket_of`; or "weight", or "weight by pointers" where its gradient is not all through TMA
    """
    key = tile_key(arch, dtype, bucket, size_in, size_out)
    if (tile := _trial.get(key)) is not None:
        return tile, ON_TRIAL
    if (tile := tuned_tiles().get(key)) is not None:
        return tile, TUNED
    table = _FP32 if dtype.itemsize == 4 else _GEMM_TILES.get(arch, _ADA)
    return table[bucket], f"table of {arch}, {dtype.itemsize}-byte elements, {bucket}"


def tile_key(arch: str, dtype: torch.dtype, bucket: str, size_in: int, size_out: int) -> str:
    return f"{arch} {dtype.itemsize}-byte {bucket} {size_in}x{size_out}"


_trial: Mapping[str, GemmTile] = {}


@contextmanager
def trying(tiles: Mapping[str, GemmTile]) -> Iterator[None]:
    """Take these tiles before all others, as `tokenyard tune` does to compare them."""
    global _trial
    before, _trial = _trial, tiles
    gemm_tile.cache_clear()
    try:
        yield
    finally:
        _trial = before
        gemm_tile.cache_clear()


def tuned_path() -> Path:
    """$TOKENYARD_CACHE/tiles.json, by default under the user's cache folder."""
    if (folder := os.environ.get("TOKENYARD_CACHE")) is not None:
        return Path(folder) / "tiles.json"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "tokenyard/tiles.json"


@cache
def tuned_tiles() -> Mapping[str, GemmTile]:
    """What `tokenyard tune` wrote, read once; ValueError where the file is not such a table."""
    path = tuned_path()
    if not path.is_file():
        return {}
    try:
        return {key: _tile_of(entry) for key, entry in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a table of tiles; remove it: {error}") from error


def save_tuned(tiles: Mapping[str, GemmTile]) -> Path:
    """Add to the table of `tuned_path`, and forget what was read."""
    path = tuned_path()
    merged = {**tuned_tiles(), **tiles}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({key: asdict(tile) for key, tile in merged.items()}, indent=1))
    part.replace(path)
    tuned_tiles.cache_clear()
    gemm_tile.cache_clear()
    return path


def _tile_of(entry: dict[str, Any]) -> GemmTile:
    tile = GemmTile(**entry)
    for name, value in entry.items():
        if not isinstance(value, int) or not 1 <= value <= 512:
            raise ValueError(f"{name} is {value!r}")
    for name in ("rows", "columns", "depth", "num_warps"):
        if entry[name] & (entry[name] - 1):
            raise ValueError(f"{name} is {entry[name]}, no power of two")
    return tile
