"""The engine plans the next step while one is in flight: the output is the same, and the device never waits."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from culet import LLM, SamplingParams
from culet.engine.engine import Engine
from culet.errors import InternalError
from culet.runner.runner import Pending, Runner
from tests.engine.llm.test_llm import GREEDY, cache_of, crossing_prompt, make, prompts_of

AHEAD = {"async_scheduling": True}  # must be requested on a CPU
SHAPES = ["E2B", "31B"]


@functools.cache
def plain_tokens(shape: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the answers of an engine that does not look ahead, which `test_llm` compares with transformers."""
    prompts = [*prompts_of(), crossing_prompt(shape)]
    return {result.prompt_token_ids: result.token_ids for result in make(shape).generate(prompts, GREEDY)}


def check_greedy(llm: LLM, shape: str, prompts: list[list[int]]) -> None:
    for result, token_ids in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
        assert result.token_ids == plain_tokens(shape)[tuple(token_ids)]
        assert result.finish_reason == "length"


def events_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records `launch N` and `result N` by step as they happen."""
    events: list[str] = []
    launch, result = Runner.launch, Pending.result

    def spy_launch(self: Runner, plan: object) -> Pending:
        events.append(f"launch {plan.step_id}")  # type: ignore[attr-defined]
        return launch(self, plan)  # type: ignore[arg-type]

    def spy_result(self: Pending) -> object:
        events.append(f"result {self.step_id}")
        return result(self)

    monkeypatch.setattr(Runner, "launch", spy_launch)
    monkeypatch.setattr(Pending, "result", spy_result)
    return events


def test_the_next_step_is_launched_before_a_result_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of(monkeypatch)
    params = dataclasses.replace(GREEDY, max_tokens=4)
    llm = make("31B", **AHEAD)
    events.clear()  # the start runs a step of its own
    first = llm.generate([prompts_of()[1]], params)
    numbers = [int(event.split()[1]) for event in events]
    kinds = [event.split()[0] for event in events]
    begin = numbers[0]
    assert [f"{kind} {number - begin}" for kind, number in zip(kinds, numbers, strict=True)] == [
        *("launch 0", "launch 1", "result 0", "launch 2", "result 1", "launch 3", "result 2", "result 3"),
    ]
    llm = make("31B")
    events.clear()
    assert llm.generate([prompts_of()[1]], params)[0].token_ids == first[0].token_ids
    assert [event.split()[0] for event in events] == ["launch", "result"] * 4


def test_a_cpu_looks_ahead_only_if_asked() -> None:
    assert make("31B").engine._max_in_flight == 1
    assert make("31B", **AHEAD).engine._max_in_flight == 2
    assert make("31B", async_scheduling=False).engine._max_in_flight == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_the_same(shape: str) -> None:
    llm = make(shape, **AHEAD, max_num_batched_tokens=33, max_num_seqs=4)
    check_greedy(llm, shape, prompts_of())
    check_greedy(llm, shape, prompts_of())
    assert llm.engine.stats().counters.prefix_hits > 0
    assert not llm.engine.has_work


@pytest.mark.parametrize("shape", SHAPES)
def test_after_preemption(shape: str) -> None:
    settings = {"kv_cache_memory_bytes": cache_of(shape, 7), "max_num_batched_tokens": 64, "max_model_len": 160}
    llm = make(shape, **settings, **AHEAD, enable_prefix_caching=False)
    check_greedy(llm, shape, [crossing_prompt(shape)] * 4 + prompts_of())
    assert llm.engine.stats().counters.preemptions > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_stops_and_log_probabilities(shape: str) -> None:
    """These depend on tokens that are not known when the next step is launched."""
    plain, ahead = make(shape), make(shape, **AHEAD)
    prompts = prompts_of()
    expected = plain.generate(prompts, SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12, logprobs=2))
    got = ahead.generate(prompts, SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12, logprobs=2))
    for result, plain_result in zip(got, expected, strict=True):
        assert [sample.token_ids for sample in result.samples] == [sample.token_ids for sample in plain_result.samples]
        for mine, theirs in zip(result.samples, plain_result.samples, strict=True):
            assert mine.finish_reason == theirs.finish_reason
            for found, wanted in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert dict(found) == pytest.approx(dict(wanted), abs=1e-4)
    tokens = expected[2].token_ids
    stop = dataclasses.replace(GREEDY, stop_token_ids=(int(tokens[5]),))
    for llm in (plain, ahead):  # a stop token, and a stop string in the middle of the text
        assert [r.token_ids for r in llm.generate(prompts, stop)] == [r.token_ids for r in plain.generate(prompts, stop)]
    text = plain.generate([prompts[2]], GREEDY)[0].text
    at_text = dataclasses.replace(GREEDY, stop=(text[len(text) // 2 : len(text) // 2 + 3],))
    results = [llm.generate([prompts[2]], at_text)[0] for llm in (plain, ahead)]
    assert results[0].text == results[1].text
    assert results[1].finish_reason == "stop"
    # The stop string was found while the next step was running, so the token of that step is dropped.
    assert ahead.engine.has_work
    assert [delta.token_ids for delta in ahead.engine.step()] == [()]  # only reports the end
    assert not ahead.engine.has_work


def test_cancelled_while_in_flight() -> None:
    llm = make("31B", **AHEAD)
    with llm.stream(prompts_of()[3], GREEDY) as stream:
        for _ in range(3):
            next(stream)
        assert len(llm.engine._in_flight) == 1
    check_greedy(llm, "31B", prompts_of()[:2])  # the step that was in flight is dropped on the way
    assert not llm.engine.has_work
    assert llm.engine.stats().num_running == 0


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_step_that_fails_ends_all(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("31B", **AHEAD)
    engine: Engine = llm.engine
    with monkeypatch.context() as patched:
        target = Runner if where == "launch" else Pending
        original, calls = getattr(target, where), []

        def fail(self: object, *arguments: object) -> object:
            calls.append(1)
            if len(calls) == 4:
                raise InternalError("the device is on fire")
            return original(self, *arguments)

        patched.setattr(target, where, fail)
        with pytest.raises(InternalError, match="on fire"):
            llm.generate(prompts_of()[:3], GREEDY)
    assert not engine._in_flight
    assert not engine.has_work
    check_greedy(llm, "31B", prompts_of()[:3])


def test_start_times_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="culet"):
        llm = LLM(make("31B").engine.config.model.model, device="cpu", max_model_len=64)
    assert any(record.getMessage().startswith("engine loaded in ") for record in caplog.records)
    times = llm.engine.start_times
    assert {"weights", "KV cache", "other"} <= set(times.parts)
    assert sum(times.parts.values()) == pytest.approx(times.total)
    assert torch.tensor(list(times.parts.values())).ge(0).all()
