"""Tool schemas: random calls that the grammar of a schema allows fit the schema, keyword by keyword and combined."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from culet.errors import BadRequest
from culet.structured.compiler import GrammarCompiler
from culet.structured.tool_grammar import call_grammar
from tests.unit.structured.call_walks import read_calls, walk


def of(**properties: Any) -> dict[str, Any]:
    """Return a tool's schema with required properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}, "required": ["n"]}
SCHEMAS: dict[str, Any] = {
    "integers": of(
        a={"type": "integer", "minimum": 3, "maximum": 120},
        b={"type": "integer", "exclusiveMinimum": -2, "exclusiveMaximum": 2},
        c={"type": "integer", "maximum": -7},
        d={"type": "integer", "minimum": 0.5, "maximum": 1e300},
        e={"type": "integer", "minimum": 10**19, "maximum": 10**19 + 5},
        f={"minimum": 1, "maximum": 2},
    ),
    "numbers": of(
        a={"type": "number", "minimum": 0, "maximum": 1},
        b={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.25},
        c={"type": "number", "minimum": -3.5, "maximum": -3.25},
        d={"type": "number", "minimum": 99.5},
        e={"type": "number", "maximum": 1e-3},
    ),
    "multiples": of(
        a={"type": "integer", "multipleOf": 7},
        b={"type": "integer", "multipleOf": 5, "minimum": 11, "maximum": 29},
        c={"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 3},
        d={"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]},
    ),
    "patterns": of(
        a={"type": "string", "pattern": "^[A-Z]{2,3}-\\d+$"},
        b={"type": "string", "pattern": "x/y", "maxLength": 5},
        c={"type": "string", "pattern": "^\\w+@(a|b)\\.com$", "maxLength": 9},
        d={"type": "string", "pattern": "^a?$"},
        e={"type": "string", "pattern": "^(ab|[^\\s\"<]c)+", "minLength": 3},
    ),
    "formats": of(
        **{
            name: {"type": "string", "format": name}
            for name in ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname")
        }
    ),
    "keys": {
        "type": "object",
        "properties": {key: {"type": "integer"} for key in ("a:b", "my key", "", '"q"', "{x}", " y", "a,b", "\U0001f600", "n\nl")},
        "required": ["a:b", "my key", "", "undeclared"],
    },
    "any_of_beside": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"], "properties": {"b": {"maxLength": 2}, "c": False}}],
        "additionalProperties": False,
    },
    "all_of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 4}, "b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        ],
        "$defs": {"b": {"oneOf": [{"const": "x"}, {"type": "null"}]}},
    },
    "siblings": of(
        a={"type": "string", "maxLength": 4, "anyOf": [{"minLength": 2}, {"pattern": "^q"}]},
        b={"$ref": "#/properties/a", "minLength": 3},
        c={"type": ["string", "integer"], "anyOf": [{"type": ["integer", "null"]}, {"enum": ["y", None, 5.5]}]},
    ),
    "tuples": of(
        a={"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 1, "items": False},
        b={"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 3, "maxItems": 4},
        c={"type": "array", "items": False},
        d={"type": "array", "prefixItems": [{"type": "integer"}, False, {}]},
    ),
    "tuples of draft 7": of(a={"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}}),
    "maps": of(
        a={"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        b={"type": "object", "properties": {"k": {"type": "string"}}, "additionalProperties": {"type": "integer", "minimum": 0}},
        c={"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        d={"type": "object", "patternProperties": {"^\\d:\\d$": {"type": "null"}}, "additionalProperties": False},
        e={"type": "object", "properties": {"n1": {"maximum": 9}}, "patternProperties": {"^n": {"type": "integer"}}},
        f={"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
        g={"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}},
    ),
    "counts": of(
        a={"type": "object", "properties": {key: {"type": "integer"} for key in "abcd"}, "minProperties": 2, "maxProperties": 3},
        b={"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}, "required": ["b"], "maxProperties": 2},
        c={"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1},
        d={"type": "object", "minProperties": 1},
    ),
    "constants": of(
        a={"enum": [[1, "x", {"b": None, "a:b": "<|\"|>"}], {"k": [], "e": {}}, 'say "hi"', "\U0001f600", "\x01"]},
        b={"const": {"deep": [[1.5, True]]}},
        c={"type": "integer", "enum": ["a", 1, 2.0, 2.5, True]},
        d={"enum": ["red", "green", 7, None], "pattern": "^g", "type": ["string", "null"]},
        e={"enum": [[1], [1, 2], ["a"]], "items": {"type": "integer"}, "minItems": 2},
        f={"anyOf": [{"const": index, "title": str(index)} for index in range(3000)]},
    ),
    "booleans": {"type": "object", "properties": {"x": False, "y": True, "z": {}}, "required": ["y"], "additionalProperties": False},
    "tree": {**of(root={"$ref": "#/$defs/node"}), "$defs": {"node": NODE}},
}


def calls_of(compiler: GrammarCompiler, schema: Any, seeds: range) -> list[Any]:
    """Return the arguments of random calls of a tool."""
    text = call_grammar([{"function": {"name": "f", "parameters": schema}}], one_call=True)
    found = [read_calls(walk(compiler, text, seed), {"f": schema}) for seed in seeds]
    return [arguments for ((_, arguments),) in found]


@pytest.mark.parametrize("name", SCHEMAS)
def test_calls_fit_their_schemas(compiler: GrammarCompiler, name: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for arguments in calls_of(compiler, SCHEMAS[name], range(25)):
        kind = jsonschema.Draft7Validator if name == "tuples of draft 7" else jsonschema.Draft202012Validator
        kind(SCHEMAS[name], format_checker=checker).validate(arguments)
