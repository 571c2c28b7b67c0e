"""Send requests to a server with OpenAI's API, stream the answers and time every event."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from culet.bench.serve.events import CONNECT_TIMEOUT_S, EventClient
from culet.errors import ConfigError

# Plain words that are one token in most tokenizers.
WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
level office door health person art war history
""".split()  # noqa: SIM905 (a list of quoted words would take four times the lines)
_POOL_WORDS = 256  # fits any context length
_COUNTERS = {
    "generated_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prefix_cache_queries_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
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
    num_chats: int = 0  # chats that run all the time, besides the prompts
    chat_len: int = 100  # tokens of a chat's prompt
    chat_output_len: int = 1000  # tokens of its answer. Then it begins again.
    num_warmups: int = 1
    ignore_eos: bool = True
    temperature: float | None = 0.0
    seed: int = 0
    api_key: str = ""
    timeout_s: float = 3600.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request


@dataclass
class TimedAnswer:
    """A request as its client saw it."""

    input_len: int
    error: str = ""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_len: int = 0
    started_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_cached: int = 0  # prompt tokens that the server found in its prefix cache, if it says so
    text: str = ""  # only of chats

    @property
    def is_good(self) -> bool:
        return not self.error

    @property
    def per_token_s(self) -> float:
        """Mean time per token after the first."""
        return (self.latency_s - self.ttft_s) / max(1, self.output_len - 1)


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request: token ids if the server accepts them, text, or the messages of a chat."""

    content: str | list[int] | list[dict[str, Any]]
    input_len: int
    output_len: int
    fields: Mapping[str, Any] = field(default_factory=dict)  # further fields of this request


class Client:
    """Sends requests to a server."""

    def __init__(self, load: Load) -> None:
        self.load = load
        headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
        timeout = httpx.Timeout(load.timeout_s, connect=CONNECT_TIMEOUT_S)
        self.http = httpx.AsyncClient(base_url=load.base_url.rstrip("/"), headers=headers, timeout=timeout)
        self._events = EventClient(load.base_url, headers, load.timeout_s)

    async def check(self) -> str:
        """Return the model to request. Raise if the server does not answer."""
        try:
            answer = await self.http.get("/v1/models")
            answer.raise_for_status()
            names = [entry["id"] for entry in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            is_refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401
            raise ConfigError(
                f"{self.load.base_url}: GET /v1/models failed: {error or type(error).__name__}",
                hint="pass the server's API key with --api-key or CULET_API_KEY"
                if is_refused
                else "start a server, or pass the address of one with --base-url",
            ) from error
        if self.load.model and self.load.model not in names:
            raise ConfigError(f"model: the server does not serve {self.load.model!r}", hint=f"use one of: {', '.join(names)}")
        return self.load.model or names[0]

    async def pool(self) -> list[int]:
        """Return the token ids of plain words in the server's vocabulary, or [] if it has no /tokenize."""
        words = random.Random(0).choices(WORDS, k=_POOL_WORDS)
        try:
            answer = await self.http.post("/tokenize", json={"prompt": " ".join(words), "add_special_tokens": False})
            answer.raise_for_status()
            return [int(token_id) for token_id in answer.json()["tokens"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []

    async def words_per_token(self) -> float:
        """Return how many plain words are one token, or 1 if the server has no /tokenize."""
        num_tokens = len(await self.pool())
        return _POOL_WORDS / num_tokens if num_tokens else 1.0

    async def counters(self) -> dict[str, float]:
        """Return the counters of output, prefix reuse and drafting since the server started, as far as it has them."""
        try:
            text = (await self.http.get("/metrics")).text
        except httpx.HTTPError:
            return {}
        counters: dict[str, float] = {}
        for line in text.splitlines():
            for key, name in _COUNTERS.items():
                if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
                    counters[key] = counters.get(key, 0.0) + float(line.rsplit(" ", 1)[1])
        return counters

    async def ask(self, prompt: Prompt, model: str, answer: TimedAnswer | None = None) -> TimedAnswer:
        """Send a request and time its events, in `answer` if it is given, which then shows how far the request is."""
        load = self.load
        answer = TimedAnswer(prompt.input_len) if answer is None else answer
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        body["max_tokens"] = prompt.output_len
        if load.temperature is not None:
            body["temperature"] = load.temperature
        if load.ignore_eos:
            body["ignore_eos"] = True
        if load.is_chat:
            content = prompt.content
            is_messages = isinstance(content, list) and bool(content) and isinstance(content[0], dict)
            body["messages"] = content if is_messages else [{"role": "user", "content": content}]
        else:
            body["prompt"] = prompt.content
        path = "/v1/chat/completions" if load.is_chat else "/v1/completions"
        request = self._events.prepare(path, {**body, **load.extra, **prompt.fields})
        reader = _Reader(answer)
        answer.started_at = time.perf_counter()
        try:
            status, text = await self._events.post(request, reader.take)
        except (OSError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            return answer
        if status != 200:
            answer.error = f"HTTP {status}: {text.decode(errors='replace')[:300]}"
        else:
            reader.finish()
        return answer

    async def close(self) -> None:
        self._events.close()
        await self.http.aclose()


class _Reader:
    """Reads the events of a stream into an answer."""

    def __init__(self, answer: TimedAnswer) -> None:
        self._answer = answer
        self._usage: dict[str, Any] = {}

    def take(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self._answer
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            answer.error = answer.error or f"an event is not JSON: {data[:100].decode(errors='replace')}"
            return
        if event.get("error"):
            answer.error = answer.error or str(event["error"])[:300]
            return
        self._usage = event.get("usage") or self._usage
        if not _has_text(event):
            return
        if not answer.token_times:
            answer.ttft_s = now - answer.started_at
        else:
            answer.gaps_s.append(now - answer.token_times[-1])
        answer.token_times.append(now)
        answer.text += _text_of(event)

    def finish(self) -> None:
        """Fill in the lengths and the latency once the stream has ended."""
        answer, usage = self._answer, self._usage
        if answer.error:
            return
        answer.output_len = int(usage.get("completion_tokens") or len(answer.token_times))
        answer.input_len = int(usage.get("prompt_tokens") or answer.input_len)
        answer.num_cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if answer.token_times:
            answer.latency_s = answer.token_times[-1] - answer.started_at
        elif answer.output_len:
            answer.latency_s = answer.ttft_s = time.perf_counter() - answer.started_at
        else:
            answer.error = "the answer was empty"


def _has_text(event: Mapping[str, Any]) -> bool:
    """Return whether an event has a part of the answer."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            return True
        if delta.get("tool_calls"):
            return True
    return False


def _text_of(event: Mapping[str, Any]) -> str:
    """Return the text of a chat's event."""
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())
