"""One engine process, watched, and replaced by a new one when it dies or hangs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from culet.cache.changes import PrefixChange
from culet.cache.mirror import PrefixMirror
from culet.config import ServeConfig
from culet.errors import CuletError, WorkerDied
from culet.limits import Limits
from culet.log import logger
from culet.serve.process import watchdog
from culet.serve.process.client import EngineClient, State
from culet.serve.process.wire import Ready, Start, Stats
from culet.types import Request

_FIRST_PAUSE_S = 1.0  # before a restart; each further restart within the window waits twice as long
_MAX_PAUSE_S = 30.0
# An engine is silent while it loads. A restart hangs if it takes longer than this limit, and this many times as long as the
# start before.
_START_FACTOR, _LEAST_START_LIMIT_S = 10, 1800.0


class SupervisedEngine:
    """An engine that outlives its process. Requests whose clients have no token yet wait for the next process."""

    def __init__(
        self, start: Start, settings: ServeConfig, limits: Limits, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = start.name  # in the log
        self.num_restarts = 0
        self.is_given_up = False  # it died too often
        self.is_draining = False  # it is not restarted any more
        self.prefixes = PrefixMirror()
        self.on_prefix_changes: Callable[[list[PrefixChange]], None] = self.prefixes.apply
        self.on_new_process: Callable[[], None] = self.prefixes.clear  # with an empty cache
        self.on_give_up: Callable[[CuletError], None] = lambda error: None
        self._start, self._settings, self._limits = start, settings, limits
        self._environment = environment or {}
        self._client: EngineClient | None = None
        self._watchdog: watchdog.Watchdog | None = None
        self._has_been_ready = False
        self._start_s = 0.0  # how long the latest start took
        self._restarted_at: deque[float] = deque()  # within the restart window
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> EngineClient:
        """The current process. Raises before `start`."""
        if self._client is None:
            raise WorkerDied("the engine has not been started")
        return self._client

    @property
    def state(self) -> State:
        return State.STARTING if self._client is None else self._client.state

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    @property
    def facts(self) -> Ready | None:
        return None if self._client is None else self._client.facts

    @property
    def stats(self) -> Stats | None:
        """The latest report of the current process."""
        return None if self._client is None else self._client.stats

    @property
    def num_in_flight(self) -> int:
        return 0 if self._client is None else self._client.num_in_flight

    @property
    def unfinished(self) -> list[Request]:
        """The requests whose answers have not ended. While the engine is restarted, they wait for it."""
        return [] if self._client is None else self._client.unfinished

    @property
    def health(self) -> str:
        """`ok`, or why the engine answers no requests: `loading`, `restarting` after its death, `stuck`, or `given up`."""
        if self.is_given_up:
            return "given up"
        if not self.is_ready:
            return "restarting" if self.state is State.DEAD or self.num_restarts else "loading"
        return "stuck" if self.silent_s > self._limits.step_s else "ok"

    @property
    def silent_s(self) -> float:
        """How long the engine has said nothing although it has work."""
        return 0.0 if self._watchdog is None else self._watchdog.silent_s

    async def start(self) -> None:
        """Start a process and wait until the model is loaded. Raise if that fails."""
        began = time.monotonic()
        client = await EngineClient.start(self._start, environment=self._environment, previous=self._client)
        self.on_new_process()
        self._client, self._watchdog = client, None
        client.on_death, client.on_prefix_changes = self._on_death, self.on_prefix_changes
        await client.wait_ready()
        self._has_been_ready, self._start_s = True, time.monotonic() - began
        self._watchdog = watchdog.Watchdog(client)
        self._spawn(self._watch(client, self._watchdog))

    async def stop(self) -> None:
        """End the process."""
        for task in list(self._tasks):
            task.cancel()
        if self._client is not None:
            await self._client.stop()

    def _on_death(self) -> None:
        self.prefixes.clear()
        if not self._has_been_ready:
            return  # the code that awaits the start sees the error
        self._has_been_ready = False
        self._spawn(self._end_requests() if self.is_draining else self._restart())

    async def _end_requests(self) -> None:
        self.client.fail_all(await self._bury())

    async def _bury(self) -> CuletError:
        """End a process that hangs, leave no zombie, and return why the engine died."""
        await self.client.stop()
        error = self.client.death()  # now its exit code is known
        logger.error("%s died: %s", self.name, _one_line(error))
        return error

    async def _restart(self) -> None:
        """Restart the engine, up to the configured number of times within the window, then give up."""
        error = await self._bury()
        limit, window_s = self._settings.max_engine_restarts, self._settings.engine_restart_window
        while True:
            now = time.monotonic()
            while self._restarted_at and now - self._restarted_at[0] > window_s:
                self._restarted_at.popleft()
            if len(self._restarted_at) >= limit:
                break
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** len(self._restarted_at))
            self._restarted_at.append(now)
            self.num_restarts += 1
            count, kept = len(self._restarted_at), self.client.num_in_flight
            logger.warning("restarting %s in %g s (%d of %d, %d requests are kept)", self.name, pause_s, count, limit, kept)
            await asyncio.sleep(pause_s)
            start_limit_s = max(_LEAST_START_LIMIT_S, _START_FACTOR * self._start_s)
            try:
                async with asyncio.timeout(start_limit_s):
                    await self.start()
            except TimeoutError:
                error = WorkerDied(f"the engine was not ready after {start_limit_s:.0f} s", hint="see the log for the reason")
            except CuletError as failure:
                error = failure
            else:
                logger.info("%s is ready again", self.name)
                return
            await self.client.stop()
            logger.error("%s did not start: %s", self.name, _one_line(error))
        self.is_given_up = True
        self.on_give_up(error)  # other engines may take the requests
        self.client.fail_all(WorkerDied("the engine died and will not be restarted", hint="use another replica"))

    async def _watch(self, client: EngineClient, silence: watchdog.Watchdog) -> None:
        """Kill an engine that hangs in a step."""
        while client.state is State.READY:
            await asyncio.sleep(watchdog.PERIOD_S)
            silence.tick()
            if silence.silent_s > self._limits.step_s:
                logger.error("killing %s, which has sent no message for %d s", self.name, silence.silent_s)
                client.kill(WorkerDied(f"it was killed, because it had sent no message for {silence.silent_s:.0f} s"))
                return

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _one_line(error: CuletError) -> str:
    """Return an error with its hint, for the log."""
    return f"{error.message}: {error.hint}" if error.hint else error.message
