"""Matcher: sequences are bound only where a mask matters, and draws without masks count only up to there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from culet.structured.compiled_grammar import shorten
from culet.structured.compiler import GrammarCompiler
from culet.structured.matcher import Vocabulary
from culet.structured.tool_grammar import call_grammar
from culet.types import GrammarSpec, OutputRules
from tests.unit.structured.test_grammar import CLOSE, EOS, OPEN, PIECES, TURN_END, allowed, next_of, spec, token

CALL, CALL_END, QUOTE = 5, 6, 7
TOOLS = [{"function": {"name": "abc", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]
TEXT, MORE = token("x"), token("y")


def new_compiler() -> GrammarCompiler:
    pieces = Vocabulary(len(PIECES), lambda i: PIECES[i], frozenset(range(8)), (EOS, TURN_END), (OPEN, CLOSE), (CALL, CALL_END))
    return GrammarCompiler(pieces)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return new_compiler()


def on_call() -> GrammarSpec:
    return GrammarSpec("lark", call_grammar(TOOLS, one_call=True), is_strict=False, on_call=True)


def tokens(text: str) -> list[int]:
    return [token(character) for character in text]


def test_a_call_is_held_and_text_is_not(compiler: GrammarCompiler) -> None:
    matcher = compiler.start(on_call(), [9], 1)
    for _ in range(2):  # several calls
        assert not matcher.is_bound
        assert matcher.take([TEXT, CALL, MORE, MORE], is_masked=False) == 2  # what was drawn after the opening does not count
        assert matcher.is_bound
        assert matcher.take([TEXT], is_masked=False) == 0  # a row that was launched before this was known
        assert next_of(compiler, matcher) == {token("c")}
        call = [*tokens("call:"), token("abc"), *tokens("{n:12}")]
        matcher.take(call, is_masked=True)
        assert next_of(compiler, matcher) == {CALL_END}
        matcher.take([CALL_END], is_masked=True)
    assert not matcher.is_bound
    again = compiler.start(on_call(), [9, TEXT, CALL, *tokens("call:a")], 1)  # it lost its slot inside a call
    assert next_of(compiler, again) == {token("b"), token("bc")}


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_call_that_cannot_be_held_any_longer(compiler: GrammarCompiler, is_strict: bool) -> None:
    """It goes on freely, or ends the answer if a tool is strict."""
    matcher = compiler.start(replace(on_call(), is_strict=is_strict), [9, CALL], 1)
    matcher.accept([TEXT])  # no draw with a mask gives this
    assert bool(matcher.fault) is is_strict
    assert matcher.is_bound is is_strict


def test_a_required_call_and_a_free_one_share_a_grammar() -> None:
    """A grammar that was compiled for an answer that is a call also holds the calls of a free answer."""
    compiler = new_compiler()
    assert next_of(compiler, compiler.start(replace(on_call(), on_call=False), [9], 1)) == {CALL}
    matcher = compiler.start(on_call(), [9], 1)
    matcher.take([TEXT, CALL], is_masked=False)
    assert next_of(compiler, matcher) == {token("c")}


def test_forced_text_is_written_in_any_tokens(compiler: GrammarCompiler) -> None:
    """The model chooses among all tokens that spell the text, not only single characters."""
    for form in (spec(choice=["abcd"]), spec(regex="abcd"), spec(grammar='start: "abcd"'), spec(json={"const": 10})):
        matcher = compiler.start(form, [9], 1)
        found = next_of(compiler, matcher)
        assert {token("1"), token("10")} <= found if form.kind == "json_schema" else found == {token("a"), token("abc")}


def test_a_chain_of_drafts_goes_through_a_call(compiler: GrammarCompiler) -> None:
    """Masks after each draft are those of a matcher that has drawn it, also where a call begins or ends in between."""
    text = [*tokens("call:abc{n:1}"), CALL_END, TEXT, CALL, *tokens("call:")]
    matcher = compiler.start(on_call(), [9, CALL], 1)
    matcher.drafts = tuple(text)
    masks = compiler.masks([(matcher, len(text))])
    for count in range(len(text) + 1):
        alone = compiler.start(on_call(), [9, CALL, *text[:count]], 1)
        want = allowed(compiler.masks([(alone, 0)])[0])
        assert allowed(masks[count]) == want
    assert next_of(compiler, matcher) == {token("c")}  # nothing has moved


@pytest.mark.parametrize("budget", [1, 3])
def test_a_thought_ends_at_its_budget(compiler: GrammarCompiler, budget: int) -> None:
    matcher = compiler.start(None, [9], 1, OutputRules(thinking_budget=budget))
    assert matcher.take([TEXT, OPEN, *[TEXT] * 5], is_masked=False) == 2 + budget
    assert matcher.is_bound
    assert next_of(compiler, matcher) == {CLOSE}
    assert matcher.banned_id == OPEN
    matcher.take([CLOSE], is_masked=True)
    assert not matcher.is_bound
    assert matcher.banned_id == OPEN  # it does not open again


def test_thoughts_share_a_budget(compiler: GrammarCompiler) -> None:
    matcher = compiler.start(None, [9], 1, OutputRules(thinking_budget=3))
    assert matcher.take([OPEN, TEXT, TEXT, CLOSE, TEXT], is_masked=False) == 5
    assert (matcher.is_bound, matcher.banned_id) == (False, None)
    assert matcher.take([OPEN, TEXT, TEXT], is_masked=False) == 2
    assert next_of(compiler, matcher) == {CLOSE}


def test_a_budget_of_nothing(compiler: GrammarCompiler) -> None:
    matcher = compiler.start(None, [9], 1, OutputRules(thinking_budget=0))
    assert (matcher.is_bound, matcher.banned_id) == (False, OPEN)
    inside = compiler.start(None, [9, OPEN, TEXT], 3, OutputRules(thinking_budget=0))  # the prompt has opened a thought
    assert next_of(compiler, inside) == {CLOSE}
    form = replace(spec(choice=["abc"]), after_thought=True)
    assert OPEN not in next_of(compiler, compiler.start(form, [9], 1, OutputRules(thinking_budget=0)))
    assert OPEN in next_of(compiler, compiler.start(form, [9], 1, OutputRules(thinking_budget=1)))


def test_a_budget_before_a_document(compiler: GrammarCompiler) -> None:
    form = replace(spec(choice=["abc"]), after_thought=True)
    matcher = compiler.start(form, [9], 1, OutputRules(thinking_budget=2))
    matcher.take([OPEN, TEXT, TEXT], is_masked=True)
    assert next_of(compiler, matcher) == {CLOSE}
    matcher.take([CLOSE], is_masked=True)
    assert next_of(compiler, matcher) == {token("a"), token("abc")}


def test_min_tokens(compiler: GrammarCompiler) -> None:
    rules = OutputRules(min_tokens=2, end_ids=(EOS, TEXT))
    matcher = compiler.start(None, [9], 1, rules)
    for _ in range(2):
        assert matcher.is_bound
        assert not {EOS, TEXT} & next_of(compiler, matcher)
        matcher.take([MORE], is_masked=True)
    assert not matcher.is_bound
    repeated = compiler.start(spec(regex="a*"), [9], 1, rules)
    assert next_of(compiler, repeated) == {token("a"), TURN_END}
    complete = compiler.start(spec(choice=["a"]), [9, token("a")], 1, OutputRules(min_tokens=5, end_ids=(EOS, TURN_END)))
    assert next_of(compiler, complete) == {EOS, TURN_END}  # a form that can only end does


def test_an_error_has_no_stack() -> None:
    assert shorten("panic: index 0\n<backtrace>\n 0: <unknown>") == "panic: index 0"
    assert shorten("too\n complex <non-verbose/>") == "too complex"
