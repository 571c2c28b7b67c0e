"""Masks of grammars: what they allow, how they follow tokens and drafts, and the process that checks grammars."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from culet.errors import BadRequest
from culet.structured.check import GrammarCheck
from culet.structured.grammar import Grammars, Phase, SequenceGrammar, Vocabulary
from culet.types import MAX_GRAMMAR_CHARS, GrammarSpec, SamplingParams, StructuredOutputs

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
# Each compiles for minutes, and the engine heeds no call to stop.
ENDLESS = {
    "multiples": {"allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967, 9949, 9941)]},
    "patterns": {"allOf": [{"type": "string", "pattern": f"a.{{{gap}}}b.*c"} for gap in range(40)]},
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(
        Vocabulary(
            len(PIECES) + 40, lambda i: PIECES[i] if i < len(PIECES) else b"", frozenset(range(8)), (EOS, TURN_END), (3, 4)
        )
    )


def spec(**form: object) -> GrammarSpec:
    return StructuredOutputs(**form).spec()  # type: ignore[arg-type]


def token(text: str) -> int:
    return PIECES.index(text.encode())


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def next_of(grammars: Grammars, sequence: SequenceGrammar) -> set[int]:
    found = allowed(grammars.masks([(sequence, 0)])[0])
    assert not sequence.fault, sequence.fault
    return found


def walk(grammars: Grammars, sequence: SequenceGrammar, seed: int, limit: int = 400) -> list[int]:
    """Tokens drawn at random from what is allowed, up to an end; quotes are likelier than chance would have it."""
    chance, tokens = random.Random(seed), []
    while len(tokens) < limit:
        found = next_of(grammars, sequence)
        closing = [each for each in found if b'"' in PIECES[each]] if chance.random() < 0.4 else []
        choice = chance.choice(sorted(closing or found))
        tokens.append(choice)
        sequence.accept([choice])
        if sequence.phase is Phase.ENDED:
            return tokens
    raise AssertionError("no end")


def test_choice_ends_where_one_is_complete(grammars: Grammars) -> None:
    sequence = grammars.start(spec(choice=["abc", "abd"]), [5], 1)
    assert next_of(grammars, sequence) == {token("a"), token("abc")}
    sequence.accept([token("a")])
    assert next_of(grammars, sequence) == {token("b"), token("bc")}
    sequence.accept([token("b"), token("d")])
    assert next_of(grammars, sequence) == {EOS, TURN_END}
    sequence.accept([TURN_END])
    assert next_of(grammars, sequence) == {EOS, TURN_END}, "with ignore_eos a sequence goes on, and says no more"


@pytest.mark.parametrize("seed", range(8))
def test_random_walks_give_valid_documents(grammars: Grammars, seed: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tokens = walk(grammars, grammars.start(spec(json=PERSON), [5], 1), seed)
    text = b"".join(PIECES[each] for each in tokens[:-1]).decode()
    jsonschema.validate(json.loads(text), PERSON)


def test_thoughts_come_before_the_grammar(grammars: Grammars) -> None:
    rule = StructuredOutputs(regex="a+", after_thought=True).spec()
    sequence = grammars.start(rule, [5], 1)
    assert next_of(grammars, sequence) == {OPEN, token("a")}, "it may begin to think, or to answer"
    sequence.accept([OPEN])
    thinking = next_of(grammars, sequence)
    assert CLOSE in thinking
    assert not thinking & {OPEN, EOS, TURN_END, 5, 6}, "a thought cannot end the turn, call a tool or open another"
    assert thinking >= {8 + ord("z"), token("true")}
    assert max(thinking) < len(PIECES) + 40
    sequence.accept([8 + ord("z"), CLOSE])
    assert next_of(grammars, sequence) == {token("a")}
    sequence.accept([token("a")])
    assert next_of(grammars, sequence) == {token("a"), EOS, TURN_END}
    # Without leave to think the first token begins the answer; a prompt that leaves a thought open is within one.
    assert next_of(grammars, grammars.start(spec(regex="a+"), [5], 1)) == {token("a")}
    assert grammars.start(spec(regex="a+"), [TURN_END, OPEN, 70], 3).phase is Phase.THOUGHT
    assert grammars.start(spec(regex="a+"), [OPEN, 70, CLOSE, 71], 4).phase is Phase.DOCUMENT
    assert grammars.start(spec(regex="a+"), [OPEN, TURN_END, 71], 3).phase is Phase.DOCUMENT


def test_a_preempted_sequence_resumes_where_it_was(grammars: Grammars) -> None:
    rule = StructuredOutputs(json=PERSON, after_thought=True).spec()
    first = grammars.start(rule, [5], 1)
    said = [OPEN, 70, CLOSE, token('{"')]
    first.accept(said)
    again = grammars.start(rule, [5, *said], 1)
    assert again.phase is first.phase is Phase.DOCUMENT
    assert next_of(grammars, again) == next_of(grammars, first)


@pytest.mark.parametrize("seed", range(4))
def test_masks_along_drafts_are_those_of_the_drafts_drawn(grammars: Grammars, seed: int) -> None:
    """A chain's masks equal those after each draft, and leave the sequence where it was, whatever the drafts are."""
    rule = StructuredOutputs(json=PERSON, after_thought=True).spec()
    tokens = walk(grammars, grammars.start(spec(json=PERSON), [5], 1), seed)
    tokens = [OPEN, 70, 71, CLOSE, *tokens]
    sequence, chance = grammars.start(rule, [5], 1), random.Random(seed)
    position = 0
    while position < len(tokens):
        drafts = tokens[position : position + 4]
        wrong = chance.randrange(6)
        if wrong < len(drafts):
            drafts[wrong] = 0  # <pad> is never allowed
        sequence.drafts = tuple(drafts)
        found = grammars.masks([(sequence, len(drafts))])
        for index in range(len(drafts) + 1):
            if index > wrong:
                assert (found[index] == -1).all(), "what follows a draft that cannot be drawn does not matter"
                continue
            alone = grammars.start(rule, [5, *tokens[:position], *drafts[:index]], 1)
            assert (found[index] == grammars.masks([(alone, 0)])[0]).all()
        num_kept = min(wrong, len(drafts)) + 1
        sequence.accept(tokens[position : position + num_kept])
        position += num_kept
    assert sequence.phase is Phase.ENDED
    assert not sequence.fault


