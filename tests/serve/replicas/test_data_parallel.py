"""`culet serve --data-parallel-size 2` with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.serve.replicas.conversations import hit_share, talk
from tests.serve.running import Running, wait_for

CONFIG = {"device": "cpu", "max_model_len": 2048, "max_num_seqs": 64, "max_queue_len": 64}


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Running]:
    """A server with two engines and a tiny random model."""
    with Running(folder, config=CONFIG, settings={"data_parallel_size": 2}) as server:
        yield server


def generated(server: Running) -> list[int]:
    return [engine.get("generated_tokens", 0) for engine in server.stats()["engines"]]


def ask_all(server: Running) -> list[str]:
    """Return the answers to some prompts, sent a few at a time."""

    def ask(word: str) -> str:
        prompt = f"{word} and {word}"
        answer = server.chat(messages=[{"role": "user", "content": prompt}], max_tokens=12, temperature=0)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"])

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, ("red", "green", "blue", "cyan", "pink", "grey", "teal", "gold")))


def test_both_engines_work_and_answer_as_one_does(pair: Running, tiny: Running) -> None:
    before = generated(pair)
    assert ask_all(pair) == ask_all(tiny)
    wait_for(lambda: all(now > then for now, then in zip(generated(pair), before, strict=True)), what="both reports")
    pair.check_well()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_engine_can_have_several_ranks(folder: Path) -> None:
    """Two engines of two ranks each answer as one process does."""
    config = {**CONFIG, "dtype": "float32"}
    with Running(folder, config=config) as server:
        expected = ask_all(server)
    with Running(folder, config={**config, "tensor_parallel_size": 2}, settings={"data_parallel_size": 2}) as server:
        assert ask_all(server) == expected
        wait_for(lambda: min(generated(server)) > 0, what="both reports")
        server.check_well()


@pytest.mark.parametrize("num_conversations", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_later_turns_find_their_prefix(pair: Running, num_conversations: int) -> None:
    before = queries(pair)
    turns = talk(lambda body: pair.http.post("/v1/chat/completions", json=body), num_conversations)
    assert len(turns) == 5 * num_conversations
    assert [turn.error for turn in turns if turn.error] == []
    assert hit_share(turns) >= 0.95
    counts = [now - then for now, then in zip(queries(pair), before, strict=True)]
    assert min(counts) >= num_conversations, counts  # a fifth of the turns


def queries(server: Running) -> list[int]:
    """Return how many prompts each engine has looked up."""
    return [engine["scheduler"]["counters"]["prefix_queries"] for engine in server.stats()["engines"]]


def test_metrics_have_an_engine_label(pair: Running, tiny: Running) -> None:
    text = pair.http.get("/metrics").text
    for engine in "01":
        for name in ("vllm:num_requests_running", "vllm:generation_tokens_total", "culet:engine_up", "culet:kv_free_pages"):
            assert f'{name}{{engine="{engine}",model_name="gemma"}}' in text or (
                f'{name}{{model_name="gemma",engine="{engine}"}}' in text
            ), name
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'engine="' not in tiny.http.get("/metrics").text


def test_a_dead_engine_costs_only_its_own_requests(scripted: Callable[..., Running]) -> None:
    """Kill one of two engines while both answer. The other's streams go on, and the dead one comes back."""
    with scripted(step_s=0.02, settings={"data_parallel_size": 2}, config={"max_num_seqs": 4}) as server:
        ids = server.engine_ids()
        assert len(ids) == 2

        begun: list[int] = []

        def ask(index: int) -> int:
            body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
            lines: list[str] = []
            with server.http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if not lines:
                        begun.append(index)
                    lines += [line] if line else []
            return int(lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines))

        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, index) for index in range(4)]
            wait_for(lambda: len(begun) == 4, what="four streams")
            assert [engine["in_flight"] for engine in server.stats()["engines"]] == [2, 2]
            os.kill(ids[0], signal.SIGKILL)
            assert server.http.get("/health").status_code == 200
            assert ask(9) == 1
            assert sum(answer.result() for answer in answers) == 2
        wait_for(lambda: all(engine["state"] == "ready" for engine in server.stats()["engines"]), what="the restart")
        assert sorted(engine["restarts"] for engine in server.stats()["engines"]) == [0, 1]
        server.check_well()


