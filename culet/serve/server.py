"""Run `culet serve`: bind the port, start the engine, serve requests and shut down cleanly.

Ctrl-C and SIGTERM drain the server. `/ready` then answers 503 and new requests are refused. Running requests get time to
finish before they are failed, also those that wait for an engine that is being restarted. A second signal stops immediately,
and so does one before the model is loaded. If the engine dies too often, the server ends.

If the address is shared with another process (`--reuse-port`, systemd's sockets), this server takes it over and hands it on
without a refused connection. It accepts connections only when it is ready. When it is told to stop, it stops accepting at
once, and answers what arrives on the connections that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import uvicorn

from culet.config import Config, ServeConfig
from culet.errors import CuletError, InternalError, WorkerDied
from culet.log import logger, queue_stderr
from culet.serve.app import create_app
from culet.serve.http.connection import make_protocol
from culet.serve.listen import check_certificate, open_listeners
from culet.serve.process.wire import Script
from culet.serve.service import Service

_KEEP_ALIVE_S = 30  # idle connections are closed after this time
_FLUSH_S = 5  # time for the last answers to reach their clients
_DRAIN_PERIOD_S = 0.05
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 256 << 10  # an option of glibc's mallopt, and its value


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling, and with a time limit for TLS handshakes."""

    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s
        self.servers: list[asyncio.Server] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on `sockets`."""
        config, loop = self.config, asyncio.get_running_loop()
        options: dict[str, Any] = {"backlog": config.backlog}
        if config.ssl is not None:
            options |= {"ssl": config.ssl, "ssl_handshake_timeout": self._handshake_s}

        def create_protocol() -> asyncio.Protocol:
            protocol: Any = config.http_protocol_class
            created: asyncio.Protocol = protocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)
            return created

        for sock in sockets or ():
            create: Any = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            self.servers.append(await create(create_protocol, sock=sock, **options))
        self.started = True

    async def stop_accepting(self, sockets: list[socket.socket]) -> None:
        """Accept the connections that are waiting, then close the listening sockets. Open connections stay."""
        while self.servers and select.select(sockets, [], [], 0)[0]:
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()

    def release_connections(self) -> int:
        """Close idle connections, and others after their current answer. Return how many are still open.

        A connection that has not sent its first request yet is not idle. Its client could not know that it must retry.
        """
        for connection in list(self.server_state.connections):
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()
        return len(self.server_state.connections)


class Server:
    """The service and its web server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        check_certificate(service.settings)
        self.listeners = open_listeners(service.settings)
        # From here on, the settings say where the server really listens.
        host, path = self.listeners.address
        service.settings = replace(service.settings, host=host, uds=path, reuse_port=False)
        settings, limits = service.settings, service.limits
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                create_app(service),
                http=make_protocol(limits, service.intake),
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_keyfile_password=settings.ssl_keyfile_password,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FLUSH_S,
                backlog=2048,
            ),
            limits.header_s,
        )
        self._failure: CuletError | None = None
        self._drain: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[Server], None] = lambda server: None) -> None:
        """Serve until a signal arrives or the engine fails. Raise in case of a failure."""
        self._service.engines.on_exit = self._fail
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._service.keys.has_file:
            loop.add_signal_handler(signal.SIGHUP, self._service.keys.reload)
        starting = asyncio.create_task(self._service.start())
        serving = asyncio.create_task(self._serve(starting))
        measuring = asyncio.create_task(self._service.measure_lag())
        try:
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not serving.done():
                _check_start(starting)
                on_ready(self)
            await serving
        finally:
            starting.cancel()
            measuring.cancel()
            self._uvicorn.should_exit = True
            await asyncio.gather(serving, starting, measuring, return_exceptions=True)
            await self._service.stop()
            self.listeners.close()
        if self._failure is not None:
            raise self._failure

    async def _serve(self, starting: asyncio.Task[None]) -> None:
        """Answer requests. At a shared address, wait for the model first, because another server may still be answering."""
        if self.listeners.is_shared:
            while not (starting.done() or self._uvicorn.should_exit):
                await asyncio.wait({starting}, timeout=_DRAIN_PERIOD_S)
            if not starting.done() or starting.cancelled() or starting.exception() is not None:
                return
        if not self._uvicorn.should_exit:
            await self._uvicorn.serve(sockets=self.listeners.sockets)

    def _fail(self, error: CuletError) -> None:
        """End the server, because the engine will not be restarted. Its requests have already failed."""
        self._failure = error if isinstance(error, WorkerDied) else WorkerDied(error.message, hint=error.hint)
        self._uvicorn.should_exit = True

    def _on_signal(self, number: int) -> None:
        if self._drain is not None or not self._service.has_started:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            if self._service.is_draining:
                self._service.engines.fail_all(_shutting_down())
            return
        self._drain = asyncio.get_running_loop().create_task(self._shut_down(signal.Signals(number).name))

    async def _shut_down(self, cause: str) -> None:
        service, engines = self._service, self._service.engines
        limit_s = service.settings.drain_timeout
        logger.info(
            "%s: waiting up to %g s for %d requests to finish (a second signal stops the server immediately)",
            cause,
            limit_s,
            engines.num_in_flight,
        )
        is_shared = self.listeners.is_shared
        engines.is_draining, service.is_refusing = True, not is_shared
        deadline = time.monotonic() + limit_s
        if is_shared:
            await self._uvicorn.stop_accepting(self.listeners.sockets)
        while time.monotonic() < deadline:
            num_open = self._uvicorn.release_connections() if is_shared else 0
            if not (num_open or engines.num_in_flight):
                break
            await asyncio.sleep(_DRAIN_PERIOD_S)
        service.is_refusing = True
        if engines.num_in_flight:
            logger.warning("%d requests did not finish in time", engines.num_in_flight)
            engines.fail_all(_shutting_down())
        self._uvicorn.should_exit = True


