"""The weight gradient for Hopper, in Gluon: one warp loads, and two consumers take whole tiles in turns.

A sum over the rows of one expert may be short, so that storing its tile takes as long as multiplying: one
consumer stores while the other one multiplies.

Phases. As in `hopper`, with steps of DEPTH rows: tiles of an expert have as many as its rows need, none if
it has no rows. Consumer c takes the tiles c, c + 2, ... of a program, and counts the steps of the others.
Its tile j waits for `turn[c]` to complete j + 1 - (c == 0) times; each completion is the other consumer's
last issued MMA, so a program of n tiles leaves at most one completion that nobody awaits.

The first step stands before the loop over steps. Were `before` to enter the loop with the value of `stage`,
Triton 3.6 and 3.7 would take it for constant, and stages would never be freed.
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

from tokenyard.kernels.device.hopper import next_stage, tile_of


@gluon.jit
def _group(offsets_ptr, counts_ptr, index, A_TILES: gl.constexpr, B_TILES: gl.constexpr):
    """Expert, its first row and its rows, of a tile."""
    expert = index // (A_TILES * B_TILES)
    first = gl.load(offsets_ptr + expert).to(gl.int32)
    return expert, first, gl.load(counts_ptr + expert).to(gl.int32)


@gluon.jit
def _load(
    offsets_ptr,
    counts_ptr,
    a,
    b,
    a_ring,
    b_ring,
    full,
    empty,
    NUM_EXPERTS: gl.constexpr,
    A_TILES: gl.constexpr,
    B_TILES: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    total: gl.constexpr = NUM_EXPERTS * A_TILES * B_TILES
    stage, phase = 0, 1
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _, first, count = _group(offsets_ptr, counts_ptr, index, A_TILES, B_TILES)
        a_tile, b_tile = tile_of(index % (A_TILES * B_TILES), A_TILES, B_TILES, GROUP)
        bound = 1 << 30
        for row in range(0, count, DEPTH):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, (ROWS + COLUMNS) * DEPTH * 2)
            at = [bound, first + count, bound - count + row, a_tile * ROWS]
            tma.async_copy_global_to_shared(a, at, ready, a_ring.index(stage))
            at = [bound, first + count, bound - count + row, b_tile * COLUMNS]
            tma.async_copy_global_to_shared(b, at, ready, b_ring.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _factors(a_ring, b_ring, stage, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr):
    """[ROWS,DEPTH] and [DEPTH,COLUMNS] of a stage."""
    a_rows = a_ring.index(stage).reshape([DEPTH, ROWS]).permute([1, 0])
    return a_rows, b_ring.index(stage).reshape([DEPTH, COLUMNS])


@gluon.jit
def _multiply(
    offsets_ptr,
    counts_ptr,
    out,
    a_ring,
    b_ring,
    full,
    empty,
    turn,
    buffers,
    WHO: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    A_TILES: gl.constexpr,
    B_TILES: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Consumer WHO, of every other tile."""
    total: gl.constexpr = NUM_EXPERTS * A_TILES * B_TILES
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    stride = gl.num_programs(0)
    start = gl.program_id(0) + WHO * stride
    step = 0
    if WHO == 1:
        _, _, others = _group(offsets_ptr, counts_ptr, gl.program_id(0), A_TILES, B_TILES)
        step = (others + DEPTH - 1) // DEPTH
    waits = WHO ^ 1
    buffer = buffers.index(WHO)
    for index in range(start, total, 2 * stride):
        expert, _, count = _group(offsets_ptr, counts_ptr, index, A_TILES, B_TILES)
        a_tile, b_tile = tile_of(index % (A_TILES * B_TILES), A_TILES, B_TILES, GROUP)
        steps = (count + DEPTH - 1) // DEPTH
        stage, phase = step % STAGES, step // STAGES % 2

        mbarrier.wait(turn.index(WHO), waits)
        waits ^= 1
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        if steps > 0:
            mbarrier.wait(full.index(stage), phase)
            a_rows, b_rows = _factors(a_ring, b_ring, stage, ROWS, COLUMNS, DEPTH)
            partial = warpgroup_mma(a_rows, b_rows, acc, use_acc=False, is_async=True)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
            for _ in range(1, steps):
                mbarrier.wait(full.index(stage), phase)
                a_rows, b_rows = _factors(a_ring, b_ring, stage, ROWS, COLUMNS, DEPTH)
                partial = warpgroup_mma(a_rows, b_rows, partial, is_async=True)
                partial = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(partial,)))
                mbarrier.arrive(empty.index(before))
                before = stage
                stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.arrive(turn.index(1 - WHO))
            acc = warpgroup_mma_wait(0, deps=(partial,))
            mbarrier.arrive(empty.index(before))
        else:
            mbarrier.arrive(turn.index(1 - WHO))

        tma.store_wait(0)
        buffer.reshape([ROWS, COLUMNS]).store(acc.to(out.dtype))
        fence_async_shared()
        where = [expert, a_tile * ROWS, b_tile * COLUMNS]
        tma.async_copy_shared_to_global(out, where, buffer)

        step += steps
        if index + stride < total:
            _, _, others = _group(offsets_ptr, counts_ptr, index + stride, A_TILES, B_TILES)
            step += (others + DEPTH - 1) // DEPTH
    tma.store_wait(0)


@gluon.jit
def weight_gradient_kernel(
    offsets_ptr,
    counts_ptr,
    a,
    b,
    out,
    NUM_EXPERTS: gl.constexpr,
    SIZE_A: gl.constexpr,
    SIZE_B: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out [E,SIZE_A,SIZE_B]; a and b are ragged descriptors of [R,SIZE_A] and [R,SIZE_B]."""
    a_tiles: gl.constexpr = (SIZE_A + ROWS - 1) // ROWS
    b_tiles: gl.constexpr = (SIZE_B + COLUMNS - 1) // COLUMNS
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, DEPTH, ROWS], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, DEPTH, COLUMNS], b.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2, 1, ROWS, COLUMNS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for who in gl.static_range(2):
        mbarrier.init(turn.index(who), count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    offsets_ptr, counts_ptr, out, a_ring, b_ring, full, empty, turn, buffers, 0,
                    NUM_EXPERTS, a_tiles, b_tiles, GROUP, ROWS, COLUMNS, DEPTH, STAGES,
                ),
            ),
            (
                _multiply,
                (
                    offsets_ptr, counts_ptr, out, a_ring, b_ring, full, empty, turn, buffers, 1,
                    NUM_EXPERTS, a_tiles, b_tiles, GROUP, ROWS, COLUMNS, DEPTH, STAGES,
                ),
            ),
            (
                _load,
                (
                    offsets_ptr, counts_ptr, a, b, a_ring, b_ring, full, empty,
                    NUM_EXPERTS, a_tiles, b_tiles, GROUP, ROWS, COLUMNS, DEPTH, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
