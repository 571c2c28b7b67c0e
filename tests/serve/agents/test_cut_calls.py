"""A tool call that the output was cut in is no call that a client could make."""

from __future__ import annotations

from culet.serve.api import anthropic
from culet.serve.api.ollama import generate
from culet.text.output_pieces import Output, ToolCall
from culet.text.tool_schema import unquote

WHOLE = ToolCall(0, "a", "f", '{"x":1}', {"x": 1})
CUT = ToolCall(1, "b", "g", '{"city":"Par', {}, is_complete=False)


def test_cut_calls_are_left_out() -> None:
    blocks = anthropic._blocks(Output("Hi", tool_calls=[WHOLE, CUT]))
    assert [block.get("name") for block in blocks] == [None, "f"]
    (message,) = generate._message_fields("Hi", calls=[WHOLE, CUT]).values()
    assert [call.function["name"] for call in message.tool_calls] == ["f"]


def test_half_of_a_character_is_replaced() -> None:
    assert unquote('"a\\ud800b"') == "a\ufffdb"
    assert unquote('"\\ud83d\\ude00"') == "\U0001f600"
