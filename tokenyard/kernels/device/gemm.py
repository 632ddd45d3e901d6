"""The tiles of grouped GEMMs: their list; loads through descriptors (TMA) or pointers, products, stores."""

import triton
import triton.language as tl


@triton.jit
def schedule_kernel(
    offsets_ptr,
    counts_ptr,
    tiles_ptr,
    totals_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """tiles [.,4]: expert, first row, end of its valid rows, end of its rows. totals: tiles, rows."""
    bins = tl.arange(0, EXPERTS)
    listed = bins < NUM_EXPERTS
    first = tl.load(offsets_ptr + bins, mask=listed, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + bins + 1, mask=listed, other=0).to(tl.int32)
    valid = first + tl.load(counts_ptr + bins, mask=listed, other=0).to(tl.int32)
    tiles = (end - first + TOKENS - 1) // TOKENS
    before = tl.cumsum(tiles, 0) - tiles
    for j in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):
        entry = tiles_ptr + (before + j) * 4
        tl.store(entry, bins, mask=j < tiles)
        tl.store(entry + 1, first + j * TOKENS, mask=j < tiles)
        tl.store(entry + 2, valid, mask=j < tiles)
        tl.store(entry + 3, end, mask=j < tiles)
    if tl.program_id(0) == 0:
        tl.store(totals_ptr, tl.sum(tiles, 0))
        tl.store(totals_ptr + 1, tl.max(end, 0))


