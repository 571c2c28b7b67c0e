"""`culet bench` without an engine: floors, rows, random models, reports, kernel cases, and bad input."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from culet.bench import report
from culet.bench.answer_check import TwinVerdict
from culet.bench.attention_cases import SHAPES, AttentionShape
from culet.bench.floor import Floor
from culet.bench.kernels import CaseTensors, make_kernel_case, parse_case, time_case, work
from culet.bench.offline import Measured
from culet.bench.peer import EQUAL_SETTINGS, FA4, KERNEL_CASES, SERVING, UNIFIED_TRITON, kernel_anchor
from culet.bench.settings import all_settings, bench_config
from culet.bench.workloads import DEFAULT_ROWS, STANDARD, Workload, make_prompts, parse_rows
from culet.cache.spec import plan_cache
from culet.cli.main import run
from culet.engine.resolve import given_settings
from culet.errors import ConfigError, UnsupportedError
from culet.hardware import PEAKS, find_peaks
from culet.layers.weight.weights import Weights
from culet.models.checkpoint import open_checkpoint
from culet.models.random_checkpoint import RandomDraw, random_name, reduce_depth, twin_depth, variant_of
from culet.models.random_weights import draw_model
from culet.models.sizes import text_weights
from culet.models.spec import ModelSpec, read_spec
from culet.models.towers.spec import read_towers
from culet.models.variants import VARIANTS
from culet.testing.tiny import SHAPES as TINY
from culet.testing.tiny import write_checkpoint
from culet.text.tokenizer import BorrowedTokenizer, Tokenizer

H200 = PEAKS["H200"]
CPU = torch.device("cpu")


def spec_of(variant: str) -> ModelSpec:
    return read_spec(VARIANTS[variant])


# Floors

# Microseconds of a decode step by (sequences, context), with separate K and V, at 4.2 TB/s and 790 TFLOP/s.
DECODE_US = {
    "E2B": {(1, 1024): 1092, (8, 8192): 1337, (32, 32768): 4776, (128, 1024): 1980},
    "E4B": {(1, 1024): 2227, (8, 1024): 2337, (32, 1024): 2715, (1, 32768): 2444, (128, 8192): 10488},
    "12B": {(1, 1024): 5754, (32, 8192): 9249, (128, 8192): 19986},
    "26B-A4B": {(1, 1024): 1875, (8, 1024): 5965, (32, 1024): 12394, (1, 32768): 2030, (32, 131072): 32687},
    "31B": {(1, 1024): 14837, (8, 1024): 16375, (32, 1024): 21648, (1, 32768): 15456, (32, 8192): 26122},
}
LATENT_US = {
    "12B": {(32, 131072): 18452},
    "26B-A4B": {(8, 32768): 6724, (32, 131072): 25017},
    "31B": {(1, 32768): 15216, (8, 8192): 17014, (32, 8192): 24204},
}
PREFILL_MS = {
    "E2B": (1.58, 14.6, 83),
    "E4B": (6.1, 52, 240),
    "12B": (28.9, 244, 1110),
    "26B-A4B": (15.6, 75, 384),
    "31B": (77, 652, 2943),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_floors(variant: str) -> None:
    for latent, table in ((False, DECODE_US), (True, LATENT_US)):
        floor = Floor(spec_of(variant), H200, latent=latent)
        for (num_seqs, context), microseconds in table.get(variant, {}).items():
            assert round(1e6 * floor.decode_step(num_seqs, context)) == microseconds, (num_seqs, context)


def test_verify_floor_of_experts() -> None:
    """Four tokens of a sequence use more experts than one token. On the 26B the step takes 1.96 times as long."""
    floor = Floor(spec_of("26B-A4B"), H200, latent=False)
    assert 1e6 * floor.decode_step(1, 1024, 4) == pytest.approx(3670, rel=0.002)


def test_the_floor_of_a_rounded_head() -> None:
    """A step of one token reads 2.8 GB of the 31B's head in bfloat16, and 9 bits for 32 of them in int4."""
    spec = spec_of("31B")
    plain, rounded = (Floor(spec, H200, quantization="int4", head_quantization=head) for head in ("auto", "int4"))
    saved = spec.vocab_size * spec.hidden_size * (2 - 9 / 16) / H200.bytes_per_s
    assert plain.decode_step(1, 1000) - rounded.decode_step(1, 1000) == pytest.approx(saved)
    settings = {"quantization": "int4", "head_quantization": "int4"}
    setting = replace(make_setting("31B"), settings={**EQUAL_SETTINGS, **settings})
    row = STANDARD["tpot"][0]
    assert setting.floor(row) == pytest.approx(1e3 * rounded.decode_step(1, row.prompt_len + row.output_len // 2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_floors(variant: str) -> None:
    floor = Floor(spec_of(variant), H200)
    for length, milliseconds in zip((1024, 8192, 32768), PREFILL_MS[variant], strict=True):
        assert 1e3 * floor.prefill(1, length) == pytest.approx(milliseconds, rel=0.012)


# The anchors' floor column: TPOT at 1, 8 and 32 sequences and at 32,000 tokens, TTFT at 1k, 8k and 32k, chat, summarise.
ANCHOR_FLOORS = {
    "31B": (14.8, 16.4, 21.6, 15.5, 76, 636, 2864, 2100, 820),
    "26B-A4B": (1.88, 5.97, 12.4, 2.03, 15.4, 73, 373, 4400, 3300),
    "E4B": (2.23, 2.34, 2.72, 2.44, 6.0, 50, 233, 22000, 8400),
}


@pytest.mark.parametrize("variant", ANCHOR_FLOORS)
def test_floors_of_the_rows(variant: str) -> None:
    setting = make_setting(variant, latent=False)
    rows = parse_rows("tpot,ttft,chat,summarise")
    for row, expected in zip(rows, ANCHOR_FLOORS[variant], strict=True):
        # The peer's throughput floors are rounded, and those of E4B count shared KV only once, which is too optimistic.
        tolerance = 0.02 if row.kind != "throughput" else 0.2
        assert setting.floor(row) == pytest.approx(expected, rel=tolerance), row.label


def test_a_floor_is_below_what_the_peer_measured() -> None:
    for variant, anchors in SERVING.items():
        setting = make_setting(variant)
        for row, anchor in anchors.items():
            floor = setting.floor(row)
            if floor is not None and anchor.peer is not None:
                assert (anchor.peer < floor) == row.is_larger_better, (variant, row.label)
                assert (anchor.goal < floor) == row.is_larger_better, (variant, row.label)


def test_peaks_by_name() -> None:
    assert find_peaks("NVIDIA H200") == H200
    assert find_peaks("NVIDIA H100 80GB HBM3") is None


# Rows


def test_standard_rows() -> None:
    rows = parse_rows(DEFAULT_ROWS)
    assert [row.label for row in rows] == [
        "tpot:1x1000+256",
        "tpot:8x1000+256",
        "tpot:32x1000+256",
        "tpot:1x32000+256",
        "ttft:1x1000",
        "ttft:1x8000",
        "ttft:1x32000",
        "throughput:80x1000+1000",
        "throughput:80x8000+1000",
        "start",
    ]
    assert parse_rows(",".join(row.label for row in rows)) == rows, "labels can be typed"
    assert parse_rows("chat,tpot:8x1000+256,chat") == [*STANDARD["chat"], STANDARD["tpot"][1]]
    assert [row.repeats(3) for row in rows] == [3, 1, 1, 3, 3, 3, 3, 1, 1, 1]
    assert "chat" in STANDARD["chat"][0].title
    assert max(row.total_len for row in rows) == 32256
    assert all(set(anchors) == set(rows) for anchors in SERVING.values())


def test_rows_with_images() -> None:
    (row,) = parse_rows("image:8x2@280+64")
    assert (row.label, row.image_tokens, row.unit) == ("image:8x2@280+64", 266, "ms")
    assert row.prompt_len == 2 * (266 + 2) + 32
    vision = read_towers(VARIANTS["31B"]).vision
    setting = report.Setting("random:31B", spec_of("31B"), "H200", H200, "bfloat16", True, {}, {}, vision)
    assert setting.floor(row) == pytest.approx(1e3 * 3.33e12 / H200.flops_per_s, rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "tpots",
        "tpot:8",
        "tpot:8x100",
        "ttft:1x5+3",
        "tpot:1x10+1",
        "tpot:0x9+9",
        "ttft:1x0",
        "image:1x1@99+4",
        "image:1x0@70+4",
    ],
)
def test_bad_rows(text: str) -> None:
    with pytest.raises(ConfigError, match="rows: got") as caught:
        parse_rows(text)
    assert "tpot:8x1000+256" in caught.value.hint


def test_prompts() -> None:
    row = Workload("tpot", 3, 50, 10)
    prompts = make_prompts(row, 5000, seed=1)
    assert [len(prompt) for prompt in prompts] == [50] * 3
    assert min(map(min, prompts)) >= 1000
    assert max(map(max, prompts)) < 5000
    assert prompts == make_prompts(row, 5000, seed=1) != make_prompts(row, 5000, seed=2)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert max(map(max, make_prompts(row, 40, seed=1))) < 40


def test_settings_are_the_peers_unless_given() -> None:
    config = bench_config({"model": "random:31B"}, parse_rows("tpot"))
    assert not config.cache.enable_prefix_caching
    assert config.model.max_model_len == 34000
    given = {"model": "random:31B", "enable_prefix_caching": True, "gpu_memory_utilization": 0.95, "max_model_len": 2100}
    config = bench_config(given, parse_rows("chat"))
    assert given_settings(config) == given | {"max_step_ms": 0}
    assert all_settings(config)["max_num_seqs"] == 128
    assert bench_config({"model": "random:E2B"}, parse_rows("ttft:1x90000")).model.max_model_len == 90016


# Models without files


@pytest.mark.parametrize("variant", VARIANTS)
def test_twins_keep_everything_but_depth(variant: str) -> None:
    spec = spec_of(variant)
    assert reduce_depth(spec, len(spec.layers)) == spec
    assert variant_of(spec) == variant
    depth = twin_depth(spec, 2)
    twin = reduce_depth(spec, depth)
    assert depth < len(spec.layers)
    assert twin.layers[-1].is_global
    assert variant_of(twin) is None
    assert bool(twin.num_kv_shared) == bool(spec.num_kv_shared)
    assert {(layer.is_global, layer.owns_kv) for layer in twin.layers} == {
        (layer.is_global, layer.owns_kv) for layer in spec.layers
    }
    pages = [[group.page_tokens for group in plan_cache(model.kv_specs(2)).groups] for model in (spec, twin)]
    assert pages[0] == pages[1], "other page sizes would be other kernels"


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_depth_is_a_model(variant: str) -> None:
    spec = spec_of(variant)
    for num_layers in range(2, len(spec.layers)):
        layers = reduce_depth(spec, num_layers).layers
        assert [layer.index for layer in layers] == list(range(num_layers))
        for layer in layers:
            source = layers[layer.kv_source]
            assert source.owns_kv
            assert (source.window, source.head_dim) == (layer.window, layer.head_dim)
        owners = [layer.owns_kv for layer in layers]
        assert owners == sorted(owners, reverse=True)


def test_random_checkpoints_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint("random:26b,layers=6,seed=3,draw=calm")
    assert len(checkpoint.spec.layers) == 6
    assert checkpoint.random == RandomDraw(3, "calm")
    assert checkpoint.defaults.eos_token_ids == (1, 106)
    folder = write_checkpoint(tmp_path, "E4B")
    assert open_checkpoint(random_name(str(folder))).spec == open_checkpoint(str(folder)).spec
    assert random_name("31B", num_layers=12, draw="calm") == "random:31B,layers=12,draw=calm"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("random:", "expected the name of a variant"),
        ("random:7B", "no such variant"),
        ("random:31B,layers=1", "layers: got 1, expected a number from 2 to 60"),
        ("random:31B,layers=61", "layers: got 61"),
        ("random:31B,layers=all", "layers=all is not an option"),
        ("random:31B,draw=wild", "draw=wild is not an option"),
        ("random:31B,size=2", "size=2 is not an option"),
    ],
)
def test_bad_names(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        open_checkpoint(name)
    assert "random:31B" in caught.value.hint


def tiny_spec(shape: str, tmp_path: Path) -> ModelSpec:
    return open_checkpoint(str(write_checkpoint(tmp_path / shape, shape))).spec


@pytest.mark.parametrize("shape", TINY)
def test_every_weight_is_drawn(shape: str, tmp_path: Path) -> None:
    spec = tiny_spec(shape, tmp_path)
    model = draw_model(spec, RandomDraw(), Weights(torch.float32, CPU))
    places = model.placements()
    assert sum(place.target.numel() for place in places.values()) == sum(text_weights(spec).values())
    for name, place in places.items():
        value = place.target
        if value.ndim == 1:
            assert (value == 1).all(), name
        elif "router" not in name:  # D ** -0.5 is folded into the router
            assert float(value.std()) == pytest.approx(0.02, rel=0.15), name
            assert float(value.mean()) == pytest.approx(0, abs=0.004), name
    draws = [place.target.flatten()[:64] for place in places.values() if place.target.ndim > 1 and place.target.numel() >= 64]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws), "no two tensors are alike"


