"""Serve ordinary clients for a long time while every attack runs and processes are killed.

    python benchmarks/attack_soak.py --minutes 30

Ordinary clients ask seeded questions whose answers are known from a run without load. Others cancel, close their sending side,
or read slowly. Attacks take turns, 10 s each. Every minute, the engine, the template workers or the grammar workers are killed.
At the end there must be no wrong answer, no reply that a client cannot read, and no page in use. The report also has the web
process's memory after a third of the time and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from attacks import ATTACKS, HOST, Reply, Server, answer_of, attack_for, exchange, read_reply, request

QUESTIONS = ("What is the capital of France?", "Write a sentence about rain.", "What is 12 + 30?", "Name three colours.")
NUM_SEEDS = 8
NUM_CLIENTS = 4
ATTACK_S = 10.0
KILLED = ("culet.serve.process.engine", "template_worker", "check_worker")  # modules of the processes to kill
REST_S = 60.0
MAX_GROWTH = 1.05  # of the web process's memory, from a third of the time to the end


def question(index: int) -> dict[str, Any]:
    """Return a seeded chat."""
    messages = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
    return {"messages": messages, "seed": index, "temperature": 1.0, "max_tokens": 40}


def text_of(reply: Reply, *, stream: bool) -> tuple[bytes | None, str]:
    """Return the complete answer, or None and the error that the client can read, or None and "" if there is neither."""
    try:
        if stream and reply.status == 200:
            events = [json.loads(line[6:]) for line in reply.body.splitlines() if line.startswith(b"data: {")]
            errors = [event["error"]["message"] for event in events if "error" in event]
            is_complete = any((event.get("choices") or [{}])[0].get("finish_reason") for event in events)
            return (answer_of(reply), "") if is_complete and not errors else (None, "".join(errors[:1]))
        body = json.loads(reply.body[reply.body.index(b"{") :]) if b"{" in reply.body else {}
        if reply.status == 200:
            return str(body["choices"][0]["message"]["content"]).encode(), ""
        return None, str(body.get("error", {}).get("message", "")) or (f"status {reply.status}" if reply.status else "")
    except (ValueError, KeyError, IndexError):
        return None, ""


class Soak:
    """The clients and what happened to them."""

    def __init__(self, server: Server, minutes: float) -> None:
        self.server, self.until = server, time.monotonic() + 60 * minutes
        self.answers: dict[int, bytes] = {}
        self.outcomes: Counter[str] = Counter()
        self.unreadable: list[str] = []
        self.wrong: list[str] = []

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    async def learn(self) -> None:
        """Ask every question alone."""
        for index in range(len(QUESTIONS) * NUM_SEEDS):
            reply = await exchange(
                self.server.port, request("POST", "/v1/chat/completions", {**question(index), "stream": True})
            )
            answer, problem = text_of(reply, stream=True)
            if answer is None:
                raise SystemExit(f"no answer without load: {problem}")
            self.answers[index] = answer

    def count(self, kind: str, index: int, reply: Reply, *, stream: bool) -> None:
        answer, problem = text_of(reply, stream=stream)
        if answer is not None and answer == self.answers[index]:
            self.outcomes[f"{kind}: right"] += 1
        elif answer is not None:
            self.outcomes[f"{kind}: WRONG"] += 1
            self.wrong.append(f"{index}: got {answer!r}, expected {self.answers[index]!r}")
        elif problem:
            self.outcomes[f"{kind}: error ({problem[:50]})"] += 1
        else:
            self.outcomes[f"{kind}: UNREADABLE"] += 1
            self.unreadable.append(f"{kind}: status {reply.status} {reply.body[-100:]!r}")

    async def ordinary(self, rng: random.Random) -> None:
        while not self.is_over:
            index, stream = rng.choice(list(self.answers)), rng.random() < 0.5
            body = {**question(index), "stream": stream}
            half_close = rng.random() < 0.2
            try:
                reply = await exchange(self.server.port, request("POST", "/v1/chat/completions", body), half_close=half_close)
            except OSError as error:
                self.unreadable.append(f"cannot connect: {error}")
            else:
                self.count("half-closed" if half_close else "ordinary", index, reply, stream=stream)
            await asyncio.sleep(rng.random() * 0.3)

    async def leaving(self, rng: random.Random) -> None:
        """Hang up at some moment."""
        while not self.is_over:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, self.server.port)
                body = {**question(rng.choice(list(self.answers))), "stream": True, "max_tokens": 400, "ignore_eos": True}
                writer.write(request("POST", "/v1/chat/completions", body))
                await writer.drain()
                await asyncio.sleep(rng.random() * 2)
                writer.close()
                self.outcomes["left"] += 1

    async def slow(self, rng: random.Random) -> None:
        """Read a few bytes at a time."""
        while not self.is_over:
            index = rng.choice(list(self.answers))
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(HOST, self.server.port, limit=64)
                writer.write(request("POST", "/v1/chat/completions", {**question(index), "stream": True}))
                began, whole = time.monotonic(), asyncio.StreamReader(limit=1 << 24)
                while piece := await reader.read(64):
                    whole.feed_data(piece)
                    await asyncio.sleep(0.01)
                whole.feed_eof()
                writer.close()
                self.count("slow", index, await read_reply(whole, began), stream=True)

    async def kill_in_turn(self) -> None:
        for module in itertools.cycle(KILLED):
            for _ in range(60):
                await asyncio.sleep(1)
                if self.is_over:
                    return
            for process_id in self.server.children(module):
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
                    self.outcomes[f"killed {module}"] += 1

    async def report(self, minutes: float) -> list[float]:
        """Print a line every minute, and return the web process's memory in each."""
        memory: list[float] = []
        while not self.is_over:
            await asyncio.sleep(60)
            memory.append(self.server.memory_mb())
            done = {name: count for name, count in sorted(self.outcomes.items()) if "error" not in name}
            print(f"minute {len(memory)} of {minutes:g}: web {memory[-1]:.0f} MB {done}", flush=True)
        return memory


