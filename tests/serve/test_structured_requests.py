"""Structured output over HTTP with a tiny random model, whose output is well-formed only because the server enforces it."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.forking import children
from tests.serve.conftest import TINY
from tests.serve.hardening.raw_http import chat_bytes, connect
from tests.serve.running import Running, wait_for

HELLO: Any = [{"role": "user", "content": "Hello"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "size": {"enum": ["small", "large"]},
        "carats": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "carats"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "stone", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "unit": {"enum": ["c", "f"]},
                    "days": {"type": "integer"},
                    "near": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
ENDLESS: Any = {"allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967, 9949, 9941)]}


def ask(server: Running, **fields: Any) -> Any:
    fields = {"model": "gemma", "messages": HELLO, "max_tokens": 300, "seed": 1, **fields}
    return server.openai().chat.completions.create(**fields).choices[0]


@pytest.mark.parametrize("seed", range(3))
def test_json_schema_strict(tiny: Running, seed: int) -> None:
    choice = ask(tiny, response_format=FORMAT, seed=seed, temperature=1.5)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_streaming_gives_the_same(tiny: Running) -> None:
    whole = ask(tiny, response_format=FORMAT).message.content
    fields: Any = {"model": "gemma", "messages": HELLO, "max_tokens": 300, "seed": 1, "response_format": FORMAT}
    stream = tiny.openai().chat.completions.create(stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_the_other_forms(tiny: Running) -> None:
    choice = ask(tiny, extra_body={"structured_outputs": {"choice": ["red", "green"]}})
    assert choice.message.content in ("red", "green")
    choice = ask(tiny, extra_body={"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}})
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", choice.message.content)
    choice = ask(tiny, extra_body={"structured_outputs": {"grammar": 'root ::= "<" ("a" | "b") ">"'}})
    assert choice.message.content in ("<a>", "<b>")
    choice = ask(tiny, extra_body={"structured_outputs": {"json": {"type": "boolean"}}})
    assert choice.message.content.strip() in ("true", "false")
    choice = ask(tiny, response_format={"type": "json_object"}, max_tokens=150)
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert ask(tiny, response_format={"type": "text"}, max_tokens=5).finish_reason == "length"
    answer = tiny.openai().completions.create(
        model="gemma", prompt="A", max_tokens=20, extra_body={"structured_outputs": {"choice": ["one", "two"]}}
    )
    assert answer.choices[0].text in ("one", "two")


@pytest.mark.parametrize("thinking", [False, True])
def test_a_tool_must_be_called(tiny: Running, thinking: bool) -> None:
    """Calls are complete and their arguments are valid. A thought may come first."""
    extra: Any = {"chat_template_kwargs": {"enable_thinking": thinking}}
    if thinking:  # a random model would spend all its tokens thinking
        tokens = {
            name: tiny.http.post("/tokenize", json={"prompt": name}).json()["tokens"][-1]
            for name in ("<|channel>", "<channel|>")
        }
        extra["logit_bias"] = {str(tokens["<|channel>"]): 100, str(tokens["<channel|>"]): 9}
    for seed in range(2):
        fields = {"tools": TOOLS, "seed": seed, "parallel_tool_calls": False, "extra_body": extra, "max_tokens": 800}
        choice = ask(tiny, tool_choice="required", **fields)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert bool(getattr(choice.message, "reasoning_content", None)) is thinking
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        (call,) = ask(tiny, tool_choice=named, **fields).message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])


def test_tools_or_a_document(tiny: Running) -> None:
    """With tools and a schema for the answer, the output is one or the other."""
    kinds = set()
    for seed in range(4):
        choice = ask(tiny, tools=TOOLS, response_format=FORMAT, seed=seed, parallel_tool_calls=False, temperature=3.0)
        if choice.message.tool_calls:
            kinds.add("call")
            assert choice.message.content is None
        elif choice.finish_reason == "stop":
            kinds.add("document")
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert kinds


def test_bad_forms_are_client_errors(tiny: Running) -> None:
    def schema(inner: Any) -> Any:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": inner, "strict": True}}}

    bad: list[dict[str, Any]] = [
        schema({"type": "strin"}),
        schema({"type": "object", "not": {}}),
        schema({"$ref": "file:///etc/passwd"}),
        {"response_format": {"type": "json_schema"}},
        {"extra_body": {"structured_outputs": {}}},
        {"extra_body": {"structured_outputs": {"regex": "("}}},
        {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}},
        {"extra_body": {"structured_outputs": {"grammar": "start: nothing"}}},
        {"extra_body": {"structured_outputs": {"unheard_of": 1}}},
        {"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": {"type": "json_object"}},
    ]
    for fields in bad:
        with pytest.raises(openai.BadRequestError):
            ask(tiny, **fields)
    lenient = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean", "not": {}}}}
    assert ask(tiny, response_format=lenient).message.content.strip() in ("true", "false")
    tiny.check_well()


BAD_SCHEMA: Any = {"type": "strin"}
MANY: Any = {"type": "object", "properties": {f"p{index}": {} for index in range(401)}}


def bad_tools(place: int) -> Any:
    """Return three tools. The schema of the one at `place` has too many optional properties for a grammar."""
    return [
        {"type": "function", "function": {"name": f"f{index}", "parameters": MANY if index == place else {}}}
        for index in range(3)
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"regex": "("}, "regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"guided_json": BAD_SCHEMA}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_choice": ["x" * 4096] * 300}, "guided_choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": BAD_SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": BAD_SCHEMA}}}, "response_format"),
        ({"tools": bad_tools(1), "tool_choice": "required"}, "tools[1]"),
        ({"tools": bad_tools(2), "structured_outputs": {"regex": "a+"}}, "tools[2]"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"tools": bad_tools(0), "guided_regex": "("}, "guided_regex"),
    ],
)
def test_an_error_names_the_field(tiny: Running, fields: dict[str, Any], param: str) -> None:
    response = tiny.chat(messages=HELLO, max_tokens=4, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}}}, "text.format.schema"),
        ("/v1/responses", {"guided_regex": "("}, "guided_regex"),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": BAD_SCHEMA}}, "output_format"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}}}, "output_config.format"),
        ("/v1/completions", {"regex": "("}, "regex"),
        ("/api/chat", {"format": BAD_SCHEMA}, "format"),
    ],
)
def test_an_error_names_the_field_of_other_apis(tiny: Running, path: str, fields: dict[str, Any], name: str) -> None:
    asked = {"/v1/responses": {"input": "Hello"}, "/v1/completions": {"prompt": "Hello"}}.get(path, {"messages": HELLO})
    limit = {} if path == "/api/chat" else {"max_tokens": 4}
    response = tiny.http.post(path, json={"model": "gemma"} | limit | asked | fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error if path == "/api/chat" else error["message"]).startswith(f"{name}: ")


def compiling(server: Running) -> list[int]:
    """Return the processes that compile a grammar now. Each does so in a second thread, which ends with the grammar."""
    found = []
    for worker in children(server.process.pid, "culet.structured.check_worker"):
        with suppress(OSError):  # it has ended meanwhile
            found += [worker] if len(list(Path(f"/proc/{worker}/task").iterdir())) > 1 else []
    return found


ENDLESS_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS, "strict": True}}


def test_a_schema_that_takes_minutes_to_compile(folder: Path) -> None:
    """The requests with such a schema fail at the limit, and no process goes on with it."""
    with Running(folder, config=TINY) as server:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: server.chat(response_format=ENDLESS_FORM, max_tokens=5), range(2)))
        assert [answer.status_code for answer in answers] == [400, 400]
        for answer in answers:
            assert "too complex: compiling it took more than 5 s" in answer.json()["error"]["message"]
        assert not compiling(server)
        assert ask(server, response_format=FORMAT).finish_reason == "stop"
        server.check_well()


def test_others_are_served_while_a_schema_compiles(fake: Running) -> None:
    """It has a minute here, but its client leaves. Then no process goes on with it."""
    with connect(fake) as sock:
        sock.sendall(chat_bytes(response_format=ENDLESS_FORM))
        wait_for(lambda: compiling(fake), what="a process that compiles the schema")
        assert fake.chat(max_tokens=3).status_code == 200
        assert compiling(fake), "the chat waited for the schema"
    wait_for(lambda: not compiling(fake), 2, "the process to end")


def tool_of(schema: Any) -> Any:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"tools": tool_of({"type": "object", "properties": [1]})},
            "tools[0]: in its schema, properties is a list, expected an object of JSON schemas by name",
        ),
        (
            {"tools": tool_of({"properties": {"a": {"items": {"properties": "b"}}}})},
            "tools[0]: in its schema, properties.a.items.properties is a string, expected an object of JSON schemas by name",
        ),
        (
            {"tools": tool_of({"properties": {"a": 5}})},
            "tools[0]: in its schema, properties.a is a number, expected a JSON schema, which is an object",
        ),
        (
            {"tools": tool_of({"properties": {"a": {"type": 5}}})},
            "tools[0]: in its schema, properties.a.type is a number, expected a string or a list of strings",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type: got 'web_search', expected function (hint: the server runs no tools itself, so declare a function, "
            "and run it in the client)",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice: got 'sometimes', expected one of: auto, none, required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
            "messages[0].content[0].type: got 'odd', expected one of: text, image_url, video_url, audio_url, input_audio, file",
        ),
        (
            {"chat_template": "{% if %}"},
            "chat_template: not supported (hint: the server sets the template with --chat-template)",
        ),
        ({"guided_regex": "("}, "guided_regex: invalid regex: unclosed group"),
        ({"guided_grammar": "start: nothing"}, 'guided_grammar: line 1, column 8: unknown name: "nothing"'),
        (
            {"guided_grammar": 'start: "a" )'},
            "guided_grammar: line 1, column 12: expecting rule, token or statement",
        ),
        (  # GBNF is translated, so a line of the translation would mislead
            {"grammar": '# a\n\n\nroot ::= "a" x\nx ::= "b"{5,2}'},
            "grammar: range end must be >= start, got (5, 2)",
        ),
        (
            {"grammar": 'root ::= start\nstart ::= "a"'},
            "grammar: a GBNF grammar cannot have a rule named start, so give it another name",
        ),
        (
            {"structured_outputs": {"json": {"not": {"const": 1}}}},
            'structured_outputs.json: these keywords cannot be enforced: "not"',
        ),
        ({"guided_json": {"$ref": "#/nope"}}, "guided_json: the reference '#/nope' points to nothing"),
        ({"guided_json": {"$ref": "http://x.org"}}, "guided_json: the reference 'http://x.org' points to another document"),
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json: invalid regex: unclosed group"),
    ],
)
def test_errors_are_plain(fake: Running, fields: dict[str, Any], problem: str) -> None:
    """They name the field and the problem, and show nothing of the grammar that Culet makes of it."""
    response = fake.chat(**{"messages": HELLO, **fields})
    assert (response.status_code, response.json()["error"]["message"]) == (400, problem)


@pytest.mark.parametrize("schema", [{"properties": {"a": True, "b": {"type": ["string", "null"], "required": True}}}, {}, None])
def test_schemas_that_templates_can_show(fake: Running, schema: Any) -> None:
    assert fake.chat(messages=HELLO, tools=tool_of(schema)).status_code == 200


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}),
        ("/v1/messages", {"name": "f", "input_schema": {"not": {}}, "strict": True}),
        ("/v1/responses", {"type": "function", "name": "f", "parameters": {"not": {}}, "strict": True}),
    ],
)
def test_a_strict_tool_that_cannot_be_held(fake: Running, path: str, tool: Any) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 4} if "responses" not in path else {"input": "Hello"}
    response = fake.http.post(path, json={**body, "tools": [tool]})
    problem = 'tools[0]: f is strict, but these keywords cannot be enforced: "not" (hint: change the schema, or omit strict)'
    assert (response.status_code, response.json()["error"]["message"]) == (400, problem)
    tool.get("function", tool)["strict"] = False
    assert fake.http.post(path, json={**body, "tools": [tool]}).status_code == 200
