"""GrammarAdmission: known grammars never wait, waiters are bounded, and nobody's work outlives its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from culet.errors import BadRequest, QueueFull
from culet.structured.admission import GRACE_S, GrammarAdmission
from culet.structured.check import MAX_PROCESSES, GrammarCheck
from culet.types import GrammarSpec, StructuredOutputs

KNOWN = GrammarSpec("regex", "[a-z]+")
PATIENCE = 20  # limits suit an idle machine; multiply them by this to allow for a busy one


def endless(number: int) -> GrammarSpec:
    """A schema that takes minutes to compile."""
    multiples = [{"type": "integer", "multipleOf": multiple} for multiple in (9973, 9967, 9949, 9941)]
    return StructuredOutputs(json={"title": str(number), "allOf": multiples}).spec()


@asynccontextmanager
async def admission(time_limit_s: float, max_waiting: int = 64) -> AsyncIterator[GrammarAdmission]:
    check = GrammarCheck((), time_limit_s=time_limit_s)
    desk = GrammarAdmission(check, max_waiting=max_waiting)
    try:
        check.time_limit_s = 60.0  # for processes that start on a busy machine
        await asyncio.gather(*(desk.admit(GrammarSpec("regex", text)) for text in ("[a-z]+", "[0-9]+")))
        check.time_limit_s = time_limit_s
        yield desk
    finally:
        desk.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_known_grammar_does_not_wait_for_forty_others() -> None:
    async def main() -> None:
        async with admission(time_limit_s=1.0) as desk:
            others = [asyncio.create_task(desk.admit(endless(number))) for number in range(40)]
            await asyncio.sleep(0.05)
            known = desk.admit(KNOWN)
            with pytest.raises(StopIteration):  # it returns without waiting for anything
                known.send(None)
            results = await asyncio.gather(*others, return_exceptions=True)
            refused = [result for result in results if isinstance(result, BadRequest)]
            assert all(isinstance(result, BadRequest | QueueFull) for result in results)
            assert len(refused) <= 2 * MAX_PROCESSES, "their time counts from their arrival"
            assert all("compiling it took more than 1 s" in error.message for error in refused)
            assert desk.num_waiting == 0

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < PATIENCE * 2


def test_waiters_are_bounded() -> None:
    async def main() -> None:
        async with admission(time_limit_s=5.0, max_waiting=4) as desk:
            tasks = [asyncio.create_task(desk.admit(endless(number))) for number in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull, match="already wait"):
                await desk.admit(endless(4))
            assert await desk.admit(KNOWN) == KNOWN
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert desk.num_waiting == 0

    asyncio.run(main())


def test_requests_with_the_same_grammar_share_one_check() -> None:
    async def main() -> None:
        async with admission(time_limit_s=60.0) as desk:
            spec = GrammarSpec("regex", "[a-f]{4}")
            tasks = [asyncio.create_task(desk.admit(spec)) for _ in range(10)]
            await asyncio.sleep(0)
            assert len(desk._waiting) == 1
            tasks[0].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results[1:] == [spec] * 9

    asyncio.run(main())


def test_the_work_of_clients_that_have_left_is_dropped() -> None:
    """A new grammar is checked long before the time of the abandoned ones is over."""

    async def main() -> None:
        async with admission(time_limit_s=1000.0) as desk:
            tasks = [asyncio.create_task(desk.admit(endless(number))) for number in range(20)]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(PATIENCE * (GRACE_S + 1)):
                await desk.admit(GrammarSpec("regex", "x+"))
            await until(lambda: not desk._check._running)

    asyncio.run(main())


def test_a_grammar_that_had_too_little_time_is_not_remembered_as_bad() -> None:
    async def main() -> None:
        async with admission(time_limit_s=1.0) as desk:
            tasks = [asyncio.create_task(desk.admit(endless(number))) for number in range(MAX_PROCESSES)]
            await asyncio.sleep(0.5)
            late = GrammarSpec("regex", "y+")
            waiting = asyncio.create_task(desk.admit(late))
            results = await asyncio.gather(*tasks, waiting, return_exceptions=True)
            assert isinstance(results[-1], GrammarSpec | QueueFull)
            desk._check.time_limit_s = 60.0
            assert await desk.admit(late) == late

    asyncio.run(main())


def test_the_time_of_a_check_runs_while_it_waits_for_a_process() -> None:
    check = GrammarCheck((), time_limit_s=60.0)
    try:
        for text in ("[a-z]+", "[0-9]+"):
            check.check(GrammarSpec("regex", text))  # a process that is starting takes no time from a grammar
        check.time_limit_s = 2.0
        first = [check.begin(form, form.key) for form in map(endless, range(MAX_PROCESSES))]
        late = endless(99)
        waiting = check.begin(late, late.key)
        for other in first:
            assert isinstance(other.future.exception(PATIENCE), QueueFull) or "too complex" in other.future.result().error
        assert isinstance(waiting.future.exception(PATIENCE), QueueFull), "it had its time while it waited"
    finally:
        check.close()
