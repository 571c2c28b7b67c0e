"""A server whose ranks die or hang under load: every client gets an answer, the group comes back as one, and no page leaks.

`test_rank_processes.py` tests the processes alone, in seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.forking import children
from tests.parallel.test_rank_processes import is_gone
from tests.serve.running import Running, wait_for

STEP_S = 8  # the watchdog's limit
NUM_CLIENTS = 4
PATIENCE_S = 60  # for what takes a second on an idle machine


@pytest.fixture(scope="module")
def server(model_of: Callable[[str], str]) -> Iterator[Running]:
    config = {"device": "cpu", "tensor_parallel_size": 2, "max_model_len": 512, "max_num_seqs": 4}
    settings = {"limits": f"step_s={STEP_S}", "max_engine_restarts": 2, "engine_restart_window": 1.0}
    with Running(Path(model_of("12B")), config=config, settings=settings) as server:
        yield server


def ranks_of_server(server: Running) -> list[int]:
    """Return the process ids of the ranks, in their order."""
    return sorted(children(server.engine_id(), "culet.runner.worker_process"))


def new_ranks(server: Running, old: list[int]) -> list[int]:
    """Return the process ids of the ranks that replace `old` ones, or [] if not all of them have been started."""
    with suppress(AssertionError, OSError):  # there is no engine yet, or one of its threads has just ended
        found = ranks_of_server(server)
        return found if len(found) == len(old) and not {*found} & {*old} else []
    return []


def stream(server: Running, seed: int) -> tuple[int, str]:
    """Return the number of chunks of a long answer, and its last event before [DONE]."""
    body = {"messages": [{"role": "user", "content": f"Hello {seed}"}], "stream": True, "ignore_eos": True, "max_tokens": 400}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=300) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return len(events), events[-2]


def hurt(server: Running, number: signal.Signals, index: int, want: str) -> None:
    """Send a signal to a rank while clients read. Check that they are answered and that the group comes back."""
    ranks = ranks_of_server(server)
    assert len(ranks) == 2
    restarts = server.stats()["engine_restarts"]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = [pool.submit(stream, server, seed) for seed in range(NUM_CLIENTS)]
        wait_for(lambda: server.stats()["scheduler"]["num_running"] == NUM_CLIENTS, PATIENCE_S, "the load")
        os.kill(ranks[index], number)
        ends = [answer.result(300) for answer in answers]
    # A client that had read nothing yet is served by the new group. The others get an error.
    assert any("engine_unavailable" in last for _, last in ends)
    assert all("engine_unavailable" in last or num_events > 390 for num_events, last in ends)
    server.wait_ready()
    wait_for(lambda: all(map(is_gone, ranks)), PATIENCE_S, "the old ranks to end")
    assert server.stats()["engine_restarts"] == restarts + 1
    server.check_well()
    assert server.chat(max_tokens=8, temperature=0).json()["choices"][0]["message"]["content"] == want


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_any_rank_twenty_times(server: Running, number: signal.Signals) -> None:
    want, random = server.chat(max_tokens=8, temperature=0).json()["choices"][0]["message"]["content"], Random(0)
    for _ in range(20):
        hurt(server, number, random.randrange(2), want)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_dies_while_idle(server: Running, index: int) -> None:
    """The group comes back without a request."""
    ranks, restarts = ranks_of_server(server), server.stats()["engine_restarts"]
    os.kill(ranks[index], signal.SIGKILL)
    wait_for(lambda: server.stats()["engine_restarts"] == restarts + 1, PATIENCE_S, "the restart")
    server.wait_ready()
    assert all(map(is_gone, ranks))
    server.check_well()
    assert server.chat(max_tokens=8, temperature=0).status_code == 200


@pytest.mark.slow
def test_a_rank_that_hangs_while_the_group_restarts(server: Running) -> None:
    """It is noticed without a request, and the group starts once more."""
    old, restarts = ranks_of_server(server), server.stats()["engine_restarts"]
    os.kill(old[0], signal.SIGKILL)
    wait_for(lambda: server.stats()["engine_restarts"] == restarts + 1, PATIENCE_S, "the restart")
    new = wait_for(lambda: new_ranks(server, old), PATIENCE_S, "the new ranks")
    os.kill(new[1], signal.SIGSTOP)
    wait_for(lambda: server.stats()["engine_restarts"] == restarts + 2, 60 + PATIENCE_S, "the second restart")
    server.wait_ready()
    assert all(map(is_gone, new))
    assert server.chat(max_tokens=8, temperature=0).status_code == 200
