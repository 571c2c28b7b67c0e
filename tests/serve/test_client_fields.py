"""Fields of other servers: aliases work, fields that would change the answer are refused, and answers can be continued."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.conftest import ANSWER
from tests.serve.running import Running

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 7}}, "[567]"),
        ({"guided_json": json.dumps({"const": 4})}, "4"),
        ({"regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"grammar": 'start: "q"'}, "q"),
        ({"grammar": r'root ::= "\u0042" [\u0041-\u0043] "\u00e9\u0022"'}, 'B[A-C]é"'),
    ],
)
def test_other_names_of_structured_outputs(tiny: Running, fields: dict[str, Any], pattern: str) -> None:
    answer = tiny.chat(messages=HELLO, max_tokens=40, temperature=1.0, seed=3, **fields).json()
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])


FOUR: Any = {"const": 4}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"schema": FOUR}},
        {"type": "json_object", "json_schema": {"schema": FOUR}},
        {"type": "json_schema", "schema": FOUR},
        {"type": "json_object", "schema": FOUR},
        {"type": "json_object", "value": FOUR},
        {"type": "json_object", "schema": json.dumps(FOUR), "value": None},
    ],
)
def test_places_of_the_schema_in_response_format(tiny: Running, form: dict[str, Any]) -> None:
    answer = tiny.chat(messages=HELLO, max_tokens=8, response_format=form).json()
    assert answer["choices"][0]["message"]["content"] == "4"


@pytest.mark.parametrize("schema", [{}, None, "{ }"])
def test_an_empty_schema_beside_json_object_means_any_object(tiny: Running, schema: Any) -> None:
    answer = tiny.chat(messages=HELLO, max_tokens=1, temperature=0, response_format={"type": "json_object", "schema": schema})
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"type": "json_schema"}, "response_format.json_schema.schema: a JSON schema is required"),
        ({"type": "json_schema", "schema": None}, "response_format.json_schema.schema: a JSON schema is required"),
        ({"type": "json_schema", "json_schema": {"type": "object"}}, "response_format.json_schema.schema: a JSON schema is"),
        ({"type": "json_object", "json_schema": {"$ref": "#/x"}}, "response_format.json_schema.schema: a JSON schema is"),
        ({"type": "text", "schema": FOUR}, "response_format.schema: got a schema, but the type is text"),
        ({"type": "text", "json_schema": {"name": "x"}}, "response_format.json_schema: got a schema, but the type is text"),
        (
            {"type": "json_schema", "schema": FOUR, "value": FOUR},
            "response_format.value: cannot be combined with response_form",
        ),
        ({"type": "json_object", "schema": {"not": {}}, "strict": True}, "response_format: these keywords cannot be enforced"),
    ],
)
def test_nothing_in_response_format_is_ignored(tiny: Running, form: dict[str, Any], problem: str) -> None:
    response = tiny.chat(messages=HELLO, max_tokens=8, response_format=form)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(problem)


def test_response_format_text_leaves_other_forms_alone(tiny: Running) -> None:
    form = {"format": {"type": "json_schema", "schema": FOUR}}
    body = {"input": "Hello", "max_output_tokens": 20, "text": form, "response_format": {"type": "text"}}
    answer = tiny.http.post("/v1/responses", json=body).json()
    assert answer["output"][-1]["content"][0]["text"] == "4"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"guided_choice": ["a"], "regex": "b"}, "regex"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "b"}}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": "root ::= undefined"}, "rule 'undefined' not found"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {"user_location": None}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"tfs_z": 0.1}, "tfs_z"),
        ({"repeat_penalty": 5.0}, "repeat_penalty"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"stop_regex": "a"}, "stop_regex"),
        ({"top_n_sigma": 1.0}, "top_n_sigma"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"echo": True}, "echo"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"nvext": {"guided_choice": ["a"]}}, "nvext"),
        ({"max_thinking_tokens": 0}, "use thinking_token_budget"),
        ({"random_seed": 0}, "use seed"),
        ({"n_cmpl": 2}, "use n"),
        ({"num_return_sequences": 2}, "use n"),
        ({"grammar_string": "x"}, "use grammar"),
        ({"regex_pattern": "x"}, "use regex"),
        ({"banned_strings": ["x"]}, "banned_strings"),
        ({"ban_eos_token": True}, "ban_eos_token"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"negative_prompt": "x"}, "negative_prompt"),
        ({"tool_prompt": "x"}, "tool_prompt"),
        ({"search_parameters": {}}, "search_parameters"),
        ({"prompt_truncate_len": 5}, "prompt_truncate_len"),
        ({"continue_final_message": True}, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ],
)
def test_fields_that_are_refused(tiny: Running, fields: dict[str, Any], name: str) -> None:
    response = tiny.chat(messages=HELLO, max_tokens=4, **fields)
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"temprature": 0.5}, "temperature"),
        ({"max_token": 3}, "max_tokens"),
        ({"tools_choice": "none"}, "tool_choice"),
        ({"stops": ["x"]}, "stop"),
    ],
)
def test_misspelt_fields_are_refused(tiny: Running, fields: dict[str, Any], meant: str) -> None:
    response = tiny.chat(messages=HELLO, max_tokens=4, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith(f"unknown field (hint: did you mean {meant}?)")


def test_other_unknown_fields_are_ignored(tiny: Running) -> None:
    unknown = {"models": ["a"], "store": True, "service_tier": "auto", "safety_identifier": "x", "x" * 100: 1, "": 2}
    assert tiny.chat(messages=HELLO, max_tokens=4, **unknown).status_code == 200


CITY_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "tool", "problem"),
    [
        ("/v1/chat/completions", {**FUNCTION, "parameters": CITY_SCHEMA}, "tools[0].parameters: not supported"),
        ("/v1/chat/completions", {**FUNCTION, "strict": True}, "tools[0].strict: not supported"),
        ("/v1/chat/completions", {**FUNCTION, "input_schema": CITY_SCHEMA}, "tools[0].input_schema: not supported"),
        (
            "/v1/chat/completions",
            {"type": "function", "function": {"name": "f", "inputSchema": CITY_SCHEMA}},
            "tools[0].function.inputSchema: not supported",
        ),
        (
            "/api/chat",
            {"type": "function", "function": {"name": "f", "inputSchema": CITY_SCHEMA}},
            "tools[0].function.inputSchema",
        ),
        (
            "/v1/responses",
            {"type": "function", "name": "f", "input_schema": CITY_SCHEMA},
            "tools[0].input_schema: not supported",
        ),
        ("/v1/messages", {"name": "f", "input_schema": {}, "parameters": CITY_SCHEMA}, "tools[0].parameters: not supported"),
    ],
)
def test_a_schema_in_another_place_is_refused(tiny: Running, path: str, tool: dict[str, Any], problem: str) -> None:
    asked = {"input": "Hello"} if path == "/v1/responses" else {"messages": HELLO}
    limit = {} if path == "/api/chat" else {"max_tokens": 4}
    response = tiny.http.post(path, json={"model": "gemma", **asked, **limit, "tools": [tool]})
    assert response.status_code == 400
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert problem in message
    assert "hint: use" in message


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"parallel_tool_calls": False}, "parallel_tool_calls: not supported"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name: got 'f' with the type 'any'"),
    ],
)
def test_choices_that_messages_does_not_have(tiny: Running, fields: dict[str, Any], problem: str) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"model": "gemma", "messages": HELLO, "max_tokens": 4, "tools": tools}
    response = tiny.http.post("/v1/messages", json={**body, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(problem)
    assert tiny.http.post("/v1/messages", json={**body, "parallel_tool_calls": True}).status_code == 200


def test_names_of_earlier_calls_may_be_free(tiny: Running) -> None:
    """A model that nothing constrains may call a tool that does not exist, and clients send that back."""
    call = {"id": "a", "type": "function", "function": {"name": "get/weather", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "none"}]
    assert tiny.chat(messages=messages, max_tokens=4).status_code == 200
    call["function"]["name"] = "<|turn>"  # type: ignore[index]
    assert tiny.chat(messages=messages, max_tokens=4).status_code == 400


RESPONSES = ("/v1/responses", {"input": "Hello", "max_output_tokens": 20})
MESSAGES = ("/v1/messages", {"messages": HELLO, "max_tokens": 20})


@pytest.mark.parametrize(("path", "body"), [RESPONSES, MESSAGES], ids=["responses", "messages"])
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"best_of": 3}, "best_of: not supported"),
        ({"suffix": "x"}, "suffix: not supported"),
        ({"n": 2}, "n: got 2, but this API returns one answer per request"),
        ({"continue_final_message": True}, "continue_final_message: not supported"),
        ({"bad_words": ["x"]}, "bad_words: not supported"),
        ({"guided_choice": ["a"], "regex": "b"}, "regex: cannot be combined with guided_choice"),
    ],
)
def test_fields_that_other_apis_refuse(
    tiny: Running, path: str, body: dict[str, Any], fields: dict[str, Any], problem: str
) -> None:
    response = tiny.http.post(path, json={"model": "gemma", **body, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(problem)


@pytest.mark.parametrize(("path", "body"), [RESPONSES, MESSAGES], ids=["responses", "messages"])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "x|y"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 4}}}}, "4"),
    ],
)
def test_other_apis_know_structured_outputs(
    tiny: Running, path: str, body: dict[str, Any], fields: dict[str, Any], pattern: str
) -> None:
    answer = tiny.http.post(path, json={"model": "gemma", **body, **fields}).json()
    text = answer["content"][0]["text"] if path == MESSAGES[0] else answer["output"][-1]["content"][0]["text"]
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("path", "fields", "problem"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object"}},
            "regex: cannot be combined with response_format",
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, "regex: cannot be combined with text.format"),
        (
            "/v1/messages",
            {"output_format": {"type": "json_schema", "schema": {}}},
            "regex: cannot be combined with output_format",
        ),
    ],
)
def test_two_forms(tiny: Running, path: str, fields: dict[str, Any], problem: str) -> None:
    asked = {"input": "Hello"} if path == "/v1/responses" else {"messages": HELLO}
    response = tiny.http.post(path, json=asked | {"max_tokens": 4, "regex": "a"} | fields)
    assert (response.status_code, response.json()["error"]["message"]) == (400, problem)


def test_stop_sequences_count_beside_stop(fake: Running) -> None:
    first, second = ANSWER.split()[1:3]
    for stop, sequence in ((first, second), (second, first)):
        fields = {"messages": HELLO, "max_tokens": 64, "stop": stop, "stop_sequences": [sequence]}
        answer = fake.http.post("/v1/messages", json=fields).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", first)


# Answers that continue a message


def completion(server: Running, prompt: list[int]) -> str:
    fields = {"model": "gemma", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = server.http.post("/v1/completions", json=fields).json()
    return str(answer["choices"][0]["text"])


def test_continue_the_last_message(tiny: Running, encode: Callable[[str], list[int]]) -> None:
    said = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
    prompt = encode("<bos><|turn>user\nHello<turn|>\n<|turn>model\nOnce upon a")
    fields = {"max_tokens": 12, "temperature": 0, "add_generation_prompt": False, "continue_final_message": True}
    answer = tiny.chat(messages=said, **fields).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == completion(tiny, prompt)
    parts = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Once upon a"}]}]
    assert tiny.chat(messages=parts, **fields).json()["choices"] == answer["choices"]
    body = {"messages": said, "add_generation_prompt": False, "continue_final_message": True}
    assert tiny.http.post("/tokenize", json=body).json()["tokens"] == prompt


def test_a_message_with_prefix_is_continued(tiny: Running) -> None:
    """DeepSeek's and Mistral's clients mark the message itself."""
    fields = {"max_tokens": 12, "temperature": 0}
    said = {"role": "assistant", "content": "Once upon a"}
    asked = tiny.chat(messages=[*HELLO, said], add_generation_prompt=False, continue_final_message=True, **fields).json()
    marked = [*HELLO, {**said, "prefix": True}]
    assert tiny.chat(messages=marked, **fields).json()["choices"] == asked["choices"]
    assert tiny.http.post("/tokenize", json={"messages": marked}).json()["count"] == asked["usage"]["prompt_tokens"]
    plain = tiny.chat(messages=[*HELLO, {**said, "prefix": False}], **fields).json()
    assert plain["usage"]["prompt_tokens"] > asked["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": "x", "prefix": True}], "messages[0].prefix: the last message must be the assistant's"),
        (
            [*HELLO, {"role": "assistant", "content": "x", "prefix": True}, *HELLO],
            "messages[1].prefix: got true, but only the last message can be continued",
        ),
    ],
)
def test_a_prefix_in_another_message(fake: Running, messages: Any, problem: str) -> None:
    response = fake.chat(messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(problem)


PARTS = ["Once ", "upon", " a"]


def test_the_parts_of_a_continued_message_are_one_text(tiny: Running, encode: Callable[[str], list[int]]) -> None:
    """Gemma's template trims each part, which would lose the spaces between them."""
    prompt = encode("<bos><|turn>user\nHello<turn|>\n<|turn>model\nOnce upon a")
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": text} for text in PARTS]}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert tiny.http.post("/tokenize", json=body).json()["tokens"] == prompt
    assert tiny.http.post("/v1/messages/count_tokens", json={"messages": messages}).json() == {"input_tokens": len(prompt)}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages[-1]["content"].append(picture)
    response = tiny.http.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


