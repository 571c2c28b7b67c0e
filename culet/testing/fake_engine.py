"""An engine without a model that answers immediately with scripted tokens, behind the same process boundary.

Tests of the server and benchmarks of the HTTP path use it. It implements everything that a client can observe: stop tokens,
max_tokens, n, log-probabilities, cancellation, the queue limit, deadlines, and pages held while a sample runs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from culet.config import ScheduleConfig
from culet.errors import QueueFull
from culet.models.checkpoint import open_checkpoint
from culet.scheduler.stats import Counters, SchedulerStats
from culet.serve.process.wire import GroupFacts, Ready, Script, Start
from culet.types import FinishReason, Request, TokenDelta

PAGE_TOKENS = 16


@dataclass(slots=True)
class _ScriptedSequence:
    """One sample of a request."""

    request: Request
    sample: int
    answer: tuple[int, ...]
    num_drawn: int = 0

    def draw(self, count: int) -> tuple[tuple[int, ...], FinishReason | None]:
        """Return the next tokens of the answer, and the finish reason if the sample ends with them."""
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
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.num_drawn

    @property
    def num_pages(self) -> int:
        return math.ceil(self.num_tokens / PAGE_TOKENS)


class FakeEngine:
    """An engine that answers from a script."""

    descriptors = ()
    prefix_cache = None

    def __init__(self, script: Script, schedule: ScheduleConfig) -> None:
        self._script, self._schedule = script, schedule
        self._running: dict[tuple[str, int], _ScriptedSequence] = {}
        self._waiting: deque[_ScriptedSequence] = deque()
        self._deltas: list[TokenDelta] = []
        self._counters = Counters()
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._deltas)

    def check(self) -> None:
        """Do nothing, as there are no ranks."""

    def add(self, request: Request) -> None:
        """Queue all samples of a request."""
        num_queued = len(self._running) + len(self._waiting)
        if num_queued >= self._schedule.max_num_seqs + self._schedule.max_queue_len:
            raise QueueFull(f"the queue is full: {num_queued} sequences are running or waiting", hint="try again later")
        answers = self._script.answers
        answer = answers[self._num_requests % len(answers)]
        self._num_requests += 1
        self._waiting.extend(_ScriptedSequence(request, sample, answer) for sample in range(request.n))

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End a request, or one of its samples."""
        for seq in [*self._running.values(), *self._waiting]:
            if seq.request.request_id == request_id and sample in (None, seq.sample):
                self._deltas.append(TokenDelta(request_id, seq.sample, (), finish_reason=reason))
                self._end(seq, reason)

    def step(self) -> list[TokenDelta]:
        """Draw the next tokens of every running sample."""
        if self._script.step_s:
            time.sleep(self._script.step_s)
        for seq in [*self._running.values(), *self._waiting]:
            if seq.request.deadline is not None and seq.request.deadline <= time.monotonic():
                self.cancel(seq.request.request_id, seq.sample, FinishReason.TIMEOUT)
        while self._waiting and len(self._running) < self._schedule.max_num_seqs:
            seq = self._waiting.popleft()
            self._running[seq.request.request_id, seq.sample] = seq
        deltas, self._deltas = self._deltas, []
        for seq in list(self._running.values()):
            deltas.append(self._draw(seq))
        self._counters.count_step(sum(len(delta.token_ids) for delta in deltas))
        return deltas

    def _draw(self, seq: _ScriptedSequence) -> TokenDelta:
        request, is_first = seq.request, seq.num_drawn == 0
        token_ids, reason = seq.draw(self._script.tokens_per_step)
        if reason is not None:
            self._end(seq, reason)
        sampling = request.sampling
        prompt_logprobs: tuple[dict[int, float], ...] = ()
        if is_first and seq.sample == 0 and sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(_logprobs(token_id, sampling.prompt_logprobs) for token_id in request.prompt_token_ids[1:])
        return TokenDelta(
            request_id=request.request_id,
            sample=seq.sample,
            token_ids=token_ids,
            logprobs=() if sampling.logprobs is None else tuple(_logprobs(token, sampling.logprobs) for token in token_ids),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason is FinishReason.STOP else None,
        )

    def _end(self, seq: _ScriptedSequence, reason: FinishReason) -> None:
        if self._running.pop((seq.request.request_id, seq.sample), None) is None:
            self._waiting.remove(seq)
        self._counters.finished += 1
        self._counters.cancelled += reason is FinishReason.CANCEL
        self._counters.timed_out += reason is FinishReason.TIMEOUT

    def stats(self) -> SchedulerStats:
        num_held = sum(seq.num_pages for seq in self._running.values())
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self._script.num_pages,
            num_free_pages=self._script.num_pages - num_held,
            num_resume_point_pages=0,
            num_held_pages={"fake": num_held},
            num_resume_points=0,
            counters=self._counters,
            num_tokens=sum(seq.num_tokens for seqs in (self._running.values(), self._waiting) for seq in seqs),
        )


def _logprobs(token_id: int, count: int) -> dict[int, float]:
    """Return the log-probabilities of the chosen token and the `count` most likely. The chosen token is the most likely."""
    return {token_id: -0.5} | {(token_id + 1 + rank) % 256: -1.5 - rank for rank in range(count - 1)}


def start_fake(start: Start) -> tuple[FakeEngine, Ready]:
    """Return a fake engine and its description. The checkpoint provides the vocabulary and the defaults."""
    assert start.script is not None
    checkpoint = open_checkpoint(start.config.model.model, start.config.model.revision)
    schedule, limit = start.config.schedule, start.script.max_model_len
    ready = Ready(
        vocab_size=checkpoint.spec.vocab_size,
        defaults=checkpoint.defaults,
        max_position=limit,
        max_model_len=min(limit, start.config.model.max_model_len or limit),
        max_num_seqs=schedule.max_num_seqs,
        max_queue_len=schedule.max_queue_len,
        device="none",
        dtype="none",
        num_pages=start.script.num_pages,
        page_bytes=0,
        cache_tokens=start.script.num_pages * PAGE_TOKENS,
        groups=(GroupFacts("fake", 0, PAGE_TOKENS, None, "none", "answers come from a script"),),
    )
    return FakeEngine(start.script, schedule), ready
