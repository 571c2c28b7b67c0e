"""An engine's parts can be built separately, and the engine uses its worker only through the Worker interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from culet.config import build_config
from culet.engine.engine import Engine
from culet.engine.resolve import resolve
from culet.engine.start import worker
from culet.engine.start.parts import EngineParts, build_parts
from culet.errors import ConfigError
from culet.kernels.compiling import CompileCount
from culet.parallel.rank import Rank
from culet.runner.worker import ProcessWorker
from culet.serve.process.engine import start_engine
from culet.serve.process.wire import Start
from culet.testing.tiny import write_checkpoint
from culet.types import SamplingParams, StepPlan, StepResult, StructuredOutputs

# A worker that joins later has no KV of earlier requests.
LIMITS = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "enable_prefix_caching": False}
PARAMS = {
    "plain": SamplingParams(max_tokens=12, seed=1, logprobs=3),
    "samples": SamplingParams(max_tokens=12, seed=2, n=3),
    "grammar": SamplingParams(max_tokens=12, seed=3, structured_outputs=StructuredOutputs(regex="[a-z ]{20}")),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B", dtype=torch.float32)
    return {"model": str(folder), **LIMITS}


@pytest.fixture(scope="module")
def parts(settings: dict[str, Any]) -> EngineParts:
    return build_parts(build_config(settings), progress=False)


@pytest.fixture(scope="module")
def process_worker(settings: dict[str, Any], parts: EngineParts) -> Iterator[ProcessWorker]:
    """A worker of the same size in another process."""
    num_slabs, max_model_len = parts.scheduler.stats().num_pages, parts.rules.max_model_len
    worker = ProcessWorker(
        "culet.engine.start.worker:build_worker", settings=settings, num_slabs=num_slabs, max_model_len=max_model_len
    )
    yield worker
    worker.close()


def assert_same(got: StepResult, wanted: StepResult) -> None:
    """Compare two results. On some CPUs, two processes round products differently, which log-probabilities show."""
    for mine, theirs in zip(got.drawn, wanted.drawn, strict=True):
        assert mine._replace(logprobs=()) == theirs._replace(logprobs=())
        assert [list(scores) for scores in mine.logprobs] == [list(scores) for scores in theirs.logprobs]
        for scores, expected in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert scores == pytest.approx(expected, abs=1e-4)
    assert replace(got, drawn=()) == replace(wanted, drawn=())


@pytest.mark.parametrize("name", PARAMS)
def test_a_worker_in_another_process_gives_the_same_results(
    parts: EngineParts, process_worker: ProcessWorker, name: str
) -> None:
    scheduler = parts.scheduler
    scheduler.add(parts.rules.make_request(name, range(5, 25), PARAMS[name]))
    num_steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        result = parts.worker.launch(plan).result()
        assert_same(process_worker.launch(plan).result(), result)
        scheduler.apply(result)
        scheduler.deltas()
        num_steps += 1
    assert 1 < num_steps <= 12


class StrictWorker:
    """Has only the methods of a Worker."""

    def __init__(self, worker: Any) -> None:
        self.__worker = worker
        self.is_closed = False
        self.compile_count: CompileCount | None = None

    def launch(self, plan: StepPlan) -> Any:
        return StrictPending(self.__worker.launch(plan))

    @property
    def num_host_pages(self) -> int:
        return self.__worker.num_host_pages

    def device_seconds(self) -> Mapping[str, float]:
        return self.__worker.device_seconds()

    def begin_serving(self) -> None:
        if self.compile_count is not None:
            self.compile_count.begin_serving()

    @property
    def descriptors(self) -> Sequence[int]:
        return self.__worker.descriptors

    def check(self) -> None:
        self.__worker.check()

    def close(self) -> None:
        self.is_closed = True


class StrictPending:
    def __init__(self, pending: Any) -> None:
        self.__pending = pending

    def result(self) -> StepResult:
        return self.__pending.result()


def run(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of every sample."""
    for name, params in PARAMS.items():
        request = engine.rules.make_request(name, range(5, 25), params)
        engine.check_grammar(request)
        engine.add(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault((delta.request_id, delta.sample), []).extend(delta.token_ids)
    return tokens


def test_the_engine_uses_only_the_worker_interface(settings: dict[str, Any]) -> None:
    engine = Engine(build_config(settings), progress=False)
    engine._worker = worker = StrictWorker(engine._worker)  # type: ignore[assignment]
    tokens = run(engine)
    assert set(tokens) == {("plain", 0), ("samples", 0), ("samples", 1), ("samples", 2), ("grammar", 0)}
    assert re.fullmatch("[a-z ]{1,20}", engine.tokenizer.decode(tokens.pop(("grammar", 0))))
    assert all(len(token_ids) == 12 for token_ids in tokens.values())
    assert engine.stats().verify_seconds == 0.0
    assert (engine.kernels_compiled, engine.stats().kernels_compiled) == (0, 0)
    engine.close()
    assert worker.is_closed


def test_kernels_that_are_compiled_while_serving(settings: dict[str, Any], parts: EngineParts) -> None:
    """Those of the start do not count."""
    count = CompileCount(compiled=9, found=3)  # as on a GPU

    def make_worker(num_slabs: int, max_model_len: int) -> Any:
        worker = StrictWorker(parts.worker)
        worker.compile_count = count
        return worker

    config = build_config(
        {**settings, "kv_cache_memory_bytes": parts.scheduler.stats().num_pages * parts.setup.layout.slab_bytes}
    )
    engine = Engine(config, progress=False, make_worker=make_worker)
    assert (engine.kernels_compiled, engine.stats().kernels_compiled) == (9, 0)
    assert count.is_serving
    count.while_serving += 2
    assert (engine.kernels_compiled, engine.stats().kernels_compiled) == (9, 2)


DRAFTING = {"speculative_config": {"method": "mtp", "model": "random:", "adaptive": False}}


@pytest.mark.parametrize("draft", [pytest.param({}, marks=pytest.mark.slow), DRAFTING])
def test_an_engine_runs_on_a_worker_in_another_process(
    settings: dict[str, Any], draft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of a worker in this process, and this process loads no weights."""
    settings = settings | draft
    expected = run(Engine(build_config(settings), progress=False))

    def make_worker(num_slabs: int, max_model_len: int) -> ProcessWorker:
        sizes = {"num_slabs": num_slabs, "max_model_len": max_model_len}
        return ProcessWorker("culet.engine.start.worker:build_worker", settings=settings, **sizes)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights belong in the worker's process")

    monkeypatch.setattr("culet.engine.start.worker.load_model", refuse)
    engine = Engine(build_config(settings), progress=False, make_worker=make_worker)
    assert isinstance(engine._worker, ProcessWorker)
    assert run(engine) == expected
    assert (engine.stats().counters.drafted_tokens > 0) == bool(draft)
    engine.close()


def test_a_worker_elsewhere_needs_a_cache_size(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without a given size, only the process that loads the model can measure how much fits."""
    monkeypatch.setattr("culet.engine.start.worker._planned_slabs", lambda setup: None)
    with pytest.raises(ConfigError, match="can only be measured") as caught:
        build_parts(build_config(settings), make_worker=lambda num_slabs, max_model_len: pytest.fail("not reached"))
    assert caught.value.hint == "set --kv-cache-memory-bytes"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engines_share_the_memory(
    settings: dict[str, Any],
    parts: EngineParts,
    num_ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a CPU, the caches of all engines take a quarter of the free memory together, and so do those of their ranks."""
    slab_bytes = parts.setup.layout.slab_bytes
    monkeypatch.setattr("culet.engine.memory.free_cpu_memory", lambda: 4 * 60 * slab_bytes)
    setup = replace(parts.setup, rank=Rank(0, num_ranks), config=build_config({"device": "cpu"}))
    with caplog.at_level("INFO", logger="culet"):
        assert worker._planned_slabs(setup) == 60 // num_ranks
        assert worker._planned_slabs(replace(setup, num_engines=2)) == 30 // num_ranks
    assert f"a quarter of the free memory, divided by {2 * num_ranks}" in caplog.text
    if num_ranks == 1:
        config = build_config({"model": settings["model"], "device": "cpu"})
        num_pages = [start_engine(Start(config, num_engines=count))[1].num_pages for count in (1, 2)]
        assert num_pages == [60, 30]


def test_a_setup_is_resolved_before_anything_is_loaded(settings: dict[str, Any]) -> None:
    setup = resolve(build_config(settings))
    assert (setup.device.type, setup.dtype, setup.has_graphs, setup.max_in_flight) == ("cpu", torch.float32, False, 1)
    assert resolve(build_config(settings | {"async_scheduling": True})).max_in_flight == 2
    assert setup.config.schedule.max_num_seqs == 4
    defaults = {"model": settings["model"], "device": "cpu"}
    assert resolve(build_config(defaults)).config.schedule.max_num_seqs == 32, "a CPU has smaller defaults"
    with pytest.raises(ConfigError, match="max-model-len"):
        resolve(build_config(settings | {"max_model_len": 10**6}))
