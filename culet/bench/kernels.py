"""`culet bench kernels`: time attention backends at the shapes of the Gemma 4 variants, or at any other shape.

A case is a step like the engine's. Its rows have new tokens, and keys in randomly ordered pages. The backend plans it as in
serving. The time is that of one layer's `run`, replayed from a CUDA graph, with the L2 cache flushed before each replay.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.attention.plan import BACKENDS, plan_attention
from culet.bench.attention_cases import SHAPES, AttentionShape
from culet.bench.peer import FA4, GPU, UNIFIED_TRITON, kernel_anchor
from culet.bench.timing import flush_buffer, replay_times
from culet.cache.pool import Pool
from culet.cache.spec import CacheLayout, KVGroup, KVSpec
from culet.errors import ConfigError, UnsupportedError
from culet.hardware import Peaks
from culet.kernels.compiling import use_disk_cache
from culet.kernels.eager import ops as eager_ops
from culet.kernels.eager.attention import prefill_attention
from culet.kernels.types import PagedKV, RaggedRows
from culet.registry import load, lookup
from culet.runner.fill import fill
from culet.types import PageTable, Row

NUM_LAYERS = 2  # per slab, so that pages are strided as in a model
VERIFY_QUERIES = 16  # rows with up to this many query tokens are decode or verify rows, in which every token has logits
TOLERANCE = 5e-3  # maximum ||a - b|| / ||b|| of a token's head, compared to float32 on the same inputs
_SPREAD = 0.3  # standard deviation of queries and keys, which makes that of scores about two
_CASE = re.compile(r"(prefill) (\d+)x(\d+)|(verify) (\d+)x(\d+)@(\d+)|(decode) (\d+)@(\d+)")


@dataclass(frozen=True)
class KernelCase:
    """The rows of a call, each given as (keys before it, query tokens)."""

    name: str
    spans: tuple[tuple[int, int], ...]


def parse_case(name: str) -> KernelCase:
    """Parse a case: `decode 32@8000`, `verify 32x4@8000` or `prefill 4x1000`."""
    match = _CASE.fullmatch(name)
    if match is None:
        expected = "expected one like 'decode 32@8000', 'verify 32x4@8000' or 'prefill 4x1000'"
        hint = "the numbers are rows@keys, rows x queries@keys, and rows x queries"
        raise ConfigError(f"case: got {name!r}, {expected}", hint=hint)
    kind, *numbers = (part for part in match.groups() if part is not None)
    rows, queries, keys = {"prefill": [*numbers, "0"], "verify": numbers, "decode": [numbers[0], "1", numbers[-1]]}[kind]
    return make_kernel_case(int(rows), int(queries), int(keys), name=name)


def make_kernel_case(rows: int, queries: int, keys: int, *, ragged: bool = False, seed: int = 0, name: str = "") -> KernelCase:
    """Make a case with `rows` of `queries` tokens after `keys` keys.

    Ragged rows have up to that many keys, or up to that many tokens if there are no keys.
    """
    if rows < 1 or queries < 1 or keys < 0:
        expected = "expected at least 1 row, 1 query token and 0 keys"
        raise ConfigError(f"case: got {rows} rows of {queries} query tokens after {keys} keys, {expected}")
    draw = random.Random(seed)

    def some(most: int, least: int) -> int:
        return draw.randint(least, most) if ragged else most

    spans = tuple((some(keys, 0), queries) if keys else (0, some(queries, 1)) for _ in range(rows))
    kind = "prefill" if queries > VERIFY_QUERIES else "verify" if queries > 1 else "decode"
    size = f"{rows}x{queries}" if queries > 1 else f"{rows}"
    return KernelCase(name or f"{kind} {size}" + (f"@{keys}" if keys else "") + (" ragged" if ragged else ""), spans)


def find_shape(name: str) -> AttentionShape:
    return lookup("shape", name, SHAPES)


def check_shape(shape: AttentionShape) -> AttentionShape:
    """Return the shape. Raise if it is impossible."""
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_tokens, shape.window or 1)
    if min(sizes) < 1 or shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"shape: got {shape.num_heads} query heads, {shape.num_kv_heads} KV heads, head dim {shape.head_dim}, "
            f"window {shape.window} and {shape.page_tokens} tokens per page",
            hint="all must be at least 1, and the number of KV heads must divide the number of query heads",
        )
    return shape


@dataclass(frozen=True)
class KernelLine:
    """A timed case."""

    shape: str
    case: str
    backend: str
    microseconds: float
    num_bytes: int  # KV that must be read
    flops: int
    floor_us: float | None
    fa4_us: int | None
    triton_us: int | None
    error: float | None  # None if not checked
    runs: tuple[float, ...] = field(default=(), repr=False)

    @property
    def is_right(self) -> bool | None:
        return None if self.error is None else self.error <= TOLERANCE

    def document(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "case": self.case,
            "backend": self.backend,
            "us": self.microseconds,
            "us_min": min(self.runs),
            "us_max": max(self.runs),
            "num_bytes": self.num_bytes,
            "flops": self.flops,
            "floor_us": self.floor_us,
            "fa4_us": self.fa4_us,
            "triton_us": self.triton_us,
            "error": None if self.error is None or math.isnan(self.error) else self.error,
            "is_right": self.is_right,
        }


class CaseTensors:
    """The tensors of a case: a batch, pages with random keys, and a layer's queries, keys and values."""

    def __init__(self, shape: AttentionShape, case: KernelCase, device: torch.device, dtype: torch.dtype) -> None:
        self.layer = NUM_LAYERS - 1
        rotated = shape.width - shape.head_dim
        specs = tuple(
            KVSpec(layer, shape.num_kv_heads, shape.head_dim, rotated, shape.window, shape.latent, dtype.itemsize)
            for layer in range(NUM_LAYERS)
        )
        self.group = KVGroup("global" if shape.window is None else "sliding", 0, specs, shape.page_tokens)
        layout = CacheLayout(self.group.bytes_per_token * shape.page_tokens, (self.group,))
        rows, num_slabs = _rows(self.group, case)
        longest = max(context + queries for context, queries in case.spans)
        tokens_SL = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        self.batch: ForwardBatch = fill(rows, layout, tokens_SL, tokens_SL.new_empty(0))
        generator = torch.Generator(device=device).manual_seed(1)
        self.pool = Pool(layout, num_slabs, dtype, device)
        self.pool.planes(self.layer).normal_(0.0, _SPREAD, generator=generator)

        def draw(*size: int) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)

        num_tokens, num_kv = self.batch.num_tokens, shape.num_kv_heads
        self.q_TNH = draw(num_tokens, shape.num_heads, shape.head_dim)
        new_TPGW = draw(num_tokens, specs[0].num_planes, num_kv, shape.width)
        self.k_TGH = new_TPGW[:, 0, :, shape.width - shape.head_dim :]
        self.v_TGH = new_TPGW[:, -1, :, : shape.head_dim]
        if not shape.latent:
            self.k_TGH, self.v_TGH = self.k_TGH.contiguous(), self.v_TGH.contiguous()
        where = eager_ops.stores(self.batch.groups[0].kv_address_T, shape.page_tokens)
        eager_ops.store(self.pool.planes(self.layer), new_TPGW, where)

    def run(self, backend: AttentionBackend) -> Tensor:
        return backend.run(self.layer, self.batch, self.pool, self.q_TNH, self.k_TGH, self.v_TGH)

    def expected(self) -> Tensor:
        """Compute the float32 result with the kernels' eager twin."""
        own, spec = self.batch.groups[0], self.group.spec
        kv = PagedKV(self.pool.planes(self.layer), own.pages_BP, own.first_B, spec.head_dim, spec.window)
        rows = RaggedRows(self.batch.row_begin_B1, self.batch.context_B)
        tiles_X2 = torch.tensor([[row, 0] for row in range(len(self.batch.rows))])
        return prefill_attention(self.q_TNH.float(), kv, rows, tiles_X2, fresh=(self.k_TGH, self.v_TGH))