@triton.jit
def listed_tile(tiles_ptr, index):
    """Expert, first row, end of the valid rows, end of the rows."""
    entry = tiles_ptr + index * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def found_tile(
    offsets_ptr,
    counts_ptr,
    index,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The same without a list, and the end of all rows; expert NUM_EXPERTS past the last tile."""
    bins = tl.arange(0, EXPERTS)
    listed = bins < NUM_EXPERTS
    first = tl.load(offsets_ptr + bins, mask=listed, other=0).to(tl.int32)
    ends = tl.load(offsets_ptr + bins + 1, mask=listed, other=0).to(tl.int32)
    tiles = (ends - first + TOKENS - 1) // TOKENS
    stop = tl.cumsum(tiles, 0)
    expert = tl.sum((stop <= index).to(tl.int32), 0)
    row = tl.sum(tl.where(bins == expert, first + (index - stop + tiles) * TOKENS, 0), 0)
    exists = expert < NUM_EXPERTS
    end = tl.load(offsets_ptr + expert + 1, mask=exists, other=0).to(tl.int32)
    count = tl.load(counts_ptr + expert, mask=exists, other=0).to(tl.int32)
    valid = tl.load(offsets_ptr + expert).to(tl.int32) + count
    return expert, row, valid, end, tl.max(ends, 0)


@triton.jit
def tile_of(index, num_row_tiles, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles go over all columns together, and meet in the L2 cache."""
    group = index // (GROUP * COLUMN_TILES)
    within = index % (GROUP * COLUMN_TILES)
    size = tl.minimum(num_row_tiles - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def tokens_of_tile(row, valid, slot_of_row_ptr, TOP_K: tl.constexpr, TOKENS: tl.constexpr):
    """The tokens of a tile's rows, -1 for none; None without slots, where x has the rows themselves."""
    if slot_of_row_ptr is not None:
        rows = row + tl.arange(0, TOKENS)
        slots = tl.load(slot_of_row_ptr + rows, mask=rows < valid, other=-1)
        tokens = tl.where(slots < 0, -1, slots // TOP_K)
    else:
        tokens = None
    return tokens


@triton.jit
def load_rows(
    x,
    row,
    tokens,
    k,
    num_rows,
    x_stride,
    SIZE_IN: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[TOKENS,DEPTH]; zero where there is no row and past SIZE_IN. The stride counts UNIT elements."""
    if TMA:
        value = x.load([row, k])
    else:
        if tokens is not None:
            rows = tokens
            exists = (rows >= 0) & (rows < num_rows)
        else:
            rows = row + tl.arange(0, TOKENS)
            exists = rows < num_rows
        ks = k + tl.arange(0, DEPTH)
        at = rows.to(tl.int64)[:, None] * (x_stride * UNIT) + ks[None, :]
        held = exists[:, None] & (ks < SIZE_IN)[None, :]
        value = tl.load(x + at, mask=held, other=0.0)
    return value


@triton.jit
def columns_of(column, SIZE: tl.constexpr, PAIRED: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns from `column` on; PAIRED: half of them, and their partners in the other half of SIZE.

    Also whether each exists.
    """
    each = tl.arange(0, COLUMNS)
    if PAIRED:
        columns = column + each % (COLUMNS // 2)
        inside = columns < SIZE // 2
        columns += each // (COLUMNS // 2) * (SIZE // 2)
    else:
        columns = column + each
        inside = columns < SIZE
    return columns, inside


@triton.jit
def load_matrix(
    matrix,
    expert,
    column,
    k,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    PAIRED: tl.constexpr,
    TMA: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[COLUMNS,DEPTH] of M[expert], stored as [SIZE_OUT,SIZE_IN] if OUT_MAJOR, else transposed.

    The descriptor of PAIRED columns splits SIZE_OUT into its halves.
    """
    if TMA:
        if PAIRED:
            if OUT_MAJOR:
                value = matrix.load([expert, 0, column, k]).reshape(COLUMNS, DEPTH)
            else:
                value = matrix.load([expert, k, 0, column]).reshape(DEPTH, COLUMNS).T
        else:
            if OUT_MAJOR:
                value = matrix.load([expert, column, k]).reshape(COLUMNS, DEPTH)
            else:
                value = matrix.load([expert, k, column]).reshape(DEPTH, COLUMNS).T
    else:
        columns, inside = columns_of(column, SIZE_OUT, PAIRED, COLUMNS)
        ks = k + tl.arange(0, DEPTH)
        base = matrix + expert.to(tl.int64) * SIZE_IN * SIZE_OUT
        if OUT_MAJOR:
            at = columns.to(tl.int64)[:, None] * SIZE_IN + ks[None, :]
        else:
            at = ks.to(tl.int64)[None, :] * SIZE_OUT + columns[:, None]
        held = inside[:, None] & (ks < SIZE_IN)[None, :]
        value = tl.load(base + at, mask=held, other=0.0)
    return value


@triton.jit
def product_tile(
    x,
    matrix,
    bias_ptr,
    expert,
    row,
    tokens,
    column,
    num_rows,
    x_stride,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    PAIRED: tl.constexpr,
    X_TMA: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[TOKENS,COLUMNS] x[tokens], or x[row : row + TOKENS], times M[expert]^T (+ bias), in fp32.

    Columns are those of `columns_of`. TOKENS_LAST puts few tokens on the side of the MMA that may be narrow.
    """
    acc = tl.zeros((COLUMNS, TOKENS) if TOKENS_LAST else (TOKENS, COLUMNS), tl.float32)
    for k in range(0, SIZE_IN, DEPTH):
        m = load_matrix(
            matrix, expert, column, k, SIZE_IN, SIZE_OUT, OUT_MAJOR, PAIRED, TMA, COLUMNS, DEPTH
        )
        xs = load_rows(x, row, tokens, k, num_rows, x_stride, SIZE_IN, X_TMA, UNIT, TOKENS, DEPTH)
        if TOKENS_LAST:
            acc = tl.dot(m, xs.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(xs, m.T, acc, input_precision=PRECISION)
    if TOKENS_LAST:
        acc = acc.T
    if bias_ptr is not None:
        columns, inside = columns_of(column, SIZE_OUT, PAIRED, COLUMNS)
        at = bias_ptr + expert.to(tl.int64) * SIZE_OUT + columns
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def store_tile(out_ptr, acc, row, valid, end, column, SIZE, width):
    """Rows from `valid` on are zeros; none from `end` on, and no column from `width` on, is written."""
    rows = row + tl.arange(0, acc.shape[0])
    columns = column + tl.arange(0, acc.shape[1])
    acc = tl.where((rows < valid)[:, None], acc, 0.0)
    at = rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    held = (rows < end)[:, None] & (columns < width)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def zero_rows_after(out_ptr, first, num_rows, SIZE: tl.constexpr):
    """Zero the rows from `first` on, shared out over the programs."""
    for row in range(first + tl.program_id(0), num_rows, tl.num_programs(0)):
        at = (row + tl.arange(0, 1)).to(tl.int64) * SIZE
        for start in range(0, SIZE, 1024):
            columns = start + tl.arange(0, 1024)
            zeros = tl.zeros((1024,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + at + columns, zeros, mask=columns < SIZE)


@triton.jit
def load_group(
    x,
    first,
    count,
    row,
    column,
    x_stride,
    SIZE: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[DEPTH,COLUMNS] from row `row` of a group of `count` rows; zero past its end.

    A descriptor bounds whole tensors. One made by `create_ragged_descriptor` ends where the second index
    says: element c of its third dimension is row second + c - 2^30, and c stays below 2^30.
    """
    if TMA:
        bound = tl.full((), 1 << 30, tl.int32)
        value = x.load([bound, first + count, bound - count + row, column]).reshape(DEPTH, COLUMNS)
    else:
        rows = row + tl.arange(0, DEPTH)
        columns = column + tl.arange(0, COLUMNS)
        at = (first + rows).to(tl.int64)[:, None] * (x_stride * UNIT) + columns[None, :]
        held = (rows < count)[:, None] & (columns < SIZE)[None, :]
        value = tl.load(x + at, mask=held, other=0.0)
    return value


@triton.jit(do_not_specialize=["stride"])
def bias_gradient_kernel(
    offsets_ptr,
    counts_ptr,
    d_out_ptr,
    weight_ptr,
    d_bias_ptr,
    stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column_tiles: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    expert = tl.program_id(0) // column_tiles
    columns = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(offsets_ptr + expert).to(tl.int64)
    count = tl.load(counts_ptr + expert).to(tl.int32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        held = (rows < count)[:, None] & (columns < SIZE)[None, :]
        at = d_out_ptr + (first + rows)[:, None] * stride + columns[None, :]
        value = tl.load(at, mask=held, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + first + rows, mask=rows < count, other=0.0)
            value *= weight.to(tl.float32)[:, None]
        acc += value
    at = d_bias_ptr + expert.to(tl.int64) * SIZE + columns
    tl.store(at, tl.sum(acc, 0).to(d_bias_ptr.dtype.element_ty), mask=columns < SIZE)
