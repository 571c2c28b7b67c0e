"""The process that renders chat templates. `template.py` starts it. It imports nothing else from Culet.

It reads one JSON object per line. The first line is {"templates": {name: source}, "time_limit_s": s, "max_chars": n,
"max_bytes": n}. Every later line is {"name": which, "variables": {...}}. Each answer is {"text": ...} or {"error": ...,
"kind": ...}.

Templates are also compiled in this process. Jinja evaluates constant expressions at compile time, so even compiling
`{{ 9 ** (9 ** 9) }}` never ends.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Create an environment with the whitespace rules, functions and filters that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise jinja2.TemplateError(f"the rendered text is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def _reply(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _failure(error: Exception) -> dict[str, str]:
    kind = "syntax" if isinstance(error, jinja2.TemplateSyntaxError) else "render"
    where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    reasons: dict[type[Exception], str] = {
        RecursionError: "the template or its input is nested too deeply",
        MemoryError: "the template used too much memory",
    }
    return {"kind": kind, "error": reasons.get(type(error)) or (str(error) + where) or type(error).__name__}


class _Renderer:
    """Compiled templates and their limits."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._max_chars = 0
        self.time_limit_s = 60.0

    def answer(self, request: dict[str, Any]) -> str:
        if "templates" not in request:
            return _render(self._templates[request["name"]], request["variables"], self._max_chars)
        self._max_chars, self.time_limit_s = request["max_chars"], request["time_limit_s"]
        with suppress(ValueError, OSError):  # not every system supports this limit
            resource.setrlimit(resource.RLIMIT_AS, (request["max_bytes"], request["max_bytes"]))
        self._templates = {name: self._environment.from_string(text) for name, text in request["templates"].items()}
        return ""


@contextmanager
def _alarm(time_limit_s: float) -> Iterator[None]:
    """End this process well after the time limit, in case the parent is gone and cannot do it.

    The alarm's default action ends the process at any point, even inside C code.
    """
    signal.setitimer(signal.ITIMER_REAL, 2 * time_limit_s + 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Answer requests until stdin closes, which happens when the parent ends."""
    renderer = _Renderer()
    _reply({"text": "ready"})
    for line in sys.stdin:
        with _alarm(renderer.time_limit_s):
            try:
                answer = {"text": renderer.answer(json.loads(line))}
            except Exception as error:
                answer = _failure(error)
        _reply(answer)


if __name__ == "__main__":
    main()
