"""Sessions of an agent: tools, a long history, and a tool result in every turn. Each turn's prompt begins like the last one.

All sessions share their system message and tools and have histories of their own. Turns of different sessions are interleaved,
so a server must keep the prefixes of all of them. The same turns are then sent again with a `cache_salt` of their own each. The
server finds nothing for them, as if its cache were off. Every run has salts of its own, so it finds nothing of earlier runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from culet.bench.serve.client import WORDS, Client, Load, Prompt, TimedAnswer
from culet.errors import ConfigError

MESSAGE_WORDS = 400  # of each message in the history
MAX_HISTORY = 10_000_000  # longer ones are typing errors


@dataclass(frozen=True)
class AgentLoad:
    """How long the sessions are."""

    history_lens: tuple[int, ...] = (20_000, 60_000, 120_000)  # tokens before the first turn
    num_sessions: int = 10
    num_turns: int = 5
    result_len: int = 500  # tokens of each tool result
    num_tools: int = 12
    output_len: int = 100


@dataclass(frozen=True)
class Turn:
    """The answers to one turn in all sessions, with the cache and without it."""

    history_len: int
    number: int  # from 1
    cached: Sequence[TimedAnswer]
    uncached: Sequence[TimedAnswer]

    def figures(self) -> dict[str, Any]:
        num_prompt = sum(answer.input_len for answer in self.cached)
        with_cache, without = (median(answer.ttft_s for answer in answers) for answers in (self.cached, self.uncached))
        return {
            "history_len": self.history_len,
            "turn": self.number,
            "mean_prompt_tokens": fmean(answer.input_len for answer in self.cached),
            "prefix_cache_hit_rate": 100 * sum(answer.num_cached for answer in self.cached) / max(1, num_prompt),
            "uncached_hit_tokens": sum(answer.num_cached for answer in self.uncached),
            "median_ttft_ms": 1e3 * with_cache,
            "median_uncached_ttft_ms": 1e3 * without,
            "speedup": without / with_cache,
        }


class Session:
    """One conversation of an agent, which grows by an answer, a tool call and a result in each turn. Lengths are in words."""

    def __init__(self, agent: AgentLoad, history_len: int, seed: str) -> None:
        self._random = random.Random(seed)
        self._agent = agent
        self._num_calls = 0
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": _say(random.Random(0), min(MESSAGE_WORDS, history_len))}
        ]
        num_words = 0
        while num_words < history_len:
            count = min(MESSAGE_WORDS, history_len - num_words)
            self.messages.append({"role": "user", "content": self._say(count)})
            num_words += count
            if num_words < history_len:  # the last message is the user's, and the first turn answers it
                count = min(MESSAGE_WORDS, history_len - num_words)
                self._call("", count)
                self.messages.append({"role": "assistant", "content": "Done."})
                num_words += count

    def _say(self, num_words: int) -> str:
        return _say(self._random, num_words)

    def _call(self, text: str, num_words: int) -> None:
        """Append an answer that calls a tool, and the tool's result."""
        self._num_calls += 1
        name = f"tool_{self._random.randrange(self._agent.num_tools)}"
        arguments = json.dumps({"query": self._say(5)})
        call = {"id": f"call_{self._num_calls}", "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": text, "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._say(num_words)})

    def take(self, answer: TimedAnswer) -> None:
        """Go on with the model's answer. The next prompt has a tool result after it."""
        self._call(answer.text, self._agent.result_len)


def _say(random_: random.Random, num_words: int) -> str:
    return " ".join(random_.choices(WORDS, k=num_words))


def make_tools(num_tools: int) -> list[dict[str, Any]]:
    """Return declarations of tools that take a text and a number."""
    random_ = random.Random(1)
    properties = {
        "query": {"type": "string", "description": _say(random_, 12)},
        "limit": {"type": "integer", "description": _say(random_, 12)},
    }
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "description": _say(random_, 40), "parameters": parameters}}
        for number in range(num_tools)
    ]


async def run_agent(load: Load, agent: AgentLoad, turns: list[Turn], report: Callable[[int], None] = lambda done: None) -> None:
    """Run all sessions. Append the turns of each history to `turns`, so that they are kept if a later one fails.

    Calls `report` with the number of finished requests.
    """
    client = Client(replace(load, is_chat=True))
    try:
        model = await client.check()
        run = _AgentRun(client, model, load, agent, await client.words_per_token(), report)
        await run.warm_up()
        for history_len in agent.history_lens:
            turns += await run.sessions(history_len)
    finally:
        await client.close()


