"""The engine process. It loads the model, steps the engine while it has work, and talks to the web process between steps.

Its argument is the descriptor of an inherited socket, one end of a pair. `wire.py` defines the messages. This process ignores
SIGINT and SIGTERM, which the web process handles. It ends when it is told to, when the other end of the socket is closed, and
with its parent.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from culet.cache.changes import PrefixChange
from culet.cache.prefix import PrefixCache
from culet.child import end_with_connection, end_with_parent
from culet.engine.requests import RequestRules
from culet.errors import CuletError, WorkerDied, as_culet_error, error_parts, exit_code
from culet.frames import FrameReader, frame
from culet.log import flush_stderr, logger, num_dropped_lines, queue_stderr, setup_logging
from culet.media.items import MediaItem
from culet.registry import load
from culet.scheduler.stats import SchedulerStats
from culet.serve.process.kv_events import KVEventPublisher, read_kv_events
from culet.serve.process.wire import (
    Cancel,
    Command,
    Failed,
    GroupFacts,
    Item,
    PrefixChanges,
    Ready,
    Refused,
    Report,
    Start,
    Stats,
    Stop,
    Submit,
    command_decoder,
    in_parts,
)
from culet.types import FinishReason, Request, SamplingParams, TokenDelta

STATS_PERIOD_S = 0.5
_SOCKET_BUFFER_BYTES = 4 << 20
_MAX_RECEIVED_BYTES = 4 << 20  # between two steps, so that media on their way hold up no step
_MAX_UNSENT_BYTES = 16 << 20  # if the web process lags further behind, wait for it
_MAX_FAILURES = 3  # the process gives up after this many failed steps without a new token in between
_FLUSH_LIMIT_S = 5.0
# Before the engine is ready, nobody else watches its ranks. They may be silent for longer than in a step, because importing a
# library from a slow disk holds Python's lock.
_LEAST_RANK_LIMIT_S = 60.0
_WARM_UP_TOKENS = 4
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_START_FAKE = "culet.testing.fake_engine:start_fake"

Follower = Callable[[list[PrefixChange]], None]  # receives what the prefix cache gains and loses


class SteppedEngine(Protocol):
    """The engine that the loop drives, real or fake.

    If `step` raises, the next calls report the ends of the requests that it cost, and all others go on.
    """

    @property
    def has_work(self) -> bool: ...
    @property
    def prefix_cache(self) -> PrefixCache | None: ...
    @property
    def descriptors(self) -> Sequence[int]: ...
    def check(self) -> None: ...
    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = ...) -> None: ...
    def step(self) -> list[TokenDelta]: ...
    def stats(self) -> SchedulerStats: ...


class Channel:
    """This process's end of the socket. Sending does not block, unless the other side lags far behind."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        sock.setblocking(False)
        self._frames = FrameReader(command_decoder)
        self._unsent = bytearray()

    def receive(self, *, wait: bool, beside: Sequence[int] = ()) -> list[Command] | None:
        """Return the commands that have arrived, or None if the other side is gone.

        With `wait`, block until bytes arrive, or until one of the descriptors `beside` the socket can be read.

        What is left of a lot of bytes is for the next call.
        """
        if wait:
            self._wait_readable(beside)
        commands: list[Command] = []
        num_left = _MAX_RECEIVED_BYTES
        try:
            while data := self._socket.recv(1 << 20):
                commands += self._frames.push(data)
                num_left -= len(data)
                if num_left <= 0:
                    return commands
        except BlockingIOError:
            return commands
        except OSError:
            return None
        return None  # an empty read means end of file

    def send(self, report: Report) -> None:
        """Send now if possible, otherwise with the next flush."""
        self._unsent += frame(report)
        self.flush()
        while len(self._unsent) > _MAX_UNSENT_BYTES:
            select.select([], [self._socket], [])
            self.flush()

    def flush(self, limit_s: float = 0.0) -> None:
        """Send as much as the socket accepts. With `limit_s`, wait up to that long to send everything."""
        deadline = time.monotonic() + limit_s
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([], [self._socket], [], left)[1]:
                    return
            except OSError:  # The other side is gone. The next receive reports it.
                self._unsent.clear()

    def _wait_readable(self, beside: Sequence[int]) -> None:
        while True:
            own = self._socket.fileno()
            readable, writable, _ = select.select([own, *beside], [own] if self._unsent else [], [])
            if writable:
                self.flush()
            if readable:
                return


