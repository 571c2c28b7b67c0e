"""Prefill on Hopper: a tile of packed query rows per program, keys all from pages or all from the fresh tensors, text rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from culet.kernels.attention_inputs import PagedKV, RaggedRows
from culet.kernels.triton.hopper import KEYS, allocate, attend, describe, fetch_tile, page_matrix, pages_fit
from culet.kernels.triton.launch import Launch


@gluon.jit
def _span(
    TILES, ROW_BEGIN, CONTEXT, FIRST, num_kv_heads,
    WINDOW: gl.constexpr, QUERIES: gl.constexpr, BN: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """This program's row, queries, first token and position; position of key tile 0, and the key tiles in sight."""
    tile_id = gl.program_id(0) // num_kv_heads
    row = gl.load(TILES + tile_id * 2)
    query_begin = gl.load(TILES + tile_id * 2 + 1)
    begin = gl.load(ROW_BEGIN + row)
    num_queries = gl.load(ROW_BEGIN + row + 1) - begin
    context = gl.load(CONTEXT + row)
    origin = gl.load(FIRST + row) if PAGED else context
    hi = context + gl.minimum(query_begin + QUERIES, num_queries)
    lo = origin
    if WINDOW > 0:
        lo = gl.maximum(context + query_begin - WINDOW + 1, origin)
    return row, query_begin, num_queries, begin, context, origin, (lo - origin) // BN, (hi - origin + BN - 1) // BN


