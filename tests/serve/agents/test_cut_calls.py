"""A tool call that the output was cut in is no call that a client could make."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from culet.serve.api import anthropic
from culet.serve.api.ollama import generate
from culet.serve.generation import TokenCounts
from culet.text.output import OutputDelta
from culet.text.output_pieces import Output, ReasoningPiece, TextPiece, ToolCall
from culet.text.tool_schema import unquote

WHOLE = ToolCall(0, "a", "f", '{"x":1}', {"x": 1})
CUT = ToolCall(1, "b", "g", '{"city":"Par', {}, is_complete=False)


def test_cut_calls_are_left_out() -> None:
    blocks = anthropic._blocks(Output("Hi", tool_calls=[WHOLE, CUT]), shows_thoughts=True)
    assert [block.get("name") for block in blocks] == [None, "f"]
    (message,) = generate._message_fields("Hi", calls=[WHOLE, CUT]).values()
    assert [call.function["name"] for call in message.tool_calls] == ["f"]


def test_ollama_streams_each_call_once_it_is_complete() -> None:
    lines = generate._Lines("gemma", 0.0, generate._message_fields)
    other = ToolCall(1, "c", "h", "{}", {})
    pieces = [[ReasoningPiece("hm")], [TextPiece("Hi"), WHOLE], [other, TextPiece("!")], [CUT]]
    written = [lines.write(0, None, [OutputDelta(0, piece)]) for piece in pieces]  # type: ignore[arg-type]
    messages = [[json.loads(line)["message"] for line in lines.splitlines()] for lines in written]
    assert [message["thinking"] for message in messages[0]] == ["hm"]
    called = [[call["function"]["name"] for call in message.get("tool_calls", ())] for message in messages[1] + messages[2]]
    assert called == [[], ["f"], ["h"], []]
    assert messages[3] == []


def test_ollamas_durations() -> None:
    counts = TokenCounts(100, 60, 1, 0, 0, 0, is_thought_out=False)
    prompt_s, eval_s = generate._split(0.41, 0.0, counts)
    assert (prompt_s, eval_s) == pytest.approx((0.4, 0.01))
    prompt_s, eval_s = generate._split(0.4, 0.2, replace(counts, num_generated=11))
    assert (prompt_s, eval_s) == pytest.approx((0.38, 0.22))
    assert generate._split(0.4, 0.0, replace(counts, num_generated=0)) == (0.4, 0.0)


def test_half_of_a_character_is_replaced() -> None:
    assert unquote('"a\\ud800b"') == "a\ufffdb"
    assert unquote('"\\ud83d\\ude00"') == "\U0001f600"
