"""DFlash through scheduler and runner: blocks always match a dense oracle, and the output never changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from culet.errors import InternalError
from culet.runner import deferred_kv
from culet.scheduler import sequence
from culet.types import PageTable
from tests.engine.drafting.dflash_rig import Pair, Pauses, Rig, assert_like_oracle, make_pair, make_request
from tests.engine.drafting.draft_drive import use_fixed_draws
from tests.engine.runner.real_steps import make_prompt
from tests.matrix import matrix
from tests.samplings import GREEDY

LENGTHS = (1, 3, 31, 75)  # prompts within and beyond the windows of the target (32) and the drafter (24)
MISTAKES = {
    "right": lambda place: 0,
    "wrong": lambda place: 1,
    "mixed": lambda place: int(place % 5 == 0 or place % 7 == 0),
}
SHAPES = ["E2B", "31B"]
PAUSED_TOKENS = 20  # of each answer, more than a pause of 11


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.fixture(scope="module", params=["31B", pytest.param("E2B", marks=pytest.mark.slow)])
def default_pair(request, tmp_path_factory) -> Pair:
    """Like `pair`, for the tests that take longest."""
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


def requests(num_tokens: int = 20):
    return [make_request(f"r{length}", make_prompt(length), num_tokens) for length in LENGTHS]


def told(requests, out) -> dict[int, list[int]]:
    """Return the whole sequences by their first token."""
    return {request.prompt_token_ids[0]: [*request.prompt_token_ids, *out[request.request_id, 0]] for request in requests}


def told_all(asked, out) -> dict[int, list[int]]:
    """Like `told`, for turns of one conversation, which share a first token. The longest turn stands for all of them."""
    return told(sorted(asked, key=lambda request: len(request.prompt_token_ids)), out)


@matrix({"pair": SHAPES, "budget": [13, 200]}, fixtures=["pair"])
def test_blocks_of_a_batch(pair, budget):
    """Different lengths run side by side, at once and in chunks. A random drafter is wrong, so every draft is rejected."""
    expected = Rig(pair, drafts=False).run(*requests())
    rig = Rig(pair, budget=budget)
    assert rig.run(*requests()) == expected
    assert rig.scheduler.counters.rollbacks > 20
    assert_like_oracle(pair, rig.rounds, at_least=4 * 18)
    rig.check_pages()


@matrix({"mistake": list(MISTAKES), "pair": SHAPES}, fixtures=["pair"])
def test_blocks_after_acceptance(pair, mistake):
    """Drafts are accepted, rejected, or both. The context is that of the tokens that were kept."""
    asked = requests(40)
    expected = Rig(pair, drafts=False).run(*asked)
    rig = Rig(pair, budget=40, told=told(asked, expected), is_wrong=MISTAKES[mistake])
    assert rig.run(*asked) == expected
    if mistake == "right":
        assert rig.scheduler.counters.steps < 20
    assert_like_oracle(pair, rig.rounds, at_least=12)
    rig.check_pages()


def use_fixed_shapes(rig: Rig, *, has_draws: bool) -> None:
    """Run steps and their draws as a GPU captures them."""
    rig.runner.use_fixed_shapes()
    if has_draws:
        use_fixed_draws(rig.runner)


def conversation(pair, num_tokens=14, is_fixed=False, **settings):
    """Run three turns of one conversation and two prompts with a common prefix in sequence.

    Return (rig, output, all requests).
    """
    rig, out, asked = Rig(pair, budget=50, has_spare=is_fixed, **settings), {}, []
    if is_fixed:
        use_fixed_shapes(rig, has_draws=True)

    def ask(name: str, prompt: list[int]) -> list[int]:
        asked.append(make_request(name, prompt, num_tokens))
        out.update(rig.run(asked[-1]))
        return [*prompt, *out[name, 0]]

    history = ask("turn1", make_prompt(41))
    history = ask("turn2", history + make_prompt(9, seed=1))
    ask("turn3", history + make_prompt(3, seed=2))
    stem = make_prompt(64, seed=3)
    ask("left", stem)
    ask("again", stem)
    ask("right", stem + make_prompt(5, seed=4))
    return rig, out, asked


@pytest.fixture(scope="module")
def plain_conversation(default_pair) -> Callable[[int], tuple[Any, ...]]:
    """What the target says in a conversation by itself, which several tests compare with."""
    return cache(lambda num_tokens: conversation(default_pair, num_tokens, drafts=False))


def test_a_prefix_hit_holds_the_drafters_context(pair):
    """Blocks after a hit are the same as without one, and so is the number of steps. Acceptance does not fall."""
    _, plain, asked = conversation(pair, drafts=False)
    say, wrong = told_all(asked, plain), MISTAKES["mixed"]
    cold, out_cold, _ = conversation(pair, told=say, is_wrong=wrong)
    warm, out_warm, _ = conversation(pair, told=say, is_wrong=wrong, prefix_caching=True)
    assert out_cold == out_warm == plain
    assert warm.scheduler.counters.prefix_hits >= 4
    assert warm.scheduler.counters.prefix_hit_tokens > 200
    assert [block.tokens for block in warm.rounds] == [block.tokens for block in cold.rounds]
    for ours, theirs in zip(warm.rounds, cold.rounds, strict=True):
        assert float((ours.logits - theirs.logits).abs().max()) < 1e-4
    assert warm.scheduler.counters.rollbacks == cold.scheduler.counters.rollbacks
    assert_like_oracle(pair, warm.rounds, at_least=20)
    warm.check_pages()


def drafted(rig: Rig) -> list[tuple[list[int], list[int]]]:
    """Return the drafts with the tokens they follow."""
    return [(block.tokens, block.logits.argmax(-1).tolist()) for block in rig.rounds]


@matrix({"is_fixed": [False, True], "ahead": [False, True]})
def test_drafts_after_pauses(default_pair, plain_conversation, monkeypatch, is_fixed, ahead):
    """Deferred KV gives the same drafts as KV written immediately, and so do prefix hits of sequences that have ended."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    _, plain, asked = plain_conversation(PAUSED_TOKENS)
    settings = {"told": told_all(asked, plain), "is_wrong": MISTAKES["mixed"], "ahead": ahead, "is_fixed": is_fixed}
    outcomes = {}
    for room, prefix_caching in ((1, False), (4, True), (32, True)):
        monkeypatch.setattr(deferred_kv, "MAX_RING_LEN", room)
        rig, out, _ = conversation(default_pair, PAUSED_TOKENS, **settings, policy=Pauses(), prefix_caching=prefix_caching)
        assert out == plain
        assert rig.runner.deferred.ring_len == room
        counters = rig.scheduler.counters
        outcomes[room, prefix_caching] = drafted(rig), counters.drafted_tokens, counters.accepted_tokens
        assert_like_oracle(default_pair, rig.rounds, at_least=15)
        rig.check_pages()
    assert counters.prefix_hits >= 4
    assert counters.accepted_tokens > 10
    first, *rest = outcomes.values()
    assert all(outcome == first for outcome in rest)


