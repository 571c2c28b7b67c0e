"""The pieces that a sample's output consists of, and the output as a whole."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class TextPiece(Struct, frozen=True, gc=False):
    """More of the answer. `malformed`: the text belongs to a tool call that could not be parsed."""

    text: str
    malformed: bool = False


class ReasoningPiece(Struct, frozen=True, gc=False):
    """More of the thought."""

    text: str


class ToolCall(Struct, frozen=True):
    """A complete tool call. `arguments` is the parsed form of `arguments_json`."""

    index: int  # its position among the calls of the sample
    id: str
    name: str
    arguments_json: str
    arguments: dict[str, Any]


OutputPiece = TextPiece | ReasoningPiece | ToolCall


class Output(Struct, frozen=True):
    """Everything that a sample has produced so far."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0  # tool calls that could not be parsed and are part of the text
    num_reasoning_tokens: int = 0  # including the marks around thoughts
    has_ended: bool = False  # a token or a stop string ended the turn
    stop: str | None = None  # the stop string that ended it


def merge(first: OutputPiece, second: OutputPiece) -> OutputPiece | None:
    """Two adjacent pieces as one, or None if they cannot be joined."""
    match first, second:
        case ReasoningPiece(), ReasoningPiece():
            return ReasoningPiece(first.text + second.text)
        case TextPiece(), TextPiece() if first.malformed is second.malformed:
            return TextPiece(first.text + second.text, first.malformed)
    return None
