"""`culet bench serve`: load-test any server with OpenAI's API and measure what its clients see.

Requests arrive in a Poisson process (or a burstier one), or all at once. The number in flight can be limited. Each request is
streamed, and every event is timed. The figures, their names and the printed block are those of `vllm bench serve`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

import httpx

from culet.errors import ConfigError

# Plain words that are one token in most tokenizers.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
level office door health person art war history
""".split()  # noqa: SIM905 (a list of quoted words would take four times the lines)
_POOL_WORDS = 256  # fits any context length
_SPECULATION = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class Load:
    """The requests to send, and when."""

    base_url: str
    model: str
    is_chat: bool = False
    num_prompts: int = 200
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0  # lengths are drawn between (1 - r) and (1 + r) times these
    prefix_len: int = 0  # tokens that all prompts share at the start
    request_rate: float = float("inf")  # per second
    burstiness: float = 1.0  # 1 is Poisson; lower is burstier
    max_concurrency: int | None = None
    num_warmups: int = 1
    ignore_eos: bool = True
    temperature: float | None = 0.0
    seed: int = 0
    api_key: str = ""
    timeout_s: float = 3600.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request


@dataclass
class Answer:
    """A request as its client saw it."""

    input_len: int
    error: str = ""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_len: int = 0
    started_at: float = 0.0
    token_times: list[float] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.error

    @property
    def per_token_s(self) -> float:
        """Mean time per token after the first."""
        return (self.latency_s - self.ttft_s) / max(1, self.output_len - 1)


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request. It is a list of token ids if the server accepts them, otherwise text."""

    content: str | list[int]
    input_len: int
    output_len: int


class Client:
    """Sends requests to a server."""

    def __init__(self, load: Load) -> None:
        self.load = load
        headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.max_concurrency or 4096)
        self.http = httpx.AsyncClient(
            base_url=load.base_url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(load.timeout_s, connect=30),
            limits=limits,
        )

    async def check(self) -> str:
        """Return the model to request. Raise if the server does not answer."""
        try:
            answer = await self.http.get("/v1/models")
            answer.raise_for_status()
            names = [entry["id"] for entry in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.load.base_url}: GET /v1/models failed: {error or type(error).__name__}",
                hint="start a server, or pass the address of one with --base-url",
            ) from error
        if self.load.model and self.load.model not in names:
            raise ConfigError(f"model: the server does not serve {self.load.model!r}", hint=f"use one of: {', '.join(names)}")
        return self.load.model or names[0]

    async def pool(self) -> list[int]:
        """Return the token ids of plain words in the server's vocabulary, or [] if it has no /tokenize."""
        words = random.Random(0).choices(_WORDS, k=_POOL_WORDS)
        try:
            answer = await self.http.post("/tokenize", json={"prompt": " ".join(words), "add_special_tokens": False})
            answer.raise_for_status()
            return [int(token_id) for token_id in answer.json()["tokens"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []

    async def counters(self) -> dict[str, float]:
        """Return the drafting counters since the server started, or {} if it has none."""
        try:
            text = (await self.http.get("/metrics")).text
        except httpx.HTTPError:
            return {}
        counters: dict[str, float] = {}
        for line in text.splitlines():
            for key, name in _SPECULATION.items():
                if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
                    counters[key] = counters.get(key, 0.0) + float(line.rsplit(" ", 1)[1])
        return counters

    async def ask(self, prompt: Prompt, model: str) -> Answer:
        """Send a request and time its events."""
        load = self.load
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        body["max_tokens"] = prompt.output_len
        if load.temperature is not None:
            body["temperature"] = load.temperature
        if load.ignore_eos:
            body["ignore_eos"] = True
        if load.is_chat:
            body["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            body["prompt"] = prompt.content
        path = "/v1/chat/completions" if load.is_chat else "/v1/completions"
        answer = Answer(prompt.input_len, started_at=time.perf_counter())
        try:
            async with self.http.stream("POST", path, json={**body, **load.extra}) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"HTTP {response.status_code}: {text[:300]}"
                    return answer
                await self._read(response, answer)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def _read(self, response: httpx.Response, answer: Answer) -> None:
        last = answer.started_at
        usage: dict[str, Any] = {}
        async for event in _events(response):
            if event.get("error"):
                answer.error = str(event["error"])[:300]
                return
            usage = event.get("usage") or usage
            if not _has_text(event):
                continue
            now = time.perf_counter()
            if not answer.token_times:
                answer.ttft_s = now - answer.started_at
            else:
                answer.gaps_s.append(now - last)
            answer.token_times.append(now)
            last = now
        answer.latency_s = last - answer.started_at
        answer.output_len = int(usage.get("completion_tokens") or len(answer.token_times))
        answer.input_len = int(usage.get("prompt_tokens") or answer.input_len)
        if not answer.token_times and not answer.output_len:
            answer.error = "the answer was empty"
        elif not answer.token_times:
            answer.latency_s = answer.ttft_s = time.perf_counter() - answer.started_at

    async def close(self) -> None:
        await self.http.aclose()


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of each server-sent event as it arrives."""
    rest = b""
    async for piece in response.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                yield json.loads(line[6:])


def _has_text(event: Mapping[str, Any]) -> bool:
    """Return whether an event has a part of the answer."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            return True
        if delta.get("tool_calls"):
            return True
    return False


def make_prompts(load: Load, pool: Sequence[int]) -> list[Prompt]:
    """Make prompts of random lengths. Equal seeds give equal prompts."""
    random_ = random.Random(load.seed)
    low, high = 1 - load.range_ratio, 1 + load.range_ratio

    def length(mean: int) -> int:
        return max(1, random_.randint(int(mean * low), int(mean * high)))

    in_words = load.is_chat or not pool
    source: Sequence[Any] = _WORDS if in_words else pool
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
    answers: Sequence[Answer]
    duration_s: float
    speculation: Mapping[str, float]  # drafting counters for the run; empty if the server has none

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.is_good]


async def run(load: Load, report: Callable[[int], None] = lambda done: None) -> Outcome:
    """Send all requests and wait for the answers. Calls `report` with the number of finished requests."""
    client = Client(load)
    try:
        model = await client.check()
        prompts = make_prompts(load, [] if load.is_chat else await client.pool())
        for _ in range(load.num_warmups):
            first = await client.ask(prompts[0], model)
            if first.error:
                raise ConfigError(f"the first request failed: {first.error}", hint="check the server's log")
        before = await client.counters()
        limit = asyncio.Semaphore(load.max_concurrency or len(prompts))
        num_done = 0
        began = time.perf_counter()

        async def ask_at(prompt: Prompt, at: float) -> Answer:
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
    finally:
        await client.close()
    return Outcome(load, model, answers, duration, {key: after[key] - before.get(key, 0.0) for key in after})


# Figures


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` percent of the values lie, interpolated."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


SERIES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def summarise(outcome: Outcome, percentiles: Sequence[float] = (99.0,)) -> dict[str, Any]:
    """Return every figure under its name in `vllm bench serve`."""
    good, load = outcome.good, outcome.load
    num_input, num_output = sum(answer.input_len for answer in good), sum(answer.output_len for answer in good)
    seconds = outcome.duration_s
    figures: dict[str, Any] = {
        "backend": "openai-chat" if load.is_chat else "openai",
        "model_id": outcome.model,
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if load.request_rate == float("inf") else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcome.answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        **dict(zip(("max_output_tokens_per_s", "max_concurrent_requests"), _peaks(good), strict=True)),
    }
    series = {
        "ttft": [answer.ttft_s for answer in good],
        "tpot": [answer.per_token_s for answer in good if answer.output_len > 1],
        "itl": [gap for answer in good for gap in answer.gaps_s],
        "e2el": [answer.latency_s for answer in good],
    }
    for name, values in series.items():
        figures |= {
            f"mean_{name}_ms": fmean(values) * 1e3 if values else 0.0,
            f"median_{name}_ms": median(values) * 1e3 if values else 0.0,
            f"std_{name}_ms": pstdev(values) * 1e3 if values else 0.0,
        }
        for share in percentiles:
            figures[f"p{share:g}_{name}_ms"] = percentile(values, share) * 1e3 if values else 0.0
    if outcome.speculation.get("drafts"):
        rounds, drafted, accepted = (outcome.speculation[key] for key in ("drafts", "draft_tokens", "accepted_tokens"))
        figures |= {
            "spec_decode_acceptance_rate": 100 * accepted / max(1.0, drafted),
            "spec_decode_acceptance_length": 1 + accepted / rounds,
            "spec_decode_num_drafts": int(rounds),
            "spec_decode_draft_tokens": int(drafted),
            "spec_decode_accepted_tokens": int(accepted),
        }
    return figures


def _peaks(good: Sequence[Answer]) -> tuple[float, int]:
    """Return (most events in a second, most requests in flight)."""
    if not good:
        return 0.0, 0
    begin = min(answer.started_at for answer in good)
    per_second: dict[int, int] = {}
    moves: list[tuple[float, int]] = []
    for answer in good:
        moves += [(answer.started_at, 1), (answer.started_at + answer.latency_s, -1)]
        for at in answer.token_times:
            per_second[int(at - begin)] = per_second.get(int(at - begin), 0) + 1
    most = now = 0
    for _, change in sorted(moves):
        now += change
        most = max(most, now)
    return float(max(per_second.values(), default=0)), most


def block(figures: Mapping[str, Any], percentiles: Sequence[float] = (99.0,)) -> str:
    """Format the figures like `vllm bench serve`."""

    def line(name: str, value: float | int | str) -> str:
        return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"

    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += [line("Successful requests:", figures["completed"]), line("Failed requests:", figures["failed"])]
    if figures["max_concurrency"] is not None:
        lines.append(line("Maximum request concurrency:", figures["max_concurrency"]))
    if figures["request_rate"] != "inf":
        lines.append(line("Request rate configured (RPS):", float(figures["request_rate"])))
    lines += [
        line("Benchmark duration (s):", figures["duration"]),
        line("Total input tokens:", figures["total_input_tokens"]),
        line("Total generated tokens:", figures["total_output_tokens"]),
        line("Request throughput (req/s):", figures["request_throughput"]),
        line("Output token throughput (tok/s):", figures["output_throughput"]),
        line("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        line("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        line("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    for name, (title, short) in SERIES.items():
        lines.append(f"{title:-^50}")
        lines += [line(f"Mean {short} (ms):", figures[f"mean_{name}_ms"])]
        lines += [line(f"Median {short} (ms):", figures[f"median_{name}_ms"])]
        lines += [line(f"P{share:g} {short} (ms):", figures[f"p{share:g}_{name}_ms"]) for share in percentiles]
    if "spec_decode_num_drafts" in figures:
        lines.append(f"{'Speculative Decoding':-^50}")
        lines += [
            line("Acceptance rate (%):", figures["spec_decode_acceptance_rate"]),
            line("Acceptance length:", figures["spec_decode_acceptance_length"]),
            line("Drafts:", figures["spec_decode_num_drafts"]),
            line("Draft tokens:", figures["spec_decode_draft_tokens"]),
            line("Accepted tokens:", figures["spec_decode_accepted_tokens"]),
        ]
    return "\n".join([*lines, "=" * 50])


def details(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of every answer, for further analysis."""
    return {
        "input_lens": [answer.input_len for answer in outcome.answers],
        "output_lens": [answer.output_len for answer in outcome.answers],
        "ttfts": [answer.ttft_s for answer in outcome.answers],
        "itls": [answer.gaps_s for answer in outcome.answers],
        "errors": [answer.error for answer in outcome.answers],
    }
