"""Several keys on one server: what a key may see, set and use, and how keys are changed while the server runs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import Running, wait_for

KEYS = """
[[key]]
name = "alice"
sha256 = "{alice}"
priority = true

[[key]]
name = "bob"
key = "bob-secret"

[[key]]
name = "slow"
key = "slow-secret"
requests_per_minute = 3

[[key]]
name = "brief"
key = "brief-secret"
tokens_per_minute = 4

[[key]]
name = "single"
key = "single-secret"
concurrency = 2
""".format(alice=hashlib.sha256(b"alice-secret").hexdigest())
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def write_keys(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def post(server: Running, key: str, path: str = PATHS[0], **fields: Any) -> httpx.Response:
    text = "The quick brown fox jumps over the lazy dog. " * 6
    bodies: dict[str, dict[str, Any]] = {
        PATHS[0]: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
        PATHS[1]: {"prompt": text, "max_tokens": 4},
        PATHS[2]: {"input": text, "max_output_tokens": 4},
        PATHS[3]: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    }
    return server.http.post(path, json={**bodies[path], **fields}, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(path, KEYS)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path, key_file: Path) -> Iterator[Running]:
    """A server with a real engine and several keys."""
    config = {"device": "cpu", "max_model_len": 2048, "max_num_seqs": 16, "max_queue_len": 64}
    settings = {"api_key_file": str(key_file), "log_format": "json"}
    with Running(folder, config=config, settings=settings) as server:
        server.http.headers["authorization"] = "Bearer alice-secret"
        yield server


def cached(answer: httpx.Response, path: str) -> int:
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    name = "input_tokens_details" if path == "/v1/responses" else "prompt_tokens_details"
    return int((usage[name] or {}).get("cached_tokens", 0))


@pytest.mark.parametrize("path", PATHS)
def test_a_key_cannot_see_what_another_key_sent(shared: Running, path: str) -> None:
    fields = {"cache_salt": f"test of {path}"}
    assert cached(post(shared, "alice-secret", path, **fields), path) == 0
    assert cached(post(shared, "alice-secret", path, **fields), path) > 0
    assert cached(post(shared, "bob-secret", path, **fields), path) == 0
    assert cached(post(shared, "bob-secret", path, **fields), path) > 0


@pytest.mark.parametrize("path", PATHS)
def test_requests_share_cached_prefixes_only_with_the_same_salt(tiny: Running, path: str) -> None:
    post(tiny, "none", path, cache_salt=f"one {path}")
    assert cached(post(tiny, "none", path, cache_salt=f"two {path}"), path) == 0
    assert cached(post(tiny, "none", path, cache_salt=f"one {path}"), path) > 0
    assert post(tiny, "none", path, cache_salt="").status_code == 400
    assert post(tiny, "none", path, cache_salt="x" * 257).status_code == 400


@pytest.mark.parametrize("path", PATHS[:2])
def test_only_a_key_with_permission_sets_priority(shared: Running, path: str) -> None:
    assert post(shared, "alice-secret", path, priority=-5).status_code == 200
    assert post(shared, "bob-secret", path, priority=0).status_code == 200
    answer = post(shared, "bob-secret", path, priority=-5)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "priority_not_allowed"
    assert "priority: got -5" in error["message"]
    assert "priority = true" in error["message"]


def test_someone_alone_may_set_priority(fake: Running) -> None:
    assert fake.chat(priority=-5).status_code == 200


def test_requests_per_minute(shared: Running) -> None:
    answers = [post(shared, "slow-secret") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    # On a busy machine, the next minute's requests are allowed one after the other.
    refused = wait_for(lambda: (answer := post(shared, "slow-secret")).status_code == 429 and answer, what="a refusal")
    assert "requests_per_minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    # The web page renders answers with these requests, so they do not count.
    headers = {"authorization": "Bearer slow-secret"}
    assert shared.http.post("/markdown", json={"texts": ["a"]}, headers=headers).status_code == 200


def test_tokens_per_minute(shared: Running) -> None:
    assert post(shared, "brief-secret").status_code == 200  # a request may be larger than what is left
    for path in PATHS:
        refused = post(shared, "brief-secret", path)
        assert refused.status_code == 429
        assert "tokens_per_minute" in refused.text
        assert int(refused.headers["retry-after"]) >= 10


def test_concurrency(shared: Running) -> None:
    refused = post(shared, "single-secret", PATHS[1], n=3)
    assert refused.status_code == 429
    assert "concurrency" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    assert post(shared, "single-secret", PATHS[1], n=2).status_code == 200  # a refused request holds no place
    # Nor does one that has ended, a moment later.
    wait_for(lambda: post(shared, "single-secret", PATHS[1], n=2).status_code == 200, 5, "the place")


def test_names_are_in_the_log_and_in_the_metrics(shared: Running) -> None:
    post(shared, "bob-secret")
    post(shared, "single-secret", PATHS[1], n=3)

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in shared.log().splitlines() if '"POST' in line or '"method"' in line]

    assert wait_for(lambda: [line for line in lines() if line.get("key") == "bob" and line.get("status") == 200])
    metrics = shared.http.get("/metrics").text
    assert 'culet:key_generation_tokens_total{key="bob",model_name="gemma"}' in metrics
    assert 'culet:key_time_to_first_token_seconds_count{key="bob",model_name="gemma"}' in metrics
    assert 'culet:key_samples_in_flight{key="alice",model_name="gemma"} 0.0' in metrics
    assert 'culet:key_refused_total{key="single",limit="concurrency",model_name="gemma"}' in metrics
    assert "secret" not in metrics
    assert "secret" not in shared.log()


def test_a_wrong_key_leaves_no_label(shared: Running) -> None:
    assert post(shared, "mallory").status_code == 401
    assert "mallory" not in shared.http.get("/metrics").text


def test_keys_are_read_again_on_a_signal(shared: Running, key_file: Path) -> None:
    def signal_and_wait(text: str, expected: str) -> None:
        before = shared.log().count(expected)
        write_keys(key_file, text)
        os.kill(shared.process.pid, signal.SIGHUP)
        wait_for(lambda: shared.log().count(expected) > before, 5, expected)

    try:
        signal_and_wait(KEYS + '\n[[key]]\nname = "new"\nkey = "new-secret"\n', "reloaded 6 API keys")
        assert post(shared, "new-secret").status_code == 200
        for bad in ("", "not TOML", '[[key]]\nname = "x"\n', '[[key]]\nname = "x"\nkey = "bob-secret"\nlimit = 3\n'):
            signal_and_wait(bad, "keys were not changed")
            assert post(shared, "new-secret").status_code == 200
        signal_and_wait(KEYS.replace("bob-secret", "other-secret"), "reloaded 5 API keys")
        assert post(shared, "new-secret").status_code == 401
        assert post(shared, "bob-secret").status_code == 401
        assert post(shared, "other-secret").status_code == 200
    finally:
        signal_and_wait(KEYS, "reloaded 5 API keys")


def test_several_plain_keys_are_kept_apart(scripted: Callable[..., Running]) -> None:
    with scripted(settings={"api_key": "one,two"}) as server:
        assert server.chat(priority=0).status_code == 200
        assert server.chat(priority=1).status_code == 403
        assert 'key="key-2"' in server.http.get("/metrics").text


@pytest.mark.slow
def test_a_flood_of_one_key_leaves_room_in_the_queue(folder: Path, key_file: Path) -> None:
    """Even a key that fills the queue does not make the server refuse another key."""
    config = {"device": "cpu", "max_model_len": 4096, "max_num_seqs": 2, "max_queue_len": 16}
    with Running(folder, config=config, settings={"api_key_file": str(key_file)}) as server:
        body = {"prompt": ["one two three"] * 8, "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 1}
        headers = {"authorization": "Bearer alice-secret"}
        with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client, ExitStack() as streams:
            for _ in range(2):
                stream = streams.enter_context(client.stream("POST", "/v1/completions", json=body))
                assert stream.status_code == 200
            assert client.post("/v1/completions", json={**body, "stream": False}).status_code == 429
            assert post(server, "bob-secret").status_code == 200


def test_a_flood_of_one_key_does_not_delay_another_key(folder: Path, key_file: Path) -> None:
    config = {"device": "cpu", "max_model_len": 4096, "max_num_seqs": 2, "max_queue_len": 200}
    with Running(folder, config=config, settings={"api_key_file": str(key_file)}) as server:
        body = {"prompt": ["one two three"] * 60, "max_tokens": 500, "ignore_eos": True, "stream": True}
        headers = {"authorization": "Bearer alice-secret"}
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, headers=headers))
            flood = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            assert flood.status_code == 200
            answer = post(server, "bob-secret")
            assert answer.status_code == 200, answer.text
            stats = server.http.get("/stats", headers=headers).json()
            assert stats["requests"]["samples_in_flight"] >= 58, "the flood was served first"
