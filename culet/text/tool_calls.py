"""Parse a Gemma 4 tool call, `call:NAME{key:value,...}`, while it is generated, and write its arguments as JSON.

A value is a string between two quote tokens `<|"|>` (nothing is escaped), an object `{key:value,...}`, an array `[value,...]`,
or a bare word such as a number, true, false or null. The caller recognizes quote tokens by their id, so text that only looks
like one is text. White space is allowed around names, keys, values and punctuation.

Models also write a few other forms, more often after long prompts or if they are quantised. They are read as what they mean:
`:NAME{...}` and `:call:NAME{...}`, parentheses as in `call:NAME(key=value)` and `call:NAME({key:value})`, keys and values in
ASCII quotes, a comma after the last value, one brace too many at the end, and another call after the first (`next_call`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto

from culet.text.tool_schema import Shape, bare_json, unquote

_PREFIXES = ("call:", ":call:", ":")  # a longer one before those that it begins with
_MAX_NAME_CHARS = 256
MAX_NESTING = 256  # of objects and arrays. Deeper values would overflow the stack of many JSON parsers.
_NAME = re.compile(r"""[^\s{}\[\],"'<>|]+""")
_NEXT_CALL = re.compile(r"""[,;]?\s*(call:\s*[^\s{}()\[\],"'<>|]+\s*[{(].*)""", re.DOTALL)  # after a call and white space
_NEXT_CALL_START = re.compile(r"""[,;]?\s*(|c|ca|cal|call|call:[^{}()\[\],"'<>|]*)""")
_SPACE = re.compile(r"\s*")
_HEAD_END = re.compile(r"[{(]")
_KEY_END = re.compile(r"[{}\[\],:]")
_WORD_END = re.compile(r"[{}\[\],]")
_NAMED_KEY_END = re.compile(r"[{}\[\],:=()]")  # between parentheses
_NAMED_WORD_END = re.compile(r"[{}\[\],)]")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


class _State(Enum):
    HEAD = auto()  # call:NAME, up to the first brace or parenthesis
    FIRST_KEY = auto()  # after `{`, before a key or the end
    KEY = auto()  # in a bare key, or between a comma and a key
    ASCII_KEY = auto()  # in a bare key, between ASCII quotes
    QUOTED_KEY = auto()
    COLON = auto()  # after a quoted key
    FIRST_ITEM = auto()  # after `[`, before a value or `]`
    VALUE = auto()  # before a value
    WORD = auto()  # in a bare value
    ASCII_STRING = auto()  # in a bare value, between ASCII quotes
    STRING = auto()
    AFTER = auto()  # after a value, before a comma or the end of its object or array
    PARENTHESIS = auto()  # after the object in `call:NAME({...})`
    DONE = auto()  # after the last brace, where another call may follow


class _Level:
    """An open object or array."""

    def __init__(self, closer: str, shape: Shape) -> None:
        self.closer = closer
        self.shape = shape
        self.key = ""
        self.num_items = 0

    def inner(self) -> Shape:
        """Return the shape of the next value."""
        return self.shape.of_property(self.key) if self.has_keys else self.shape.of_item(self.num_items)

    @property
    def has_keys(self) -> bool:
        return self.closer != "]"

    @property
    def is_named(self) -> bool:
        """Whether this is a list of arguments in parentheses."""
        return self.closer == ")"


