"""The engine's process: loads the model, then steps while there is work, and talks to the web process between steps.

    python -m culet.serve.process.engine FD

FD is the inherited end of a socket pair; `wire.py` says what goes over it. Signals are for the web process: this one ends
when it is told to, or when the other end is closed.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from culet.engine.requests import RequestRules
from culet.errors import CuletError, InternalError, exit_code
from culet.log import logger, setup_logging
from culet.registry import load
from culet.scheduler.stats import SchedulerStats
from culet.serve.process.wire import (
    Cancel,
    Command,
    Delta,
    Deltas,
    Failed,
    FrameReader,
    GroupFacts,
    Ready,
    Refused,
    Report,
    Start,
    Stats,
    Stop,
    Submit,
    command_decoder,
    frame,
)
from culet.types import FinishReason, Request, SamplingParams, TokenDelta

STATS_PERIOD_S = 0.5
_SOCKET_BUFFER_BYTES = 4 << 20
_MAX_UNSENT_BYTES = 16 << 20  # the web process lags this far behind: wait for it
_MAX_FAILURES = 3  # steps in a row that may fail before the process gives up
_FLUSH_LIMIT_S = 5.0
_WARM_UP_TOKENS = 4
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Core(Protocol):
    """What the loop drives: the engine, or the fake one."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = ...) -> None: ...
    def step(self) -> list[TokenDelta]: ...
    def stats(self) -> SchedulerStats: ...


class Channel:
    """This process's end of the socket. Sending never waits, unless the other side lags far behind."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        sock.setblocking(False)
        self._frames = FrameReader(command_decoder)
        self._unsent = bytearray()

    def receive(self, *, wait: bool) -> list[Command] | None:
        """Commands that have come, or None where the other side is gone. `wait`: until there are some."""
        if wait:
            self._wait_readable()
        commands: list[Command] = []
        try:
            while data := self._socket.recv(1 << 20):
                commands += self._frames.push(data)
        except BlockingIOError:
            return commands
        except OSError:
            return None
        return None  # an empty read: the end

    def send(self, report: Report) -> None:
        """Send, now or with the next flush."""
        self._unsent += frame(report)
        self.flush()
        while len(self._unsent) > _MAX_UNSENT_BYTES:
            select.select([], [self._socket], [])
            self.flush()

    def flush(self, limit_s: float = 0.0) -> None:
        """Send what the socket takes; with a limit, wait that long for it to take all."""
        deadline = time.monotonic() + limit_s
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([], [self._socket], [], left)[1]:
                    return
            except OSError:  # nobody is there any more: the next receive says so
                self._unsent.clear()

    def _wait_readable(self) -> None:
        while True:
            readable, writable, _ = select.select([self._socket], [self._socket] if self._unsent else [], [])
            if writable:
                self.flush()
            if readable:
                return


class EngineLoop:
    """Steps the engine while it has work, and passes commands in and deltas out."""

    def __init__(self, core: Core, channel: Channel) -> None:
        self._core, self._channel = core, channel
        self._running: dict[str, set[int]] = {}  # samples that have yet to end, by request
        self._num_failures = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._next_stats = 0.0

    def run(self) -> int:
        """Until told to stop; the process's exit code."""
        self._send_stats()
        while True:
            commands = self._channel.receive(wait=not self._core.has_work)
            if commands is None:
                return 0
            for command in commands:
                if isinstance(command, Stop):
                    return 0
                self._obey(command)
            if self._core.has_work and not self._step():
                return exit_code(InternalError(""))
            if not self._core.has_work or time.monotonic() >= self._next_stats:
                self._send_stats()
            self._channel.flush()

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command.request)
        elif isinstance(command, Cancel):
            self._core.cancel(command.request_id, command.sample, command.reason)

    def _submit(self, request: Request) -> None:
        try:
            self._core.add(request)
        except CuletError as error:
            kind = type(error).__name__
            self._channel.send(Refused(request.request_id, kind, error.message, error.hint))
            return
        self._running[request.request_id] = set(range(request.n))
        self._num_prompt_tokens += len(request.prompt_token_ids)

    def _step(self) -> bool:
        """One step; False where there is no point in another."""
        try:
            deltas = self._core.step()
        except Exception as error:
            logger.exception("a step failed")
            self._fail(f"{type(error).__name__}: {error}")
            self._num_failures += 1
            if self._num_failures < _MAX_FAILURES and not _is_final(error):
                return True
            self._channel.send(Failed("WorkerDied", f"steps of the engine fail: {type(error).__name__}"))
            self._channel.flush(_FLUSH_LIMIT_S)
            return False
        self._num_failures = 0
        if deltas:
            self._channel.send(Deltas([self._on_wire(delta) for delta in deltas]))
        return True

    def _fail(self, error: str) -> None:
        """Tell everybody who waits that nothing comes any more."""
        lost = [(request_id, sample) for request_id, samples in self._running.items() for sample in samples]
        self._running.clear()
        reason = FinishReason.ERROR
        self._channel.send(Deltas([Delta(request_id, sample, (), reason, error=error) for request_id, sample in lost]))

    def _on_wire(self, delta: TokenDelta) -> Delta:
        self._num_generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None and (samples := self._running.get(delta.request_id)) is not None:
            samples.discard(delta.sample)
            if not samples:
                del self._running[delta.request_id]
        return Delta(
            delta.request_id,
            delta.sample,
            delta.token_ids,
            delta.finish_reason,
            delta.stop_token_id,
            delta.num_cached_tokens,
            tuple(map(dict, delta.logprobs)),
            tuple(map(dict, delta.prompt_logprobs)),
            delta.error,
            delta.queue_s,
            delta.num_accepted_drafts,
            delta.num_rejected_drafts,
        )

    def _send_stats(self) -> None:
        self._next_stats = time.monotonic() + STATS_PERIOD_S
        stats = Stats(self._core.stats(), self._num_prompt_tokens, self._num_generated_tokens, resident_bytes())
        self._channel.send(stats)