def test_a_draw_does_not_depend_on_depth_precision_or_cache(tmp_path: Path) -> None:
    spec = tiny_spec("31B", tmp_path)
    whole = draw_model(spec, RandomDraw(), Weights(torch.bfloat16, CPU), latent=True).placements()
    twin = draw_model(reduce_depth(spec, 3), RandomDraw(), Weights(torch.float32, CPU), latent=False).placements()
    for name, place in twin.items():
        if name.startswith(("layers.0.", "layers.1.", "embed")):
            torch.testing.assert_close(place.target, whole[name].target.float(), rtol=0, atol=0)
    reseeded = draw_model(spec, RandomDraw(seed=1), Weights(torch.bfloat16, CPU)).placements()
    assert not torch.equal(reseeded["embed_tokens.weight"].target, whole["embed_tokens.weight"].target)


def test_kinds_of_draw(tmp_path: Path) -> None:
    spec = tiny_spec("26B-A4B", tmp_path)
    narrow = draw_model(spec, RandomDraw(kind="narrow"), Weights(torch.float32, CPU)).placements()
    assert 0.9e-3 < float(narrow["embed_tokens.weight"].target.abs().max()) <= 1e-3
    assert torch.all(narrow["norm.weight"].target == 1)
    uniform = draw_model(spec, RandomDraw(kind="uniform"), Weights(torch.float32, CPU)).placements()
    assert 0 < float(uniform["norm.weight"].target.abs().max()) <= 1e-3
    calm = draw_model(spec, RandomDraw(kind="calm"), Weights(torch.float32, CPU))
    layer = calm.layers[0]
    assert float(layer.attention.q_norm[0]) == pytest.approx(16**-0.5)
    logits = torch.randn(1000, spec.hidden_size) @ layer.experts.router.tensor.T
    assert float(logits.std()) == pytest.approx(4.0, rel=0.2), "the router has preferences"


