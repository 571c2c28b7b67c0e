"""Attack a server of the built-in model and measure what other clients notice.

    python benchmarks/attacks.py                          # every attack, 10 s each
    python benchmarks/attacks.py --attacks templates echo --seconds 20

While an attack runs, another client asks for `/health` all the time and sends a known chat again and again. A row says how long
`/health` took (median and 99th percentile), how many times longer than unloaded the first token of the chat took (median), the
most memory that the web process had, and how the attacker's requests ended (HTTP status, or `closed`). The aim is 250 ms for
`/health` at the 99th percentile, 3 times the first token, and 300 MB. Attackers run in their own process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

HOST = "127.0.0.1"
KNOWN_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 24}
MB = 1 << 20
HEAD = "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


# The server


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


class Server:
    """`culet serve` with the built-in model."""

    def __init__(self, *arguments: str, log: Path | None = None) -> None:
        self.port = free_port()
        self._log = open(log, "w") if log is not None else subprocess.DEVNULL  # noqa: SIM115 (lives as long as the process)
        command = [sys.executable, "-P", "-m", "culet.cli.main", "serve", "--port", str(self.port), *arguments]
        # Its own session, so that Linux does not count its work and that of the attackers as one.
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)

    def memory_mb(self) -> float:
        """Return the resident memory of the web process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB

    def children(self, module: str) -> list[int]:
        """Return the ids of the child processes that run a module."""
        found = []
        for listed in Path(f"/proc/{self.process.pid}/task").glob("*/children"):  # each thread has its own
            with suppress(OSError):
                for child in listed.read_text().split():
                    line = Path(f"/proc/{child}/cmdline").read_bytes().decode()
                    found += [int(child)] if module in line else []
        return found

    async def wait_ready(self, limit_s: float = 300.0) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with code {self.process.returncode}")
            with suppress(OSError, ConnectionError):
                if (await exchange(self.port, request("GET", "/ready"))).status == 200:
                    return
            await asyncio.sleep(0.1)
        raise SystemExit("the server did not become ready")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


# A small HTTP client, which can also misbehave


@dataclass
class Reply:
    """What the server sent."""

    status: int  # 0 if the connection was closed before a status line
    body: bytes = b""
    first_s: float | None = None  # time to the first byte of the body
    total_s: float = 0.0

    @property
    def outcome(self) -> str:
        return str(self.status) if self.status else "closed"


def request(method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: str = "") -> bytes:
    """Return the bytes of a request that closes its connection."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    length = "" if body is None else f"content-length: {len(body)}\r\n"
    return (HEAD.format(method=method, path=path) + length + headers + "connection: close\r\n\r\n").encode() + (body or b"")


async def exchange(port: int, data: bytes, *, limit_s: float = 120.0, half_close: bool = False) -> Reply:
    """Send a request and read the reply to its end."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
    try:
        async with asyncio.timeout(limit_s):
            writer.write(data)
            with suppress(ConnectionError):  # refused early: the reply is there already
                await writer.drain()
                if half_close:
                    writer.write_eof()
            return await read_reply(reader, began)
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        return Reply(0, total_s=time.monotonic() - began)
    finally:
        writer.close()


async def read_reply(reader: asyncio.StreamReader, began: float) -> Reply:
    """Read a reply until the server closes the connection."""
    status = 100
    while status < 200:  # interim replies come before the real one
        status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
    reply = Reply(status)
    pieces = []
    while piece := await reader.read(1 << 16):
        if reply.first_s is None:
            reply.first_s = time.monotonic() - began
        pieces.append(piece)
    reply.body, reply.total_s = b"".join(pieces), time.monotonic() - began
    return reply


