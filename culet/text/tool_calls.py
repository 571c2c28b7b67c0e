"""One tool call of Gemma 4, `call:NAME{key:value,...}`, read as it is drawn and written as JSON.

Values are strings between two quote tokens `<|"|>`, with nothing escaped; `{key:value,...}`; `[value,...]`; or bare words:
numbers, true, false, null. What is a quote is for the caller to say, who knows it by its token id. Text that looks like one
is text. White space may stand around names, keys, values and signs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto

from culet.text.tool_schema import Shape, bare_json

_PREFIX = "call:"
_MAX_NAME_CHARS = 256
_MAX_NESTING = 64  # deeper ones are no arguments, and would exhaust the stack of many a JSON reader
_NAME = re.compile(r"""[^\s{}\[\],"'<>|]+""")
_SPACE = re.compile(r"\s*")
_KEY_END = re.compile(r"[{}\[\],:]")
_WORD_END = re.compile(r"[{}\[\],]")


class _State(Enum):
    HEAD = auto()  # call:NAME, up to the first brace
    FIRST_KEY = auto()  # after `{`: a key, or `}`
    KEY = auto()  # in a bare key, or before a key after a comma
    QUOTED_KEY = auto()
    COLON = auto()  # after a quoted key
    FIRST_ITEM = auto()  # after `[`: a value, or `]`
    VALUE = auto()  # before a value
    WORD = auto()  # in a bare value
    STRING = auto()
    AFTER = auto()  # after a value: a comma, or the end of what it stands in
    DONE = auto()  # after the last brace


class _Level:
    """An object or array that is open."""

    def __init__(self, closer: str, shape: Shape) -> None:
        self.closer = closer
        self.shape = shape
        self.key = ""
        self.num_items = 0

    def inner(self) -> Shape:
        """Shape of the value that comes next."""
        return self.shape.of_property(self.key) if self.closer == "}" else self.shape.of_item(self.num_items)