def test_a_random_model_borrows_the_words_of_the_built_in_model() -> None:
    folder = open_checkpoint("random:31B").tokenizer_folder
    own, tokenizer = Tokenizer(folder), BorrowedTokenizer(folder, 262_144)
    text = "<|turn>user\nHow many people live here?<turn|>"
    assert tokenizer.encode(text) == own.encode(text)
    assert (tokenizer.token_id("<turn|>"), tokenizer.vocab_size) == (106, 262_144)
    assert tokenizer.decode([*own.encode("a house"), 8192, 262_143, 262_144]) == "a house 8192 262143"
    small = BorrowedTokenizer(folder, 200)
    assert max(small.encode(text)) < 200
    assert small.decode([199, 200]) == own.decode([199])


# Reports


def make_setting(variant: str, *, device: str = "NVIDIA H200", latent: bool = True) -> report.Setting:
    peaks = find_peaks(device)
    return report.Setting(f"random:{variant}", spec_of(variant), device, peaks, "bfloat16", latent, dict(EQUAL_SETTINGS), {})


def make_lines(setting: report.Setting, value: float = 20.0, *, right: bool = True) -> list[report.Line]:
    verdict = TwinVerdict(12, 64, 64 if right else 3, 0.0 if right else 4.2)
    details: dict[str, Any] = {"seconds": 1.0, "preemptions": 0, "all_at_once": True}
    rows = [STANDARD["tpot"][0], STANDARD["ttft"][1], STANDARD["chat"][0]]
    return [report.line_of(Measured(row, value, (value,), details, verdict), setting) for row in rows]