async def send_slowly(port: int, pieces: AsyncIterator[bytes]) -> Reply:
    """Send pieces until they end or the server refuses, then read the reply."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        with suppress(ConnectionError):
            async for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if reader.at_eof():
                    break
        async with asyncio.timeout(10):
            return await read_reply(reader, began)
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        return Reply(0, total_s=time.monotonic() - began)
    finally:
        writer.close()


# Attacks. Each runs until it is cancelled or its time is over, and counts how its requests ended.


CHUNKED = (HEAD.format(method="POST", path="/v1/chat/completions") + "transfer-encoding: chunked\r\n\r\n").encode()


async def endless(first: bytes, rest: bytes) -> AsyncIterator[bytes]:
    yield first
    while True:
        yield rest


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}


async def trailers(port: int) -> str:
    line = b"x-filler: " + b"a" * 200 + b"\r\n"
    return (await send_slowly(port, endless(CHUNKED + b"2\r\n{}\r\n0\r\n", line * 200))).outcome


async def trailer_value(port: int) -> str:
    return (await send_slowly(port, endless(CHUNKED + b"2\r\n{}\r\n0\r\nx: ", b"a" * (1 << 16)))).outcome


async def extension(port: int) -> str:
    return (await send_slowly(port, endless(CHUNKED + b"2;", b"a" * (1 << 20)))).outcome


async def head(port: int) -> str:
    big = request("GET", "/health", headers="x: " + "a" * 100_000 + "\r\n")
    return (await exchange(port, big)).outcome


def tool_conversation(num_bytes: int) -> bytes:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"x": "word " * (num_bytes // 5)})},
    }
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    return json.dumps({"messages": messages, "max_tokens": 4}).encode()


_LARGE = tool_conversation(4_500_000)


async def templates(port: int) -> str:
    return (await exchange(port, request("POST", "/v1/chat/completions", _LARGE))).outcome


async def templates_hang_up(port: int) -> str:
    _, writer = await asyncio.open_connection(HOST, port)
    writer.write(request("POST", "/v1/chat/completions", _LARGE))
    with suppress(ConnectionError):
        await writer.drain()
    writer.close()
    return "left"


def aliased_schema(depth: int = 24, width: int = 3) -> dict[str, Any]:
    """Return a small schema whose references multiply when they are expanded."""
    definitions: dict[str, Any] = {"d0": {"type": "string", "description": "x" * 200}}
    for level in range(1, depth):
        inner = {f"p{index}": {"$ref": f"#/$defs/d{level - 1}"} for index in range(width)}
        definitions[f"d{level}"] = {"type": "object", "properties": inner, "required": list(inner)}
    return {"type": "object", "$defs": definitions, "properties": {"a": {"$ref": f"#/$defs/d{depth - 1}"}}, "required": ["a"]}


async def schemas(port: int) -> str:
    function = {"name": f"f{random.randrange(10**9)}", "parameters": aliased_schema()}
    body = chat_body(tools=[{"type": "function", "function": function}], tool_choice="required")
    return (await exchange(port, request("POST", "/v1/chat/completions", body))).outcome


async def properties(port: int) -> str:
    parameters = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(400_000)}}
    body = chat_body(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    return (await exchange(port, request("POST", "/v1/chat/completions", body))).outcome


async def echo(port: int) -> str:
    prompts = [" ".join(["word"] * 900) for _ in range(24)]
    body = {"prompt": prompts, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1}
    return (await exchange(port, request("POST", "/v1/completions", body))).outcome


async def detokenize(port: int) -> str:
    body = ('{"tokens": [' + ",".join(["500"] * 2_000_000) + "]}").encode()
    return (await exchange(port, request("POST", "/detokenize", body))).outcome


async def bad_body(port: int) -> str:
    body = ('{"messages": [' + ",".join(['{"role": "user", "content": 1}'] * 300_000) + "]}").encode()
    return (await exchange(port, request("POST", "/v1/chat/completions", body))).outcome


async def grammars(port: int) -> str:
    salt = random.randrange(10**9)
    choice = {"type": "array", "minItems": 900, "items": {"type": "string", "pattern": f"^(a|b{salt}|[c-z]{{1,60}}){{40,80}}$"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": choice}}
    return (await exchange(port, request("POST", "/v1/chat/completions", chat_body(response_format=form)))).outcome


async def bodies(port: int) -> str:
    """Send most of a 15 MB body and then nothing."""
    first = HEAD.format(method="POST", path="/v1/chat/completions") + f"content-length: {15 * MB}\r\n\r\n"

    async def half() -> AsyncIterator[bytes]:
        yield first.encode()
        for _ in range(14):
            yield b" " * MB
        await asyncio.sleep(8)

    return (await send_slowly(port, half())).outcome


@dataclass(frozen=True)
class Attack:
    """An attack and how many of its clients run at a time."""

    run: Callable[[int], Awaitable[str]]
    num_clients: int = 1


ATTACKS = {
    "trailers": Attack(trailers),
    "trailer_value": Attack(trailer_value),
    "extension": Attack(extension),
    "head": Attack(head, 4),
    "templates": Attack(templates, 12),
    "templates_hang_up": Attack(templates_hang_up, 12),
    "schemas": Attack(schemas, 4),
    "properties": Attack(properties, 2),
    "echo": Attack(echo, 2),
    "detokenize": Attack(detokenize, 2),
    "bad_body": Attack(bad_body, 2),
    "grammars": Attack(grammars, 40),
    "bodies": Attack(bodies, 60),
}


async def attack_for(name: str, port: int, seconds: float) -> Counter[str]:
    """Run an attack's clients for some seconds, and return how often each outcome occurred."""
    outcomes: Counter[str] = Counter()
    attack, until = ATTACKS[name], time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < until:
            try:
                outcomes[await attack.run(port)] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.02)

    clients = [asyncio.create_task(client()) for _ in range(attack.num_clients)]
    _, late = await asyncio.wait(clients, timeout=seconds + 5)
    for task in late:
        task.cancel()
    outcomes["unfinished"] += len(late)
    return +outcomes


