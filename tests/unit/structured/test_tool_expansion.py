"""Tool schemas: the grammar's text is bounded however often a schema is referred to, and long lists of values work."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from culet.errors import BadRequest
from culet.structured.check import GrammarCheck
from culet.structured.compiled_grammar import compile_grammar, index_vocabulary
from culet.structured.tool_grammar import ToolForm, call_grammar, tool_form
from culet.text.tool_calls import MAX_NESTING, CallReader
from culet.types import MAX_CHOICES, MAX_GRAMMAR_CHARS, GrammarSpec, StructuredOutputs

SPECIAL = ("<pad>", "<eos>", "<|tool_call>", "<tool_call|>", '<|"|>')
PIECES = [name.encode() for name in SPECIAL] + [bytes([byte]) for byte in range(256)]


def tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"function": {"name": "f", "parameters": parameters}}]


def start(spec: GrammarSpec) -> LLMatcher:
    return compile_grammar(spec, index_vocabulary(PIECES, range(len(SPECIAL)), [1])).deep_copy()


def accepts(matcher: LLMatcher, *parts: str) -> bool:
    """Return whether a matcher accepts these special tokens and texts, and the end after them."""
    ids: list[int] = []
    for part in parts:
        ids += [SPECIAL.index(part)] if part in SPECIAL else [len(SPECIAL) + byte for byte in part.encode()]
    return all(matcher.consume_token(token_id) for token_id in ids) and matcher.is_accepting()


def named(**schemas: Any) -> list[dict[str, Any]]:
    return [{"function": {"name": name, "parameters": parameters}} for name, parameters in schemas.items()]


def call(text: str, *rest: str) -> tuple[str, ...]:
    return ("<|tool_call>", text, *rest, "<tool_call|>")


def test_a_place_is_expanded_once_however_it_is_written() -> None:
    large = {"enum": [f"value {index}" for index in range(1000)]}
    properties = {f"k{index:03}": {"$ref": f"#{index}/$defs/large"} for index in range(300)}
    text = call_grammar(tool({"type": "object", "properties": properties, "$defs": {"large": large}}))
    assert text.count("value 999") == 1
    assert len(text) < 100_000


def test_types_are_not_expanded_twice() -> None:
    inner: Any = {"type": "integer"}
    for _ in range(40):
        inner = {"type": ["array", "Array", "ARRAY", "array"], "items": inner}
    assert len(call_grammar(tool({"type": "object", "properties": {"a": inner}}))) < 10_000


def test_text_is_counted_while_it_is_produced() -> None:
    wide = {f"k{index}": {"type": "string", "enum": ["x" * 1000]} for index in range(400)}
    schema = {"type": "object", "properties": {f"p{index}": {"type": "object", "properties": wide} for index in range(10)}}
    with pytest.raises(BadRequest, match=r"^the schemas are too large: expanded") as caught:
        call_grammar(tool(json.loads(json.dumps(schema))))  # no part is the same object as another
    assert str(MAX_GRAMMAR_CHARS) in caught.value.message
    assert "auto" in caught.value.hint


def test_wide_objects_are_refused() -> None:
    """The parser could not follow them. Every object within the limits can be written."""
    for num_keys, num_optional in ((1001, 0), (401, 401)):
        properties = {f"k{index:04}": {"type": "boolean"} for index in range(num_keys)}
        schema = {"type": "object", "properties": properties, "required": sorted(properties)[num_optional:]}
        with pytest.raises(BadRequest, match="properties"):
            call_grammar(tool(schema))
    properties = {f"k{index:04}": {"type": "boolean"} for index in range(1000)}
    schema = {"type": "object", "properties": properties, "required": sorted(properties)[400:]}
    matcher = start(GrammarSpec("lark", call_grammar(tool(schema))))
    values = ",".join(f"k{index:04}:true" for index in range(400, 1000))
    assert accepts(matcher, *call(f"call:f{{{values}}}"))


@pytest.mark.parametrize(
    "definitions",
    [
        {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        {"a": {"$ref": "#/$defs/a"}},
        {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}},
    ],
)
def test_cycles_end(definitions: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"], "$defs": definitions}
    matcher = start(GrammarSpec("lark", call_grammar(tool(schema))))
    assert accepts(matcher, *call("call:f{x:5}"))


def test_long_enums_work() -> None:
    values: list[Any] = [f"value {index}" for index in range(5000)] + ["", 7, True, None]
    schema = {"type": "object", "properties": {"x": {"enum": values}}, "required": ["x"]}
    spec = GrammarSpec("lark", call_grammar(tool(schema)))
    assert accepts(start(spec), *call("call:f{x:", '<|"|>', "value 4999", '<|"|>', "}"))
    assert accepts(start(spec), *call("call:f{x:", '<|"|>', '<|"|>', "}"))
    assert accepts(start(spec), *call("call:f{x:true}"))
    assert not accepts(start(spec), *call("call:f{x:", '<|"|>', "value 5000", '<|"|>', "}"))


@pytest.mark.parametrize("num_choices", [1, 2001, MAX_CHOICES])
def test_as_many_choices_work_as_are_allowed(num_choices: int) -> None:
    texts = [f'choice {index} \N{GRINNING FACE}/"\\\n' for index in range(num_choices)]
    spec = StructuredOutputs(choice=texts).spec()
    assert accepts(start(spec), texts[-1])
    assert not accepts(start(spec), texts[-1][:-1])
    with pytest.raises(BadRequest, match=str(MAX_CHOICES)):
        StructuredOutputs(choice=["x"] * (MAX_CHOICES + 1))


def test_the_process_expands_tools_and_says_why_it_does_not() -> None:
    check = GrammarCheck(SPECIAL, patience=60)

    def form(parameters: Any, document: GrammarSpec | None = None) -> ToolForm:
        return ToolForm(msgspec.Raw(json.dumps(tool(parameters)).encode()), document=document)

    try:
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        assert accepts(start(check.check(form(schema))), *call("call:f{x:5}"))
        both = check.check(form(schema, StructuredOutputs(choice=["yes", "no"]).spec()))
        assert accepts(start(both), "yes")
        assert accepts(start(both), *call("call:f{x:5}"))
        wide = {"type": "object", "properties": {f"k{index}": {} for index in range(2000)}}
        with pytest.raises(BadRequest, match=r"^tools\[0\]: the schemas are too large"):
            check.check(form(wide))
        with pytest.raises(BadRequest, match=r"^structured_outputs: not valid JSON"):
            check.check(form(schema, GrammarSpec("json_schema", "{")))
        deep = "{" + '"items":{' * 200_000 + "}" * 200_001
        with pytest.raises(BadRequest, match=r"^structured_outputs: "):
            check.check(GrammarSpec("json_schema", deep))
    finally:
        check.close()


GOOD = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 5}}, "required": ["x"]}
WIDE = {"type": "object", "properties": {f"k{index}": {} for index in range(2000)}}
NOTHING = {"type": "object", "properties": {"x": False}, "required": ["x"]}
LARGE = [{"type": "object", "properties": {"x": {"enum": [f"{index} {'x' * 4000}" for index in range(n)]}}} for n in (150, 200)]
ENDLESS = {"type": "object", "properties": {"x": {"allOf": [{"pattern": f"a.{{{index}}}b.*c"} for index in range(40)]}}}


@pytest.mark.parametrize(
    ("schemas", "free"),
    [
        ({"good": GOOD, "wide": WIDE, "nothing": NOTHING}, {"wide": "too large", "nothing": "no arguments fit"}),
        ({"good": GOOD, "large": LARGE[0], "larger": LARGE[1]}, {"larger": "together are too large"}),
        ({"good": GOOD, "endless": ENDLESS}, {"endless": "too complex"}),
        ({"good": GOOD}, {}),
    ],
    ids=["two bad", "too large together", "takes too long", "all good"],
)
def test_only_tools_that_cannot_be_held_are_free(
    schemas: dict[str, Any], free: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The other tools of `auto` are still held, and the log names those that are not."""
    check = GrammarCheck(SPECIAL, time_limit_s=10.0, patience=60)
    try:
        spec = check.check(tool_form(named(**schemas), one_call=True, is_lenient=True))
    finally:
        check.close()
    assert set(spec.free_tools) == set(free)
    assert accepts(start(spec), *call("call:good{x:5}"))
    assert not accepts(start(spec), *call("call:good{x:6}"))
    for name, why in free.items():
        assert accepts(start(spec), *call(f"call:{name}{{any:[1],thing:null}}"))
        assert any(f"calls to {name} are not checked" in line and why in line for line in caplog.messages)


