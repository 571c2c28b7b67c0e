"""Random prompts that arrive over time, alone or beside chats that run all the time.

Requests arrive in a Poisson process (or a burstier one), or all at once. The number in flight can be limited.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from culet.bench.serve.client import WORDS, Client, Load, Prompt, TimedAnswer
from culet.errors import ConfigError


def make_prompts(load: Load, pool: Sequence[int]) -> list[Prompt]:
    """Make prompts of random lengths. Equal seeds give equal prompts."""
    random_ = random.Random(load.seed)
    low, high = 1 - load.range_ratio, 1 + load.range_ratio

    def length(mean: int) -> int:
        return max(1, random_.randint(int(mean * low), int(mean * high)))

    in_words = load.is_chat or not pool
    source: Sequence[Any] = WORDS if in_words else pool
    prefix = random_.choices(source, k=load.prefix_len)
    prompts = []
    for _ in range(load.num_prompts):
        input_len, output_len = length(load.input_len), length(load.output_len)
        parts = [*prefix, *random_.choices(source, k=input_len)]
        prompts.append(Prompt(" ".join(parts) if in_words else parts, len(parts), output_len))
    return prompts


def arrivals(load: Load) -> list[float]:
    """Return when to send each request, in seconds after the start."""
    if load.request_rate == float("inf"):
        return [0.0] * load.num_prompts
    random_ = random.Random(load.seed + 1)
    # The gaps are gamma-distributed. Shape 1 is a Poisson process, and a lower shape has bursts and longer pauses.
    scale = 1.0 / (load.request_rate * load.burstiness)
    times, now = [], 0.0
    for _ in range(load.num_prompts):
        times.append(now)
        now += random_.gammavariate(load.burstiness, scale)
    return times


@dataclass(frozen=True)
class Outcome:
    """All answers and the total time."""

    load: Load
    model: str
    answers: Sequence[TimedAnswer]
    duration_s: float
    counters: Mapping[str, float]  # output, prefix reuse and drafting in this run; empty if the server has no such counters
    chat_gaps_s: Sequence[float] = ()  # times between tokens of the chats that ran beside the prompts
    chat_errors: Sequence[str] = ()  # of the chats that ended before the prompts did

    @property
    def good(self) -> list[TimedAnswer]:
        return [answer for answer in self.answers if answer.is_good]


class Chats:
    """Chats that run all the time beside a load. Each begins again when its answer ends."""

    def __init__(self, client: Client, model: str, load: Load) -> None:
        self._client, self._model, self._load = client, model, load
        self._answers: list[TimedAnswer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.errors: list[str] = []  # one for each chat that failed

    async def begin(self) -> None:
        """Start all chats and wait until each has its first token."""
        self._tasks = [asyncio.create_task(self._chat(number)) for number in range(self._load.num_chats)]
        while sum(bool(answer.token_times) for answer in self._answers) < len(self._tasks):
            if self.errors:
                raise ConfigError(f"a chat beside the prompts failed: {self.errors[0]}", hint="check the server's log")
            await asyncio.sleep(0.01)

    async def _chat(self, number: int) -> None:
        random_ = random.Random(f"chat {self._load.seed} {number}")
        while True:
            prompt = Prompt(
                " ".join(random_.choices(WORDS, k=self._load.chat_len)), self._load.chat_len, self._load.chat_output_len
            )
            answer = TimedAnswer(prompt.input_len)
            self._answers.append(answer)
            await self._client.ask(prompt, self._model, answer)
            if answer.error:
                self.errors.append(answer.error)
                return

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps_after(self, begin: float) -> list[float]:
        """Return the times between tokens of one answer that came after `begin`."""
        pairs = [pair for answer in self._answers for pair in pairwise(answer.token_times)]
        return [later - earlier for earlier, later in pairs if later >= begin]


async def run(load: Load, report: Callable[[int], None] = lambda done: None) -> Outcome:
    """Send all requests and wait for the answers. Calls `report` with the number of finished requests."""
    client = Client(load)
    try:
        model = await client.check()
        pool = [] if load.is_chat else await client.pool()
        # Warm-ups have a prompt of their own, so that the server has cached none of the measured ones.
        *prompts, warm_up = make_prompts(replace(load, num_prompts=load.num_prompts + 1), pool)
        for _ in range(load.num_warmups):
            first = await client.ask(warm_up, model)
            if first.error:
                raise ConfigError(f"the first request failed: {first.error}", hint="check the server's log")
        chats = Chats(client, model, load)
        await chats.begin()
        before = await client.counters()
        limit = asyncio.Semaphore(load.max_concurrency or len(prompts))
        num_done = 0
        began = time.perf_counter()

        async def ask_at(prompt: Prompt, at: float) -> TimedAnswer:
            nonlocal num_done
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            async with limit:
                answer = await client.ask(prompt, model)
            num_done += 1
            report(num_done)
            return answer

        answers = await asyncio.gather(*(ask_at(prompt, at) for prompt, at in zip(prompts, arrivals(load), strict=True)))
        duration = time.perf_counter() - began
        after = await client.counters()
        await chats.end()
    finally:
        await client.close()
    counters = {key: after[key] - before.get(key, 0.0) for key in after}
    return Outcome(load, model, answers, duration, counters, chats.gaps_after(began), chats.errors)
