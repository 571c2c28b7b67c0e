"""Translate a schema's `pattern` and `format` to regular expressions of llguidance, and test texts against them.

A schema's pattern is written in JavaScript's notation and matches if any part of the text does. A grammar's expression has to
match the whole text. Where JavaScript, Python and Rust disagree (what `\\d`, `\\w`, `\\s` and `.` match), the translation
matches only what all of them do, so a text fits whoever checks it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from culet.structured.compiled_grammar import GrammarFault, compile_grammar, index_vocabulary
from culet.types import GrammarSpec

_MAX_CHARS = 4096
_MAX_NESTING = 32
_MAX_REPEAT = 4096
ANY_TEXT = "(?s:.*)"
_ANY_CHAR = "(?s:.)"
_QUANTIFIER = re.compile(r"([*+?]|\{([0-9]+)(?:,([0-9]*))?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_$][\w$]*>)?(?!\?)")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_SPACE, _ALL_SPACE = r"\x20\t\n\r\f\v", r"\s\x{feff}\x1c-\x1f"
# The members of classes: what all dialects match, and what any of them matches.
_NARROW = {"d": "0-9", "D": r"\D", "w": "A-Za-z0-9_", "W": r"\W", "s": _SPACE, "S": rf"[^{_ALL_SPACE}]"}
_WIDE = {"d": r"\d", "D": "[^0-9]", "w": r"\w", "W": "[^A-Za-z0-9_]", "s": _ALL_SPACE, "S": rf"[^{_SPACE}]"}
_DOT = r"[^\n\r\x{2028}\x{2029}]"


class _Unsupported(Exception):
    """A pattern that cannot be translated: it is malformed, or looks around, or refers to its groups."""


class _Part(NamedTuple):
    """A part of a pattern. An anchor is `^` or `$`. A group is a list of branches, each a list of parts."""

    text: str = ""
    anchor: str = ""
    branches: tuple[tuple[_Part, ...], ...] = ()
    repeat: str = ""

    @property
    def has_anchors(self) -> bool:
        return bool(self.anchor) or any(part.has_anchors for branch in self.branches for part in branch)


def search_expression(pattern: str) -> str | None:
    """Return an expression for all texts in which a schema's pattern is found, or None if it cannot be translated."""
    try:
        if len(pattern) > _MAX_CHARS:
            return None
        reader = _Reader(pattern)
        branches = reader.read_branches(0)
        if reader.position < len(pattern):
            return None
        text = _written(branches, is_begin=True, is_end=True)
        return text if expression(f"/{text}/") is not None else None
    except _Unsupported:
        return None


def _written(branches: tuple[tuple[_Part, ...], ...], *, is_begin: bool = False, is_end: bool = False) -> str:
    """Return branches as an expression. At the begin and the end of the pattern, any text may come before and after."""
    return "|".join(_written_branch(list(branch), is_begin, is_end) for branch in branches)


def _written_branch(parts: list[_Part], is_begin: bool, is_end: bool) -> str:
    before, after = "", ""
    if is_begin:
        if parts and parts[0].anchor == "^":
            while parts and parts[0].anchor == "^":
                del parts[0]
        elif parts and parts[0].has_anchors and not parts[0].repeat:  # a group that decides by itself
            is_last = is_end and len(parts) == 1
            before = f"(?:{_written(parts.pop(0).branches, is_begin=True, is_end=is_last)})"
            if is_last:
                return before
        else:
            before = ANY_TEXT
    if is_end:
        if parts and parts[-1].anchor == "$":
            while parts and parts[-1].anchor == "$":
                parts.pop()
        elif parts and parts[-1].has_anchors and not parts[-1].repeat:
            after = f"(?:{_written(parts.pop().branches, is_end=True)})"
        else:
            after = ANY_TEXT
    return before + "".join(map(_written_part, parts)) + after


def _written_part(part: _Part) -> str:
    if part.has_anchors:
        raise _Unsupported("an anchor inside of the pattern")
    return (f"(?:{_written(part.branches)})" if part.branches else part.text) + part.repeat


def escaped(code: int) -> str:
    """Return a character as an expression. It needs no further escapes between slashes or in a class."""
    if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        raise _Unsupported("half of a character")
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"


