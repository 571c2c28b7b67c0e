"""Draw tokens from logits on the GPU, in two or three launches without a host sync. `sampling/sampler.py` is the specification.

A first pass over the logits writes the largest logit of every chunk of 256 columns (`peaks`). All later work reads only a few
chunks. The k largest logits are in the k chunks with the largest peaks (equal ones in order of column), because each of those
chunks has a column that precedes every column outside them. The settings of a row decide how its token is drawn:

    temperature 0            take the best column of the best chunk
    top-k up to MAX_TOP_K    take the k best chunks and the k best columns in them, apply top-p and min-p, then draw
    no top-k, top-p 1        sum the float64 weights of all columns per chunk (a second pass), then draw

The eager sampler draws all other rows (large top-k, top-p of the whole vocabulary). A draw takes one Philox number keyed by
(seed, sample, position) and inverts the cumulative weights in order of token id. Weights and sums are float64.

Shapes: R rows · V vocabulary · C chunks · S slots · L tokens per slot.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch
from culet.kernels.types import Ranked, RowSettings

CHUNK = 256
MAX_TOP_K = 64
TILE_CHUNKS = 16  # chunks per program in the passes over all logits
LOWEST: tl.constexpr = tl.constexpr(-(2**31))
FEW: tl.constexpr = tl.constexpr(16)  # chunks whose best columns are gathered at a time


@triton.jit
def _sortable(x):
    """Map float32 to int32 in the same order. -0.0 and 0.0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load_logits(logits, cols, mask):
    """Load logits of one row, with -inf outside `mask`."""
    return tl.load(logits + cols, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=["V"])
def _peaks_kernel(
    logits,
    peaks,
    sums,
    V,
    logits_stride,
    num_chunks,
    HAS_SUMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the largest logit of chunk c to peaks[r, c], and the sum of exp(logit - peak) to sums[r, c]."""
    enter(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunks = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    cols = chunks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = _load_logits(logits + row * logits_stride, cols, cols < V)
    best = tl.max(values, 1)
    tl.store(peaks + row * num_chunks + chunks, best, mask=chunks < num_chunks)
    if HAS_SUMS:
        finite = tl.where(best == float("-inf"), 0.0, best)
        tl.store(sums + row * num_chunks + chunks, tl.sum(tl.exp(values - finite[:, None]), 1), mask=chunks < num_chunks)


@triton.jit(do_not_specialize=["V"])
def _weights_kernel(
    logits,
    peaks,
    weights,
    temperature,
    top_k,
    min_p,
    V,
    logits_stride,
    num_chunks,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the float64 sum of the weights of chunk c to weights[r, c], for rows that draw from the whole vocabulary."""
    enter(PDL)
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row)
    if (heat > 0) & (tl.load(top_k + row) <= 0):
        every = tl.arange(0, BLOCK_C)
        best = tl.max(tl.load(peaks + row * num_chunks + every, mask=every < num_chunks, other=float("-inf")), 0)
        chunks = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
        cols = chunks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        values = _load_logits(logits + row * logits_stride, cols, cols < V)
        share = _weigh(values, best, heat, tl.load(min_p + row))
        tl.store(weights + row * num_chunks + chunks, tl.sum(share, 1), mask=chunks < num_chunks)


@triton.jit
def _weigh(values, best, heat, least):
    """Return exp((logit - best) / temperature) in float64, or 0 if it is below `least`."""
    share = tl.exp((values.to(tl.float64) - best.to(tl.float64)) / heat)
    return tl.where(share >= least, share, 0.0)