def person(server: Running, path: str, begun: str, **fields: Any) -> tuple[int, str]:
    """Return the status and the text of an answer that continues `begun` and has the form of PERSON together with it."""
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    forms: dict[str, Any] = {
        "/v1/chat/completions": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PERSON, "strict": True}},
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
        "/api/chat": {"format": PERSON, "model": "gemma", "stream": False, "options": {"num_predict": 600}},
    }
    limit = {} if path == "/api/chat" else {"max_tokens": 600}
    response = server.http.post(path, json={"messages": messages, **limit, **forms[path], **fields})
    answer = response.json()
    if response.status_code != 200:
        return response.status_code, answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
    if path == "/v1/messages":
        return 200, "".join(block["text"] for block in answer["content"])
    message = answer["message"] if path == "/api/chat" else answer["choices"][0]["message"]
    return 200, message["content"]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("begun", ["{", '{"name": "A', '  {"name":"\u00e9", "age": ', '{"name": "x", "age": 5}'])
def test_a_form_holds_for_the_text_and_its_continuation(tiny: Running, path: str, begun: str) -> None:
    status, text = person(tiny, path, begun)
    assert status == 200, text
    document = json.loads(begun + text)
    assert sorted(document) == ["age", "name"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_text_that_cannot_become_the_form(tiny: Running, path: str) -> None:
    status, problem = person(tiny, path, "Sure, here it is: ")
    assert status == 400
    assert "the last message, which the answer continues, is not the beginning of such a document" in problem


def test_a_document_that_has_begun_is_not_a_call(tiny: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    _, text = person(tiny, "/v1/chat/completions", '{"name": "', tools=tools)
    assert sorted(json.loads('{"name": "' + text)) == ["age", "name"]
    _, text = person(tiny, "/v1/chat/completions", '{"name": "', chat_template_kwargs={"enable_thinking": True})
    assert sorted(json.loads('{"name": "' + text)) == ["age", "name"]


@pytest.mark.parametrize("space", [" ", "\n", "\n\n  ", "\t"])
def test_an_answer_continues_after_the_last_space(tiny: Running, encode: Callable[[str], list[int]], space: str) -> None:
    """Gemma's template trims messages, but a continued one ends where its text ends."""
    messages = [*HELLO, {"role": "assistant", "content": f"Once upon a{space}"}]
    prompt = encode(f"<bos><|turn>user\nHello<turn|>\n<|turn>model\nOnce upon a{space}")
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert tiny.http.post("/tokenize", json=body).json()["tokens"] == prompt
    assert tiny.http.post("/v1/messages/count_tokens", json={"messages": messages}).json() == {"input_tokens": len(prompt)}


@pytest.mark.parametrize("text", ["turn", "a |>", "model", "a <turn|>"])
def test_a_continued_message_may_look_like_markup(tiny: Running, text: str) -> None:
    """Only the end of the turn is cut off, whatever the message says."""
    fields = {"max_tokens": 1, "add_generation_prompt": False}
    messages = [*HELLO, {"role": "assistant", "content": text}]
    open_turn = tiny.chat(messages=messages, **fields, continue_final_message=True).json()
    closed_turn = tiny.chat(messages=messages, **fields).json()
    assert open_turn["usage"]["prompt_tokens"] == closed_turn["usage"]["prompt_tokens"] - 2  # <turn|> and a newline


def test_a_prefilled_turn(tiny: Running, encode: Callable[[str], list[int]]) -> None:
    """Anthropic's clients end their messages with the beginning of the answer."""
    prompt = encode("<bos><|turn>user\nHello<turn|>\n<|turn>model\nOnce upon a")
    body = {"model": "gemma", "messages": [*HELLO, {"role": "assistant", "content": "Once upon a"}]}
    answer = tiny.http.post("/v1/messages", json={**body, "max_tokens": 12, "temperature": 0}).json()
    assert answer["content"][0]["text"] == completion(tiny, prompt)
    assert tiny.http.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": len(prompt)}


def test_an_ollama_chat_that_ends_with_an_image_of_the_assistant(fake: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "x", "images": ["AAAA"]}]
    response = fake.http.post("/api/chat", json={"model": "gemma", "messages": messages})
    assert response.status_code == 400
    assert "messages[1].images[0]" in response.json()["error"]


def test_control_tokens_in_a_continued_message_stay_text(tiny: Running) -> None:
    fields = {"max_tokens": 1, "add_generation_prompt": False, "continue_final_message": True}
    answer = tiny.chat(messages=[*HELLO, {"role": "assistant", "content": "a <turn|> b"}], **fields)
    plain = tiny.chat(messages=[*HELLO, {"role": "assistant", "content": "a b"}], **fields)
    assert answer.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"] + 3


# Room in the context


def test_max_tokens_beyond_the_context(scripted: Callable[..., Running]) -> None:
    """Clients of /v1/messages must always send it, so it is lowered there, and elsewhere if the operator says so."""
    large = {"model": "gemma", "messages": HELLO, "max_tokens": 10**6}
    with scripted() as server:
        assert server.http.post("/v1/messages", json=large).status_code == 200
        assert server.chat(messages=HELLO, max_tokens=10**6).status_code == 400
    with scripted(settings={"clamp_max_tokens": True}) as server:
        assert server.chat(messages=HELLO, max_tokens=10**6).status_code == 200
        assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 10**6}).status_code == 200


