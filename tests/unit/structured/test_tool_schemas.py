"""Tool schemas: random calls that the grammar of a schema allows fit the schema, keyword by keyword and combined."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from culet.errors import BadRequest
from culet.structured.compiler import GrammarCompiler
from culet.structured.tool_grammar import call_grammar
from culet.text.template_worker import ClientText
from culet.types import StructuredOutputs
from tests.unit.structured.call_walks import CLOSE, OPEN, SPECIAL, read_calls, walk


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
        e={"type": "string", "pattern": '^(ab|[^\\s"<]c)+', "minLength": 3},
    ),
    "formats": of(
        **{
            name: {"type": "string", "format": name}
            for name in ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname")
        }
    ),
    "keys": {
        "type": "object",
        "properties": {
            key: {"type": "integer"} for key in ("a:b", "my key", "", '"q"', "{x}", " y", "a,b", "\U0001f600", "n\nl")
        },
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
    "arrays": of(
        **{name: {"type": "array", "items": {"const": 1}, "maxItems": count} for name, count in (("a", 0), ("b", 1), ("c", 2))},
        d={"type": "array", "minItems": 1, "maxItems": 1},
    ),
    "tuples of draft 7": of(a={"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}}),
    "maps": of(
        a={"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        b={
            "type": "object",
            "properties": {"k": {"type": "string"}},
            "additionalProperties": {"type": "integer", "minimum": 0},
        },
        c={"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        d={"type": "object", "patternProperties": {"^\\d:\\d$": {"type": "null"}}, "additionalProperties": False},
        e={"type": "object", "properties": {"n1": {"maximum": 9}}, "patternProperties": {"^n": {"type": "integer"}}},
        f={"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
        g={"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}},
    ),
    "counts": of(
        a={
            "type": "object",
            "properties": {key: {"type": "integer"} for key in "abcd"},
            "minProperties": 2,
            "maxProperties": 3,
        },
        b={"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}, "required": ["b"], "maxProperties": 2},
        c={"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1},
        d={"type": "object", "minProperties": 1},
    ),
    "constants": of(
        a={"enum": [[1, "x", {"b": None, "a:b": '<|"|>'}], {"k": [], "e": {}}, 'say "hi"', "\U0001f600", "\x01"]},
        b={"const": {"deep": [[1.5, True]]}},
        c={"type": "integer", "enum": ["a", 1, 2.0, 2.5, True]},
        d={"enum": ["red", "green", 7, None], "pattern": "^g", "type": ["string", "null"]},
        e={"enum": [[1], [1, 2], ["a"]], "items": {"type": "integer"}, "minItems": 2},
        f={"anyOf": [{"const": index, "title": str(index)} for index in range(3000)]},
    ),
    "booleans": {
        "type": "object",
        "properties": {"x": False, "y": True, "z": {}},
        "required": ["y"],
        "additionalProperties": False,
    },
    "references": {
        **of(
            a={"anyOf": [{"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}, {"type": "null"}]},
            b={"$ref": "#/properties/a/anyOf/0"},
            c={"$ref": "#/definitions/Color%3Cstring%3E"},
            d={"$ref": "#/definitions/a~1b"},
        ),
        "definitions": {"Color<string>": {"enum": ["red", "green"]}, "a/b": {"type": "boolean"}},
    },
    "tree": {**of(root={"$ref": "#/$defs/node"}), "$defs": {"node": NODE}},
}


def calls_of(compiler: GrammarCompiler, schema: Any, seeds: range) -> list[Any]:
    """Return the arguments of random calls of a tool."""
    text = call_grammar([{"function": {"name": "f", "parameters": schema}}], one_call=True)
    found = [read_calls(walk(compiler, text, seed), {}) for seed in seeds]  # Held calls are read without schemas.
    return [arguments for ((_, arguments),) in found]


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEMAS)
def test_calls_fit_their_schemas(compiler: GrammarCompiler, name: str, count: int) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for arguments in calls_of(compiler, SCHEMAS[name], range(count)):
        kind = jsonschema.Draft7Validator if name == "tuples of draft 7" else jsonschema.Draft202012Validator
        kind(SCHEMAS[name], format_checker=checker).validate(arguments)


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 100))])
def test_calls_fit_random_schemas(compiler: GrammarCompiler, seed: int) -> None:
    chance = random.Random(seed)
    schema = next(schema for _ in range(100) if has_values(schema := random_object(chance)))
    for arguments in calls_of(compiler, schema, range(6)):
        jsonschema.Draft202012Validator(schema).validate(arguments)


def has_values(schema: Any) -> bool:
    try:
        return bool(call_grammar([{"function": {"name": "f", "parameters": schema}}]))
    except BadRequest:
        return False


def random_object(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    names = chance.sample(["a", "b c", "d:e", "f", "g"], chance.randrange(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_value(chance, depth + 1) for name in names}}
    schema["required"] = [name for name in names if chance.random() < 0.5]
    schema["additionalProperties"] = chance.choice([False, False, {"type": "integer", "minimum": 0}])
    if chance.random() < 0.3:
        schema["maxProperties"] = chance.randrange(1, 4)
    if chance.random() < 0.3:
        schema["anyOf"] = [{"required": [chance.choice(names)]}, {"properties": {names[0]: random_value(chance, depth + 1)}}]
    return schema


def random_value(chance: random.Random, depth: int) -> Any:
    """Return a schema of a few keywords that need not have to do with each other."""
    low = chance.randrange(-20, 20)
    parts: list[dict[str, Any]] = [
        {"type": chance.choice(["string", "integer", "number", "boolean", ["string", "null"], ["integer", "boolean"]])},
        {"minimum": low, "exclusiveMaximum": low + chance.choice([2, 3.5, 200])},
        {"multipleOf": chance.choice([2, 5, 7])},
        {"minLength": chance.randrange(3), "maxLength": chance.randrange(3, 6)},
        {"pattern": chance.choice(["^[a-c]+$", "^x", "[0-9]$", "^(ab|c){1,2}$"])},
        {"enum": chance.sample(["ab", "x9", "", 3, 4.5, -2, True, None, [1, "z"], {"k": "v"}], 5)},
    ]
    if depth < 3:
        parts.append({"anyOf": [random_value(chance, depth + 1), random_value(chance, depth + 1)]})
        parts.append({"allOf": [random_value(chance, depth + 1), {}]})
        items = {"prefixItems": [random_value(chance, depth + 1)], "items": random_value(chance, depth + 1), "maxItems": 3}
        parts += [random_object(chance, depth), {"type": "array", **items}]
    schema: dict[str, Any] = {}
    for part in chance.sample(parts, chance.choice([1, 1, 2, 2, 3])):
        schema = {**part, **schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        of(a={"type": "integer", "enum": ["a", "b"]}),
        of(a={"type": "integer", "minimum": 3, "maximum": 2}),
        of(a={"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}),
        of(a={"type": "string", "pattern": "^a$", "minLength": 2}),
        of(a=False),
        of(a={"type": "array", "minItems": 2, "prefixItems": [{}, False]}),
        {**of(a={}), "properties": {}},
        {"allOf": [of(a={}), of(b={})]},
        {"type": "string"},
        of(a={"enum": []}),
        of(a={"enum": [], "const": 1}),
        of(t={"$ref": "#"}),
        {"type": "object", "properties": {"t": {"$ref": "#"}}, "minProperties": 1},
        {**of(t={"$ref": "#/$defs/t"}), "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 1}}},
        {**of(t={"$ref": "#/$defs/t"}), "$defs": {"t": {"additionalProperties": {"$ref": "#/$defs/t"}, "minProperties": 1}}},
        {
            **of(x={"$ref": "#/$defs/x"}),
            "$defs": {"x": of(y={"$ref": "#/$defs/y"}), "y": {"anyOf": [{"$ref": "#/$defs/x"}, False]}},
        },
    ],
)
def test_a_schema_that_nothing_fits_is_an_error(schema: Any) -> None:
    with pytest.raises(BadRequest, match="no arguments fit the schema of f"):
        call_grammar([{"function": {"name": "f", "parameters": schema}}])


def test_what_is_not_understood_allows_any_value(compiler: GrammarCompiler) -> None:
    """The guide lists these keywords."""
    schema = of(
        a={"type": "string", "pattern": "(?=x)y", "not": {"const": "b"}, "format": "color"},
        b={"type": "array", "items": {"const": 1}, "uniqueItems": True, "contains": {"const": 2}, "maxItems": 2},
        c={"type": "integer", "multipleOf": 10**9, "if": {"minimum": 5}, "then": False},
        d={"$ref": "http://example.com/schema"},
    )
    assert all(list(arguments) == ["a", "b", "c", "d"] for arguments in calls_of(compiler, schema, range(5)))


def test_combinations_are_bounded() -> None:
    """The sizes of two schemas, whose alternatives would have 10^12 and 2^40 combinations."""
    many = {"allOf": [{"anyOf": [{"minLength": i, "pattern": f"^{i}{j}"} for i in range(10)]} for j in range(12)]}
    with pytest.raises(BadRequest, match="too complex"):
        call_grammar([{"function": {"name": "f", "parameters": of(a=many)}}])
    steps = {
        f"s{i}": {"anyOf": [{"$ref": f"#/$defs/s{i + 1}"}, {"allOf": [{"$ref": f"#/$defs/s{i + 1}"}, {"required": [f"k{i}"]}]}]}
        for i in range(40)
    }
    with pytest.raises(BadRequest, match="too complex"):
        call_grammar([{"function": {"name": "f", "parameters": {**of(a={"$ref": "#/$defs/s0"}), "$defs": steps}}}])


def test_an_optional_value_without_an_end_is_left_out(compiler: GrammarCompiler) -> None:
    """A call that began it would never end. What can end is still allowed, even if it refers to what cannot."""
    endless = {
        "anyOf": [of(t={"$ref": "#/$defs/endless"}), {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1}]
    }
    impossible = of(a={"$ref": "#/$defs/refers"}, b=False)
    refers = {"type": "object", "properties": {"c": {"$ref": "#/$defs/impossible"}, "d": {"const": 1}}, "required": ["d"]}
    schema = {
        "type": "object",
        "properties": {
            "e": {"$ref": "#/$defs/endless"},
            "f": {"type": "array", "items": {"$ref": "#/$defs/endless"}},
            "g": {"$ref": "#/$defs/impossible"},
            "h": {"$ref": "#/$defs/refers"},
            "i": {"$ref": "#/$defs/tree"},
        },
        "required": ["f", "h", "i"],
        "$defs": {
            "endless": endless,
            "impossible": impossible,
            "refers": refers,
            "tree": {"anyOf": [{"type": "null"}, of(i={"$ref": "#/$defs/tree"})]},
        },
    }
    for arguments in calls_of(compiler, schema, range(10)):
        jsonschema.Draft202012Validator(schema).validate(arguments)
        assert list(arguments) == ["f", "h", "i"]
        assert (arguments["f"], arguments["h"]) == ([], {"d": 1})


def test_keys_have_the_order_of_the_prompt(compiler: GrammarCompiler) -> None:
    names = ["method", "URL", "b", "Zeta", "alpha", "_x", "B", "\u00c9t\u00e9", "a"]
    order = [name for name, _ in ClientText([]).sorted_items(dict.fromkeys(names))]
    assert order == ["_x", "a", "alpha", "b", "B", "method", "URL", "Zeta", "\u00c9t\u00e9"]
    constant = dict.fromkeys(names, 1)
    schema = of(**{name: {"type": "null"} for name in names}, c={"const": constant})
    for arguments in calls_of(compiler, schema, range(3)):
        assert list(arguments) == sorted([*order, "c"], key=str.lower)
        assert list(arguments["c"]) == order


@pytest.mark.parametrize(
    "inner", [{"$ref": "#/$defs/x"}, {"allOf": [{"$ref": "#/$defs/x"}, {"minLength": 1}]}, {"anyOf": [{"const": "ab"}]}]
)
def test_null_fits_a_nullable_schema_whatever_is_beside_it(compiler: GrammarCompiler, inner: Any) -> None:
    schema = {**of(a={**inner, "nullable": True}), "$defs": {"x": {"type": "string", "maxLength": 2}}}
    values = [arguments["a"] for arguments in calls_of(compiler, schema, range(30))]
    assert None in values
    assert any(isinstance(value, str) for value in values)
    assert all(value is None or len(value) <= 2 for value in values)


@pytest.mark.parametrize(
    "schema", [{"type": "object", "additionalProperties": True}, {"additionalProperties": {"const": 1}}, {}]
)
def test_free_keys_are_read_back_exactly(compiler: GrammarCompiler, schema: Any) -> None:
    grammar = StructuredOutputs(grammar=call_grammar([{"function": {"name": "f", "parameters": of(a=schema)}}], one_call=True))

    def allows(key: str) -> bool:
        matcher = compiler.start(grammar.spec(), [9], 1)
        tokens = [OPEN, *(len(SPECIAL) + byte for byte in f"call:f{{a:{{{key}:1}}}}".encode()), CLOSE]
        for token in tokens:
            mask = compiler.masks([(matcher, 0)])[0]
            if not np.unpackbits(mask.view(np.uint8), bitorder="little")[token]:
                return False
            matcher.accept([token])
        assert read_calls(tokens, {}) == [("f", {"a": {key: 1}})]
        return True

    for key in ("x", "my key", "src/main.py", "a.b.c", "Content-Type", "\u65e5\u672c \u8a9e", "k" * 128, "w " * 127 + "w"):
        assert allows(key), key
    for key in (" x", "x ", "a  b", "a:b", "a,b", "{", "a]", "k" * 129, '"a"', "a\nb", ""):
        assert not allows(key), key