class EngineLoop:
    """Steps the engine while it has work, passing commands in and deltas out."""

    def __init__(
        self, engine: SteppedEngine, channel: Channel, followers: Sequence[Follower] = (), *, name: str = "the engine"
    ) -> None:
        """Prepare to run. The `followers` receive the changes of the prefix cache. `name` is for the log."""
        self._engine, self._channel, self._name = engine, channel, name
        self._followers = followers
        self._num_failures = 0
        self._has_failed = False  # the last step failed, and the ends of its requests are not known yet
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._items: list[MediaItem] = []  # of the next request
        self._next_stats = 0.0

    def run(self) -> int:
        """Run until told to stop. Return the exit code of the process."""
        self._send_stats()
        while True:
            is_idle = not (self._engine.has_work or self._has_failed)
            commands = self._channel.receive(wait=is_idle, beside=self._engine.descriptors if is_idle else ())
            if commands is None:
                return 0
            for command in commands:
                if isinstance(command, Stop):
                    return 0
                self._obey(command)
            if is_idle and not self._check():  # steps notice it by themselves
                return exit_code(WorkerDied(""))
            if (self._engine.has_work or self._has_failed) and not self._step():
                return exit_code(WorkerDied(""))
            self._tell_followers()
            if not self._engine.has_work or time.monotonic() >= self._next_stats:
                self._send_stats()
            self._channel.flush()

    def _obey(self, command: Command) -> None:
        if isinstance(command, Item):
            self._items.append(command.item)
        elif isinstance(command, Submit):
            items, self._items = tuple(self._items), []
            self._submit(replace(command.request, items=items) if items else command.request)
        elif isinstance(command, Cancel):
            self._engine.cancel(command.request_id, command.sample, command.reason)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except CuletError as error:
            self._channel.send(Refused(request.request_id, *error_parts(error)))
            return
        self._num_prompt_tokens += len(request.prompt_token_ids)

    def _step(self) -> bool:
        """Run one step. Return False if there is no point in running another."""
        try:
            deltas = self._engine.step()
        except Exception as error:
            logger.exception("a step of %s failed", self._name)
            self._num_failures += 1
            self._has_failed = True
            if self._num_failures < _MAX_FAILURES and not _is_final(error):
                return True
            cause = as_culet_error(error)
            reason = cause.message if cause is error else type(error).__name__  # the log has the rest
            self._give_up(f"the engine stopped after a failed step: {reason}", cause.hint)
            return False
        self._has_failed = False
        num_tokens = sum([len(delta.token_ids) for delta in deltas])
        self._num_generated_tokens += num_tokens
        if num_tokens:
            self._num_failures = 0
        self._tell_followers()
        if deltas:
            for part in in_parts(deltas):
                self._channel.send(part)
        return True

    def _check(self) -> bool:
        """Return whether all ranks live."""
        try:
            self._engine.check()
        except WorkerDied as error:
            self._give_up(f"the engine stopped: {error.message}", error.hint)
            return False
        return True

    def _give_up(self, reason: str, hint: str) -> None:
        self._channel.send(Failed("WorkerDied", reason, hint))
        self._channel.flush(_FLUSH_LIMIT_S)

    def _tell_followers(self) -> None:
        """Report changes to the prefix cache before the client can send a request that relies on them."""
        if not self._followers:
            return
        prefixes = self._engine.prefix_cache
        assert prefixes is not None
        if changes := prefixes.drain_changes():
            for follow in self._followers:
                follow(changes)

    def _send_stats(self) -> None:
        self._next_stats = time.monotonic() + STATS_PERIOD_S
        counts = self._num_prompt_tokens, self._num_generated_tokens
        stats = Stats(self._engine.stats(), *counts, resident_bytes(), num_dropped_lines())
        self._channel.send(stats)


def _is_final(error: Exception) -> bool:
    """Return whether this process can no longer run steps, because its worker or the device is lost.

    After a fault in a CUDA kernel, every further call fails. Running out of memory does no such harm.
    """
    return isinstance(error, WorkerDied) or ("CUDA" in str(error) and "out of memory" not in str(error))


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


