"""Gemma 4's output, token by token, as thoughts, answer and tool calls.

    <|channel>thought\\n{reasoning}\\n<channel|>{content}<|tool_call>call:NAME{key:value,...}<tool_call|>...<|tool_response>

What is markup is decided by token ids alone, looked up by name: text that looks like it is text. Each token is taken by
itself, so the result does not depend on how tokens are grouped, and streaming and whole answers are read by the same code.

- The text of a channel is reasoning. A first line of one lower-case word is the channel's label, and left out. So are the
  white space of an empty thought, and the one newline before the end of a thought, which the chat template writes itself.
- `<|tool_call>` ends a thought that was not closed.
- `<|tool_response>`, `<turn|>` and `<eos>` end the turn. Other special tokens outside of calls are no text.
- A call that is none (grammar, no name, not closed) is content, markup included, marked as malformed.
- White space between channels and calls, with nothing else there, is no content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from culet.text.output_events import (
    ContentPiece,
    Event,
    Output,
    ReasoningPiece,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    merge,
)
from culet.text.stops import StopMatcher
from culet.text.tokenizer import IncrementalDecoder, Tokenizer
from culet.text.tool_calls import CallReader

LABEL = "thought"
_LABEL_START = re.compile(r"[a-z]{0,24}")  # a label as far as it has come
_END_TOKENS = ("<|tool_response>", "<turn|>", "<eos>")


class _Mark(Enum):
    OPEN_CHANNEL = "<|channel>"
    CLOSE_CHANNEL = "<channel|>"
    OPEN_CALL = "<|tool_call>"
    CLOSE_CALL = "<tool_call|>"
    QUOTE = '<|"|>'
    END = "<eos>"


class _State(Enum):
    CONTENT = auto()
    LABEL = auto()  # at the beginning of a channel: what comes may be its label
    REASONING = auto()
    CALL = auto()
    BROKEN = auto()  # in a malformed call, up to where it ends
    ENDED = auto()


class OutputReader:
    """Reads one sample's tokens. `prompt_ids` say whether it begins within a thought.

    `schemas` are the JSON schemas of the tools' parameters by name (see `tool_schemas`): they decide what bare words mean.
    `hold_calls` gives a call's events only when it is complete, so that none is begun that turns out malformed.
    `end_ids` end the turn too; with `ignore_end` no token does. `stop` strings end it where they occur in the content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        schemas: Mapping[str, object] | None = None,
        hold_calls: bool = False,
        end_ids: Collection[int] = (),
        ignore_end: bool = False,
        stop: Sequence[str] = (),
        make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, skip_special=False)
        self._marks = {tokenizer.token_id(mark.value): mark for mark in _Mark}
        self._marks |= {tokenizer.token_id(name): _Mark.END for name in _END_TOKENS} | dict.fromkeys(end_ids, _Mark.END)
        self._marks.pop(None, None)  # names that the vocabulary lacks
        self._schemas = schemas or {}
        self._hold_calls, self._ignore_end = hold_calls, ignore_end
        self._make_id = make_id
        self._stops = StopMatcher(stop)

        self._state = _State.CONTENT
        self._events: list[Event] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._num_malformed = self._num_started = self._num_reasoning_tokens = 0
        self._has_ended = False
        self._is_first = True  # neither a channel nor a call has come yet
        self._space: list[str] = []  # white space that counts only if text follows
        self._label = ""  # what may become a label
        self._holds = True  # in content: no text has come since the last mark
        self._from_prompt = 0  # so much of the label stood in the prompt
        self._needs_break = False  # another thought came before this one
        self._reader = CallReader(self._schemas)
        self._raw: list[str] = []  # the present call as decoded
        self._call_events: list[Event] = []
        self._call_json: list[str] = []
        self._call_start: ToolCallStart | None = None
        opening = _open_channel(tokenizer, prompt_ids)
        if opening is not None:
            self._enter_channel(opening)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to a thought, as far as the tokens up to now say."""
        return self._state in (_State.LABEL, _State.REASONING)

    @property
    def has_ended(self) -> bool:
        """Whether the turn is over: what comes is not read any more."""
        return self._has_ended

    def push(self, token_ids: Iterable[int]) -> list[Event]:
        """Take the next tokens; what is certain by them."""
        for token_id in token_ids:
            if self._state is _State.ENDED:
                break
            was_reasoning = self.in_reasoning
            self._take(token_id)
            self._num_reasoning_tokens += was_reasoning or self.in_reasoning
        return self._take_events()

    def finish(self) -> list[Event]:
        """The output is over, by an end token or without: what was held back."""
        if self._state is not _State.ENDED:
            self._text(self._decoder.flush())
            self._leave(is_end=True)
            self._state = _State.ENDED
        return self._take_events()

    def output(self) -> Output:
        """The whole of what `push` and `finish` have given."""
        return Output(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._tool_calls),
            num_malformed=self._num_malformed,
            num_reasoning_tokens=self._num_reasoning_tokens,
            has_ended=self._has_ended,
            stop=self._stops.matched,
        )

    def _take(self, token_id: int) -> None:
        mark = self._marks.get(token_id)
        if mark is None and token_id not in self._tokenizer.special_ids:
            self._text(self._decoder.push((token_id,)))
            return
        in_call = self._state in (_State.CALL, _State.BROKEN)
        if mark is None and not in_call:
            return
        self._text(self._decoder.flush())  # a character cannot go on behind a mark
        if self._state is _State.ENDED:
            return
        if mark is _Mark.END:
            self._end_turn()
        elif mark is _Mark.OPEN_CALL:
            self._move(lambda: self._enter_call(token_id))
        elif mark is _Mark.OPEN_CHANNEL and not (self._state is _State.CALL and self._reader.in_quotes):
            self._move(self._enter_channel)
        elif in_call:
            self._take_in_call(token_id, mark)
        elif mark is _Mark.CLOSE_CHANNEL and self.in_reasoning:
            self._move(self._enter_content)

    # Thoughts and content

    def _text(self, text: str) -> None:
        """Text of ordinary tokens, in whatever state."""
        if not text:
            return
        if self._state is _State.CONTENT:
            if self._holds:
                if text.isspace():
                    self._space.append(text)
                    return
                text, self._holds = self._take_space() + text, False
            self._add_content(text)
        elif self._state is _State.LABEL:
            self._label += text
            self._try_label()
        elif self._state is _State.REASONING:
            self._add_reasoning(text)
        elif self._state is _State.CALL:
            self._raw.append(text)
            self._advance_call(self._reader.push_text(text))
        elif self._state is _State.BROKEN:
            self._add_content(text, malformed=True)

    def _try_label(self) -> None:
        """Go on to the thought if the label is whole, or if there is none."""
        word, newline, _ = self._label.partition("\n")
        is_label = _LABEL_START.fullmatch(word) is not None
        if not newline and is_label:
            return
        begin = len(word) + 1 if newline and is_label and word else 0
        rest = self._label[max(begin, self._from_prompt) :]
        self._state = _State.REASONING
        self._add_reasoning(rest)

    def _add_reasoning(self, text: str) -> None:
        """Pass a thought on, but for the white space at its end."""
        certain = text.rstrip()
        if certain:
            line_break, self._needs_break = "\n" * self._needs_break, False
            self._emit_reasoning(line_break + self._take_space() + certain)
        self._space.append(text[len(certain) :])

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space

    def _emit_reasoning(self, text: str) -> None:
        self._reasoning.append(text)
        self._add_piece(ReasoningPiece(text))

    def _add_content(self, text: str, *, malformed: bool = False) -> None:
        text, is_hit = self._stops.push(text)
        self._emit_content(text, malformed)
        if is_hit:
            self._state, self._has_ended = _State.ENDED, True

    def _emit_content(self, text: str, malformed: bool = False) -> None:
        if text:
            self._content.append(text)
            self._add_piece(ContentPiece(text, malformed))

    def _enter_content(self) -> None:
        self._state, self._holds, self._is_first = _State.CONTENT, True, False

    def _enter_channel(self, opening: str = "") -> None:
        self._state, self._is_first = _State.LABEL, False
        self._needs_break = bool(self._reasoning)
        self._label, self._from_prompt = opening, len(opening)
        if opening:
            self._try_label()

    def _end_turn(self) -> None:
        if self._ignore_end:
            if self._state in (_State.CALL, _State.BROKEN):
                self._move(self._enter_content)
            return
        self._leave(is_end=True)
        self._state, self._has_ended = _State.ENDED, True

    def _move(self, enter: Callable[[], None]) -> None:
        """Leave the present state for another, unless a stop string in what was held back has ended the turn."""
        self._leave()
        if self._state is not _State.ENDED:
            enter()

    def _leave(self, *, is_end: bool = False) -> None:
        """Settle what was held back in the present state, which is over."""
        space = self._take_space()
        if self._state is _State.CONTENT:
            if space and is_end and self._is_first:
                self._add_content(space)
            self._emit_content(self._stops.flush())
        elif self._state is _State.LABEL:
            word = self._label[self._from_prompt :]
            if word and self._label != LABEL and not (is_end and LABEL.startswith(self._label)):
                self._add_reasoning(word)
                self._space.clear()
        elif self._state is _State.REASONING:
            space = space.removesuffix("\n")
            if space and self._reasoning and not self._needs_break:
                self._emit_reasoning(space)
        elif self._state is _State.CALL:
            self._break_call()
        if self._state is _State.BROKEN:
            self._emit_content(self._stops.flush(), malformed=True)

    # Tool calls

    def _enter_call(self, token_id: int) -> None:
        self._state, self._is_first = _State.CALL, False
        self._reader = CallReader(self._schemas)
        self._raw = [self._name(token_id)]
        self._call_events, self._call_json, self._call_start = [], [], None

    def _take_in_call(self, token_id: int, mark: _Mark | None) -> None:
        """A special token within a call: the end of it, a quote, or text of a string."""
        name = self._name(token_id)
        if self._state is _State.BROKEN:
            self._add_content(name, malformed=True)
        elif mark is _Mark.CLOSE_CALL and self._reader.is_complete:
            self._complete_call()
        else:
            self._raw.append(name)
            if mark is _Mark.QUOTE:
                self._advance_call(self._reader.push_quote())
            elif mark is not _Mark.CLOSE_CALL and self._reader.in_quotes:
                self._advance_call(self._reader.push_text(name))
            else:
                self._break_call()
        if mark is _Mark.CLOSE_CALL:
            self._move(self._enter_content)

    def _advance_call(self, piece: str) -> None:
        """Pass on what the call's reader has made certain, or give the call up."""
        if self._reader.fault is not None:
            self._break_call()
            return
        if self._call_start is None and self._reader.name is not None:
            self._call_start = ToolCallStart(self._num_started, self._make_id(), self._reader.name)
            self._num_started += 1
            self._add_call_event(self._call_start)
        if piece and self._call_start is not None:
            self._call_json.append(piece)
            self._add_call_event(ToolCallArguments(self._call_start.index, piece))

    def _complete_call(self) -> None:
        start = self._call_start
        if start is None:  # a complete call has a name
            self._break_call()
            return
        text = "".join(self._call_json)
        self._tool_calls.append(ToolCall(start.index, start.id, start.name, text, json.loads(text)))
        self._add_call_event(ToolCallEnd(start.index))
        for event in self._call_events:
            self._add_piece(event)
        self._call_events = []
        self._state = _State.CONTENT

    def _break_call(self) -> None:
        """The call is none: its text so far is content, and so is the rest of it."""
        self._num_malformed += 1
        if self._call_start is not None:
            if self._hold_calls:
                self._num_started -= 1
            else:
                self._add_piece(ToolCallEnd(self._call_start.index, complete=False))
        self._state, self._call_events = _State.BROKEN, []
        self._add_content("".join(self._raw), malformed=True)

    def _add_call_event(self, event: Event) -> None:
        if self._hold_calls:
            self._call_events.append(event)
        else:
            self._add_piece(event)

    def _name(self, token_id: int) -> str:
        return self._tokenizer.piece(token_id).decode("utf-8", errors="replace")

    def _add_piece(self, event: Event) -> None:
        merged = merge(self._events[-1], event) if self._events else None
        if merged is None:
            self._events.append(event)
        else:
            self._events[-1] = merged

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def tool_schemas(tools: Iterable[Mapping[str, Any]] | None) -> dict[str, object]:
    """JSON schemas of the parameters by the tools' names, from declarations in OpenAI's form."""
    functions = [tool.get("function") or tool for tool in tools or ()]
    return {function["name"]: function.get("parameters") for function in functions if isinstance(function.get("name"), str)}


def _open_channel(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str | None:
    """Text behind the `<|channel>` that a prompt leaves open; None where it leaves none open."""
    opener = tokenizer.token_id(_Mark.OPEN_CHANNEL.value)
    others = {tokenizer.token_id(name) for name in ("<channel|>", "<|tool_call>", "<|turn>", *_END_TOKENS)}
    for index in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[index] in others:
            return None
        if prompt_ids[index] == opener:
            return tokenizer.decode(prompt_ids[index + 1 :])
    return None
