"""Tool calls of `auto`, thinking budgets and `min_tokens` hold, and nothing about how steps run changes a token.

A random model opens calls and thoughts because of a bias. It writes nonsense, so every valid call is due to the grammar.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from culet.engine.memory import least_slabs
from culet.models.gemma4 import Gemma4
from culet.runner.runner import Runner
from culet.scheduler.scheduler import Scheduler
from culet.structured.check import GrammarCheck
from culet.structured.compiler import GrammarCompiler
from culet.structured.matcher import Matcher
from culet.structured.tool_grammar import tool_form
from culet.text.output_reader import ChatReader
from culet.text.tokenizer import Tokenizer
from culet.types import GrammarSpec, OutputRules, Request
from tests.engine.drafting.dflash_rig import Pair, Pauses, make_pair
from tests.engine.drafting.dflash_rig import Rig as DFlashRig
from tests.engine.drafting.draft_drive import DraftDrive, use_fixed_draws
from tests.engine.drafting.test_drafting import GEMMA, MTP, often, sequences
from tests.engine.runner.real_steps import make_prompt
from tests.engine.runner.test_open_rows import replay_by_hand

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["round", "oval", 3]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "cut", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "polish", "parameters": {"type": "object", "properties": {}}}},
]
NUM_TOKENS = 70
BUDGETS = (0, 1, 7)
MIN_TOKENS = 30
Out = Mapping[tuple[str, int], Sequence[int]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "31B")


@pytest.fixture(scope="module")
def target(pair: Pair) -> Gemma4:
    return pair.model


@pytest.fixture(scope="module")
def tokenizer(pair: Pair) -> Tokenizer:
    return Tokenizer(pair.folder.parent / "target")


@pytest.fixture(scope="module")
def marks(tokenizer: Tokenizer) -> dict[str, int]:
    names = {
        "opens": "<|tool_call>",
        "closes": "<tool_call|>",
        "thinks": "<|channel>",
        "thought": "<channel|>",
        "ends": "<turn|>",
    }
    found = {key: tokenizer.token_id(name) for key, name in names.items()}
    return {key: token_id for key, token_id in found.items() if token_id is not None}


@pytest.fixture(scope="module")
def grammar(tokenizer: Tokenizer) -> GrammarSpec:
    check = GrammarCheck.for_tokenizer(tokenizer)
    try:
        return replace(check.check(tool_form(TOOLS, one_call=True)), on_call=True)
    finally:
        check.close()


@pytest.fixture(scope="module")
def asked(marks: dict[str, int], grammar: GrammarSpec) -> list[Request]:
    """Return requests with calls, with budgets, with both, with a least length, and one without any of them."""
    opens, thinks, thought, ends = (marks[name] for name in ("opens", "thinks", "thought", "ends"))
    stops = frozenset({ends})

    def request(name: str, place: int, biases: dict[int, float], **given: Any) -> Request:
        sampling = replace(GEMMA, logit_bias=tuple(sorted(biases.items())), seed=place)
        return replace(Request(name, tuple(make_prompt(place)), sampling, 1, NUM_TOKENS, frozenset()), **given)

    requests = [request(f"call{index}", 3 + index, {opens: 11.0}, grammar=grammar) for index in range(2)]
    for index, budget in enumerate(BUDGETS):
        rules = OutputRules(thinking_budget=budget)
        requests.append(request(f"think{budget}", 11 + index, {thinks: 14.0, thought: -100.0}, rules=rules))
        biases = {thinks: 11.0, opens: 11.0, thought: 5.0}
        requests.append(request(f"both{budget}", 21 + index, biases, rules=rules, grammar=grammar))
    rules = OutputRules(min_tokens=MIN_TOKENS, end_ids=tuple(stops))
    requests.append(request("long", 31, {ends: 14.0}, rules=rules, stop_token_ids=stops))
    return [*requests, request("free", 41, {})]


def use_grammars(runner: Runner, target: Gemma4, tokenizer: Tokenizer) -> None:
    runner.use_grammars(GrammarCompiler.for_tokenizer(tokenizer, target.spec.vocab_size, (1, 106, 50)))


def run_ahead(scheduler: Scheduler, runner: Runner, requests: Sequence[Request], depth: int = 2) -> Out:
    """Run requests as the engine does: with `depth` 2, a step is launched before the previous result is read."""
    for request in requests:
        scheduler.add(request)
    out: dict[tuple[str, int], list[int]] = {}
    launched: deque[Any] = deque()
    while scheduler.has_work:
        while len(launched) < depth and (plan := scheduler.schedule()) is not None:
            launched.append(runner.launch(plan))
        scheduler.apply(launched.popleft().result())
        for delta in scheduler.deltas():
            assert delta.error == ""
            out.setdefault((delta.request_id, delta.sample), []).extend(delta.token_ids)
    return out


@pytest.fixture(scope="module")
def expected(target: Gemma4, tokenizer: Tokenizer, asked: list[Request]) -> Out:
    drive = DraftDrive(target, None, max_num_seqs=16)
    use_grammars(drive.runner, target, tokenizer)
    return run_ahead(drive.scheduler, drive.runner, asked, depth=1)


def thought_tokens(tokens: Sequence[int], marks: Mapping[str, int]) -> int:
    """Count the tokens inside thoughts. A call ends a thought too."""
    count, is_open = 0, False
    for token_id in tokens:
        if is_open and token_id in (marks["thought"], marks["opens"]):
            is_open = False
        elif token_id == marks["thinks"] and not is_open:
            is_open = True
        else:
            count += is_open
    return count


def test_calls_budgets_and_lengths_hold(expected: Out, marks: dict[str, int], tokenizer: Tokenizer) -> None:
    num_calls = 0
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
    for (name, _), tokens in expected.items():
        reader = ChatReader(tokenizer, schemas=schemas, ignore_end=True, calls_hold=True)
        reader.push(tokens)
        reader.finish()
        output = reader.output()
        if name.startswith(("call", "both")):
            assert output.num_malformed == 0 or tokens[-8:].count(marks["opens"]) == 1  # cut before the name was known
            for call in output.tool_calls:
                if call.is_complete:
                    jsonschema.validate(call.arguments, schemas[call.name])
                    num_calls += 1
        if name.startswith(("think", "both")):
            budget = int(name.removeprefix("think").removeprefix("both"))
            assert thought_tokens(tokens, marks) <= budget
            if name.startswith("think"):  # the model never closes a thought by itself
                assert thought_tokens(tokens, marks) == budget == output.num_thought_tokens
                after = list(tokens).index(marks["thought"]) if budget else 0
                assert marks["thinks"] not in tokens[after:]  # it does not open again
    assert num_calls >= 5
    assert len(expected["long", 0]) in range(MIN_TOKENS + 1, NUM_TOKENS)
    assert expected["long", 0][-1] == marks["ends"]
    assert marks["ends"] not in expected["long", 0][:-1]


def test_text_before_the_call_is_untouched(
    target: Gemma4, tokenizer: Tokenizer, asked: list[Request], expected: Out, marks: dict[str, int]
) -> None:
    """Without the grammar, the same tokens are drawn up to the first call."""
    drive = DraftDrive(target, None, max_num_seqs=16)
    use_grammars(drive.runner, target, tokenizer)
    calls = [request for request in asked if request.request_id.startswith("call")]
    free = run_ahead(drive.scheduler, drive.runner, [replace(request, grammar=None) for request in calls])
    for key, tokens in free.items():
        first = list(tokens).index(marks["opens"])
        assert list(expected[key][: first + 1]) == list(tokens[: first + 1])
        assert list(expected[key]) != list(tokens)


def test_look_ahead_changes_nothing(target: Gemma4, tokenizer: Tokenizer, asked: list[Request], expected: Out) -> None:
    drive = DraftDrive(target, None, max_num_seqs=16)
    use_grammars(drive.runner, target, tokenizer)
    assert run_ahead(drive.scheduler, drive.runner, asked) == expected
    drive.check_pages()


@pytest.mark.slow
def test_preemption_changes_nothing(target: Gemma4, tokenizer: Tokenizer, asked: list[Request], expected: Out) -> None:
    num_slabs = least_slabs(DraftDrive(target, None).layout, 120) + 12
    drive = DraftDrive(target, None, max_num_seqs=16, num_slabs=num_slabs)
    use_grammars(drive.runner, target, tokenizer)
    assert run_ahead(drive.scheduler, drive.runner, asked) == expected
    assert drive.scheduler.counters.preemptions > 0
    drive.check_pages()


@pytest.mark.parametrize("is_fixed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["any shape", "fixed shapes"])
def test_an_assistant_changes_nothing(
    target: Gemma4, tokenizer: Tokenizer, asked: list[Request], expected: Out, is_fixed: bool
) -> None:
    """The drafts are mostly right, so calls and the ends of thoughts lie inside verified blocks."""
    known = sequences(asked, expected)
    drive = DraftDrive(target, MTP, known=known, is_told=often, max_num_seqs=16, num_slabs=600, is_fixed=is_fixed)
    use_grammars(drive.runner, target, tokenizer)
    served: list[int] = []
    if is_fixed:
        use_fixed_draws(drive.runner)
        served = replay_by_hand(drive.runner)
    drive.scheduler.plans_open = is_fixed
    assert run_ahead(drive.scheduler, drive.runner, asked) == expected
    assert drive.scheduler.counters.accepted_tokens > 100
    assert drive.scheduler.counters.rolled_back_tokens > 50
    if is_fixed:
        for request in asked[1::3]:  # alone, a free sequence is planned while its drafts are in flight
            assert run_ahead(drive.scheduler, drive.runner, [request])[request.request_id, 0] == expected[request.request_id, 0]
        assert sum(count > 0 for count in served) > 5  # rows that were planned while drafts were in flight
    drive.check_pages()


@pytest.mark.parametrize("policy", [pytest.param(None, marks=pytest.mark.slow), Pauses], ids=["drafts", "pauses"])
def test_a_drafter_with_pages_of_its_own_changes_nothing(
    pair: Pair, tokenizer: Tokenizer, asked: list[Request], expected: Out, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    known = sequences(asked, expected)
    settings: dict[str, Any] = {"told": known, "is_wrong": lambda place: int(place % 5 == 0), "has_spare": True, "ahead": True}
    rig = DFlashRig(pair, **settings, max_num_seqs=16, num_slabs=600, policy=policy() if policy else None)
    use_grammars(rig.runner, pair.model, tokenizer)
    rig.runner.use_fixed_shapes()
    use_fixed_draws(rig.runner)
    replay_by_hand(rig.runner)
    rig.scheduler.plans_open = True
    assert run_ahead(rig.scheduler, rig.runner, asked) == expected
    for request in asked[1::3]:
        assert run_ahead(rig.scheduler, rig.runner, [request])[request.request_id, 0] == expected[request.request_id, 0]
    rig.check_pages()


@pytest.mark.parametrize("drafter", ["none", pytest.param("assistant", marks=pytest.mark.slow), "own pages"])
def test_late_masks_change_nothing(
    pair: Pair, tokenizer: Tokenizer, asked: list[Request], expected: Out, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw whose mask was not computed in time is drawn again, also in the middle of a verified block."""
    chance, write, num_late = random.Random(1), Matcher.write, 0

    def write_late(self: Matcher, mask_KW: Any, drafts: tuple[int, ...]) -> None:
        nonlocal num_late
        write(self, mask_KW, drafts)
        if not self.is_cheap:
            num_masks = min(self.num_masks, chance.choice((0, 1, self.num_masks)))
            num_late += num_masks < self.num_masks
            mask_KW[num_masks:], self.num_masks = -1, num_masks

    monkeypatch.setattr(Matcher, "write", write_late)
    if drafter == "none":
        test_look_ahead_changes_nothing(pair.model, tokenizer, asked, expected)
    elif drafter == "assistant":
        test_an_assistant_changes_nothing(pair.model, tokenizer, asked, expected, is_fixed=True)
    else:
        test_a_drafter_with_pages_of_its_own_changes_nothing(pair, tokenizer, asked, expected, Pauses, monkeypatch)
    assert num_late > 20
