"""Moves of whole rows."""

import triton
import triton.language as tl


@triton.jit
def zero_padding_rows(
    out_ptr,
    slot_of_row_ptr,
    num_rows,
    block,
    num_blocks,
    first_column,
    stop_column,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Zero the columns from first to stop of the padding rows (slot -1) of chunk `block` of the rows,

    of chunk `block + num_blocks`, and so on.
    """
    for start in range(block * CHUNK, num_rows, num_blocks * CHUNK):
        rows = start + tl.arange(0, CHUNK)
        slots = tl.load(slot_of_row_ptr + rows, mask=rows < num_rows, other=0)
        padding = slots < 0
        if tl.sum(padding.to(tl.int32)) > 0:
            zeros = tl.zeros((CHUNK, COLUMNS), out_ptr.dtype.element_ty)
            for column in range(first_column, stop_column, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)
                at = rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
                mask = padding[:, None] & (columns < NUM_COLUMNS)[None, :]
                tl.store(out_ptr + at, zeros, mask=mask)


@triton.jit
def count_slots(row_of_slot_ptr, tokens, present, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """One more than the last slot that has a row, over all of `tokens`: where to stop when K is large."""
    ks = tl.arange(0, SLOTS)
    held = present[:, None] & (ks < TOP_K)[None, :]
    slots = tokens.to(tl.int64)[:, None] * TOP_K + ks[None, :]
    row = tl.load(row_of_slot_ptr + slots, mask=held, other=-1)
    return tl.max(tl.max(tl.where(row >= 0, ks[None, :] + 1, 0), 1), 0)
