"""An engine without a model, behind the same process boundary: it answers at once, with scripted tokens.

Tests of the server and measurements of the HTTP path use it. It keeps the rules that a client can see: stop tokens,
max_tokens, n, log-probabilities, cancels, the queue's bound, deadlines, and pages that are held while a sample runs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from culet.config import ScheduleConfig
from culet.errors import QueueFull
from culet.scheduler.stats import Counters, SchedulerStats
from culet.serve.process.wire import Script
from culet.types import FinishReason, Request, TokenDelta

PAGE_TOKENS = 16


@dataclass(slots=True)
class _Sample:
    """One sample of a request while it runs."""

    request: Request
    number: int
    answer: tuple[int, ...]
    num_drawn: int = 0

    def draw(self, count: int) -> tuple[tuple[int, ...], FinishReason | None]:
        """The next tokens of the answer, and how the sample ends, if it does."""
        request, drawn = self.request, []
        for _ in range(count):
            token_id = self.answer[self.num_drawn % len(self.answer)]
            self.num_drawn += 1
            drawn.append(token_id)
            if token_id in request.stop_token_ids:
                return tuple(drawn), FinishReason.STOP
            if self.num_drawn >= request.max_tokens:
                return tuple(drawn), FinishReason.LENGTH
        return tuple(drawn), None

    @property
    def num_pages(self) -> int:
        return math.ceil((len(self.request.prompt_token_ids) + self.num_drawn) / PAGE_TOKENS)


class FakeEngine:
    """Answers from a script."""

    def __init__(self, script: Script, schedule: ScheduleConfig) -> None:
        self._script, self._schedule = script, schedule
        self._running: dict[tuple[str, int], _Sample] = {}
        self._waiting: deque[_Sample] = deque()
        self._deltas: list[TokenDelta] = []
        self._counters = Counters()
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._deltas)

    def add(self, request: Request) -> None:
        """Queue all samples of a request."""
        if len(self._waiting) >= self._schedule.max_queue_len:
            raise QueueFull(f"{len(self._waiting)} sequences wait already, the queue's bound", hint="try again later")
        answers = self._script.answers
        answer = answers[self._num_requests % len(answers)]
        self._num_requests += 1
        self._waiting.extend(_Sample(request, number, answer) for number in range(request.n))

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End a request, or one sample of it."""
        for one in [*self._running.values(), *self._waiting]:
            if one.request.request_id == request_id and sample in (None, one.number):
                self._deltas.append(TokenDelta(request_id, one.number, (), finish_reason=reason))
                self._end(one, reason)

    def step(self) -> list[TokenDelta]:
        """One step: the next tokens of every running sample."""
        if self._script.step_s:
            time.sleep(self._script.step_s)
        for one in [*self._running.values(), *self._waiting]:
            if one.request.deadline is not None and one.request.deadline <= time.monotonic():
                self.cancel(one.request.request_id, one.number, FinishReason.TIMEOUT)
        while self._waiting and len(self._running) < self._schedule.max_num_seqs:
            one = self._waiting.popleft()
            self._running[one.request.request_id, one.number] = one
        deltas, self._deltas = self._deltas, []
        for one in list(self._running.values()):
            deltas.append(self._draw(one))
        self._counters.steps += 1
        return deltas

    def _draw(self, one: _Sample) -> TokenDelta:
        request, is_first = one.request, one.num_drawn == 0
        token_ids, reason = one.draw(self._script.tokens_per_step)
        if reason is not None:
            self._end(one, reason)
        sampling = request.sampling
        scores: tuple[dict[int, float], ...] = ()
        if is_first and one.number == 0 and sampling.prompt_logprobs is not None:
            scores = tuple(_scores(token_id, sampling.prompt_logprobs) for token_id in request.prompt_token_ids[1:])
        return TokenDelta(
            request_id=request.request_id,
            sample=one.number,
            token_ids=token_ids,
            logprobs=() if sampling.logprobs is None else tuple(_scores(each, sampling.logprobs) for each in token_ids),
            prompt_logprobs=scores,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason is FinishReason.STOP else None,
        )

    def _end(self, one: _Sample, reason: FinishReason) -> None:
        if self._running.pop((one.request.request_id, one.number), None) is None:
            self._waiting.remove(one)
        self._counters.finished += 1
        self._counters.cancelled += reason is FinishReason.CANCEL
        self._counters.timed_out += reason is FinishReason.TIMEOUT

    def stats(self) -> SchedulerStats:
        held = sum(one.num_pages for one in self._running.values())
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self._script.num_pages,
            num_free_pages=self._script.num_pages - held,
            num_resume_point_pages=0,
            num_held_pages={"fake": held},
            num_resume_points=0,
            counters=self._counters,
        )


def _scores(token_id: int, count: int) -> dict[int, float]:
    """Log-probabilities of a chosen token and the `count` likeliest, of which it is the first."""
    return {token_id: -0.5} | {(token_id + 1 + rank) % 256: -1.5 - rank for rank in range(count - 1)}