def test_deferred_kv_that_is_never_written_fails(default_pair, monkeypatch):
    """The test above fails if the KV of sequences that have ended is not written."""
    due_before = deferred_kv.Ledger.due_before
    monkeypatch.setattr(deferred_kv.Ledger, "due_before", lambda self, plan: due_before(self, plan) and [])
    rig, _, _ = conversation(default_pair, PAUSED_TOKENS, policy=Pauses(), prefix_caching=True)
    with pytest.raises(AssertionError, match="off by"):
        assert_like_oracle(default_pair, rig.rounds, at_least=10)


@matrix({"num_host_pages": [0, 300], "ahead": [True, False]})
def test_a_batch_with_pauses(default_pair, monkeypatch, ahead, num_host_pages):
    """Many sequences run with preemption, cancels, forked samples and full rings. Every block matches the oracle.

    With host pages, the drafter's KV is saved too, including what was deferred.
    """
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    monkeypatch.setattr(sequence, "MIN_PARKED", 1)
    monkeypatch.setattr(deferred_kv, "MAX_RING_LEN", 4)
    sampling = replace(GREEDY, temperature=1.0, seed=5)
    asked = [make_request(f"r{length}", make_prompt(length), 40) for length in (5, 9, 17, 40)]
    asked += [make_request("many", make_prompt(20), 30, sampling, n=3), make_request("leaves", make_prompt(30), 40)]
    expected = Rig(default_pair, drafts=False).run(*asked)
    settings = {"policy": Pauses(7, 50), "ahead": ahead, "num_host_pages": num_host_pages}
    rig = Rig(default_pair, longest=110, prefix_caching=True, budget=70, **settings)
    again = [replace(request, request_id=f"{request.request_id} again") for request in asked]
    for several in (asked, again):
        out = rig.run(*several, cancel_at={20: several[-1].request_id})
        for (name, sample), tokens in out.items():
            said = expected[name.removesuffix(" again"), sample]
            assert tokens == (said[: len(tokens)] if name.startswith("leaves") else said)
    counters = rig.scheduler.counters
    assert min(counters.preemptions, counters.forks, counters.prefix_hits + counters.restart_hits, counters.cancelled) >= 1
    assert counters.restored > 0 or not num_host_pages
    assert_like_oracle(default_pair, rig.rounds, at_least=30)
    rig.check_pages()


