"""The fused kernels compile for every architecture at the models' real sizes and fit in shared memory. Needs no GPU."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter cannot compile", allow_module_level=True)

from triton import knobs

from culet.errors import InternalError
from culet.hardware import SHARED_BYTES
from culet.kernels.compiler_process import compile_jobs
from culet.kernels.cross_compile import compile_for
from culet.kernels.triton.drafting import accept_drafts, context_kv, copy_suffix, draft_head, draft_round, token_layout
from culet.kernels.triton.experts import expert_mlp, route
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear import few_tokens, norm_linear
from culet.kernels.triton.linear.tiles import GATED, PLAIN, SOFTCAP, choose_tile
from culet.kernels.triton.norms import patches, pointwise, qkv, residual
from culet.kernels.triton.sampling import draw as sampling
from culet.kernels.triton.sampling import masks, penalties
from culet.kernels.types import (
    BlockShape,
    BlockStart,
    Candidates,
    ChainStart,
    ContextLayer,
    HeadShape,
    PageTables,
    Penalties,
    PlannedRows,
    Ranked,
    Rope,
    RowSettings,
    TokenLayout,
)

ARCHITECTURES = (80, 89, 90, 100, 120)
FEW_ARCHITECTURES = (80, 90)  # for kernels without tensor cores or large tiles: one without and one with dependent launch
OTHERS = (80, 89, 100, 120)
EPS = 1e-6
T = TypeVar("T")
# Whether every kernel is compiled for every architecture, or for one of them in turn.
WHOLE = [False, pytest.param(True, marks=pytest.mark.slow)]


def due(kernels: Iterable[T], capability: int, is_whole: bool, architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[T]:
    """Yield the kernels to compile for an architecture: all of them, or those whose turn it is among `architectures`."""
    for index, kernel in enumerate(kernels):
        if is_whole or capability == architectures[index % len(architectures)]:
            yield kernel


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def floats(*size: int) -> Tensor:
    return meta(*size, dtype=torch.float32)


def ints(*size: int) -> Tensor:
    return meta(*size, dtype=torch.int32)


def linear_of(tokens: int, rows: int, size: int, epilogue: int, **extra: object) -> Launch:
    tile = choose_tile(tokens, rows, size, epilogue)
    out = floats(tokens, rows) if epilogue == SOFTCAP else meta(tokens, rows)
    weight = meta(rows * (2 if epilogue == GATED else 1), size)
    return few_tokens.describe(meta(tokens, size), weight, out, tile, epilogue, softcap=30.0, **extra)


def grouped_of(tokens: int, index: int, **extra: object) -> Launch:
    x, gate_up, down = meta(tokens, 2816), meta(128, 1408, 2816), meta(128, 2816, 704)
    return expert_mlp.describe_grouped(x, floats(tokens, 8), ints(tokens, 8), gate_up, down, meta(tokens, 2816), **extra)[index]


def assigned_of(tokens: int, index: int, **extra: object) -> Launch:
    x, gate_up, down = meta(tokens, 2816), meta(128, 1408, 2816), meta(128, 2816, 704)
    given = x, floats(tokens, 8), ints(tokens, 8), gate_up, down, meta(tokens, 2816)
    return expert_mlp.describe_assigned(*given, **extra)[index]


def route_of(tokens: int, **extra: object) -> Launch:
    out = floats(tokens, 8), ints(tokens, 8)
    return route.describe_route(meta(tokens, 2816), floats(128, 2816), floats(128), out, EPS, **extra)[-1]


# Kernels with tensor cores or large tiles: always compiled for Hopper and for an architecture with little shared memory. The
# other architectures take turns.
TILED: dict[str, Callable[..., Launch]] = {
    "linear 32 tokens": lambda **extra: linear_of(32, 5376, 21504, PLAIN, **extra),
    "gated 16 tokens": lambda **extra: linear_of(16, 21504, 5376, GATED, **extra),
    "gated 32 tokens": lambda **extra: linear_of(32, 10240, 2560, GATED, **extra),
    "route 64 tokens": lambda **extra: route_of(64, **extra),
    "route 8192 tokens": lambda **extra: route_of(8192, **extra),
    "experts up 32 tokens": lambda **extra: grouped_of(32, 1, **extra),
    "experts up 256 tokens": lambda **extra: grouped_of(256, 1, **extra),
    "experts up 8192 tokens": lambda **extra: grouped_of(8192, 1, **extra),
    "experts down 8192 tokens": lambda **extra: grouped_of(8192, 2, **extra),
}


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("is_whole", WHOLE)
def test_tiled_kernels_fit(capability: int, is_whole: bool) -> None:
    for name in due(TILED, capability, is_whole or capability in (90, 120), OTHERS):
        launch = TILED[name](pdl=capability >= 90, shared=SHARED_BYTES[capability])
        compiled = compile_for(launch, capability)
        assert compiled.metadata.shared <= SHARED_BYTES[capability], name
        assert compiled.asm["cubin"], name


def small_launches(pdl: bool) -> Iterator[Launch]:
    yield linear_of(1, 2560, 10240, PLAIN, pdl=pdl)
    yield linear_of(1, 2112, 2816, GATED, pdl=pdl)
    yield linear_of(1, 262144, 2560, SOFTCAP, pdl=pdl)
    yield route_of(1, pdl=pdl, shared=0)
    yield from (assigned_of(tokens, index, pdl=pdl) for tokens in (1, 2) for index in range(2))
    yield route.describe_route(
        meta(8192, 2816), floats(128, 2816), floats(128), (floats(8192, 8), ints(8192, 8)), EPS, pdl=pdl
    )[0]
    yield grouped_of(512, 0, pdl=pdl)
    yield grouped_of(512, 3, pdl=pdl)
    yield few_tokens.describe(meta(8, 2560), meta(3072, 2560), floats(2, 8, 3072), choose_tile(8, 3072, 2560), pdl=pdl)
    x, w = meta(4, 5376), floats(5376)
    yield residual.describe_residual(x, (floats(4, 4, 5376),), (w,), None, (w,), EPS, (x, x), pdl)
    yield residual.describe_residual(x, (x,), (), None, (w,), EPS, (x, x), pdl)  # as in a DFlash drafter
    yield residual.describe_residual(x, (x, x), (w, w, w), floats(1), (w, w), EPS, (x, x, x), pdl)
    drafter = HeadShape(64, 8, 128, 128, False, False, EPS, norm_v=False)
    for heads in (
        HeadShape(32, 16, 256, 256, False, False, EPS),
        HeadShape(32, 4, 512, 128, True, True, EPS),
        drafter,
        replace(drafter, num_heads=0),
    ):
        columns = (heads.num_heads + heads.num_kv_heads * (1 if heads.k_eq_v else 2)) * heads.head_dim
        rope = Rope(floats(128, 1, heads.rotated_dims), floats(128, 1, heads.rotated_dims))
        width, planes = (640, 1) if heads.latent else (heads.head_dim, 2)
        pages = meta(planes, 8, heads.num_kv_heads, 32, width)
        q, k = meta(128, heads.num_heads, heads.head_dim), meta(128, heads.num_kv_heads, width)
        weight, slots = floats(heads.num_heads + heads.num_kv_heads, heads.head_dim), meta(128, dtype=torch.int64)
        yield qkv.describe_prepare(meta(128, columns), weight, rope, pages, slots, heads, (q, k, k), pdl)
    for num_heads, size, bounds in ((16, 72, None), (12, 64, floats(3, 2))):
        rope = Rope(floats(630, 1, size), floats(630, 1, size))
        projected, out = meta(630, 3 * num_heads * size), meta(3, 630, num_heads, size)
        yield patches.describe_patch_qkv(projected, floats(2, size), rope, num_heads, EPS, bounds, out, pdl)
    yield patches.describe_clipped_gelu(meta(630, 6144), floats(3, 2), meta(630, 3072), pdl)
    yield pointwise.describe_gate_times(meta(16, 21504)[:, :10752], meta(16, 10752), meta(16, 10752), pdl, is_silu=True)
    yield pointwise.describe_ple(meta(2, 10752), meta(2, 10752), floats(256), 0.02, EPS, meta(2, 42, 256), pdl)


def sampling_launches(pdl: bool) -> Iterator[Launch]:
    logits, wide = floats(4, 262144), meta(4, dtype=torch.float64)
    settings = RowSettings(wide, ints(4), wide, wide, meta(4, dtype=torch.int64), ints(4))
    tokens = meta(4, dtype=torch.int64)
    yield from sampling.describe_draw(logits, settings, ints(4), tokens, pdl=pdl)
    out = Ranked(floats(4), floats(4, 20), meta(4, 20, dtype=torch.int64))
    yield sampling.describe_logprobs(logits, tokens, 20, out, pdl)[1]
    yield masks.describe_bias(logits, ints(300), ints(300), floats(300), pdl)
    yield masks.describe_bitmask(logits, ints(2, 8192), ints(2), pdl)
    yield masks.describe_bitmask(logits, ints(4, 8192), None, pdl)
    long, out_x, last = meta(4, dtype=torch.int64), meta(6, dtype=torch.int64), meta(4, 5376)
    yield accept_drafts.describe_accept_drafts(long, long, ints(5), long, ints(9, 99), ints(1), (out_x, ints(9)), pdl=pdl)
    rows = PlannedRows(ints(5), ints(4), ints(4), ints(4), ints(2, 4), 4)
    layout = TokenLayout(long, long, long, long, ints(4), meta(2, 4, dtype=torch.int64), ints(4), long)
    tables, ids = PageTables(ints(99), ints(2, 3)), (ints(9, 99), meta(3, dtype=torch.int64))
    yield token_layout.describe_token_layout(rows, tables, *ids, ints(9), 8, layout, pdl=pdl)
    into = meta(4, 2, dtype=torch.int64), meta(2, 5376)
    yield accept_drafts.describe_begin_round(out_x, ints(5), long, ints(4), 99, last, into, pdl=pdl)
    rows = Penalties(*(ints(2) for _ in range(4)), *(floats(2) for _ in range(3)))
    yield from penalties.describe_penalise(logits, meta(4, 4096, dtype=torch.int64), rows, 4096, ints(2, 262144), pdl)


@pytest.mark.parametrize("capability", FEW_ARCHITECTURES)
@pytest.mark.parametrize("is_whole", WHOLE)
@pytest.mark.parametrize("launches", [small_launches, sampling_launches])
def test_other_kernels_compile(launches: Callable[[bool], Iterator[Launch]], capability: int, is_whole: bool) -> None:
    for launch in due(launches(capability >= 90), capability, is_whole, FEW_ARCHITECTURES):
        compiled = compile_for(launch, capability)
        assert compiled.metadata.shared <= SHARED_BYTES[89], f"{launch.kernel.__name__} would not fit the smallest architecture"


def small_drafter_launches(pdl: bool) -> Iterator[Launch]:
    """Yield the launches of the layers of the built-in model's drafters."""
    scored, token, table = (
        Candidates(floats(3, 128), meta(3, 128, dtype=torch.int64)),
        meta(3, dtype=torch.int64),
        meta(8192, 256),
    )
    for candidates in (scored, None):
        yield draft_head.describe_embed_linear(candidates, token, meta(3, 256), table, 16.0, meta(128, 512), meta(3, 128), pdl)
    x, y, norm = meta(3, 128), meta(3, 512), floats(128)
    yield norm_linear.describe_normed(x, None, (None, norm), None, EPS, meta(512, 128), (x, y), pdl=pdl)
    parts, gated = floats(4, 3, 128), meta(1536, 128)
    out = x, meta(3, 768)
    yield norm_linear.describe_normed(x, parts, (norm, norm), None, EPS, gated, out, gate="gelu", pdl=pdl)
    yield norm_linear.describe_normed(x, x, (norm, norm), floats(1), EPS, meta(1024, 128), (x, meta(3, 1024)), pdl=pdl)
    x, norm, out = meta(24, 512), floats(512), (meta(24, 512), meta(24, 640))
    yield norm_linear.describe_normed(x, x, (None, norm), None, EPS, meta(1280, 512), out, gate="silu", pdl=pdl)
    heads = HeadShape(0, 2, 128, 128, False, False, EPS, norm_v=False)
    memory = meta(99, 3 * 2 * 2 * 16 * 128)
    planes = [memory.as_strided((2, 99, 2, 16, 128), (4096, memory.stride(0), 2048, 128, 1), 8192 * i) for i in range(3)]
    layers = [ContextLayer(meta(512, 256), floats(2, 128), plane) for plane in planes]
    feature, long = meta(20, 256), meta(20, dtype=torch.int64)
    yield context_kv.describe_context(feature, floats(256), (long, floats(64)), long, layers, heads, pdl)