def test_several_rows_are_the_same_as_each_alone(grammars: Grammars) -> None:
    rules = [
        spec(json=PERSON),
        spec(regex="[0-9]{3}"),
        spec(json_object=True),
        StructuredOutputs(regex="b", after_thought=True).spec(),
    ]
    sequences = [grammars.start(rule, [5], 1) for rule in rules]
    together = grammars.masks([(sequence, 0) for sequence in sequences])
    for sequence, mask in zip(sequences, together, strict=True):
        assert (grammars.masks([(sequence, 0)])[0] == mask).all()


def test_a_dead_end_is_a_fault(grammars: Grammars) -> None:
    numbers = Grammars(Vocabulary(20, lambda i: f" {i}".encode(), frozenset(), (1,)))
    sequence = numbers.start(spec(regex="[a-z]+"), [5], 1)
    numbers.masks([(sequence, 0)])
    assert "no token" in sequence.fault
    strange = grammars.start(spec(regex="a"), [5], 1)
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
def test_bad_grammars_are_refused(grammars: Grammars, form: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="structured output"):
        grammars.compile(spec(**form))


def test_what_cannot_be_held_is_left_aside_if_not_strict(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "not": {"required": ["b"]}}
    with pytest.raises(BadRequest, match="not"):
        grammars.compile(spec(json=schema))
    grammars.compile(StructuredOutputs(json=schema, strict=False).spec())


def test_white_space_has_a_bound(grammars: Grammars) -> None:
    sequence = grammars.start(spec(json_object=True), [5], 1)
    sequence.accept([8 + ord("{"), 8 + ord(" ")])
    assert 8 + ord(" ") not in next_of(grammars, sequence)
    # A schema cannot lift it.
    sneaky = {"type": "object", "x-guidance": {"whitespace_pattern": " *"}}
    sequence = grammars.start(spec(json=sneaky), [5], 1)
    sequence.accept([8 + ord("{"), 8 + ord(" ")])
    assert 8 + ord(" ") not in next_of(grammars, sequence)


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
    with pytest.raises(BadRequest, match="longer"):
        StructuredOutputs(regex="a" * (MAX_GRAMMAR_CHARS + 1))
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(BadRequest, match="deep"):
        StructuredOutputs(json=deep)
    ordered = StructuredOutputs(json={"properties": {"b": {}, "a": {}}}).spec().text
    assert ordered.index('"b"') < ordered.index('"a"'), "the order of keys is the order in which they are written"
    assert SamplingParams(structured_outputs=StructuredOutputs(choice=["a"])).structured_outputs is not None


# The process that checks


def workers() -> set[int]:
    """Ids of grammar workers that this process has started."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(child) for child in children if b"culet.structured.worker" in Path(f"/proc/{child}/cmdline").read_bytes()}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_schema_is_refused_in_time_and_leaves_nothing_running(name: str) -> None:
    check = GrammarCheck(SPECIAL, time_limit_s=1.0)
    check.check(spec(json=PERSON))
    before = workers()
    began = time.monotonic()
    with pytest.raises(BadRequest, match="stopped compiling after 1 s"):
        check.check(spec(json=ENDLESS[name]))
    assert time.monotonic() - began < 30
    assert workers() < before
    with pytest.raises(BadRequest, match="stopped compiling"):  # known by now: at once
        check.check(spec(json=ENDLESS[name]))
    check.check(spec(regex="[a-z]+"))
    check.close()
    assert not workers()


def test_a_worker_that_dies_is_replaced() -> None:
    check = GrammarCheck(SPECIAL)
    check.check(spec(regex="a"))
    for worker in workers():
        os.kill(worker, signal.SIGKILL)
    check.check(spec(regex="b"))
    check.check(spec(grammar='start: <|tool_call> "x" <tool_call|>'))
    with pytest.raises(BadRequest, match="unknown special token"):
        check.check(spec(grammar="start: <|nothing>"))
    check.close()
