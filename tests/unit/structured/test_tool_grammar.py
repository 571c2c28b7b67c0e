"""GrammarCompiler for tool calls: whatever a grammar allows can be read back as calls whose arguments match the schema."""

from __future__ import annotations

from typing import Any

import jsonschema
import numpy as np
import pytest

from culet.errors import BadRequest
from culet.structured.compiler import GrammarCompiler
from culet.structured.tool_grammar import call_grammar, call_rules, document_or_calls
from culet.types import StructuredOutputs
from tests.unit.structured.call_walks import PIECES, read_calls, walk

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 6},
            "unit": {"enum": ["c", "f", 3, None]},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "near": {"type": "array", "items": {"type": ["string", "null"], "maxLength": 3}, "minItems": 1, "maxItems": 3},
            "size": {"anyOf": [{"type": "number"}, {"const": "any"}]},
            "in": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]},
        },
        "required": ["city", "unit", "near"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "edcba"},
        "required": ["c"],
        "additionalProperties": False,
    },
    "tree": TREE,
    "nothing": {"type": "object", "properties": {}, "additionalProperties": False},
    "anything": {"type": "object", "additionalProperties": {"type": "string"}},
}
TOOLS = [{"function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", range(12))
def test_calls_fit_their_schemas(compiler: GrammarCompiler, name: str, seed: int) -> None:
    ((called, arguments),) = read_calls(walk(compiler, call_grammar(TOOLS, name=name, one_call=True), seed), SCHEMAS)
    assert called == name
    jsonschema.validate(arguments, SCHEMAS[name])
    assert list(arguments) == sorted(arguments) or name == "anything", "keys are sorted, as in training"


def test_any_of_the_tools_and_several_calls(compiler: GrammarCompiler) -> None:
    names, counts = set(), set()
    for seed in range(40):
        calls = read_calls(walk(compiler, call_grammar(TOOLS), seed), SCHEMAS)
        names |= {name for name, _ in calls}
        counts.add(len(calls))
    assert names == set(SCHEMAS)
    assert max(counts) > 1
    assert min(counts) == 1


def test_a_document_or_calls(compiler: GrammarCompiler) -> None:
    rules = call_rules(TOOLS, name="nothing")
    forms = [
        StructuredOutputs(json={"type": "integer"}),
        StructuredOutputs(regex=r"[0-9]/\/x"),
        StructuredOutputs(choice=["one/two", "three"]),
    ]
    for form, wanted in zip(forms, ("0123456789-", "0123456789", "ot"), strict=True):
        both = StructuredOutputs(grammar=document_or_calls(form.spec(), rules))
        matcher = compiler.start(both.spec(), [9], 1)
        mask = compiler.masks([(matcher, 0)])[0]
        allowed = {PIECES[token][:1] for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}
        assert allowed - {b"\n", b" "} == {b"<", *(sign.encode() for sign in wanted)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://example.com"}}},
        {"type": "object", "properties": {"a b": {"type": "string"}, "": {}, "x,y": {}}},
        {"type": "object", "properties": {"a": 5, "b": {"type": 7}, "c": {"enum": "x"}, "d": {"anyOf": []}}, "required": "a"},
        {"type": "object", "properties": {"a": {"enum": ['"', '<|"|>', "\n\\", {"b": 1}]}}},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": -1, "minLength": 10**9}}},
        {"type": "object", "properties": {"a": {"type": "array", "maxItems": 0}, "b": {"type": "array", "minItems": 3}}},
        {},
        None,
    ],
)
def test_strange_schemas_still_make_a_grammar(compiler: GrammarCompiler, schema: Any) -> None:
    tools = [{"function": {"name": "strange.tool-1", "parameters": schema}}]
    for seed in range(4):
        ((name, arguments),) = read_calls(walk(compiler, call_grammar(tools, one_call=True), seed), {})
        assert name == "strange.tool-1"
        assert isinstance(arguments, dict)


def test_oversized_schemas_are_refused() -> None:
    wide = {"type": "object", "properties": {f"k{index}": {"type": "boolean"} for index in range(10_000)}}
    with pytest.raises(BadRequest, match="too large"):
        call_grammar([{"function": {"name": "wide", "parameters": wide}}])
