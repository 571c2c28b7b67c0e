"""A new engine process takes over the requests that the one before it has left, unless it cannot be started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from culet.config import Config
from culet.errors import WorkerDied
from culet.frames import frame
from culet.serve.process import client as module
from culet.serve.process.client import EngineClient, State, TokenStream
from culet.serve.process.wire import Ready, Start
from culet.types import FinishReason, ModelDefaults, TokenDelta
from tests.engine.scheduler.drive import make_request

READY = Ready(99, ModelDefaults(), 512, 512, 4, 8, "cpu", "float32", 9, 9, 9)


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


def death_of(monkeypatch: pytest.MonkeyPatch, hurt: Callable[[EngineClient, int], Awaitable[None]]) -> WorkerDied:
    """Return the error of `wait_ready` if the process dies from `hurt`, which gets the client and the process's id."""

    def run(name: str, descriptor: int, environment: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], pass_fds=[descriptor])

    monkeypatch.setattr(module, "start_bound_process", run)

    async def die() -> WorkerDied:
        client = await EngineClient.start(Start(Config(), name="engine 1"))
        assert client._process is not None
        await hurt(client, client._process.pid)
        with pytest.raises(WorkerDied) as caught:
            await client.wait_ready()
        await client.stop()
        assert (client.death().message, client.death().hint) == (caught.value.message, caught.value.hint)
        return caught.value

    return asyncio.run(asyncio.wait_for(die(), 60))


def test_a_process_that_is_killed_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could log nothing, so the error says what is known."""
    ids: list[int] = []

    async def kill(client: EngineClient, process_id: int) -> None:
        ids.append(process_id)
        os.kill(process_id, signal.SIGKILL)

    error = death_of(monkeypatch, kill)
    assert error.message == f"engine 1's process {ids[0]} exited unexpectedly with exit code -9"
    assert "perhaps because the machine ran out of memory" in error.hint


def test_a_process_that_this_one_kills_has_not_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kill(client: EngineClient, process_id: int) -> None:
        client.kill(WorkerDied("it had sent no message for 300 s"))

    error = death_of(monkeypatch, kill)
    assert (error.message, error.hint) == ("it had sent no message for 300 s", "")


def test_only_requests_that_are_not_done_start_over() -> None:
    """A whole answer that nobody has read yet is kept, and a client that has left costs the next engine nothing."""

    async def run() -> None:
        first, second = EngineClient(), EngineClient()
        first.state = State.READY
        done, left, seen = (first.submit(make_request(name, [5, 6])) for name in ("done", "left", "seen"))
        begun = first.submit(make_request("begun", [5, 6], n=2))
        done.put(TokenDelta("done", 0, (7,), finish_reason=FinishReason.STOP))
        for stream in (begun, left, seen):
            stream.put(TokenDelta(stream.request.request_id, 0, (8,)))
        begun.put(TokenDelta("begun", 1, (8,), finish_reason=FinishReason.STOP))
        seen.is_seen = True
        first.connection_lost(None)
        assert [stream.num_starts for stream in (done, begun)] == [0, 1]
        assert [[delta.token_ids for delta in deltas] async for deltas in done] == [[(7,)]]
        with pytest.raises(WorkerDied):
            [deltas async for deltas in seen]
        waiting = first.give_away()
        assert waiting == [left, begun]
        for stream in waiting:
            second.take(stream)
        left.cancel()
        second.data_received(bytes(frame(READY)))
        assert [stream.num_submits for stream in (done, begun, left, seen)] == [1, 2, 1, 1]
        for sample in range(2):
            assert not begun.is_done
            begun.put(TokenDelta("begun", sample, (9,), finish_reason=FinishReason.STOP))
        assert [[delta.token_ids for delta in deltas] async for deltas in begun] == [[(9,), (9,)]]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_request_that_saw_three_engines_die_is_given_up() -> None:
    """It may be the cause. Requests that no engine has begun yet go on waiting."""
    stream, late = (TokenStream(EngineClient(), make_request(name, [5, 6])) for name in ("a", "late"))
    for number in range(3):
        assert not stream.is_done
        client = EngineClient()
        client.state = State.READY
        client.take(stream)
        if number == 2:
            client.take(late)
        client.connection_lost(None)
    assert stream.is_done
    assert not late.is_done


def test_a_process_that_sends_nonsense_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests start over in the next one, like those of any process that dies."""
    killed: list[EngineClient] = []
    monkeypatch.setattr(EngineClient, "kill", lambda client: killed.append(client))
    client = EngineClient()
    client.data_received(b"\x00\x00\x00\x01\xc1")
    assert killed == [client]
    client.connection_lost(None)
    assert client.death().message.startswith("cannot decode a message from the engine process")
