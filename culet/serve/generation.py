"""Submit one request from the web process and turn its TokenDeltas into OutputDeltas.

All APIs use this module, with and without streaming.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from culet.errors import BadRequest, CuletError, InternalError, QueueFull, TimedOut
from culet.log import logger
from culet.media.prompt import ExpandedPrompt
from culet.serve.keys import Caller
from culet.serve.process.client import TokenStream
from culet.serve.service import FinishedRequest, Service, TokenGaps
from culet.text.output import MakeOutput, OutputDelta, SampleOutput
from culet.types import GRAMMAR_FAULT, FinishReason, Logprobs, SamplingParams, TokenDelta

_BATCH = 256  # deltas that are read at a time, in a few milliseconds


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a request, summed over all samples."""

    num_prompt: int
    num_cached: int
    num_generated: int
    num_reasoning: int
    num_accepted_drafts: int
    num_rejected_drafts: int
    is_thought_out: bool  # the thoughts of a sample have reached their budget


@dataclass(frozen=True)
class Origin:
    """Who sent a request, and what that means for how the engine treats it."""

    request_id: str  # the id in the log
    caller: Caller
    priority: int = 0
    cache_salt: str = ""  # with the part that keeps keys apart


class Generation:
    """Submits a request and reads its samples. Use it with `async with`. Leaving early cancels the request.

    `make_output` creates the output of a sample (see `culet.text.output`).
    """

    def __init__(
        self,
        service: Service,
        prompt: Sequence[int] | ExpandedPrompt,
        params: SamplingParams,
        make_output: MakeOutput,
        *,
        endpoint: str,
        origin: Origin,
    ) -> None:
        if not isinstance(prompt, ExpandedPrompt):
            prompt = ExpandedPrompt(prompt, (), ())
        self._service, self._caller = service, origin.caller
        self.prompt_token_ids = prompt.token_ids
        self.num_cached = 0
        self._prompt_logprobs: list[Logprobs] = []
        self._finished = FinishedRequest(
            endpoint, origin.request_id, key=origin.caller.name, num_prompt_tokens=len(prompt.token_ids), n=params.n
        )
        self._stream: TokenStream = service.submit(
            prompt.token_ids,
            params,
            origin.caller,
            priority=origin.priority,
            cache_salt=origin.cache_salt,
            media=prompt.spans,
            items=prompt.items,
        )
        self._num_starts = 0  # as of the last deltas that were read
        self._make_sample = partial(make_output, self._stream.request, params)
        self.samples = [self._make_sample() for _ in range(params.n)]
        self._finished.max_tokens = self._stream.request.max_tokens
        service.num_samples += params.n

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Cancel samples that are still running and report the outcome of the request."""
        stream, finished = self._stream, self._finished
        stream.close()
        self._service.num_samples -= len(self.samples)
        counts = self.token_counts()
        self._caller.end(len(self.samples), counts.num_generated)
        finished.num_cached_tokens, finished.num_reasoning_tokens = counts.num_cached, counts.num_reasoning
        finished.num_generated_tokens = counts.num_generated
        if isinstance(error, CuletError):
            finished.error = type(error).__name__
        else:
            finished.finish_reasons = tuple(sample.finish_reason or FinishReason.CANCEL.value for sample in self.samples)
        finished.total_s = time.monotonic() - stream.submitted_at
        finished.max_generated_tokens = max(len(sample.token_ids) for sample in self.samples)
        if stream.first_token_at is not None:
            begins = [sample.first_token_at for sample in self.samples if sample.first_token_at]
            finished.decode_s = max(sample.last_token_at for sample in self.samples) - min(begins, default=0.0)
            finished.first_token_s = stream.first_token_at - stream.submitted_at
        self._service.report_finished(finished)

    def cancel(self) -> None:
        """End the request before the engine's next step. Call when the client is gone."""
        self._stream.cancel()

    async def deltas(self) -> AsyncIterator[list[OutputDelta]]:
        """Yield the new deltas of all samples until every sample has ended."""
        limit_s = self._service.settings.queue_timeout
        try:
            async with asyncio.timeout(limit_s):
                deltas = await anext(self._stream, None)
        except TimeoutError:
            raise QueueFull(
                f"the request waited {limit_s:g} s in the queue and produced no token", hint="try again later"
            ) from None
        while deltas is not None:
            num_starts = self.num_starts
            for begin in range(0, len(deltas), _BATCH):
                if begin:
                    await asyncio.sleep(0)  # many have arrived while the caller was busy, so let others run in between
                if self.num_starts == num_starts:  # otherwise these are from an engine that died
                    yield self._read(deltas[begin : begin + _BATCH])
            deltas = await anext(self._stream, None)

    @property
    def num_starts(self) -> int:
        """How often the request has started over because an engine died. What was read before then no longer counts."""
        return self._stream.num_starts

    def mark_seen(self) -> None:
        """Note that the client is about to see a part of the answer. From now on, the request fails if the engine dies."""
        self._stream.is_seen = True

    def take_prompt_logprobs(self) -> list[Logprobs]:
        """Return the log-probabilities of the prompt that have arrived since the last call."""
        taken, self._prompt_logprobs = self._prompt_logprobs, []
        return taken

    def token_counts(self) -> TokenCounts:
        """Return the token counts so far."""
        return TokenCounts(
            num_prompt=len(self.prompt_token_ids),
            num_cached=self.num_cached,
            num_generated=sum(len(sample.token_ids) for sample in self.samples),
            num_reasoning=sum(sample.output().num_thought_tokens for sample in self.samples),
            num_accepted_drafts=sum(sample.num_accepted_drafts for sample in self.samples),
            num_rejected_drafts=sum(sample.num_rejected_drafts for sample in self.samples),
            is_thought_out=any(sample.is_thought_out for sample in self.samples),
        )

    @property
    def queue_s(self) -> float:
        """The time that the request spent in the engine's queue."""
        return self._finished.queue_s

    def _read(self, deltas: Sequence[TokenDelta]) -> list[OutputDelta]:
        if self.num_starts != self._num_starts:
            self._start_over()
        outputs = []
        for delta in deltas:
            sample = self.samples[delta.sample]
            if sample.finish_reason is None:
                outputs.append(self._read_one(sample, delta))
        return outputs

    def _start_over(self) -> None:
        """Forget everything that was read from an engine that died."""
        self._num_starts = self.num_starts
        self.samples = [self._make_sample() for _ in self.samples]
        self._prompt_logprobs, self.num_cached, self._finished.gaps = [], 0, TokenGaps()

    def _read_one(self, sample: SampleOutput, delta: TokenDelta) -> OutputDelta:
        if delta.num_cached_tokens:
            self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        if delta.queue_s:
            self._finished.queue_s = delta.queue_s
        if delta.prompt_logprobs:
            self._prompt_logprobs += delta.prompt_logprobs
        before = sample.last_token_at
        output = sample.push(delta)
        if delta.logprobs:  # the deltas carry them, and a long answer's would fill the memory
            sample.logprobs.clear()
            sample.visible_logprobs.clear()
        if before and delta.token_ids:
            self._finished.gaps.add(sample.last_token_at - before)
        if output.finish_reason is not None:
            self._check_end(output.finish_reason, delta)
        return output

    def _check_end(self, finish_reason: str, delta: TokenDelta) -> None:
        """Raise if the sample failed. End it in the engine if the engine has not ended it."""
        if finish_reason == FinishReason.TIMEOUT:
            raise TimedOut(f"the request took longer than {self._service.settings.request_timeout:g} s")
        if finish_reason == FinishReason.ERROR:
            if delta.error.startswith(GRAMMAR_FAULT):
                grammar = self._stream.request.grammar
                raise BadRequest(f"{grammar.field if grammar else 'tools'}: {delta.error.removeprefix(GRAMMAR_FAULT)}")
            logger.error("request %s failed in the engine: %s", self._finished.request_id, delta.error)
            raise InternalError("the engine failed while processing this request")
        if delta.finish_reason is None:  # a stop string, a tool call, or an end token that is not among the stop tokens
            self._stream.cancel(delta.sample, FinishReason.STOP)