def _attack_in_turn(port: int, seconds: float, names: Iterable[str]) -> None:
    until = time.monotonic() + seconds
    for name in itertools.cycle(names):
        if time.monotonic() > until:
            return
        asyncio.run(attack_for(name, port, ATTACK_S))


async def pages_in_use(port: int) -> str:
    """Wait until the server is at rest. Return "" or what it still holds."""
    deadline, problem = time.monotonic() + REST_S, "no statistics"
    while time.monotonic() < deadline:
        reply = await exchange(port, request("GET", "/stats"))
        with suppress(ValueError, KeyError, TypeError):
            stats = json.loads(reply.body[reply.body.index(b"{") : reply.body.rindex(b"}") + 1])
            now = stats["scheduler"]
            num_idle = now["num_free_pages"] + now["num_resume_point_pages"]
            problem = "" if num_idle == now["num_pages"] else f"{now['num_pages'] - num_idle} pages are still in use"
            if not problem:
                return ""
        await asyncio.sleep(0.5)
    return problem


async def run(server: Server, minutes: float, seed: int) -> int:
    await server.wait_ready()
    soak = Soak(server, minutes)
    await soak.learn()
    soak.until = time.monotonic() + 60 * minutes
    attacker = multiprocessing.Process(target=_attack_in_turn, args=(server.port, 60 * minutes, list(ATTACKS)), daemon=True)
    attacker.start()
    clients = [soak.ordinary(random.Random(seed + number)) for number in range(NUM_CLIENTS)]
    report = asyncio.create_task(soak.report(minutes))
    await asyncio.gather(*clients, soak.leaving(random.Random(seed)), soak.slow(random.Random(seed + 1)), soak.kill_in_turn())
    memory = await report
    await asyncio.to_thread(attacker.join, 60)
    attacker.kill()
    with suppress(SystemExit):
        await server.wait_ready()
    leaked = await pages_in_use(server.port)
    for name, count in sorted(soak.outcomes.items()):
        print(f"{count:8} {name}")
    early, late = memory[len(memory) // 3], memory[-1]
    print(f"web process: {early:.0f} MB after a third of the time, {late:.0f} MB at the end ({late / early - 1:+.1%})")
    problems = [*soak.wrong[:5], *soak.unreadable[:5], *([leaked] if leaked else [])]
    problems += [f"no {module} was killed" for module in KILLED if not soak.outcomes[f"killed {module}"]]
    if late > MAX_GROWTH * early:
        problems.append("the web process's memory has grown")
    print("\n".join(problems) or "no wrong answer, no unreadable reply, no leaked page, no growth")
    return 1 if problems else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    parser.add_argument("--serve", nargs="*", default=[], metavar="ARGUMENT", help="more arguments for culet serve")
    options = parser.parse_args()
    server = Server("--max-engine-restarts", "1000", *options.serve, log=options.log)
    try:
        code = asyncio.run(run(server, options.minutes, options.seed))
    finally:
        server.stop()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
