"""An engine replica: an actor of Ray Serve that owns one engine process. The actor itself never loads torch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pickle import PickleBuffer

import msgspec
from ray import serve
from ray.serve.metrics import Gauge

from culet.cache.changes import PrefixChange
from culet.config import Config, ServeConfig
from culet.errors import CuletError, WorkerDied, error_parts
from culet.limits import Limits
from culet.log import setup_logging
from culet.serve.engines.supervised import SupervisedEngine
from culet.serve.process.client import EngineClient, TokenStream
from culet.serve.process.wire import Start
from culet.serve.ray.messages import Log, Part, Route, unpack_order
from culet.types import FinishReason

_MAX_LOG = 1 << 16  # changes that are kept for those who ask late
_METRICS_PERIOD_S = 1.0
_RESTART_POLL_S = 0.1


class EngineReplica:
    """One engine. Ray Serve calls its methods with what `RayEngines` sends."""

    async def __init__(self, config: Config, settings: ServeConfig, limits: Limits) -> None:  # type: ignore[misc] # Ray awaits it
        setup_logging(form=settings.log_format)
        self._id = serve.get_replica_context().replica_id.unique_id
        start = Start(
            config,
            log_form=settings.log_format,
            reports_prefixes=True,
            kv_events=settings.kv_events_config,
            step_s=limits.step_s,
        )
        self._engine = SupervisedEngine(start, settings, limits)
        self._log: deque[PrefixChange] = deque(maxlen=_MAX_LOG)
        self._num_logged = 0
        self._streams: dict[str, TokenStream] = {}
        self._engine.on_prefix_changes = self._note
        self._engine.on_new_process = self._begin_log
        await self._engine.start()
        self._metrics = asyncio.get_running_loop().create_task(self._report())

    async def facts(self, route: Route) -> bytes:
        """Return the facts about the model."""
        return msgspec.msgpack.encode(self._engine.facts)

    async def generate(self, route: Route, packed: bytes, contents: Sequence[PickleBuffer]) -> AsyncIterator[bytes]:
        """Answer a request. If the caller cancels this, the engine ends it before its next step."""
        order = unpack_order(packed, contents)
        name, deadline = order.request.request_id, time.monotonic() + order.left_s
        while not (self._engine.is_ready or self._engine.is_given_up):
            await asyncio.sleep(_RESTART_POLL_S)
        try:
            request = replace(order.request, request_id=EngineClient.next_id(), deadline=deadline)
            stream = self._engine.client.submit(request)
        except CuletError as error:
            yield self._part(refusal=error_parts(error))
            return
        self._streams[name] = stream
        num_starts = 0  # the stream is never marked as seen, because the ingress knows what its client has seen
        try:
            yield self._part()  # tells the ingress where the request is
            async for deltas in stream:
                starts_over, num_starts = stream.num_starts != num_starts, stream.num_starts
                yield msgspec.msgpack.encode(Part(self._id, deltas, starts_over=starts_over))
        except CuletError as error:
            yield self._part(refusal=error_parts(error))
        finally:
            self._streams.pop(name, None)
            stream.close()

    async def cancel(self, route: Route, request_id: str, sample: int, reason: str) -> None:
        """End one sample of a request, which may have ended already."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel(sample, FinishReason(reason))

    async def prefix_changes(self, route: Route, number: int) -> bytes:
        """Return the changes of the prefix cache from this number on, or its whole content if the number is too old."""
        if route.replica_id != self._id:
            return b""
        oldest = self._num_logged - len(self._log)
        is_whole = not oldest <= number <= self._num_logged
        changes: Sequence[PrefixChange] = self._engine.prefixes.snapshot() if is_whole else list(self._log)[number - oldest :]
        return msgspec.msgpack.encode(Log(self._id, self._num_logged, list(changes), is_whole))

    def check_health(self) -> None:
        """Raise if Ray should replace this replica. While the engine restarts, requests wait for it."""
        if self._engine.is_given_up:
            raise WorkerDied("the engine died and will not be restarted")

    def record_routing_stats(self) -> dict[str, float]:
        """Return the load, for those who watch Ray's own state."""
        stats = self._engine.stats
        now = None if stats is None else stats.scheduler
        return {"running": 0 if now is None else now.num_running, "waiting": 0 if now is None else now.num_waiting}

    async def __del__(self) -> None:
        self._metrics.cancel()
        await self._engine.stop()

    def _part(self, refusal: tuple[str, str, str] | None = None) -> bytes:
        return msgspec.msgpack.encode(Part(self._id, refusal=refusal))

    def _note(self, changes: list[PrefixChange]) -> None:
        self._engine.prefixes.apply(changes)
        self._log.extend(changes)
        self._num_logged += len(changes)

    def _begin_log(self) -> None:
        """Start a new log: a new engine process has an empty cache. Readers of the old log get the cache's whole content."""
        self._engine.prefixes.clear()
        self._log.clear()
        self._num_logged += 1

    async def _report(self) -> None:
        """Report gauges to Ray's metrics, which add the names of the deployment and the replica."""
        gauges = {
            name: Gauge(f"culet_{name}", description=text)
            for name, text in (
                ("num_requests_running", "Running sequences."),
                ("num_requests_waiting", "Waiting sequences."),
                ("kv_cache_usage_perc", "Share of KV pages in use (0 to 1), excluding pages held only by resume points."),
                ("generation_tokens", "Generated tokens since the engine started."),
                ("prompt_tokens", "Prompt tokens since the engine started."),
                ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
                ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
                ("engine_restarts", "Restarts of the engine process."),
            )
        }
        while True:
            gauges["engine_restarts"].set(self._engine.num_restarts)
            stats = self._engine.stats
            if stats is not None:
                now = stats.scheduler
                used = 1 - (now.num_free_pages + now.num_resume_point_pages) / max(1, now.num_pages)
                gauges["num_requests_running"].set(now.num_running)
                gauges["num_requests_waiting"].set(now.num_waiting)
                gauges["kv_cache_usage_perc"].set(used)
                gauges["generation_tokens"].set(stats.num_generated_tokens)
                gauges["prompt_tokens"].set(stats.num_prompt_tokens)
                gauges["prefix_cache_hits"].set(now.counters.prefix_hit_tokens)
                gauges["prefix_cache_queries"].set(now.counters.prefix_query_tokens)
            await asyncio.sleep(_METRICS_PERIOD_S)
