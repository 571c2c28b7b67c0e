"""Serve the built-in model, ask it something over HTTP with drafting on, and print the answer and its speed.

`make run` calls this. At a terminal the server stays up until Ctrl-C. Otherwise the script ends after the answer. The first of
the ports in the arguments that is free is used.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn

import httpx

QUESTION = "Hello! What can you do?"
DRAFTER = {"method": "mtp", "model": "built-in:assistant", "probe": False}  # it fits, so the start need not check it
PORTS = (8000, 0)  # without arguments: the usual port, or any free one
START_LIMIT_S, STOP_LIMIT_S = 300, 30
LOG_LINES = 15  # shown after a failure


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal must not leave a server behind
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryFile("w+") as log, running_server(log) as (server, url):
        wait_until_ready(server, url, log)
        ask(url)
        print(f"page:     {url}", flush=True)
        if sys.stdout.isatty():
            print(f"API:      {url}/v1 (OpenAI's and Anthropic's)\nCtrl-C stops the server.", flush=True)
            server.wait()
            fail("the server ended", log)


@contextmanager
def running_server(log: IO[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `culet serve`, and stop it at the end, also after Ctrl-C."""
    port = free_port()
    settings = ["--port", str(port), "--speculative-config", json.dumps(DRAFTER)]
    command = [sys.executable, "-m", "culet.cli.main", "serve", "built-in", *settings]
    # In its own session, the server does not get the terminal's Ctrl-C, and is stopped by this script alone.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        yield server, f"http://127.0.0.1:{port}"
    except KeyboardInterrupt:
        print("\nstopping the server")
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port() -> int:
    for port in [int(argument) for argument in sys.argv[1:]] or PORTS:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise SystemExit("error: no port is free")


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            fail("the server did not start", log)
        try:
            if httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    fail(f"the server was not ready after {START_LIMIT_S} s", log)


def ask(url: str) -> None:
    """Ask the question, print the answer as it arrives, and then its speed."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    print(f"question: {QUESTION}\nanswer:   ", end="", flush=True)
    started_at = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False) as response:
        if response.status_code != 200:
            raise SystemExit(f"error: the server answered with status {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"error: {event['error']['message']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    print(text, end="", flush=True)
                    times.append(time.perf_counter())
    num_tokens, details = usage["completion_tokens"], usage["completion_tokens_details"]
    speed = (num_tokens - 1) / max(times[-1] - times[0], 1e-3)
    drafted = f"{details['accepted_prediction_tokens']} of {num_tokens} tokens were drafted"
    print(f"\nspeed:    {speed:.0f} tokens/s, the first after {times[0] - started_at:.2f} s; {drafted}")


def fail(problem: str, log: IO[str]) -> NoReturn:
    log.seek(0)
    lines = log.read().splitlines()[-LOG_LINES:]
    raise SystemExit("\n".join([f"error: {problem}. The end of its log:", *lines]))


if __name__ == "__main__":
    main()
