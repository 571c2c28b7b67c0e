"""Production faults with real processes: every client gets a reply, no page leaks, and the server stays healthy."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest

from tests.serve.conftest import TINY
from tests.serve.running import Running, wait_for

HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG: Any = {"messages": HELLO, "stream": True, "ignore_eos": True}
MEGABYTE = 1 << 20
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
POST = _HEAD + b"\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Running]:
    """A server of its own, because the memory of a fork says little."""
    with Running(folder, config=TINY, is_fresh=True) as server:
        yield server


def events(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


def test_engine_killed_mid_stream(scripted: Callable[..., Running]) -> None:
    """Without restarts, streams end with an error event, other requests with a 503, and the server exits with 3."""
    with scripted(step_s=0.02, settings={"max_engine_restarts": 0}) as server, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.chat, ignore_eos=True, max_tokens=5000)
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 5000}) as response:
            source = events(response)
            next(source)
            os.kill(server.engine_id(), signal.SIGKILL)
            last = list(source)[-2:]
        assert "engine_unavailable" in last[0]
        assert last[1] == "[DONE]"
        answer = whole.result(120)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        with pytest.raises((httpx.TransportError, AssertionError)):
            assert server.http.get("/health").status_code == 200, "red"
        assert server.wait() == 2
        assert "the engine died" in server.log()


def test_the_client_raises_its_own_exception(scripted: Callable[..., Running]) -> None:
    with scripted(step_s=0.02) as server:
        stream = server.openai().chat.completions.create(
            model="gemma", messages=HELLO, stream=True, max_tokens=5000, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        os.kill(server.engine_id(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)


def test_engine_is_restarted(scripted: Callable[..., Running]) -> None:
    with scripted(step_s=0.02, settings={"max_engine_restarts": 1}) as server:
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 5000}) as response:
            source = events(response)
            next(source)
            os.kill(server.engine_id(), signal.SIGKILL)
            assert "engine_unavailable" in list(source)[-2]
        assert server.http.get("/ready").status_code == 503
        server.wait_ready()
        server.check_well()
        assert server.stats()["engine_restarts"] == 1
        os.kill(server.engine_id(), signal.SIGKILL)
        assert server.wait() == 2


def test_web_process_killed(scripted: Callable[..., Running]) -> None:
    """The engine does not outlive a server that was killed."""
    with scripted() as server:
        kill_server(server)


def kill_server(server: Running) -> None:
    engine = Path(f"/proc/{server.engine_id()}")
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not engine.exists() or "zombie" in (engine / "status").read_text(), 5, "the engine to end")


# A process that gets this signal waits for an hour and holds Python's lock.
HANG_AT_SIGNAL = """
import ctypes, signal
signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep(3600))
"""


def test_web_process_killed_while_the_engine_hangs(folder: Path, tmp_path: Path) -> None:
    """No thread of the engine can notice it, so the kernel ends it. Otherwise it would keep the GPU's memory."""
    (tmp_path / "sitecustomize.py").write_text(HANG_AT_SIGNAL)
    with Running(folder, script={"answers": [[5]]}, environment={"PYTHONPATH": str(tmp_path)}) as server:
        os.kill(server.engine_id(), signal.SIGUSR1)
        time.sleep(0.2)  # nothing tells when it hangs; a late signal makes the test pass, never fail
        kill_server(server)


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnects(tiny: Running, stream: bool) -> None:
    """The request of a client that disconnects is cancelled, and its pages are free within a second."""
    before = tiny.stats()["scheduler"]["counters"]["cancelled"]
    body = {"messages": HELLO, "stream": stream, "ignore_eos": True, "max_tokens": 1900}
    with httpx.Client(base_url=tiny.url, timeout=60) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                source = events(response)
                for _ in range(3):
                    next(source)
        else:
            content = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", tiny.port)) as sock:
                sock.sendall(POST % len(content) + content)
                wait_for(lambda: tiny.stats()["requests"]["in_flight"], what="the request")

    def is_cancelled() -> bool:  # figures come twice a second; those from before the request also show rest
        return bool(tiny.stats()["scheduler"]["counters"]["cancelled"] == before + 1) and tiny.is_at_rest()

    wait_for(is_cancelled, 1.0, "the work to be cancelled and pages to come back")
    tiny.check_well()


