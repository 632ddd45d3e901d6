"""Which tile each kernel takes: one frozen record, chosen by static sizes alone."""

from dataclasses import dataclass


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
