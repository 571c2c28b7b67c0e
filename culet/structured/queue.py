"""Compile the grammars that requests wait for."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, NamedTuple

from culet.errors import CuletError
from culet.structured.check import GrammarCheck
from culet.structured.compiler import MAX_KEPT, GrammarCompiler
from culet.structured.tool_grammar import tool_form
from culet.text.tokenizer import Tokenizer
from culet.types import GrammarSpec, Request

_PATIENCE = 6.0  # Calls of LLM wait for a grammar on a busy machine, since nobody else waits behind them.
NEW_S = 2.0  # time for which a request with a new grammar counts as such. Its first masks are the slow ones.


class _Begun(NamedTuple):
    """A request whose grammar was compiled for it."""

    tenant: str
    num_samples: int
    at: float


class GrammarQueue:
    """Compiles the grammars of requests while the engine keeps running.

    A grammar stays compiled as long as its request lives. If there is no room for more of them, further requests wait. Requests
    with new grammars may also be limited, so that a client who sends many of them has a bounded share of each step.
    """

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, *, max_new: float = math.inf) -> None:
        """Compile nothing yet.

        At most `max_new` samples of each tenant begin within `NEW_S` with a grammar that was compiled for them.
        """
        self._compiler = compiler
        self._check = GrammarCheck.for_tokenizer(tokenizer, patience=_PATIENCE)
        self._max_new = max_new
        self._waiting: dict[str, deque[Request]] = {}  # by tenant, in order of arrival
        self._has_room = True  # otherwise the first that waits has not got the room that it needs
        self._compiling: dict[str, Future[Any]] = {}  # by request id
        self._held: dict[str, str] = {}  # request id -> key of its grammar
        self._new: dict[str, _Begun] = {}  # by request id

    def prepare(self) -> None:
        """Prepare now, so that the first grammar does not wait."""
        self._compiler.prepare()

    def check(self, spec: GrammarSpec) -> None:
        """Raise if the spec cannot be compiled within the limits. Blocks until this is known."""
        self._check.check(spec)

    def call_grammar(self, tools: Sequence[Mapping[str, Any]], document: GrammarSpec | None = None) -> GrammarSpec:
        """Return the grammar of one call of `tools`, or with a `document`, of that document or calls. Block until it is known.

        Tools whose schemas exceed the limits may be called with any arguments, and the log says so. Beside a document, that is
        an error.
        """
        if document is not None:
            return replace(self._check.check(tool_form(tools, document=document)), after_thought=document.after_thought)
        return replace(self._check.check(tool_form(tools, one_call=True, is_lenient=True)), on_call=True)

    def submit(self, request: Request) -> bool:
        """Start to compile a request's grammar. Return True if it is already compiled."""
        if not (self._has_room and self._begin(request)):
            self._waiting.setdefault(request.tenant, deque()).append(request)
            return False
        future = self._compiling[request.request_id]
        if future.done() and future.exception() is None:
            del self._compiling[request.request_id]
            return True
        return False

    def _begin(self, request: Request) -> bool:
        """Start to compile a request's grammar, unless it must wait. A known grammar waits only for room."""
        spec, request_id = request.grammar, request.request_id
        assert spec is not None
        is_new = not self._compiler.knows(spec)
        if is_new and self._num_new(request.tenant) >= self._max_new:
            return False
        self._has_room = self._compiler.hold(spec)
        if not self._has_room:
            return False
        if is_new:
            self._new[request_id] = _Begun(request.tenant, request.n, time.monotonic())
        self._held[request_id] = spec.key
        self._compiling[request_id] = self._compiler.submit(spec)
        return True

    def is_new(self, request_id: str) -> bool:
        """Return whether a request began a short while ago with a grammar that was compiled for it."""
        return request_id in self._new

    def _num_new(self, tenant: str) -> int:
        """Return how many samples of a tenant have new grammars."""
        return sum(begun.num_samples for begun in self._new.values() if begun.tenant == tenant)

    def _begin_waiting(self, is_alive: Callable[[str], bool]) -> None:
        """Start compiling the grammars of waiting requests. Each tenant's requests begin in order of arrival."""
        self._has_room = True
        for tenant, waiting in list(self._waiting.items()):
            requests = self._waiting[tenant] = deque(request for request in waiting if is_alive(request.request_id))
            while requests and self._begin(requests[0]):
                requests.popleft()
            if not requests:
                del self._waiting[tenant]
            if not self._has_room:
                self._waiting = {tenant: requests, **self._waiting}  # comes first next time, so that nobody takes the room
                return

    def _let_go(self, is_alive: Callable[[str], bool]) -> None:
        """Let go of the grammars of requests that have ended."""
        for request_id in [request_id for request_id in self._held if not is_alive(request_id)]:
            self._compiler.let_go(self._held.pop(request_id))
            self._new.pop(request_id, None)
        earliest = time.monotonic() - NEW_S
        self._new = {request_id: begun for request_id, begun in self._new.items() if begun.at > earliest}

    def done(self, is_alive: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        """Yield (request id, error or "") for each grammar whose compilation has ended since the last call.

        `is_alive` says whether a request has not ended.
        """
        if self._waiting or len(self._held) >= MAX_KEPT:
            self._let_go(is_alive)
            self._begin_waiting(is_alive)
        if not self._compiling:
            return
        for request_id, future in list(self._compiling.items()):
            if future.done():
                del self._compiling[request_id]
                error = future.exception()
                yield request_id, "" if error is None else error.message if isinstance(error, CuletError) else str(error)

    def wait(self, limit_s: float) -> None:
        """Wait until a grammar is compiled, at most `limit_s`. Return at once if none is being compiled."""
        if self._compiling:
            wait(self._compiling.values(), limit_s, FIRST_COMPLETED)

    def forget(self) -> None:
        """Drop all requests."""
        self._waiting.clear()
        self._compiling.clear()
        self._let_go(lambda request_id: False)