def test_shares_and_speedups() -> None:
    tpot, _, chat = make_lines(make_setting("31B"))
    assert tpot.peer == 17.85
    assert tpot.speedup == pytest.approx(17.85 / 20)
    assert tpot.share(tpot.value) == pytest.approx(14.8 / 20, rel=0.01)
    assert chat.speedup == pytest.approx(20 / 1148)
    assert chat.share(chat.value) == pytest.approx(20 / 2100, rel=0.01)


@pytest.mark.parametrize("name", EQUAL_SETTINGS)
def test_the_peer_is_shown_only_at_equal_settings(name: str) -> None:
    setting = make_setting("31B")
    assert replace(setting, settings=all_settings(bench_config({"model": "random:31B"}, parse_rows("tpot")))).anchor(
        STANDARD["tpot"][0]
    )
    assert replace(setting, settings={**EQUAL_SETTINGS, name: "another"}).anchor(STANDARD["tpot"][0]) is None


def test_the_peer_is_shown_only_for_equal_weights() -> None:
    setting = make_setting("31B")
    for other in (replace(setting, model="google/gemma-4-31B-it"), replace(setting, dtype="float32")):
        assert other.anchor(STANDARD["tpot"][0]) is None
    assert replace(setting, model=random_name("31B", draw="uniform")).anchor(STANDARD["tpot"][0]) is None


