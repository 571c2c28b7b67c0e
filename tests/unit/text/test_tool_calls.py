"""Gemma 4's tool calls as JSON: values, how schemas decide the meaning of bare words, and malformed calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from culet.text.output_pieces import TextPiece, ToolCall
from culet.text.template import BUILT_IN, ChatTemplate
from culet.text.tokenizer import Tokenizer
from culet.text.tool_calls import MAX_NESTING, CallReader
from culet.text.tool_schema import tool_schemas
from tests.unit.text.output_streams import CITY, SCHEMA, Q, answer, read, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def arguments(tokenizer, body, schema=None, **options):
    """Return the arguments of the single call `call:f{body}`."""
    output = answer(tokenizer, f"<|tool_call>call:f{{{body}}}<tool_call|>", schemas={"f": schema}, **options)
    assert output.text == ""
    (call,) = output.tool_calls
    return call.arguments


def test_arguments(tokenizer):
    body = (
        f"a:{{b:{{c:[1,[-2.5e3,[]],{{}}],d:{Q}x{Q}}},e:null}}, f : [ true , {Q}, ]}}{{{Q} ] ,g:12,"
        f"{Q}quoted key:{Q}:{Q}\n\t\\\u2028 \x01{Q},with space:false,é:{Q}ü😀{Q}"
    )
    assert arguments(tokenizer, body) == {
        "a": {"b": {"c": [1, [-2500.0, []], {}], "d": "x"}, "e": None},
        "f": [True, ", ]}{"],
        "g": 12,
        "quoted key:": "\n\t\\\u2028 \x01",
        "with space": False,
        "é": "ü😀",
    }
    assert arguments(tokenizer, "") == arguments(tokenizer, " \n") == {}
    assert arguments(tokenizer, "a:b c,t:10:30,n:01,i:1e999,m:NaN") == {
        "a": "b c",
        "t": "10:30",
        "n": "01",
        "i": "1e999",
        "m": "NaN",
    }
    assert arguments(tokenizer, "n:" + "9" * 5000) == {"n": "9" * 5000}
    assert arguments(tokenizer, f"a:{Q}<|image|><pad><|channel>{Q}") == {"a": "<|image|><pad><|channel>"}


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("s:02134", "02134"),
        ("s:true", "true"),
        ("s:null", "null"),
        ("sn:null", None),
        ("sn:7", "7"),
        ("nullable:null", None),
        ("i:7", 7),
        ("i:+7", 7),
        ("i:007", 7),
        ("i:7.0", 7),
        ("i:7.5", 7.5),
        ("i:seven", "seven"),
        (f"i:{'0' * 5000}7", "0" * 5000 + "7"),
        ("i:12345678901234567890123", 12345678901234567890123),
        (f"i:{Q}7{Q}", "7"),
        ("x:.5", 0.5),
        ("x:1.", 1.0),
        ("x:1e999", "1e999"),
        ("x:true", True),
        ("b:True", True),
        ("b:1", 1),
        ("any:5", 5),
        ("either:5", 5),
        ("either:five", "five"),
        ("either:true", "true"),
        ("choice:1", "1"),
        ("list:[1,true,x]", ["1", "true", "x"]),
        ("pair:[1,2]", ["1", 2]),
        ("inner:{zip:1,in:{in:{zip:2}}}", {"zip": "1", "in": {"in": {"zip": "2"}}}),
        ("loop:1", 1),
        ("map:{a:1}", {"a": "1"}),
        ("odd:1", 1),
        ("unknown:1", 1),
    ],
)
def test_bare_values_follow_the_schema(tokenizer, body, value):
    (got,) = arguments(tokenizer, body, SCHEMA).values()
    assert got == value
    assert type(got) is type(value)


def test_tool_schemas():
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}, {"function": {"name": "g"}}, {"name": "h"}]
    assert tool_schemas(tools) == {"f": SCHEMA, "g": None, "h": None}
    assert tool_schemas(None) == {}


def test_arguments_come_as_soon_as_they_are_certain(tokenizer):
    reader = CallReader({})
    steps = []
    for token in tokenizer.encode(f"call:f{{key:{Q}ab{Q},n:12,l:[]}}"):
        name = tokenizer.decode([token], skip_special=False)
        steps.append((name, reader.push_quote() if name == Q else reader.push_text(name)))
    assert reader.is_complete
    assert [(name, text) for name, text in steps if text] == [
        ("{", "{"),
        (":", '"key":'),
        (Q, '"'),
        ("a", "a"),
        ("b", "b"),
        (Q, '"'),
        (":", ',"n":'),  # only now it is known that the comma was not the last one
        (",", "12"),
        (":", ',"l":'),
        ("[", "["),
        ("]", "]"),
        ("}", "}"),
    ]


# Forms that models write besides the usual one


@pytest.mark.parametrize(
    "end", ["<tool_call|>", "", "<turn|>", "<|tool_response>", "<eos>", "<|tool_call>call:g{}<tool_call|>", "<|channel>"]
)
def test_a_closed_call_counts_without_its_end_token(tokenizer, end):
    output = answer(tokenizer, f"<|tool_call>call:f{{a:1}}{end}")
    assert (output.text, output.num_malformed) == ("", 0)
    assert [(call.name, call.arguments) for call in output.tool_calls][:1] == [("f", {"a": 1})]
    assert len(output.tool_calls) == 1 + ("call:g" in end)


@pytest.mark.parametrize(
    "body",
    [
        ":call:f{a:1,b:{x:[2]}}",
        ":f{a:1,b:{x:[2]}}",
        " : f {a:1,b:{x:[2]}}",
        "call:f(a:1,b:{x:[2]})",
        "call:f(a=1, b={x:[2]})",
        'call:f("a"=1, "b": {"x":[2]} )',
    ],
)
def test_other_forms_of_a_call(tokenizer, body):
    output = answer(tokenizer, f"<|tool_call>{body}<tool_call|>")
    (call,) = output.tool_calls
    assert (call.name, call.arguments, output.text) == ("f", {"a": 1, "b": {"x": [2]}}, "")


def test_named_arguments(tokenizer):
    body = f"<|tool_call>call:f(path={Q}a(b),c={Q}, size=3, mode: fast)<tool_call|><|tool_call>call:g()<tool_call|>"
    first, second = answer(tokenizer, body).tool_calls
    assert first.arguments == {"path": "a(b),c=", "size": 3, "mode": "fast"}
    assert (second.name, second.arguments) == ("g", {})


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ('"x"', "x"),
        ('"x, y}"', "x, y}"),
        (r'"a \"b\", \\"', 'a "b", \\'),
        (r'"\u00e9"', "é"),
        ('"x" y', '"x" y'),
        ('"bad \\q"', '"bad \\q"'),
        ('5"', '5"'),
        ("'x'", "'x'"),
        ('""', ""),
    ],
)
def test_strings_in_ascii_quotes(tokenizer, body, value):
    assert arguments(tokenizer, f"memory: {body}") == {"memory": value}
    assert arguments(tokenizer, f'"memory": [{body}]') == {"memory": [value]}


@pytest.mark.parametrize(
    ("key", "wanted"),
    [('"a:b"', "a:b"), ('"a,b"', "a,b"), (r'"a \"}"', 'a "}'), ('"a" b', '"a" b'), (' "a" ', "a"), ('""', "")],
)
def test_keys_in_ascii_quotes(tokenizer, key, wanted):
    assert arguments(tokenizer, f"{key}:1, {key} : 2") == {wanted: 2}
    assert arguments(tokenizer, f"x:{{{key}:1}}") == {"x": {wanted: 1}}


def test_a_quoted_key_between_parentheses(tokenizer):
    (call,) = answer(tokenizer, f"<|tool_call>call:f({Q}a=b{Q}=1, {Q}c{Q}: 2)<tool_call|>").tool_calls
    assert call.arguments == {"a=b": 1, "c": 2}


@pytest.mark.parametrize("body", ["", "a:1", f"a:{{b:[1,{Q}x{Q}]}}", '"a": 1, "b": {"c": ")"}'])
def test_an_object_in_parentheses(tokenizer, body):
    wanted = arguments(tokenizer, body)
    for form in (f"({{{body}}})", f" ( {{{body}}} ) "):
        output = answer(tokenizer, f"<|tool_call>call:f{form}<tool_call|>")
        assert [call.arguments for call in output.tool_calls] == [wanted]
        assert output.text == ""


@pytest.mark.parametrize("form", ["({a:1}", "({a:1}})", "({a:1},{b:2})", "({a:1} x)", "({{a:1}})", "({a:1}))"])
def test_broken_objects_in_parentheses(tokenizer, form):
    output = answer(tokenizer, f"<|tool_call>call:f{form}<tool_call|>")
    assert (output.tool_calls, output.num_malformed) == ((), 1)
    assert form in output.text


def test_a_quoted_number_is_a_string(tokenizer):
    assert arguments(tokenizer, 'a:"5"', {"properties": {"a": {"type": "integer"}}}) == {"a": "5"}


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("a:1,", {"a": 1}),
        ("a:1 , ", {"a": 1}),
        (f"a:{Q}x{Q},", {"a": "x"}),
        ("a:[1,]", {"a": [1]}),
        (f"a:[{Q}x{Q}, ],b:{{c:[[],{{}},],}},", {"a": ["x"], "b": {"c": [[], {}]}}),
        (f"{Q}a{Q}:1,", {"a": 1}),
    ],
)
def test_a_comma_after_the_last_value(tokenizer, body, value):
    assert arguments(tokenizer, body) == arguments(tokenizer, body, calls_hold=True) == value
    (call,) = answer(tokenizer, f"<|tool_call>call:f({body})<tool_call|>").tool_calls
    assert call.arguments == value


@pytest.mark.parametrize("end", ["<tool_call|>", "", "<turn|>"])
def test_one_brace_too_many(tokenizer, end):
    for body in ("{a:1}}", "{a:1} }\n", "{a:{b:1}}}", "{}}", "{a:1,}}"):
        output = answer(tokenizer, f"<|tool_call>call:f{body}{end}")
        assert (len(output.tool_calls), output.text) == (1, "")


@pytest.mark.parametrize("between", ["", " ", "\n", ",", ", ", ";\n", "}", "} ,\n"])
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_several_calls_between_two_marks(tokenizer, between, size):
    calls = between.join([f"call:f{{a:{Q}x{Q}}}", "call:g{b:[1,2]}", "call:f{}"])
    ids = tokenizer.encode(f"see <|tool_call>{calls}<tool_call|> yes")
    for options in ({}, {"calls_hold": True}):
        output = read(tokenizer, ids, range(0, len(ids), size), **options)[1]
        assert [(call.name, call.arguments) for call in output.tool_calls] == [
            ("f", {"a": "x"}),
            ("g", {"b": [1, 2]}),
            ("f", {}),
        ]
        assert output.text == "see  yes"
    only = read(tokenizer, ids, range(0, len(ids), size), single_call=True)[1]
    assert ([call.name for call in only.tool_calls], only.text) == (["f"], "see ")


def test_a_broken_call_after_another_is_text(tokenizer):
    output = answer(tokenizer, "<|tool_call>call:f{a:1}call:g{b}<tool_call|>")
    assert [call.arguments for call in output.tool_calls] == [{"a": 1}]
    assert (output.text, output.num_malformed) == ("<|tool_call>call:g{b}<tool_call|>", 1)


# Malformed calls

MALFORMED = [
    "",
    "call:",
    "call:{a:1}",
    "call: {a:1}",
    "weather{a:1}",
    "call:two words{a:1}",
    "call:" + "f" * 300,
    "-f{a:1}",
    "call:f(a:1",
    "call:f(a:1}",
    "call:f{a:1)",
    "call:f(a=)",
    "call:f(a)",
    'call:f{a:"open}',
    "call:f",
    "call:f{",
    "call:f{a",
    "call:f{a}",
    "call:f{a:}",
    "call:f{a:,b:1}",
    "call:f{:1}",
    "call:f{a:1,,}",
    "call:f{,}",
    "call:f{a:[,]}",
    "call:f{a:[1,,]}",
    "call:f{a:[1,}",
    "call:f{a:1,]",
    "call:f{a:[1}",
    "call:f{a:1]",
    "call:f{a:b{c:1}}",
    "call:f{a:1",
    "call:f{a:1}}}",
    "call:f{a:1}]",
    "call:f(a:1))",
    "call:f(a:1)}",
    "call:f{a:1},",
    "call:f{a:1}ca",
    "call:f{a:1} call:",
    "call:f{a:1}call:g",
    "call:f{a:1}call:two words{}",
    "call:f{a:1}, call me{}",
    "call:f{a:1}call:g}",
    "call:f{a:1}call:" + "g" * 300,
    "call:f{a:1},,call:g{}",
    "call:f{a:1} and more",
    f"call:f{{a:{Q}open",
    f"call:f{{a:{Q}x{Q}y}}",
    f"call:f{{a:{Q}x{Q}{Q}y{Q}}}",
    f"call:f{{a:1{Q}x{Q}}}",
    f"call:f{{a{Q}:1}}",
    f"call:f{{{Q}a{Q}1}}",
    f"call:{Q}f{Q}{{a:1}}",
    "call:f{a:<pad>1}",
    "call:f{a:<channel|>1}",
    "call:f{a:" + "[" * MAX_NESTING + "]" * MAX_NESTING + "}",
]


@pytest.mark.parametrize("close", ["<tool_call|>", "", "<turn|>", "<|tool_response>"])
@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_calls_become_text(tokenizer, body, close):
    raw = f"<|tool_call>{body}"
    expected = raw + close * (close == "<tool_call|>")
    pieces, output = read(tokenizer, tokenizer.encode(f"see {raw}{close}"))
    assert output.text == f"see {expected}"
    assert (output.tool_calls, output.num_malformed) == ((), 1)
    assert pieces == [TextPiece("see "), TextPiece(expected, malformed=True)]


def test_deep_calls_are_read(tokenizer):
    depth = MAX_NESTING - 1  # below the arguments themselves
    assert MAX_NESTING == 256
    assert json.dumps(arguments(tokenizer, f"a:{'[' * depth}{']' * depth}")["a"]) == "[" * depth + "]" * depth


def test_null_beside_a_reference_is_null(tokenizer):
    schema = {"properties": {"a": {"$ref": "#/$defs/a", "nullable": True}}, "$defs": {"a": {"type": "string"}}}
    assert arguments(tokenizer, "a:null", schema) == {"a": None}
    assert arguments(tokenizer, "a:nul", schema) == {"a": "nul"}


def test_good_calls_around_a_malformed_one(tokenizer):
    pieces, output = read(tokenizer, tokenizer.encode(f"{CITY}<|tool_call>call:f{{a}}<tool_call|>{CITY}"))
    assert [call.id for call in output.tool_calls] == ["id0", "id1"]
    assert [type(piece) for piece in pieces] == [ToolCall, TextPiece, ToolCall]
    assert pieces[1] == TextPiece("<|tool_call>call:f{a}<tool_call|>", malformed=True)


def test_malformed_call_ends_where_another_part_begins(tokenizer):
    output = answer(tokenizer, f"<|tool_call>call:f{{a:{Q}x{CITY}<|tool_call>oh<|channel>thought\nhm\n<channel|>ok")
    assert output.text == f"<|tool_call>call:f{{a:{Q}x<|tool_call>ohok"
    assert (len(output.tool_calls), output.num_malformed, output.reasoning) == (1, 2, "hm")


# Round trips


def test_what_the_chat_template_writes_is_read_back(tokenizer):
    """The next prompt holds the tokens that the model drew, so that their cached keys and values are reused."""
    drawn = f"<|channel>thought\nhm\n\n<channel|>{CITY}<|tool_call>call:f{{a:[1,{{b:null}}],z:{Q}ü\n{Q}}}<tool_call|>"
    output = answer(tokenizer, drawn + "<|tool_response>")
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in output.tool_calls]
    message = {"role": "assistant", "reasoning": output.reasoning, "content": output.text, "tool_calls": calls}
    template = ChatTemplate({"default": BUILT_IN.read_text(encoding="utf-8")}, origin="built-in", empty_thought=False)
    prompt = template.render([{"role": "user", "content": "hi"}, message])
    assert prompt.partition("<|turn>model\n")[2].startswith(drawn)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab\n"\\{}[],: é日😀'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=8,
)


def written(value):
    """Return a value as the chat template writes it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


@settings(max_examples=200, deadline=None)
@given(values=st.dictionaries(st.text("abé", min_size=1, max_size=3), VALUES, max_size=4), every=st.integers(1, 5))
def test_arguments_round_trip(tokenizer, values, every):
    ids = tokenizer.encode(f"<|tool_call>call:f{written(values)}<tool_call|>")
    output = read(tokenizer, ids, range(0, len(ids), every))[1]
    assert output.tool_calls[0].arguments == values
    assert output.text == ""
