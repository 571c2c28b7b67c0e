"""A step that fails costs only the requests in it. All others go on, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from culet.config import build_config
from culet.engine.engine import Engine
from culet.errors import InternalError
from culet.scheduler import budget
from culet.scheduler.budget import share_budget
from culet.testing.tiny import write_checkpoint
from culet.types import FinishReason, SamplingParams, TokenDelta

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "31B")


def make(folder: Path, *, is_ahead: bool) -> Engine:
    settings = {"max_num_seqs": 2, "max_model_len": 256, "async_scheduling": is_ahead}
    return Engine(build_config({"model": str(folder), "device": "cpu", **settings}), progress=False)


@pytest.fixture(params=[False, True], ids=["one step at a time", "look-ahead"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    engine = make(folder, is_ahead=request.param)
    yield engine
    engine.close()


def add(engine: Engine, name: str, prompt_len: int, **params: Any) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    prompt = [(len(name) + 7 * index) % 200 + 10 for index in range(prompt_len)]
    engine.add(engine.rules.make_request(name, prompt, sampling))


def run(engine: Engine, *, num_failures: int = 0) -> tuple[dict[str, list[int]], list[TokenDelta]]:
    """Run until everything has ended. Return the tokens of each request, and the ends with an error."""
    tokens: dict[str, list[int]] = {}
    failed: list[TokenDelta] = []
    while engine.has_work or num_failures:
        try:
            deltas = engine.step()
        except InternalError:
            num_failures -= 1
            deltas = engine.step()
        for delta in deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is FinishReason.ERROR:
                failed.append(delta)
    return tokens, failed


def fail_launch(engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the launch of one step fail, counted from here."""
    launch, left = engine._worker.launch, [number]

    def launch_or_fail(plan: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise InternalError("CUDA out of memory")
        return launch(plan)

    monkeypatch.setattr(engine._worker, "launch", launch_or_fail)


def test_waiting_requests_go_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests run and two wait. The running ones fail, and the waiting ones are answered as if nothing had happened."""
    names = ("a", "bb", "ccc", "dddd")
    for name in names:
        add(engine, name, 20)
    expected, _ = run(engine)
    for name in names:
        add(engine, name, 20)
    fail_launch(engine, monkeypatch, 4)
    tokens, failed = run(engine, num_failures=1)
    assert {delta.request_id for delta in failed} == {"a", "bb"}
    assert all("out of memory" in delta.error for delta in failed)
    assert {name: tokens[name] for name in names[2:]} == {name: expected[name] for name in names[2:]}
    assert pages_are_back(engine)


def test_running_requests_that_are_not_in_the_step_are_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run, but the step that fails has room for only one of them. The other gives up its pages and goes on."""
    engine = make(folder, is_ahead=False)
    for name in ("old", "a"):
        add(engine, name, 20)
    expected, _ = run(engine)
    for name in ("old", "a"):
        add(engine, name, 20)
    engine.step()
    assert engine.stats().num_running == 2
    fail_launch(engine, monkeypatch, 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "_drafts_to_continue", lambda *, is_open: None)
        patch.setattr(budget, "share_budget", lambda ready, num_tokens, _: share_budget(list(ready)[:1], num_tokens))
        with pytest.raises(InternalError):
            engine.step()
    tokens, failed = run(engine)
    assert [delta.request_id for delta in failed] == ["old"]
    assert expected["a"][-len(tokens["a"]) :] == tokens["a"]
    assert len(tokens["a"]) >= NUM_TOKENS - 2, "it has drawn one or two tokens before"
    assert pages_are_back(engine)


def test_all_samples_of_a_request_fail_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(engine, "first", 20)
    add(engine, "a", 20, n=2)  # its second sample waits for a slot
    fail_launch(engine, monkeypatch, 4)
    _, failed = run(engine, num_failures=1)
    assert sorted((delta.request_id, delta.sample) for delta in failed) == [("a", 0), ("a", 1), ("first", 0)]
    assert pages_are_back(engine)


def test_requests_with_a_grammar_that_is_being_compiled_go_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(engine, "a", 20)
    engine.step()
    held = engine.rules.make_request("held", [10, 11], SamplingParams(temperature=0, max_tokens=2))
    engine._scheduler.add(held, held=True)
    fail_launch(engine, monkeypatch, 1)
    with pytest.raises(InternalError):
        engine.step()
    assert [delta.request_id for delta in engine.step()] == ["a"]
    engine._scheduler.release("held")
    tokens, failed = run(engine)
    assert len(tokens["held"]) == 2
    assert failed == []


def test_a_scheduler_that_fails_ends_everything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its books cannot be trusted any more."""
    for name in ("a", "bb", "ccc"):
        add(engine, name, 20)
    engine.step()

    def fail() -> None:
        raise InternalError("the books are wrong")

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "schedule", fail)
        with pytest.raises(InternalError):
            engine.step()
    assert {delta.request_id for delta in engine.step()} == {"a", "bb", "ccc"}
    assert not engine.has_work
    assert pages_are_back(engine)


def pages_are_back(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.num_free_pages + stats.num_resume_point_pages == stats.num_pages and not stats.num_running
