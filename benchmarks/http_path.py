"""Measure the cost of the server over the whole HTTP path, with an engine that answers immediately.

    python benchmarks/http_path.py             prints streamed tokens/s at 32 streams, and the time to first token of one client
    python benchmarks/http_path.py --check     exits 1 below 20,000 tokens/s or above 2 ms

This script produces the figures for the HTTP path in docs/results.md. There are three processes, as in production: the client
(this one), the web server, and the engine, which has a script instead of a model. Every token is its own server-sent event and
passes through the chat template, the tokenizer, both sockets, the output reader and JSON. The client measures the time to first
token from its first byte to the first event with text. Each figure is the best of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

NEED_TOKENS_S, NEED_FIRST_MS = 20_000, 2.0
_TEXT = "A culet is the small facet at the point of a cut gem, and the stone is held to the wheel while each facet is ground."


def serve(folder: str, port: int, step_s: float) -> None:
    """Run the web process with the scripted engine."""
    from culet.config import build_config, build_serve_config
    from culet.log import setup_logging
    from culet.serve.process.wire import Script
    from culet.serve.server import serve as run
    from culet.text.tokenizer import Tokenizer

    setup_logging("warning")
    script = Script(answers=(tuple(Tokenizer(folder).encode(_TEXT)),), step_s=step_s, max_model_len=1 << 20, num_pages=1 << 20)
    run(
        build_config({"model": folder, "max_num_seqs": 64}),
        build_serve_config({"port": port, "served_model_name": "fake", "log_requests": False}),
        script,
    )


class Reader(asyncio.Protocol):
    """A connection that sends a request, counts the events with text and notes the time of the first."""

    MARK = b'"delta":{"content":'
    END = b"data: [DONE]"

    def __init__(self) -> None:
        self.num_events = 0
        self.first_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, body: bytes) -> None:
        self.num_events, self.first_at, self._tail = 0, 0.0, b""
        self.done = asyncio.get_running_loop().create_future()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        self.transport.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        count = data.count(self.MARK)
        if count and not self.first_at:
            self.first_at = time.perf_counter()
        self.num_events += count
        if self.END in data and not self.done.done():
            self.done.set_result(None)
        keep = len(self.MARK) - 1
        self._tail = data[-keep:] if not data.endswith(self.MARK) else b""

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))


async def connect(port: int) -> Reader:
    _, reader = await asyncio.get_running_loop().create_connection(Reader, "127.0.0.1", port)
    return reader


def request(max_tokens: int) -> bytes:
    message = {"role": "user", "content": "Tell me about the stone."}
    return json.dumps({"messages": [message], "stream": True, "ignore_eos": True, "max_tokens": max_tokens}).encode()


async def throughput(port: int, num_streams: int, num_tokens: int) -> float:
    """Return the streamed tokens per second, from the first request to the last event."""
    readers = [await connect(port) for _ in range(num_streams)]
    began = time.perf_counter()
    for reader in readers:
        reader.ask(request(num_tokens))
    await asyncio.gather(*(reader.done for reader in readers))
    seconds = time.perf_counter() - began
    total = sum(reader.num_events for reader in readers)
    assert total == num_streams * num_tokens, f"got {total} events, expected {num_streams * num_tokens}"
    for reader in readers:
        reader.transport.close()
    return total / seconds


async def first_token_ms(port: int, count: int) -> list[float]:
    """Return the milliseconds to the first event with text, for sequential requests."""
    reader = await connect(port)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        reader.ask(request(8))
        await reader.done
        times.append(1000 * (reader.first_at - began))
    reader.transport.close()
    return times


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return


def cpu_seconds(process_id: int) -> float:
    """Return the CPU time of a process, including its threads."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(port: int, process_id: int, arguments: argparse.Namespace) -> tuple[float, float, list[float]]:
    """Return (tokens/s, the web process's CPU time per token in microseconds, milliseconds to the first token)."""
    try:
        from uvloop import run
    except ImportError:
        run = asyncio.run
    run(throughput(port, 4, 100))  # warm up
    before = cpu_seconds(process_id)
    best = max(run(throughput(port, arguments.streams, arguments.tokens)) for _ in range(arguments.runs))
    cost = (cpu_seconds(process_id) - before) / (arguments.runs * arguments.streams * arguments.tokens)
    rounds = [run(first_token_ms(port, 200)) for _ in range(arguments.runs)]
    return best, 1e6 * cost, min(rounds, key=statistics.median)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="number of tokens in each stream")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="duration of a step in milliseconds; 0 sends tokens in batches"
    )
    parser.add_argument("--port", type=int, default=18971)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.port, arguments.step_ms / 1000)
        return 0
    from culet.testing.tiny import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "31B")
        command = [
            sys.executable,
            __file__,
            "--serve",
            folder,
            "--port",
            str(arguments.port),
            "--step-ms",
            str(arguments.step_ms),
        ]
        process = subprocess.Popen(command, env=os.environ)
        try:
            wait_ready(arguments.port, process)
            tokens_s, cost, times = measure(arguments.port, process.pid, arguments)
        finally:
            process.terminate()
            process.wait()
    median, p99 = statistics.median(times), sorted(times)[int(0.99 * len(times))]
    print(f"{arguments.streams} streams: {tokens_s:,.0f} tokens/s, one event each (goal {NEED_TOKENS_S:,})")
    print(f"web process: {cost:.1f} us of CPU time per token")
    print(f"1 client: first token after {median:.2f} ms (median), {p99:.2f} ms (p99) (goal: below {NEED_FIRST_MS:g} ms)")
    missed = tokens_s < NEED_TOKENS_S or median >= NEED_FIRST_MS
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
