"""The engines of a server as one. With `--data-parallel-size N` there are N, each with its own process and its own cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from culet.cache.content import PrefixContent
from culet.config import Config, ServeConfig
from culet.errors import CuletError, WorkerDied
from culet.limits import Limits
from culet.log import logger
from culet.serve.engines.placement import places
from culet.serve.engines.routing import Candidate, ranked
from culet.serve.engines.supervised import SupervisedEngine
from culet.serve.engines.totals import total
from culet.serve.process.client import State, TokenStream
from culet.serve.process.kv_events import check_kv_events, try_endpoints
from culet.serve.process.wire import Ready, Script, Start, Stats
from culet.types import Request


class EngineSource(Protocol):
    """The engines that a server sends its requests to, wherever they run."""

    is_draining: bool  # engines that die are not restarted
    on_exit: Callable[[CuletError], None]  # called when no engine is left

    @property
    def state(self) -> State: ...
    @property
    def health(self) -> str: ...
    @property
    def facts(self) -> Ready | None: ...
    @property
    def stats(self) -> Stats | None: ...
    @property
    def parts(self) -> Sequence[SupervisedEngine]: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def submit(self, request: Request) -> TokenStream: ...
    def fail_all(self, error: CuletError) -> None: ...


class Engines:
    """The engine processes of this machine."""

    def __init__(
        self, config: Config, settings: ServeConfig, limits: Limits, *, script: Script | None = None, log_level: str = "info"
    ) -> None:
        size = settings.data_parallel_size
        has_caching = config.cache.enable_prefix_caching
        events = check_kv_events(settings.kv_events_config, num_engines=size, has_prefix_caching=has_caching)
        if events is not None:
            try_endpoints(events, size)
        self.on_exit: Callable[[CuletError], None] = lambda error: None
        self._num_submitted = 0
        self.parts: list[SupervisedEngine] = []
        for rank, place in enumerate(places(config, size)):
            name = "the engine" if size == 1 else f"engine {rank}"
            start = Start(
                place.config,
                log_level,
                settings.log_format,
                script,
                rank=rank,
                name=name,
                num_engines=size,
                reports_prefixes=size > 1,
                kv_events=settings.kv_events_config,
                step_s=limits.step_s,
            )
            engine = SupervisedEngine(start, settings, limits, environment=place.environment)
            engine.on_give_up = partial(self._on_give_up, engine)
            self.parts.append(engine)

    @property
    def _ready(self) -> list[SupervisedEngine]:
        return [engine for engine in self.parts if engine.is_ready]

    @property
    def state(self) -> State:
        """READY if any engine is, STARTING if any may become so."""
        states = [engine.state for engine in self.parts]
        if State.READY in states:
            return State.READY
        return State.STARTING if State.STARTING in states else State.DEAD

    @property
    def health(self) -> str:
        """`ok` if any engine is, otherwise what most delays the next answer."""
        kinds = {engine.health for engine in self.parts}
        return next(kind for kind in ("ok", "loading", "restarting", "stuck", "given up") if kind in kinds)

    @property
    def is_draining(self) -> bool:
        return self.parts[0].is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        for engine in self.parts:
            engine.is_draining = value

    @property
    def facts(self) -> Ready | None:
        """The facts of any engine. All have the same model and settings."""
        return next((engine.facts for engine in self.parts if engine.facts is not None), None)

    @property
    def stats(self) -> Stats | None:
        """The sum of the latest reports from all running engines."""
        alive = [engine for engine in self.parts if engine.state is not State.DEAD]
        return total([engine.stats for engine in alive if engine.stats is not None])

    @property
    def num_in_flight(self) -> int:
        """The number of requests that have not ended."""
        return sum(engine.num_in_flight for engine in self.parts)

    @property
    def num_restarts(self) -> int:
        return sum(engine.num_restarts for engine in self.parts)

    @property
    def capacity(self) -> int:
        """How many samples can run or wait."""
        facts = [engine.facts for engine in self._ready]
        return sum(each.max_num_seqs + each.max_queue_len for each in facts if each is not None)

    async def start(self) -> None:
        """Start all engines and wait until they are ready. Raise as soon as one fails. Call `stop` then, to end the others."""
        tasks = [asyncio.ensure_future(engine.start()) for engine in self.parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End all engine processes."""
        await asyncio.gather(*(engine.stop() for engine in self.parts))

    def submit(self, request: Request) -> TokenStream:
        """Send a request to the engine that suits it best."""
        ready = self._ready
        if not ready:
            raise self.parts[0].client.death()
        return self._choose(ready, request).client.submit(request)

    def fail_all(self, error: CuletError) -> None:
        """End every running request with `error`."""
        for engine in self.parts:
            if engine.state is not State.STARTING or engine.num_in_flight:
                engine.client.fail_all(error)

    def _choose(self, ready: list[SupervisedEngine], request: Request) -> SupervisedEngine:
        if len(ready) == 1:
            return ready[0]
        turn = self._num_submitted % len(ready)  # so that idle engines take turns
        self._num_submitted += 1
        ready = [*ready[turn:], *ready[:turn]]
        tokens = request.prompt_token_ids
        facts = ready[0].facts
        assert facts is not None
        content = PrefixContent(request.cache_salt, request.media)
        candidates = [
            Candidate(
                engine.client.num_samples,
                facts.max_num_seqs,
                engine.prefixes.find(tokens, content),
                engine.prefixes.num_points,
                engine.silent_s,
            )
            for engine in ready
        ]
        return ready[ranked(candidates, len(tokens), request.n)[0]]

    def _on_give_up(self, engine: SupervisedEngine, error: CuletError) -> None:
        """Go on with the other engines, which take the requests that can start over. The server ends when none is left."""
        left = [part for part in self.parts if not part.is_given_up]
        if not left:
            self.on_exit(error)
            return
        logger.error("the server continues with %d of %d engines", len(left), len(self.parts))
        ready = [part for part in left if part.is_ready]
        for stream in engine.client.give_away():
            (self._choose(ready, stream.request) if ready else left[0]).client.take(stream)


def unavailable(engines: EngineSource) -> CuletError:
    """Return the error for a request that no engine can take now."""
    if engines.health == "restarting":
        return WorkerDied("the engine died and is being restarted", hint="try again later")
    if engines.health == "given up":
        return WorkerDied("the engine died and will not be restarted", hint="use another replica")
    return WorkerDied("the model is still loading", hint="try again later")
