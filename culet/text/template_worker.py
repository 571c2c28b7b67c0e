"""The process that renders chat templates. `template.py` starts it. It imports nothing else from Culet.

It reads one JSON object per line. The first line is {"templates": {name: source}, "control_tokens": [text, ...],
"time_limit_s": s, "max_chars": n, "max_bytes": n}. Every later line is {"name": which, "client": {...}, "own": {...}} with the
template's variables: those that come from a client, and Culet's own. Each answer is {"text": ..., "cuts": [...]} or
{"error": ..., "kind": ...}. See `ClientText` for the cuts.

Templates are also compiled in this process. Jinja evaluates constant expressions at compile time, so even compiling
`{{ 9 ** (9 ** 9) }}` never ends.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import FilterArgumentError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_FIRST_MARK = 0xDC00  # marks are halves of surrogate pairs, which valid text never contains
_NOT_ASCII = re.compile("[^\x00-\x7f\udc00-\udfff]")


class InputError(Exception):
    """A message that cannot be rendered. The client can fix it."""


class ClientText:
    """Keeps control tokens that a client spells out, such as `<|turn>`, apart from those that the template writes.

    A template may join, trim, cut or change what a client sends. So before rendering, every character of a client's text that
    begins or ends a control token is replaced by a mark. No text of a client then contains a control token, and nothing that a
    template does to it can produce one. After rendering, the characters are put back. Where that completes a control token,
    the text gets a cut: both sides are tokenized by themselves, so the control token stays plain text.
    """

    def __init__(self, control_tokens: Sequence[str]) -> None:
        self._tokens = frozenset(token for token in control_tokens if len(token) > 1)
        self._lengths = sorted({len(token) for token in self._tokens})
        characters = sorted({character for token in self._tokens for character in (token[0], token[-1])})
        self._marks = [(character, chr(_FIRST_MARK + index)) for index, character in enumerate(characters)]
        self._marked = re.compile("[" + "".join(map(re.escape, characters)) + "]") if characters else None
        firsts, seconds = ("".join(sorted({re.escape(token[place]) for token in self._tokens})) for place in (0, 1))
        self._start = re.compile(f"[{firsts}](?=[{seconds}])") if self._tokens else None

    def mark(self, value: Any) -> Any:
        """Return a value with all of its strings marked, including the keys of mappings."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self._mark_text(key): self.mark(inner) for key, inner in value.items()}
        return [self.mark(inner) for inner in value] if isinstance(value, list) else value

    def _mark_text(self, text: str) -> str:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InputError("messages: got half of a surrogate pair, expected valid Unicode") from None
        if self._marked is not None and self._marked.search(text):  # few texts contain one of them
            for character, mark in self._marks:
                text = text.replace(character, mark)
        return text

    def restore(self, text: str) -> str:
        """Put back the characters in place of their marks."""
        if text.isascii():
            return text
        for character, mark in self._marks:
            text = text.replace(mark, character)
        return text

    def cuts(self, marked: str, text: str) -> list[int]:
        """Return the positions at which to cut `text` (`marked` without marks), so that the client's control tokens break."""
        if self._start is None or marked == text:
            return []
        cuts = set()
        for found in self._start.finditer(text):
            begin = found.start()
            for end in (begin + length for length in self._lengths if begin + length <= len(text)):
                if text[begin:end] in self._tokens:
                    client = next((place for place in range(begin, end) if marked[place] != text[place]), None)
                    if client is not None:
                        cuts.add(max(client, begin + 1))
        return sorted(cuts)

    def sorted_items(
        self, value: Mapping[str, Any], case_sensitive: bool = False, by: str = "key", reverse: bool = False
    ) -> list[tuple[str, Any]]:
        """Jinja's filter `dictsort`, which orders marked text like the text itself."""
        if by not in ("key", "value"):
            raise FilterArgumentError('You can only sort by either "key" or "value"')

        def place(item: tuple[str, Any]) -> Any:
            chosen = item[0 if by == "key" else 1]
            if not isinstance(chosen, str):
                return chosen
            return self.restore(chosen) if case_sensitive else self.restore(chosen).lower()

        return sorted(value.items(), key=place, reverse=reverse)


