"""The logger, `chose`, which logs every setting that Culet derives, and a stderr that never blocks.

A pipe that nobody reads fills up, and then a plain write to stderr waits forever. A server calls `queue_stderr`, so that a
thread writes instead. At most MAX_PENDING_BYTES wait for it. Lines beyond that are dropped and counted.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from typing import Any

from culet import env

logger = logging.getLogger("culet")

MAX_PENDING_BYTES = 1 << 20
EXIT_LIMIT_S = 2.0  # time for the last lines to be read at the end of the process
_MAX_WRITE_BYTES = 1 << 16


class _JsonLines(logging.Formatter):
    """One JSON object per line: time, level, message, and the `fields` passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        entry = {"time": stamp, "level": record.levelname.lower(), "message": record.getMessage()}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at the moment, each line in one write."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def setup_logging(level: str | None = None, form: str = "text") -> None:
    """Send Culet's log to stderr, as text or as JSON lines. Programs call this. Importing Culet never does."""
    handler = _StderrHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines() if form == "json" else text)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel((level or env.LOG_LEVEL.get()).upper())


def chose(name: str, value: object, reason: str) -> None:
    """Log a derived setting with its reason."""
    logger.info("%s: %s (%s)", name, value, reason)


# Logs that never block


class QueuedWriter(io.RawIOBase):
    """A file whose writes are made by a thread. A write that finds the queue full is dropped as a whole."""

    def __init__(self, descriptor: int, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._descriptor, self._max_pending_bytes = descriptor, max_pending_bytes
        self._lock = threading.Lock()
        self._parts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._num_pending_bytes = 0
        self._is_idle = threading.Event()
        self._is_idle.set()
        self.num_dropped = 0  # writes, of one line each
        self._num_reported = 0
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Queue the data, or drop it if too much is waiting. Never wait."""
        part = bytes(data)
        with self._lock:
            if self._num_pending_bytes + len(part) > self._max_pending_bytes:
                self.num_dropped += 1
            else:
                self._num_pending_bytes += len(part)
                self._is_idle.clear()
                self._parts.put(part)
        return len(part)

    def flush_within(self, limit_s: float) -> None:
        """Wait until everything is written, at most `limit_s`."""
        self._is_idle.wait(limit_s)

    def _run(self) -> None:
        while True:
            parts = [self._parts.get()]
            while not self._parts.empty() and sum(map(len, parts)) < _MAX_WRITE_BYTES:
                parts.append(self._parts.get())
            data = b"".join(parts)
            is_written = self._write_all(data)
            with self._lock:
                if not is_written:
                    self.num_dropped += len(parts)
                num_new = self.num_dropped - self._num_reported if is_written else 0
                self._num_reported += num_new
            if num_new:
                logger.warning("%d lines of the log were dropped, because stderr was not read", num_new)
            with self._lock:
                self._num_pending_bytes -= len(data)
                if not self._num_pending_bytes:
                    self._is_idle.set()

    def _write_all(self, data: bytes) -> bool:
        """Write to the file, however long it takes. Return False if it is closed."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # someone made the pipe non-blocking
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True


_writer: QueuedWriter | None = None


def queue_stderr() -> None:
    """From now on, no write to `sys.stderr` in this process waits for a reader. At exit, the last lines get a short time.

    Only C code that writes to the descriptor itself can still block.
    """
    global _writer
    if _writer is not None:
        return
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # no stderr, or one that is not a file
        return
    _writer = QueuedWriter(descriptor)
    # Each write goes straight to the writer, so that a line is queued or dropped as a whole.
    sys.stderr = io.TextIOWrapper(_writer, encoding="utf-8", errors="backslashreplace", write_through=True)
    atexit.register(flush_stderr)


def flush_stderr(limit_s: float = EXIT_LIMIT_S) -> None:
    """Give the reader of the log up to `limit_s` to read what is queued. Call before a process ends by force."""
    if _writer is not None:
        _writer.flush_within(limit_s)


def num_dropped_lines() -> int:
    """Return how many lines of this process's log were dropped."""
    return 0 if _writer is None else _writer.num_dropped
