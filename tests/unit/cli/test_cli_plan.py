"""`culet plan` as a command: numbers, JSON, picture, errors, and what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from culet.cache.spec import plan_cache
from culet.cli.main import run
from culet.cli.plan import plan
from culet.errors import CheckpointError, ConfigError
from culet.hardware import GPUS
from culet.models.sizes import pages_of_sequence
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(plan, list(arguments), prog_name="culet plan")


def data(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return json.loads(result.stdout)


def refusal(*arguments: str) -> Exception:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.exception is not None
    return result.exception


def fit_of(report: dict[str, Any], *, text_only: bool, latent: bool) -> dict[str, Any]:
    return next(fit for fit in report["fits"] if (fit["text_only"], fit["latent"]) == (text_only, latent))


# Numbers


def test_h200_numbers_of_the_31b():
    report = data("31B", "--gpu", "h200", "--seq-len", "2000", "--seq-len", "32000")
    assert report["gpu"] == {"name": "h200", "arch": "sm_90", "memory_bytes": GPUS["h200"].memory_bytes}
    assert report["settings"]["dtype"] == report["settings"]["kv_cache_dtype"] == "bfloat16"
    assert [(group["group"], len(group["layers"]), group["head_dim"]) for group in report["attention"]] == [
        ("sliding", 50, 256),
        ("global", 10, 512),
    ]
    latent, plain = report["cache"]
    assert (latent["latent"], plain["latent"]) == (True, False)
    assert [group["bytes_per_token"] for group in latent["groups"]] == [819_200, 51_200]
    assert [group["bytes_per_token"] for group in plain["groups"]] == [819_200, 81_920]
    assert [group["page_tokens"] for group in latent["groups"]] == [16, 256]
    assert [group["waste_bytes_per_slab"] for group in latent["groups"]] == [0, 0]
    assert latent["groups"][0]["bytes_per_window"] == 800 << 20
    assert latent["groups"][1]["bytes_per_window"] is None
    # 65 sliding pages of 16 tokens, and 125 global pages of 256
    assert latent["groups"][0]["pages_per_sequence"] == {"2000": 65, "32000": 65}
    assert latent["groups"][1]["pages_per_sequence"] == {"2000": 8, "32000": 125}
    assert latent["bytes_per_sequence"]["32000"] == 190 * latent["slab_bytes"]
    assert report["weights"]["text"]["dense MLP"] == {"parameters": 20_808_990_720, "bytes": 41_617_981_440}
    norms = 1_331_516  # with other small scales, all in float32
    assert report["weights"]["text_bytes"] == 2 * 30_697_345_340 + 2 * norms
    assert report["weights"]["tower_bytes"] == 2 * 575_743_536


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("gpu", ["h200", "rtx4090"])
def test_what_fits_adds_up(name, gpu):
    report = data(name, "--gpu", gpu, "--gpu-memory-utilization", "0.9", "--seq-len", "3000")
    spec = read_spec(VARIANTS[name])
    allowed = int(GPUS[gpu].memory_bytes * 0.9)
    assert len(report["fits"]) == 4
    for fit in report["fits"]:
        weights = report["weights"]["text_bytes"] + (0 if fit["text_only"] else report["weights"]["tower_bytes"])
        assert fit["weight_bytes"] == weights
        left = allowed - weights - fit["working_bytes"] - fit["graph_bytes"] - fit["media_cache_bytes"]
        assert (fit["cache_bytes"], fit["missing_bytes"]) == (max(0, left), max(0, -left))
        layout = plan_cache(spec.kv_specs(2, latent=fit["latent"]))
        per_sequence = sum(pages_of_sequence(group, 3000) for group in layout.groups)
        assert fit["num_slabs"] == fit["cache_bytes"] // layout.slab_bytes
        assert fit["sequences"]["3000"] == fit["num_slabs"] // per_sequence
        assert fit["tokens"]["3000"] == 3000 * fit["sequences"]["3000"]


def test_text_only_and_latent_leave_more_room():
    report = data("31B", "--gpu", "h200", "--seq-len", "32000")
    best, plain = fit_of(report, text_only=True, latent=True), fit_of(report, text_only=True, latent=False)
    assert best["sequences"]["32000"] > 1.3 * plain["sequences"]["32000"]
    assert fit_of(report, text_only=False, latent=True)["num_slabs"] < best["num_slabs"]
    assert best["longest_sequence"] == 262_144


def test_small_gpus_take_shorter_steps():
    def working(gpu: str, *more: str) -> int:
        return fit_of(data("12B", "--gpu", gpu, *more), text_only=True, latent=True)["working_bytes"]

    assert working("rtx4090") == working("h200", "--max-num-batched-tokens", "2048") < working("h200")
    assert working("rtx4090", "--max-num-batched-tokens", "8192") == working("h200")


def test_graphs_and_cached_media_take_memory():
    def fits(*options: str) -> list[tuple[int, int]]:
        return [(fit["graph_bytes"], fit["media_cache_bytes"]) for fit in data("31B", *options)["fits"]]

    (text, _), (graphs, cached) = fits("--gpu", "h200")[:2], fits("--gpu", "h200")[2]
    assert text == (graphs, 0)
    assert graphs == pytest.approx(0.6e9, rel=0.05)
    assert cached == 512 << 20
    assert fits("--gpu", "rtx5090")[2] == (graphs, 128 << 20)
    assert fits("--gpu", "rtx5090", "--language-model-only")[2] == (graphs, 0)
    assert fits("--gpu", "cpu") == [(0, 0)] * 4


@pytest.mark.parametrize(
    ("gpu", "precision", "gib", "options", "measured"),
    [
        ("h200", "auto", None, ["--language-model-only"], 5669),
        ("h200", "auto", None, [], 5476),
        ("rtx4090", "int4", 24, ["--language-model-only"], 204),
    ],
)
def test_room_that_was_measured(gpu: str, precision: str, gib: int | None, options: list[str], measured: int, monkeypatch):
    """The slabs of the 31B that an H200, or one that pretends to have 24 GiB, really had room for."""
    if gib is not None:
        monkeypatch.setitem(GPUS, gpu, replace(GPUS[gpu], memory_bytes=gib << 30))
    report = data("31B", "--gpu", gpu, "--quantization", precision, *options)
    fit = fit_of(report, text_only=bool(options), latent=True)
    assert fit["num_slabs"] == pytest.approx(measured, rel=0.03)


def test_fp8_needs_no_wider_copy_on_its_tensor_cores():
    def working(gpu: str, precision: str) -> int:
        options = ("--gpu", gpu, "--dtype", "bfloat16", "--quantization", precision, "--max-num-batched-tokens", "2048")
        return fit_of(data("12B", *options), text_only=True, latent=True)["working_bytes"]

    assert working("h200", "fp8") < working("h200", "int4") == working("cpu", "int4") == working("cpu", "fp8")


@pytest.mark.parametrize(("model", "saved"), [("31B", 2_025_848_832), ("E4B", 964_689_920)])
def test_a_head_in_int4(model: str, saved: int):
    """It takes 9 bits for 32 values of 16 bits, so the cache gets the rest. Everything else stays the same."""
    options = ("--gpu", "rtx4090", "--dtype", "bfloat16", "--quantization", "int4")
    before, after = data(model, *options), data(model, *options, "--head-quantization", "int4")
    parts, smaller = before["weights"]["text"], after["weights"]["text"]
    count = parts["token embedding"]["parameters"]
    assert smaller["token embedding"]["bytes"] == count * 9 // 16
    assert parts["token embedding"]["bytes"] - smaller["token embedding"]["bytes"] == saved
    assert {**smaller, "token embedding": None} == {**parts, "token embedding": None}
    assert before["settings"]["head_quantization"] == "auto"
    assert after["settings"]["head_quantization"] == "int4"
    text_only = {"text_only": True, "latent": True}
    assert fit_of(after, **text_only)["cache_bytes"] == fit_of(before, **text_only)["cache_bytes"] + saved
    shown = invoke(model, *options, "--head-quantization", "int4").output
    assert "weights int4, head int4, KV cache bfloat16" in shown


def test_the_latent_changes_nothing_without_k_eq_v():
    report = data("E4B", "--gpu", "rtx4090")
    with_latent, without = (fit_of(report, text_only=True, latent=latent) for latent in (True, False))
    assert {**with_latent, "latent": None} == {**without, "latent": None}


def test_dtypes():
    report = data("12B", "--gpu", "h200", "--dtype", "float32")
    assert report["weights"]["text_bytes"] == 4 * sum(part["parameters"] for part in report["weights"]["text"].values())
    assert report["cache"][0]["groups"][0]["bytes_per_token"] == 2 * 327_680
    report = data("12B", "--gpu", "h200", "--dtype", "float32", "--kv-cache-dtype", "float32")
    assert report["cache"][0]["groups"][0]["bytes_per_token"] == 2 * 327_680
    error = refusal("12B", "--gpu", "h200", "--dtype", "float32", "--kv-cache-dtype", "bfloat16")
    assert "the model runs in float32" in str(error)


def test_fp8_cache():
    plain = data("31B", "--gpu", "h200")
    for choice, dtypes in {
        "fp8": ["fp8_e4m3", "fp8_e4m3"],
        "fp8_e4m3": ["fp8_e4m3", "fp8_e4m3"],
        "sliding=fp8": ["fp8_e4m3", "bfloat16"],
        "global=fp8, sliding=auto": ["bfloat16", "fp8_e4m3"],
    }.items():
        report = data("31B", "--gpu", "h200", "--kv-cache-dtype", choice)
        groups = report["cache"][0]["groups"]
        assert [group["dtype"] for group in groups] == dtypes
        for group, before in zip(groups, plain["cache"][0]["groups"], strict=True):
            halved = group["dtype"] == "fp8_e4m3"
            assert group["bytes_per_token"] * (2 if halved else 1) == before["bytes_per_token"]
            assert group["waste_bytes_per_slab"] == 0
        more, before = (fit_of(each_report, text_only=True, latent=True)["sequences"] for each_report in (report, plain))
        assert all(more[length] > before[length] for length in before)
        assert [group["backend"] for group in report["attention"]] == ["triton", "triton"]
    output = invoke("31B", "--gpu", "h200", "--kv-cache-dtype", "sliding=fp8").stdout
    assert "fp8_e4m3" in output
    assert "KV cache sliding=fp8" in output


@pytest.mark.parametrize(
    ("gpu", "choice", "message"),
    [
        ("a100", "fp8", "before sm_89"),
        ("h200", "int3", "unknown kv-cache-dtype: 'int3'"),
        ("h200", "sliding=int3", "unknown kv-cache-dtype: 'int3'"),
        ("h200", "middle=fp8", "unknown group of layers: 'middle'"),
        ("h200", "sliding=fp8,fp8", "got 'fp8', expected GROUP=NAME"),
        ("h200", "global=float32", "the model runs in bfloat16"),
    ],
)
def test_bad_cache_dtypes_are_refused(gpu, choice, message):
    assert message in str(refusal("31B", "--gpu", gpu, "--kv-cache-dtype", choice))


def test_no_latent_is_planned_for():
    report = data("31B", "--gpu", "h200", "--no-latent")
    assert [group["latent"] for group in report["attention"]] == [False, False]
    assert [group["latent"] for group in data("31B", "--gpu", "h200")["attention"]] == [False, True]


def test_max_model_len_bounds_the_longest_sequence():
    report = data("31B", "--gpu", "h200", "--max-model-len", "5000")
    assert fit_of(report, text_only=True, latent=True)["longest_sequence"] == 5000
    assert list(report["cache"][0]["bytes_per_sequence"]) == ["2000"]  # longer defaults are omitted


def test_a_length_that_does_not_fit_is_reported():
    result = invoke("12B", "--gpu", "rtx4090", "--gpu-memory-utilization", "1")
    assert "do not fit" not in result.stdout
    result = invoke("E4B", "--gpu", "rtx4090", "--gpu-memory-utilization", "0.66")
    assert "A sequence of 131,072 tokens does not fit: the longest that fits has" in result.stdout


# Where the model is found


@pytest.mark.parametrize("name", ["e2b", "E2B", "26b", "26b-a4b"])
def test_variant_by_any_case(name):
    assert data(name, "--gpu", "h200")["model"]["name"] in ("Gemma 4 E2B", "Gemma 4 26B-A4B")


def test_folder_and_file(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["12B"]))
    folder, file = (data(str(path), "--gpu", "h200") for path in (tmp_path, tmp_path / "config.json"))
    assert folder["model"].pop("name") != file["model"].pop("name")
    named = data("12B", "--gpu", "h200")
    named["model"].pop("name")
    assert folder == file == named


def test_text_only_checkpoint_has_no_towers(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["31B"]["text_config"]))
    report = data(str(tmp_path), "--gpu", "h200")
    assert report["weights"]["towers"] == {}
    result = invoke(str(tmp_path), "--gpu", "h200")
    assert "has no vision or audio parts" in result.stdout
    assert "all parts" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "kinds", "parts"),
    [
        ((), ["audio", "image", "video"], {"vision", "audio"}),
        (("--limit-mm-per-prompt", '{"audio": 0, "image": 4}'), ["image", "video"], {"vision"}),
        (("--limit-mm-per-prompt", '{"video": 0}'), ["audio", "image", "video"], {"vision", "audio"}),
        (("--limit-mm-per-prompt", '{"image": 0, "video": 0}'), ["audio"], {"audio"}),
        (("--language-model-only",), [], set()),
    ],
)
def test_towers_that_are_not_wanted_take_no_memory(arguments, kinds, parts):
    report = data("E4B", "--gpu", "h200", *arguments)
    assert report["settings"]["media"] == kinds
    towers = report["weights"]["towers"]
    assert {name for name, tower in towers.items() if tower["is_loaded"]} == parts
    assert report["weights"]["tower_bytes"] == sum(tower["bytes"] for tower in towers.values() if tower["is_loaded"])
    text_only, everything = (next(fit for fit in report["fits"] if fit["text_only"] is only) for only in (True, False))
    assert (everything["cache_bytes"] < text_only["cache_bytes"]) == bool(parts)
    assert (everything["working_bytes"] > text_only["working_bytes"]) == bool(parts)


def test_notes_say_what_a_tower_costs():
    lines = invoke("E4B", "--gpu", "h200", "--limit-mm-per-prompt", '{"image": 3}').stdout
    gained = [line for line in lines.splitlines() if line.startswith("Without the")]
    assert [line.split()[2] for line in gained] == ["vision", "audio"]
    assert all(float(line.partition("tower: ")[2].split()[0]) > 0.3 for line in gained)
    assert """--limit-mm-per-prompt '{"image": 3, "audio": 0}'""" in lines
    assert "Without the" not in invoke("E4B", "--gpu", "h200", "--language-model-only").stdout


# Tables


def test_tables_are_plain_and_complete():
    result = invoke("31B", "--gpu", "h200")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout
    words = ["sliding", "global", "latent of 640", "819,200", "51,200", "838.9", "16.956", "61.397", "vision tower (loaded)"]
    for word in [*words, "text only", "all parts", "K and V", "sequences of 2,000", "tokens in total", "not torch_cpu:"]:
        assert word in result.stdout, word
    for column in ("61.39", "62.55"):
        assert column in result.stdout
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


@pytest.mark.parametrize("name", VARIANTS)
def test_tables_fit_into_100_columns(name):
    lines = invoke(name, "--gpu", "h200").stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("    not ")) <= 100


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("31B", "--gpu", "rtx4090"), 1),
        (("E4B", "--gpu", "rtx4090"), 0),
        (("E2B", "--gpu", "rtx4070", "--max-model-len", "8192"), 1),  # with all parts
        (("E2B", "--gpu", "rtx4070", "--max-model-len", "8192", "--language-model-only"), 0),
        (("E2B", "--gpu", "rtx4070", "--language-model-only", "--max-num-batched-tokens", "16384"), 1),
        (("E2B", "--gpu", "rtx4070", "--language-model-only", "--max-num-seqs", "1024"), 1),
        (("31B", "--gpu", "h100"), 0),
        (("31B", "--gpu", "h100", "--gpu-memory-utilization", "0.7"), 1),
        (("31B", "--gpu", "h100", "--gpu-memory-utilization", "0.8", "--max-model-len", "2000"), 0),
        (("31B", "--gpu", "h100", "--gpu-memory-utilization", "0.8", "--max-model-len", "262144"), 1),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_exit_code_says_whether_it_fits(arguments: tuple[str, ...], code: int, form: tuple[str, ...], capsys) -> None:
    assert run(["plan", *arguments, *form]) == code
    captured = capsys.readouterr()
    assert captured.out
    assert captured.err == ""


def test_weights_that_do_not_fit_are_reported():
    result = invoke("31B", "--gpu", "rtx4090")
    assert result.exit_code == 1
    assert "The weights alone, 61.4 GB, do not fit into the usable 23.2 GB." in result.stdout
    assert "short" in result.stdout


def test_cpu():
    result = invoke("E2B", "--gpu", "cpu")
    assert "needs an NVIDIA GPU" in result.stdout
    assert "quarter of the free memory" in result.stdout


def test_help_begins_with_three_examples():
    text = invoke("--help").output
    assert text.index("Examples:") < text.index("Options:")
    assert text.count("  culet plan ") == 3


# Picture


def test_picture(tmp_path: Path):
    file = tmp_path / "plan.svg"
    result = invoke("E2B", "--gpu", "h200", "--svg", str(file), "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)  # the notice about the file goes to stderr
    assert str(file) in result.stderr
    root = ElementTree.parse(file).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 20


def test_picture_that_cannot_be_written(tmp_path: Path):
    error = refusal("E2B", "--gpu", "h200", "--svg", str(tmp_path / "missing" / "plan.svg"))
    assert isinstance(error, ConfigError)


# Errors


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("31B", "--gpu", "h300"), ConfigError, "unknown GPU: 'h300'"),
        (("31B", "--gpu", "cpu", "--attention-backend", "global=triton"), ConfigError, "layer 5 (global, head dim 512)"),
        (("31B", "--gpu", "cpu", "--attention-backend", "triton"), ConfigError, "layer 0 (sliding, head dim 256)"),
        (("31B", "--gpu", "h200", "--attention-backend", "fast"), ConfigError, "unknown attention backend: 'fast'"),
        (("31B", "--gpu", "h200", "--max-model-len", "999999"), ConfigError, "supports at most 262144 tokens"),
        (("31B", "--gpu", "h200", "--max-model-len", "0"), ConfigError, "max-model-len"),
        (("31B", "--gpu", "h200", "--seq-len", "0"), ConfigError, "seq-len"),
        (("31B", "--gpu", "h200", "--seq-len", "300000"), ConfigError, "from 1 to 262144"),
        (("31B", "--gpu", "h200", "--gpu-memory-utilization", "1.5"), ConfigError, "gpu-memory-utilization"),
        (("31B", "--gpu", "h200", "--gpu-memory-utilization", "nan"), ConfigError, "gpu-memory-utilization"),
        (("E5B", "--gpu", "h200"), CheckpointError, "no such folder"),
        (("./nowhere", "--gpu", "h200"), CheckpointError, "no such folder"),
    ],
)
def test_refusals(arguments, kind, words):
    error = refusal(*arguments)
    assert isinstance(error, kind)
    assert words in str(error)


def test_unknown_model_lists_the_variants():
    assert "E2B, E4B, 12B, 26B-A4B, 31B" in str(refusal("E5B", "--gpu", "h200"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("31B", "--gpu", "nope"),
        ("31B", "--dtype", "int3"),
        ("31B", "--seq-len", "many"),
        (),
        ("31B", "--nope"),
        ("/nowhere/at/all",),
    ],
)
def test_exit_code_and_one_line(arguments, capsys: pytest.CaptureFixture[str]):
    assert run(["plan", *arguments]) == (1 if "/nowhere/at/all" in arguments else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2


# In a separate process


HEAVY = {
    *("torch", "numpy", "triton", "transformers", "safetensors", "tokenizers", "huggingface_hub"),
    *("jinja2", "fastapi", "uvicorn", "httpx", "llguidance", "prometheus_client"),
}
MAX_MODULES = 300  # about 210 today, most of them from the standard library, rich and click


def imported_by_plan(*arguments: str) -> set[str]:
    """Return the modules that are loaded after `culet plan` in a fresh interpreter."""
    code = (
        "import sys\n"
        "from culet.cli.main import run\n"
        "assert run(['plan', *sys.argv[1:]]) == 0\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"})
    assert process.returncode == 0, process.stderr
    return set(process.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [("31B", "--gpu", "h200"), ("E4B", "--gpu", "rtx4090", "--json", "--svg", os.devnull)])
def test_imports_little(arguments):
    """Start time is mostly import time, so no heavy package and only a limited number of modules may be loaded."""
    modules = imported_by_plan(*arguments)
    assert "culet.cli.plan" in modules
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    assert len(modules) < MAX_MODULES
