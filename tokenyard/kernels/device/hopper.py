"""The persistent grouped GEMM for Hopper, in Gluon: a warp that loads, and two groups of warps that multiply.

One warp copies tiles of x and of the matrix through descriptors into a ring of stages; two consumers of
four warps each multiply half of a tile's rows out of the ring, round the result into a buffer of their own,
and leave the copy to memory to the TMA, which stops at the end of an expert's rows by itself. The ring fills
for the next tile meanwhile.

Phases. Step s of a program (all k of all its tiles, in order) uses stage s % STAGES in round s // STAGES.
`full` and `empty` of a stage each complete once a round, in this order, and nobody runs a round ahead: the
producer waits for `empty` of the round before, both consumers for `full` of this round.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tokenyard.kernels.device import gemm
from tokenyard.kernels.device.activation import slopes

tile_of = gluon.jit(gemm.tile_of.fn)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@gluon.jit
def halves(tile):
    """Its left and its right columns; each thread holds a row's share of both."""
    parts = tile.reshape([tile.shape[0], 2, tile.shape[1] // 2])
    return gl.split(parts.permute([0, 2, 1]))


@gluon.jit
def _load(
    tiles_ptr,
    totals_ptr,
    x,
    matrix,
    x_ring,
    matrix_ring,
    full,
    empty,
    SIZE_IN: gl.constexpr,
    COLUMN_TILES: gl.constexpr,
    OUT_MAJOR: gl.constexpr,
    PAIRED: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer: two boxes of ROWS rows of x, and one of the matrix, a stage."""
    nbytes: gl.constexpr = (2 * ROWS + COLUMNS) * DEPTH * 2
    token_tiles = gl.load(totals_ptr)
    stage, phase = 0, 1
    for index in range(gl.program_id(0), token_tiles * COLUMN_TILES, gl.num_programs(0)):
        token_tile, column_tile = tile_of(index, token_tiles, COLUMN_TILES, GROUP)
        expert = gl.load(tiles_ptr + token_tile * 4)
        row = gl.load(tiles_ptr + token_tile * 4 + 1)
        column = column_tile * (COLUMNS // 2 if PAIRED else COLUMNS)
        for k in range(0, SIZE_IN, DEPTH):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, nbytes)
            for part in gl.static_range(2):
                at = x_ring.index(stage * 2 + part)
                tma.async_copy_global_to_shared(x, [row + part * ROWS, k], ready, at)
            if PAIRED:
                where = [expert, 0, column, k]
            elif OUT_MAJOR:
                where = [expert, column, k]
            else:
                where = [expert, k, column]
            tma.async_copy_global_to_shared(matrix, where, ready, matrix_ring.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _factors(
    x_ring,
    matrix_ring,
    stage,
    WHO: gl.constexpr,
    OUT_MAJOR: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """[ROWS,DEPTH] and [DEPTH,COLUMNS] of a stage."""
    box = matrix_ring.index(stage)
    if OUT_MAJOR:
        m = box.reshape([COLUMNS, DEPTH]).permute([1, 0])
    else:
        m = box.reshape([DEPTH, COLUMNS])
    return x_ring.index(stage * 2 + WHO), m


@gluon.jit
def _store(out, buffer, value, row, end, column):
    """Round into the buffer, once it is free, and have it copied to rows below `end`."""
    tma.store_wait(0)
    at = buffer.reshape([buffer.shape[2], buffer.shape[3]])
    at.store(value.to(out.dtype))
    fence_async_shared()
    bound = 1 << 30
    tma.async_copy_shared_to_global(out, [bound, end, bound - end + row, column], buffer)


@gluon.jit
def _zero(out_ptr, first, end, column, COLUMNS: gl.constexpr, SIZE: gl.constexpr):
    """Zeros in COLUMNS columns of the rows from `first` to `end`."""
    each: gl.constexpr = COLUMNS // 32
    layout: gl.constexpr = gl.BlockedLayout([1, each], [1, 32], [4, 1], [1, 0])
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    rows = gl.arange(0, 4, gl.SliceLayout(1, layout))
    zeros = gl.zeros([4, COLUMNS], out_ptr.dtype.element_ty, layout)
    for start in range(first, end, 4):
        held = (start + rows < end)[:, None] & (columns < SIZE)[None, :]
        at = out_ptr + (start + rows).to(gl.int64)[:, None] * SIZE + columns[None, :]
        gl.store(at, zeros, mask=held)


@gluon.jit
def _multiply(
    tiles_ptr,
    totals_ptr,
    bias_ptr,
    z,
    z_ptr,
    a,
    a_ptr,
    x_ring,
    matrix_ring,
    full,
    empty,
    buffers,
    WHO: gl.constexpr,
    SIZE_IN: gl.constexpr,
    SIZE_OUT: gl.constexpr,
    COLUMN_TILES: gl.constexpr,
    KIND: gl.constexpr,
    FUNCTION: gl.constexpr,
    OUT_MAJOR: gl.constexpr,
    PAIRED: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Consumer WHO, of every tile's rows from WHO * ROWS on."""
    steps: gl.constexpr = (SIZE_IN + DEPTH - 1) // DEPTH
    half: gl.constexpr = COLUMNS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    token_tiles = gl.load(totals_ptr)
    stage, phase = 0, 0
    buffer = buffers.index(WHO)
    dtype: gl.constexpr = buffers.dtype
    for index in range(gl.program_id(0), token_tiles * COLUMN_TILES, gl.num_programs(0)):
        token_tile, column_tile = tile_of(index, token_tiles, COLUMN_TILES, GROUP)
        entry = tiles_ptr + token_tile * 4
        expert, row = gl.load(entry), gl.load(entry + 1) + WHO * ROWS
        valid, end = gl.load(entry + 2), gl.load(entry + 3)

        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        mbarrier.wait(full.index(stage), phase)
        xs, m = _factors(x_ring, matrix_ring, stage, WHO, OUT_MAJOR, COLUMNS, DEPTH)
        acc = warpgroup_mma(xs, m, acc, use_acc=False, is_async=True)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for _ in range(1, steps):
            mbarrier.wait(full.index(stage), phase)
            xs, m = _factors(x_ring, matrix_ring, stage, WHO, OUT_MAJOR, COLUMNS, DEPTH)
            acc = warpgroup_mma(xs, m, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(empty.index(before))
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before))

        if PAIRED:  # gate and up side by side, half a matrix apart
            left_at = column_tile * half
            right_at = left_at + SIZE_OUT // 2
        else:
            left_at = column_tile * COLUMNS
            right_at = left_at + half
        value = acc
        if bias_ptr is not None:
            each = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            columns = gl.where(each < half, left_at + each, right_at - half + each)
            at = bias_ptr + expert.to(gl.int64) * SIZE_OUT + columns
            value += gl.load(at, mask=columns < SIZE_OUT, other=0.0).to(gl.float32)[None, :]
        left, right = halves(value.to(dtype))
        zeros_from, zeros_to = gl.maximum(row, valid), gl.minimum(row + ROWS, end)
        if z is not None:
            _store(z, buffer, left, row, valid, left_at)
            _store(z, buffer, right, row, valid, right_at)
            _zero(z_ptr, zeros_from, zeros_to, left_at, half, SIZE_OUT)
            _zero(z_ptr, zeros_from, zeros_to, right_at, half, SIZE_OUT)
        if a is not None:
            if KIND == "":
                left, right = left.to(gl.float32), right.to(gl.float32)
                _store(a, buffer, slopes(left, left, KIND, FUNCTION)[0], row, valid, left_at)
                _store(a, buffer, slopes(right, right, KIND, FUNCTION)[0], row, valid, right_at)
                _zero(a_ptr, zeros_from, zeros_to, left_at, COLUMNS, SIZE_OUT)
            else:
                gate, up = left.to(gl.float32), right.to(gl.float32)
                _store(a, buffer, slopes(gate, up, KIND, FUNCTION)[0], row, valid, left_at)
                _zero(a_ptr, zeros_from, zeros_to, left_at, half, SIZE_OUT // 2)
    tma.store_wait(0)


@gluon.jit
def _zero_rows_after(out_ptr, first, num_rows, SIZE: gl.constexpr):
    """Zero the rows from `first` on, shared out over the programs."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    zeros = gl.zeros([1024], out_ptr.dtype.element_ty, layout)
    for row in range(first + gl.program_id(0), num_rows, gl.num_programs(0)):
        for start in range(0, SIZE, 1024):
            columns = start + gl.arange(0, 1024, layout)
            at = out_ptr + gl.cast(row, gl.int64) * SIZE + columns
            gl.store(at, zeros, mask=columns < SIZE)


@gluon.jit(do_not_specialize=["num_rows"])
def multiply_kernel(
    tiles_ptr,
    totals_ptr,
    x,
    matrix,
    bias_ptr,
    z,
    z_ptr,
    a,
    a_ptr,
    num_rows,
    SIZE_IN: gl.constexpr,
    SIZE_OUT: gl.constexpr,
    SIZE_A: gl.constexpr,
    KIND: gl.constexpr,
    FUNCTION: gl.constexpr,
    OUT_MAJOR: gl.constexpr,
    PAIRED: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """z [R,SIZE_OUT] the product and a [R,SIZE_A] its activation, or None; ragged descriptors and pointers.

    PAIRED: half of the columns of a tile are gate, half up, of a matrix described as [E,2,SIZE_A,SIZE_IN].
    """
    column_tiles: gl.constexpr = (SIZE_OUT + COLUMNS - 1) // COLUMNS
    out: gl.constexpr = z if a is None else a
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * 2, ROWS, DEPTH], x.layout)
    matrix_ring = gl.allocate_shared_memory(
        matrix.dtype,
        [STAGES] + matrix.block_shape,  # noqa: RUF005  (Gluon has no stars)
        matrix.layout,
    )
    buffers = gl.allocate_shared_memory(out.dtype, [2, 1, 1, ROWS, COLUMNS // 2], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles_ptr, totals_ptr, bias_ptr, z, z_ptr, a, a_ptr, x_ring, matrix_ring, full, empty,
                    buffers, 0, SIZE_IN, SIZE_OUT, column_tiles, KIND, FUNCTION, OUT_MAJOR, PAIRED,
                    GROUP, ROWS, COLUMNS, DEPTH, STAGES,
                ),
            ),
            (
                _multiply,
                (
                    tiles_ptr, totals_ptr, bias_ptr, z, z_ptr, a, a_ptr, x_ring, matrix_ring, full, empty,
                    buffers, 1, SIZE_IN, SIZE_OUT, column_tiles, KIND, FUNCTION, OUT_MAJOR, PAIRED,
                    GROUP, ROWS, COLUMNS, DEPTH, STAGES,
                ),
            ),
            (
                _load,
                (
                    tiles_ptr, totals_ptr, x, matrix, x_ring, matrix_ring, full, empty, SIZE_IN,
                    column_tiles, OUT_MAJOR, PAIRED, GROUP, ROWS, COLUMNS, DEPTH, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
    last = gl.load(totals_ptr + 1)
    if z_ptr is not None:
        _zero_rows_after(z_ptr, last, num_rows, SIZE_OUT)
    if a_ptr is not None:
        _zero_rows_after(a_ptr, last, num_rows, SIZE_A)
