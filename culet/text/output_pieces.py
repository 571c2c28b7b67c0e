"""The pieces of a sample's output, the complete output, and the tokens around thoughts, which are found and counted here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from culet.text.tokenizer import Tokenizer

OPENS, CLOSES, OPENS_CALL = "<|channel>", "<channel|>", "<|tool_call>"
END_TOKENS = ("<|tool_response>", "<turn|>", "<eos>")
_CLOSERS = (CLOSES, OPENS_CALL, *END_TOKENS)


class TextPiece(Struct, frozen=True, gc=False):
    """Part of the answer. `malformed` means that the text is a tool call, which could not be parsed or has no tools."""

    text: str
    malformed: bool = False


class ReasoningPiece(Struct, frozen=True, gc=False):
    """Part of a thought."""

    text: str


class CallPart(Struct, frozen=True, gc=False):
    """Part of a tool call that is not complete yet. The parts of a call join to its `arguments_json`."""

    index: int
    id: str
    name: str
    arguments_json: str
    is_first: bool = False


class ToolCall(Struct, frozen=True):
    """A tool call. `arguments` is the parsed form of `arguments_json`.

    If the output was cut inside a call, the call is not complete, and `arguments` is empty.
    """

    index: int  # the position among the sample's calls
    id: str
    name: str
    arguments_json: str
    arguments: dict[str, Any]
    has_parts: bool = False  # its parts came before it
    is_complete: bool = True


OutputPiece = TextPiece | ReasoningPiece | CallPart | ToolCall


def call_part(piece: CallPart | ToolCall) -> CallPart | None:
    """Return what a piece adds to a stream of call parts: itself, a whole call as one part, or None."""
    if isinstance(piece, CallPart):
        return piece
    return None if piece.has_parts else CallPart(piece.index, piece.id, piece.name, piece.arguments_json, is_first=True)


class Output(Struct, frozen=True):
    """Everything a sample has produced so far."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0  # tool calls that became text
    num_thought_tokens: int = 0  # between the marks around thoughts, which is what a thinking budget counts
    has_ended: bool = False  # a token or a stop string ended the turn
    stop: str | None = None  # the stop string that ended it


def merge(first: OutputPiece, second: OutputPiece) -> OutputPiece | None:
    """Join two adjacent pieces. Return None if they cannot be joined."""
    match first, second:
        case ReasoningPiece(), ReasoningPiece():
            return ReasoningPiece(first.text + second.text)
        case TextPiece(), TextPiece() if first.malformed is second.malformed:
            return TextPiece(first.text + second.text, first.malformed)
        case CallPart(), CallPart() if first.index == second.index:
            text = first.arguments_json + second.arguments_json
            return CallPart(first.index, first.id, first.name, text, first.is_first)
    return None


class ThoughtCounter:
    """Counts the tokens in the thoughts of an output, as a thinking budget does. The marks around thoughts do not count."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self.num_tokens = 0
        self._opener, self._closers = _marks_of(tokenizer)
        # Few prompts have a thought, and this is found much sooner than where it ends.
        self._is_open = self._opener in prompt_ids and thought_start(tokenizer, prompt_ids) is not None

    def push(self, token_id: int) -> None:
        """Read the next token of the output."""
        if not self._is_open:
            self._is_open = token_id == self._opener
        elif token_id in self._closers:
            self._is_open = False
        else:
            self.num_tokens += 1


def thought_start(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> int | None:
    """Return the index of the first token inside the prompt's unclosed thought. Return None if no thought is open."""
    opener, closers = _marks_of(tokenizer)
    turn = tokenizer.token_id("<|turn>")
    for index in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[index] in closers or prompt_ids[index] == turn:
            return None
        if prompt_ids[index] == opener:
            return index + 1
    return None


@lru_cache(maxsize=4)  # for every sample, looking the names up would take longer than a token
def _marks_of(tokenizer: Tokenizer) -> tuple[int | None, frozenset[int | None]]:
    """Return the ids of the token that opens a thought and of those that end it."""
    return tokenizer.token_id(OPENS), frozenset(map(tokenizer.token_id, _CLOSERS))