def test_sigterm_lets_requests_finish(scripted: Callable[..., Running], encode: Callable[[str], list[int]]) -> None:
    """Running requests are completed, new ones get a 503, and the exit code is 0."""
    with scripted(step_s=0.05) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.chat, ignore_eos=True, max_tokens=100)  # 5 s, in which the drain is looked at
        wait_for(lambda: server.stats()["requests"]["in_flight"], 5, "the request")
        server.signal(signal.SIGTERM)
        wait_for(lambda: server.http.get("/ready").status_code == 503, 5, "the drain")
        late = server.chat()
        assert late.status_code == 503
        assert "retry-after" in late.headers
        assert "shutting down" in late.text
        assert 'culet:engine_up{model_name="gemma"} 0.0' in server.http.get("/metrics").text
        answer = running.result(240)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 100
        assert server.wait() == 0


def test_sigterm_does_not_wait_forever(scripted: Callable[..., Running]) -> None:
    with scripted(step_s=0.05, settings={"drain_timeout": 0.3}) as server:
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 5000}) as response:
            source = events(response)
            next(source)
            server.signal(signal.SIGTERM)
            assert "shutting down" in list(source)[-2]
        assert server.wait() == 0


def test_sigterm_while_the_engine_is_restarted(scripted: Callable[..., Running]) -> None:
    """Requests that wait for the next engine are answered before the server ends."""
    with scripted(step_s=0.05) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat, ignore_eos=True, max_tokens=30)
        wait_for(lambda: server.stats()["requests"]["in_flight"], 5, "the request")
        os.kill(server.engine_id(), signal.SIGKILL)
        wait_for(lambda: server.stats()["engine_restarts"], 5, "the death")
        server.signal(signal.SIGTERM)
        answer = waiting.result(300)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 30
        assert server.wait() == 0


def test_a_second_signal_stops_immediately(scripted: Callable[..., Running]) -> None:
    with scripted(step_s=0.05) as server:
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 5000}) as response:
            source = events(response)
            next(source)
            server.signal(signal.SIGINT)
            wait_for(lambda: httpx.get(f"{server.url}/ready", verify=False).status_code == 503, 5, "the drain")
            server.signal(signal.SIGINT)
            assert "shutting down" in list(source)[-2]
        assert server.wait(5) == 0


@pytest.mark.slow
def test_five_hundred_clients(tiny: Running) -> None:
    """With 16 slots and a queue of 64, each request is answered, or refused with a 429 and a Retry-After."""

    path = "/v1/chat/completions"

    async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
        body = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True, "seed": number, "stream": number % 2 == 0}
        return await client.post(path, json=body)

    async def all_at_once() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with AsyncExitStack() as held, httpx.AsyncClient(base_url=tiny.url, timeout=60, limits=limits) as client:
            sources = []  # a source that nobody refers to is closed
            for _ in range(16):  # hold all slots, however slow the clients are
                body = {"messages": HELLO, "max_tokens": 1900, "ignore_eos": True, "stream": True}
                sources.append((await held.enter_async_context(client.stream("POST", path, json=body))).aiter_lines())
                await anext(sources[-1])
            asked = [asyncio.create_task(ask(client, number)) for number in range(500)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            await held.aclose()
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_at_once())
    by_status = {status: [answer for answer in answers if answer.status_code == status] for status in (200, 429)}
    assert len(by_status[200]) + len(by_status[429]) == 500
    assert len(by_status[200]) >= 64
    assert by_status[429]
    for refused in by_status[429]:
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
    for answer in by_status[200]:
        assert "[DONE]" in answer.text or answer.json()["usage"]["completion_tokens"] == 4
    tiny.check_well()


