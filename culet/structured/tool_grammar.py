"""Build a grammar for tool calls in Gemma 4's format from the tools' JSON schemas.

It enforces a `tool_choice` that is `required` or names a tool, and holds the calls of `auto` to the tools. It also allows calls
next to a structured answer.

    <|tool_call>call:NAME{key:value,...}<tool_call|>

`schema.rules` writes the arguments. Schemas come from clients and are not trusted. Any part that is not understood allows any
value. A small schema can expand to a large grammar, so the text is counted as it is produced, and all of this runs in the
process that checks grammars, within its limits on time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from culet.errors import BadRequest
from culet.structured.compiled_grammar import alternatives
from culet.structured.schema.rules import COMMON, Rules, literal, too_large
from culet.structured.schema.strict import unenforced
from culet.types import MAX_GRAMMAR_CHARS, WHITE_SPACE, GrammarSpec

STRICT_HINT = "change the schema, or omit strict"


class ToolForm(Struct, frozen=True):
    """Tool calls that an answer must have, or may have instead of a document, before they are expanded to a grammar."""

    tools: Raw  # a JSON list in OpenAI's format
    name: str | None = None  # the only tool that may be called
    one_call: bool = False
    document: GrammarSpec | None = None
    is_lenient: bool = False  # a tool whose schema has no grammar may be called with any arguments
    free: tuple[str, ...] = ()  # tools that may be called with any arguments
    is_strict: bool = False  # one of the tools is strict, so no call may go on without the grammar

    @property
    def field(self) -> str:
        """The field of the request to name in an error that may have several causes."""
        return "tools" if self.document is None else self.document.field


def tool_form(
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    one_call: bool = False,
    document: GrammarSpec | None = None,
    is_lenient: bool = False,
) -> ToolForm:
    """Return the form of calls of `tools`, without the parts of the tools that a grammar does not need."""
    schemas = []
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("tools: expected functions with a name", hint='{"type": "function", "function": {"name": ...}}')
        schemas.append({"function": {key: function.get(key) for key in ("name", "parameters", "strict")}})
    is_strict = any(schema["function"]["strict"] for schema in schemas)
    try:
        text = msgspec.json.encode(schemas)
    except RecursionError:
        raise BadRequest("tools: a schema is nested too deeply", hint="nest objects and arrays less") from None
    return ToolForm(Raw(text), name, one_call, document, is_lenient, is_strict=is_strict)


def expand(fields: Mapping[str, Any]) -> GrammarSpec:
    """Return the grammar of a ToolForm, given as parsed JSON. Raise BadRequest if it is too large."""
    document = fields.get("document")
    rules = call_rules(
        fields["tools"], name=fields.get("name"), one_call=bool(fields.get("one_call")), free=fields.get("free", ())
    )
    text = f"start: calls\n{rules}" if document is None else document_or_calls(GrammarSpec(**document), rules)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise too_large()
    return GrammarSpec("lark", text)


def allows_calls(document: GrammarSpec) -> bool:
    """Return whether an answer of this form may be tool calls instead.

    A grammar of the client's own decides everything, and a document that has begun is not a call.
    """
    return document.kind != "lark" and not document.prefix


def document_or_calls(document: GrammarSpec, calls: str) -> str:
    """Return a grammar for a document or for tool calls. The first of the Lark rules in `calls` must be named `calls`."""
    if document.kind == "json_schema":
        schema = json.loads(document.text)
        is_lenient = not document.is_strict
        options = {"lenient": is_lenient, "coerce_one_of": is_lenient, "whitespace_pattern": WHITE_SPACE}
        body = "document: %json " + json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else schema)
    elif document.kind == "regex":
        from llguidance import regex_to_lark  # only needed here

        body = f"document: /{regex_to_lark(document.text, '')}/"
    elif document.kind == "choice":
        body = f"document: DOCUMENT\nDOCUMENT: {alternatives(json.loads(document.text))}"
    else:
        raise BadRequest("a grammar cannot be combined with tools")  # callers do not ask for this
    return f"start: document | calls\n{body}\n{calls}"


def call_grammar(tools: Sequence[Mapping[str, Any]], *, name: str | None = None, one_call: bool = False) -> str:
    """Return a complete grammar for one or more calls of any tool, or of the tool called `name`.

    With `one_call`, the grammar allows exactly one call.
    """
    return f"start: calls\n{call_rules(tools, name=name, one_call=one_call)}"


def call_rules(
    tools: Sequence[Mapping[str, Any]], *, name: str | None = None, one_call: bool = False, free: Sequence[str] = ()
) -> str:
    """Return the rules of `call_grammar` without the start rule. The first rule is `calls`.

    Tools in `free` may be called with any arguments.
    """
    rules = Rules()
    bodies = []
    for function in [tool["function"] for tool in tools]:
        if name is not None and function["name"] != name:
            continue
        parameters = function.get("parameters")
        if function["name"] in free:
            arguments: str | None = "any_object"
        else:
            if function.get("strict") and (keywords := unenforced(parameters)):
                names = ", ".join(map(literal, keywords))
                raise BadRequest(
                    f"{function['name']} is strict, but these keywords cannot be enforced: {names}", hint=STRICT_HINT
                )
            arguments = rules.of_arguments(parameters if isinstance(parameters, Mapping) else {})
        if arguments is None:
            raise BadRequest(f"no arguments fit the schema of {function['name']}")
        bodies.append(f"{literal('call:' + function['name'])} {arguments}")
    rules.add("call_body", " | ".join(bodies))
    calls = f"calls: call{'' if one_call else '+'}\ncall: <|tool_call> call_body <tool_call|>\n"
    return calls + rules.text() + COMMON
