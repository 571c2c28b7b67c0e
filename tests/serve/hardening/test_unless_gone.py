"""Work for a request ends when its client disconnects, and only then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from culet.serve.streams import _PATIENCE_S, ClientGone, unless_gone


class Client:
    """A request whose client disconnects when `gone` is set."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def run(client: Client, seconds: float, *, is_large: bool = False) -> str:
    async def work() -> str:
        await asyncio.sleep(seconds)
        return "done"

    return await unless_gone(client, work, is_large=is_large)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 2 * _PATIENCE_S])
def test_work_ends_with_its_result(seconds: float, is_large: bool) -> None:
    assert asyncio.run(run(Client(), seconds, is_large=is_large)) == "done"


@pytest.mark.parametrize("is_large", [False, True])
def test_work_ends_if_the_client_leaves(is_large: bool) -> None:
    async def leave() -> int:
        client = Client()
        asyncio.get_running_loop().call_later(2 * _PATIENCE_S, client.gone.set)
        with pytest.raises(ClientGone):
            await run(client, 60, is_large=is_large)
        await asyncio.sleep(0)  # the task itself goes on
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert asyncio.run(leave()) == 0


def test_large_work_does_not_start_if_the_client_has_left() -> None:
    async def start() -> None:
        client = Client()
        client.gone.set()
        with pytest.raises(ClientGone):
            await unless_gone(client, pytest.fail, is_large=True)  # type: ignore[arg-type]

    asyncio.run(start())


def test_a_cancelled_request_is_not_a_client_that_left() -> None:
    async def cancel() -> None:
        task = asyncio.create_task(run(Client(), 60))
        await asyncio.sleep(2 * _PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
