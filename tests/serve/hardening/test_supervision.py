"""The engine dies, hangs or is paused: who gets an answer, who gets an error, and what the probes say."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.running import Running, wait_for

HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG_TEXT: Any = {"stream": True, "ignore_eos": True, "max_tokens": 5000}
LONG: Any = {"messages": HELLO, "stream": True, "ignore_eos": True}
WATCHDOG_S, PAUSE_S = 4, 6  # An engine on a busy machine may be silent for seconds.


def events(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


def kill_engine(server: Running) -> None:
    """Kill the engine, and wait until the server has noticed."""
    before = server.stats()["engine_restarts"]
    os.kill(server.engine_id(), signal.SIGKILL)
    wait_for(lambda: server.stats()["engine_restarts"] == before + 1, what="the restart")


# Restarts that are a second old do not count, so the pauses before them stay short.
OFTEN = {"max_engine_restarts": 50, "engine_restart_window": 0.5}


@pytest.fixture(scope="module")
def narrow(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server with one slot, whose engine may be killed."""
    with scripted(step_s=0.05, config={"max_num_seqs": 1}, settings=OFTEN) as server:
        yield server


@pytest.fixture(scope="module")
def watched(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server whose engine may be killed or paused."""
    with scripted(step_s=0.05, settings={**OFTEN, "limits": f"step_s={WATCHDOG_S}"}) as server:
        yield server


def test_requests_without_a_token_wait_for_the_next_engine(narrow: Running) -> None:
    """One slot: a stream that has tokens gets an error it can read. All that wait are answered after the restart."""
    server = narrow
    with ThreadPoolExecutor(8) as pool:
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 5000}) as response:
            source = events(response)
            next(source)
            waiting = [pool.submit(server.chat, max_tokens=3, stream=number % 2 == 0) for number in range(6)]
            wait_for(lambda: server.stats()["requests"]["in_flight"] == 7, what="the requests")
            kill_engine(server)
            last = list(source)[-2:]
        assert "engine_unavailable" in last[0]
        assert "send the request again" in last[0]
        assert last[1] == "[DONE]"
        for number, answer in enumerate(waiting):
            done = answer.result(300)
            assert done.status_code == 200
            assert ("[DONE]" in done.text) == (number % 2 == 0)
            assert "error" not in done.text
        server.check_well()


CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        pytest.param("/v1/chat/completions", {**CHAT, "logprobs": True}, marks=pytest.mark.slow),
        ("/v1/completions", {"prompt": [[5, 6], [7]], "logprobs": 1}),
    ],
)
def test_an_answer_that_nobody_has_seen_starts_over(path: str, fields: dict[str, Any], watched: Running) -> None:
    """A request without streaming has drawn tokens, but the client has none of them. It gets a whole answer."""
    body = {**fields, "ignore_eos": True, "max_tokens": 60, "n": 2}
    server = watched
    with ThreadPoolExecutor(1) as pool:
        expected = server.http.post(path, json=body).json()
        wait_for(server.is_at_rest, what="rest")  # the engine reports twice a second; its count must have all tokens so far
        before = server.stats()["generated_tokens"]
        whole = pool.submit(server.http.post, path, json=body)
        wait_for(lambda: server.stats()["generated_tokens"] > before + 5, what="some tokens")
        kill_engine(server)
        answer = whole.result(300)
        assert answer.status_code == 200
        assert answer.json()["choices"] == expected["choices"]
        assert answer.json()["usage"] == expected["usage"]
        server.check_well()


def test_a_stream_without_text_starts_over(scripted: Callable[..., Running]) -> None:
    """The engine has drawn tokens, but they have no text, so the client has seen nothing. It gets the whole answer."""
    answer = "<bos>" * 60 + "Hello there<turn|>"
    with scripted(answer, step_s=0.05, settings=OFTEN) as server, ThreadPoolExecutor(1) as pool:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", {"input": "Hello"}),
            ("/api/chat", {**CHAT, "model": "gemma"}),
        ):
            server.wait_ready()
            wait_for(server.is_at_rest, what="rest")
            before = server.stats()["generated_tokens"]
            streamed = pool.submit(server.http.post, path, json={**body, "stream": True})
            wait_for(lambda before=before: server.stats()["generated_tokens"] > before + 5, what="some tokens")
            kill_engine(server)
            response = streamed.result(300)
            assert response.status_code == 200
            assert "".join(re.findall(r'"(?:content|delta)":\s?"([^"]*)"', response.text)) == "Hello there"
        server.check_well()


def test_a_stream_with_text_does_not_start_over(watched: Running) -> None:
    """Otherwise the client would see the beginning twice."""
    with watched.http.stream("POST", "/v1/completions", json={"prompt": [[5, 6], [7]], **LONG_TEXT}) as response:
        source = events(response)
        next(source)
        kill_engine(watched)
        assert "engine_unavailable" in list(source)[-2]
    watched.check_well()


def test_a_client_that_leaves_during_a_restart_is_forgotten(narrow: Running) -> None:
    server = narrow
    with ThreadPoolExecutor(1) as pool:
        with (
            server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 5000}) as first,
            httpx.Client(base_url=server.url, timeout=300, verify=False) as client,
        ):
            source = events(first)  # kept: httpx hangs up when an iterator is dropped
            next(source)  # it has the only slot
            sent = client.build_request("POST", "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 999})
            left = pool.submit(client.send, sent)
            wait_for(lambda: server.stats()["requests"]["in_flight"] == 2, what="the second")
            kill_engine(server)
            client.close()
            assert left.exception(60) is not None
        server.wait_ready()
        server.check_well(limit_s=20)


def test_restarts_have_a_limit(scripted: Callable[..., Running]) -> None:
    """The default is 3 in 10 minutes. After that the server exits with 2, and the last clients get an error."""
    with scripted(step_s=0.05) as server, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            server.wait_ready()
            kill_engine(server)
        server.wait_ready()
        assert server.chat(max_tokens=2).status_code == 200
        wait_for(server.is_at_rest, what="rest")
        last = pool.submit(server.chat, ignore_eos=True, max_tokens=5000)
        wait_for(lambda: server.stats()["requests"]["in_flight"] == 1, what="the request")
        os.kill(server.engine_id(), signal.SIGKILL)
        answer = last.result(300)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert server.wait() == 2
        log = server.log()
        assert [f"restarting the engine in {pause} s ({number} of 3" in log for number, pause in ((1, 1), (2, 2), (3, 4))] == [
            True
        ] * 3
        killed = (
            r"the engine died: the engine's process \d+ exited unexpectedly with exit code -9: it was killed, perhaps because"
        )
        assert len(re.findall(killed, log)) == 4


@pytest.mark.slow
def test_the_window_moves_on(scripted: Callable[..., Running]) -> None:
    """Restarts that are long ago do not count."""
    with scripted(settings={"max_engine_restarts": 1, "engine_restart_window": 0.5}) as server:
        for _ in range(2):
            server.wait_ready()
            time.sleep(1)
            kill_engine(server)
        server.wait_ready()
        server.check_well()


@pytest.mark.slow
def test_a_request_that_kills_every_engine_is_given_up(scripted: Callable[..., Running]) -> None:
    """Each engine hangs on it. After three it gets an error, and the server has not used up its restarts on it."""
    settings = {"limits": "step_s=1", "max_engine_restarts": 5}
    with scripted(step_s=3600, settings=settings) as server:
        answer = server.chat()
        assert answer.status_code == 503
        wait_for(lambda: server.stats()["engine_restarts"] == 3, what="the third restart")
        assert "the engine died: it was killed, because it had sent no message for" in server.log()
        server.wait_ready()


def test_the_engine_survives_a_pause_of_the_web_process(watched: Running) -> None:
    """SIGSTOP for longer than the watchdog's limit. The engine has worked on, and is not killed for its silence."""
    server, engine = watched, watched.engine_id()
    with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 200}) as response:
        source = events(response)
        next(source)
        for _ in range(2):
            server.signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            server.signal(signal.SIGCONT)
            assert httpx.get(f"{server.url}/health", timeout=60, verify=False).status_code == 200
        assert list(source)[-1] == "[DONE]"
    assert server.engine_id() == engine
    assert "killing" not in server.log()
    server.check_well()


