"""How the kernels of several ranks exchange rows of one token, without leaving the kernel.

A rank writes its row to memory that all ranks can reach, tells the others, waits for them, and reads their rows. See
`PeerBuffers`. Every row of a reduction has two places, used in turn. When a rank writes to a place again, it has met the others
once since then, so they have read what was there before.

Signals are plain stores and loads of the whole system's scope, because GPUs that are connected by PCIe have no atomic
operations on each other's memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

_IS_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))  # Triton's interpreter has no assembly


@triton.jit
def _address(ADDRESSES, index, element_type: tl.constexpr):
    return tl.load(ADDRESSES + index).to(tl.pointer_type(element_type))


@triton.jit
def _signal(flag, turn):
    """Store `turn` after everything that the program has written. One thread does it."""
    if _IS_INTERPRETED:
        tl.atomic_xchg(flag, turn, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .pred is_first;
                .reg .u32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 is_first, thread, 0;
                @is_first st.release.sys.global.u32 [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r", [flag, turn], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _wait(flag, turn):
    """Wait until a flag equals `turn`. One thread polls. After the next barrier, all see what was written before it."""
    if _IS_INTERPRETED:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != turn:
            pass
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .pred is_waiting;
                .reg .u32 seen;
                mov.u32 seen, %tid.x;
                setp.ne.u32 is_waiting, seen, 0;
                @is_waiting bra done;
            again:
                ld.acquire.sys.global.u32 seen, [$1];
                setp.ne.u32 is_waiting, seen, $2;
                @is_waiting bra again;
            done:
                mov.u32 $0, 0;
            }""",
            "=r,l,r", [flag, turn], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def next_place(TURN, token, num_rows):
    """Return the number of this exchange of a row, and the place for it."""
    turn = tl.load(TURN + token) + 1
    return turn, ((turn & 1) * num_rows + token).to(tl.int64)


@triton.jit
def write_row(
    ADDRESSES, row, place, rank, cols, inside,
    stride, element_type: tl.constexpr, NUM_RANKS: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """Write this rank's row to its own buffer, or with PUSH to the buffers of all ranks."""
    offset = (place * NUM_RANKS + rank) * stride
    for peer in tl.static_range(NUM_RANKS if PUSH else 1):
        buffer = _address(ADDRESSES, peer if PUSH else rank, element_type)
        tl.store(buffer + offset + cols, row.to(element_type), mask=inside)


@triton.jit
def meet(ADDRESSES, TURN, token, turn, place, rank, NUM_RANKS: tl.constexpr):
    """Tell all ranks that this rank's rows are written, and wait until theirs are."""
    tl.debug_barrier()  # all threads have written
    for peer in tl.static_range(NUM_RANKS):
        _signal(_address(ADDRESSES, NUM_RANKS + peer, tl.int32) + place * NUM_RANKS + rank, turn)
    flags = _address(ADDRESSES, NUM_RANKS + rank, tl.int32) + place * NUM_RANKS
    for peer in tl.static_range(NUM_RANKS):
        _wait(flags + peer, turn)
    tl.debug_barrier()  # all threads have seen it
    tl.store(TURN + token, turn)


@triton.jit
def read_sum(
    ADDRESSES, place, rank, cols, inside,
    stride, element_type: tl.constexpr, NUM_RANKS: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """Return the float32 sum of all ranks' rows. The order is that of the ranks, so all of them get the same bits."""
    total = tl.zeros(cols.shape, tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        buffer = _address(ADDRESSES, rank if PUSH else peer, element_type)
        row = buffer + (place * NUM_RANKS + peer) * stride + cols
        # Another GPU wrote it, so it must not come from this one's nearest cache.
        total += tl.load(row, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total