@gluon.jit
def _fetch(
    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
    TILES, PAGES, FIRST, ROW_BEGIN, CONTEXT, num_kv_heads, stride_table, page_rows,
    WIDTH: gl.constexpr, ROT: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr,
    QUERIES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The fetching warp."""
    head = gl.program_id(0) % num_kv_heads
    row, _, _, begin, _, _, tile_lo, tile_hi = _span(TILES, ROW_BEGIN, CONTEXT, FIRST, num_kv_heads, WINDOW, QUERIES, BN, PAGED)
    for tile in range(tile_lo, tile_hi):
        if PAGED:
            page = gl.load(PAGES + row * stride_table + tile * BN // PAGE)
            y = page * page_rows + head * PAGE + tile * BN % PAGE
            x = 0
        else:
            y = begin + tile * BN
            x = head * WIDTH
        fetch_tile(
            K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v, tile - tile_lo, y, x, ROT, STAGES
        )


@gluon.jit
def _compute(
    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v,
    Q, OUT, TILES, FIRST, ROW_BEGIN, CONTEXT, num_kv_heads, stride_q_token, stride_out_token,
    GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, WINDOW: gl.constexpr,
    M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The two computing warpgroups."""
    SHARED: gl.constexpr = M == 64
    WARPS: gl.constexpr = [4, 2] if SHARED else [8, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, BN // 2 if SHARED else BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, HEAD // 2 if SHARED else HEAD, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    QUERIES: gl.constexpr = M // GROUP
    head = gl.program_id(0) % num_kv_heads
    _, query_begin, num_queries, begin, context, origin, tile_lo, tile_hi = _span(
        TILES, ROW_BEGIN, CONTEXT, FIRST, num_kv_heads, WINDOW, QUERIES, BN, PAGED
    )
    packed = gl.arange(0, M, gl.SliceLayout(1, LOAD))
    query = query_begin + packed // GROUP
    token = (begin + gl.minimum(query, num_queries - 1)).to(gl.int64)
    query_head = head * GROUP + packed % GROUP
    column = gl.arange(0, HEAD, gl.SliceLayout(0, LOAD))
    q = gl.load(Q + gl.expand_dims(token * stride_q_token + query_head * HEAD, 1) + gl.expand_dims(column, 0))
    q_smem.store(q)
    fence_async_shared()
    last = context + gl.minimum(query_begin + gl.arange(0, M, gl.SliceLayout(1, S_LAYOUT)) // GROUP, num_queries - 1)
    first_seen = context + query_begin  # last key of the tile's first query
    last_seen = context + gl.minimum(query_begin + QUERIES, num_queries) - 1
    first_key = origin + tile_lo * BN
    whole_begin = 0
    if WINDOW > 0:
        whole_begin = (gl.maximum(last_seen - WINDOW + 1 - first_key, 0) + BN - 1) // BN
    o, total, _ = attend(
        q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v,
        last, first_key, tile_hi - tile_lo, whole_begin, (first_seen + 1 - first_key) // BN, context + num_queries,
        WINDOW, ROT, HEAD, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    o = o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT)), 1)
    q_smem.store(o.to(Q.dtype.element_ty))  # the queries are done with: through their place, so that rows leave whole
    result = q_smem.load(LOAD)
    out = OUT + gl.expand_dims(token * stride_out_token + query_head * HEAD, 1) + gl.expand_dims(column, 0)
    gl.store(out, result, mask=gl.expand_dims(query < num_queries, 1))


@gluon.jit(do_not_specialize=["num_kv_heads", "stride_table", "page_rows"])
def _prefill_hopper(
    K_DESC, V_DESC, R_DESC, Q, OUT, TILES, PAGES, FIRST, ROW_BEGIN, CONTEXT,
    num_kv_heads, stride_table, page_rows, stride_q_token, stride_out_token,
    GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """One query tile and KV head. ROT > 0: latent rows v_rot | nope | k_rot, V_DESC their first HEAD columns."""
    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v = allocate(
        Q.dtype.element_ty, M, BN, HEAD, ROT, STAGES
    )
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v,
                    Q, OUT, TILES, FIRST, ROW_BEGIN, CONTEXT, num_kv_heads, stride_q_token, stride_out_token,
                    GROUP, HEAD, ROT, WINDOW, M, BN, STAGES, PAGED,
                ),
            ),
            (
                _fetch,
                (
                    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
                    TILES, PAGES, FIRST, ROW_BEGIN, CONTEXT, num_kv_heads, stride_table, page_rows,
                    HEAD + ROT, ROT, PAGE, WINDOW, M // GROUP, BN, STAGES, PAGED,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def hopper_prefill_rows(head_dim: int) -> int:
    """Packed query rows of a tile."""
    return 64 if head_dim == 512 else 128


def hopper_prefill_serves(kv: PagedKV, group: int, *, fresh: bool) -> bool:
    """Whether this kernel takes the shape, with all keys from the fresh tensors or from pages."""
    if kv.head_dim not in (256, 512) or hopper_prefill_rows(kv.head_dim) % group or (kv.is_latent and kv.head_dim != 512):
        return False
    return fresh or pages_fit(kv)


def hopper_prefill_launch(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    tiles_X2: Tensor,
    *,
    fresh: tuple[Tensor, Tensor] | None,
    out_TNH: Tensor,
) -> Launch:
    """The launch for tiles (of `query_tiles`) whose keys all come from `fresh`, or without it all from pages."""
    head_dim, num_kv_heads, rotated = kv.head_dim, kv.num_kv_heads, kv.width - kv.head_dim
    if fresh is None:
        keys, values = page_matrix(kv.planes[0]), page_matrix(kv.planes[-1])
    else:
        # Over the latent, v_TGH begins where the whole rows do.
        whole = (fresh[1], fresh[1]) if rotated else fresh
        keys, values = (part.as_strided((part.shape[0], num_kv_heads * kv.width), (part.stride(0), 1)) for part in whole)
    v_desc = describe(values, head_dim)
    arguments: dict[str, Any] = {
        "K_DESC": v_desc if rotated else describe(keys, head_dim),
        "V_DESC": v_desc,
        "R_DESC": describe(values, rotated) if rotated else v_desc,
        "Q": q_TNH,
        "OUT": out_TNH,
        "TILES": tiles_X2,
        "PAGES": kv.pages_BP,
        "FIRST": kv.first_B,
        "ROW_BEGIN": rows.row_begin_B1,
        "CONTEXT": rows.context_B,
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
    return Launch(_prefill_hopper, (tiles_X2.shape[0] * num_kv_heads,), arguments, {"num_warps": 8})