@pytest.mark.slow
def test_the_engine_survives_a_pause_of_both(watched: Running) -> None:
    """A suspended VM stops all processes. The engine may need a moment longer to come back than the web process."""
    server, engine = watched, watched.engine_id()
    with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 100}) as response:
        source = events(response)
        next(source)
        os.kill(engine, signal.SIGSTOP)
        server.signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        server.signal(signal.SIGCONT)
        time.sleep(0.2)
        os.kill(engine, signal.SIGCONT)
        assert list(source)[-1] == "[DONE]"
    assert server.engine_id() == engine


def test_probes(scripted: Callable[..., Running], folder: Any) -> None:
    """While the model loads and while the engine is restarted, /health says so with a 503, and /live answers 200."""
    with scripted(step_s=0.01, settings={"api_key": "secret"}) as server:
        bare = httpx.Client(base_url=server.url, timeout=60, verify=False)  # probes have no key
        assert {bare.get(path).status_code for path in ("/health", "/ready", "/live")} == {200}
        assert bare.get("/samples").status_code == 401
        assert server.http.get("/samples").json().keys() == {"uptime_s", "has_plan", "totals", "samples"}
        os.kill(server.engine_id(), signal.SIGKILL)
        health = wait_for(lambda: (answer := bare.get("/health")).status_code == 503 and answer, what="the death")
        assert "restarting" in health.text
        assert "retry-after" in health.headers
        assert "vllm:num_requests_running" not in server.http.get("/metrics").text, "nothing runs in a dead engine"
        assert bare.get("/ready").status_code == 503
        assert bare.get("/live").json() == {"status": "live"}
        wait_for(lambda: bare.get("/health").status_code == 200, 40, "the restart")
        assert bare.get("/ready").status_code == 200


def test_health_while_loading(folder: Any) -> None:
    with Running(folder, config={"device": "cpu"}, wait=False) as server:

        def engine_id() -> int | None:
            try:
                return server.engine_id()
            except AssertionError:
                return None

        def first_answer() -> httpx.Response | None:
            try:
                return server.http.get("/live")
            except httpx.TransportError:
                return None

        engine = wait_for(engine_id, 40, "the engine process")
        os.kill(engine, signal.SIGSTOP)  # so that it cannot be ready before we look
        live = wait_for(first_answer, 40, "the port")
        health = server.http.get("/health")
        os.kill(engine, signal.SIGCONT)
        assert live.status_code == 200
        assert health.status_code == 503
        assert "loading" in health.text
        server.wait_ready()
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/live?since=0"])
def test_the_old_path_of_the_samples_is_a_probe_now(fake: Running, path: str) -> None:
    assert fake.http.get(path).json() == {"status": "live"}
