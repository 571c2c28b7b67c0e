"""One request on its way back: deltas of tokens become events of thoughts, content and tool calls, sample by sample.

Chat, completions and the other APIs all read their answers here, whether they stream or not, so that a stop string, a tool
call or a count of tokens is the same everywhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from culet.errors import BadRequest, CuletError, InternalError, QueueFull, TimedOut
from culet.log import logger
from culet.serve.process.client import Stream
from culet.serve.process.wire import Delta, Logprobs
from culet.serve.service import Finished, Service
from culet.text.output_events import ContentPiece, Event, Output, ToolCallEnd
from culet.text.stops import StopMatcher
from culet.text.tokenizer import IncrementalDecoder, Tokenizer
from culet.types import GRAMMAR_FAULT, FinishReason, SamplingParams


class Reader(Protocol):
    """Tokens of one sample in, events out: `channels.OutputReader`, or `TextReader` for plain text."""

    @property
    def has_ended(self) -> bool: ...
    @property
    def in_reasoning(self) -> bool: ...
    def push(self, token_ids: Iterable[int]) -> list[Event]: ...
    def finish(self) -> list[Event]: ...
    def output(self) -> Output: ...


class TextReader:
    """Reads plain text: no thoughts, no calls, and special tokens leave no trace."""

    in_reasoning = False

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), end_ids: Iterable[int] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopMatcher(stop)
        self._end_ids = frozenset(end_ids)
        self._pieces: list[str] = []
        self.has_ended = False

    def push(self, token_ids: Iterable[int]) -> list[Event]:
        """Take the next tokens; the text that is certain by them."""
        pieces = []
        for token_id in token_ids:
            if self.has_ended:
                break
            if token_id in self._end_ids:
                pieces.append(self._flush())
                self.has_ended = True
            else:
                text, self.has_ended = self._stops.push(self._decoder.push((token_id,)))
                pieces.append(text)
        return self._events("".join(pieces))

    def finish(self) -> list[Event]:
        """The output is over: what was held back."""
        if self.has_ended:
            return []
        text = self._flush()
        self.has_ended = self._stops.matched is not None
        return self._events(text)

    def _flush(self) -> str:
        text, is_hit = self._stops.push(self._decoder.flush())
        return text if is_hit else text + self._stops.flush()

    def _events(self, text: str) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [ContentPiece(text)]

    def output(self) -> Output:
        """All that was read."""
        return Output("".join(self._pieces), "", (), 0, 0, self.has_ended, self._stops.matched)


@dataclass(slots=True)
class Piece:
    """What one delta brought to one sample."""

    sample: int
    events: list[Event]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[tuple[int, Logprobs]] = ()  # (token, scores) of each token of the answer itself
    finish_reason: str | None = None  # stop, length or tool_calls


@dataclass(slots=True)
class Sample:
    """One sample as far as it has come."""

    reader: Reader
    num_tokens: int = 0
    num_calls: int = 0
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    finish_reason: str | None = None
    last_at: float = 0.0


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    num_prompt: int
    num_cached: int
    num_generated: int
    num_reasoning: int
    num_accepted_drafts: int
    num_rejected_drafts: int


class Generation:
    """Submits a request and reads its samples. Use it as `async with`: whoever leaves early cancels.

    `make_reader(sample)` gives each sample its reader. With `one_call` a sample ends with its first tool call.
    """

    def __init__(
        self,
        service: Service,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        make_reader: Callable[[], Reader],
        *,
        endpoint: str,
        request_id: str,
        priority: int = 0,
        one_call: bool = False,
    ) -> None:
        self._service, self._params = service, params
        self._one_call = one_call
        self.samples = [Sample(make_reader()) for _ in range(params.n)]
        self.prompt_token_ids = prompt_token_ids
        self.num_cached = self.num_accepted_drafts = self.num_rejected_drafts = 0
        self.prompt_logprobs: list[Logprobs] = []
        # Plain text is scored token by token; of a chat's answer the marks around thoughts and calls are left out.
        is_plain = isinstance(self.samples[0].reader, TextReader)
        self._unscored = frozenset() if is_plain else service.tokenizer.special_ids
        self._finished = Finished(endpoint, request_id, num_prompt_tokens=len(prompt_token_ids), n=params.n)
        self._stream: Stream = service.submit(prompt_token_ids, params, priority=priority)
        self._finished.max_tokens = self._stream.request.max_tokens
        service.num_samples += params.n

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Cancel what still runs, and tell what became of the request."""
        stream, finished = self._stream, self._finished
        stream.close()
        self._service.num_samples -= self._params.n
        usage = self.usage()
        finished.num_cached_tokens, finished.num_reasoning_tokens = usage.num_cached, usage.num_reasoning
        finished.num_generated_tokens = usage.num_generated
        if isinstance(error, CuletError):
            finished.error = type(error).__name__
        else:
            finished.finish_reasons = tuple(sample.finish_reason or "cancel" for sample in self.samples)
        finished.total_s = time.monotonic() - stream.submitted_at
        if stream.first_token_at is not None:
            finished.first_token_s = stream.first_token_at - stream.submitted_at
        self._service.tell(finished)

    def cancel(self) -> None:
        """The client is gone: end the request within the engine's next step."""
        self._stream.cancel()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What came since the last time, until every sample has ended."""
        limit_s = self._service.settings.queue_timeout
        try:
            async with asyncio.timeout(limit_s):
                deltas = await anext(self._stream, None)
        except TimeoutError:
            raise QueueFull(f"no first token after {limit_s:g} s in the queue", hint="try again later") from None
        if deltas is not None:
            yield self.take(deltas)
        async for deltas in self._stream:
            yield self.take(deltas)

    def take(self, deltas: Sequence[Delta]) -> list[Piece]:
        """Deltas as pieces."""
        now = time.monotonic()
        pieces = []
        for delta in deltas:
            sample = self.samples[delta.sample]
            if sample.finish_reason is None:
                if sample.last_at:
                    self._finished.gaps_s.append(now - sample.last_at)
                sample.last_at = now
                pieces.append(self._take(sample, delta))
        return pieces

    async def run(self) -> None:
        """Wait until every sample has ended."""
        async for _ in self.pieces():
            pass

    def usage(self) -> Usage:
        """Tokens so far."""
        outputs = [sample.reader.output() for sample in self.samples]
        return Usage(
            num_prompt=len(self.prompt_token_ids),
            num_cached=self.num_cached,
            num_generated=sum(sample.num_tokens for sample in self.samples),
            num_reasoning=sum(output.num_reasoning_tokens for output in outputs),
            num_accepted_drafts=self.num_accepted_drafts,
            num_rejected_drafts=self.num_rejected_drafts,
        )

    def _take(self, sample: Sample, delta: Delta) -> Piece:
        if delta.num_cached_tokens:
            self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        self.num_accepted_drafts += delta.num_accepted_drafts
        self.num_rejected_drafts += delta.num_rejected_drafts
        if delta.queue_s:
            self._finished.queue_s = delta.queue_s
        if delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs
        events: list[Event] = []
        piece_tokens, scored = delta.token_ids, []
        reader = sample.reader
        for index, token_id in enumerate(delta.token_ids):
            was_reasoning = delta.logprobs and reader.in_reasoning
            events = events + reader.push((token_id,)) if events else reader.push((token_id,))
            sample.num_tokens += 1
            if delta.logprobs and not (was_reasoning or reader.in_reasoning or token_id in self._unscored):
                scored.append((token_id, delta.logprobs[index]))
            if reader.has_ended or (self._one_call and self._has_called(sample, events)):
                piece_tokens = delta.token_ids[: index + 1]
                break
        finish_reason = self._reason(sample, delta)
        if finish_reason is not None:
            events = events + reader.finish()
            if finish_reason == "stop" and reader.output().tool_calls:
                finish_reason = "tool_calls"
            sample.finish_reason = finish_reason
        sample.logprobs += scored
        return Piece(delta.sample, events, piece_tokens, scored, finish_reason)

    def _has_called(self, sample: Sample, events: list[Event]) -> bool:
        """Whether a call has just been completed."""
        sample.num_calls += sum(isinstance(event, ToolCallEnd) and event.complete for event in events[-1:])
        return sample.num_calls > 0

    def _reason(self, sample: Sample, delta: Delta) -> str | None:
        """Why the sample has ended, if it has; a failure raises."""
        reason = delta.finish_reason
        if sample.reader.has_ended or sample.num_calls:
            if reason is None:  # a stop string, or a mark that this model's settings do not count among the stop tokens
                self._stream.cancel(delta.sample, FinishReason.STOP)
            return "stop"
        if reason is FinishReason.TIMEOUT:
            raise TimedOut(f"the request took longer than {self._service.settings.request_timeout:g} s")
        if reason is FinishReason.ERROR and delta.error.startswith(GRAMMAR_FAULT):
            raise BadRequest(delta.error)
        if reason is FinishReason.ERROR:
            logger.error("request %s failed in the engine: %s", self._finished.request_id, delta.error)
            raise InternalError("the engine failed while it computed this request")
        return None if reason is None else reason.value