def test_parked_with_deferred_kv(default_pair, monkeypatch):
    """Sequences are parked while the KV of their last tokens is deferred. It is written before the pages are saved."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    monkeypatch.setattr(sequence, "MIN_PARKED", 1)
    monkeypatch.setattr(deferred_kv, "MAX_RING_LEN", 32)
    asked = [make_request(f"r{length}", make_prompt(length), 60) for length in (5, 9, 17, 40)]
    expected = Rig(default_pair, drafts=False).run(*asked)
    rig = Rig(default_pair, budget=70, policy=Pauses(7, 50), num_host_pages=300)
    execute, kept, num_deferred = rig.runner.execute, rig.runner.deferred.ledger._kept, 0

    def execute_and_park(plan):
        nonlocal num_deferred
        result = execute(plan)
        if plan.step_id % 5 == 0 and (running := rig.scheduler._running):
            seq = running[plan.step_id % len(running)]
            num_deferred += seq.slot in kept
            assert seq.park(rig.scheduler.page_allocator)
            rig.scheduler._preempt(seq)
        return result

    monkeypatch.setattr(rig.runner, "execute", execute_and_park)
    assert rig.run(*asked) == expected
    assert rig.scheduler.counters.restored >= num_deferred > 5
    assert_like_oracle(default_pair, rig.rounds, at_least=20)
    rig.check_pages()


@matrix({"pair": SHAPES, "prefix_caching": [False, True]}, fixtures=["pair"])
def test_preemption(pair, prefix_caching):
    """There are too few pages for all. Preempted sequences are computed again, including their context."""
    asked = [make_request(f"r{length}", make_prompt(length), 40) for length in (5, 9, 17, 40)]
    expected = Rig(pair, drafts=False).run(*asked)
    rig = Rig(
        pair, longest=81, told=told(asked, expected), is_wrong=MISTAKES["mixed"], prefix_caching=prefix_caching, budget=70
    )
    assert rig.run(*asked) == expected
    assert rig.scheduler.counters.preemptions >= 1
    assert_like_oracle(pair, rig.rounds, at_least=20)
    rig.check_pages()


def test_cancels(pair):
    """Pages of a cancelled sequence go to others at once, and no context is damaged."""
    asked = [make_request(f"r{index}", make_prompt(20 + 7 * index, seed=index), 24) for index in range(8)]
    expected = Rig(pair, drafts=False).run(*asked)
    rig = Rig(pair, num_slabs=60, max_num_seqs=4, told=told(asked, expected), is_wrong=MISTAKES["mixed"], prefix_caching=True)
    out = rig.run(*asked, cancel_at={2: "r1", 4: "r0", 5: "r3", 9: "r5"})
    ended = {("r1", 0), ("r0", 0), ("r3", 0), ("r5", 0)}
    for key, tokens in out.items():
        assert tokens == (expected[key][: len(tokens)] if key in ended else expected[key])
    assert rig.scheduler.counters.cancelled >= 3
    assert_like_oracle(pair, rig.rounds, at_least=20)
    rig.check_pages()


def test_samples_of_one_prompt(pair):
    """Forked samples share a prompt's pages in the step in which they fork. Afterwards each drafts on its own."""
    sampling = replace(GREEDY, temperature=1.0, seed=5)
    asked = [make_request("many", make_prompt(37), 16, sampling, n=4), make_request("one", make_prompt(50), 16)]
    expected = Rig(pair, drafts=False).run(*asked)
    assert len({tuple(tokens) for (name, _), tokens in expected.items() if name == "many"}) > 1
    rig = Rig(pair, prefix_caching=True)
    assert rig.run(*asked) == expected
    assert rig.scheduler.counters.forks == 3
    assert_like_oracle(pair, rig.rounds, at_least=50)
    rig.check_pages()


