"""The queue for prompts: short ones do not wait for long ones, it is bounded, and those who leave cost nothing more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from culet.errors import QueueFull
from culet.line_process import Stopper
from culet.text.text_queue import SHORT_BYTES, TextQueue

MEGABYTE = 1 << 20
LIMIT_S = 60.0


class Work:
    """Work that ends when it is told to."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self._order = name, order
        self.may_end = threading.Event()
        self.stopper: Stopper | None = None

    def __call__(self, stopper: Stopper) -> str:
        self._order.append(self.name)
        self.stopper = stopper
        assert self.may_end.wait(LIMIT_S)
        return self.name


def queue(num_threads: int = 2, **bounds: int) -> TextQueue:
    return TextQueue(num_threads, **{"max_waiting": 100, "max_waiting_mb": 100, **bounds})


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_short_prompt_does_not_wait_for_long_ones():
    async def test() -> None:
        texts, order = queue(), []
        long = [Work(f"long {number}", order) for number in range(12)]
        tasks = [asyncio.create_task(texts.run(work, 4 * MEGABYTE)) for work in long]
        await until(lambda: order)
        short = Work("short", order)
        short.may_end.set()
        for _ in range(20):
            assert await texts.run(short, 100) == "short"
        assert order == ["long 0"] + ["short"] * 20
        for work in long:
            work.may_end.set()
        await asyncio.gather(*tasks)
        assert texts.num_waiting == 0

    run(test)


def test_shorter_ones_first_among_long_ones():
    async def test() -> None:
        texts, order = queue(), []
        sizes = {"first": 4, "large": 4, "larger": 5, "medium": 1}
        works = {name: Work(name, order) for name in sizes}
        tasks = [asyncio.create_task(texts.run(works[name], size * MEGABYTE)) for name, size in sizes.items()]
        for work in works.values():
            work.may_end.set()
        await asyncio.gather(*tasks)
        assert order == ["first", "medium", "large", "larger"]

    run(test)


def test_a_long_prompt_that_has_waited_goes_before_a_shorter_new_one(monkeypatch):
    async def test() -> None:
        monkeypatch.setattr("culet.text.text_queue._BYTES_PER_S", 1e12)  # waiting counts more than size
        texts, order = queue(), []
        works = {name: Work(name, order) for name in ("first", "old", "new")}
        tasks = [asyncio.create_task(texts.run(works["first"], MEGABYTE))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(texts.run(works["old"], 4 * MEGABYTE)))
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(texts.run(works["new"], MEGABYTE)))
        for work in works.values():
            await asyncio.sleep(0)
            work.may_end.set()
        await asyncio.gather(*tasks)
        assert order == ["first", "old", "new"]

    run(test)


@pytest.mark.parametrize("bounds", [{"max_waiting": 3}, {"max_waiting_mb": 12}])
def test_it_is_bounded(bounds):
    async def test() -> None:
        texts, order = queue(**bounds), []
        long = [Work(f"long {number}", order) for number in range(4)]
        tasks = [asyncio.create_task(texts.run(work, 4 * MEGABYTE)) for work in long]  # one runs and three wait
        await until(lambda: texts.num_waiting == 3)
        for _ in range(5):
            with pytest.raises(QueueFull, match="too many prompts are waiting"):
                await texts.run(long[0], 4 * MEGABYTE)
        assert texts.num_refused == 5
        short = Work("short", order)
        short.may_end.set()
        assert await texts.run(short, SHORT_BYTES) == "short"  # it has its own bounds
        for work in long:
            work.may_end.set()
        await asyncio.gather(*tasks)

    run(test)


def test_those_who_leave_are_removed_at_once():
    async def test() -> None:
        texts, order = queue(), []
        works = [Work(f"long {number}", order) for number in range(12)]
        tasks = [asyncio.create_task(texts.run(work, 4 * MEGABYTE)) for work in works]
        await until(lambda: order)
        for task in tasks[1:]:
            task.cancel()
        await until(lambda: texts.num_waiting == 0)
        assert texts._long.num_bytes == 0
        assert not texts._long._heap  # nothing keeps their prompts
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert works[0].stopper is not None
        assert works[0].stopper.is_stopped  # this kills its process
        assert texts.num_dropped == 12
        works[0].may_end.set()
        last = Work("last", order)
        last.may_end.set()
        assert await texts.run(last, 4 * MEGABYTE) == "last"
        assert order == ["long 0", "last"]

    run(test)


def test_errors_reach_the_caller_and_free_the_thread():
    async def test() -> None:
        texts = queue(1)

        def fail(stopper: Stopper) -> None:
            raise ValueError("bad")

        for _ in range(3):
            with pytest.raises(ValueError, match="bad"):
                await texts.run(fail, 4 * MEGABYTE)
        assert await texts.run(lambda stopper: 7, 4 * MEGABYTE) == 7

    run(test)