def test_other_engines_answer_what_a_given_up_engine_leaves(scripted: Callable[..., Running]) -> None:
    """One engine dies and is not restarted. Its stream with text gets an error, and the other engine answers what waits."""
    settings = {"data_parallel_size": 2, "max_engine_restarts": 0}
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    with scripted(step_s=0.02, settings=settings, config={"max_num_seqs": 2}) as server, ThreadPoolExecutor(4) as pool:
        expected = server.http.post("/v1/completions", json=body).json()["choices"]
        with server.http.stream("POST", "/v1/completions", json={**body, "max_tokens": 5000, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            rank = [engine["in_flight"] for engine in server.stats()["engines"]].index(1)
            answers = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in range(4)]
            wait_for(lambda: [engine["in_flight"] for engine in server.stats()["engines"]] in ([2, 3], [3, 2]), what="all")
            os.kill(server.engine_ids()[rank], signal.SIGKILL)
            assert [answer.result(300).json()["choices"] for answer in answers] == [expected] * 4
            assert '"error"' in [line for line in lines if line][-2]
        health = [engine["health"] for engine in server.stats()["engines"]]
        assert (health[rank], health[1 - rank]) == ("given up", "ok")
        assert "continues with 1 of 2 engines" in server.log()
        assert server.http.post("/v1/completions", json=body).json()["choices"] == expected
        wait_for(server.is_at_rest, what="totals without the engine that is gone")


def test_an_engine_that_hangs_gets_no_new_requests(scripted: Callable[..., Running]) -> None:
    """The watchdog waits for minutes. Until then, another engine answers, even if it has more to do."""
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True}
    with scripted(step_s=0.02, settings={"data_parallel_size": 2}) as server, ThreadPoolExecutor(3) as pool:
        long = [pool.submit(server.http.post, "/v1/completions", json={**body, "max_tokens": 800}) for _ in range(3)]
        wait_for(lambda: server.stats()["requests"]["in_flight"] == 3, what="the requests")
        loads = [engine["in_flight"] for engine in server.stats()["engines"]]
        rank = loads.index(1)
        process_id = server.engine_ids()[rank]
        os.kill(process_id, signal.SIGSTOP)
        try:
            time.sleep(10)  # it counts as silent after 5 s, and a busy server notices it late
            assert server.http.post("/v1/completions", json=body, timeout=60).status_code == 200
            assert server.stats()["engines"][rank]["in_flight"] == 1
        finally:
            os.kill(process_id, signal.SIGCONT)
        assert [answer.result(120).status_code for answer in long] == [200] * 3
        server.check_well()


