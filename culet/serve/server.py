"""`culet serve`: binds the port, starts the engine, serves, and comes down in order.

Ctrl-C and SIGTERM drain: `/ready` turns red and new requests are refused, running ones are given time to end, what is left
then is told so. A second signal ends everything at once. An engine that dies and is not started again ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator

import uvicorn

from culet.config import Config, ServeConfig
from culet.errors import ConfigError, CuletError, WorkerDied
from culet.log import logger
from culet.serve.app import create_app
from culet.serve.connection import make_protocol
from culet.serve.process.wire import Script
from culet.serve.service import Service
from culet.serve.summary import say_ready

_KEEP_ALIVE_S = 30  # that an idle connection stays open
_LAST_WORDS_S = 5  # for answers to reach their clients once everything has ended
_DRAIN_PERIOD_S = 0.05


class _Uvicorn(uvicorn.Server):
    """uvicorn, without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Service and web server in one process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._socket = bind(service.settings.host, service.settings.port)
        self.port: int = self._socket.getsockname()[1]
        limits = service.limits
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                create_app(service),
                http=make_protocol(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_WORDS_S,
                backlog=2048,
            )
        )
        self._failure: CuletError | None = None
        self._drain: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[Server], None] = lambda server: None) -> None:
        """Serve until a signal or a failure ends it; a failure raises."""
        self._service.on_exit = self._fail
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        starting = asyncio.create_task(self._service.start())
        try:
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not serving.done():
                starting.result()
                on_ready(self)
            await serving
        finally:
            starting.cancel()
            self._uvicorn.should_exit = True
            await asyncio.gather(serving, starting, return_exceptions=True)
            await self._service.stop()
            self._socket.close()
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: CuletError) -> None:
        """The engine is dead and stays so: those who wait have heard of it, and there is nothing left to serve."""
        self._failure = error if isinstance(error, WorkerDied) else WorkerDied(error.message, hint=error.hint)
        self._uvicorn.should_exit = True

    def _on_signal(self, number: int) -> None:
        if self._drain is not None or not self._service.is_ready:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            if self._service.is_draining:
                self._service.engine.fail_all(_shutting_down())
            return
        self._drain = asyncio.get_running_loop().create_task(self._come_down(signal.Signals(number).name))

    async def _come_down(self, cause: str) -> None:
        service, engine = self._service, self._service.engine
        limit_s = service.settings.drain_timeout
        logger.info("%s: %d requests are given %g s to end (once more to end at once)", cause, engine.num_in_flight, limit_s)
        service.is_draining = True
        deadline = time.monotonic() + limit_s
        while engine.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_PERIOD_S)
        if engine.num_in_flight:
            logger.warning("%d requests have not ended in time", engine.num_in_flight)
            engine.fail_all(_shutting_down())
        self._uvicorn.should_exit = True


def _shutting_down() -> WorkerDied:
    return WorkerDied("the server is shutting down", hint="ask another replica")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is loaded: a port that is taken is found out at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}", hint="another --host or --port") from error
    sock.set_inheritable(False)
    return sock


def serve(config: Config, settings: ServeConfig, script: Script | None = None) -> None:
    """Serve until told to stop. With a `script` the fake engine answers."""
    service = Service(config, settings, script)
    server = Server(service)
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.handlers, uvicorn_logger.propagate = logger.handlers, False  # in the same form as all else
    uvicorn_logger.setLevel(logging.WARNING)
    run: Callable[[Coroutine[None, None, None]], None] = asyncio.run
    with contextlib.suppress(ImportError):  # not on every platform
        from uvloop import run
    run(server.run(lambda ready: say_ready(service, ready.port)))