class _Reader:
    """Reads a pattern in JavaScript's notation."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.position = pattern, 0

    def _peek(self) -> str:
        return self.pattern[self.position : self.position + 1]

    def _take(self) -> str:
        if not (char := self._peek()):
            raise _Unsupported("ends too early")
        self.position += 1
        return char

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        match = expression.match(self.pattern, self.position)
        self.position = match.end() if match else self.position
        return match

    def read_branches(self, depth: int) -> tuple[tuple[_Part, ...], ...]:
        if depth > _MAX_NESTING:
            raise _Unsupported("nested too deeply")
        branches: list[tuple[_Part, ...]] = []
        parts: list[_Part] = []
        while (char := self._peek()) and char != ")":
            if char == "|":
                self.position += 1
                branches.append(tuple(parts))
                parts = []
            else:
                parts.append(self._repeated(self._read_part(depth)))
        return (*branches, tuple(parts))

    def _repeated(self, part: _Part) -> _Part:
        match = self._match(_QUANTIFIER)
        if match is None:
            return part
        if part.anchor or self._peek() in ("*", "+", "?") or max([0, *(int(n) for n in match.groups()[1:] if n)]) > _MAX_REPEAT:
            raise _Unsupported("a quantifier")
        return part._replace(repeat=match.group(1))

    def _read_part(self, depth: int) -> _Part:
        char = self._peek()
        if char == "(":
            if self._match(_GROUP) is None:
                raise _Unsupported("looks around")
            branches = self.read_branches(depth + 1)
            if self._take() != ")":
                raise _Unsupported("an open group")
            return _Part(branches=branches)
        self.position += 1
        if char in "^$":
            return _Part(anchor=char)
        if char == ".":
            return _Part(_DOT)
        if char == "[":
            return _Part(self._read_class())
        if char == "\\":
            code = self._read_escape()
            return _Part(escaped(code) if isinstance(code, int) else f"[{_NARROW.get(code, code)}]")
        if char in "*+?":
            raise _Unsupported("nothing to repeat")
        return _Part(escaped(ord(char)))

    def _read_escape(self) -> int | str:
        """Return the code of an escaped character, or the letter of a class, or a Unicode property."""
        if (match := self._match(_HEX)) is not None:
            code = int(next(filter(None, match.groups())), 16)
            if 0xD800 <= code <= 0xDBFF and self._peek() == "\\":
                self.position += 1
                low = self._match(_HEX)
                if low is None or not 0xDC00 <= (low_code := int(next(filter(None, low.groups())), 16)) <= 0xDFFF:
                    raise _Unsupported("half of a character")
                return 0x10000 + ((code - 0xD800) << 10) + low_code - 0xDC00
            return code
        if (match := self._match(_PROPERTY)) is not None:
            return "\\" + match.group()
        char = self._take()
        if char in _CONTROLS and not (char == "0" and self._peek().isdigit()):
            return _CONTROLS[char]
        if char in _NARROW:
            return char
        if char.isalnum():  # a word boundary, a reference to a group, or no escape of JavaScript's
            raise _Unsupported("an escape")
        return ord(char)

    def _read_class(self) -> str:
        is_negated = self._peek() == "^"
        self.position += is_negated
        if self._peek() == "]":
            self.position += 1
            if is_negated:
                return _ANY_CHAR
            raise _Unsupported("a class of nothing")
        members = []
        while self._peek() != "]":
            first = self._read_member()
            if self._peek() == "-" and self.pattern[self.position + 1 : self.position + 2] not in ("]", ""):
                self.position += 1
                last = self._read_member()
                if not isinstance(first, int) or not isinstance(last, int) or first > last:
                    raise _Unsupported("a range")
                members.append(f"{escaped(first)}-{escaped(last)}")
            elif isinstance(first, int):
                members.append(escaped(first))
            else:
                members.append((_WIDE if is_negated else _NARROW).get(first, first))
        self.position += 1
        return f"[{'^' * is_negated}{''.join(members)}]"

    def _read_member(self) -> int | str:
        char = self._take()
        if char != "\\":
            return ord(char)
        if self._peek() == "b":
            self.position += 1
            return 8
        return self._read_escape()


# Expressions

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_SHORTENED = [rf"(?:{_H16}:){{{n}}}(?:(?::{_H16}){{1,{7 - n}}}|:)" for n in range(1, 7)]
_IPV6 = "|".join([f"(?:{_H16}:){{7}}(?:{_H16}|:)", *_SHORTENED, f":(?:(?::{_H16}){{1,7}}|:)"])
_ATOM = r"[A-Za-z0-9!#$%&'*+\x2f=?^_`{|}~-]+"
_URI = r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:\x2f?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
}


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    return index_vocabulary([b"<end>", *(bytes([byte]) for byte in range(256))], [0], [0])


class Expression:
    """A compiled body of a Lark terminal. Matching takes time proportional to the text, whatever the expression is."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def matches(self, text: str) -> bool:
        try:
            token_ids = [1 + byte for byte in text.encode()]
        except UnicodeEncodeError:  # half of a character
            return False
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and bool(matcher.is_accepting())

    @property
    def is_empty(self) -> bool:
        """Whether no text matches."""
        if self._matcher.is_accepting():
            return False
        matcher = self._matcher.deep_copy()
        matcher.compute_bitmask()
        return bool(matcher.is_error()) and matcher.get_error().startswith("NoExtension")


@lru_cache(maxsize=1024)
def expression(body: str) -> Expression | None:
    """Compile the body of a Lark terminal. Return None if that is not possible."""
    try:
        return Expression(compile_grammar(GrammarSpec("lark", f"start: X\nX: {body}"), _bytes()))
    except GrammarFault:
        return None