class _AgentRun:
    """The sessions of an agent with one server."""

    def __init__(
        self, client: Client, model: str, load: Load, agent: AgentLoad, words_per_token: float, report: Callable[[int], None]
    ) -> None:
        self._client, self._model, self._load, self._report = client, model, load, report
        self._agent, self._words_per_token = (
            replace(agent, result_len=_scaled(agent.result_len, words_per_token)),
            words_per_token,
        )
        self._limit = asyncio.Semaphore(load.max_concurrency or 1)
        self._tools = make_tools(agent.num_tools)
        self._num_done = 0
        self._salt = f"agent {secrets.token_hex(8)}"

    async def warm_up(self) -> None:
        """Send a prompt that shares nothing with the others, so that no turn waits for what a server does only once."""
        session = self._session(self._agent.history_lens[0], f"{self._load.seed} warm-up")
        prompt = _salted(self._prompt(session.messages), f"{self._salt} warm-up")
        for _ in range(self._load.num_warmups):
            await self._ask(prompt)

    async def sessions(self, history_len: int) -> list[Turn]:
        """Run the sessions with a history of this length."""
        load, agent = self._load, self._agent
        seeds = [f"{load.seed} {history_len} {number}" for number in range(agent.num_sessions)]
        sessions = [self._session(history_len, seed) for seed in seeds]
        prompts: list[list[Prompt]] = []
        cached = []
        for _ in range(agent.num_turns):
            prompts.append([self._prompt(session.messages) for session in sessions])
            cached.append(await self._ask_all([_salted(prompt, self._salt) for prompt in prompts[-1]]))
            for session, answer in zip(sessions, cached[-1], strict=True):
                session.take(answer)
        turns = []
        for number, (asked, answers) in enumerate(zip(prompts, cached, strict=True), 1):
            salted = [_salted(prompt, f"{self._salt} {seed} {number}") for prompt, seed in zip(asked, seeds, strict=True)]
            turns.append(Turn(history_len, number, answers, await self._ask_all(salted)))
        return turns

    def _session(self, history_len: int, seed: str) -> Session:
        return Session(self._agent, _scaled(history_len, self._words_per_token), seed)

    def _prompt(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        return Prompt(list(messages), 0, self._agent.output_len, {"tools": self._tools})

    async def _ask_all(self, prompts: Sequence[Prompt]) -> list[TimedAnswer]:
        async def ask(prompt: Prompt) -> TimedAnswer:
            answer = await self._ask(prompt)
            self._num_done += 1
            self._report(self._num_done)
            return answer

        return list(await asyncio.gather(*map(ask, prompts)))

    async def _ask(self, prompt: Prompt) -> TimedAnswer:
        async with self._limit:
            answer = await self._client.ask(prompt, self._model)
        if answer.error:
            is_refused = answer.error.startswith("HTTP 400")
            hint = "lower --agent-history if the prompt is too long" if is_refused else "check the server's log"
            raise ConfigError(f"a request failed: {answer.error}", hint=hint)
        return answer


def _scaled(num_tokens: int, words_per_token: float) -> int:
    """Return how many words are about this many tokens."""
    return max(1, round(num_tokens * words_per_token))


def _salted(prompt: Prompt, salt: str) -> Prompt:
    return replace(prompt, fields={**prompt.fields, "cache_salt": salt})


def agent_block(turns: Sequence[Mapping[str, Any]]) -> str:
    """Format the figures of all turns as a table."""
    head = ("history", "turn", "prompt tokens", "hit rate %", "TTFT ms", "without cache ms", "speed-up")
    lines = ["".join(f"{name:>18}" for name in head)]
    for turn in turns:
        cells = (
            str(turn["history_len"]),
            str(turn["turn"]),
            f"{turn['mean_prompt_tokens']:.0f}",
            f"{turn['prefix_cache_hit_rate']:.1f}",
            f"{turn['median_ttft_ms']:.1f}",
            f"{turn['median_uncached_ttft_ms']:.1f}",
            f"{turn['speedup']:.2f}",
        )
        lines.append("".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
