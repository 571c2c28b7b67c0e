"""Prefill on Hopper, with the text rule. A program has one tile of packed query rows.

All keys come from pages, or all come from the fresh tensors. Head dim 512 uses 64 rows and the three roles of
`hopper_parts.py`. Head dim 256 uses 128 rows, 64 for each of two warpgroups. Both warpgroups score and multiply. While the
values of tile i are multiplied, the scores of tile i + 1 go through the softmax.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from culet.kernels.triton.attention.hopper_parts import (
    KEYS,
    allocate,
    describe,
    fetch_tile,
    page_matrix,
    pages_fit,
    score,
    score_tiles,
    softmax,
    value_tiles,
)
from culet.kernels.triton.attention.key_tiles import UNSEEN
from culet.kernels.triton.launch import Launch
from culet.kernels.types import PagedKV


@gluon.jit
def _span(TILES, num_kv_heads, WINDOW: gl.constexpr, QUERIES: gl.constexpr, BN: gl.constexpr, PAGED: gl.constexpr):
    """Return this program's row, queries, first token and position, the position of key tile 0, and the visible key tiles."""
    tile = TILES + gl.program_id(0) // num_kv_heads * 5
    row = gl.load(tile)
    query_begin = gl.load(tile + 1)
    begin = gl.load(tile + 2)
    num_queries = gl.load(tile + 3)
    context = gl.load(tile + 4)
    origin = context
    if PAGED:
        origin = context * 0  # Only groups without a window read pages here. Their tables begin at 0.
    hi = context + gl.minimum(query_begin + QUERIES, num_queries)
    lo = origin
    if WINDOW > 0:
        lo = gl.maximum(context + query_begin - WINDOW + 1, origin)
    return row, query_begin, num_queries, begin, context, origin, (lo - origin) // BN, (hi - origin + BN - 1) // BN


