"""Build a grammar for tool calls in Gemma 4's format from the tools' JSON schemas.

It enforces a `tool_choice` that is `required` or names a tool, and holds the calls of `auto` to the tools. It also allows calls
next to a structured answer.

    <|tool_call>call:NAME{key:value,...}<tool_call|>

Keys are bare and sorted, as in training. A string is enclosed in two quote tokens `<|"|>`, without escapes. Numbers, true,
false and null are bare. Schemas come from clients and are not trusted. Any part that is not understood allows any value. A
small schema can expand to a large grammar, so the text is counted as it is produced, and all of this runs in the process that
checks grammars, within its limits on time and memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from culet.errors import BadRequest
from culet.structured.compiled_grammar import alternatives
from culet.types import MAX_GRAMMAR_CHARS, WHITE_SPACE, GrammarSpec

_MAX_DEPTH = 64
_MAX_KEYS = (
    1000  # of one object. Each is a rule inside the rule of the key before it, and llguidance follows rules recursively.
)
_MAX_OPTIONAL = 400  # Each optional key is 4 items of the parser's row, which holds 2,000.
_MAX_LENGTH = 4096  # larger bounds on strings and lists are not enforced
_BARE_KEY = re.compile(r"""[^\s{}\[\],:"'<>|]+""")
_QUOTE = '<|"|>'
_ANY_TEXT = r"/(.|\n)+/"
_COMMON = rf"""
any: {_QUOTE} TEXT? {_QUOTE} | NUMBER | "true" | "false" | "null" | any_object | any_array
any_object: "{{" (any_pair ("," any_pair)*)? "}}"
any_pair: KEY ":" any
any_array: "[" (any ("," any)*)? "]"
TEXT: {_ANY_TEXT}
KEY: /[^\s\x00-\x1f{{}}\[\],:"'<>|]{{1,64}}/
NUMBER: /-?(0|[1-9][0-9]{{0,17}})(\.[0-9]{{1,17}})?([eE][+-]?[0-9]{{1,2}})?/
INTEGER: /-?(0|[1-9][0-9]{{0,17}})/
"""


class ToolForm(Struct, frozen=True):
    """Tool calls that an answer must have, or may have instead of a document, before they are expanded to a grammar."""

    tools: Raw  # a JSON list in OpenAI's format
    name: str | None = None  # the only tool that may be called
    one_call: bool = False
    document: GrammarSpec | None = None

    @property
    def field(self) -> str:
        """The field of the request to name in an error that may have several causes."""
        return "tools" if self.document is None else self.document.field


def tool_form(
    tools: Sequence[Mapping[str, Any]], *, name: str | None = None, one_call: bool = False, document: GrammarSpec | None = None
) -> ToolForm:
    """Return the form of calls of `tools`, without the parts of the tools that a grammar does not need."""
    schemas = []
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("tools: expected functions with a name", hint='{"type": "function", "function": {"name": ...}}')
        schemas.append({"function": {key: function.get(key) for key in ("name", "parameters")}})
    return ToolForm(Raw(msgspec.json.encode(schemas)), name, one_call, document)


def expand(fields: Mapping[str, Any]) -> GrammarSpec:
    """Return the grammar of a ToolForm, given as parsed JSON. Raise BadRequest if it is too large."""
    document = fields.get("document")
    name, one_call = fields.get("name"), bool(fields.get("one_call"))
    if document is None:
        text = call_grammar(fields["tools"], name=name, one_call=one_call)
    else:
        text = document_or_calls(GrammarSpec(**document), call_rules(fields["tools"], name=name, one_call=one_call))
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _too_large()
    return GrammarSpec("lark", text)


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


def call_rules(tools: Sequence[Mapping[str, Any]], *, name: str | None = None, one_call: bool = False) -> str:
    """Return the rules of `call_grammar` without the start rule. The first rule is `calls`."""
    functions = [tool["function"] for tool in tools]
    chosen = [function for function in functions if name is None or function["name"] == name]
    rules = _Rules()
    alternatives = []
    for function in chosen:
        parameters = function.get("parameters")
        value = rules.of_arguments(parameters if isinstance(parameters, Mapping) else {})
        alternatives.append(f"{_literal('call:' + function['name'])} {value}")
    rules.add("call_body", " | ".join(alternatives))
    calls = f"calls: call{'' if one_call else '+'}\ncall: <|tool_call> call_body <tool_call|>\n"
    return calls + rules.text() + _COMMON