def test_the_peer_is_shown_only_for_its_gpu_and_depth() -> None:
    for setting in (make_setting("31B", device="NVIDIA H100 80GB HBM3"), make_setting("12B")):
        assert all(line.peer is None and line.speedup is None for line in make_lines(setting))
    line = report.line_of(Measured(STANDARD["tpot"][3], 2.0, (2.0,)), make_setting("26B-A4B"))
    assert (line.peer, line.goal) == (None, 2.5)
    assert "4.62" in line.note


def test_document_is_plain_json() -> None:
    setting = make_setting("31B")
    document = json.loads(json.dumps(report.document(make_lines(setting), setting), allow_nan=False))
    assert document["variant"] == "31B"
    assert document["rows"][0]["row"] == "tpot:1x1000+256"
    assert document["rows"][0]["check"]["is_right"] is True
    broken = TwinVerdict(12, 16, 0, float("nan"))
    assert not broken.is_right
    json.dumps(broken.document(), allow_nan=False)


def test_verdicts() -> None:
    assert TwinVerdict(6, 16, 16, 0.0).is_right
    assert TwinVerdict(6, 16, 12, 0.1).is_right
    assert not TwinVerdict(6, 16, 15, 0.5).is_right, "one token out of reach"
    assert not TwinVerdict(6, 16, 5, 0.1).is_right, "too many near misses"