@gluon.jit
def _fetch(
    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
    TILES, PAGES, num_kv_heads, stride_table, page_rows,
    HEAD: gl.constexpr, ROT: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr,
    QUERIES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Run the fetching warp."""
    head = gl.program_id(0) % num_kv_heads
    row, query_begin, num_queries, begin, context, origin, tile_lo, tile_hi = _span(
        TILES, num_kv_heads, WINDOW, QUERIES, BN, PAGED
    )
    HALF: gl.constexpr = BN // 2
    last_half = (context + gl.minimum(query_begin + QUERIES, num_queries) - origin - 1) // HALF
    for tile in range(tile_lo, tile_hi):
        if PAGED:
            page = gl.load(PAGES + row * stride_table + tile * BN // PAGE)
            y = page * page_rows + head * PAGE + tile * BN % PAGE
            y_half = y
            x = 0
            if PAGE % BN != 0:
                # There may be no page after the last key. Its half is then fetched twice, and the second copy is masked.
                half = gl.minimum(tile * 2 + 1, last_half)
                page = gl.load(PAGES + row * stride_table + half * HALF // PAGE)
                y_half = page * page_rows + head * PAGE + half * HALF % PAGE
        else:
            y = begin + tile * BN
            y_half = y
            x = head * (HEAD + ROT)
        fetch_tile(
            K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v, tile - tile_lo, y, y_half, x,
            ROT, BN, HEAD, STAGES,
        )  # fmt: skip


@gluon.jit
def _packed_rows(
    head, query_begin, num_queries, begin, stride, M: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, LOAD: gl.constexpr
):
    """Return the element offsets [M, HEAD] of packed rows in a tensor [T, N, H], and which rows are valid.

    Rows that are not valid repeat the last token.
    """
    packed = gl.arange(0, M, gl.SliceLayout(1, LOAD))
    query = query_begin + packed // GROUP
    token = (begin + gl.minimum(query, num_queries - 1)).to(gl.int64)
    offset = token * stride + (head * GROUP + packed % GROUP) * HEAD
    column = gl.arange(0, HEAD, gl.SliceLayout(0, LOAD))
    return gl.expand_dims(offset, 1) + gl.expand_dims(column, 0), gl.expand_dims(query < num_queries, 1)


@gluon.jit
def _values(
    q_smem, v_smem, r_smem, row_smem, full, empty_v, ready, taken,
    Q, OUT, TILES, num_kv_heads, stride_q_token, stride_out_token,
    GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, WINDOW: gl.constexpr,
    M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Run the multiplying warpgroups at head dim 512. They also load the queries and store the output."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD // 4, 16])  # wider layouts need more registers
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    head = gl.program_id(0) % num_kv_heads
    _, query_begin, num_queries, begin, context, origin, tile_lo, tile_hi = _span(
        TILES, num_kv_heads, WINDOW, M // GROUP, BN, PAGED
    )
    offset, _ = _packed_rows(head, query_begin, num_queries, begin, stride_q_token, M, GROUP, HEAD, LOAD)
    q_smem.store(gl.load(Q + offset))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready.index(2), count=1)
    written = context + num_queries - (origin + (tile_hi - 1) * BN)
    o = value_tiles(
        v_smem, r_smem, row_smem, full, empty_v, ready, taken, tile_hi - tile_lo, written, HEAD, ROT, M, BN, STAGES, O_LAYOUT
    )
    # The output goes through the queries' memory, which is free now, so that whole rows are stored.
    q_smem.store(o.to(Q.dtype.element_ty))
    offset, is_row = _packed_rows(head, query_begin, num_queries, begin, stride_out_token, M, GROUP, HEAD, LOAD)
    gl.store(OUT + offset, q_smem.load(LOAD), mask=is_row)


@gluon.jit
def _scores(
    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, empty_k, ready, taken, TILES, num_kv_heads,
    GROUP: gl.constexpr, ROT: gl.constexpr, WINDOW: gl.constexpr,
    M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Run the scoring warpgroup at head dim 512."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    _, query_begin, num_queries, _, context, origin, tile_lo, tile_hi = _span(
        TILES, num_kv_heads, WINDOW, M // GROUP, BN, PAGED
    )
    last = context + gl.minimum(query_begin + gl.arange(0, M, gl.SliceLayout(1, S_LAYOUT)) // GROUP, num_queries - 1)
    score_tiles(
        q_smem, k_smem, v_smem, r_smem, row_smem, full_k, empty_k, ready, taken, last, origin + tile_lo * BN, tile_hi - tile_lo,
        WINDOW, ROT, M, BN, STAGES, S_LAYOUT,
    )  # fmt: skip


class _Sums(NamedTuple):
    """The state of a computing warpgroup."""

    m: Any  # largest score times log2 e. `m` and `total` are one tile ahead of `count`.
    total: Any  # sum of the weights
    o: Any  # weighted values
    p_operand: Any  # weights of the next tile
    count: Any  # tiles whose values are in `o`


@gluon.jit
def _step(
    q_smem, k_smem, v_smem, row_smem, full_k, full_v, empty_k, empty_v, sums, last, key,
    HALF: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply the values of tile `count` while tile count + 1 is scored and goes through the softmax."""
    m, total, o, p_operand, count = sums
    stage = count % STAGES
    after = (count + 1) % STAGES
    mbarrier.wait(full_k.index(after), ((count + 1) // STAGES) & 1)
    s = score(q_smem, k_smem, v_smem, v_smem, after, S_LAYOUT, M, BN, 0)
    o = o * gl.expand_dims(row_smem.index(2 * HALF + 1).load(gl.SliceLayout(1, O_LAYOUT)), 1)
    mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
    o_next = warpgroup_mma(p_operand, v_smem.index(stage), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    gl.thread_barrier()
    mbarrier.arrive(empty_k.index(after), count=1)
    p, m, total, shrink = softmax(s, m, total, last, key, MASKED, WINDOW)
    p_next = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    # These stores keep the assembler from moving work, because it does not move stores across the fence. The stored sum is
    # never read. It keeps the softmax next to the multiplication of the values. The stored factor is read back after the next
    # scores are issued. It keeps the scaling of o next to them.
    row_smem.index(2 * HALF).store(total)
    row_smem.index(2 * HALF + 1).store(shrink)
    fence_async_shared()
    o = warpgroup_mma_wait(0, deps=(o_next,))
    gl.thread_barrier()
    mbarrier.arrive(empty_v.index(stage), count=1)
    return _Sums(m, total, o, p_next, count + 1)


@gluon.jit
def _first_tile(
    q_smem, k_smem, v_smem, row_smem, full_k, empty_k, last, key,
    HALF: gl.constexpr, WINDOW: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, HEAD: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Score the first tile and apply the softmax."""
    m = gl.full([M], UNSEEN, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    o = gl.zeros([M, HEAD], gl.float32, O_LAYOUT)
    mbarrier.wait(full_k.index(0), 0)
    s = score(q_smem, k_smem, v_smem, v_smem, 0, S_LAYOUT, M, BN, 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    gl.thread_barrier()
    mbarrier.arrive(empty_k.index(0), count=1)
    p, m, total, shrink = softmax(s, m, total, last, key, True, WINDOW)
    p_operand = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    row_smem.index(2 * HALF + 1).store(shrink)
    return _Sums(m, total, o, p_operand, 0)


@gluon.jit
def _last_values(
    v_smem, row_smem, full_v, ready, sums, first_key, end, num_tiles,
    HALF: gl.constexpr, HEAD: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, O_LAYOUT: gl.constexpr, LOAD: gl.constexpr,
):  # fmt: skip
    """Multiply the values of the last tile and return the rows' attention. Keys from position `end` on belong to other rows."""
    _, total, o, p_operand, count = sums
    o = o * gl.expand_dims(row_smem.index(2 * HALF + 1).load(gl.SliceLayout(1, O_LAYOUT)), 1)
    stage = count % STAGES
    mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
    written = end - (first_key + (num_tiles - 1) * BN)
    if written < BN:  # Keys of other rows follow. A probability of 0 times NaN would be NaN.
        if HALF == 0:
            is_written = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(1, LOAD)) < written, 1)
            for column in gl.static_range(0, HEAD, 64):
                part = v_smem.index(stage).slice(column, 64, dim=1)
                part.store(gl.where(is_written, part.load(LOAD), 0.0).to(v_smem.dtype))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(0), count=1)
        else:
            mbarrier.wait(ready.index(0), 0)
    o = warpgroup_mma(p_operand, v_smem.index(stage), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    return o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT)), 1)


