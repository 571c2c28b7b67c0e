"""What a sample's output consists of, piece by piece and as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReasoningPiece:
    """More of the thought."""

    text: str


@dataclass(frozen=True)
class ContentPiece:
    """More of the answer. `malformed`: it is (a part of) a tool call that could not be read."""

    text: str
    malformed: bool = False


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; its name is known."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call ends. `complete` is False where it turned out malformed: its text comes as content, and it is no call."""

    index: int
    complete: bool = True


Event = ReasoningPiece | ContentPiece | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True)
class ToolCall:
    """A whole call: `arguments` is what `arguments_json` says."""

    index: int
    id: str
    name: str
    arguments_json: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Output:
    """All that came so far."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    num_malformed: int  # tool calls that are in the content, because they could not be read
    num_reasoning_tokens: int  # with the marks around thoughts
    has_ended: bool  # a token or a stop string ended the turn
    stop: str | None  # the stop string that did


def merge(first: Event, second: Event) -> Event | None:
    """Two pieces of the same text as one; None for what is not."""
    match first, second:
        case ReasoningPiece(), ReasoningPiece():
            return ReasoningPiece(first.text + second.text)
        case ContentPiece(), ContentPiece() if first.malformed is second.malformed:
            return ContentPiece(first.text + second.text, first.malformed)
        case ToolCallArguments(), ToolCallArguments() if first.index == second.index:
            return ToolCallArguments(first.index, first.text + second.text)
    return None