def nested(num_levels: int, inner: Any, *, in_arrays: bool = False) -> Any:
    """Return a tool's schema with this many objects or arrays inside each other around the inner schema."""
    for _ in range(num_levels - 1):
        inner = {"type": "array", "items": inner} if in_arrays else {"type": "object", "properties": {"a": inner}}
    return {"type": "object", "properties": {"a": inner}}


DEEP = {
    "objects": [nested(MAX_NESTING + extra, {"type": "null"}) for extra in (0, 1)],
    "arrays": [nested(MAX_NESTING + extra, {"type": "null"}, in_arrays=True) for extra in (0, 1)],
    "constants": [nested(MAX_NESTING - 1 + extra, {"const": [None]}) for extra in (0, 1)],
    "shared": [
        nested(200, {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]})
        | {"$defs": {"x": nested(MAX_NESTING - 200 + extra, {}), "y": {"type": "null"}}}
        for extra in (0, 1)
    ],
}
# A schema that has already been written is deeper here than where it was written.
DEEP["written before"] = [
    {
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": nested(100, {"$ref": "#/$defs/x"})},
        "$defs": {"x": nested(150 + more, {})},
    }
    for more in (5, 6)
]


@pytest.mark.parametrize("name", DEEP)
def test_a_schema_nests_at_most_as_deep_as_calls_are_read(name: str) -> None:
    fine, deep = DEEP[name]
    check = GrammarCheck(SPECIAL, patience=60)
    try:
        spec = check.check(tool_form(tool(fine)))
        assert accepts(start(spec), *call("call:f{}"))
        if name == "objects":
            text = "call:f" + "{a:" * MAX_NESTING + "null" + "}" * MAX_NESTING
            assert accepts(start(spec), *call(text))
            reader = CallReader({})
            json.loads(reader.push_text(text))
            assert reader.is_complete
        with pytest.raises(
            BadRequest, match=r"^tools\[0\]: the schema has values that are nested deeper than 256 levels"
        ) as caught:
            check.check(tool_form(tool(deep)))
        assert "nest objects and arrays less" in caught.value.hint
        assert check.check(tool_form(tool(deep), is_lenient=True)).free_tools == ("f",)
        with pytest.raises(BadRequest, match="nested deeper than 256 levels"):
            check.check(tool_form([{"function": {"name": "f", "parameters": deep, "strict": True}}], is_lenient=True))
    finally:
        check.close()