def render(table: Any) -> str:
    from rich.console import Console

    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_table_and_remarks() -> None:
    setting = make_setting("31B")
    text = render(report.table(make_lines(setting), setting))
    assert "TPOT, 1 sequence, 1000 in, 256 out" in text
    assert all(word in text for word in ("17.85", f"{17.85 / 20:.2f}x", "14.8", "74%", "right", "goal"))
    wrong = make_lines(setting, right=False)
    assert "WRONG" in render(report.table(wrong, setting))
    assert any("3 of 64 tokens" in remark for remark in report.remarks(wrong))
    waited = report.line_of(Measured(STANDARD["chat"][0], 9.0, (9.0,), {"preemptions": 2, "all_at_once": False}), setting)
    assert any(remark.rpartition(": ")[2] == "2 preemptions because the cache was full" for remark in report.remarks([waited]))
    waited.more["details"]["parked"] = 1
    assert any(
        "2 preemptions because the cache was full, 1 of them to host memory" in each for each in report.remarks([waited])
    )
    bare = make_setting("31B", device="CPU")
    assert "floor" not in render(report.table(make_lines(bare), bare))


def test_picture() -> None:
    setting = make_setting("31B")
    lines = make_lines(setting, value=18.0)
    start = report.line_of(Measured(Workload("start"), 9.0, (9.0,), {"cold_s": 9.0, "cached_s": 4.0}), setting)
    root = ET.fromstring(report.draw([*lines, start], "31B <on> H200"))
    name = "{http://www.w3.org/2000/svg}"
    bars = [part for part in root.iter(f"{name}rect") if part.get("class") == "ours" and float(part.get("width", 0)) > 11]
    full = [part for part in root.iter(f"{name}rect") if part.get("class") == "room"]
    assert len(full) == 3, "a start has no floor"
    assert float(bars[0].get("width", 0)) / float(full[0].get("width", 0)) == pytest.approx(14.8 / 18, rel=0.02)
    assert sum(part.get("class") == "peer" for part in root.iter(f"{name}line")) == 4, "three rows and the legend"
    words = " ".join(part.text or "" for part in root.iter(f"{name}text"))
    assert "TPOT, 1 sequence, 1000 in, 256 out" in words
    assert "vLLM 0.24 17.85" in words


# Kernels


def test_kernel_anchors_are_complete() -> None:
    assert set(FA4) == set(UNIFIED_TRITON) <= set(SHAPES)
    assert all(len(table[shape]) == len(KERNEL_CASES) for table in (FA4, UNIFIED_TRITON) for shape in table)
    assert kernel_anchor(FA4, "31B.global", "decode 32@8000") == 632
    assert kernel_anchor(UNIFIED_TRITON, "31B.global", "prefill 1x8192") == 26442
    assert kernel_anchor(FA4, "12B.global", "decode 32@8000") is None
    assert kernel_anchor(FA4, "31B.global", "decode 33@8000") is None


def test_kernel_cases() -> None:
    assert parse_case("decode 3@80").spans == ((80, 1),) * 3
    assert parse_case("verify 2x4@80").spans == ((80, 4),) * 2
    assert parse_case("prefill 2x50").spans == ((0, 50),) * 2
    assert make_kernel_case(3, 4, 80).name == "verify 3x4@80"
    ragged = make_kernel_case(50, 2, 80, ragged=True)
    assert len({context for context, _ in ragged.spans}) > 10
    assert max(ragged.spans)[0] <= 80
    assert len({queries for _, queries in make_kernel_case(50, 80, 0, ragged=True).spans}) > 10
    for name in ("decode", "decode 3", "verify 3@4", "prefill 3@4", "decode 0@5"):
        with pytest.raises(ConfigError, match="case: got"):
            parse_case(name)