def test_routers_learn_about_the_server(pair: Running, tiny: Running, folder: Path) -> None:
    for server, size in ((pair, 2), (tiny, 1)):
        info = server.http.get("/server_info").json()
        assert (info["dp_size"], info["served_model_name"], info["context_length"]) == (size, "gemma", 2048)
        assert info["page_size"] > 0
        # All groups share the pages, so fewer tokens fit than if global layers had all of them.
        num_pages = server.stats()["engine"]["num_pages"]
        assert 2048 <= info["max_total_num_tokens"] < num_pages * info["page_size"]
        model = server.http.get("/model_info").json()
        assert model["is_generation"] is True
        assert (model["model_path"], model["served_model_name"]) == (folder.name, "gemma")  # without the rest of its path
        loads = server.http.get("/get_load").json()
        assert [load["dp_rank"] for load in loads] == list(range(size))
        assert all(load["num_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        assert all(load["load"] == load["num_reqs"] for load in loads)
        num_blocks = info["max_total_num_tokens"] // info["page_size"]
        line = next(line for line in server.http.get("/metrics").text.splitlines() if line.startswith("vllm:cache_config_info"))
        assert f'block_size="{info["page_size"]}"' in line
        assert f'num_gpu_blocks="{num_blocks}"' in line


def test_routers_learn_about_the_load(scripted: Callable[..., Running]) -> None:
    """`num_tokens` counts running and waiting requests, and is 0 when they have ended."""
    with scripted(step_s=0.05, config={"max_num_seqs": 1}) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": [5] * 300, "max_tokens": 40, "ignore_eos": True}
        answers = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in range(2)]

        def load() -> dict[str, Any]:
            [only] = server.http.get("/get_load").json()
            return dict(only)

        wait_for(lambda: (load()["num_running_reqs"], load()["num_waiting_reqs"]) == (1, 1), what="a request that waits")
        now = load()
        assert now["load"] == now["num_reqs"] == 2
        assert 600 <= now["num_tokens"] <= 680
        assert [answer.result().status_code for answer in answers] == [200, 200]
        wait_for(lambda: (load()["num_tokens"], load()["load"]) == (0, 0), what="the last report")


def test_the_load_of_an_engine_that_is_restarted(scripted: Callable[..., Running]) -> None:
    """Its requests wait for it, so its server does not seem to have less to do. One that is given up has none."""
    settings = {"data_parallel_size": 2, "max_engine_restarts": 1}
    with scripted(step_s=0.05, settings=settings) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": [5] * 300, "max_tokens": 100, "ignore_eos": True, "n": 2}
        answers = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in range(2)]

        def loads(*names: str) -> list[tuple[int, ...]]:
            return sorted(tuple(load[name] for name in names) for load in server.http.get("/get_load").json())

        counts = ("num_running_reqs", "num_waiting_reqs", "num_reqs", "load")
        wait_for(lambda: loads(*counts) == [(2, 0, 2, 2)] * 2, what="both requests")
        first, second = server.engine_ids()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: loads(*counts, "num_tokens")[0] == (0, 2, 2, 2, 600), what="the request that waits")
        assert loads("dp_rank") == [(0,), (1,)]
        assert [answer.result().status_code for answer in answers] == [200, 200]
        [restarted] = set(server.engine_ids()) - {second}
        os.kill(restarted, signal.SIGKILL)
        wait_for(lambda: len(loads()) == 1, what="the engine to be given up")


def test_subscribers_learn_that_an_engine_died(folder: Path, port: int) -> None:
    """Kill an engine that has published blocks. A subscriber that stays hears that they are gone, with higher numbers."""
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(f"tcp://127.0.0.1:{port}")

    def receive() -> tuple[int, list[str]]:
        assert subscriber.poll(60_000)
        _, number, payload = subscriber.recv_multipart()
        return int.from_bytes(number, "big"), [event["type"] for event in msgspec.msgpack.decode(payload)[1]]

    try:
        with Running(folder, config=CONFIG, settings={"kv_events_config": json.dumps(events)}) as server:
            first, types = receive()
            assert types == ["AllBlocksCleared"]
            answer = server.chat(messages=[{"role": "user", "content": "red and green " * 200}], max_tokens=4)
            assert answer.json()["usage"]["prompt_tokens"] > server.http.get("/server_info").json()["page_size"]
            last, types = receive()
            assert (last, types[0]) == (first + 1, "AllBlocksCleared")
            assert "BlockStored" in types
            while subscriber.poll(500):
                last, _ = receive()
            os.kill(server.engine_ids()[0], signal.SIGKILL)
            number, types = receive()
            assert number > last + 1
            assert types == ["AllBlocksCleared"]
            wait_for(lambda: server.http.get("/health").status_code == 200, what="the restart")
            server.check_well()
    finally:
        context.destroy(linger=0)