def test_schemas_that_cannot_be_passed_on_are_refused() -> None:
    deep: Any = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(BadRequest, match="nested too deeply"):
        tool_form(tool(deep))


def strict_tools(schema: Any, *, strict: bool | None = True) -> list[dict[str, Any]]:
    """Return two tools. The second has the schema."""
    second = {"name": "g", "parameters": {"type": "object", "properties": {"a": schema}}, "strict": strict}
    return [*tool({}), {"function": second}]


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "not"),
        ({"type": "array", "items": {"if": {}}}, "if"),
        ({"anyOf": [{"oneOf": [{}]}]}, "oneOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"b": {"type": "string", "format": "duration"}}}, "format"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"patternProperties": {"(?=a)": {}}}, "patternProperties"),
        ({"type": "string", "maxLength": 10_000}, "maxLength"),
        ({"type": "number", "multipleOf": 1e-9}, "multipleOf"),
        ({"properties": {f"k{index}": {} for index in range(200)}, "maxProperties": 100}, "maxProperties"),
        ({"$ref": "#here"}, "$ref"),
        ({"$ref": "#/$defs/nothing"}, "$ref"),
        ({"anyOf": [{}], "$ref": "#/properties/a/anyOf/1"}, "$ref"),
        ({"anyOf": [{}], "$ref": "#/properties/a/anyOf/00"}, "$ref"),
    ],
)
@pytest.mark.parametrize("is_lenient", [False, True])
def test_a_strict_tool_has_only_keywords_that_hold(schema: Any, keyword: str, is_lenient: bool) -> None:
    check = GrammarCheck(SPECIAL)
    try:
        with pytest.raises(BadRequest) as caught:
            check.check(tool_form(strict_tools(schema), is_lenient=is_lenient))
        assert caught.value.message == f'tools[1]: g is strict, but these keywords cannot be enforced: "{keyword}"'
        for strict in (None, False):
            spec = check.check(tool_form(strict_tools(schema, strict=strict), is_lenient=is_lenient))
            assert spec.free_tools == ()
    finally:
        check.close()


def test_a_strict_tool_is_never_free(caplog: pytest.LogCaptureFixture) -> None:
    wide: Any = {"properties": {f"k{index}": {} for index in range(401)}}
    fine = {"type": "string", "title": "x", "x-own": 1, "format": "date", "uniqueItems": False, "$defs": {"b": {"not": {}}}}
    check = GrammarCheck(SPECIAL)
    try:
        assert check.check(tool_form(strict_tools(wide, strict=False), is_lenient=True)).free_tools == ("g",)
        caplog.clear()
        with pytest.raises(BadRequest, match=r"^tools\[1\]: the schemas are too large"):
            check.check(tool_form(strict_tools(wide), is_lenient=True))
        assert not caplog.records
        held = check.check(tool_form(strict_tools(fine), is_lenient=True))
        assert (held.free_tools, held.is_strict) == ((), True)
        assert not check.check(tool_form(strict_tools(fine, strict=False), is_lenient=True)).is_strict
    finally:
        check.close()