@matrix({"pair": SHAPES, "has_draws": [False, True]}, fixtures=["pair"])
def test_steps_of_fixed_shapes(pair, has_draws):
    """In padded steps, as graphs replay them, padding rows have no effect and drafts are the same."""
    asked = requests(16)
    expected = Rig(pair).run(*asked)
    rig = Rig(pair, has_spare=True)
    use_fixed_shapes(rig, has_draws=has_draws)
    assert rig.run(*asked) == expected
    assert_like_oracle(pair, rig.rounds, at_least=40)
    for layer in range(pair.spec.first_layer, pair.spec.first_layer + len(pair.spec.spec.layers)):
        assert not rig.pool.planes(layer)[:, rig.pool.spare_page].any()


def test_the_debug_switch_checks_the_pages_ahead(pair, monkeypatch, tmp_path):
    """A row that draws needs pages for a block after its tokens. The check fails before anything is written."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path))
    rig = Rig(pair)
    group = rig.pool.layout.groups[-1]
    rig.scheduler.add(make_request("one", make_prompt(group.page_tokens - 1)))
    plan = rig.scheduler.schedule()
    assert plan is not None
    (row,) = plan.rows
    table = row.tables[group.index]
    assert len(table.pages) == 2
    short = row._replace(tables=(*row.tables[:-1], replace(table, pages=table.pages[:1])))
    with pytest.raises(InternalError, match=r"group dflash .* drafted position"):
        rig.runner.execute(plan.with_rows([short]))
    rig.runner.execute(plan)


def test_the_debug_switch_checks_deferred_writes(pair, monkeypatch, tmp_path):
    """Deferred KV for a page that does not exist raises."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path))
    rig = Rig(pair, policy=Pauses(0, 1))
    rig.run(make_request("one", make_prompt(9), 6))
    (kept,) = rig.runner.deferred.ledger._kept.values()
    assert (kept.slot, kept.first, kept.count) == (0, 9, 5)
    rig.scheduler.add(make_request("two", make_prompt(5)))
    plan = rig.scheduler.schedule()
    for pages, fault in (((), "positions 9 to 13, but the pages end at -1"), ((10**6,), "page 1000000, which is out of range")):
        rig.runner.deferred.ledger._kept[0] = replace(kept, table=PageTable(0, pages))
        with pytest.raises(InternalError, match=f"group dflash .* slot 0, deferred: .*{fault}"):
            rig.runner.execute(plan)
    rig.runner.deferred.ledger._kept[0] = kept
    rig.runner.execute(plan)
    assert not rig.runner.deferred.ledger._kept
