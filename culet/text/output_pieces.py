"""The pieces of a sample's output, and the complete output."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class TextPiece(Struct, frozen=True, gc=False):
    """Part of the answer. `malformed` means that the text belongs to a tool call that could not be parsed."""

    text: str
    malformed: bool = False


class ReasoningPiece(Struct, frozen=True, gc=False):
    """Part of a thought."""

    text: str


class ToolCall(Struct, frozen=True):
    """A complete tool call. `arguments` is the parsed form of `arguments_json`."""

    index: int  # the position among the sample's calls
    id: str
    name: str
    arguments_json: str
    arguments: dict[str, Any]


OutputPiece = TextPiece | ReasoningPiece | ToolCall


class Output(Struct, frozen=True):
    """Everything a sample has produced so far."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0  # tool calls that could not be parsed and became text
    num_reasoning_tokens: int = 0  # including the marks around thoughts
    has_ended: bool = False  # a token or a stop string ended the turn
    stop: str | None = None  # the stop string that ended it


def merge(first: OutputPiece, second: OutputPiece) -> OutputPiece | None:
    """Join two adjacent pieces. Return None if they cannot be joined."""
    match first, second:
        case ReasoningPiece(), ReasoningPiece():
            return ReasoningPiece(first.text + second.text)
        case TextPiece(), TextPiece() if first.malformed is second.malformed:
            return TextPiece(first.text + second.text, first.malformed)
    return None
