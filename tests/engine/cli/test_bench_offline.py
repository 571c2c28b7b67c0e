"""`culet bench` end to end on the CPU, at a tiny size."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from culet import LLM, SamplingParams
from culet.attention import torch_cpu
from culet.bench.answer_check import check_rows
from culet.bench.offline import measure, run_rows
from culet.bench.settings import bench_config
from culet.bench.workloads import parse_rows
from culet.cache.spec import KVGroup
from culet.cli.main import run
from culet.errors import ConfigError, InternalError
from culet.testing.tiny import SHAPES, write_checkpoint

ROWS = "tpot:1x40+20,tpot:5x60+20,ttft:1x50,throughput:8x50+30"


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "31B")


def test_random_model_answers_as_any_other(folder: Path) -> None:
    settings = {"device": "cpu", "max_model_len": 256}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = ["Who lives in this house?", list(range(60))]
    with LLM(f"random:{folder}", **settings) as llm:
        first = llm.generate(prompts, params)
    with LLM(f"random:{folder}", **settings) as llm:
        again = llm.generate(prompts, params)
    assert first == again, "the same name is the same model"
    assert all(answer.text for answer in first), "it borrows the built-in model's words"
    with LLM(f"random:{folder},seed=1", **settings) as llm:
        assert llm.generate(prompts, params) != first


def test_answers_are_checked_in_every_shape(folder: Path) -> None:
    rows = parse_rows(ROWS)
    config = bench_config({"model": str(folder), "device": "cpu"}, rows)
    verdicts = check_rows(config, rows)
    assert set(verdicts) == set(rows)
    for row, verdict in verdicts.items():
        assert verdict.is_right
        assert verdict.num_equal == verdict.num_tokens == 16 * min(4, row.num_seqs)


class Confused(torch_cpu.TorchCPUBackend):
    """Swaps the results of neighbouring query heads in sliding layers, at the same speed."""

    def __init__(self, group: KVGroup, num_heads: int) -> None:
        super().__init__(group, num_heads)
        self._is_wrong = group.window is not None

    def run(self, layer, batch, pool, q_TNH, k_TGH, v_TGH):  # type: ignore[no-untyped-def]
        out = super().run(layer, batch, pool, q_TNH, k_TGH, v_TGH)
        return out.roll(1, dims=1) if self._is_wrong else out


def test_wrong_answers_are_found(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = parse_rows(ROWS)
    config = bench_config({"model": str(dense), "device": "cpu"}, rows)
    monkeypatch.setattr(torch_cpu, "TorchCPUBackend", Confused)
    verdicts = check_rows(config, rows)
    assert not any(verdict.is_right for verdict in verdicts.values())


def test_rows_are_measured_from_the_deltas(dense: Path) -> None:
    rows = parse_rows(ROWS)
    config = bench_config({"model": str(dense), "device": "cpu"}, rows)
    seen = []
    done = run_rows(config, rows, best_of=2, check=False, report=seen.append)
    assert done == seen
    assert [measured.row for measured in done] == rows
    tpot, many, ttft, throughput = done
    assert len(tpot.runs) == len(ttft.runs) == 2
    assert len(many.runs) == len(throughput.runs) == 1
    for measured in done:
        details = measured.details
        assert measured.value > 0
        assert details["preemptions"] == 0
        assert 0 < details["ttft_ms_median"] <= details["ttft_ms_max"] <= 1e3 * details["seconds"]
    assert tpot.value == min(tpot.runs) == tpot.details["tpot_ms_median"]
    # TPOT excludes the prompt. Including it, the call took at least this long.
    assert 19 * many.value + many.details["ttft_ms_median"] <= 1e3 * many.details["seconds"] * 1.001
    assert throughput.value == pytest.approx(8 * 30 / throughput.details["seconds"])
    assert throughput.details["all_at_once"]


def test_rows_with_images(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "E4B", towers=True)
    rows = parse_rows("image:3x2@70+4")
    config = bench_config({"model": str(folder), "device": "cpu"}, rows)
    (measured,) = run_rows(config, rows, best_of=2)
    details = measured.details
    assert details["encoded_images"] == {"cold": 2 * 2, "cached": 0}
    assert min(measured.value, details["ttft_cold_ms"], details["ttft_cached_ms"], details["requests_per_s"]) > 0
    blind = bench_config({"model": str(folder), "device": "cpu", "language_model_only": True}, rows)
    with pytest.raises(ConfigError, match="turned off"):
        run_rows(blind, rows, best_of=1)


def test_a_short_answer_is_an_error(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bench_config({"model": f"random:{dense}", "device": "cpu"}, parse_rows(ROWS))
    with LLM.from_config(config) as llm:
        generate = llm.generate
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        monkeypatch.setattr(llm, "generate", lambda prompts, _: generate(prompts, params))
        with pytest.raises(InternalError, match="ended with length after 3 of 20 tokens"):
            measure(llm, parse_rows(ROWS)[0])


def test_command_line(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole run: starts in separate processes, the check, the table, JSON and the picture."""
    files = [tmp_path / "bench.json", tmp_path / "bench.svg"]
    peaks = ("--bandwidth", "0.1", "--tflops", "2")
    arguments = ["bench", "offline", "--random", str(dense), "--rows", f"start,{ROWS}", "--best-of", "1", *peaks]
    assert run([*arguments, "--json", str(files[0]), "--plot", str(files[1]), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "TPOT, 5 sequences, 60 in, 20 out" in printed
    assert printed.count("right") == 4
    document = json.loads(files[0].read_text())
    assert [row["row"] for row in document["rows"]] == ["start", *ROWS.split(",")]
    start = document["rows"][0]["details"]
    assert start["cold_s"] > 0
    assert start["cached"]["first_token_s"] > 0
    assert all(0 < row["share_of_floor"] < 1 for row in document["rows"][1:])
    assert document["settings"]["enable_prefix_caching"] is False
    assert document["settings"]["max_num_batched_tokens"] > 0
    ET.parse(files[1])


def test_kernels_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    shape = ("--heads", "4", "--kv-heads", "1", "--head-dim", "64", "--latent", "--window", "30", "--page-tokens", "32")
    arguments = ["bench", "kernels", "--device", "cpu", "--backend", "torch_cpu", "--repeats", "2", *shape]
    arguments += ["--rows", "3", "--queries", "2", "--keys", "100", "--ragged", "--case", "prefill 1x70"]
    assert run([*arguments, "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["cases"]
    assert [case["case"] for case in cases] == ["prefill 1x70", "verify 3x2@100 ragged"]
    assert all(case["is_right"] and case["backend"] == "torch_cpu" and case["us"] > 0 for case in cases)
    assert "prefill 1x70" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--num-layers", "--check-layers"])
def test_no_layers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "offline", "--random", "E2B", option, "0", "--rows", "ttft:1x10"]) == 2
    assert "0 is not in the range" in capsys.readouterr().err


def test_a_row_that_is_too_long_is_refused_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match="ttft:1x300 needs 316 tokens, but --max-model-len is 100"):
        bench_config({"model": str(folder), "device": "cpu", "max_model_len": 100}, parse_rows("ttft:1x10,ttft:1x300"))