@triton.jit
def _threshold(keys, k, low):
    """Return a key t such that at least k keys are >= t and fewer than k are > t. At least k keys must be >= `low`."""
    high = tl.max(keys, 0).to(tl.int64) + 1
    low = low.to(tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        number = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        low = tl.where(number >= k, middle, low)
        high = tl.where(number > k, high, tl.where(number == k, middle + 1, middle))
    return low.to(tl.int32)


@triton.jit
def _select(
    logits,
    peaks,
    places,
    values_out,
    k,
    V,
    num_chunks,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TOP: tl.constexpr,
):
    """Return the ids and values [TOP] of the k <= TOP best columns of a row, in order of column. The first k are valid.

    `places` (2 * TOP elements) and `values_out` (TOP) are scratch memory for this row.
    """
    every = tl.arange(0, BLOCK_C)
    heights = tl.load(peaks + every, mask=every < num_chunks, other=float("-inf"))
    keys = tl.where(every < num_chunks, _sortable(heights), LOWEST)
    num_picked = tl.minimum(k, num_chunks)
    bound = _threshold(keys, num_picked, tl.min(keys, 0))
    above, equal = (keys > bound).to(tl.int32), ((keys == bound) & (every < num_chunks)).to(tl.int32)
    spare = num_picked - tl.sum(above, 0)
    picked = above + equal * (tl.cumsum(equal, 0) <= spare).to(tl.int32)
    chunks_kept = places + TOP
    tl.store(chunks_kept + tl.cumsum(picked, 0) - 1, every, mask=picked != 0)
    tl.debug_barrier()
    slots = tl.arange(0, TOP)
    chunks = tl.load(chunks_kept + slots, mask=slots < num_picked, other=0)
    cols = chunks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = (slots < num_picked)[:, None] & (cols < V)
    keys2 = tl.where(mask, _sortable(_load_logits(logits, cols, mask)), LOWEST)
    keys2 = tl.reshape(keys2, (TOP * WIDTH,), can_reorder=True)  # The order does not matter because keys are only counted.
    # If k chunks were picked, each has a column at its peak, so at least k columns reach the lowest of those peaks.
    low = tl.where(num_picked == k, bound, LOWEST)
    k = tl.minimum(k, V)
    bound2 = _threshold(keys2, k, low)
    spare2 = k - tl.sum((keys2 > bound2).to(tl.int32), 0)
    # Gather the columns a few chunks at a time. All at once would need more registers and shared memory than there are.
    num_kept = 0
    num_equal = 0
    for begin in tl.range(0, TOP, FEW):
        few = begin + tl.arange(0, FEW)
        some = tl.load(chunks_kept + few, mask=few < num_picked, other=0)
        some_cols = some[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        some_mask = (few < num_picked)[:, None] & (some_cols < V)
        values = _load_logits(logits, some_cols, some_mask)
        keys3 = tl.where(some_mask, _sortable(values), LOWEST)
        equal3 = ((keys3 == bound2) & some_mask).to(tl.int32)
        in_rows = tl.sum(equal3, 1)
        nth = num_equal + (tl.cumsum(in_rows, 0) - in_rows)[:, None] + tl.cumsum(equal3, 1)
        is_kept = (keys3 > bound2).to(tl.int32) + equal3 * (nth <= spare2).to(tl.int32)
        kept_rows = tl.sum(is_kept, 1)
        place = num_kept + (tl.cumsum(kept_rows, 0) - kept_rows)[:, None] + tl.cumsum(is_kept, 1) - 1
        tl.store(places + place, some_cols, mask=is_kept != 0)
        tl.store(values_out + place, values, mask=is_kept != 0)
        num_equal += tl.sum(in_rows, 0)
        num_kept += tl.sum(kept_rows, 0)
    tl.debug_barrier()
    ids = tl.load(places + slots, mask=slots < k, other=0)
    best = tl.load(values_out + slots, mask=slots < k, other=float("-inf"))
    return ids, best


@triton.jit
def _uniform(seed, sample, position):
    """Return 53 random bits as float64 in [0, 1), the same as in `sampling/philox.py`."""
    x0, x1, _, _ = tl.philox(seed, position.to(tl.int32), sample.to(tl.int32), 0, 0)
    bits = ((x0 >> 5).to(tl.int64) << 26) + (x1 >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _pick_best(logits, peaks, V, num_chunks, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the column of the largest logit, or the lowest such column if several are equal."""
    every = tl.arange(0, BLOCK_C)
    heights = tl.load(peaks + every, mask=every < num_chunks, other=float("-inf"))
    chunk = tl.min(tl.where((heights == tl.max(heights, 0)) & (every < num_chunks), every, BLOCK_C - 1), 0)
    cols = chunk * WIDTH + tl.arange(0, WIDTH)
    values = _load_logits(logits, cols, cols < V)
    return tl.min(tl.where((values == tl.max(values, 0)) & (cols < V), cols, V - 1), 0)


@triton.jit
def _pick_few(ids, values, number, uniform, heat, nucleus, least, TOP: tl.constexpr):
    """Draw one of the first `number` ids, which are in ascending order, by temperature, top-p and min-p."""
    slots = tl.arange(0, TOP)
    is_real = slots < number
    share = tl.where(is_real, _weigh(values, tl.max(values, 0), heat, 0.0), 0.0)
    # A token precedes another if its logit is larger, or if the logits are equal and its id is lower.
    other = values[None, :]
    is_before = (other > values[:, None]) | ((other == values[:, None]) & (slots[None, :] < slots[:, None]))
    before = tl.sum(tl.where(is_before, share[None, :], 0.0), 1)
    # Top-p 1 keeps all tokens, including those that rounding would drop.
    limit = tl.where(nucleus >= 1.0, float("inf"), nucleus * tl.sum(share, 0))
    share = tl.where((before < limit) & (share >= least), share, 0.0)
    place = tl.sum((is_real & (tl.cumsum(share, 0) <= uniform * tl.sum(share, 0))).to(tl.int32), 0)
    # If rounding leaves no sum above the target, take the last token with any weight.
    place = tl.minimum(place, tl.max(tl.where(share > 0, slots, 0), 0))
    return tl.sum(tl.where(slots == place, ids, 0), 0)


@triton.jit
def _pick_open(
    logits,
    peaks,
    weights,
    uniform,
    heat,
    least,
    V,
    num_chunks,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Draw one of all columns, by temperature and min-p. First find the chunk in which the running sum passes the target."""
    every = tl.arange(0, BLOCK_C)
    inside = tl.arange(0, WIDTH)
    best = tl.max(tl.load(peaks + every, mask=every < num_chunks, other=float("-inf")), 0)
    parts = tl.load(weights + every, mask=every < num_chunks, other=0.0)
    target = uniform * tl.sum(parts, 0)
    chunk = tl.sum(((every < num_chunks) & (tl.cumsum(parts, 0) <= target)).to(tl.int32), 0)
    chunk = tl.minimum(chunk, tl.max(tl.where(parts > 0, every, 0), 0))
    reached = tl.sum(tl.where(every < chunk, parts, 0.0), 0)
    cols = chunk * WIDTH + inside
    share = _weigh(_load_logits(logits, cols, cols < V), best, heat, least)
    place = tl.sum((reached + tl.cumsum(share, 0) <= target).to(tl.int32), 0)
    return chunk * WIDTH + tl.minimum(place, tl.max(tl.where(share > 0, inside, 0), 0))


@triton.jit(do_not_specialize=["V"])
def _draw_kernel(
    logits,
    peaks,
    weights,
    places,
    ranked,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    sample,
    positions,
    tokens,
    V,
    logits_stride,
    num_chunks,
    HAS_FEW: tl.constexpr,
    HAS_OPEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw tokens[r] by the settings of row r. Each program draws one row."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    my_logits = logits + row * logits_stride
    my_peaks = peaks + row * num_chunks
    heat = tl.load(temperature + row)
    if heat <= 0:
        token = _pick_best(my_logits, my_peaks, V, num_chunks, WIDTH, BLOCK_C)
        tl.store(tokens + row, token.to(tl.int64))
    else:
        uniform = _uniform(tl.load(seed + row), tl.load(sample + row), tl.load(positions + row))
        least = tl.load(min_p + row)
        k = tl.load(top_k + row)
        if k > 0:
            if HAS_FEW:
                my_places, my_ranked = places + row * (2 * TOP), ranked + row * TOP
                ids, values = _select(my_logits, my_peaks, my_places, my_ranked, k, V, num_chunks, WIDTH, BLOCK_C, TOP)
                few = _pick_few(ids, values, tl.minimum(k, V), uniform, heat, tl.load(top_p + row), least, TOP)
                tl.store(tokens + row, few.to(tl.int64))
        else:
            if HAS_OPEN:
                my_weights = weights + row * num_chunks
                open_ = _pick_open(my_logits, my_peaks, my_weights, uniform, heat, least, V, num_chunks, WIDTH, BLOCK_C)
                tl.store(tokens + row, open_.to(tl.int64))


@triton.jit(do_not_specialize=["V", "k"])  # Clients choose k.
def _logprobs_kernel(
    logits,
    peaks,
    sums,
    chosen,
    places,
    ranked,
    chosen_out,
    top_out,
    ids_out,
    k,
    V,
    logits_stride,
    num_chunks,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the log-softmax of a row at its chosen token and at its k best tokens, in descending order."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    peaks += row * num_chunks
    every = tl.arange(0, BLOCK_C)
    heights = tl.load(peaks + every, mask=every < num_chunks, other=float("-inf"))
    parts = tl.load(sums + row * num_chunks + every, mask=every < num_chunks, other=0.0)
    best = tl.max(heights, 0)
    scale = best + tl.log(tl.sum(parts * tl.exp(heights - best), 0))
    tl.store(chosen_out + row, tl.load(logits + tl.load(chosen + row)).to(tl.float32) - scale)
    if k > 0:
        slots = tl.arange(0, TOP)
        ids, values = _select(
            logits, peaks, places + row * (2 * TOP), ranked + row * TOP, k, V, num_chunks, WIDTH, BLOCK_C, TOP
        )
        other = values[None, :]
        is_before = (other > values[:, None]) | ((other == values[:, None]) & (slots[None, :] < slots[:, None]))
        rank = tl.sum(is_before.to(tl.int32), 1)
        tl.store(top_out + row * k + rank, values - scale, mask=slots < k)
        tl.store(ids_out + row * k + rank, ids.to(tl.int64), mask=slots < k)


def describe_peaks(logits_RV: Tensor, out: tuple[Tensor, Tensor | None], pdl: bool) -> Launch:
    """Describe the launch. `out` is (peaks, sums or None)."""
    num_rows, width = logits_RV.shape
    peaks, sums = out
    arguments = _common(logits_RV) | {"peaks": peaks, "sums": peaks if sums is None else sums}
    arguments |= {"HAS_SUMS": sums is not None, "CHUNKS": TILE_CHUNKS, "PDL": pdl}
    return Launch(_peaks_kernel, (triton.cdiv(width, CHUNK * TILE_CHUNKS), num_rows), arguments, options(4, pdl))


def _common(logits_RV: Tensor) -> dict[str, Any]:
    return {
        "logits": logits_RV,
        "V": logits_RV.shape[1],
        "logits_stride": logits_RV.stride(0),
        "num_chunks": triton.cdiv(logits_RV.shape[1], CHUNK),
        "WIDTH": CHUNK,
    }


def describe_draw(logits_RV: Tensor, settings: RowSettings, positions_R: Tensor, tokens_R: Tensor, **ways: Any) -> list[Launch]:
    """Describe all launches of a draw. `ways` are `pdl`, and `has_few` and `has_open` as in `draw`."""
    num_rows, width = logits_RV.shape
    device, pdl = logits_RV.device, bool(ways.get("pdl", False))
    has_few, has_open = bool(ways.get("has_few", True)), bool(ways.get("has_open", True))
    num_chunks = triton.cdiv(width, CHUNK)
    peaks = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    weights = torch.empty(num_rows if has_open else 0, num_chunks, dtype=torch.float64, device=device)
    places = torch.empty(num_rows, 2 * MAX_TOP_K, dtype=torch.int32, device=device)
    ranked = torch.empty(num_rows, MAX_TOP_K, dtype=torch.float32, device=device)
    common = _common(logits_RV) | {"peaks": peaks, "BLOCK_C": triton.next_power_of_2(num_chunks), "PDL": pdl}
    fields = {"temperature": settings.temperature_R, "top_k": settings.top_k_R, "min_p": settings.min_p_R}
    launches = [describe_peaks(logits_RV, (peaks, None), pdl)]
    if has_open:
        grid = (triton.cdiv(num_chunks, TILE_CHUNKS), num_rows)
        arguments = {**common, **fields, "weights": weights, "CHUNKS": TILE_CHUNKS}
        launches.append(Launch(_weights_kernel, grid, arguments, options(4, pdl)))
    arguments = {
        **common,
        **fields,
        "weights": weights if has_open else peaks,
        "places": places,
        "ranked": ranked,
        "tokens": tokens_R,
    }
    arguments |= {"top_p": settings.top_p_R, "seed": settings.seed_R, "sample": settings.sample_R, "positions": positions_R}
    arguments |= {"HAS_FEW": has_few, "HAS_OPEN": has_open, "TOP": MAX_TOP_K}
    return [*launches, Launch(_draw_kernel, (num_rows,), arguments, options(16, pdl))]


def draw(
    logits_RV: Tensor,
    settings: RowSettings,
    positions_R: Tensor,
    *,
    has_few: bool = True,
    has_open: bool = True,
) -> Tensor:
    """Draw one token per row, int64 [R].

    A row may be greedy, or have a top-k of up to MAX_TOP_K with top-p and min-p, or have only temperature and min-p.
    `positions_R` (int32) is the position of each token in its sequence. `has_few` and `has_open` may be
    false if the caller knows that no row has a top-k, or that none draws from the whole vocabulary.
    """
    tokens_R = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=logits_RV.device)
    if logits_RV.shape[0]:
        ways = {"has_few": has_few, "has_open": has_open, "pdl": uses_pdl(logits_RV.device)}
        for launch in describe_draw(logits_RV, settings, positions_R, tokens_R, **ways):
            launch.run()
    return tokens_R


def describe_logprobs(logits_LV: Tensor, chosen_L: Tensor, num_top: int, out: Ranked, pdl: bool) -> list[Launch]:
    num_rows, width = logits_LV.shape
    device, num_chunks = logits_LV.device, triton.cdiv(width, CHUNK)
    peaks, sums = (torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device) for _ in range(2))
    places = torch.empty(num_rows, 2 * MAX_TOP_K, dtype=torch.int32, device=device)
    ranked = torch.empty(num_rows, MAX_TOP_K, dtype=torch.float32, device=device)
    arguments: dict[str, Any] = {"logits": logits_LV, "peaks": peaks, "sums": sums, "chosen": chosen_L, "places": places}
    arguments |= {"ranked": ranked, "chosen_out": out.chosen_L, "top_out": out.top_LK, "ids_out": out.top_ids_LK}
    arguments |= {"k": num_top, "V": width, "logits_stride": logits_LV.stride(0), "num_chunks": num_chunks}
    arguments |= {"WIDTH": CHUNK, "BLOCK_C": triton.next_power_of_2(num_chunks), "TOP": MAX_TOP_K, "PDL": pdl}
    return [
        describe_peaks(logits_LV, (peaks, sums), pdl),
        Launch(_logprobs_kernel, (num_rows,), arguments, options(16, pdl)),
    ]


def logprobs(logits_LV: Tensor, chosen_L: Tensor, num_top: int) -> Ranked:
    """Return log_softmax at the chosen tokens and the `num_top` most likely (at most MAX_TOP_K). Order equal ones by id."""
    num_rows, num_top = logits_LV.shape[0], min(num_top, logits_LV.shape[1])
    assert num_top <= MAX_TOP_K, f"at most {MAX_TOP_K} top log-probabilities are supported, got {num_top}"
    out = Ranked(
        logits_LV.new_empty(num_rows, dtype=torch.float32),
        logits_LV.new_empty(num_rows, num_top, dtype=torch.float32),
        logits_LV.new_empty(num_rows, num_top, dtype=torch.int64),
    )
    if num_rows:
        for launch in describe_logprobs(logits_LV, chosen_L, num_top, out, uses_pdl(logits_LV.device)):
            launch.run()
    return out
