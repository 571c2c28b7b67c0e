"""Parse Gemma 4's output token by token into thoughts, text and tool calls.

    <|channel>thought\\n{reasoning}\\n<channel|>{text}<|tool_call>call:NAME{key:value,...}<tool_call|>...<|tool_response>

Markup is recognized by token id, never by spelling, so text that merely looks like markup is still text. Tokens are read one
at a time, so the result does not depend on how they are grouped. Streams and complete answers share this code.

- The content of a channel is reasoning. If its first line is a single lower-case word, that line is the channel's label and is
  dropped. Blank thoughts are also dropped, and so is one newline at the end of a thought, because the chat template writes it.
- `<|tool_call>` ends a thought that was not closed.
- `<|tool_response>`, `<turn|>` and `<eos>` end the turn. Outside calls, other special tokens produce no text.
- A tool call is reported when it is complete. Once its last brace is closed, it also counts if its end token is missing and
  another mark or the end of the output follows. A malformed call (bad syntax, no name or not closed) becomes text, including
  its markup, and is flagged as malformed. Without `reads_calls`, this holds for all calls.
- With `calls_hold`, a grammar holds calls to their form. Then the parts of a call are reported as they are read, and a call
  that the output is cut in is reported as it is.
- With `unmarked_calls`, `call:NAME{...}` in the text is also a call if NAME is a declared tool. Text is held back only while it
  may still be such a call. If it turns out not to be one, it is text as without the option.
- Blank text between channels and calls is dropped.
- `<|turn>model` and a newline at the start of the output are dropped. Models write them if the prompt does not end with them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache

from culet.text.output_pieces import (
    CLOSES,
    END_TOKENS,
    OPENS,
    OPENS_CALL,
    CallPart,
    Output,
    OutputPiece,
    ReasoningPiece,
    TextPiece,
    ToolCall,
    merge,
    thought_start,
)
from culet.text.stops import StopMatcher
from culet.text.tokenizer import IncrementalDecoder, Tokenizer
from culet.text.tool_calls import CallReader

LABEL = "thought"
_LABEL_START = re.compile(r"[a-z]{0,24}")  # any prefix of a label
_ROLE = "model\n"
_CALL = "call:"


class _Mark(Enum):
    OPEN_CHANNEL = OPENS
    CLOSE_CHANNEL = CLOSES
    OPEN_CALL = OPENS_CALL
    CLOSE_CALL = "<tool_call|>"
    QUOTE = '<|"|>'
    END = "<eos>"


@lru_cache(maxsize=4)  # for every sample, looking the names up would take longer than a token
def _marks_of(tokenizer: Tokenizer) -> dict[int, _Mark]:
    """Return the ids of all marks. Names that the vocabulary lacks are left out."""
    names = {mark.value: mark for mark in _Mark} | dict.fromkeys(END_TOKENS, _Mark.END)
    ids = {name: tokenizer.token_id(name) for name in names}
    return {token_id: names[name] for name, token_id in ids.items() if token_id is not None}


class _State(Enum):
    ROLE = auto()  # after `<|turn>` at the start of the output
    TEXT = auto()
    LABEL = auto()  # at the start of a channel, where its label may follow
    REASONING = auto()
    CALL = auto()
    BROKEN = auto()  # inside a malformed call, until it ends
    ENDED = auto()


_THINKING = (_State.LABEL, _State.REASONING)


class ChatReader:
    """Reads one sample of a chat. `prompt_ids` show whether the output starts inside a thought.

    `schemas` maps tool names to the JSON schemas of their parameters (see `tool_schemas`), which decide what bare words mean.
    Tokens in `end_ids` also end the turn. With `ignore_end`, no token ends it. A `stop` string in the text ends the turn
    after the first `min_tokens` tokens. With `unmarked_calls`, calls of declared tools count without the tokens around them.
    If `calls_hold`, a grammar holds calls to the schemas of their tools, except for `free_tools`. With `single_call`, nothing
    is read after the first call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        schemas: Mapping[str, object] | None = None,
        end_ids: Collection[int] = (),
        ignore_end: bool = False,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        calls_hold: bool = False,
        unmarked_calls: bool = False,
        free_tools: Collection[str] = (),
        reads_calls: bool = True,
        single_call: bool = False,
        make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, skip_special=False)
        self._marks = _marks_of(tokenizer) | dict.fromkeys(end_ids, _Mark.END)
        self._turn_id = tokenizer.token_id("<|turn>")
        self._special_ids = tokenizer.special_ids
        self._schemas = schemas or {}
        self._ignore_end = ignore_end
        self._make_id = make_id
        self._calls_hold, self._reads_calls, self._single_call = calls_hold, reads_calls, single_call
        # A held call has no bare strings, so its words mean what they say. Schemas would only be a source of errors.
        self._call_schemas = {name: self._schemas.get(name) for name in free_tools} if calls_hold else self._schemas
        self._stops = StopMatcher(stop, min_tokens)
        self._heads = tuple(f"{_CALL}{name}{{" for name in self._schemas) if unmarked_calls else ()

        self._state = _State.TEXT
        self._pieces: list[OutputPiece] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._num_malformed = self._num_thought_tokens = 0
        self._has_ended = False
        self._is_first = True  # no channel or call so far
        self._space: list[str] = []  # white space that counts only if text follows
        self._label = ""  # text that may become a label
        self._is_blank = True  # no text since the last mark
        self._label_in_prompt = 0  # characters of the label that are already in the prompt
        self._needs_break = False  # another thought came before this one
        self._call = CallReader(self._schemas)
        self._raw_call: list[str] = []  # the decoded text of the current call
        self._call_json: list[str] = []
        self._call_id = ""  # of the current call, if parts of it were reported
        self._is_unmarked = False  # the current call was not opened by its token
        self._held_head = ""  # the end of the text, which may be the head of an unmarked call
        self._last_char = ""  # of the text since the last mark
        begin = thought_start(tokenizer, prompt_ids)
        if begin is not None:
            self._enter_channel(tokenizer.decode(prompt_ids[begin:]))

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to a thought, judging by the tokens so far."""
        return self._state in _THINKING

    @property
    def has_ended(self) -> bool:
        """Whether the turn is over. Later tokens are ignored."""
        return self._has_ended

    def push(self, token_ids: Iterable[int]) -> list[OutputPiece]:
        """Read the next tokens and return the pieces that can no longer change."""
        for token_id in token_ids:
            before = self._state
            if before is _State.ENDED:
                break
            self._read(token_id)
            self._stops.count_token()
            if before in _THINKING:
                self._num_thought_tokens += self.in_reasoning
        return self._take_pieces()

    def finish(self) -> list[OutputPiece]:
        """Return the pieces that were held back. Call at the end of the output, with or without an end token."""
        if self._state is not _State.ENDED:
            self._add(self._decoder.flush())
            self._leave(is_end=True)
            self._state = _State.ENDED
        return self._take_pieces()

    def output(self) -> Output:
        """Return everything that `push` and `finish` have returned."""
        return Output(
            text="".join(self._texts),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._tool_calls),
            num_malformed=self._num_malformed,
            num_thought_tokens=self._num_thought_tokens,
            has_ended=self._has_ended,
            stop=self._stops.matched,
        )

    def _read(self, token_id: int) -> None:
        if token_id not in self._marks and token_id not in self._special_ids:
            self._add(self._decoder.push((token_id,)))
            return
        mark = self._marks.get(token_id)
        in_call = self._state in (_State.CALL, _State.BROKEN)
        if mark is None and not in_call:
            if token_id == self._turn_id and self._state is _State.TEXT and self._is_first and self._is_blank:
                self._state, self._label = _State.ROLE, ""
            return
        self._add(self._decoder.flush())  # a character cannot continue after a mark
        if self._state is _State.ENDED:
            return
        if mark is _Mark.END:
            self._end_turn()
        elif mark is _Mark.OPEN_CALL:
            self._move(lambda: self._open_call(self._name(token_id)))
        elif mark is _Mark.OPEN_CHANNEL and not (self._state is _State.CALL and self._call.in_quotes):
            self._move(self._enter_channel)
        elif in_call:
            self._read_in_call(token_id, mark)
        elif mark is _Mark.CLOSE_CHANNEL and self.in_reasoning:
            self._move(self._enter_text)

    # Thoughts and text

    def _add(self, text: str) -> None:
        """Add the text of ordinary tokens, in any state."""
        if not text:
            return
        if self._state is _State.TEXT:
            if self._heads:
                self._find_call(text)
            else:
                self._add_spoken(text)
        elif self._state is _State.ROLE:
            self._label += text
            if not _ROLE.startswith(self._label):
                self._end_role()
        elif self._state is _State.LABEL:
            self._label += text
            self._try_label()
        elif self._state is _State.REASONING:
            self._add_reasoning(text)
        elif self._state is _State.CALL and self._is_unmarked:
            self._read_unmarked(text)
        elif self._state is _State.CALL:
            self._raw_call.append(text)
            self._advance_call(self._call.push_text(text))
        elif self._state is _State.BROKEN:
            self._add_text(text, malformed=True)

    def _add_spoken(self, text: str) -> None:
        """Add text of the answer. Drop white space after a mark unless more text follows."""
        if self._is_blank:
            if text.isspace():
                self._space.append(text)
                return
            text, self._is_blank = self._take_space() + text, False
        self._add_text(text)

    def _end_role(self) -> None:
        """Read what follows `<|turn>` as text, without the model's role."""
        text, self._state = self._label.removeprefix(_ROLE), _State.TEXT
        self._add(text)

    def _try_label(self) -> None:
        """Start the thought once the label is complete, or once it is clear that there is no label."""
        word, newline, _ = self._label.partition("\n")
        is_label = _LABEL_START.fullmatch(word) is not None
        if not newline and is_label:
            return
        begin = len(word) + 1 if newline and is_label and word else 0
        rest = self._label[max(begin, self._label_in_prompt) :]
        self._state = _State.REASONING
        self._add_reasoning(rest)

    def _add_reasoning(self, text: str) -> None:
        """Emit part of a thought and hold back the white space at its end."""
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
        self._emit(ReasoningPiece(text))

    def _add_text(self, text: str, *, malformed: bool = False) -> None:
        text, is_hit = self._stops.push(text)
        self._emit_text(text, malformed)
        if is_hit:
            self._state, self._has_ended = _State.ENDED, True

    def _emit_text(self, text: str, malformed: bool = False) -> None:
        if text:
            self._texts.append(text)
            self._emit(TextPiece(text, malformed))

    def _enter_text(self) -> None:
        self._state, self._is_blank, self._is_first = _State.TEXT, True, False
        self._last_char = ""

    def _enter_channel(self, opening: str = "") -> None:
        self._state, self._is_first = _State.LABEL, False
        self._needs_break = bool(self._reasoning)
        self._label, self._label_in_prompt = opening, len(opening)
        if opening:
            self._try_label()

    def _end_turn(self) -> None:
        if self._ignore_end:
            if self._state in (_State.CALL, _State.BROKEN):
                self._move(self._enter_text)
            return
        self._leave(is_end=True)
        self._state, self._has_ended = _State.ENDED, True

    def _move(self, enter: Callable[[], None]) -> None:
        """Change to another state, unless a stop string in the held-back text has ended the turn."""
        self._leave()
        if self._state is not _State.ENDED:
            enter()

    def _leave(self, *, is_end: bool = False) -> None:
        """Leave the current state. Emit or drop the text that was held back."""
        if self._state is _State.ROLE:
            self._end_role()
        if self._is_unmarked:
            self._give_up_unmarked()
        if self._held_head:
            held, self._held_head = self._held_head, ""
            self._add_spoken(held)
        space = self._take_space()
        if self._state is _State.TEXT:
            if space and is_end and self._is_first:
                self._add_text(space)
            self._emit_text(self._stops.flush())
        elif self._state is _State.LABEL:
            word = self._label[self._label_in_prompt :]
            if word and self._label != LABEL and not (is_end and LABEL.startswith(self._label)):
                self._add_reasoning(word)
                self._space.clear()
        elif self._state is _State.REASONING:
            space = space.removesuffix("\n")
            if space and self._reasoning and not self._needs_break:
                self._emit_reasoning(space)
        elif self._state is _State.CALL:
            self._end_call()
        if self._state is _State.BROKEN:
            self._emit_text(self._stops.flush(), malformed=True)

    # Tool calls

    def _open_call(self, opening: str) -> None:
        self._state, self._is_first = _State.CALL, False
        self._call = CallReader(self._call_schemas)
        self._raw_call, self._call_json, self._call_id = [opening], [], ""
        if not self._reads_calls:
            self._break_call()

    def _read_in_call(self, token_id: int, mark: _Mark | None) -> None:
        """Read a special token inside a call. It may be the end of the call, a quote, or part of a string."""
        name = self._name(token_id)
        ends_call = mark is _Mark.CLOSE_CALL and not self._is_unmarked
        if self._state is _State.BROKEN:
            self._add_text(name, malformed=True)
        else:
            if not self._is_unmarked:
                self._raw_call.append(name)
            advance = self._advance_unmarked if self._is_unmarked else self._advance_call
            if ends_call:
                self._end_call()
            elif mark is _Mark.QUOTE:
                advance(self._call.push_quote())
            elif self._call.in_quotes:
                advance(self._call.push_text(name))
            elif self._is_unmarked:
                self._give_up_unmarked()
            else:
                self._break_call()
        if ends_call:
            self._move(self._enter_text)

    def _advance_call(self, arguments_json: str) -> None:
        """Append to the arguments, or give up on the call if it is malformed."""
        if self._call.fault is not None:
            self._break_call()
            return
        self._call_json.append(arguments_json)
        if self._calls_hold and arguments_json:  # then the name is known too
            is_first, self._call_id = not self._call_id, self._call_id or self._make_id()
            part = CallPart(len(self._tool_calls), self._call_id, self._call.name or "", arguments_json, is_first)
            self._emit(part)
        if self._call.next_call:
            self._begin_next_call(self._call.next_call)

    def _begin_next_call(self, head: str) -> None:
        """Report the call, and read another that follows it as if it had marks of its own."""
        opening = self._raw_call[0]
        self._report_call()
        if self._state is not _State.ENDED:
            self._open_call(opening)
            self._add(head)

    def _end_call(self) -> None:
        """Report the call if it is complete or partly reported already. If a call was cut before its arguments, drop it."""
        if self._call.is_complete or self._call_id:
            self._report_call(is_complete=self._call.is_complete)
        elif self._calls_hold and self._call.fault is None:
            self._state = _State.TEXT
        else:
            self._break_call()

    def _report_call(self, *, is_complete: bool = True) -> None:
        text = "".join(self._call_json)
        arguments = json.loads(text) if is_complete else {}
        call_id, name = self._call_id or self._make_id(), self._call.name or ""
        call = ToolCall(len(self._tool_calls), call_id, name, text, arguments, bool(self._call_id), is_complete)
        self._tool_calls.append(call)
        self._emit(call)
        self._state = _State.ENDED if self._single_call else _State.TEXT

    def _break_call(self) -> None:
        """Treat the call as malformed, and return all of it as text, including what follows."""
        if self._call_id:  # its grammar let go of it, and the parts that were reported remain
            self._report_call(is_complete=False)
        self._num_malformed += 1
        self._state = _State.BROKEN
        self._add_text("".join(self._raw_call), malformed=True)

    # Calls without marks

    def _find_call(self, text: str) -> None:
        """Add text of the answer up to where a call begins, or may begin."""
        text, self._held_head = self._held_head + text, ""
        begin = text.find(_CALL[0])
        while begin >= 0:
            before = text[begin - 1] if begin else self._last_char
            may_begin = _CALL.startswith(text[begin : begin + len(_CALL)]) and not (before.isalnum() or before == "_")
            if may_begin and any(head.startswith(text[begin : begin + len(head)]) for head in self._heads):
                break
            begin = text.find(_CALL[0], begin + 1)
        if begin < 0:
            begin = len(text)
        if begin:
            self._add_spoken(text[:begin])
            self._last_char = text[begin - 1]
        if self._state is _State.TEXT and text.startswith(self._heads, begin):
            self._state, self._is_unmarked = _State.CALL, True
            self._call = CallReader(self._schemas)
            self._raw_call, self._call_json, self._call_id = [], [], ""
            self._read_unmarked(text[begin:])
        elif self._state is _State.TEXT:
            self._held_head = text[begin:]

    def _read_unmarked(self, text: str) -> None:
        """Read character by character, because the call ends with its last brace and text may follow."""
        for end, char in enumerate(text, 1):
            self._raw_call.append(char)
            self._advance_unmarked(self._call.push_text(char))
            if not self._is_unmarked:
                self._add(text[end:])
                return

    def _advance_unmarked(self, arguments_json: str) -> None:
        self._call_json.append(arguments_json)
        if self._call.fault is not None:
            self._give_up_unmarked()
        elif self._call.is_complete:
            self._is_unmarked = False
            self._space.clear()
            self._emit_text(self._stops.flush())
            self._report_call()
            if self._state is not _State.ENDED:
                self._enter_text()

    def _give_up_unmarked(self) -> None:
        """Read what seemed to be a call as text."""
        self._state, self._is_unmarked = _State.TEXT, False
        text = "".join(self._raw_call)
        self._last_char = text[-1]
        self._add_spoken(text)

    def _name(self, token_id: int) -> str:
        return self._tokenizer.piece(token_id).decode("utf-8", errors="replace")

    def _emit(self, piece: OutputPiece) -> None:
        merged = merge(self._pieces[-1], piece) if self._pieces else None
        if merged is None:
            self._pieces.append(piece)
        else:
            self._pieces[-1] = merged

    def _take_pieces(self) -> list[OutputPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces
