"""What the ingress knows of Ray's replicas. A fake handle stands for them, so no cluster is needed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from culet.cache.changes import PointRemoved, PointStored, PrefixChange
from culet.cache.content import PrefixContent
from culet.cache.mirror import Overlap
from culet.serve.process.wire import Ready
from culet.serve.ray import engines as module
from culet.serve.ray.engines import ExpectedPoints, RayEngines
from culet.serve.ray.messages import Log, Part, Route
from culet.types import FinishReason, ModelDefaults, TokenDelta
from tests.engine.scheduler.drive import make_request

PROMPT = list(range(1, 41))
FACTS = Ready(99, ModelDefaults(), 512, 512, 4, 8, "cpu", "float32", 9, 9, 9)


class Handle:
    """The deployment of engines. Each replica has a log of its cache, and may be too busy to say anything about it."""

    def __init__(self, *names: str) -> None:
        self.logs: dict[str, list[PrefixChange]] = {name: [] for name in names}
        self.asked: list[tuple[str, int]] = []
        self.held: dict[str, asyncio.Event] = {}  # replicas that are busy until these are set
        self.next_name = names[0]  # of the replica that gets the next request
        self.prefix_changes = self.generate = self

    def options(self, **options: Any) -> Handle:
        return self

    def remote(self, route: Route, first: Any, *rest: Any) -> Any:
        return self._log(route.replica_id, first) if route.replica_id else Answer(self.next_name)

    async def _log(self, name: str, number: int) -> bytes:
        self.asked.append((name, number))
        if name in self.held:
            await self.held[name].wait()
        if name not in self.logs:
            return b""  # another replica was asked
        log = self.logs[name]
        is_whole = not 0 <= number <= len(log)
        return msgspec.msgpack.encode(Log(name, len(log), log[0 if is_whole else number :], is_whole))


class Answer:
    """One token, from one replica."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield msgspec.msgpack.encode(Part(self._name))
        yield msgspec.msgpack.encode(Part(self._name, [TokenDelta("a", 0, (7,), finish_reason=FinishReason.LENGTH)]))

    def cancel(self) -> None:
        pass


async def answer(engines: RayEngines, tokens: list[int]) -> None:
    stream = engines.submit(make_request("a", tokens))
    async for _ in stream:
        pass
    stream.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.005)


def point(point_id: int, tokens: list[int]) -> PointStored:
    return PointStored(point_id, len(tokens), len(tokens), "", (), 0, 0, array("I", tokens).tobytes())


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_POLL_LIMIT_S", 600.0)


def run(main: Callable[[Handle, RayEngines], Awaitable[None]]) -> None:
    """Run with two replicas, which have both answered a short prompt."""

    async def started() -> None:
        handle = Handle("a", "b")
        engines = RayEngines(handle, 2)
        engines.facts = FACTS
        for handle.next_name in ("a", "b"):
            await answer(engines, [3])
        engines._spawn(engines._poll_all())
        try:
            await main(handle, engines)
        finally:
            await engines.stop()

    asyncio.run(started())


def found(engines: RayEngines, tokens: list[int]) -> dict[str, tuple[int, int]]:
    """Return what each replica is thought to have of a prompt."""
    return engines._route(make_request("b", tokens), PrefixContent()).overlaps


def test_a_prompt_is_expected_until_its_replica_has_reported() -> None:
    async def main(handle: Handle, engines: RayEngines) -> None:
        handle.held["b"] = asyncio.Event()
        await until(lambda: ("b", -1) in handle.asked)
        await answer(engines, PROMPT)  # by replica b
        assert found(engines, [*PROMPT, 50]) == {"b": (40, 40)}
        handle.held["b"].set()
        handle.held["b"] = asyncio.Event()
        await until(lambda: handle.asked.count(("b", 0)) == 1)
        assert found(engines, [*PROMPT, 50]) == {"b": (40, 40)}  # the first question was older than the prompt
        handle.logs["b"].append(point(1, PROMPT[:30]))  # and it has been evicted since
        handle.held.pop("b").set()
        await until(lambda: found(engines, [*PROMPT, 50]) == {"b": (30, 30)})

    run(main)


def test_replicas_are_followed() -> None:
    """A log is read on from where it was left. A new one is read from its beginning, and the old one is forgotten."""

    async def main(handle: Handle, engines: RayEngines) -> None:
        handle.logs["a"].append(point(1, PROMPT))
        await until(lambda: found(engines, [*PROMPT, 50]) == {"a": (40, 40)})
        assert handle.asked.count(("a", -1)) == 1
        handle.logs["a"] += [point(2, PROMPT[:20]), PointRemoved(1)]
        await until(lambda: found(engines, [*PROMPT, 50]) == {"a": (20, 20)})
        handle.logs["a"] = [point(1, PROMPT[:30])]  # of a new engine process
        await until(lambda: found(engines, [*PROMPT, 50]) == {"a": (30, 30)})
        assert found(engines, [*PROMPT[:20], 50]) == {"a": (0, 20)}

    run(main)


def test_a_busy_replica_does_not_hold_up_what_is_known_of_others() -> None:
    async def main(handle: Handle, engines: RayEngines) -> None:
        handle.held["a"] = asyncio.Event()
        await until(lambda: ("a", -1) in handle.asked)
        handle.logs["b"].append(point(1, PROMPT))
        await until(lambda: found(engines, [*PROMPT, 50]) == {"b": (40, 40)})

    run(main)


def test_a_replica_that_is_gone_is_forgotten() -> None:
    async def main(handle: Handle, engines: RayEngines) -> None:
        handle.logs["a"].append(point(1, PROMPT))
        await until(lambda: found(engines, [*PROMPT, 50]) == {"a": (40, 40)})
        del handle.logs["a"]
        await until(lambda: list(engines._replicas) == ["b"])

    run(main)


def test_expected_points_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_EXPECTED", 2)
    points = ExpectedPoints()
    for first in range(3):
        tokens = [first] * 20
        points.add(make_request("a", tokens), PrefixContent())
    overlaps = [points.find([first] * 21, PrefixContent()) for first in range(3)]
    assert overlaps == [Overlap(), Overlap(20, 20), Overlap(20, 20)]
    assert points.find([2] * 20, PrefixContent()) == Overlap(19, 20)  # the same prompt