def round_launches(pdl: bool) -> Iterator[Launch]:
    """Yield the launches of the rounds of the 31B's assistant, of E4B's, and of a published DFlash drafter."""
    rows, size, wide = 3, 16, 5376
    tokens, long, inv_freqs = ints(33, 4096), meta(rows, dtype=torch.int64), [floats(128), floats(64)]
    yield draft_round.describe_newest(tokens, long, long, long, pdl)
    yield draft_round.describe_keep_drafts(tokens, long, long, meta(rows, 7, dtype=torch.int64), pdl)
    best = meta(rows, copy_suffix.NUM_PARTS, dtype=torch.int64)
    yield copy_suffix.describe_search(tokens, long, long, (3, 8), best, pdl)
    yield copy_suffix.describe_copy(tokens, long, long, best, meta(rows, 8, dtype=torch.int64), pdl)
    ropes = [Rope(floats(rows, 1, 2 * len(inv_freq)), floats(rows, 1, 2 * len(inv_freq))) for inv_freq in inv_freqs]
    for kinds in (1, 2):
        start = ChainStart(long, ints(rows + 1), ints(rows), ropes[:kinds])
        yield draft_round.describe_chain(long, False, inv_freqs[:kinds], start, pdl)
    tokens_T = meta(rows * size, dtype=torch.int64)
    rope = Rope(floats(rows * size, 1, 128), floats(rows * size, 1, 128))
    for windows in ((), (2048, None)):
        visible = [ints(2, rows * size) for _ in windows]
        blocks = BlockStart(tokens_T, tokens_T, tokens_T, ints(rows + 1), ints(rows), visible, rope, meta(rows * size, wide))
        tables, shape, table = (ints(rows, 260), ints(rows)), BlockShape(size, 4, 16, 999, windows), meta(262144, wide)
        yield draft_round.describe_blocks(long, long, tables, shape, floats(64), (table, 73.5), blocks, pdl)
    yield draft_round.describe_taps([meta(4, wide)] * 6, meta(4, dtype=torch.int64), meta(99, 6 * wide), pdl)
    yield draft_round.describe_taps([meta(4, wide)] * 8, None, meta(4, 8 * wide), pdl)
    out = floats(rows, 256), meta(rows, 256, dtype=torch.int64)
    yield draft_head.describe_peaks(meta(rows, 262144), out, pdl)
    yield draft_head.describe_peaks(floats(rows, 262144), out, pdl)
    yield from small_drafter_launches(pdl)
    scored = Candidates(floats(rows, 4096), meta(rows, 4096, dtype=torch.int64))
    yield draft_head.describe_pick(scored, long, pdl)
    clusters, chosen = meta(2048, 128, dtype=torch.int64), meta(rows, 32, dtype=torch.int64)
    yield draft_head.describe_clusters(meta(rows, 256), meta(262144, 256), clusters, chosen, scored, pdl)
    for candidates in (scored, None):
        hidden, out = meta(rows, wide), meta(rows, 2 * wide)
        yield draft_head.describe_beside(candidates, long, hidden, meta(262144, wide), 73.5, out, pdl)


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("is_whole", WHOLE)
def test_rounds_compile(capability: int, is_whole: bool) -> None:
    for launch in due(round_launches(capability >= 90), capability, is_whole):
        compiled = compile_for(launch, capability)
        assert compiled.metadata.shared <= SHARED_BYTES[89], f"{launch.kernel.__name__} takes too much shared memory"


