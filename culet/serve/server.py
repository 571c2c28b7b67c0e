"""Run `culet serve`: bind the port, start the engine, serve requests and shut down cleanly.

Ctrl-C and SIGTERM drain the server. `/ready` then answers 503 and new requests are refused. Running requests get time to
finish before they are failed. A second signal stops immediately. If the engine dies and is not restarted, the server ends.
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

_KEEP_ALIVE_S = 30  # idle connections are closed after this time
_FLUSH_S = 5  # time for the last answers to reach their clients
_DRAIN_PERIOD_S = 0.05


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """The service and its web server."""

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
                timeout_graceful_shutdown=_FLUSH_S,
                backlog=2048,
            )
        )
        self._failure: CuletError | None = None
        self._drain: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[Server], None] = lambda server: None) -> None:
        """Serve until a signal arrives or the engine fails. Raise in case of a failure."""
        self._service.on_exit = self._fail
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._service.keys.has_file:
            loop.add_signal_handler(signal.SIGHUP, self._service.keys.reload)
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
        """End the server, because the engine will not be restarted. Its requests have already failed."""
        self._failure = error if isinstance(error, WorkerDied) else WorkerDied(error.message, hint=error.hint)
        self._uvicorn.should_exit = True

    def _on_signal(self, number: int) -> None:
        if self._drain is not None or not self._service.is_ready:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            if self._service.is_draining:
                self._service.engine.fail_all(_shutting_down())
            return
        self._drain = asyncio.get_running_loop().create_task(self._shut_down(signal.Signals(number).name))

    async def _shut_down(self, cause: str) -> None:
        service, engine = self._service, self._service.engine
        limit_s = service.settings.drain_timeout
        logger.info(
            "%s: waiting up to %g s for %d requests to finish (a second signal stops the server immediately)",
            cause,
            limit_s,
            engine.num_in_flight,
        )
        service.is_draining = True
        deadline = time.monotonic() + limit_s
        while engine.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_PERIOD_S)
        if engine.num_in_flight:
            logger.warning("%d requests did not finish in time", engine.num_in_flight)
            engine.fail_all(_shutting_down())
        self._uvicorn.should_exit = True


def _shutting_down() -> WorkerDied:
    return WorkerDied("the server is shutting down", hint="use another replica")


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket. This happens before anything is loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}", hint="choose another --host or --port") from error
    sock.set_inheritable(False)
    return sock


def _log_summary(service: Service, port: int) -> None:
    """Log the model, attention plan, memory, limits and address."""
    facts = service.engine.facts
    assert facts is not None
    settings, limits = service.settings, service.limits
    logger.info("model: %s on %s in %s", ", ".join(service.names), facts.device, facts.dtype)
    for group in facts.groups:
        window = "full attention" if group.window is None else f"window {group.window}"
        layers = f"{group.name}: {group.num_layers} layers, {window}, pages of {group.page_tokens} tokens"
        logger.info("  %s, attention by %s (%s)", layers, group.backend, group.why)
    gigabytes = facts.num_pages * facts.page_bytes / 1e9
    logger.info("KV cache: %d pages (%.2f GB), context: %d tokens", facts.num_pages, gigabytes, facts.max_model_len)
    logger.info("limits: up to %d sequences run and %d wait", facts.max_num_seqs, facts.max_queue_len)
    logger.info("limits per request: %d MB, n up to %d, %g s", limits.body_mb, limits.n, settings.request_timeout)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("ready at http://%s:%d (OpenAI API under /v1)", host, port)
    if not service.keys:
        level = logging.INFO if settings.host in ("127.0.0.1", "::1", "localhost") else logging.WARNING
        logger.log(level, "no API key is set, so anyone who can reach this address can use the model")


def serve(config: Config, settings: ServeConfig, script: Script | None = None) -> None:
    """Run the server until it is told to stop. With a `script`, the fake engine answers."""
    service = Service(config, settings, script)
    server = Server(service)
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.handlers, uvicorn_logger.propagate = logger.handlers, False  # same format as all other lines
    uvicorn_logger.setLevel(logging.WARNING)
    run: Callable[[Coroutine[None, None, None]], None] = asyncio.run
    with contextlib.suppress(ImportError):  # not available on every platform
        from uvloop import run
    run(server.run(lambda ready: _log_summary(service, ready.port)))
