"""GrammarCompiler: what masks allow, how matchers follow tokens and drafts, and the process that checks grammars."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from culet.errors import BadRequest
from culet.structured.check import GrammarCheck
from culet.structured.compiler import GrammarCompiler
from culet.structured.matcher import Matcher, Phase, Vocabulary
from culet.types import MAX_GRAMMAR_CHARS, GrammarSpec, SamplingParams, StructuredOutputs
from tests.forking import runs_module

SPECIAL = ("<pad>", "<eos>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
EOS, TURN_END, OPEN, CLOSE = 1, 2, 3, 4
WORDS = ('{"', '":', '", "', '"}', "true", "null", "10", "abc", "bc", "é", "日本", "\n  ")
PIECES = [name.encode() for name in SPECIAL] + [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Each of these compiles for minutes and cannot be interrupted.
ENDLESS = {
    "multiples": {"allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967, 9949, 9941)]},
    "patterns": {"allOf": [{"type": "string", "pattern": f"a.{{{gap}}}b.*c"} for gap in range(40)]},
}


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(
        Vocabulary(
            len(PIECES) + 40, lambda i: PIECES[i] if i < len(PIECES) else b"", frozenset(range(8)), (EOS, TURN_END), (3, 4)
        )
    )


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


def spec(**form: object) -> GrammarSpec:
    return StructuredOutputs(**form).spec()  # type: ignore[arg-type]


def token(text: str) -> int:
    return PIECES.index(text.encode())


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def next_of(compiler: GrammarCompiler, matcher: Matcher) -> set[int]:
    found = allowed(compiler.masks([(matcher, 0)])[0])
    assert not matcher.fault, matcher.fault
    return found


def walk(compiler: GrammarCompiler, matcher: Matcher, seed: int, limit: int = 400) -> list[int]:
    """Draw random allowed tokens up to an end token. Quotes are made more likely so that strings end."""
    chance, tokens = random.Random(seed), []
    while len(tokens) < limit:
        found = next_of(compiler, matcher)
        closing = [each for each in found if b'"' in PIECES[each]] if chance.random() < 0.4 else []
        choice = chance.choice(sorted(closing or found))
        tokens.append(choice)
        matcher.accept([choice])
        if matcher.phase is Phase.ENDED:
            return tokens
    raise AssertionError("no end")


def test_choice_ends_where_one_is_complete(compiler: GrammarCompiler) -> None:
    matcher = compiler.start(spec(choice=["abc", "abd"]), [5], 1)
    assert next_of(compiler, matcher) == {token("a"), token("abc")}
    matcher.accept([token("a")])
    assert next_of(compiler, matcher) == {token("b"), token("bc")}
    matcher.accept([token("b"), token("d")])
    assert next_of(compiler, matcher) == {EOS, TURN_END}
    matcher.accept([TURN_END])
    assert next_of(compiler, matcher) == {EOS, TURN_END}, "with ignore_eos a sequence continues after its end"


@pytest.mark.parametrize("seed", range(8))
def test_random_walks_give_valid_documents(compiler: GrammarCompiler, seed: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tokens = walk(compiler, compiler.start(spec(json=PERSON), [5], 1), seed)
    text = b"".join(PIECES[each] for each in tokens[:-1]).decode()
    jsonschema.validate(json.loads(text), PERSON)


def test_thoughts_come_before_the_document(compiler: GrammarCompiler) -> None:
    rule = StructuredOutputs(regex="a+", after_thought=True).spec()
    matcher = compiler.start(rule, [5], 1)
    assert next_of(compiler, matcher) == {OPEN, token("a")}, "it may open a thought, or start its answer"
    matcher.accept([OPEN])
    thinking = next_of(compiler, matcher)
    assert CLOSE in thinking
    assert not thinking & {OPEN, EOS, TURN_END, 5, 6}, "a thought cannot end the turn, call a tool or open another"
    assert thinking >= {8 + ord("z"), token("true")}
    assert max(thinking) < len(PIECES) + 40
    matcher.accept([8 + ord("z"), CLOSE])
    assert next_of(compiler, matcher) == {token("a")}
    matcher.accept([token("a")])
    assert next_of(compiler, matcher) == {token("a"), EOS, TURN_END}
    # Without `after_thought` the first token starts the answer, unless the prompt leaves a thought open.
    assert next_of(compiler, compiler.start(spec(regex="a+"), [5], 1)) == {token("a")}
    assert compiler.start(spec(regex="a+"), [TURN_END, OPEN, 70], 3).phase is Phase.THOUGHT
    assert compiler.start(spec(regex="a+"), [OPEN, 70, CLOSE, 71], 4).phase is Phase.DOCUMENT
    assert compiler.start(spec(regex="a+"), [OPEN, TURN_END, 71], 3).phase is Phase.DOCUMENT


def test_a_preempted_sequence_resumes_where_it_was(compiler: GrammarCompiler) -> None:
    rule = StructuredOutputs(json=PERSON, after_thought=True).spec()
    first = compiler.start(rule, [5], 1)
    said = [OPEN, 70, CLOSE, token('{"')]
    first.accept(said)
    again = compiler.start(rule, [5, *said], 1)
    assert again.phase is first.phase is Phase.DOCUMENT
    assert next_of(compiler, again) == next_of(compiler, first)


@pytest.mark.parametrize("seed", range(4))
def test_masks_along_drafts_equal_those_of_drawn_tokens(compiler: GrammarCompiler, seed: int) -> None:
    """The masks along any drafts equal those after each draft, and the matcher does not move."""
    rule = StructuredOutputs(json=PERSON, after_thought=True).spec()
    tokens = walk(compiler, compiler.start(spec(json=PERSON), [5], 1), seed)
    tokens = [OPEN, 70, 71, CLOSE, *tokens]
    matcher, chance = compiler.start(rule, [5], 1), random.Random(seed)
    position = 0
    while position < len(tokens):
        drafts = tokens[position : position + 4]
        wrong = chance.randrange(6)
        if wrong < len(drafts):
            drafts[wrong] = 0  # <pad> is never allowed
        matcher.drafts = tuple(drafts)
        found = compiler.masks([(matcher, len(drafts))])
        for index in range(len(drafts) + 1):
            if index > wrong:
                assert (found[index] == -1).all(), "after a draft that cannot be drawn, everything is allowed"
                continue
            alone = compiler.start(rule, [5, *tokens[:position], *drafts[:index]], 1)
            assert (found[index] == compiler.masks([(alone, 0)])[0]).all()
        num_kept = min(wrong, len(drafts)) + 1
        matcher.accept(tokens[position : position + num_kept])
        position += num_kept
    assert matcher.phase is Phase.ENDED
    assert not matcher.fault


def test_several_rows_are_the_same_as_each_alone(compiler: GrammarCompiler) -> None:
    rules = [
        spec(json=PERSON),
        spec(regex="[0-9]{3}"),
        spec(json_object=True),
        StructuredOutputs(regex="b", after_thought=True).spec(),
    ]
    matchers = [compiler.start(rule, [5], 1) for rule in rules]
    together = compiler.masks([(matcher, 0) for matcher in matchers])
    for matcher, mask in zip(matchers, together, strict=True):
        assert (compiler.masks([(matcher, 0)])[0] == mask).all()


def test_a_dead_end_is_a_fault(compiler: GrammarCompiler) -> None:
    numbers = GrammarCompiler(Vocabulary(20, lambda i: f" {i}".encode(), frozenset(), (1,)))
    matcher = numbers.start(spec(regex="[a-z]+"), [5], 1)
    numbers.masks([(matcher, 0)])
    assert "no token" in matcher.fault
    strange = compiler.start(spec(regex="a"), [5], 1)
    strange.accept([token("é")])
    assert strange.fault, "a token that the grammar refuses"


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "("},
        {"grammar": "start: nobody"},
        {"json": {"type": "strin"}},
        {"json": {"type": "object", "not": {}}},
        {"json": {"$ref": "http://example.com/schema.json"}},
        {"json": False},
    ],
)
def test_bad_grammars_are_refused(compiler: GrammarCompiler, form: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="structured output"):
        compiler.compile(spec(**form))


def test_unsupported_keywords_are_ignored_unless_strict(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "not": {"required": ["b"]}}
    with pytest.raises(BadRequest, match="not"):
        compiler.compile(spec(json=schema))
    compiler.compile(StructuredOutputs(json=schema, strict=False).spec())


def test_an_error_about_one_of_says_what_to_use(compiler: GrammarCompiler) -> None:
    """llguidance names an option of its own, which no client can set."""
    schema = {"oneOf": [{"type": "string"}, {"const": "a"}]}
    with pytest.raises(BadRequest, match=r"oneOf cannot be enforced, so use anyOf instead$"):
        compiler.start(spec(json=schema), [9], 1)


def test_white_space_is_bounded(compiler: GrammarCompiler) -> None:
    matcher = compiler.start(spec(json_object=True), [5], 1)
    matcher.accept([8 + ord("{"), 8 + ord(" ")])
    assert 8 + ord(" ") not in next_of(compiler, matcher)
    # A schema cannot remove the bound.
    sneaky = {"type": "object", "x-guidance": {"whitespace_pattern": " *"}}
    matcher = compiler.start(spec(json=sneaky), [5], 1)
    matcher.accept([8 + ord("{"), 8 + ord(" ")])
    assert 8 + ord(" ") not in next_of(compiler, matcher)


def test_forms_are_checked() -> None:
    for form in (
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", ""]},
        {"json": "{"},
        {"regex": 5},
    ):
        with pytest.raises(BadRequest):
            StructuredOutputs(**form)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="at most"):
        StructuredOutputs(regex="a" * (MAX_GRAMMAR_CHARS + 1))
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(BadRequest, match="deep"):
        StructuredOutputs(json=deep)
    ordered = StructuredOutputs(json={"properties": {"b": {}, "a": {}}}).spec().text
    assert ordered.index('"b"') < ordered.index('"a"'), "keys are written in the order of the schema"
    assert SamplingParams(structured_outputs=StructuredOutputs(choice=["a"])).structured_outputs is not None
    off = {"disable_fallback": False, "whitespace_pattern": None}
    assert SamplingParams(structured_outputs={"regex": "a", **off}).structured_outputs == StructuredOutputs(regex="a")
    for wrong in ("x", {"regex": "a", "disable_fallback": True}):
        with pytest.raises(BadRequest, match="structured_outputs: got"):
            SamplingParams(structured_outputs=wrong)  # type: ignore[arg-type]


# The process that checks grammars


def workers() -> set[int]:
    """Return the process ids of the check workers that this process has started."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return {int(child) for child in children if runs_module(child, "culet.structured.check_worker")}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_schema_is_refused_and_leaves_nothing_running(name: str) -> None:
    earlier = workers()  # of engines in other tests
    check = GrammarCheck(SPECIAL, time_limit_s=1.0, patience=60)
    check.check(spec(json=PERSON))
    before = workers()
    with pytest.raises(BadRequest, match="compiling it took more than 1 s"):
        check.check(spec(json=ENDLESS[name]))
    assert workers() < before
    with pytest.raises(BadRequest, match="compiling it took more than"):  # a remembered verdict
        check.check(spec(json=ENDLESS[name]))
    check.check(spec(regex="[a-z]+"))
    check.close()
    assert workers() <= earlier


def test_a_worker_that_dies_is_replaced() -> None:
    earlier = workers()
    check = GrammarCheck(SPECIAL, patience=60)
    check.check(spec(regex="a"))
    for worker in workers() - earlier:
        os.kill(worker, signal.SIGKILL)
    check.check(spec(regex="b"))
    check.check(spec(grammar='start: <|tool_call> "x" <tool_call|>'))
    with pytest.raises(BadRequest, match="unknown special token"):
        check.check(spec(grammar="start: <|nothing>"))
    check.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_compiling_threads_have_the_engines_priority(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of low priority would hold the interpreter's lock while it waits for a core, and the engine would wait too."""

    def niceness(spec: GrammarSpec) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(compiler, "compile", niceness)
    assert compiler.submit(GrammarSpec("regex", "[a-z]{3}")).result(60) == os.getpriority(os.PRIO_PROCESS, 0)