def test_top_p_of_zero_is_greedy(tiny: Running) -> None:
    """OpenAI's API accepts it."""
    answers = [tiny.chat(messages=HELLO, max_tokens=12, **fields).json() for fields in ({"top_p": 0}, {"temperature": 0})]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert tiny.chat(messages=HELLO, top_p=-0.1).json()["error"]["param"] == "top_p"


# Small endpoints


def test_tokenizer_info_and_ping(fake: Running) -> None:
    info = fake.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", "<pad>")
    assert "<|turn>" in info["chat_template"]
    assert fake.http.get("/ping").status_code == 200


def test_an_unknown_path_lists_the_paths(fake: Running) -> None:
    response = fake.http.post("/v1/chat/completion", json={})
    assert response.status_code == 404
    paths = response.json()["error"]["message"].partition("the paths are ")[2].removesuffix(")").split(", ")
    assert {"/v1/chat/completions", "/openapi.json", "/v1/models/{name}", "/api/chat"} <= set(paths)
    assert not {"/api/pull", "/api/embed"} & set(paths), "they only explain why they are not supported"
    assert not [path for path in paths if ":" in path]


def test_token_ids_are_returned_on_request(fake: Running, encode: Callable[[str], list[int]]) -> None:
    body = {"prompt": "Hello", "max_tokens": 64}
    (choice,) = fake.http.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"]
    assert choice["token_ids"] == encode(f"{ANSWER}<turn|>")
    (echoed,) = fake.http.post("/v1/completions", json={**body, "return_token_ids": True, "echo": True}).json()["choices"]
    assert echoed["prompt_token_ids"] == encode("<bos>Hello")
    assert (echoed["token_ids"], echoed["text"]) == (choice["token_ids"], f"Hello{ANSWER}")
    events = fake.http.post("/v1/completions", json={**body, "return_token_ids": True, "echo": True, "stream": True}).text
    assert events.count('"prompt_token_ids":[') == 1
    assert "token_ids" not in fake.http.post("/v1/completions", json=body).json()["choices"][0]
