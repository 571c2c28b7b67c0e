"""Measure the time to the first token of one API key, alone and while another key floods the server.

    python benchmarks/two_keys.py --flood 1000 --max-num-seqs 8

It starts `culet serve` with the built-in model on this machine and prints the median and the 90th percentile of both cases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

WORDS = ("river", "stone", "light", "cloud", "green", "paper", "house", "music", "summer", "winter", "garden", "silver")


def text(num_words: int, chance: random.Random) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(num_words))


async def first_token_s(client: httpx.AsyncClient, prompt: str) -> float:
    """Return the seconds from sending a request to its first token."""
    began = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": 8, "stream": True, "ignore_eos": True}
    seconds = 0.0
    async with client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "quiet"}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and not seconds and json.loads(line[6:])["choices"][0]["text"] is not None:
                seconds = time.perf_counter() - began
    return seconds


async def flood(client: httpx.AsyncClient, args: argparse.Namespace, chance: random.Random) -> None:
    """Keep one request of the flooding key in flight until cancelled."""
    while True:
        body = {"prompt": text(args.flood_words, chance), "max_tokens": args.flood_tokens, "ignore_eos": True}
        await client.post("/v1/completions", json=body, headers={"x-api-key": "busy"})


async def measure(url: str, args: argparse.Namespace) -> None:
    chance = random.Random(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def series() -> list[float]:
            times = []
            for _ in range(args.requests):
                times.append(await first_token_s(client, text(args.words, chance)))
                await asyncio.sleep(args.pause)
            return times

        await series()  # warm up
        alone = await series()
        tasks = [asyncio.create_task(flood(client, args, chance)) for _ in range(args.flood)]
        await asyncio.sleep(args.lead)
        loaded = await series()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for name, times in (("alone", alone), ("with a flood", loaded)):
        times.sort()
        print(f"{name}: median {statistics.median(times) * 1e3:.0f} ms, p90 {times[int(0.9 * len(times))] * 1e3:.0f} ms")
    print(f"ratio of medians: {statistics.median(loaded) / statistics.median(alone):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flood", type=int, default=1000, help="requests of the flooding key in flight")
    parser.add_argument("--flood-words", type=int, default=20)
    parser.add_argument("--flood-tokens", type=int, default=200)
    parser.add_argument("--words", type=int, default=300, help="length of the measured prompts")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between measured requests")
    parser.add_argument("--lead", type=float, default=8.0, help="seconds that the flood runs before measuring")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--port", type=int, default=8731)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text('[[key]]\nname = "busy"\nkey = "busy"\n\n[[key]]\nname = "quiet"\nkey = "quiet"\n')
        keys.chmod(0o600)
        command = [sys.executable, "-m", "culet.cli.main", "serve", "--port", str(args.port), "--api-key-file", str(keys)]
        command += ["--max-num-seqs", str(args.max_num_seqs), "--no-log-requests"]
        server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        url = f"http://127.0.0.1:{args.port}"
        try:
            while True:
                try:
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert server.poll() is None, "the server ended"
                time.sleep(0.2)
            asyncio.run(measure(url, args))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
