"""Engines as one: how they start and restart, with processes that are made up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from culet.cache.changes import PointStored
from culet.cache.content import UNIT
from culet.config import Config, ServeConfig, build_config
from culet.errors import ConfigError, CuletError, WorkerDied
from culet.limits import Limits
from culet.serve.engines import supervised as module
from culet.serve.engines.group import Engines, unavailable
from culet.serve.engines.supervised import SupervisedEngine
from culet.serve.process.client import EngineClient, State
from culet.serve.process.wire import Ready, Start
from culet.types import ModelDefaults
from tests.engine.scheduler.drive import make_request

READY = Ready(99, ModelDefaults(), 512, 512, 4, 8, "cpu", "float32", 9, 9, 9)
POINT = PointStored(1, 2, 2, "", (), 0, 0, bytes(2 * UNIT))


class MadeUpProcess(EngineClient):
    """A client without a process. It is ready at once, or it hangs in its start."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self.hangs, self.is_stopped = hangs, False

    async def wait_ready(self) -> Ready:
        if self.hangs:
            await asyncio.Event().wait()
        self.state, self.facts = State.READY, READY
        return READY

    async def stop(self) -> int:
        self.is_stopped = True
        return 0

    def die(self) -> None:
        self.connection_lost(None)


class Made(list[MadeUpProcess]):
    """The processes that were made, oldest first."""

    num_well = 1  # those after the first ones hang


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The processes that engines start from now on. Restarts do not wait."""
    processes = Made()

    async def start(*arguments: Any, **options: Any) -> MadeUpProcess:
        processes.append(MadeUpProcess(hangs=len(processes) >= processes.num_well))
        return processes[-1]

    monkeypatch.setattr(module.EngineClient, "start", start)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.0)
    return processes


def make_engine(**settings: Any) -> SupervisedEngine:
    return SupervisedEngine(Start(Config()), ServeConfig(**settings), Limits())


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


def test_engines_know_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 3):
        engines = Engines(build_config({"device": "cpu"}), ServeConfig(data_parallel_size=size), Limits())
        assert [(part._start.rank, part._start.num_engines) for part in engines.parts] == [(rank, size) for rank in range(size)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    engines = Engines(Config(), ServeConfig(data_parallel_size=2), Limits())
    assert [part._start.config.model.device for part in engines.parts] == ["cuda", "cuda"]


def test_a_restart_that_hangs_is_noticed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [process.is_stopped for process in made] == [True] * 3


def test_nobody_looks_for_the_cache_of_an_engine_that_died(made: Made) -> None:
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


def test_an_engine_that_dies_while_the_server_drains_is_not_restarted(made: Made) -> None:
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


def test_idle_engines_take_turns(made: Made) -> None:
    made.num_well = 2

    async def run() -> list[int]:
        engines = Engines(Config(), ServeConfig(data_parallel_size=2), Limits())
        await engines.start()
        chosen = []
        for number in range(4):
            stream = engines.submit(make_request(str(number), [5, 6]))
            chosen.append([engine.num_in_flight for engine in engines.parts].index(1))
            stream.close()
        return chosen

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [0, 1, 0, 1]


def test_requests_of_a_given_up_engine_wait_for_one_that_restarts(made: Made) -> None:
    """No engine is ready, but one will be."""
    made.num_well = 2
    errors: list[CuletError] = []

    async def run() -> None:
        engines = Engines(Config(), ServeConfig(data_parallel_size=2), Limits())
        engines.on_exit = errors.append
        await engines.start()
        first, second = engines.parts
        stream = second.client.submit(make_request("a", [5, 6]))
        assert engines.capacity == 2 * (READY.max_num_seqs + READY.max_queue_len)
        made[0].die()
        assert engines.capacity == READY.max_num_seqs + READY.max_queue_len
        second.is_given_up = True
        second.on_give_up(WorkerDied("it died too often"))
        assert (first.num_in_flight, second.num_in_flight, stream.is_done) == (1, 0, False)
        assert errors == []
        assert (second.health, engines.health) == ("given up", "restarting")
        first.is_given_up = True
        assert unavailable(engines).message == "the engine died and will not be restarted"
        first.on_give_up(WorkerDied("this one, too"))
        assert [error.message for error in errors] == ["this one, too"]
        await engines.stop()

    asyncio.run(asyncio.wait_for(run(), 60))
