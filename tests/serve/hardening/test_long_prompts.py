"""Long chats do not hold up short ones, whether their senders stay or leave, and lost template processes are replaced."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.forking import children
from tests.serve.running import PATIENCE, Running, wait_for

NUM_ATTACKERS = 12


def long_chat(num_rows: int = 68_000, *, as_text: bool = True) -> bytes:
    """Return a chat whose tool arguments have about 4.5 MB. Rendering them takes longer than the time limit."""
    rows = {"rows": [{"id": row, "name": f"name {row}", "ok": True, "x": [1, 2, 3.5]} for row in range(num_rows)]}
    call = {"name": "f", "arguments": json.dumps(rows) if as_text else rows}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    return json.dumps({"messages": messages, "max_tokens": 2}).encode()


def send(server: Running, body: bytes) -> socket.socket:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    return sock


def seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    answer = call()
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def template_processes(server: Running) -> list[int]:
    return children(server.process.pid, "culet.text.template_worker")


def metric(server: Running, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


@pytest.fixture(scope="module")
def roomy(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server whose context is so long that it must render long chats."""
    with scripted(max_model_len=1 << 20) as server:
        yield server


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_short_chats_do_not_wait_for_long_ones(roomy: Running, stays: bool, as_text: bool) -> None:
    """With one template process and one queue, the short chat waited for all of them: about five seconds each."""
    body = long_chat(as_text=as_text)
    alone_s = max(seconds(lambda: roomy.chat(max_tokens=2)) for _ in range(5))
    socks = [send(roomy, body) for _ in range(NUM_ATTACKERS)]
    if not stays:
        for sock in socks:
            sock.close()
    health_s, chat_s = [], []
    for _ in range(10):
        chat_s.append(seconds(lambda: roomy.chat(max_tokens=2)))
        health_s.append(seconds(lambda: roomy.http.get("/health")))
    for sock in socks:
        sock.close()
    assert sorted(chat_s)[5] < 20 * alone_s + 1
    assert max(chat_s) < 1.5 * PATIENCE
    assert max(health_s) < 0.25 * PATIENCE
    wait_for(lambda: metric(roomy, "culet:prompts_waiting") == 0, what="the prompts of clients that left to be dropped")
    roomy.check_well()


def test_long_chats_beyond_the_queue_are_told_to_retry(scripted: Callable[..., Running]) -> None:
    body = long_chat(num_rows=8_000)
    limits = f"waiting_prompt_mb={2 * len(body) // (1 << 20) + 1}"
    with scripted(max_model_len=1 << 20, settings={"limits": limits}) as server:
        socks = [send(server, body) for _ in range(NUM_ATTACKERS)]
        answers = []
        for sock in socks:
            sock.settimeout(60 * PATIENCE)
            answers.append(sock.recv(1 << 16).lower())
            sock.close()
        refused = [answer for answer in answers if answer.startswith(b"http/1.1 429")]
        assert 0 < len(refused) < NUM_ATTACKERS
        assert all(b"\r\nretry-after: " in answer for answer in refused)
        assert metric(server, "culet:refused_prompts_total") == len(refused)
        server.check_well()


def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(fake: Running) -> None:
    """The context has 32768 tokens. The three APIs share the check."""
    conversation = json.loads(long_chat())
    text = conversation["messages"][1]["tool_calls"][0]["function"]["arguments"]
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"text": text}}
    anthropic = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": [use]}]
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": text}
    for path, body in (
        ("/v1/chat/completions", conversation),
        ("/tokenize", {"messages": conversation["messages"]}),
        ("/v1/messages", {"messages": anthropic, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": anthropic}),
        ("/v1/responses", {"input": [{"role": "user", "content": "Hello"}, item]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 2**20}]}),
    ):
        answer = fake.http.post(path, json=body)
        assert answer.status_code == 400, path
        assert "but the context of 32768 tokens holds at most" in answer.text, path
        assert "--limits prompt_bytes=N" in answer.text
    fake.check_well()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("content", ["Hello", "word " * 14_000])  # longer than a pipe holds
def test_stopped_and_killed_template_processes_are_replaced(fake: Running, number: int, content: str) -> None:
    processes = wait_for(lambda: template_processes(fake), what="template processes")
    for process_id in processes:
        os.kill(process_id, number)
    for _ in range(3):
        answer = fake.chat(messages=[{"role": "user", "content": content}], max_tokens=2)
        assert answer.status_code == 200, answer.text
    for process_id in template_processes(fake):  # the idle ones may still be stopped
        os.kill(process_id, signal.SIGCONT)
    fake.check_well()