def _check_start(starting: asyncio.Task[None]) -> None:
    """Raise the error of a failed start. After a single crash, a supervisor should try again."""
    try:
        starting.result()
    except WorkerDied as error:
        raise InternalError(error.message, hint=error.hint) from None


def _shutting_down() -> WorkerDied:
    return WorkerDied("the server is shutting down", hint="use another replica")


def _log_summary(service: Service, server: Server) -> None:
    """Log the model, attention plan, memory, limits and address."""
    facts = service.engines.facts
    assert facts is not None
    settings, limits = service.settings, service.limits
    logger.info("model: %s on %s in %s", ", ".join(service.names), facts.device, facts.dtype)
    for group in facts.groups:
        window = "full attention" if group.window is None else f"window {group.window}"
        layers = f"{group.name}: {group.num_layers} layers, {window}, pages of {group.page_tokens} tokens"
        logger.info("  %s, attention by %s (%s)", layers, group.backend, group.why)
    if settings.data_parallel_size > 1:
        logger.info("engines: %d, each with its own weights and cache, as follows", settings.data_parallel_size)
    gigabytes = facts.num_pages * facts.page_bytes / 1e9
    logger.info("KV cache: %d pages (%.2f GB), context: %d tokens", facts.num_pages, gigabytes, facts.max_model_len)
    logger.info("limits: up to %d sequences run and %d wait", facts.max_num_seqs, facts.max_queue_len)
    logger.info("limits per request: %d MB, n up to %d, %g s", limits.body_mb, limits.n, settings.request_timeout)
    scheme = "https" if settings.ssl_certfile else "http"
    logger.info("ready at %s://%s (OpenAI API under /v1)", scheme, server.listeners.describe())
    if not service.keys:
        level = logging.INFO if settings.uds or settings.host in ("127.0.0.1", "::1", "localhost") else logging.WARNING
        logger.log(level, "no API key is set, so anyone who can reach this address can use the model")


def _return_large_buffers() -> None:
    """Make the C library return every large buffer to the system when it is freed.

    By default it keeps them for reuse, so the process would stay large after a burst of large bodies.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def serve(config: Config, settings: ServeConfig, script: Script | None = None) -> None:
    """Run the server until it is told to stop. With a `script`, the fake engine answers."""
    queue_stderr()
    _return_large_buffers()
    service = Service(config, settings, script)
    server = Server(service)
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.handlers, uvicorn_logger.propagate = logger.handlers, False  # same format as all other lines
    uvicorn_logger.setLevel(logging.WARNING)
    run: Callable[[Coroutine[None, None, None]], None] = asyncio.run
    with contextlib.suppress(ImportError):  # not available on every platform
        from uvloop import run
    run(server.run(lambda ready: _log_summary(service, ready)))
