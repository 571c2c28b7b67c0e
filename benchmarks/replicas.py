"""Compare one engine with two on this machine's CPU, one thread each: tokens per second, and the answers.

    python benchmarks/replicas.py

Both servers run at the same time, and the load goes to one, then to the other, in turns. So other programs on the machine slow
down both. There are more clients than all engines have slots. The answers at temperature 0 must be the same.

On a busy machine, two engines get no more time than one, and tokens per second say little. So the result also has the seconds
of CPU time that each engine took. If every engine has a core of its own, the engine that took most of it sets the pace.
On an idle machine, `--least 1.6` makes a lower ratio an error.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """`culet serve` with some engines."""

    def __init__(self, num_engines: int, num_slots: int) -> None:
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "culet.cli.main",
            "serve",
            "--port",
            str(port),
            "--device",
            "cpu",
            "--max-model-len",
            "1024",
        ]
        command += ["--max-num-seqs", str(num_slots), "--data-parallel-size", str(num_engines), "--no-log-requests"]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        while True:
            assert self.process.poll() is None, "the server did not start"
            try:
                if self.http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def answer(self, index: int, num_tokens: int) -> str:
        body = {"prompt": f"{index} is a number. ", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body)
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["text"]
        return text

    def load(self, num_requests: int, num_clients: int, num_tokens: int) -> tuple[float, float, list[str]]:
        """Return tokens per second, the CPU seconds of the engine that took most, and the answers."""
        begun, before = time.monotonic(), self.engine_seconds()
        with ThreadPoolExecutor(num_clients) as pool:
            answers = list(pool.map(lambda index: self.answer(index, num_tokens), range(num_requests)))
        rate = num_requests * num_tokens / (time.monotonic() - begun)
        return rate, max(now - then for now, then in zip(self.engine_seconds(), before, strict=True)), answers

    def engine_seconds(self) -> list[float]:
        """Return the CPU time that each engine process has taken."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")  # each thread has its own
        children = [child for listed in lists for child in listed.read_text().split()]
        found = []
        for child in children:
            if b"culet.serve.process.engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
                found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return found

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait()


def check_ratio(ratio: float, least: float | None) -> None:
    """End with an error if two engines give less than `least` times the tokens per second of one."""
    if least is not None and ratio < least:
        raise SystemExit(f"error: got a ratio of {ratio:.2f}, expected at least {least:g}\nhint: are two cores idle?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4, help="sequences that an engine runs at the same time")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--least", type=float, help="end with an error if the ratio is below this")
    options = parser.parse_args()
    servers = [Server(1, options.slots), Server(2, options.slots)]
    try:
        rates: list[list[float]] = [[], []]
        seconds: list[list[float]] = [[], []]
        for number in range(options.rounds + 1):
            answers = []
            for server, rate, taken in zip(servers, rates, seconds, strict=True):
                measured, cpu_seconds, texts = server.load(options.requests, options.clients, options.tokens)
                answers.append(texts)
                if number:  # the first round warms up
                    rate.append(round(measured, 1))
                    taken.append(round(cpu_seconds, 2))
            assert answers[0] == answers[1], "the answers differ"
        best, least = [max(rate) for rate in rates], [min(taken) for taken in seconds]
        result = {
            "tokens_per_s": rates,
            "ratio": round(best[1] / best[0], 2),
            "cpu_seconds": seconds,
            "cpu_ratio": round(least[0] / least[1], 2),
            "answers": "the same",
        }
        print(json.dumps(result))
        check_ratio(best[1] / best[0], options.least)
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
