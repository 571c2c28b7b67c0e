"""Engines as one: how they start and restart, with processes that are made up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from culet.cache.changes import PointStored
from culet.cache.content import UNIT
from culet.config import Config, ServeConfig
from culet.errors import ConfigError, CuletError, WorkerDied
from culet.limits import Limits
from culet.serve.engines import supervised as module
from culet.serve.engines.group import Engines
from culet.serve.engines.supervised import SupervisedEngine
from culet.serve.process.client import EngineClient, State
from culet.serve.process.wire import Start
from tests.engine.scheduler.drive import make_request

POINT = PointStored(1, 2, 2, "", (), 0, 0, bytes(2 * UNIT))


class MadeUpProcess(EngineClient):
    """A client without a process. It is ready at once, or it hangs in its start."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self.hangs, self.is_killed = hangs, False

    async def wait_ready(self) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        self.state = State.READY

    async def stop(self) -> int:
        return 0

    def kill(self) -> None:
        self.is_killed = True

    def die(self) -> None:
        self.connection_lost(None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[MadeUpProcess]:
    """The processes that were made, oldest first. All but the first hang. Restarts do not wait."""
    processes: list[MadeUpProcess] = []

    async def start(*arguments: Any, **options: Any) -> MadeUpProcess:
        processes.append(MadeUpProcess(hangs=bool(processes)))
        return processes[-1]

    monkeypatch.setattr(module.EngineClient, "start", start)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.0)
    return processes


def make_engine(**settings: Any) -> SupervisedEngine:
    return SupervisedEngine(Start(Config()), ServeConfig(**settings), Limits(), name="the engine")


def test_one_engine_that_fails_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the others, which may load for minutes or hang."""

    async def start(engine: SupervisedEngine) -> None:
        if engine.name == "engine 1":
            raise ConfigError("engine 1 is wrong")
        await asyncio.Event().wait()

    monkeypatch.setattr(SupervisedEngine, "start", start)
    engines = Engines(Config(), ServeConfig(data_parallel_size=2), Limits())
    with pytest.raises(ConfigError, match="engine 1 is wrong"):
        asyncio.run(asyncio.wait_for(engines.start(), 60))


def test_a_restart_that_hangs_is_noticed(made: list[MadeUpProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is ended, and the next one is started, until there are too many."""
    monkeypatch.setattr(module, "_LEAST_START_LIMIT_S", 0.01)
    monkeypatch.setattr(module, "_START_FACTOR", 0)

    async def run() -> CuletError:
        engine = make_engine(max_engine_restarts=2)
        given_up: asyncio.Future[CuletError] = asyncio.get_running_loop().create_future()
        engine.on_give_up = given_up.set_result
        await engine.start()
        made[0].die()
        return await asyncio.wait_for(given_up, 60)

    error = asyncio.run(run())
    assert error.message == "the engine was not ready after 0 s"
    assert [process.is_killed for process in made] == [False, True, True]


def test_nobody_looks_for_the_cache_of_an_engine_that_died(made: list[MadeUpProcess]) -> None:
    """Its process is gone, and the next one begins with an empty cache, and with the numbers of its resume points."""

    async def run() -> None:
        engine = make_engine()
        await engine.start()
        made[0].on_prefix_changes([POINT])
        assert engine.prefixes.num_points == 1
        made[0].die()
        assert engine.prefixes.num_points == 0
        engine.prefixes.apply([POINT])  # a report of the old process that was still read
        while len(made) < 2:
            await asyncio.sleep(0.01)
        assert engine.prefixes.num_points == 0
        await engine.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_engine_that_dies_while_the_server_drains_is_not_restarted(made: list[MadeUpProcess]) -> None:
    """Its requests get an error at once."""

    async def run() -> None:
        engine = make_engine()
        await engine.start()
        stream = engine.client.submit(make_request("a", [5, 6]))
        engine.is_draining = True
        made[0].die()
        with pytest.raises(WorkerDied, match="the engine process has ended"):
            await anext(stream)
        await asyncio.sleep(0.1)
        assert engine.num_restarts == 0

    asyncio.run(asyncio.wait_for(run(), 60))
