"""Calls that a grammar holds are read part by part. The parts join to the call, however tokens are grouped."""

from __future__ import annotations

import pytest

from culet.text.output_pieces import CallPart, TextPiece, ToolCall, call_part
from culet.text.output_reader import ChatReader
from culet.text.tokenizer import Tokenizer
from tests.unit.text.output_streams import CITY, write_tokenizer

ADD = '<|tool_call>call:add{n:12,of:[1,<|"|>a "b"<|"|>]}<tool_call|>'
TWO = f"<|channel>thought\nhm\n<channel|>Look:{CITY}{ADD}<|tool_response>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def parts_of(tokenizer: Tokenizer, text: str, group: int) -> tuple[ChatReader, dict[int, list[CallPart]]]:
    reader = ChatReader(tokenizer, calls_hold=True)
    ids = tokenizer.encode(text)
    pieces = [piece for begin in range(0, len(ids), group) for piece in reader.push(ids[begin : begin + group])]
    pieces += reader.finish()
    parts: dict[int, list[CallPart]] = {}
    for piece in pieces:
        if isinstance(piece, CallPart | ToolCall) and (part := call_part(piece)) is not None:
            parts.setdefault(part.index, []).append(part)
    return reader, parts


@pytest.mark.parametrize("group", [1, 3, 100])
def test_parts_join_to_the_call(tokenizer: Tokenizer, group: int) -> None:
    reader, parts = parts_of(tokenizer, TWO, group)
    calls = reader.output().tool_calls
    whole = ChatReader(tokenizer)
    whole.push(tokenizer.encode(TWO))
    assert [(call.name, call.arguments) for call in calls] == [
        (call.name, call.arguments) for call in whole.output().tool_calls
    ]
    for call in calls:
        own = parts[call.index]
        assert "".join(part.arguments_json for part in own) == call.arguments_json
        assert [part.is_first for part in own] == [True] + [False] * (len(own) - 1)
        assert {(part.id, part.name) for part in own} == {(call.id, call.name)}
        assert call.has_parts
        assert len(own) > (3 if group == 1 else 0)


def test_a_call_that_is_cut(tokenizer: Tokenizer) -> None:
    reader, parts = parts_of(tokenizer, '<|tool_call>call:weather{city:<|"|>Par', 1)
    (call,) = reader.output().tool_calls
    assert (call.name, call.arguments_json, call.arguments, call.is_complete) == ("weather", '{"city":"Par', {}, False)
    assert "".join(part.arguments_json for part in parts[0]) == call.arguments_json
    assert reader.output().num_malformed == 0
    reader, parts = parts_of(tokenizer, "Well.<|tool_call>call:wea", 1)  # nothing was reported yet, and nothing is left of it
    assert (reader.output().text, parts) == ("Well.", {})


def test_without_a_grammar_calls_come_whole(tokenizer: Tokenizer) -> None:
    reader = ChatReader(tokenizer)
    pieces = [piece for token_id in tokenizer.encode(TWO) for piece in reader.push((token_id,))]
    assert not any(isinstance(piece, CallPart) for piece in pieces)
    reader = ChatReader(tokenizer)
    reader.push(tokenizer.encode('<|tool_call>call:weather{city:<|"|>Par'))
    assert all(isinstance(piece, TextPiece) for piece in reader.finish())


def test_thought_tokens_are_those_between_the_marks(tokenizer: Tokenizer) -> None:
    reader = ChatReader(tokenizer)
    reader.push(tokenizer.encode("<|channel>thought\nhm<channel|>yes<turn|>"))
    inside = len(tokenizer.encode("thought\nhm"))
    assert reader.output().num_thought_tokens == inside


def test_words_of_held_calls_mean_what_they_say(tokenizer: Tokenizer) -> None:
    """A reader does not know every keyword, and would take the number for a string. A grammar holds strings to quotes."""
    schemas = {"f": {"patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": {"type": "string"}}}
    ids = tokenizer.encode("<|tool_call>call:f{n1:5}<tool_call|>")
    for free_tools, expected in (((), {"n1": 5}), (("f",), {"n1": "5"})):
        reader = ChatReader(tokenizer, schemas=schemas, calls_hold=True, free_tools=free_tools)
        reader.push(ids)
        assert reader.output().tool_calls[0].arguments == expected
