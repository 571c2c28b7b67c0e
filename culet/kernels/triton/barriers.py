"""How the warps of a Hopper kernel hand tiles to each other and to global memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def make_ring(STAGES: gl.constexpr, NUM_READERS: gl.constexpr, NUM_WRITERS: gl.constexpr = 1):
    """Return the barriers of a ring of tiles.

    The first says that all writers have filled a stage, the second that all readers have emptied it.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=NUM_WRITERS)
        mbarrier.init(empty.index(stage), count=NUM_READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def skip_tile(full, empty, count, NUM_STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Empty the stages of a tile that this reader does not need. `count` is the number of steps before it."""
    for step in range(NUM_STEPS):
        stage = (count + step) % STAGES
        mbarrier.wait(full.index(stage), ((count + step) // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def store_tile(Y, row, column, y_tile, y):
    """Start to store `y` through `y_tile` in shared memory, as soon as the store before it has read that memory."""
    tma.store_wait(0)
    gl.thread_barrier()
    y_tile.store(y)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(Y, [row, column], y_tile)
