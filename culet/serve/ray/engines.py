"""The engine replicas as the ingress sees them: the same interface as engines on this machine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from culet.cache.content import PrefixContent
from culet.cache.mirror import Overlap, PrefixMirror
from culet.cache.point_tree import ResumePoint
from culet.errors import CuletError, WorkerDied, error_of
from culet.log import logger
from culet.serve.engines.supervised import SupervisedEngine
from culet.serve.process.client import State, TokenStream
from culet.serve.process.wire import Ready, Stats
from culet.serve.ray.messages import Log, Part, Route, pack_order
from culet.types import FinishReason, Request

_POLL_S = 1.0  # between questions to a replica about its cache
_POLL_LIMIT_S = 10.0
_MAX_EXPECTED = 4096  # points of one replica
_LOST_POLLS = 5  # a replica that has not answered this often is forgotten
_DEFAULT_LEFT_S = 3600.0
_part_decoder = msgspec.msgpack.Decoder(Part)
_log_decoder = msgspec.msgpack.Decoder(Log)


class ExpectedPoints:
    """The resume points that the prompts of this ingress leave in a replica, before the replica has reported them.

    The next turn of a conversation may come earlier than the report.
    """

    def __init__(self) -> None:
        self._mirror = PrefixMirror()
        self._ids: deque[tuple[float, int]] = deque()  # when each was added
        self._num_added = 0

    def find(self, tokens: Sequence[int], content: PrefixContent) -> Overlap:
        return self._mirror.find(tokens, content)

    def add(self, request: Request, content: PrefixContent) -> None:
        """Add the points of a prompt whose first token has arrived."""
        tokens = request.prompt_token_ids
        units = content.upto(tokens, len(tokens))
        for length in {*request.resume_lengths, len(tokens)}:
            if not length or self._mirror.has_point_at(content, units, length):
                continue
            self._num_added += 1
            media = content.media_before(length)
            # The same prompt resumes before its last token. Nothing else is certain about a point's earliest length.
            self._mirror.add(
                ResumePoint(length, length - 1, (), (), content.salt, media, point_id=self._num_added, last_use=0), units
            )
            self._ids.append((time.monotonic(), self._num_added))
        while len(self._ids) > _MAX_EXPECTED:
            self._mirror.discard(self._ids.popleft()[1])

    def forget_before(self, moment: float) -> None:
        """Forget the points from before `moment`. The replica has reported those that it still has."""
        while self._ids and self._ids[0][0] < moment:
            self._mirror.discard(self._ids.popleft()[1])


@dataclass
class _Known:
    """What the ingress knows of a replica."""

    prefixes: PrefixMirror = field(default_factory=PrefixMirror)
    expected: ExpectedPoints = field(default_factory=ExpectedPoints)
    next_number: int = -1  # of its log
    num_samples: int = 0  # that this ingress has there
    num_unanswered: int = 0


class RayEngines:
    """Sends requests to the engine deployment through its handle."""

    parts: tuple[SupervisedEngine, ...] = ()
    num_restarts = 0
    stats: Stats | None = None  # each replica reports its own to Ray

    def __init__(self, handle: Any, max_replicas: int) -> None:
        self.is_draining = False
        self.on_exit: Callable[[CuletError], None] = lambda error: None
        self.facts: Ready | None = None
        self._handle, self._max_replicas = handle, max_replicas
        self._replicas: dict[str, _Known] = {}
        self._streams: dict[str, TokenStream] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._places: dict[str, str] = {}  # request id -> replica id
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        return State.STARTING if self.facts is None else State.READY

    @property
    def health(self) -> str:
        return "loading" if self.facts is None else "ok"

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def capacity(self) -> int:
        """How many samples can run or wait with the most replicas that are allowed."""
        facts = self.facts
        return 0 if facts is None else self._max_replicas * (facts.max_num_seqs + facts.max_queue_len)

    async def start(self) -> None:
        """Wait until a replica has loaded the model."""
        self.facts = msgspec.msgpack.decode(await self._handle.facts.remote(Route()), type=Ready)
        self._spawn(self._poll_all())

    async def stop(self) -> None:
        """Cancel what is running. The replicas belong to Ray."""
        for task in [*self._tasks, *self._pumps.values()]:
            task.cancel()

    def submit(self, request: Request) -> TokenStream:
        """Send a request to the replica that suits it best."""
        stream = TokenStream(self, request)
        self._streams[request.request_id] = stream
        task = asyncio.get_running_loop().create_task(self._pump(stream))
        self._pumps[request.request_id] = task
        return stream

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End a request, or one sample of it."""
        stream = self._streams.get(request_id)
        if sample is None or stream is None or stream.request.n == 1:
            task = self._pumps.pop(request_id, None)
            if task is not None:
                task.cancel()
        elif request_id in self._places:
            route = Route(replica_id=self._places[request_id])
            self._handle.cancel.remote(route, request_id, sample, reason.value)

    def forget(self, request_id: str) -> None:
        """Stop delivering tokens for this request."""
        self._streams.pop(request_id, None)
        task = self._pumps.pop(request_id, None)
        if task is not None:
            task.cancel()

    def fail_all(self, error: CuletError) -> None:
        """End every running request with `error`."""
        for stream in list(self._streams.values()):
            if not stream.is_done:
                self.cancel(stream.request.request_id)
                stream.fail(error)

    # One request

    async def _pump(self, stream: TokenStream) -> None:
        """Read the answer to a request. If its replica is lost, another one may answer from the beginning."""
        while not stream.is_done:
            stream.num_submits += 1
            try:
                await self._read(stream)
                if not stream.is_done:
                    raise WorkerDied("the answer has no end")
            except Exception as error:
                if stream.is_done:
                    return
                logger.warning("a replica was lost while it answered: %s", type(error).__name__)
                stream.lose_engine()

    async def _read(self, stream: TokenStream) -> None:
        request = stream.request
        content = PrefixContent(request.cache_salt, request.media)
        left_s = _DEFAULT_LEFT_S if request.deadline is None else max(0.0, request.deadline - time.monotonic())
        order = pack_order(request, left_s)
        parts = self._handle.options(stream=True).generate.remote(self._route(request, content), *order)
        place: _Known | None = None
        has_begun = is_over = False
        try:
            async for data in parts:
                part = _part_decoder.decode(data)
                if place is None:
                    place = self._replicas.setdefault(part.replica_id, _Known())
                    place.num_samples += request.n
                    self._places[request.request_id] = part.replica_id
                if part.refusal is not None:
                    stream.fail(error_of(*part.refusal))
                    return
                if part.starts_over:
                    stream.lose_engine()
                    if stream.is_done:
                        return
                if part.deltas and not has_begun:
                    has_begun = True
                    place.expected.add(request, content)
                for delta in part.deltas:
                    stream.put(delta)
            is_over = True
        finally:
            self._places.pop(request.request_id, None)
            if place is not None:
                place.num_samples -= request.n
            if not is_over:  # the client has left, or the answer is of no use
                parts.cancel()

    # Caches of the replicas

    def _route(self, request: Request, content: PrefixContent) -> Route:
        tokens = request.prompt_token_ids
        overlaps = {}
        for name, known in self._replicas.items():
            found = known.prefixes.find(tokens, content), known.expected.find(tokens, content)
            resume, shared = max(overlap.resume for overlap in found), max(overlap.known for overlap in found)
            if resume or shared:
                overlaps[name] = resume, shared
        assert self.facts is not None
        return Route(
            prompt_len=len(request.prompt_token_ids),
            num_samples=request.n,
            max_num_seqs=self.facts.max_num_seqs,
            overlaps=overlaps,
            loads={name: known.num_samples for name, known in self._replicas.items()},
        )

    async def _poll_all(self) -> None:
        """Follow the logs of all replicas that have answered something. One that is busy does not hold up the others."""
        polls: dict[str, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(_POLL_S)
            polls = {name: poll for name, poll in polls.items() if not poll.done()}
            for name, known in self._replicas.items():
                if name not in polls:
                    polls[name] = self._spawn(self._poll(name, known))

    async def _poll(self, name: str, known: _Known) -> None:
        with suppress(Exception):  # the replica is gone, or too busy to answer
            await self._follow(name, known)
            return
        known.num_unanswered += 1
        if known.num_unanswered >= _LOST_POLLS and not known.num_samples:
            del self._replicas[name]

    async def _follow(self, name: str, known: _Known) -> None:
        asked_at = time.monotonic()
        call = self._handle.prefix_changes.remote(Route(replica_id=name), known.next_number)
        async with asyncio.timeout(_POLL_LIMIT_S):
            data = await call
        if not data:
            raise WorkerDied("the replica is gone")
        log = _log_decoder.decode(data)
        if log.is_whole:
            known.prefixes.clear()
        known.prefixes.apply(log.changes)
        known.expected.forget_before(asked_at)
        known.next_number, known.num_unanswered = log.next_number, 0

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
