"""The head of a drafter. It finds each row's most likely token among a few candidates.

    head_candidates      the best token of each tile of the vocabulary, logits = cap * tanh(scale * (x @ table^T) / cap)
    peaks                the same from logits that are already computed
    cluster_candidates   the tokens of some clusters, for heads that score clusters first
    pick_best            the best candidate
    embed_beside         table[token] * scale | hidden
    embed_linear         pick_best, embed_beside and the linear layer that begins the next draft (one launch in small models)

For small tables and e4m3 tables, `head_candidates` takes one pass that writes no logits. For other tables, cuBLAS or the linear
kernels compute the logits, and a second kernel finds the best of each tile. The values of an e4m3 table are widened to the
activations' dtype, multiplied on the tensor cores, and scaled row by row.

Shapes: R rows · V vocabulary · D model · C candidates, one per tile of the vocabulary · B target model width ·
M clusters of tokens · J tokens per cluster · K clusters per row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.linear.few_tokens import capped_head, linear
from culet.kernels.triton.maths import cap_tanh
from culet.kernels.types import Candidates

TILE_V = 64
MIN_ROWS, MAX_ROWS = 16, 64  # per program. The tensor cores take no fewer, and no more fit in registers.
BLOCK_D = 256
BLOCK_C = 4096  # candidates read at a time
BLOCK_B = 1024
BLOCK_J = 32
MAX_PAIRS, MAX_PAIR_SIZE, MAX_PAIR_CANDIDATES = 32, 512, 256  # up to these, `embed_linear` is one launch
LOGITS_TILE = 1024
# Tables of up to this size stay in the GPU's cache between drafts and take one pass. For larger tables, cuBLAS is as fast.
SMALL_TABLE_BYTES = 32 << 20


@triton.jit
def _load_table(table, token, column, V, D):
    inside = (token < V)[:, None] & (column < D)[None, :]
    return tl.load(table + token.to(tl.int64)[:, None] * D + column[None, :], mask=inside, other=0.0)


@triton.jit
def _load_states(x, offsets, is_row, column, D):
    return tl.load(x + offsets[None, :] + column[:, None], mask=is_row[None, :] & (column < D)[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_rows", "V"])
def _head_kernel(
    x, table, scale, peaks, ids, num_rows, V, D, num_tiles, row_stride, part_stride,
    NUM_PARTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, cap: tl.constexpr, IS_ONE_STEP: tl.constexpr,
    TILE_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the largest logit of tile c and its token to peaks[r, c] and ids[r, c]. The lowest id of equal ones wins.

    Row r is part r % NUM_PARTS of row r // NUM_PARTS of x.
    """
    tile = tl.program_id(0)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    offsets = (row // NUM_PARTS) * row_stride + (row % NUM_PARTS) * part_stride
    column = tl.arange(0, BLOCK_D)
    sums = tl.zeros([TILE_V, BLOCK_R], tl.float32)
    if IS_ONE_STEP:
        weights = _load_table(table, token, column, V, D)
        enter(PDL)
        states = _load_states(x, offsets, is_row, column, D)
        sums += tl.dot(weights.to(states.dtype), states, out_dtype=tl.float32, input_precision="ieee")
    else:
        enter(PDL)
        for begin in tl.range(0, D, BLOCK_D):
            weights = _load_table(table, token, begin + column, V, D)
            states = _load_states(x, offsets, is_row, begin + column, D)
            sums += tl.dot(weights.to(states.dtype), states, out_dtype=tl.float32, input_precision="ieee")
    if HAS_SCALE:
        sums *= tl.load(scale + token, mask=token < V, other=0.0)[:, None]
    if HAS_CAP:
        sums = cap_tanh(sums, cap)
    sums = tl.where((token < V)[:, None], sums, float("-inf"))
    best = tl.max(sums, 0)
    first = tl.min(tl.where(sums == best[None, :], token[:, None], V - 1), 0)
    place = row * num_tiles + tile
    tl.store(peaks + place, best, mask=is_row)
    tl.store(ids + place, first.to(tl.int64), mask=is_row)


@triton.jit(do_not_specialize=["V"])
def _peaks_kernel(logits, peaks, ids, logits_stride, V, num_tiles, TILE: tl.constexpr, PDL: tl.constexpr):
    """Write the same peaks and ids as `_head_kernel`, from logits that are already computed."""
    enter(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    some = tl.load(logits + row * logits_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    best = tl.max(some, 0)
    first = tl.min(tl.where((some == best) & (token < V), token, V - 1), 0)
    tl.store(peaks + row * num_tiles + tile, best)
    tl.store(ids + row * num_tiles + tile, first.to(tl.int64))


@triton.jit
def _clusters_kernel(
    z, table, names, chosen, scores, ids, z_stride,
    K: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Score some tokens of one of a row's clusters."""
    enter(PDL)
    row, cluster = tl.program_id(2).to(tl.int64), tl.program_id(1)
    member = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    inside = member < J
    place = tl.load(chosen + row * K + cluster) * J + member
    sums = tl.zeros([BLOCK_J], tl.float32)
    for begin in tl.range(0, D, BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        state = tl.load(z + row * z_stride + column, mask=column < D, other=0.0).to(tl.float32)
        weights = tl.load(table + place[:, None] * D + column[None, :], mask=inside[:, None] & (column < D)[None, :], other=0.0)
        sums += tl.sum(weights.to(tl.float32) * state[None, :], 1)
    to = (row * K + cluster) * J + member
    tl.store(scores + to, sums, mask=inside)
    tl.store(ids + to, tl.load(names + place, mask=inside, other=0), mask=inside)


@triton.jit
def _best_of(scores, ids, C, BLOCK_C: tl.constexpr):
    """Return the id of the largest of C scores, or the first id if several are equal."""
    peak = float("-inf")
    place = 0
    for begin in tl.range(0, C, BLOCK_C):
        column = begin + tl.arange(0, BLOCK_C)
        some = tl.load(scores + column, mask=column < C, other=float("-inf")).to(tl.float32)
        most = tl.max(some, 0)
        first = tl.min(tl.where((some == most) & (column < C), column, C - 1), 0)
        place = tl.where(most > peak, first, place)
        peak = tl.maximum(most, peak)
    return tl.load(ids + place)


@triton.jit
def _pick_kernel(scores, ids, best, C, best_stride, BLOCK_C: tl.constexpr, PDL: tl.constexpr):
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    tl.store(best + row * best_stride, _best_of(scores + row * C, ids + row * C, C, BLOCK_C))


@triton.jit(do_not_specialize=["R"])
def _embed_linear_kernel(
    scores, ids, best, hidden, table, weight, y, R, N, C, best_stride, hidden_stride, table_stride,
    B: tl.constexpr, scale: tl.constexpr, PICKS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of BLOCK_R rows. Every program finds the rows' tokens, and the first one stores them."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_B)
    is_row = row < R
    places = weight + output[:, None] * (2 * B) + column[None, :]
    is_weight = (output < N)[:, None] & (column < B)[None, :]
    w_embedded = tl.load(places, mask=is_weight, other=0.0)
    w_hidden = tl.load(places + B, mask=is_weight, other=0.0)
    enter(PDL)
    inside = (column < B)[:, None] & is_row[None, :]
    state = tl.load(hidden + row[None, :] * hidden_stride + column[:, None], mask=inside, other=0.0)
    if PICKS:
        candidate = tl.arange(0, BLOCK_C)
        is_there = (candidate < C)[:, None] & is_row[None, :]
        some = tl.load(scores + row[None, :] * C + candidate[:, None], mask=is_there, other=float("-inf")).to(tl.float32)
        first = tl.min(tl.where((some == tl.max(some, 0)[None, :]) & is_there, candidate[:, None], C - 1), 0)
        token = tl.load(ids + row * C + first, mask=is_row, other=0)
        if tl.program_id(0) == 0:
            tl.store(best + row * best_stride, token, mask=is_row)
    else:
        token = tl.load(best + row * best_stride, mask=is_row, other=0)
    embedded = tl.load(table + token[None, :] * table_stride + column[:, None], mask=inside, other=0.0).to(tl.float32) * scale
    total = tl.dot(w_embedded, embedded.to(y.dtype.element_ty), out_dtype=tl.float32, input_precision="ieee")
    total += tl.dot(w_hidden, state, out_dtype=tl.float32, input_precision="ieee")
    to = y + row[None, :] * N + output[:, None]
    tl.store(to, total.to(y.dtype.element_ty), mask=(output < N)[:, None] & is_row[None, :])


@triton.jit
def _beside_kernel(
    scores, ids, best, hidden, table, y, C, best_stride, hidden_stride, table_stride,
    B: tl.constexpr, scale: tl.constexpr, PICKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one row. With PICKS, choose its token from the candidates and store it. Otherwise read `best`."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = column < B
    state = tl.load(hidden + row * hidden_stride + column, mask=inside)
    if PICKS:
        token = _best_of(scores + row * C, ids + row * C, C, BLOCK_C)
        if tl.program_id(1) == 0:
            tl.store(best + row * best_stride, token)
    else:
        token = tl.load(best + row * best_stride)
    embedded = tl.load(table + token.to(tl.int64) * table_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(y + row * (2 * B) + column, embedded.to(y.dtype.element_ty), mask=inside)
    tl.store(y + row * (2 * B) + B + column, state, mask=inside)


def describe_head(
    x_RD: Tensor, table_VD: Tensor, scale_V: Tensor | None, cap: float | None, out: tuple[Tensor, Tensor], pdl: bool
) -> Launch:
    """Describe the launch. `out` is (peaks, ids), both [R, C]. `x_RD` may also be [R, K, D]."""
    peaks, ids = out
    (num_rows, num_tiles), (num_tokens, size) = peaks.shape, table_VD.shape
    # Without tensor cores, few registers are left for rows. With many rows, three stages of wide rows do not fit a small GPU.
    most_rows = MAX_ROWS if x_RD.dtype is torch.bfloat16 else MIN_ROWS
    block_r = min(most_rows, max(MIN_ROWS, next_power_of_2(num_rows)))
    block_d = min(BLOCK_D if size <= BLOCK_D or block_r == MIN_ROWS else BLOCK_D // 2, max(16, next_power_of_2(size)))
    arguments: dict[str, Any] = {"x": x_RD, "table": table_VD, "scale": peaks if scale_V is None else scale_V}
    arguments |= {"peaks": peaks, "ids": ids, "num_rows": num_rows, "V": num_tokens, "D": size, "num_tiles": num_tiles}
    arguments |= {"row_stride": x_RD.stride(0), "part_stride": x_RD.stride(-2), "HAS_SCALE": scale_V is not None}
    arguments |= {"NUM_PARTS": x_RD.shape[1] if x_RD.dim() == 3 else 1, "HAS_CAP": cap is not None, "cap": cap or 1.0}
    arguments |= {"IS_ONE_STEP": size <= block_d, "TILE_V": TILE_V, "BLOCK_R": block_r, "BLOCK_D": block_d, "PDL": pdl}
    return Launch(_head_kernel, (num_tiles, cdiv(num_rows, block_r)), arguments, options(4, pdl))


def describe_peaks(logits_RV: Tensor, out: tuple[Tensor, Tensor], pdl: bool) -> Launch:
    """Describe the launch. `out` is (peaks, ids), both [R, C]."""
    peaks, ids = out
    num_rows, num_tiles = peaks.shape
    arguments: dict[str, Any] = {"logits": logits_RV, "peaks": peaks, "ids": ids, "logits_stride": logits_RV.stride(0)}
    arguments |= {"V": logits_RV.shape[1], "num_tiles": num_tiles, "TILE": LOGITS_TILE, "PDL": pdl}
    return Launch(_peaks_kernel, (num_tiles, num_rows), arguments, options(4, pdl))


def describe_clusters(z_RD: Tensor, table_VD: Tensor, ids_MJ: Tensor, chosen_RK: Tensor, out: Candidates, pdl: bool) -> Launch:
    (num_rows, size), count, each = z_RD.shape, chosen_RK.shape[1], ids_MJ.shape[1]
    block_j = min(BLOCK_J, next_power_of_2(each))
    arguments: dict[str, Any] = {"z": z_RD, "table": table_VD, "names": ids_MJ, "chosen": chosen_RK}
    arguments |= {"scores": out.scores_RC, "ids": out.ids_RC, "z_stride": z_RD.stride(0), "K": count, "J": each, "D": size}
    arguments |= {"BLOCK_J": block_j, "BLOCK_D": min(BLOCK_D, next_power_of_2(size)), "PDL": pdl}
    return Launch(_clusters_kernel, (cdiv(each, block_j), count, num_rows), arguments, options(4, pdl))


def _block_c(candidates: Candidates) -> int:
    return min(BLOCK_C, max(16, next_power_of_2(candidates.scores_RC.shape[1])))


def describe_pick(candidates: Candidates, best_R: Tensor, pdl: bool) -> Launch:
    num_rows, count = candidates.scores_RC.shape
    arguments: dict[str, Any] = {"scores": candidates.scores_RC, "ids": candidates.ids_RC, "best": best_R, "C": count}
    arguments |= {"best_stride": best_R.stride(0), "BLOCK_C": _block_c(candidates), "PDL": pdl}
    return Launch(_pick_kernel, (num_rows,), arguments, options(4, pdl))


def describe_beside(
    candidates: Candidates | None, best_R: Tensor, hidden_RB: Tensor, table_VB: Tensor, scale: float, y_RX: Tensor, pdl: bool
) -> Launch:
    """Describe the launch. `candidates` is None if `best_R` holds the tokens."""
    num_rows, size = hidden_RB.shape
    block = min(BLOCK_B, next_power_of_2(size))
    arguments: dict[str, Any] = {
        "scores": best_R if candidates is None else candidates.scores_RC,
        "best": best_R,
        "hidden": hidden_RB,
    }
    arguments |= {"ids": best_R if candidates is None else candidates.ids_RC, "table": table_VB, "y": y_RX}
    arguments |= {"C": 1 if candidates is None else candidates.scores_RC.shape[1], "best_stride": best_R.stride(0), "PDL": pdl}
    arguments |= {"hidden_stride": hidden_RB.stride(0), "table_stride": table_VB.stride(0), "B": size, "scale": scale}
    arguments |= {
        "PICKS": candidates is not None,
        "BLOCK_C": 16 if candidates is None else _block_c(candidates),
        "BLOCK_B": block,
    }
    return Launch(_beside_kernel, (num_rows, cdiv(size, block)), arguments, options(4, pdl))


def describe_embed_linear(
    candidates: Candidates | None,
    best_R: Tensor,
    hidden_RB: Tensor,
    table_VB: Tensor,
    scale: float,
    weight_DX: Tensor,
    y_RD: Tensor,
    pdl: bool,
) -> Launch:
    """Describe the launch. `candidates` is None if `best_R` holds the tokens."""
    (num_rows, size), num_outputs = hidden_RB.shape, weight_DX.shape[0]
    arguments: dict[str, Any] = {
        "scores": best_R if candidates is None else candidates.scores_RC,
        "best": best_R,
        "hidden": hidden_RB,
    }
    arguments |= {"ids": best_R if candidates is None else candidates.ids_RC, "table": table_VB, "weight": weight_DX, "y": y_RD}
    arguments |= {"C": 1 if candidates is None else candidates.scores_RC.shape[1], "best_stride": best_R.stride(0), "PDL": pdl}
    arguments |= {"hidden_stride": hidden_RB.stride(0), "table_stride": table_VB.stride(0), "B": size, "scale": scale}
    arguments |= {"R": num_rows, "N": num_outputs, "PICKS": candidates is not None, "BLOCK_R": MIN_ROWS, "BLOCK_N": 16}
    arguments |= {"BLOCK_C": 16 if candidates is None else _block_c(candidates), "BLOCK_B": max(16, next_power_of_2(size))}
    return Launch(_embed_linear_kernel, (cdiv(num_outputs, 16), cdiv(num_rows, MIN_ROWS)), arguments, options(4, pdl))


def head_candidates(x_RD: Tensor, table_VD: Tensor, scale_V: Tensor | None, cap: float | None) -> Candidates:
    """Return candidates, including the best token of each row, scored by cap * tanh(scale[v] * (x @ table[v]) / cap).

    `scale_V` belongs to an e4m3 table, whose sums are float32. If the cap or the scale is None, that step is omitted. `x_RD`
    may also be [R, K, D].
    """
    is_small = table_VD.numel() * table_VD.element_size() <= SMALL_TABLE_BYTES
    is_wide = x_RD.is_cuda and x_RD.dtype is not torch.bfloat16  # as in `linear`
    if scale_V is None and (is_wide or not is_small):
        flat_RD = x_RD.flatten(0, -2)
        return peaks(F.linear(flat_RD, table_VD) if cap is None else capped_head(flat_RD, table_VD, cap))
    num_rows = x_RD.shape[:-1].numel()
    candidates = _empty_candidates(num_rows, cdiv(table_VD.shape[0], TILE_V), x_RD.device)
    if num_rows:
        x_RD = x_RD if x_RD.stride(-1) == 1 else x_RD.contiguous()
        describe_head(x_RD, table_VD, scale_V, cap, (candidates.scores_RC, _ids(candidates)), uses_pdl(x_RD.device)).run()
    return candidates


def cluster_candidates(z_RD: Tensor, table_VD: Tensor, ids_MJ: Tensor, chosen_RK: Tensor) -> Candidates:
    """Score the J tokens in each of a row's K clusters by z @ table, in float32. Table rows are in the order of `ids_MJ`."""
    num_rows, count = chosen_RK.shape
    candidates = _empty_candidates(num_rows, count * ids_MJ.shape[1], z_RD.device)
    if num_rows:
        z_RD, chosen_RK = z_RD if z_RD.stride(1) == 1 else z_RD.contiguous(), chosen_RK.contiguous()
        describe_clusters(z_RD, table_VD, ids_MJ, chosen_RK, candidates, uses_pdl(z_RD.device)).run()
    return candidates


def peaks(logits_RV: Tensor) -> Candidates:
    """Return candidates that include the best token of each row, given its logits: the best of each tile."""
    num_rows, width = logits_RV.shape
    candidates = _empty_candidates(num_rows, cdiv(width, LOGITS_TILE), logits_RV.device)
    if num_rows:
        describe_peaks(logits_RV, (candidates.scores_RC, _ids(candidates)), uses_pdl(logits_RV.device)).run()
    return candidates


def _empty_candidates(num_rows: int, count: int, device: torch.device) -> Candidates:
    scores_RC = torch.empty(num_rows, count, dtype=torch.float32, device=device)
    return Candidates(scores_RC, torch.empty(num_rows, count, dtype=torch.int64, device=device))


def _ids(candidates: Candidates) -> Tensor:
    assert candidates.ids_RC is not None, "candidates on a GPU need ids"
    return candidates.ids_RC


def pick_best(candidates: Candidates, best_R: Tensor) -> None:
    """Write the best candidate of each row to `best_R` (int64)."""
    _ids(candidates)
    if best_R.shape[0]:
        describe_pick(candidates, best_R, uses_pdl(best_R.device)).run()


def embed_linear(
    candidates: Candidates | None, token_R: Tensor, hidden_RB: Tensor, table_VB: Tensor, scale: float, weight_DX: Tensor
) -> Tensor:
    """Return `embed_beside` @ weight^T, [R, D]. If there are candidates, first write the best ones to `token_R` (int64)."""
    num_rows, size = hidden_RB.shape
    is_small = 0 < num_rows <= MAX_PAIRS and size <= MAX_PAIR_SIZE and weight_DX.is_contiguous() and hidden_RB.stride(1) == 1
    is_small &= candidates is None or candidates.scores_RC.shape[1] <= MAX_PAIR_CANDIDATES
    if not is_small or (hidden_RB.is_cuda and hidden_RB.dtype is not torch.bfloat16):
        return linear(_beside(candidates, token_R, hidden_RB, table_VB, scale), weight_DX)
    y_RD = hidden_RB.new_empty(num_rows, weight_DX.shape[0])
    pdl = uses_pdl(y_RD.device)
    describe_embed_linear(candidates, token_R, hidden_RB, table_VB, scale, weight_DX, y_RD, pdl).run()
    return y_RD


def embed_beside(token_R: Tensor, hidden_RB: Tensor, table_VB: Tensor, scale: float) -> Tensor:
    """Return table[token] * scale | hidden, [R, 2 B]. The caller has rounded `scale` to the table's dtype."""
    return _beside(None, token_R, hidden_RB, table_VB, scale)


def _beside(candidates: Candidates | None, best_R: Tensor, hidden_RB: Tensor, table_VB: Tensor, scale: float) -> Tensor:
    num_rows, size = hidden_RB.shape
    y_RX = hidden_RB.new_empty(num_rows, 2 * size)
    if num_rows:
        describe_beside(candidates, best_R, hidden_RB, table_VB, scale, y_RX, uses_pdl(y_RX.device)).run()
    return y_RX