def _attack_process(name: str, port: int, seconds: float, results: Any) -> None:
    results.put(dict(asyncio.run(attack_for(name, port, seconds))))


# What other clients notice


@dataclass
class Noticed:
    """Times of an ordinary client, and the web process's memory."""

    health_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    peak_mb: float = 0.0


async def watch(server: Server, seconds: float, answer: bytes | None = None) -> Noticed:
    """Be an ordinary client for some seconds. With `answer`, the known chat must give it."""
    noticed, until = Noticed(), time.monotonic() + seconds

    async def ask_health() -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            reply = await exchange(server.port, request("GET", "/health"))
            noticed.health_s.append(time.monotonic() - began)
            noticed.wrong[f"health {reply.outcome}"] += reply.status != 200
            noticed.peak_mb = max(noticed.peak_mb, server.memory_mb())
            await asyncio.sleep(0.05)

    async def chat() -> None:
        while time.monotonic() < until:
            reply = await known_chat(server.port)
            noticed.first_s.append(reply.first_s if reply.first_s is not None else reply.total_s)
            if reply.status != 200:
                noticed.wrong[f"chat {reply.outcome}"] += 1
            elif answer is not None and answer_of(reply) != answer:
                noticed.wrong["wrong answer"] += 1
            await asyncio.sleep(0.1)

    await asyncio.gather(ask_health(), chat())
    return noticed


async def known_chat(port: int) -> Reply:
    return await exchange(port, request("POST", "/v1/chat/completions", {**KNOWN_CHAT, "stream": True}))


def answer_of(reply: Reply) -> bytes:
    """Return the text of a streamed answer."""
    text = ""
    for line in reply.body.splitlines():
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices") or [{}]
            text += choices[0].get("delta", {}).get("content") or ""
    return text.encode()


def percentile_99(values: list[float]) -> float:
    return quantiles(values, n=100)[98] if len(values) > 1 else values[0]


async def measure(server: Server, names: list[str], seconds: float) -> None:
    """Run the attacks one after the other and print a row for each."""
    await server.wait_ready()
    answer = answer_of(await known_chat(server.port))
    unloaded = await watch(server, 5, answer)
    base = median(unloaded.first_s)
    print(f"unloaded: first token {1e3 * base:.0f} ms, /health {1e3 * percentile_99(unloaded.health_s):.0f} ms (p99)")
    print(f"{'attack':18} {'/health ms p50':>15} {'p99':>6} {'first token':>12} {'web MB':>7}  outcomes, and what went wrong")
    for name in names:
        results: multiprocessing.Queue[dict[str, int]] = multiprocessing.Queue()
        attacker = multiprocessing.Process(target=_attack_process, args=(name, server.port, seconds, results))
        attacker.start()
        await asyncio.sleep(0.5)
        noticed = await watch(server, seconds, answer)
        outcomes = await asyncio.to_thread(results.get)
        attacker.join()
        ratio, health = median(noticed.first_s) / base, noticed.health_s
        row = f"{name:18} {1e3 * median(health):15.0f} {1e3 * percentile_99(health):6.0f} {ratio:11.1f}x {noticed.peak_mb:7.0f}"
        print(f"{row}  {outcomes} {dict(+noticed.wrong) or ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    options = parser.parse_args()
    server = Server(log=options.log)
    try:
        asyncio.run(measure(server, options.attacks, options.seconds))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
