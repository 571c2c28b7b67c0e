"""AsyncLLM: many tasks, cancelled tasks, aborted requests and failures."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from culet import LLM, AsyncLLM, SamplingParams
from culet.engine.jobs import Result
from culet.errors import BadRequest, ConfigError, CuletError, InternalError

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_queue_len": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    with AsyncLLM(str(folder), **SETTINGS) as llm:
        yield llm


def stats(llm: AsyncLLM) -> Any:
    return llm._thread.jobs.engine.stats()


async def last(llm: AsyncLLM, *arguments: Any, **options: Any) -> Result:
    results = [result async for result in llm.generate(*arguments, **options)]
    assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
    return results[-1]


async def at_rest(llm: AsyncLLM) -> None:
    """Wait until nothing runs."""
    for _ in range(2000):
        now = stats(llm)
        if not (now.num_running or now.num_waiting):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine does not come to rest")


def test_many_tasks_give_what_llm_gives_and_run_together(folder: Path, llm: AsyncLLM) -> None:
    prompts = [[2, *range(10 + number, 20 + 2 * number)] for number in range(14)]  # more than run and wait at once

    async def run() -> list[Result]:
        return await asyncio.gather(*(last(llm, {"prompt_token_ids": prompt}, GREEDY) for prompt in prompts))

    before = stats(llm).counters.steps
    results = asyncio.run(run())
    num_steps = stats(llm).counters.steps - before
    with LLM(str(folder), **SETTINGS) as offline:
        expected = offline.generate(prompts, GREEDY)
    assert [result.outputs[0].token_ids for result in results] == [result.outputs[0].token_ids for result in expected]
    assert [result.outputs[0].text for result in results] == [result.outputs[0].text for result in expected]
    assert num_steps < 14 * 24 / 3, "the requests did not run together"


def test_results_grow(llm: AsyncLLM) -> None:
    async def run() -> list[Result]:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=2, logprobs=1)
        return [result async for result in llm.generate("Hello", params, "mine")]

    results = asyncio.run(run())
    assert {result.request_id for result in results} == {"mine"}
    assert {result.prompt for result in results} == {"Hello"}
    for earlier, later in itertools.pairwise(results):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert len(after.logprobs or ()) == len(after.token_ids)
    assert {tuple(sample.index for sample in result.outputs) for result in results} == {(0, 1)}
    assert [len(sample.token_ids) for sample in results[-1].outputs] == [24, 24]
    assert results[-1].outputs[0].finish_reason == "length"


def test_a_cancelled_task_ends_its_request(llm: AsyncLLM) -> None:
    async def run() -> None:
        others = asyncio.gather(*(last(llm, "Hello", GREEDY) for _ in range(3)))
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate("Good day", LONG, "long"):
                has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [result.finish_reason for result in await others] == ["length"] * 3
        await at_rest(llm)
        assert (await last(llm, "Good day", GREEDY, "long")).finished  # the id is free again

    before = stats(llm).counters.cancelled
    asyncio.run(run())
    assert stats(llm).counters.cancelled == before + 1


def test_abort(llm: AsyncLLM) -> None:
    async def run() -> Result:
        result = None
        async for result in llm.generate("Hello", LONG, "long"):
            if not result.finished:
                await llm.abort("long")
                await llm.abort(["unknown"])
        assert result is not None
        return result

    result = asyncio.run(run())
    assert (result.finished, result.finish_reason) == (True, "abort")
    assert 0 < len(result.token_ids) < 400


def test_leaving_early_ends_the_request(llm: AsyncLLM) -> None:
    async def run() -> None:
        stream = llm.generate("Hello", LONG)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await at_rest(llm)

    asyncio.run(run())


def test_bad_requests(llm: AsyncLLM) -> None:
    async def run() -> None:
        with pytest.raises(BadRequest, match="expected a token id"):
            await last(llm, [10**9], GREEDY)
        with pytest.raises(BadRequest, match="got 2 prompts"):
            await last(llm, ["a", "b"], GREEDY)
        with pytest.raises(CuletError, match="the context holds only 512"):
            await last(llm, "Hello", SamplingParams(max_tokens=1000))
        running = asyncio.create_task(last(llm, "Hello", GREEDY, "same"))
        while "same" not in llm._waiters:
            await asyncio.sleep(0.001)
        with pytest.raises(BadRequest, match="already running"):
            await last(llm, "Hello", GREEDY, "same")
        assert (await running).finished

    asyncio.run(run())


def test_several_event_loops(llm: AsyncLLM) -> None:
    results: list[Result] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(last(llm, "Hello", GREEDY)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.token_ids for result in results}) == 1
    assert len(results) == 3


def test_a_failed_step_ends_its_requests(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = llm._thread.jobs.engine
        stream = llm.generate("Hello", LONG)
        await anext(stream)

        def fail() -> Any:
            monkeypatch.undo()
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine, "step", fail)
        with pytest.raises(InternalError, match="the device is gone"):
            async for _ in stream:
                pass
        assert (await last(llm, "Hello", GREEDY)).finished

    asyncio.run(run())


def test_shutdown(folder: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(str(folder), **SETTINGS)
        tokenizer = await llm.get_tokenizer()
        assert tokenizer.encode("Hello")
        stream = llm.generate("Hello", LONG)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(ConfigError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(ConfigError):
            await last(llm, "Hello", GREEDY)
        llm.shutdown()

    before = {*threading.enumerate()}
    asyncio.run(run())
    assert {*threading.enumerate()} <= before  # threads of earlier tests may have ended
