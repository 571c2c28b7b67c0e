"""`culet bench serve` against a running server: it counts the answers and prints the usual summary."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from click.testing import CliRunner

from culet.bench.serve.client import Load, Prompt, TimedAnswer
from culet.bench.serve.figures import percentile, summarise
from culet.bench.serve.load import Chats, Outcome, arrivals, make_prompts
from culet.cli.bench.serve import bench_serve
from culet.cli.main import run
from tests.serve.running import Running

BLOCK = (
    "============ Serving Benchmark Result ============",
    "Successful requests:                     6         ",
    "Failed requests:                         0         ",
    "Maximum request concurrency:             3         ",
    "---------------Time to First Token----------------",
    "-----Time per Output Token (excl. 1st token)------",
    "---------------Inter-token Latency----------------",
    "----------------End-to-end Latency----------------",
    "==================================================",
)


def bench(server: Running, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(bench_serve, ["--base-url", server.url, *arguments])
    return result.exit_code, result.stdout, f"{result.stderr}{result.exception or ''}"


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_run(tiny: Running, tmp_path: Path, backend: str) -> None:
    file = tmp_path / "out.json"
    lengths = ["--random-input-len", "20", "--random-output-len", "7", "--num-prompts", "6", "--max-concurrency", "3"]
    code, out, err = bench(tiny, "--backend", backend, *lengths, "--json", str(file), "--save-detailed")
    assert code == 0, err
    for line in BLOCK:
        assert line in out.splitlines()
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (6, 0, 42)
    assert figures["output_lens"] == [7] * 6
    if backend == "openai":
        assert figures["input_lens"] == [20] * 6, "token ids of the server's own vocabulary have exactly the length asked for"
    assert figures["max_concurrent_requests"] <= 3
    assert figures["output_throughput"] == pytest.approx(42 / figures["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < figures[f"median_{name}_ms"] <= figures[f"p99_{name}_ms"]
        assert f"{figures[f'mean_{name}_ms']:.2f}" in out
    assert figures["mean_ttft_ms"] < figures["mean_e2el_ms"]
    assert figures["mean_tpot_ms"] == pytest.approx((figures["mean_e2el_ms"] - figures["mean_ttft_ms"]) / 6, rel=1e-6)


def test_a_mixed_load_reports_what_running_chats_see(tiny: Running, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    lengths = ["--random-input-len", "60", "--random-output-len", "3", "--num-prompts", "3", "--num-chats", "2"]
    code, out, err = bench(tiny, "--dataset", "mixed", *lengths, "--metric-percentiles", "50,99", "--json", str(file))
    assert code == 0, err
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["num_chats"], figures["failed_chats"]) == (3, 2, 0)
    assert 0 < figures["p50_chat_itl_ms"] <= figures["p99_chat_itl_ms"]
    assert "-------Inter-token Latency of Running Chats-------" in out.splitlines()
    tiny.check_well()


def test_an_agent_finds_its_history(tiny: Running, tmp_path: Path) -> None:
    """The second turn finds nearly all of its prompt. With a salt of its own, it finds nothing."""
    file = tmp_path / "out.json"
    sizes = ["--agent-history", "60", "--agent-sessions", "2", "--agent-turns", "2", "--agent-result-len", "20"]
    code, out, err = bench(
        tiny, "--dataset", "agent", *sizes, "--agent-tools", "1", "--random-output-len", "4", "--json", str(file)
    )
    assert code == 0, err
    first, second = json.loads(file.read_text())["turns"]
    assert [first["turn"], second["turn"]] == [1, 2]
    assert second["prefix_cache_hit_rate"] > 60
    assert second["mean_prompt_tokens"] > first["mean_prompt_tokens"]
    assert first["uncached_hit_tokens"] == second["uncached_hit_tokens"] == 0
    assert "hit rate %" in out


def test_an_agent_finds_nothing_of_an_earlier_run(tiny: Running, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = ["--agent-history", "70", "--agent-sessions", "1", "--agent-turns", "1", "--agent-tools", "1"]
    for _ in range(2):
        code, _, err = bench(tiny, "--dataset", "agent", *sizes, "--random-output-len", "2", "--json", str(file))
        assert code == 0, err
        assert "warning" not in err
        (turn,) = json.loads(file.read_text())["turns"]
        assert turn["prefix_cache_hit_rate"] == turn["uncached_hit_tokens"] == 0


def test_a_server_that_ignores_salts_is_noticed(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("culet.bench.serve.agent._salted", lambda prompt, salt: prompt)
    sizes = ["--agent-history", "70", "--agent-sessions", "1", "--agent-turns", "1", "--agent-tools", "1"]
    code, _, err = bench(tiny, "--dataset", "agent", *sizes, "--random-output-len", "2")
    assert code == 0
    assert "warning: the server found" in err


def test_an_agent_keeps_the_figures_before_a_failure(tiny: Running, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = ["--agent-history", "60,100000", "--agent-sessions", "1", "--agent-turns", "1", "--agent-tools", "1"]
    code, out, err = bench(tiny, "--dataset", "agent", *sizes, "--random-output-len", "2", "--json", str(file))
    assert code != 0
    assert "lower --agent-history" in err
    assert [turn["history_len"] for turn in json.loads(file.read_text())["turns"]] == [60]
    assert "hit rate %" in out


def test_the_share_of_cached_tokens_is_shown(tiny: Running, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    lengths = ["--random-input-len", "10", "--random-prefix-len", "90", "--random-output-len", "2", "--num-prompts", "4"]
    code, out, err = bench(tiny, *lengths, "--max-concurrency", "1", "--json", str(file))
    assert code == 0, err
    figures = json.loads(file.read_text())
    # The engine reports twice a second, so the first or the last request may be missing, and the one before may be included.
    assert figures["prefix_cache_queried_tokens"] in (300, 400, 500)
    assert figures["prefix_cache_hit_rate"] >= 45  # all but the first two find the common beginning
    assert "-------------------Prefix Cache-------------------" in out.splitlines()


def test_failures_are_counted_and_reported(scripted: Callable[..., Running]) -> None:
    with scripted("a b c<turn|>", settings={"api_key": "secret"}) as server:
        code, _, err = bench(server, "--api-key", "wrong")
        assert code == 1
        assert "401" in err
        assert "--api-key" in err
        assert "--base-url" not in err
        code, _, err = bench(server, "--base-url", "http://127.0.0.1:1")  # the later address counts
        assert code == 1
        assert "--base-url" in err
        assert "--api-key" not in err
        code, out, err = bench(
            server, "--api-key", "secret", "--num-prompts", "2", "--num-warmups", "0", "--extra-body", '{"temperature": -1}'
        )
        assert code == 1
        assert "Failed requests:                         2" in out
        assert "HTTP 400" in err


def test_bad_options_give_one_line_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["bench", "serve", "--port", "1"],
        ["bench", "serve", "--metric-percentiles", "x"],
        ["bench", "serve", "--extra-body", "[1]"],
        ["bench", "serve", "--request-rate", "0"],
        ["bench", "serve", "--dataset", "agent", "--agent-history", "many"],
        ["bench", "serve", "--dataset", "agent", "--agent-history", "99999999999"],
    ):
        assert run(arguments) != 0
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert "error" in message.lower()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--dataset", "agent", "--request-rate", "1"], "request-rate: has no effect on --dataset agent"),
        (["--dataset", "agent", "--backend", "vllm"], "backend: has no effect on --dataset agent"),
        (["--dataset", "mixed", "--agent-turns", "3"], "agent-turns: has no effect on --dataset mixed"),
        (["--num-chats", "3"], "num-chats: has no effect on --dataset random"),
    ],
)
def test_options_without_effect_are_refused(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", *arguments]) != 0
    assert problem in capsys.readouterr().err


class FailingClient:
    """Draws two tokens for a chat, and then the server fails."""

    async def ask(self, prompt: Prompt, model: str, answer: TimedAnswer) -> TimedAnswer:
        answer.token_times += [0.0, 1.0]
        await asyncio.sleep(0.02)
        answer.error = "HTTP 500: broken"
        return answer


def test_chats_that_fail_are_counted() -> None:
    async def load_chats() -> list[str]:
        chats = Chats(FailingClient(), "model", Load("http://x", "", num_chats=2))  # type: ignore[arg-type]
        await chats.begin()
        await asyncio.sleep(0.1)
        await chats.end()
        return chats.errors

    errors = asyncio.run(load_chats())
    assert errors == ["HTTP 500: broken"] * 2
    outcome = Outcome(Load("http://x", "", num_chats=2), "model", [], 1.0, {}, [], errors)
    assert summarise(outcome)["failed_chats"] == 2


def test_the_output_of_chats_is_in_tokens() -> None:
    """An event may bring several tokens. A server that does not count them has its events counted."""
    load = Load("http://x", "", num_chats=2)
    for counters, tokens_per_s in (({"generated_tokens": 50.0}, 25.0), ({}, 1.5)):
        figures = summarise(Outcome(load, "model", [], 2.0, counters, [0.1, 0.1, 0.2], []))
        assert figures["chat_output_throughput"] == tokens_per_s


def test_a_history_has_as_many_tokens_as_it_should(tiny: Running, tmp_path: Path) -> None:
    file = tmp_path / "agent.json"
    sizes = ["--agent-history", "100,300", "--agent-sessions", "1", "--agent-turns", "1", "--agent-tools", "1"]
    code, _, err = bench(tiny, "--dataset", "agent", *sizes, "--random-output-len", "2", "--json", str(file))
    assert code == 0, err
    short, long = json.loads(file.read_text())["turns"]
    # A short history is as long as its system message.
    assert 300 <= long["mean_prompt_tokens"] - short["mean_prompt_tokens"] <= 500


def test_a_chat_that_cannot_start_says_why(tiny: Running) -> None:
    code, _, err = bench(tiny, "--dataset", "mixed", "--num-warmups", "0", "--extra-body", '{"temperature": -1}')
    assert code != 0
    assert "a chat beside the prompts failed: HTTP 400" in err


def test_prompts_and_arrivals_match_the_options() -> None:
    load = Load("http://x", "", num_prompts=400, input_len=100, output_len=50, range_ratio=0.5, prefix_len=7, request_rate=20.0)
    prompts = make_prompts(load, range(1000, 2000))
    assert prompts == make_prompts(load, range(1000, 2000))
    assert all(57 <= len(prompt.content) <= 157 and 25 <= prompt.output_len <= 75 for prompt in prompts)
    assert fmean(prompt.output_len for prompt in prompts) == pytest.approx(50, rel=0.1)
    assert len({tuple(prompt.content[:7]) for prompt in prompts}) == 1
    times = arrivals(load)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.2)
    assert pstdev(gaps) == pytest.approx(1 / 20, rel=0.3), "a Poisson process"
    assert set(arrivals(Load("http://x", "", num_prompts=3))) == {0.0}


def test_percentiles_are_interpolated() -> None:
    numpy = pytest.importorskip("numpy")
    values = [random.Random(0).random() for _ in range(37)]
    for share in (0, 1, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(numpy.percentile(values, share))
