"""Tool calls without the tokens around them, which count only if a request or the server asks for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from culet.text.output_pieces import TextPiece, ToolCall
from culet.text.output_reader import ChatReader
from culet.text.tokenizer import Tokenizer
from tests.unit.text.output_streams import CITY, Q, answer, plain_ids, read, write_tokenizer

SCHEMAS = {"weather": {"properties": {"zip": {"type": "string"}}}, "time": None, "call:me": None}
CALL = f"call:weather{{city:{Q}Paris{Q}}}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def found(tokenizer, text, *, asked=True, **options):
    """Return the text of the answer, and its calls as (name, arguments)."""
    output = answer(tokenizer, text, schemas=SCHEMAS, unmarked_calls=asked, **options)
    assert output.num_malformed == 0
    return output.text, [(call.name, call.arguments) for call in output.tool_calls]


def test_only_on_request(tokenizer):
    assert found(tokenizer, CALL, asked=False) == ("call:weather{city:Paris}", [])
    assert found(tokenizer, CALL) == ("", [("weather", {"city": "Paris"})])


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"Let me see. {CALL}", "Let me see. ", [("weather", {"city": "Paris"})]),
        (f"{CALL} and more", " and more", [("weather", {"city": "Paris"})]),
        (f"{CALL}\n\n{CALL}", "", [("weather", {"city": "Paris"})] * 2),
        (f"{CALL}<tool_call|><turn|>", "", [("weather", {"city": "Paris"})]),
        ("call:time{}call:time{a:{b:[1]}}", "", [("time", {}), ("time", {"a": {"b": [1]}})]),
        ("call:weather{zip:01}", "", [("weather", {"zip": "01"})]),
        ('call:time{"a": "}"}', "", [("time", {"a": "}"})]),
        (f"call:time{{a:{Q}}}{Q}}}", "", [("time", {"a": "}"})]),
        ("call:call:me{}", "", [("call:me", {})]),
        (f"<|channel>thought\ncall:time{{}}<channel|>{CALL}", "", [("weather", {"city": "Paris"})]),
        (f"{CITY}{CALL}", "", [("weather", {"city": "Paris"})] * 2),
    ],
)
def test_calls_of_declared_tools(tokenizer, text, said, calls):
    assert found(tokenizer, text) == (said, calls)


@pytest.mark.parametrize(
    "text",
    [
        "call:other{a:1}",
        "recall:time{}",
        "_call:time{}",
        "call:time(a=1)",
        "call:time {}",
        ":time{}",
        "call:time",
        "ca",
        "call me, call: or call:tim e{}",
        "call:time{",
        "call:time{a:1",
        "call:time{a}",
        "call:time{a:1]}",
        f"call:time{{a:{Q}b",
        f"call:time{{a:{Q}b{Q}{Q}}} and more",
        "call:time{a:<|image|>1}",
        f"call:time{{a{CITY}",
        "call:time{a<|channel>thought\nx<channel|>}",
    ],
)
def test_other_text_stays_as_it_is(tokenizer, text):
    assert found(tokenizer, text) == found(tokenizer, text, asked=False)


def test_text_is_held_back_only_while_it_may_be_a_call(tokenizer):
    reader = ChatReader(tokenizer, schemas=SCHEMAS, unmarked_calls=True)

    def push(text):
        return reader.push(plain_ids(tokenizer, text))

    assert push("I c") == [TextPiece("I ")]
    assert push("an ca") == [TextPiece("can ")]
    assert push("ll:ti") == []
    assert push("n") == [TextPiece("call:tin")]
    assert push("call:time{") == [TextPiece("call:time{")]  # `call` is the end of a word here
    assert push(" call:time{a:1") == [TextPiece(" ")]
    (call,) = push("}")
    assert isinstance(call, ToolCall)
    assert push("x") == [TextPiece("x")]


def test_stop_strings_see_text_that_was_held_back(tokenizer):
    assert found(tokenizer, "x call:time{!} y", stop=["x call:time{!"]) == ("", [])
    assert found(tokenizer, "x call:time{} y", stop=["x call"]) == ("x  y", [("time", {})])
    assert found(tokenizer, "x call:time{} y z", stop=[" z"]) == ("x  y", [("time", {})])


PARTS = ["call:", "call:time{", "call:weather{zip:1}", "a:1", "}", "{", Q, " ", "c", "x", ",", CITY, "<|tool_call>", "<turn|>"]


@settings(max_examples=300)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), data=st.data())
def test_grouping_does_not_matter(tokenizer, parts, data):
    ids = tokenizer.encode("".join(parts))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    assert read(tokenizer, ids, cuts, schemas=SCHEMAS, unmarked_calls=True) == read(
        tokenizer, ids, range(len(ids)), schemas=SCHEMAS, unmarked_calls=True
    )
