"""Barriers by which the warps of a Hopper kernel hand tiles to each other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def make_ring(STAGES: gl.constexpr, NUM_READERS: gl.constexpr, NUM_WRITERS: gl.constexpr = 1):
    """Return the barriers of a ring of tiles: whether a stage is full, and whether all readers have emptied it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=NUM_WRITERS)
        mbarrier.init(empty.index(stage), count=NUM_READERS)
    fence_async_shared()
    return full, empty
