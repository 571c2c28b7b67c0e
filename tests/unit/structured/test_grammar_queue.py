"""GrammarQueue: grammars of requests that have not ended stay compiled, so the engine never compiles one again itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from culet.structured import compiler as compiler_module
from culet.structured import queue as queue_module
from culet.structured.compiler import GrammarCompiler
from culet.structured.queue import GrammarQueue
from culet.types import GrammarSpec, Request
from tests.unit.engine.test_rehearsal import SAMPLING
from tests.unit.structured.test_grammar import make_compiler

NUM_KEPT = 4


class NoTokenizer:
    special_ids: frozenset[int] = frozenset()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    for module in (compiler_module, queue_module):
        monkeypatch.setattr(module, "MAX_KEPT", NUM_KEPT)
    return make_compiler()


@pytest.fixture
def queue(compiler: GrammarCompiler) -> Iterator[GrammarQueue]:
    queue = GrammarQueue(compiler, NoTokenizer())  # type: ignore[arg-type]
    yield queue
    queue._check.close()


def request(number: int, tenant: str = "") -> Request:
    grammar = GrammarSpec("regex", f"[a-c]{{{number + 1}}}")
    return Request(f"r{number}", (9,), SAMPLING, 1, 8, frozenset(), grammar=grammar, tenant=tenant)


def wait_done(queue: GrammarQueue, alive: set[str]) -> set[str]:
    """Return the ids of the requests whose grammars are compiled, when no more are being compiled."""
    done = {request_id for request_id, error in queue.done(alive.__contains__) if not error}
    while queue._compiling:
        queue.wait(10)
        done |= {request_id for request_id, error in queue.done(alive.__contains__) if not error}
    return done


def test_grammars_in_use_are_not_compiled_again(compiler: GrammarCompiler, queue: GrammarQueue) -> None:
    requests = [request(number) for number in range(10)]
    alive = {each.request_id for each in requests}
    done = {each.request_id for each in requests if queue.submit(each)}  # some compile at once
    assert done | wait_done(queue, alive) == {each.request_id for each in requests[:NUM_KEPT]}
    kept = [compiler._find(each.grammar) for each in requests[:NUM_KEPT] if each.grammar is not None]
    assert None not in kept
    compiler.compile(GrammarSpec("regex", "x"))  # another one does not displace them
    assert [compiler._find(each.grammar) for each in requests[:NUM_KEPT] if each.grammar is not None] == kept
    alive -= {"r1", "r4"}  # one of those that are compiled, and one that still waits
    assert wait_done(queue, alive) == {"r5"}
    alive.clear()
    assert wait_done(queue, alive) == set()
    again = request(9)
    assert queue.submit(again) or wait_done(queue, {"r9"}) == {"r9"}
    assert queue.submit(again)


def test_requests_with_the_same_grammar_share_it(queue: GrammarQueue) -> None:
    same = request(0)
    copies = [Request(f"c{number}", (9,), SAMPLING, 1, 8, frozenset(), grammar=same.grammar) for number in range(9)]
    for copy in copies:
        queue.submit(copy)
    assert wait_done(queue, {copy.request_id for copy in copies}) <= {copy.request_id for copy in copies}
    assert not queue._waiting
    queue.forget()
    assert not queue._held
    assert not queue._compiler._held


@pytest.fixture
def limited() -> Iterator[GrammarQueue]:
    queue = GrammarQueue(make_compiler(), NoTokenizer(), max_new=2)  # type: ignore[arg-type]
    yield queue
    queue._check.close()


def test_each_tenant_runs_few_requests_with_new_grammars(limited: GrammarQueue) -> None:
    requests = [request(number) for number in range(5)] + [request(number, "b") for number in range(5, 8)]
    alive = {each.request_id for each in requests}
    done = {each.request_id for each in requests if limited.submit(each)}
    assert done | wait_done(limited, alive) == {"r0", "r1", "r5", "r6"}
    alive -= {"r1", "r2"}  # one that runs, and one that waits
    assert wait_done(limited, alive) == {"r3"}  # first come, first served
    alive -= {"r0", "r3", "r5"}
    assert wait_done(limited, alive) == {"r4", "r7"}
    assert not limited._waiting


def test_requests_that_have_left_are_not_kept(limited: GrammarQueue) -> None:
    alive = {"r0", "r1", "r2"}  # two that run, and the first that waits
    for number in range(20):
        limited.submit(request(number))
    wait_done(limited, alive)
    assert [each.request_id for each in limited._waiting[""]] == ["r2"]


def test_long_answers_do_not_keep_others_waiting(limited: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request counts as new for a while only."""
    alive = {"r0", "r1", "r2"}
    for number in range(3):
        limited.submit(request(number))
    assert "r2" not in wait_done(limited, alive)
    assert limited.is_new("r0")
    monkeypatch.setattr(queue_module, "NEW_S", 0.0)
    assert "r2" in wait_done(limited, alive)
    assert not limited.is_new("r0")


def test_known_grammars_do_not_count(limited: GrammarQueue) -> None:
    alive = {f"r{number}" for number in range(3)}
    for number in range(3):
        limited.submit(request(number))
    wait_done(limited, alive)
    again = Request("again", (9,), SAMPLING, 1, 8, frozenset(), grammar=request(0).grammar)
    assert limited.submit(again)  # while r2 waits
    assert "again" not in limited._new
    limited.forget()
    assert not limited._new


def test_a_grammar_that_needs_room_is_not_overtaken(compiler: GrammarCompiler, queue: GrammarQueue) -> None:
    """Requests of other tenants do not take the room that one waits for."""
    requests = [request(number) for number in range(NUM_KEPT + 1)]
    alive = {each.request_id for each in requests} | {"r9"}
    for each in requests:
        queue.submit(each)
    wait_done(queue, alive)
    assert not queue.submit(request(9, "b"))
    alive -= {"r0"}
    assert wait_done(queue, alive) == {f"r{NUM_KEPT}"}
    alive -= {"r1"}
    assert wait_done(queue, alive) == {"r9"}