class CallReader:
    """Reads a call piece by piece. Each push returns the JSON of the arguments that can no longer change.

    Once the call turns out to be malformed, `fault` says why, and further input is ignored.
    """

    def __init__(self, schemas: Mapping[str, object]) -> None:
        self.name: str | None = None  # known after the first brace
        self.fault: str | None = None
        self.next_call = ""  # the head of the call that follows this one, if there is one. Then this one is complete.
        self._schemas = schemas
        self._state = _State.HEAD
        self._levels: list[_Level] = []
        self._is_wrapped = False  # the arguments are an object in parentheses
        self._may_repeat_brace = False
        self._word: list[str] = []  # pieces of the current name, key or bare value
        self._json: list[str] = []  # JSON from the current push
        self._readers: dict[_State, Callable[[str, int], int]] = {
            _State.HEAD: self._read_head,
            _State.FIRST_KEY: self._read_first_key,
            _State.KEY: self._read_key,
            _State.ASCII_KEY: self._read_ascii_string,
            _State.QUOTED_KEY: self._read_quoted_key,
            _State.COLON: self._read_colon,
            _State.FIRST_ITEM: self._read_first_item,
            _State.VALUE: self._read_value,
            _State.WORD: self._read_word,
            _State.ASCII_STRING: self._read_ascii_string,
            _State.STRING: self._read_string,
            _State.AFTER: self._read_after,
            _State.PARENTHESIS: self._read_parenthesis,
            _State.DONE: self._read_rest,
        }

    @property
    def is_complete(self) -> bool:
        """Whether the last brace is closed and only white space or another call follows."""
        return self._state is _State.DONE and self.fault is None and not self._word

    @property
    def in_quotes(self) -> bool:
        """Whether a quote is open. Everything up to the next quote token is then text."""
        return self._state in (_State.STRING, _State.QUOTED_KEY)

    def push_text(self, text: str) -> str:
        """Read more text and return the JSON that can no longer change."""
        position = 0
        while position < len(text) and self.fault is None:
            position = self._readers[self._state](text, position)
        return self._take_json()

    def push_quote(self) -> str:
        """Read a quote token and return the JSON that can no longer change."""
        if self.fault is not None:
            return ""
        if self._state is _State.STRING:
            self._json.append('"')
            self._end_value()
        elif self._state is _State.QUOTED_KEY:
            self._state = _State.COLON
        elif self._state in (_State.VALUE, _State.FIRST_ITEM):
            self._json.append(self._comma() + '"')
            self._state = _State.STRING
        elif self._state in (_State.FIRST_KEY, _State.KEY) and not "".join(self._word).strip():
            self._word.clear()
            self._state = _State.QUOTED_KEY
        else:
            self.fault = "an unexpected quote"
        return self._take_json()

    def _take_json(self) -> str:
        piece = "".join(self._json)
        self._json.clear()
        return piece

    def _take_word(self) -> str:
        word = "".join(self._word)
        self._word.clear()
        return word

    # There is one method per state. Each reads from `position` and returns the position where it stopped.

    def _read_head(self, text: str, position: int) -> int:
        match = _HEAD_END.search(text, position)
        self._word.append(text[position : match.start() if match else len(text)])
        whole = "".join(self._word)
        head = whole.lstrip()
        prefix = next((prefix for prefix in _PREFIXES if head.startswith(prefix)), None)
        if prefix is None and (match or not any(prefix.startswith(head) for prefix in _PREFIXES)):
            self.fault = "does not start with call:"
        elif len(whole) > len(_PREFIXES[0]) + _MAX_NAME_CHARS:
            self.fault = "the name is too long"
        elif match and prefix is not None:
            name = head[len(prefix) :].strip()
            if _NAME.fullmatch(name):
                self.name = name
                self._word.clear()
                schema = self._schemas.get(name)
                self._open(match.group(), Shape([schema], schema))
            else:
                self.fault = "no valid name"
        return match.end() if match else len(text)

    def _read_first_key(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        level, char = self._levels[-1], text[position : position + 1]
        if char == level.closer:
            self._close()
            return position + 1
        if char == "{" and level.is_named and not self._is_wrapped:
            level.closer, self._is_wrapped = "}", True
            return position + 1
        if char:
            self._state = _State.KEY
        return position

    def _read_key(self, text: str, position: int) -> int:
        if not "".join(self._word).strip():
            position = _skip_space(text, position)
            if text[position : position + 1] == '"':
                self._word.clear()
                self._state = _State.ASCII_KEY
                return position
        match = (_NAMED_KEY_END if self._levels[-1].is_named else _KEY_END).search(text, position)
        self._word.append(text[position : match.start() if match else len(text)])
        if match is None:
            return len(text)
        key = self._take_word().strip()
        if match.group() in ":=" and key:
            unquoted = unquote(key)
            self._begin_value(key if unquoted is None else unquoted)
        elif not key and match.group() == self._levels[-1].closer and self._levels[-1].num_items:  # after a last comma
            self._close()
        else:
            self.fault = "no key" if not key else f"{match.group()} after a key"
        return match.end()

    def _read_quoted_key(self, text: str, position: int) -> int:
        self._word.append(text[position:])
        return len(text)

    def _read_colon(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if text[position : position + 1] in ((":", "=") if self._levels[-1].is_named else (":",)):
            self._begin_value(self._take_word())
        elif position < len(text):
            self.fault = "no colon after a key"
        return position + 1

    def _read_first_item(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if text[position : position + 1] == "]":
            self._close()
            return position + 1
        if position < len(text):
            self._state = _State.VALUE
        return position

    def _read_value(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        char = text[position : position + 1]
        if not char:
            return position
        if char in "{[":
            self._json.append(self._comma())
            self._open(char, self._levels[-1].inner())
            return position + 1
        if char == "]" and not self._levels[-1].has_keys and self._levels[-1].num_items:  # after a last comma
            self._close()
            return position + 1
        if char in "}]," or char == self._levels[-1].closer:
            self.fault = f"{char} instead of a value"
        self._state = _State.ASCII_STRING if char == '"' else _State.WORD
        return position

    def _read_word(self, text: str, position: int) -> int:
        match = (_NAMED_WORD_END if self._levels[-1].is_named else _WORD_END).search(text, position)
        self._word.append(text[position : match.start() if match else len(text)])
        if match is None:
            return len(text)
        self._json.append(self._comma() + bare_json(self._take_word().strip(), self._levels[-1].inner().types()))
        self._end_value()
        return match.start()

    def _read_ascii_string(self, text: str, position: int) -> int:
        end = text.find('"', position + (not self._word)) + 1  # after the opening quote
        self._word.append(text[position : end or len(text)])
        if not end:
            return len(text)
        if not _is_escaped(self._word):
            self._state = _State.KEY if self._state is _State.ASCII_KEY else _State.WORD
        return end

    def _read_string(self, text: str, position: int) -> int:
        self._json.append(json.dumps(text[position:], ensure_ascii=False)[1:-1])
        return len(text)

    def _read_after(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        char, level = text[position : position + 1], self._levels[-1]
        if char == ",":
            self._state = _State.KEY if level.has_keys else _State.VALUE
        elif char == level.closer:
            self._close()
        elif char:
            self.fault = f"{char} after a value"
        return position + 1

    def _read_parenthesis(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        char = text[position : position + 1]
        if char == ")":
            self._state = _State.DONE
        elif char:
            self.fault = f"{char} instead of a parenthesis"
        return position + 1

    def _read_rest(self, text: str, position: int) -> int:
        if not self._word:
            position = _skip_space(text, position)
            if text[position : position + 1] == "}" and self._may_repeat_brace:
                self._may_repeat_brace = False
                return position + 1
        self._word.append(text[position:])
        rest = "".join(self._word)
        if not rest:
            self._word.clear()
        elif found := _NEXT_CALL.fullmatch(rest):
            self.next_call = found[1]
            self._word.clear()
        elif not _NEXT_CALL_START.fullmatch(rest) or len(rest) > len(_PREFIXES[0]) + _MAX_NAME_CHARS:
            self.fault = "text after the arguments"
        return len(text)

    def _begin_value(self, key: str) -> None:
        level = self._levels[-1]
        self._json.append(("," if level.num_items else "") + json.dumps(key, ensure_ascii=False) + ":")
        level.key, self._state = key, _State.VALUE

    def _comma(self) -> str:
        """Return the comma before a value, which is known to be there only now. In objects, it comes with the key."""
        return "" if self._levels[-1].has_keys or not self._levels[-1].num_items else ","

    def _end_value(self) -> None:
        self._levels[-1].num_items += 1
        self._state = _State.AFTER

    def _open(self, char: str, shape: Shape) -> None:
        if len(self._levels) >= MAX_NESTING:
            self.fault = f"nested deeper than {MAX_NESTING}"
            return
        level = _Level(_CLOSERS[char], shape)
        self._levels.append(level)
        self._json.append("{" if level.has_keys else "[")
        self._state = _State.FIRST_KEY if level.has_keys else _State.FIRST_ITEM

    def _close(self) -> None:
        level = self._levels.pop()
        self._json.append("}" if level.has_keys else "]")
        if self._levels:
            self._end_value()
        else:
            self._state = _State.PARENTHESIS if self._is_wrapped else _State.DONE
            self._may_repeat_brace = level.closer == "}" and not self._is_wrapped


def _is_escaped(pieces: list[str]) -> bool:
    """Return whether a backslash escapes the last character of the joined pieces."""
    num_backslashes = 0
    for character in itertools.islice(itertools.chain.from_iterable(map(reversed, reversed(pieces))), 1, None):
        if character != "\\":
            break
        num_backslashes += 1
    return num_backslashes % 2 == 1


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
