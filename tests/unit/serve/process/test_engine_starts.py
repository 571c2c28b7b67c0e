"""A new engine process takes over the requests that the one before it has left, unless it cannot be started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import Any

import pytest

from culet.config import Config
from culet.errors import WorkerDied
from culet.serve.process import client as module
from culet.serve.process.client import EngineClient, State, TokenStream
from culet.serve.process.wire import Start
from tests.engine.scheduler.drive import make_request


def dead_client(*request_ids: str) -> EngineClient:
    """Return the client of a process that has died, with requests that can start over."""
    client = EngineClient()
    client.state = State.DEAD
    for request_id in request_ids:
        leave(client, request_id)
    return client


def leave(client: EngineClient, request_id: str) -> None:
    client.take(TokenStream(client, make_request(request_id, [5, 6])))


def test_a_process_that_cannot_be_started_takes_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be out of processes or memory. The supervisor tries again, as after any other failed start."""

    def refuse(*arguments: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(module, "start_bound_process", refuse)
    previous = dead_client("a", "b")
    with pytest.raises(WorkerDied, match=r"cannot start the engine process: .* temporarily"):
        asyncio.run(EngineClient.start(Start(Config()), previous=previous))
    assert previous.num_in_flight == 2


def test_requests_that_come_while_the_process_starts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine, which has been given up, may leave its requests at any time."""
    previous = dead_client("a")
    held: list[int] = []

    async def start() -> EngineClient:
        def run(name: str, descriptor: int, environment: object) -> None:
            held.append(os.dup(descriptor))  # the process's end of the connection
            asyncio.get_running_loop().call_soon(leave, previous, "b")

        monkeypatch.setattr(module, "start_bound_process", run)
        return await EngineClient.start(Start(Config()), previous=previous)

    try:
        client = asyncio.run(start())
    finally:
        os.close(held[0])
    assert (previous.num_in_flight, client.num_in_flight, client.num_samples) == (0, 2, 2)


def test_a_process_that_loads_is_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no commands, so nobody waits until it obeys. Its end is no death that leads to a restart."""
    held: list[int] = []
    deaths: list[int] = []

    def run(name: str, descriptor: int, environment: object) -> subprocess.Popen[bytes]:
        held.append(os.dup(descriptor))
        return subprocess.Popen(["sleep", "600"])

    monkeypatch.setattr(module, "start_bound_process", run)
    monkeypatch.setattr(module, "_STOP_LIMIT_S", 40.0)

    async def start_and_stop() -> int:
        client = await EngineClient.start(Start(Config()))
        client.on_death = lambda: deaths.append(1)
        code = await asyncio.wait_for(client.stop(), 30)
        while client.state is not State.DEAD:  # the connection is closed
            await asyncio.sleep(0.01)
        return code

    try:
        assert asyncio.run(start_and_stop()) == -signal.SIGKILL
        assert not deaths
    finally:
        os.close(held[0])
