"""A server whose log nobody reads answers as before. Lines are dropped and counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.serve.hardening.raw_http import chat_bytes, connect
from tests.serve.running import _SERVE, Running, wait_for

LONG_PATH = "/nowhere/" + "%E2%82%AC" * 250  # makes a line of 1.5 KB
NUM_REQUESTS = 900  # far more than the pipe (64 KB) and the queue (1 MB) hold


def test_a_stalled_reader_of_the_log(folder: Path, encode: Callable[[str], list[int]], port: int) -> None:
    settings = {"port": port, "served_model_name": "gemma"}
    given = {"config": {"model": str(folder)}, "settings": settings, "script": {"answers": [encode("Hi.<turn|>")]}}
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, json.dumps(given)], stderr=writer, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    os.close(writer)
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def is_ready() -> bool:
        try:
            return http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def num_dropped() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("culet:log_lines_dropped_total"))

    try:
        wait_for(is_ready, 40, "the server")
        assert num_dropped() == 0
        for _ in range(NUM_REQUESTS):
            assert http.get(LONG_PATH).status_code == 404
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert num_dropped() > 0
        log = bytearray()
        is_read = threading.Event()

        def read() -> None:
            while data := os.read(reader, 1 << 16):
                log.extend(data)
            is_read.set()

        threading.Thread(target=read, daemon=True).start()
        wait_for(lambda: b"lines of the log were dropped" in log, what="the report")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert is_read.wait(60)
    finally:
        process.kill()
        process.wait()
        http.close()


def test_a_server_ends_although_nobody_reads_its_log(folder: Path, encode: Callable[[str], list[int]], port: int) -> None:
    settings = {"port": port, "served_model_name": "gemma"}
    given = {"config": {"model": str(folder)}, "settings": settings, "script": {"answers": [encode("Hi.<turn|>")]}}
    process = subprocess.Popen([sys.executable, "-c", _SERVE, json.dumps(given)], stderr=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            def is_ready() -> bool:
                try:
                    return http.get("/ready").status_code == 200
                except httpx.TransportError:
                    return False

            wait_for(is_ready, 40, "the server")
            for _ in range(100):
                http.get(LONG_PATH)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()


def test_clients_that_leave_are_no_errors(scripted: Callable[..., Running]) -> None:
    """A client that leaves before its answer is complete leaves no traceback in the log."""
    with scripted("word " * 50, step_s=0.05) as server:
        for _ in range(3):
            with connect(server) as sock:
                sock.sendall(chat_bytes(max_tokens=1000, ignore_eos=True))
                time.sleep(0.5)
        server.check_well()
        log = server.log()
        assert "Traceback" not in log
        assert "never retrieved" not in log
