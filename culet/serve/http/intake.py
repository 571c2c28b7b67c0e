"""One budget for the bodies of all requests, and counts of what was refused before an endpoint saw it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import Scope

from culet.serve.http_errors import HttpError

BODY = "culet.body"  # scope key of a request's IncomingBody. Requests without a body have none.
_FREE_BYTES = 16 << 10  # the start of a body, which is never refused for lack of room: a short chat always gets in
_BODY_BYTES_S = 64 << 20  # how fast bodies are read, over all connections, so that large ones do not slow down other clients
_BURST_S = 0.25  # how many seconds' worth of bodies may arrive at once
_DROP_BYTES_S = 200 << 20  # how fast the rest of refused requests is read, over all connections
_MIN_DROP_PAUSE_S = 0.01


class Intake:
    """The bodies of all requests that are being read or prepared.

    If they outgrow the budget, the body that has held the most bytes for the longest time is refused, unless it is complete.
    So a client that sends slowly loses its place to one that sends quickly.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.refusals: Counter[str] = Counter()  # by error code
        self._max_bytes = max_bytes
        self._bodies: set[IncomingBody] = set()  # those that hold bytes
        self._read_until = self._dropped_until = 0.0

    def hold(self, body: IncomingBody, num_bytes: int) -> None:
        """Count bytes that have arrived. Refuse bodies, this one or others, while all of them are too large."""
        self._bodies.add(body)
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and body.num_bytes > _FREE_BYTES:
            now = time.monotonic()
            refusable = (other for other in self._bodies if not other.is_complete and other.num_bytes > _FREE_BYTES)
            worst = max(refusable, key=lambda other: other.num_bytes * (now - other.began_at), default=body)
            worst.refuse(
                HttpError(
                    503,
                    f"the server is reading {self.num_bytes >> 20} MB of request bodies and has no room for more",
                    hint="try again later, or raise the limit with --limits bodies_mb=N",
                    code="bodies_full",
                )
            )

    def read_pause_s(self, num_bytes: int) -> float:
        """Return how long to stop reading from a connection that sent this much. Short requests are complete by then."""
        now = time.monotonic()
        self._read_until = max(now - _BURST_S, self._read_until) + num_bytes / _BODY_BYTES_S
        return max(0.0, self._read_until - now)

    def drop_pause_s(self, num_bytes: int) -> float:
        """Return how long a connection that sent bytes after a refusal must wait, so that they cost others little time."""
        now = time.monotonic()
        self._dropped_until = max(now, self._dropped_until) + num_bytes / _DROP_BYTES_S
        return max(_MIN_DROP_PAUSE_S, self._dropped_until - now)

    def forget(self, body: IncomingBody) -> None:
        """Stop counting a body."""
        self._bodies.discard(body)
        self.num_bytes -= body.num_bytes
        body.num_bytes = 0


class IncomingBody:
    """The body of one request, as far as it has arrived."""

    __slots__ = ("_intake", "_on_refused", "began_at", "error", "is_complete", "num_bytes")

    def __init__(self, intake: Intake, on_refused: Callable[[], None]) -> None:
        """`on_refused` must drop the bytes that nobody has read and wake the reader, which then raises `error`."""
        self._intake, self._on_refused = intake, on_refused
        self.began_at = time.monotonic()
        self.error: HttpError | None = None  # why it was refused
        self.is_complete = False
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived. May refuse this body or others."""
        self._intake.hold(self, num_bytes)

    def refuse(self, error: HttpError) -> None:
        """Fail the request, which is still being read."""
        self.release()
        if self.error is None:
            self.error = error
            self._intake.refusals[error.code or ""] += 1
            self._on_refused()

    def release(self) -> None:
        """Give the bytes back to the budget. Call when nothing refers to them any more."""
        self._intake.forget(self)


def release_body(scope: Scope) -> None:
    """Give the bytes of a request's body back, because the request has been prepared or has ended."""
    body: IncomingBody | None = scope.get(BODY)
    if body is not None:
        body.release()