@gluon.jit
def _whole_tiles(
    query_begin, num_queries, context, first_key, num_tiles, QUERIES: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr
):
    """Return the range of tiles after the first that every row sees whole.

    These tiles need no mask. Masks are expensive here, because a thread has 32 scores.
    """
    begin = 1
    if WINDOW > 0:
        last_seen = context + gl.minimum(query_begin + QUERIES, num_queries) - 1
        begin = gl.maximum((gl.maximum(last_seen - WINDOW + 1 - first_key, 0) + BN - 1) // BN, 1)
    begin = gl.minimum(begin, num_tiles)
    first_seen = context + gl.minimum(query_begin, num_queries - 1)
    return begin, gl.minimum(gl.maximum((first_seen + 1 - first_key) // BN, begin), num_tiles)


@gluon.jit
def _compute(
    q_both, k_smem, v_smem, row_smem, full_k, full_v, empty_k, empty_v, ready,
    Q, OUT, TILES, num_kv_heads, stride_q_token, stride_out_token,
    HALF: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, WINDOW: gl.constexpr,
    M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Run one of the two computing warpgroups at head dim 256. It has the M rows of the first or second half of the tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    QUERIES: gl.constexpr = M // GROUP
    q_smem = q_both.index(HALF)
    head = gl.program_id(0) % num_kv_heads
    _, query_begin, num_queries, begin, context, origin, tile_lo, tile_hi = _span(
        TILES, num_kv_heads, WINDOW, 2 * QUERIES, BN, PAGED
    )
    query_begin += HALF * QUERIES
    offset, _ = _packed_rows(head, query_begin, num_queries, begin, stride_q_token, M, GROUP, HEAD, LOAD)
    q_smem.store(gl.load(Q + offset))
    fence_async_shared()
    last = context + gl.minimum(query_begin + gl.arange(0, M, gl.SliceLayout(1, S_LAYOUT)) // GROUP, num_queries - 1)
    first_key = origin + tile_lo * BN
    num_tiles = tile_hi - tile_lo
    whole_begin, whole_end = _whole_tiles(query_begin, num_queries, context, first_key, num_tiles, QUERIES, WINDOW, BN)

    key = first_key + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
    sums = _first_tile(
        q_smem, k_smem, v_smem, row_smem, full_k, empty_k, last, key, HALF, WINDOW, M, BN, HEAD, S_LAYOUT, O_LAYOUT
    )
    for _ in range(1, whole_begin):
        key += BN
        sums = _step(
            q_smem, k_smem, v_smem, row_smem, full_k, full_v, empty_k, empty_v, sums, last, key,
            HALF, True, WINDOW, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    for _ in range(whole_begin, whole_end):
        sums = _step(
            q_smem, k_smem, v_smem, row_smem, full_k, full_v, empty_k, empty_v, sums, last, key,
            HALF, False, WINDOW, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    key += (whole_end - whole_begin) * BN
    for _ in range(whole_end, num_tiles):
        key += BN
        sums = _step(
            q_smem, k_smem, v_smem, row_smem, full_k, full_v, empty_k, empty_v, sums, last, key,
            HALF, True, WINDOW, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    o = _last_values(
        v_smem, row_smem, full_v, ready, sums, first_key, context + num_queries, num_tiles,
        HALF, HEAD, BN, STAGES, O_LAYOUT, LOAD,
    )  # fmt: skip
    q_smem.store(o.to(Q.dtype.element_ty))
    offset, is_row = _packed_rows(head, query_begin, num_queries, begin, stride_out_token, M, GROUP, HEAD, LOAD)
    gl.store(OUT + offset, q_smem.load(LOAD), mask=is_row)


@gluon.jit(do_not_specialize=["num_kv_heads", "stride_table", "page_rows"])
def _prefill_hopper(
    K_DESC, V_DESC, R_DESC, Q, OUT, TILES, PAGES, num_kv_heads, stride_table, page_rows, stride_q_token, stride_out_token,
    GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Process one query tile and KV head.

    If ROT > 0, rows are latent, v_rot | nope | k_rot, and V_DESC covers their first HEAD columns.
    """
    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, ready, taken = allocate(
        Q.dtype.element_ty, M, BN, HEAD, ROT, STAGES
    )
    if M == 64:
        full = full_k if ROT > 0 else full_v
        gl.warp_specialize(
            [
                (_values, (
                    q_smem, v_smem, r_smem, row_smem, full, empty_v, ready, taken, Q, OUT, TILES, num_kv_heads,
                    stride_q_token, stride_out_token, GROUP, HEAD, ROT, WINDOW, M, BN, STAGES, PAGED,
                )),
                (_scores, (
                    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, empty_k, ready, taken, TILES, num_kv_heads,
                    GROUP, ROT, WINDOW, M, BN, STAGES, PAGED,
                )),
                (_fetch, (
                    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
                    TILES, PAGES, num_kv_heads, stride_table, page_rows,
                    HEAD, ROT, PAGE, WINDOW, M // GROUP, BN, STAGES, PAGED,
                )),
            ],
            [4, 1],
            [128, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    q_smem, k_smem, v_smem, row_smem, full_k, full_v, empty_k, empty_v, ready, Q, OUT, TILES, num_kv_heads,
                    stride_q_token, stride_out_token, 0, GROUP, HEAD, WINDOW, M // 2, BN, STAGES, PAGED,
                )),
                (_compute, (
                    q_smem, k_smem, v_smem, row_smem, full_k, full_v, empty_k, empty_v, ready, Q, OUT, TILES, num_kv_heads,
                    stride_q_token, stride_out_token, 1, GROUP, HEAD, WINDOW, M // 2, BN, STAGES, PAGED,
                )),
                (_fetch, (
                    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
                    TILES, PAGES, num_kv_heads, stride_table, page_rows,
                    HEAD, ROT, PAGE, WINDOW, M // GROUP, BN, STAGES, PAGED,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def hopper_prefill_rows(head_dim: int) -> int:
    """Return the number of packed query rows of a tile."""
    return 64 if head_dim == 512 else 128


def hopper_prefill_supports(kv: PagedKV, group: int, *, fresh: bool) -> bool:
    """Return whether this kernel supports the shape, with all keys from fresh tensors or all from pages.

    Keys may come from pages only in groups without a window.
    """
    if kv.head_dim not in (256, 512) or hopper_prefill_rows(kv.head_dim) % group or (kv.is_latent and kv.head_dim != 512):
        return False
    return fresh or (kv.window is None and pages_fit(kv, KEYS // 2))


def hopper_prefill_launch(
    q_TNH: Tensor, kv: PagedKV, tiles_X5: Tensor, *, fresh: tuple[Tensor, Tensor] | None, out_TNH: Tensor
) -> Launch:
    """Return the launch for tiles (from `query_tiles`) whose keys all come from `fresh`, or all from pages if it is None."""
    head_dim, num_kv_heads, rotated = kv.head_dim, kv.num_kv_heads, kv.width - kv.head_dim
    assert q_TNH.stride(1) == out_TNH.stride(1) == head_dim, "heads of a token must be contiguous"
    if fresh is None:
        keys, values = page_matrix(kv.planes[0]), page_matrix(kv.planes[-1])
    else:
        # With a latent, v_TGH begins where the whole rows begin.
        whole = (fresh[1], fresh[1]) if rotated else fresh
        assert all(part.stride(1) == kv.width for part in whole), "fresh heads of a token must be contiguous"
        keys, values = (part.as_strided((part.shape[0], num_kv_heads * kv.width), (part.stride(0), 1)) for part in whole)
    in_halves = fresh is None and kv.page_tokens % KEYS != 0
    v_desc = describe(values, head_dim, in_halves=in_halves)
    arguments: dict[str, Any] = {
        "K_DESC": v_desc if rotated else describe(keys, head_dim, in_halves=in_halves),
        "V_DESC": v_desc,
        "R_DESC": describe(values, rotated, in_halves=in_halves) if rotated else v_desc,
        "Q": q_TNH,
        "OUT": out_TNH,
        "TILES": tiles_X5,
        "PAGES": kv.pages_BP,
        "num_kv_heads": num_kv_heads,
        "stride_table": kv.pages_BP.stride(0),
        "page_rows": kv.planes.stride(1) // kv.width,
        "stride_q_token": q_TNH.stride(0),
        "stride_out_token": out_TNH.stride(0),
        "GROUP": q_TNH.shape[1] // num_kv_heads,
        "HEAD": head_dim,
        "ROT": rotated,
        "PAGE": kv.page_tokens,
        "WINDOW": kv.window or 0,
        "M": hopper_prefill_rows(head_dim),
        "BN": KEYS,
        "STAGES": 2 if rotated or head_dim == 256 else 1,
        "PAGED": fresh is None,
    }
    return Launch(_prefill_hopper, (tiles_X5.shape[0] * num_kv_heads,), arguments, {"num_warps": 8 if head_dim == 512 else 4})