class _Generation(Extension):
    """Renders the body of {% generation %}, a tag that marks the model's text for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter is meant for HTML and would escape <, > and &.
    text = json.dumps(value, ensure_ascii=False, indent=indent, **options)
    if not ensure_ascii:
        return text
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)  # escapes all but marks


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which judges the variables of namespaces and loops sooner, as chat templates read them all the time."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute. For these types, Jinja's own checks come to the same."""
        if type(obj) in (Namespace, LoopContext):
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Create an environment with the whitespace rules, functions and filters that chat templates expect."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request: dict[str, Any] = json.loads(line)
    except ValueError as error:  # The parent does not parse arguments that clients send as objects.
        raise InputError(f"messages: not valid JSON: {error}") from None
    return request


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which Python reads and JSON does not have."""
    raise ValueError(name)


def _parse_arguments(messages: Sequence[dict[str, Any]]) -> None:
    """Parse the arguments of tool calls in place. Clients send them as an object or as JSON text."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            function, where = call["function"], f"messages[{index}].tool_calls[{number}].function.arguments"
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments or "{}", parse_constant=_refuse_constant)
                except (ValueError, RecursionError):
                    raise InputError(f"{where}: not valid JSON") from None
            if not isinstance(arguments, dict | None):
                raise InputError(f"{where}: got {type(arguments).__name__}, expected a JSON object")
            function["arguments"] = arguments


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise jinja2.TemplateError(f"the rendered text is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


class _Renderer:
    """Compiled templates and their limits."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._text = ClientText(())
        self._max_chars = 0
        self.time_limit_s = 60.0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "templates" in request:
            return self._set_up(request)
        client = request["client"]
        _parse_arguments(client["messages"])
        variables = {**self._text.mark(client), **request["own"]}
        marked = _render(self._templates[request["name"]], variables, self._max_chars)
        text = self._text.restore(marked)
        return {"text": text, "cuts": self._text.cuts(marked, text)}

    def _set_up(self, request: dict[str, Any]) -> dict[str, Any]:
        self._max_chars, self.time_limit_s = request["max_chars"], request["time_limit_s"]
        with suppress(ValueError, OSError):  # not every system supports this limit
            resource.setrlimit(resource.RLIMIT_AS, (request["max_bytes"], request["max_bytes"]))
        self._text = ClientText(request["control_tokens"])
        self._environment.filters["dictsort"] = self._text.sorted_items
        self._templates = {name: self._environment.from_string(text) for name, text in request["templates"].items()}
        return {"text": ""}

    def failure(self, error: Exception) -> dict[str, str]:
        """Return the answer to a request that failed."""
        if isinstance(error, InputError):
            return {"kind": "input", "error": str(error)}
        kind = "syntax" if isinstance(error, jinja2.TemplateSyntaxError) else "render"
        where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        reasons: dict[type[Exception], str] = {
            RecursionError: "the template or its input is nested too deeply",
            MemoryError: "the template used too much memory",
        }
        problem = reasons.get(type(error)) or (self._text.restore(str(error)) + where) or type(error).__name__
        return {"kind": kind, "error": problem}


@contextmanager
def _alarm(time_limit_s: float) -> Iterator[None]:
    """End this process well after the time limit, in case the parent is gone and cannot do it.

    The alarm's default action ends the process at any point, even inside C code. It counts processor time, as the limit does.
    """
    signal.setitimer(signal.ITIMER_PROF, 2 * time_limit_s + 1)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer requests until stdin closes, which happens when the parent ends."""
    renderer = _Renderer()
    _reply({"text": "ready"})
    for line in sys.stdin.buffer:
        with _alarm(renderer.time_limit_s):
            try:
                answer = renderer.answer(_parse(line))
            except Exception as error:
                answer = renderer.failure(error)
        _reply(answer)


if __name__ == "__main__":
    main()