def _is_final(error: Exception) -> bool:
    """Whether the device is lost to this process: after a fault inside a CUDA kernel every further call fails."""
    return "CUDA" in str(error) and type(error).__name__ != "OutOfMemoryError"


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


# Starting


def start_fake(start: Start) -> tuple[Core, Ready]:
    """The fake engine, and what it says of itself; the model's folder gives vocabulary and defaults."""
    from culet.models.checkpoint import open_checkpoint

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
        groups=(GroupFacts("fake", 0, load("culet.testing.fake_engine:PAGE_TOKENS"), None, "none", "a script answers"),),
    )
    return load("culet.testing.fake_engine:FakeEngine")(start.script, schedule), ready


def start_engine(start: Start) -> tuple[Core, Ready]:
    """Load the model and warm it up."""
    from culet.attention.picture import draw
    from culet.engine.engine import Engine

    engine = Engine(start.config)
    _warm_up(engine, engine.rules)
    engine.prepare_grammars()
    layout, plan, schedule = engine.layout, engine.plan, engine.config.schedule
    taken = {each.need.group: (each.backend, each.why) for each in plan.groups}
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
        page_bytes=layout.slab_bytes,
        groups=tuple(
            GroupFacts(group.name, len(group.layers), group.page_tokens, group.window, *taken.get(group.name, ("", "")))
            for group in layout.groups
        ),
        start_s=dict(engine.start_times.parts),
        plan_svg=draw(plan, owners, f"Attention on {engine.device}"),
    )
    return engine, ready


def _warm_up(engine: Core, rules: RequestRules) -> None:
    """Run a short request, so that the first client does not wait for what happens once."""
    params = SamplingParams(max_tokens=min(_WARM_UP_TOKENS, rules.max_model_len - 1), seed=0, ignore_eos=True)
    engine.add(rules.make_request("warm-up", (0,), params))
    while engine.has_work:
        engine.step()


def _end_with_parent(sock: socket.socket) -> None:
    """End this process at once when the web process is gone, also while a model is being loaded."""
    hang_up = select.poll()
    hang_up.register(sock.fileno(), 0)

    def watch() -> None:
        hang_up.poll()
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def serve(sock: socket.socket) -> int:
    """Read what to load, load it, and run; the exit code."""
    _end_with_parent(sock)
    channel = Channel(sock)
    commands: list[Command] | None = []
    while commands == []:
        commands = channel.receive(wait=True)
    if not commands or not isinstance(commands[0], Start):
        return 0
    start = commands[0]
    setup_logging(start.log_level, start.log_form)
    try:
        core, ready = start_fake(start) if start.script is not None else start_engine(start)
    except Exception as error:
        if not isinstance(error, CuletError):
            logger.exception("the engine did not start")
            error = InternalError(f"the engine did not start: {type(error).__name__}: {error}")
        channel.send(Failed(type(error).__name__, error.message, error.hint))
        channel.flush(_FLUSH_LIMIT_S)
        return exit_code(error)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection need look at it again
    channel.send(ready)
    loop = EngineLoop(core, channel)
    return loop.run()


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(KeyboardInterrupt), socket.socket(fileno=int(sys.argv[1])) as sock:
        code = serve(sock)
        sys.stderr.flush()
        os._exit(code)  # at once: destroying a CUDA context in order takes seconds


if __name__ == "__main__":
    main()