@pytest.mark.parametrize("window", [None, 8, 100])
@pytest.mark.parametrize("span", [(0, 1), (0, 30), (5, 1), (5, 30), (50, 4), (7, 1), (8, 20)])
def test_work_counts_what_queries_see(window: int | None, span: tuple[int, int]) -> None:
    shape = AttentionShape(8, 2, 16, window, False, 16)
    context, queries = span
    seen = [range(0 if window is None else max(0, q - window + 1), q + 1) for q in range(context, context + queries)]
    num_bytes, flops = work(shape, make_kernel_case(1, queries, context))
    assert flops == 4 * 8 * 16 * sum(map(len, seen))
    assert num_bytes == 2 * 2 * 2 * 16 * len({key for keys in seen for key in keys})


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("window", [None, 24])
def test_the_torch_backend_agrees_at_any_shape(latent: bool, window: int | None) -> None:
    """Check a whole case: pages, batch, backend, and the float32 result that it is compared with."""
    shape = AttentionShape(4, 2, 32, window, latent, 16)
    for case in (
        make_kernel_case(3, 1, 70, ragged=True),
        make_kernel_case(2, 4, 70),
        make_kernel_case(2, 90, 0, ragged=True),
        make_kernel_case(2, 40, 33),
    ):
        line = time_case("own", shape, case, device=CPU, backend="torch_cpu", repeats=2)
        assert line.error is not None
        assert line.error < 1e-5, case.name
        assert line.microseconds > 0
        assert line.is_right


def test_a_kernel_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = CaseTensors.expected
    monkeypatch.setattr(CaseTensors, "expected", lambda tensors: expected(tensors) * 1.01)
    line = time_case("own", SHAPES["E2B.sliding"], parse_case("decode 2@40"), device=CPU, backend="torch_cpu", repeats=1)
    assert line.is_right is False


def test_kernels_need_a_gpu() -> None:
    for backend in ("auto", "triton"):
        with pytest.raises(UnsupportedError, match="NVIDIA GPU") as caught:
            time_case("own", SHAPES["E2B.sliding"], parse_case("decode 2@40"), device=CPU, backend=backend)
        assert "--backend torch_cpu" in caught.value.hint


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offline"], "no model"),
        (["offline", "x", "--random", "31B"], "got both the model x"),
        (["offline", "--random", "7B"], "no such variant"),
        (["offline", "x", "--num-layers", "3"], "only random weights can have fewer layers"),
        (["offline", "--random", "31B", "--num-layers", "1"], "layers: got 1"),
        (["offline", "--random", "31B", "--rows", "everything"], "rows: got 'everything'"),
        (["offline", "--random", "31B", "--json", "/nowhere/at/all.json"], "its folder does not exist"),
        (["offline", "--random", "31B", "--json", "/"], "cannot write /: it is a folder"),
        (["offline", "--random", "31B", "--device", "cpu", "--plot", "x.svg"], "no floor is known for CPU"),
        (["offline", "--random", "31B", "--device", "cpu", "--tflops", "3"], "bandwidth and tflops: expected both"),
        (["offline", "--random", "31B", "--best-of", "0"], "Invalid value for '--best-of'"),
        (["kernels", "--device", "cpu"], "need an NVIDIA GPU"),
        (["kernels", "--device", "cpu", "--backend", "magic"], "unknown attention backend"),
        (["kernels", "--device", "cpu", "--shape", "7B.global"], "unknown shape"),
        (["kernels", "--device", "cpu", "--case", "decode"], "case: got 'decode'"),
        (["kernels", "--device", "cpu", "--heads", "8"], "kv-heads: no value was given"),
        (["kernels", "--device", "cpu", "--window", "8"], "heads: no value was given"),
        (["kernels", "--device", "cpu", "--keys", "8"], "rows: no value was given"),
        (
            ["kernels", "--device", "cpu", "--heads", "8", "--kv-heads", "3", "--head-dim", "16", "--rows", "1"],
            "shape: got 8 query",
        ),
        (["kernels", "--device", "cpu", "--shape", "31B.global", "--page-tokens", "0"], "shape: got 32 query"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) in (1, 2)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if " INFO " not in line]
    assert out == ""
    assert message in lines[0]
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2


@pytest.mark.parametrize("command", ["offline", "kernels"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", command, "--help"]) == 0
    assert capsys.readouterr().out.count(f"culet bench {command}") >= 4