# Vocabulary, width and shape of the rows: an assistant's with 8,192 tokens, and the built-in DFlash drafter's blocks.
HEADS = [
    (8192, 128, (1,)),
    (8192, 128, (40,)),
    (8192, 256, (1, 7)),
    (8192, 256, (16, 7)),
    (16384, 1024, (3,)),
    (16384, 1024, (40,)),
]


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("is_whole", WHOLE)
def test_heads_compile(capability: int, is_whole: bool) -> None:
    for vocab, size, rows in due(HEADS, capability, is_whole):
        num_rows = torch.Size(rows).numel()
        out = floats(num_rows, vocab // 64), meta(num_rows, vocab // 64, dtype=torch.int64)
        cap = 30.0 if len(rows) > 1 else None
        launch = draft_head.describe_head(meta(*rows, size), meta(vocab, size), None, cap, out, capability >= 90)
        shared = compile_for(launch, capability).metadata.shared
        assert shared <= SHARED_BYTES[capability], f"{vocab} x {size}, {rows}: {shared} bytes of shared memory"


def e4m3_head(rows: int, capability: int) -> Launch:
    table, out = meta(262144, 1024, dtype=torch.float8_e4m3fn), (floats(rows, 4096), meta(rows, 4096, dtype=torch.int64))
    return draft_head.describe_head(meta(rows, 1024), table, floats(262144), None, out, capability >= 90)


@pytest.mark.parametrize("capability", [89, 90, pytest.param(100, marks=pytest.mark.slow)])
def test_a_head_in_e4m3_compiles(capability: int) -> None:
    for rows in (3, 64):
        assert compile_for(e4m3_head(rows, capability), capability).metadata.shared <= SHARED_BYTES[capability]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("order", [(90, 89), pytest.param((89, 90), marks=pytest.mark.slow)])
def test_architectures_do_not_affect_each_other(order: tuple[int, int]) -> None:
    """Triton chooses the fp8 conversion for the first kernel of a process, but only sm_90 has this instruction."""
    ptx = {capability: compile_for(e4m3_head(3, capability), capability).asm["ptx"] for capability in order}
    assert "cvt.bf16.f16" in ptx[90]
    assert "cvt.bf16.f16" not in ptx[89]


def test_a_process_compiles_for_one_architecture() -> None:
    job = {"cache": knobs.cache.dir, "module": "no.module", "kernel": "none", "specialization": "{}"}
    answers = io.StringIO()
    with knobs.cache.scope():  # a job sets the folder
        compile_jobs((json.dumps({**job, "capability": capability}) for capability in (90, 89)), answers, has_launchers=True)
    first, second = answers.getvalue().splitlines()
    assert "ModuleNotFoundError" in first
    assert "compiles for sm_90, not for sm_89" in second


def test_a_kernel_that_does_not_compile_is_reported() -> None:
    with pytest.raises(InternalError, match="_head_kernel does not compile for sm_80"):  # sm_80 has no e4m3
        compile_for(e4m3_head(3, 80), 80)


def test_a_tile_that_does_not_fit_loses_stages() -> None:
    full = linear_of(32, 21504, 5376, GATED, shared=SHARED_BYTES[90])
    less = linear_of(32, 21504, 5376, GATED, shared=SHARED_BYTES[89])
    assert full.arguments["STAGES"] > less.arguments["STAGES"] >= 1