def _rows(group: KVGroup, case: KernelCase) -> tuple[tuple[Row, ...], int]:
    """Return rows with shuffled pages, as many as a sequence holds, and the number of pages. Page 0 is unused."""
    size, wanted = group.page_tokens, []
    for context, queries in case.spans:
        num_logits = queries if queries <= VERIFY_QUERIES else 1
        end = context + queries
        store_from = context if group.window is None else max(context, end - group.window - num_logits + 1)
        first = (store_from if context == 0 else min(store_from, group.first_visible(context))) // size
        wanted.append((num_logits, store_from, first, -(-end // size) - first))
    free = list(range(1, 1 + sum(count for *_, count in wanted)))
    random.Random(0).shuffle(free)
    rows = []
    for slot, ((context, queries), (num_logits, store_from, first, count)) in enumerate(zip(case.spans, wanted, strict=True)):
        pages = tuple(free.pop() for _ in range(count))
        rows.append(Row(slot, context, queries, num_logits, (PageTable(first, pages),), (store_from,)))
    return tuple(rows), 1 + sum(count for *_, count in wanted)


def work(shape: AttentionShape, case: KernelCase, itemsize: int = 2) -> tuple[int, int]:
    """Return (bytes of KV that some query sees, operations) for a call."""
    num_bytes = flops = 0
    for context, queries in case.spans:
        window = shape.window or context + queries
        seen_first = min(context + 1, window)  # keys the first query sees; each later one sees one more, up to the window
        growing = min(queries - 1, window - seen_first)
        pairs = queries * seen_first + growing * (growing + 1) // 2 + (queries - 1 - growing) * growing
        flops += 4 * shape.num_heads * shape.head_dim * pairs
        num_bytes += (queries + seen_first - 1) * (shape.bytes_per_key // 2) * itemsize
    return num_bytes, flops


def time_case(
    shape_name: str,
    shape: AttentionShape,
    case: KernelCase,
    *,
    device: torch.device,
    backend: str = "auto",
    repeats: int = 25,
    check: bool = True,
    peaks: Peaks | None = None,
) -> KernelLine:
    """Time a case on `backend`. `auto` is the backend that serves its shape on this device."""
    _refuse_cpu(device, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        use_disk_cache()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = CaseTensors(shape, case, device, dtype)
    plan = plan_attention((tensors.group,), shape.num_heads, str(device), backend)
    name = plan.of(tensors.group.name).backend
    serving: AttentionBackend = load(plan.path(tensors.group))(tensors.group, shape.num_heads)
    with torch.inference_mode():
        serving.plan(tensors.batch, tensors.pool)
        error = _worst_error(tensors.run(serving), tensors.expected()) if check else None
        timer = _time_on_gpu if device.type == "cuda" else _time_on_cpu
        runs = timer(lambda: tensors.run(serving), repeats)
    num_bytes, flops = work(shape, case, dtype.itemsize)
    is_anchored = device.type == "cuda" and GPU in torch.cuda.get_device_name(device)
    return KernelLine(
        shape=shape_name,
        case=case.name,
        backend=name,
        microseconds=median(runs),
        num_bytes=num_bytes,
        flops=flops,
        floor_us=None if peaks is None else 1e6 * peaks.seconds(num_bytes, flops),
        fa4_us=kernel_anchor(FA4, shape_name, case.name) if is_anchored else None,
        triton_us=kernel_anchor(UNIFIED_TRITON, shape_name, case.name) if is_anchored else None,
        error=error,
        runs=tuple(runs),
    )


def _refuse_cpu(device: torch.device, backend: str) -> None:
    lookup("attention backend", backend, {"auto": None, **dict.fromkeys(BACKENDS)})
    if device.type == "cpu" and backend != "torch_cpu":
        what = "the attention kernels need" if backend == "auto" else f"the {backend} backend needs"
        raise UnsupportedError(f"{what} an NVIDIA GPU, but this device is a CPU", hint="use --backend torch_cpu")


def _worst_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest ||a - b|| / ||b|| of a token's head, or NaN if anything is NaN."""
    return float(((got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _time_on_gpu(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the microseconds of each of `repeats` calls."""
    return replay_times(run, repeats, flush_buffer())


def _time_on_cpu(run: Callable[[], object], repeats: int) -> list[float]:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - began))
    return times


def kernel_document(lines: Sequence[KernelLine], device: str, versions: dict[str, str]) -> dict[str, Any]:
    """Return all results as a JSON object. Its keys are stable."""
    return {
        "schema": 1,
        "benchmark": "kernels",
        "device": device,
        "versions": versions,
        "cases": [line.document() for line in lines],
    }