# Startup


def start_engine(start: Start) -> tuple[SteppedEngine, Ready]:
    """Load the model and warm it up. Return the engine and the message that it is ready."""
    from culet.attention.picture import draw
    from culet.engine.engine import Engine
    from culet.engine.memory import most_tokens

    rank_limit_s = max(start.step_s, _LEAST_RANK_LIMIT_S)
    engine = Engine(start.config, rank_limit_s=rank_limit_s, num_engines=start.num_engines)
    _warm_up(engine, engine.rules)
    engine.prepare_grammars()
    layout, plan, schedule = engine.layout, engine.plan, engine.config.schedule
    backends = {group.need.group: (group.backend, group.why) for group in plan.groups}
    owners = [layer for group in layout.groups for layer in group.layers]
    ready = Ready(
        vocab_size=engine.spec.vocab_size,
        defaults=engine.defaults,
        max_position=engine.spec.max_position,
        max_model_len=engine.max_model_len,
        max_num_seqs=schedule.max_num_seqs,
        max_queue_len=schedule.max_queue_len,
        device=str(engine.device),
        dtype=str(engine.dtype).removeprefix("torch."),
        num_pages=engine.stats().num_pages,
        cache_tokens=most_tokens(layout, engine.stats().num_pages, engine.max_model_len),
        page_bytes=layout.slab_bytes,
        groups=tuple(
            GroupFacts(group.name, len(group.layers), group.page_tokens, group.window, *backends.get(group.name, ("", "")))
            for group in layout.groups
        ),
        start_s=dict(engine.start_times.parts),
        plan_svg=draw(plan, owners, f"Attention on {engine.device}"),
    )
    return engine, ready


def _warm_up(engine: SteppedEngine, rules: RequestRules) -> None:
    """Run a short request, so that the first client does not wait for one-time work."""
    params = SamplingParams(max_tokens=min(_WARM_UP_TOKENS, rules.max_model_len - 1), seed=0, ignore_eos=True)
    engine.add(rules.make_request("warm-up", (0,), params))
    while engine.has_work:
        engine.step()


def serve(sock: socket.socket) -> int:
    """Receive the Start message, load the model and run. Return the exit code."""
    end_with_connection(sock)
    channel = Channel(sock)
    commands: list[Command] | None = []
    while commands == []:
        commands = channel.receive(wait=True)
    if not commands or not isinstance(commands[0], Start):
        return 0
    start = commands[0]
    setup_logging(start.log_level, start.log_form)
    queue_stderr()
    try:
        engine, ready = start_engine(start) if start.script is None else load(_START_FAKE)(start)
        followers = _make_followers(start, engine, ready, channel)
    except Exception as error:
        if not isinstance(error, CuletError):
            logger.exception("%s failed to start", start.name)
        failure = as_culet_error(error)
        channel.send(Failed(*error_parts(failure)))
        channel.flush(_FLUSH_LIMIT_S)
        return exit_code(failure)
    gc.collect()
    gc.freeze()  # garbage collections skip everything loaded so far
    channel.send(ready)
    return EngineLoop(engine, channel, followers, name=start.name).run()


def _make_followers(start: Start, engine: SteppedEngine, ready: Ready, channel: Channel) -> Sequence[Follower]:
    """Return what follows the prefix cache, as the Start message asks, and make the cache record its changes."""
    prefixes = engine.prefix_cache
    followers: list[Follower] = []
    if prefixes is None:
        return followers
    if start.reports_prefixes:
        followers.append(lambda changes: channel.send(PrefixChanges(changes)))
    events = read_kv_events(start.kv_events)
    if events is not None:
        followers.append(KVEventPublisher(events, ready.block_tokens, start.rank).publish)
    if followers:
        prefixes.record_changes()
    return followers


def main() -> None:
    """Run the engine process on the socket whose descriptor is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()  # also if it hangs, so that no thread of it can notice the end of the connection
    with suppress(KeyboardInterrupt), socket.socket(fileno=int(sys.argv[1])) as sock:
        code = serve(sock)
        flush_stderr()
        os._exit(code)  # skips the teardown of the CUDA context, which takes seconds


if __name__ == "__main__":
    main()
