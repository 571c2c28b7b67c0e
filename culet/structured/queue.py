"""Compile the grammars that requests wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from culet.errors import BadRequest, CuletError, QueueFull
from culet.log import logger
from culet.structured.check import GrammarCheck
from culet.structured.compiler import MAX_KEPT, GrammarCompiler
from culet.structured.tool_grammar import tool_form
from culet.text.tokenizer import Tokenizer
from culet.types import GrammarSpec, Request


class GrammarQueue:
    """Compiles the grammars of requests while the engine keeps running.

    A grammar stays compiled as long as its request lives. If there is no room for more of them, further requests wait.
    """

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        self._compiler = compiler
        self._check = GrammarCheck.for_tokenizer(tokenizer)
        self._waiting: deque[Request] = deque()  # for room
        self._compiling: dict[str, Future[Any]] = {}  # by request id
        self._held: dict[str, str] = {}  # request id -> key of its grammar

    def prepare(self) -> None:
        """Prepare now, so that the first grammar does not wait."""
        self._compiler.prepare()

    def check(self, spec: GrammarSpec) -> None:
        """Raise if the spec cannot be compiled within the limits. Blocks until this is known."""
        self._check.check(spec)

    def call_grammar(self, tools: Sequence[Mapping[str, Any]]) -> GrammarSpec | None:
        """Return the grammar of one call of `tools`, or None if they exceed the limits. Blocks until this is known."""
        try:
            return replace(self._check.check(tool_form(tools, one_call=True)), on_call=True)
        except (BadRequest, QueueFull) as error:
            logger.warning("tool calls are not constrained: %s", error.message)
            return None

    def submit(self, request: Request) -> bool:
        """Start to compile a request's grammar. Return True if it is already compiled."""
        if self._waiting or not self._hold(request):
            self._waiting.append(request)
            return False
        assert request.grammar is not None
        future = self._compiler.submit(request.grammar)
        if future.done() and future.exception() is None:
            return True
        self._compiling[request.request_id] = future
        return False

    def _hold(self, request: Request) -> bool:
        assert request.grammar is not None
        if not self._compiler.hold(request.grammar):
            return False
        self._held[request.request_id] = request.grammar.key
        return True

    def _let_go(self, is_alive: Callable[[str], bool]) -> None:
        """Let go of the grammars of requests that have ended."""
        for request_id in [request_id for request_id in self._held if not is_alive(request_id)]:
            self._compiler.let_go(self._held.pop(request_id))

    def done(self, is_alive: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        """Yield (request id, error or "") for each grammar whose compilation has ended since the last call.

        `is_alive` says whether a request has not ended.
        """
        if self._waiting or len(self._held) >= MAX_KEPT:
            self._let_go(is_alive)
        while self._waiting and (not is_alive(self._waiting[0].request_id) or self._hold(self._waiting[0])):
            request = self._waiting.popleft()
            if request.grammar is not None and request.request_id in self._held:
                self._compiling[request.request_id] = self._compiler.submit(request.grammar)
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