def grow(server: Running, num_turns: int, num_tokens: int, question: str = "") -> list[int]:
    """Grow a conversation turn by turn and return the cached tokens of each turn."""
    client, messages, cached = server.openai(), list(HELLO), []
    for turn in range(num_turns):
        answer = client.chat.completions.create(
            model="gemma", messages=messages, max_tokens=num_tokens, seed=turn, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        said = answer.choices[0].message.content or "-"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And turn {turn}? {question}"}]
    return cached


def test_growing_conversation(tiny: Running) -> None:
    cached = grow(tiny, 12, 8, question="the stone is held to the wheel " * 12)
    later_turns = [0, *cached[1:]]  # the first turn may hit what other tests left in the cache
    assert all(earlier < later for earlier, later in itertools.pairwise(later_turns)), (
        f"each turn reuses everything before the previous answer: {cached}"
    )
    tiny.check_well()


@pytest.mark.slow
def test_two_hundred_turns(folder: Path) -> None:
    with Running(folder, config={"device": "cpu", "max_model_len": 32768, "max_num_seqs": 2}, is_fresh=True) as server:
        grow(server, 20, 40)
        before = server.memory_bytes()
        cached = grow(server, 200, 40)
        assert cached[-1] > 2000
        server.check_well()
        assert server.memory_bytes() - before < 300 * MEGABYTE


def test_a_prompt_that_never_fits(tiny: Running) -> None:
    texts = [[{"role": "user", "content": "facet " * count}] for count in (3000, 500_000)]
    for fields in ({"messages": texts[0]}, {"messages": texts[1]}, {"max_tokens": 5000}):
        answer = tiny.chat(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "2048" in answer.json()["error"]["message"]
    tiny.check_well()


@pytest.fixture(scope="module")
def strict(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server with short timeouts."""
    limits = "header_s=1,body_s=1,body_mb=4,write_s=1"
    with scripted(settings={"limits": limits}, is_fresh=True) as server:
        yield server


def read_all(sock: socket.socket) -> bytes:
    sock.settimeout(120)
    pieces = []
    while piece := sock.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_slow_loris(strict: Running) -> None:
    """Endless heads and bodies time out, and other clients are served meanwhile."""
    post = POST % 99 + b"{"
    beginnings = [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nx-slow: ", post]
    sockets = [socket.create_connection(("127.0.0.1", strict.port)) for _ in range(40) for _ in beginnings]
    for index, sock in enumerate(sockets):
        sock.sendall(beginnings[index % len(beginnings)])
    assert strict.chat().status_code == 200
    began = time.monotonic()
    for index, sock in enumerate(sockets):
        answer = read_all(sock)
        assert b" 408 " in answer.splitlines()[0], beginnings[index % len(beginnings)]
        sock.close()
    assert time.monotonic() - began < 80
    strict.check_well()


def test_an_endless_head(strict: Running) -> None:
    with socket.create_connection(("127.0.0.1", strict.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        for number in range(4000):
            sock.sendall(b"x-%d: %s\r\n" % (number, b"y" * 100))
        assert b" 431 " in read_all(sock).splitlines()[0]
    strict.check_well()


def test_too_many_connections(scripted: Callable[..., Running]) -> None:
    with scripted(settings={"limits": "connections=300,header_s=60"}) as server:  # none is given up before the last one comes
        sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(320)]
        assert b" 503 " in read_all(sockets[-1]).splitlines()[0]
        for sock in sockets:
            sock.close()
        wait_for(lambda: server.http.get("/health").status_code == 200, 5, "room")
        server.check_well()


def test_large_bodies(strict: Running) -> None:
    """50 MB are refused with a 413, with or without a Content-Length, and leak no memory."""
    strict.check_well()
    before = strict.memory_bytes()
    large = b'{"messages":[{"role":"user","content":"' + b"x" * (50 * MEGABYTE)
    headers = {"content-type": "application/json"}
    for _ in range(3):
        answer = strict.http.post("/v1/chat/completions", content=large, headers=headers)
        assert answer.status_code == 413
    with pytest.raises(openai.APIStatusError) as error:
        strict.openai().chat.completions.create(model="gemma", messages=[{"role": "user", "content": "x" * (50 * MEGABYTE)}])
    assert error.value.status_code == 413

    def pieces() -> Iterator[bytes]:
        for begin in range(0, len(large), 65536):
            yield large[begin : begin + 65536]

    answer = strict.http.post("/v1/chat/completions", content=pieces(), headers=headers)
    assert answer.status_code == 413
    strict.check_well()
    assert strict.memory_bytes() - before < 40 * MEGABYTE


def test_a_client_that_reads_nothing(strict: Running) -> None:
    """The stream of such a client is dropped after the write timeout and never holds up the engine."""
    body = b'{"messages":[{"role":"user","content":"x"}],"stream":true,"ignore_eos":true,"max_tokens":30000,"n":4}'
    with socket.create_connection(("127.0.0.1", strict.port)) as sock:
        sock.sendall(POST % len(body) + body)
        wait_for(lambda: "has read nothing" in strict.log(), 30, "the stream to be dropped")
        wait_for(strict.is_at_rest, 5, "rest")
        assert b"[DONE]" not in read_all(sock), "it was broken off"
    strict.check_well()


def test_requests_time_out(scripted: Callable[..., Running]) -> None:
    with scripted(step_s=0.05, settings={"request_timeout": 1.5}) as server:  # the stream begins in this time
        answer = server.chat(ignore_eos=True, max_tokens=1000)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timed_out"
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 1000}) as response:
            assert "timed_out" in list(events(response))[-2]
        server.check_well()


def test_a_stuck_queue(scripted: Callable[..., Running]) -> None:
    with scripted(step_s=0.05, settings={"queue_timeout": 0.5}, config={"max_num_seqs": 1}) as server:
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 5000}) as first:
            source = events(first)  # kept: httpx hangs up when an iterator is dropped
            next(source)
            answer = server.chat()
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        server.check_well()


def test_an_engine_that_hangs(scripted: Callable[..., Running]) -> None:
    """If a step never ends, the engine is killed and its requests fail."""
    with scripted(step_s=60, settings={"limits": "step_s=1", "max_engine_restarts": 0}) as server:
        answer = server.chat()
        assert answer.status_code == 503
        assert server.wait() == 2
        assert "killing the engine" in server.log()


@pytest.mark.slow
def test_a_long_idle_time_is_not_a_hang(scripted: Callable[..., Running]) -> None:
    with scripted("Hi.<turn|>", step_s=0.4, settings={"limits": "step_s=4"}) as server:
        time.sleep(4.5)
        assert server.chat().status_code == 200
        server.check_well()


def test_memory_is_flat(tiny: Running) -> None:
    """Hundreds of requests of all kinds leak nothing."""

    def round_of_requests() -> None:
        with ThreadPoolExecutor(8) as pool:
            bodies = [{"max_tokens": 4, "stream": number % 2 == 0, "n": 1 + number % 3} for number in range(60)]
            assert {answer.status_code for answer in pool.map(lambda body: tiny.chat(**body), bodies)} == {200}

    round_of_requests()
    wait_for(tiny.is_at_rest, 5, "rest")
    before = tiny.memory_bytes()
    for _ in range(3):
        round_of_requests()
    wait_for(tiny.is_at_rest, 5, "rest")
    assert tiny.memory_bytes() - before < 20 * MEGABYTE


async def soak(server: Running, num_requests: int, seed: int) -> dict[str, int]:
    """Run requests of all kinds at once, many of them abandoned at a random moment. Return how they ended."""
    random, ends = Random(seed), Counter[str]()
    places = asyncio.Semaphore(24)

    async def send(client: httpx.AsyncClient, number: int) -> None:
        prompt = "the stone is held to the wheel " * random.randint(1, 12)
        body: dict[str, Any] = {"max_tokens": random.randint(1, 24), "stream": random.random() < 0.6, "ignore_eos": True}
        body |= {"n": random.choice([1, 1, 1, 3]), "seed": number, "priority": random.randint(-1, 1)}
        path = random.choice(["/v1/chat/completions", "/v1/completions"])
        if path == "/v1/completions":
            body |= {
                "prompt": [prompt, f"{number} {prompt}"],
                "logprobs": random.choice([None, 2]),
                "echo": random.random() < 0.3,
            }
        else:
            body |= {"messages": [{"role": "user", "content": f"{random.randint(0, 3)} {prompt}"}]}
        if random.random() < 0.1:
            body["temperature"] = -1
        limit_s = random.choice([60, 60, random.random()])
        async with places:
            try:
                async with asyncio.timeout(limit_s):
                    answer = await client.post(path, json=body)
                    ends[str(answer.status_code)] += 1
            except TimeoutError:
                ends["left"] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(send(client, number) for number in range(num_requests)))
    return dict(ends)


def test_soak(tiny: Running) -> None:
    ends = asyncio.run(soak(tiny, 60, seed=0))
    assert set(ends) <= {"200", "400", "429", "left"}
    assert ends["200"] > 12
    assert ends["400"] > 2
    tiny.check_well()


@pytest.mark.slow
def test_long_soak(tiny: Running) -> None:
    asyncio.run(soak(tiny, 300, seed=1))
    before = tiny.memory_bytes()
    ends = asyncio.run(soak(tiny, 3000, seed=2))
    assert set(ends) <= {"200", "400", "429", "left"}
    tiny.check_well()
    assert tiny.memory_bytes() - before < 60 * MEGABYTE
