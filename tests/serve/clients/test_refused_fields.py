"""No field that would change the answer is ignored: each API supports it, or answers with a 400 that names it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Struct

from culet.errors import UnsupportedError
from culet.serve.api.anthropic import MessagesRequest
from culet.serve.api.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from culet.serve.api.openai.chat import ChatRequest
from culet.serve.api.openai.completions import CompletionRequest
from culet.serve.api.openai.responses_protocol import ResponsesRequest
from culet.serve.api.refused import Refused, refuse_unsupported
from tests.serve.running import Running

HELLO: Any = [{"role": "user", "content": "Hello"}]
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "Hello"}),
    "responses": ("/v1/responses", {"input": "Hello"}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 20}),
    "ollama chat": ("/api/chat", {"model": "gemma", "stream": False, "messages": HELLO}),
    "ollama generate": ("/api/generate", {"model": "gemma", "stream": False, "prompt": "Hello"}),
}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
CUSTOM = {"name": "f", "input_schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def send(server: Running, api: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Return the status and the error message."""
    path, body = PATHS[api]
    response = server.http.post(path, json={**body, **fields})
    error = response.json().get("error") or ""
    return response.status_code, error if isinstance(error, str) else error["message"]


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        ({"stop_sequences": ["x"]}, "stop_sequences: not supported (hint: use stop)"),
        ({"max_output_tokens": 1}, "max_output_tokens: not supported (hint: use max_completion_tokens)"),
        ({"num_predict": 1}, "num_predict: not supported (hint: use max_completion_tokens)"),
        ({"format": "json"}, "format: not supported (hint: use response_format)"),
        ({"think": True}, "think: not supported (hint: use chat_template_kwargs.enable_thinking)"),
        ({"separate_reasoning": False}, "separate_reasoning: not supported"),
        ({"reasoning_budget": 0}, "reasoning_budget: not supported (hint: use thinking_token_budget)"),
        ({"thinking_budget_tokens": 5}, "thinking_budget_tokens: not supported (hint: use thinking_token_budget)"),
        ({"reasoning_format": "none"}, "reasoning_format: not supported"),
        ({"parse_tool_calls": False}, "parse_tool_calls: not supported"),
        ({"return_token_ids": True}, "return_token_ids: not supported (hint: omit the field; only /v1/completions"),
        ({"add_special_tokens": True}, "add_special_tokens: not supported"),
        ({"chat_template": "{{ messages }}"}, "chat_template: not supported (hint: the server sets the template with"),
        ({"max_tool_calls": 1}, "max_tool_calls: not supported (hint: use parallel_tool_calls)"),
        ({"system": "Be brief."}, "system: not supported (hint: use messages)"),
        ({"options": {"temperature": 0}}, "options: not supported"),
        ({"verbosity": "low"}, "verbosity: not supported"),
        ({"truncation": "auto"}, "truncation: not supported"),
        ({"do_sample": False}, "do_sample: not supported (hint: set temperature to 0 instead)"),
        ({"web_search_options": {}}, "web_search_options: not supported"),
        ({"json_schema": {}}, "json_schema: not supported (hint: use response_format)"),
        ({"format": {}}, "format: not supported (hint: use response_format)"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection: not supported"),
        ({"t_max_predict_ms": 50}, "t_max_predict_ms: not supported"),
        ({"repeat_last_n": 64, "repetition_penalty": 1.1}, "repeat_last_n: not supported (hint: omit the field, because"),
        ({"repeat_last_n": 0, "presence_penalty": 1}, "repeat_last_n: not supported"),
        ({"input_ids": [5]}, "input_ids: not supported (hint: send token ids as the prompt of /v1/completions)"),
        ({"extra_body": {"top_k": 1}}, "extra_body: not supported (hint: put its fields into the body itself)"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}]},
            "messages[1].function_call: not supported (hint: use tool_calls)",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: got 'web_search', expected function (hint: the server runs no"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora: not supported (hint: omit the field; the server runs one model"),
        ({"n_indent": 4}, "n_indent: not supported"),
        ({"adaptive_target": 0}, "adaptive_target: not supported"),
        ({"grammar_lazy": True}, "grammar_lazy: not supported"),
        ({"grammar_triggers": [{"type": 0}]}, "grammar_triggers: not supported"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs: not supported"),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, "media_io_kwargs: not supported"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids: not supported"),
        ({"custom_params": {"a": 1}}, "custom_params: not supported"),
        ({"session_params": {"id": "x"}}, "session_params: not supported (hint: send the whole conversation"),
        ({"watermark": True}, "watermark: not supported"),
        ({"n": 2, "best_of": 3}, "best_of: not supported"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 3}},
            "thinking: not supported (hint: use reasoning.max_tokens, or chat_template_kwargs.enable_thinking with thinking_t",
        ),
    ],
    "completions": [
        ({"prompt_embeds": "AAAA"}, "prompt_embeds: not supported"),
        ({"multi_modal_data": {"image": "AAAA"}}, "multi_modal_data: not supported (hint: send media in the messages of"),
        ({"image_data": ["AAAA"]}, "image_data: not supported (hint: send media in the messages of"),
        ({"top_logprobs": 2}, "top_logprobs: not supported (hint: use logprobs)"),
        ({"reasoning_effort": "low"}, "reasoning_effort: not supported (hint: use thinking_token_budget)"),
        ({"reasoning": {"effort": "low"}}, "reasoning: not supported (hint: use thinking_token_budget)"),
        ({"tools": [TOOL]}, "tools: not supported"),
        ({"messages": HELLO}, "messages: not supported (hint: use prompt)"),
        ({"continue_final_message": True}, "continue_final_message: not supported"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs: not supported"),
        ({"enable_thinking": True}, "enable_thinking: not supported (hint: omit the field)"),
        ({"thinking": {"type": "enabled"}}, "thinking: not supported (hint: use thinking_token_budget)"),
        ({"best_of": 2}, "best_of: not supported"),
    ],
    "responses": [
        ({"add_generation_prompt": False}, "add_generation_prompt: not supported"),
        ({"max_tool_calls": 1}, "max_tool_calls: not supported (hint: use parallel_tool_calls)"),
        ({"include": ["message.output_text.logprobs"]}, "include: got 'message.output_text.logprobs', which is not supported"),
        ({"truncation": "auto"}, "truncation: not supported (hint: omit the field, and send a conversation that fits"),
        ({"top_logprobs": 2}, "top_logprobs: not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: not supported"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude: not supported"),
        ({"messages": HELLO}, "messages: not supported (hint: use input)"),
        ({"conversation": "x"}, "conversation: not supported"),
        ({"thinking": {"type": "enabled"}}, "thinking: not supported (hint: use reasoning.max_tokens, or chat_template"),
        ({"context_management": [{"type": "compaction"}]}, "context_management: not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: got 'web_search', expected function (hint: the server runs no"),
        ({"prompt": {"id": "x"}}, "prompt: not supported (hint: use input)"),
        ({"continue_final_message": True}, "continue_final_message: not supported"),
    ],
    "messages": [
        ({"logprobs": True}, "logprobs: not supported"),
        ({"top_logprobs": 2}, "top_logprobs: not supported"),
        ({"max_completion_tokens": 2}, "max_completion_tokens: not supported (hint: use max_tokens)"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type: got 'clear_tool_uses_20250919', which is not supported",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort: not supported (hint: use output_config.effort)"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers: not supported"),
        ({"container": "x"}, "container: not supported"),
        ({"tools": [{**CUSTOM, "input_examples": [{}]}]}, "tools[0].input_examples: not supported"),
        ({"tools": [CUSTOM, {**CUSTOM, "defer_loading": True}]}, "tools[1].defer_loading: not supported"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget: not supported"),
        (
            {"output_format": FORMAT, "output_config": {"format": FORMAT}},
            "output_format: cannot be combined with output_config.format",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice: got 'any', but the request has no tools"),
        ({"continue_final_message": True}, "continue_final_message: not supported"),
    ],
    "ollama chat": [
        ({"tool_choice": "required"}, "tool_choice: not supported"),
        ({"template": "{{ .Prompt }}"}, "template: not supported"),
        ({"options": {"logit_bias": {"5": 1}}}, "options.logit_bias: not supported"),
        ({"options": {"min_tokens": 5}}, "options.min_tokens: not supported"),
        ({"options": {"max_tokens": 5}}, "options.max_tokens: not supported (hint: use num_predict)"),
        ({"options": {"dry_multiplier": 0.8}}, "options.dry_multiplier: not supported"),
        ({"temperature": 0}, "temperature: not supported (hint: use options.temperature)"),
        ({"seed": 0}, "seed: not supported (hint: use options.seed)"),
        ({"max_tokens": 5}, "max_tokens: not supported (hint: use options.num_predict)"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported (hint: use format)"),
        ({"reasoning_effort": "low"}, "reasoning_effort: not supported (hint: use think)"),
        ({"system": "Be brief."}, "system: not supported (hint: use messages)"),
        ({"max_completion_tokens": 5}, "max_completion_tokens: not supported (hint: use options.num_predict)"),
        ({"min_tokens": 5}, "min_tokens: not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias: not supported"),
        ({"frequency_penalty": 1}, "frequency_penalty: not supported (hint: use options.frequency_penalty)"),
        ({"presence_penalty": 1}, "presence_penalty: not supported (hint: use options.presence_penalty)"),
        ({"repeat_penalty": 1.1}, "repeat_penalty: not supported (hint: use options.repeat_penalty)"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: not supported (hint: use options.repeat_penalty)"),
        ({"repeat_last_n": 0}, "repeat_last_n: not supported (hint: use options.repeat_last_n)"),
        ({"n": 2}, "n: not supported (hint: send several requests)"),
        ({"ignore_eos": True}, "ignore_eos: not supported"),
        ({"stop_sequences": ["x"]}, "stop_sequences: not supported (hint: use options.stop)"),
        ({"json_schema": {}}, "json_schema: not supported (hint: use format)"),
        ({"reasoning": {"effort": "low"}}, "reasoning: not supported (hint: use think)"),
        ({"thinking": {"type": "enabled"}}, "thinking: not supported (hint: use think)"),
        ({"enable_thinking": True}, "enable_thinking: not supported (hint: use think)"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs: not supported (hint: use think)"),
        ({"options": {"ignore_eos": True}}, "options.ignore_eos: not supported"),
        ({"options": {"repetition_penalty": 1.1}}, "options.repetition_penalty: not supported (hint: use repeat_penalty)"),
        ({"options": {"max_new_tokens": 5}}, "options.max_new_tokens: not supported (hint: use num_predict)"),
        ({"options": {"think": True}}, "options.think: not supported (hint: use think of the request itself)"),
        ({"options": {"format": "json"}}, "options.format: not supported (hint: use format of the request itself)"),
        ({"options": {"guided_choice": ["x"]}}, "options.guided_choice: not supported (hint: use guided_choice of the request"),
        ({"options": {"thinking_token_budget": 0}}, "options.thinking_token_budget: not supported (hint: use thinking_token_"),
    ],
    "ollama generate": [
        ({"n": 2}, "n: not supported"),
        ({"tools": [TOOL]}, "tools: not supported"),
        ({"template": "{{ .Prompt }}"}, "template: not supported"),
        ({"messages": HELLO}, "messages: not supported (hint: use prompt)"),
        ({"suffix": "x"}, "suffix: not supported"),
        ({"context": [5]}, "context: not supported"),
    ],
}
CASES = [(api, *case) for api, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("api", "fields", "problem"), CASES, ids=[f"{api}-{next(iter(case))}" for api, case, _ in CASES])
def test_fields_that_are_refused(fake: Running, api: str, fields: dict[str, Any], problem: str) -> None:
    status, message = send(fake, api, fields)
    assert status == 400
    assert message.startswith(problem)


NEUTRAL: dict[str, dict[str, Any]] = {
    "chat": {
        "stop_sequences": [], "max_output_tokens": None, "num_predict": -1, "format": "", "think": False,
        "separate_reasoning": True, "reasoning_budget": -1, "thinking_budget_tokens": None, "reasoning_format": "auto",
        "parse_tool_calls": True, "return_token_ids": False, "verbosity": "medium", "add_special_tokens": False,
        "chat_template": None, "prompt": "", "min_tokens": 0, "bad_words": [], "use_beam_search": False,
        "length_penalty": 1.0, "typical_p": 1, "ebnf": None, "best_of": 1, "suffix": None, "modalities": ["text"],
        "audio": None, "skip_special_tokens": True, "include_reasoning": True, "enable_thinking": False,
        "top_n_sigma": -1.0, "documents": [], "echo": False, "guided_json": None, "guided_choice": None, "grammar": "",
        "regex": "", "guided_regex": "", "do_sample": True, "num_beams": 1, "web_search_options": None, "json_schema": None,
        "repeat_last_n": 64, "t_max_predict_ms": 0, "input_ids": None, "extra_body": {}, "repetition_detection": None,
        "messages": [*HELLO, {"role": "assistant", "content": "x", "function_call": None}, *HELLO], "top_logprobs": 0,
        "lora": [], "n_indent": 0, "adaptive_target": -1.0, "grammar_lazy": False, "grammar_triggers": [], "vllm_xargs": {},
        "media_io_kwargs": None, "logprob_token_ids": [], "custom_params": None, "session_params": {}, "watermark": False,
    },
    "completions": {
        "prompt_embeds": None, "add_special_tokens": True, "top_logprobs": None, "reasoning_effort": None, "reasoning": {},
        "tools": [], "tool_choice": "auto", "messages": [], "continue_final_message": False, "add_generation_prompt": True,
    },
    "responses": {
        "add_generation_prompt": True, "max_tool_calls": None, "include": ["reasoning.encrypted_content"],
        "truncation": "disabled", "text": {"verbosity": "medium"}, "top_logprobs": 0, "user": "me", "metadata": {},
    },
    "messages": {
        "logprobs": False, "top_logprobs": 0, "max_completion_tokens": None, "metadata": {"user_id": "me"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [{**CUSTOM, "input_examples": [], "defer_loading": False}], "thinking": {"type": "disabled", "display": None},
    },
    "ollama chat": {
        "tool_choice": "auto", "template": "", "thinking_token_budget": None, "keep_alive": "5m",
        "options": {"logit_bias": {}, "min_tokens": 0, "dry_multiplier": 0.0, "num_ctx": 4096}, "seed": None,
        "n": 1, "frequency_penalty": 0, "repetition_penalty": 1.0, "ignore_eos": False, "parallel_tool_calls": True,
        "enable_thinking": False, "chat_template_kwargs": {}, "guided_choice": None, "structured_outputs": None,
    },
    "ollama generate": {"tools": [], "template": "", "context": None, "suffix": "", "messages": []},
}  # fmt: skip


@pytest.mark.parametrize("api", PATHS)
def test_values_that_change_nothing(fake: Running, api: str) -> None:
    assert send(fake, api, NEUTRAL[api]) == (200, "")


# Fields that are supported


def test_best_of_as_many_as_are_returned(fake: Running) -> None:
    for api in ("chat", "completions"):
        assert send(fake, api, {"n": 2, "best_of": 2}) == (200, "")


def test_template_options(tiny: Running) -> None:
    """Thinking adds a token to the prompt, whichever API is asked."""
    for api, field, counts in (
        ("chat", "max_tokens", lambda answer: answer["usage"]["prompt_tokens"]),
        ("responses", "max_output_tokens", lambda answer: answer["usage"]["input_tokens"]),
        (
            "messages",
            "max_tokens",
            lambda answer: answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"],
        ),
    ):
        path, body = PATHS[api]
        on, off = (
            counts(tiny.http.post(path, json={**body, field: 1, "chat_template_kwargs": {"enable_thinking": thinks}}).json())
            for thinks in (True, False)
        )
        assert on > off
    path, body = PATHS["responses"]
    on, off = (
        tiny.http.post(path, json={**body, "max_output_tokens": 1, "reasoning": {"enabled": thinks}}).json()
        for thinks in (True, False)
    )
    assert on["usage"]["input_tokens"] > off["usage"]["input_tokens"]


def test_completions_without_special_tokens(fake: Running) -> None:
    with_bos, without = (
        fake.http.post("/v1/completions", json={"prompt": prompt, "add_special_tokens": added}).json()["usage"]["prompt_tokens"]
        for prompt, added in (("Hello", True), (["Hello"], False))
    )
    assert with_bos == without + 1


def test_a_switch_of_thoughts_that_says_what_holds_anyway(scripted: Any) -> None:
    with scripted(settings={"enable_thinking": True}) as server:
        assert server.chat(enable_thinking=True, think=True).status_code == 200
        for name in ("enable_thinking", "think"):
            response = server.chat(**{name: False})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name


def test_the_smaller_of_two_lengths_counts(fake: Running) -> None:
    for api, name, usage in (
        ("chat", "max_completion_tokens", "completion_tokens"),
        ("completions", "max_completion_tokens", "completion_tokens"),
        ("responses", "max_output_tokens", "output_tokens"),
    ):
        path, body = PATHS[api]
        for fields in ({"max_tokens": 5, name: 3}, {"max_tokens": 3, name: 5}, {"max_tokens": 3, name: 3}):
            assert fake.http.post(path, json={**body, **fields}).json()["usage"][usage] == 3, (api, fields)


def test_requests_that_generate_nothing_refuse_fields_too(fake: Running) -> None:
    tools = [{**CUSTOM, "input_examples": [{}]}]
    counted = fake.http.post("/v1/messages/count_tokens", json={"messages": HELLO, "tools": tools})
    assert (counted.status_code, "tools[0].input_examples: not supported" in counted.text) == (400, True)
    status, problem = send(fake, "ollama chat", {"messages": [], "prompt": "Hello"})
    assert (status, problem) == (400, "prompt: not supported (hint: use messages)")


def test_any_max_tokens_of_messages_is_lowered(fake: Running) -> None:
    assert send(fake, "messages", {"max_tokens": 10**10}) == (200, "")


def test_an_error_about_the_length_names_no_other_field(fake: Running) -> None:
    status, problem = send(fake, "responses", {"max_output_tokens": 50_000})
    assert status == 400
    assert "50000 output tokens = " in problem
    assert "max_tokens" not in problem


# The rule itself

BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, OllamaChatRequest, OllamaGenerateRequest)


def given(body: type[Struct], **fields: Any) -> Struct:
    required: Any = {field.name: None for field in msgspec.structs.fields(body) if field.required}
    return body(**required, **fields)


@pytest.mark.parametrize("body", [*BODIES, OllamaOptions], ids=lambda body: body.__name__)
def test_every_refused_field_is_refused(body: type[Struct]) -> None:
    """The type of a field is enough. No list has to name it."""
    names = [field.name for field in msgspec.structs.fields(body) if field.type == Refused]
    assert names
    for name in names:
        with pytest.raises(UnsupportedError, match=rf"^{name}: not supported") as error:
            refuse_unsupported(given(body, **{name: msgspec.Raw(b'"x"')}))
        hint = error.value.hint
        if hint.startswith("use "):  # a field that these requests have, and that is not refused itself
            assert hint.removeprefix("use ").partition(".")[0] in set(body.__struct_fields__) - set(names)


def test_refused_fields_inside_others() -> None:
    options = OllamaOptions(tfs_z=msgspec.Raw(b"0.5"))
    with pytest.raises(UnsupportedError, match=r"^options\.tfs_z: not supported"):
        refuse_unsupported(OllamaChatRequest(model="gemma", options=options))