class CallReader:
    """Takes a call piece by piece; each piece gives the JSON text of the arguments that it makes certain.

    `fault` says what is wrong once the call cannot be one any more; nothing is read from then on.
    """

    def __init__(self, schemas: Mapping[str, object]) -> None:
        self.name: str | None = None  # known from the first brace on
        self.fault: str | None = None
        self._schemas = schemas
        self._state = _State.HEAD
        self._levels: list[_Level] = []
        self._word: list[str] = []  # pieces of the name, key or bare value that is being read
        self._json: list[str] = []  # what the present piece has given so far
        self._steps: dict[_State, Callable[[str, int], int]] = {
            _State.HEAD: self._read_head,
            _State.FIRST_KEY: self._read_first_key,
            _State.KEY: self._read_key,
            _State.QUOTED_KEY: self._read_quoted_key,
            _State.COLON: self._read_colon,
            _State.FIRST_ITEM: self._read_first_item,
            _State.VALUE: self._read_value,
            _State.WORD: self._read_word,
            _State.STRING: self._read_string,
            _State.AFTER: self._read_after,
            _State.DONE: self._read_rest,
        }

    @property
    def is_complete(self) -> bool:
        """Whether the last brace is closed, and nothing but space came after it."""
        return self._state is _State.DONE and self.fault is None

    @property
    def in_quotes(self) -> bool:
        """Whether a quote is open, so that all but a quote is text."""
        return self._state in (_State.STRING, _State.QUOTED_KEY)

    def push_text(self, text: str) -> str:
        """Take text; the JSON text that is certain by it."""
        position = 0
        while position < len(text) and self.fault is None:
            position = self._steps[self._state](text, position)
        return self._take_json()

    def push_quote(self) -> str:
        """Take a quote token; the JSON text that is certain by it."""
        if self.fault is not None:
            return ""
        if self._state is _State.STRING:
            self._json.append('"')
            self._end_value()
        elif self._state is _State.QUOTED_KEY:
            self._state = _State.COLON
        elif self._state in (_State.VALUE, _State.FIRST_ITEM):
            self._json.append('"')
            self._state = _State.STRING
        elif self._state in (_State.FIRST_KEY, _State.KEY) and not "".join(self._word).strip():
            self._word.clear()
            self._state = _State.QUOTED_KEY
        else:
            self.fault = "a quote where none may stand"
        return self._take_json()

    def _take_json(self) -> str:
        piece = "".join(self._json)
        self._json.clear()
        return piece

    def _take_word(self) -> str:
        word = "".join(self._word)
        self._word.clear()
        return word

    # The steps: each reads from a position on and gives the position up to which it came.

    def _read_head(self, text: str, position: int) -> int:
        end = text.find("{", position)
        self._word.append(text[position : end if end >= 0 else len(text)])
        whole = "".join(self._word)
        head = whole.lstrip()
        if not head.startswith(_PREFIX) and (end >= 0 or not _PREFIX.startswith(head)):
            self.fault = f"no {_PREFIX} at the beginning"
        elif len(whole) > len(_PREFIX) + _MAX_NAME_CHARS:
            self.fault = "a name without end"
        elif end >= 0:
            name = head[len(_PREFIX) :].strip()
            if _NAME.fullmatch(name):
                self.name = name
                self._word.clear()
                schema = self._schemas.get(name)
                self._open("{", Shape([schema], schema))
            else:
                self.fault = "no name"
        return end + 1 if end >= 0 else len(text)

    def _read_first_key(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if text[position : position + 1] == "}":
            self._close("}")
            return position + 1
        if position < len(text):
            self._state = _State.KEY
        return position

    def _read_key(self, text: str, position: int) -> int:
        found = _KEY_END.search(text, position)
        self._word.append(text[position : found.start() if found else len(text)])
        if found is None:
            return len(text)
        key = self._take_word().strip()
        if found.group() == ":" and key:
            self._begin_value(key)
        else:
            self.fault = "no key" if not key else f"{found.group()} after a key"
        return found.end()

    def _read_quoted_key(self, text: str, position: int) -> int:
        self._word.append(text[position:])
        return len(text)

    def _read_colon(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if text[position : position + 1] == ":":
            self._begin_value(self._take_word())
        elif position < len(text):
            self.fault = "no colon after a key"
        return position + 1

    def _read_first_item(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if text[position : position + 1] == "]":
            self._close("]")
            return position + 1
        if position < len(text):
            self._state = _State.VALUE
        return position

    def _read_value(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        sign = text[position : position + 1]
        if not sign:
            return position
        if sign in "{[":
            self._open(sign, self._levels[-1].inner())
            return position + 1
        if sign in "}],":
            self.fault = f"{sign} in the place of a value"
        self._state = _State.WORD
        return position

    def _read_word(self, text: str, position: int) -> int:
        found = _WORD_END.search(text, position)
        self._word.append(text[position : found.start() if found else len(text)])
        if found is None:
            return len(text)
        self._json.append(bare_json(self._take_word().strip(), self._levels[-1].inner().types()))
        self._end_value()
        return found.start()

    def _read_string(self, text: str, position: int) -> int:
        self._json.append(json.dumps(text[position:], ensure_ascii=False)[1:-1])
        return len(text)

    def _read_after(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        sign, level = text[position : position + 1], self._levels[-1]
        if sign == ",":
            self._json.append(",")
            self._state = _State.KEY if level.closer == "}" else _State.VALUE
        elif sign == level.closer:
            self._close(sign)
        elif sign:
            self.fault = f"{sign} after a value"
        return position + 1

    def _read_rest(self, text: str, position: int) -> int:
        if text[position:].strip():
            self.fault = "text after the arguments"
        return len(text)

    def _begin_value(self, key: str) -> None:
        self._levels[-1].key = key
        self._json.append(json.dumps(key, ensure_ascii=False) + ":")
        self._state = _State.VALUE

    def _end_value(self) -> None:
        self._levels[-1].num_items += 1
        self._state = _State.AFTER

    def _open(self, sign: str, shape: Shape) -> None:
        if len(self._levels) >= _MAX_NESTING:
            self.fault = f"more than {_MAX_NESTING} values within one another"
            return
        self._levels.append(_Level("}" if sign == "{" else "]", shape))
        self._json.append(sign)
        self._state = _State.FIRST_KEY if sign == "{" else _State.FIRST_ITEM

    def _close(self, sign: str) -> None:
        self._json.append(sign)
        self._levels.pop()
        if self._levels:
            self._end_value()
        else:
            self._state = _State.DONE


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position