class _Rules:
    """Grammar rules built from schemas."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._num_chars = 0
        self._root: Mapping[str, Any] = {}
        self._references: dict[int, str] = {}  # id of the schema that is referred to -> rule, for the current tool
        self._depth = 0

    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def add(self, name: str, body: str) -> str:
        self._rules[name] = body
        self._num_chars += len(name) + len(body)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise _too_large()
        return name

    def _new(self, body: str) -> str:
        return self.add(f"r{len(self._rules)}", body)

    def of_arguments(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for a tool's arguments."""
        self._root, self._references = schema, {}
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and properties:
            return self._object(schema, properties)
        if isinstance(schema.get("$ref"), str):
            return self._of(schema)
        return "any_object" if schema.get("additionalProperties") else '"{" "}"'  # a tool without parameters

    def _of(self, schema: object) -> str:
        """Return a rule or literal for a value that matches `schema`."""
        if not isinstance(schema, Mapping) or self._depth >= _MAX_DEPTH:
            return "any"
        self._depth += 1
        try:
            return self._value(schema)
        finally:
            self._depth -= 1

    def _value(self, schema: Mapping[str, Any]) -> str:
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"])
        if "const" in schema:
            return _constant(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._enum(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._new(" | ".join(dict.fromkeys(map(self._of, schema[key]))))
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            return self._of(schema["allOf"][0])
        kinds = schema.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        names = list(dict.fromkeys(kind.lower() for kind in listed if isinstance(kind, str)))
        if not names and isinstance(schema.get("properties"), Mapping):
            names = ["object"]
        rules = [self._typed(name, schema) for name in names]
        if rules and schema.get("nullable") is True:
            rules.append('"null"')
        if not rules:
            return "any"
        return rules[0] if len(rules) == 1 else self._new(" | ".join(dict.fromkeys(rules)))

    def _typed(self, name: str, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        match name:
            case "string":
                return self._string(schema)
            case "integer":
                return "INTEGER"
            case "number":
                return "NUMBER"
            case "boolean":
                return self._new('"true" | "false"')
            case "null":
                return '"null"'
            case "array":
                return self._array(schema)
            case "object" if isinstance(properties, Mapping) and properties:
                return self._object(schema, properties)
            case "object":
                return "any_object"
        return "any"

    def _enum(self, values: Sequence[object]) -> str:
        texts = list(dict.fromkeys(value for value in values if isinstance(value, str) and value))
        parts = dict.fromkeys(_constant(value) for value in values if not (isinstance(value, str) and value))
        if texts:  # a terminal, because a rule cannot have thousands of alternatives
            name = f"S{len(self._rules)}"
            parts[f"({_QUOTE} {self.add(name, alternatives(texts))} {_QUOTE})"] = None
        return self._new(" | ".join(parts))

    def _string(self, schema: Mapping[str, Any]) -> str:
        low, high = _bound(schema, "minLength"), _bound(schema, "maxLength")
        if not low and high is None:
            return self._new(f"{_QUOTE} TEXT? {_QUOTE}")
        body = rf"/(.|\n){{{low or 0},{'' if high is None else high}}}/"
        return self._new(f"{_QUOTE} {self.add(f'S{len(self._rules)}', body)}{'' if low else '?'} {_QUOTE}")

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._of(schema.get("items"))
        low, high = _bound(schema, "minItems") or 0, _bound(schema, "maxItems")
        if high == 0:
            return '"[" "]"'
        more = f'("," {item})' + (
            f"{{{max(0, low - 1)},{'' if high is None else high - 1}}}" if low > 1 or high is not None else "*"
        )
        body = f"{item} {more}"
        return self._new(f'"[" {body} "]"' if low else f'"[" ({body})? "]"')

    def _object(self, schema: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
        """Return a rule for an object. Its keys are sorted, and optional keys may be missing.

        A `first` rule applies until a key has been written, a `rest` rule after that.
        """
        required = schema.get("required")
        needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
        keys = sorted(key for key in properties if isinstance(key, str) and _BARE_KEY.fullmatch(key))
        if not keys:
            return "any_object" if schema.get("additionalProperties", True) else '"{" "}"'
        num_optional = len(keys) - len(needed.intersection(keys))
        if len(keys) > _MAX_KEYS or num_optional > _MAX_OPTIONAL:
            raise BadRequest(
                f"the schemas are too large: an object has {len(keys)} properties, {num_optional} of them optional, "
                f"but the maximum is {_MAX_KEYS}, {_MAX_OPTIONAL} of them optional",
                hint='divide the object, or use tool_choice "auto", which does without a grammar then',
            )
        first, rest = "", ""
        for key in reversed(keys):
            pair = self._new(f"{_literal(key + ':')} {self._of(properties[key])}")
            behind = f" {rest}" if rest else ""
            begin = f"{pair}{behind}"
            if key not in needed:
                begin = f"({begin} | {first})" if first else f"({begin})?"
            rest = self._new(f'"," {pair}{behind}' if key in needed else f'("," {pair})?{behind}')
            first = self._new(begin)
        return self._new(f'"{{" {first} "}}"')

    def _reference(self, reference: str) -> str:
        place = self._follow(reference)
        if place is None:
            return "any"
        if id(place) in self._references:  # by place, because a place can be written in many ways
            return self._references[id(place)]
        name = self._references[id(place)] = self.add(f"r{len(self._rules)}", "any")  # its body may refer to it
        body = self._of(place)
        return self.add(name, "any" if body == name else body)

    def _follow(self, reference: str) -> Mapping[str, Any] | None:
        """Return the schema that a reference leads to, through other references. Return None if nothing is there."""
        seen: set[int] = set()
        while True:
            place: object = self._root
            if reference != "#":
                for step in reference.removeprefix("#").split("/")[1:]:
                    step = step.replace("~1", "/").replace("~0", "~")
                    place = place.get(step) if isinstance(place, Mapping) else None
            if not reference.startswith("#") or not isinstance(place, Mapping) or id(place) in seen:
                return None
            if not isinstance(place.get("$ref"), str):
                return place
            seen.add(id(place))
            reference = place["$ref"]


def _too_large() -> BadRequest:
    return BadRequest(
        f"the schemas are too large: expanded to a grammar, they have more than {MAX_GRAMMAR_CHARS} characters",
        hint='send smaller schemas, or use tool_choice "auto", which does without a grammar then',
    )


def _constant(value: object) -> str:
    """Return a literal for a constant."""
    if isinstance(value, str):
        return f"({_QUOTE} {_literal(value)} {_QUOTE})" if value else f"({_QUOTE} {_QUOTE})"
    if isinstance(value, bool) or value is None or isinstance(value, int | float):
        return _literal(json.dumps(value))
    return "any"


def _literal(text: str) -> str:
    return json.dumps(text)


def _bound(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LENGTH
    return value if is_count else None
