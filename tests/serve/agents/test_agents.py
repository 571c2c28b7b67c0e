"""What agents need, over HTTP with a tiny random model: calls that parse, parts of calls, thinking budgets, `min_tokens`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from tests.serve.running import Running
from tests.serve.test_structured_requests import HELLO, TOOLS

WEATHER = TOOLS[0]["function"]["parameters"]


@pytest.fixture(scope="module")
def mark(encode: Callable[[str], list[int]]) -> Callable[[str], str]:
    """Return a function that gives the id of a special token, as a key of `logit_bias`."""
    return lambda name: str(encode(name)[0])


def events(server: Running, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    with server.http.stream("POST", path, json={"model": "gemma", "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def test_calls_of_auto_fit_their_schema(tiny: Running, mark: Callable[[str], str]) -> None:
    """The model opens a call because of the bias. The call is valid because of the grammar, unless a switch turns it off."""
    fields: Any = {"messages": HELLO, "tools": TOOLS, "max_tokens": 300, "parallel_tool_calls": False}
    fields["logit_bias"] = {mark("<|tool_call>"): 100.0}
    names = []
    for seed in range(3):
        (choice,) = tiny.chat(**fields, seed=seed).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        function = choice["message"]["tool_calls"][0]["function"]
        names.append(function["name"])
        if function["name"] == "get_weather":
            jsonschema.validate(json.loads(function["arguments"]), WEATHER)
    assert set(names) <= {"get_weather", "get_time"}
    (choice,) = tiny.chat(**fields, seed=0, constrain_tool_calls=False).json()["choices"]
    assert "tool_calls" not in choice["message"]
    assert "<|tool_call>" in choice["message"]["content"]


def test_without_tools_a_call_is_text(tiny: Running, mark: Callable[[str], str]) -> None:
    fields: Any = {"messages": HELLO, "max_tokens": 8, "logit_bias": {mark("<|tool_call>"): 100.0}}
    (choice,) = tiny.chat(**fields).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("<|tool_call>" * 8, "length")
    assert "tool_calls" not in choice["message"]
    answer = tiny.http.post("/v1/messages", json=fields).json()
    assert answer["content"] == [{"type": "text", "text": "<|tool_call>" * 8}]
    body = {"input": "Hello", "max_output_tokens": 8, "logit_bias": fields["logit_bias"]}
    answer = tiny.http.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == "<|tool_call>" * 8


def test_tools_that_cannot_be_held_still_work(fake: Running) -> None:
    """Their schemas are too large for a grammar, so `auto` allows any arguments and `required` is refused."""
    many = {"type": "object", "properties": {f"key{index}": {"type": "string"} for index in range(450)}}
    tools = [{"type": "function", "function": {"name": "wide", "parameters": many}}]
    fields: Any = {"messages": HELLO, "tools": tools, "max_tokens": 4}
    assert fake.chat(**fields).status_code == 200
    assert "calls to wide are not checked against its schema; any arguments are allowed: the schemas are too" in fake.log()
    response = fake.chat(**fields, tool_choice="required")
    assert response.status_code == 400
    assert "too large" in response.json()["error"]["message"]


@pytest.mark.parametrize("repeats", [False, True])
def test_parts_of_calls_in_chat(tiny: Running, mark: Callable[[str], str], repeats: bool) -> None:
    fields: Any = {"messages": HELLO, "tools": TOOLS[:1], "max_tokens": 300, "parallel_tool_calls": False, "seed": 4}
    fields |= {"logit_bias": {mark("<|tool_call>"): 100.0}, "temperature": 1.0}
    whole = tiny.chat(**fields).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    chunks = list(events(tiny, "/v1/chat/completions", **fields, stream_options={"repeat_tool_call_ids": repeats}))
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == whole["arguments"]
    assert len(calls) > 5
    assert all(call["type"] == "function" and call["index"] == 0 for call in calls)
    assert calls[0]["function"]["name"] == whole["name"]
    assert calls[0]["id"].startswith("call_")
    for call in calls[1:]:
        assert call.get("id") == (calls[0]["id"] if repeats else None)
        assert call["function"].get("name") == (whole["name"] if repeats else None)


def test_openai_client_joins_the_parts(tiny: Running, mark: Callable[[str], str]) -> None:
    with tiny.openai().chat.completions.stream(
        model="gemma",
        messages=HELLO,
        tools=TOOLS,
        max_tokens=300,
        seed=4,
        parallel_tool_calls=False,
        logit_bias={mark("<|tool_call>"): 18},
    ) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert (call.type, call.function.name in ("get_weather", "get_time")) == ("function", True)
    assert isinstance(json.loads(call.function.arguments), dict)


def test_parts_of_calls_in_responses(tiny: Running) -> None:
    function = TOOLS[0]["function"]
    fields: Any = {"input": "Hello", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    fields |= {"max_output_tokens": 400, "parallel_tool_calls": False}
    got = list(events(tiny, "/v1/responses", **fields))
    parts = [event["delta"] for event in got if event["type"] == "response.function_call_arguments.delta"]
    (done,) = [event for event in got if event["type"] == "response.function_call_arguments.done"]
    assert len(parts) > 5
    assert "".join(parts) == done["arguments"] == got[-1]["response"]["output"][-1]["arguments"]
    jsonschema.validate(json.loads(done["arguments"]), WEATHER)


def test_parts_of_calls_in_messages(tiny: Running) -> None:
    function = TOOLS[0]["function"]
    fields: Any = {"messages": HELLO, "max_tokens": 400, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    fields["tools"] = [{"name": function["name"], "input_schema": function["parameters"]}]
    got = list(events(tiny, "/v1/messages", **fields))
    parts = [event["delta"]["partial_json"] for event in got if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(parts) > 5
    jsonschema.validate(json.loads("".join(parts)), WEATHER)
    starts = [event["content_block"] for event in got if event["type"] == "content_block_start"]
    assert [(block["type"], block["name"]) for block in starts] == [("tool_use", "get_weather")]


def test_a_call_that_is_cut(tiny: Running, mark: Callable[[str], str]) -> None:
    """With and without streaming, the answer has the beginning of the call, and the finish reason says that it was cut."""
    fields: Any = {"messages": HELLO, "tools": TOOLS[:1], "seed": 4, "logit_bias": {mark("<|tool_call>"): 30.0}}
    fields["max_tokens"] = 24
    (choice,) = tiny.chat(**fields).json()["choices"]
    assert choice["finish_reason"] == "length"
    chunks = list(events(tiny, "/v1/chat/completions", **fields))
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments
    assert arguments == choice["message"]["tool_calls"][0]["function"]["arguments"]


# Thinking budgets


THINKS: Any = {"messages": HELLO, "max_tokens": 40, "temperature": 1.0, "seed": 1}


def biased(mark: Callable[[str], str]) -> dict[str, float]:
    """Return a bias by which the model opens thoughts and never closes one."""
    return {mark("<|channel>"): 18.0, mark("<channel|>"): -100.0}


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_token_budget": 0}, 0),
        ({"reasoning": {"max_tokens": 5}}, 5),
        ({"reasoning_effort": "low", "reasoning": {"max_tokens": 9}}, 9),
    ],
)
def test_budgets_in_chat(tiny: Running, mark: Callable[[str], str], fields: dict[str, Any], budget: int) -> None:
    answer = tiny.chat(**THINKS, **fields, logit_bias=biased(mark)).json()
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == budget
    assert details["thinking_budget_reached"] is (budget > 0)  # nothing was thought with a budget of 0
    assert answer["usage"]["completion_tokens"] == 40


def test_a_budget_of_zero_turns_thinking_off(tiny: Running) -> None:
    """Then the prompt is the one without thoughts, whatever else the request says."""

    def num_prompt(**fields: Any) -> int:
        answer = tiny.http.post("/v1/chat/completions", json={"model": "gemma", "messages": HELLO, "max_tokens": 1, **fields})
        return int(answer.json()["usage"]["prompt_tokens"])

    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    off, on = num_prompt(), num_prompt(**thinks)
    assert off != on == num_prompt(**thinks, thinking_token_budget=1)
    for fields in (thinks, {"reasoning_effort": "low"}, {"reasoning": {"enabled": True}}):
        assert num_prompt(**fields, thinking_token_budget=0) == off
    assert num_prompt(**thinks, reasoning={"max_tokens": 0}) == off
    body: Any = {"model": "gemma", "messages": HELLO, "max_tokens": 1, "thinking": {"type": "adaptive"}}
    messages = tiny.http.post("/v1/messages", json={**body, "thinking_token_budget": 0}).json()
    body = {"model": "gemma", "messages": HELLO, "stream": False, "options": {"num_predict": 1}, "think": True}
    ollama = tiny.http.post("/api/chat", json={**body, "thinking_token_budget": 0}).json()
    assert [sum(messages["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_")), ollama["prompt_eval_count"]] == [
        off
    ] * 2


def test_completions_say_whether_the_budget_was_reached(tiny: Running, mark: Callable[[str], str]) -> None:
    body = {"model": "gemma", "prompt": "Hello", "max_tokens": 40, "temperature": 1.0, "seed": 1, "logit_bias": biased(mark)}
    for budget, reached in ((7, True), (0, False), (None, False)):
        usage = tiny.http.post("/v1/completions", json={**body, "thinking_token_budget": budget}).json()["usage"]
        details = usage["completion_tokens_details"]
        assert details["thinking_budget_reached"] is reached
        assert details["reasoning_tokens"] == budget if budget is not None else details["reasoning_tokens"] > 7


def test_efforts_are_budgets(folder: Any, mark: Callable[[str], str]) -> None:
    config = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4}
    with Running(folder, config=config, settings={"thinking_budgets": "low=3,high=11"}) as server:
        for effort, num_reasoning in (("low", 3), ("high", 11), ("medium", 40)):
            usage = server.chat(**THINKS, reasoning_effort=effort, logit_bias=biased(mark)).json()["usage"]
            # The thought opens with the first tokens, and without a budget it goes on to the end.
            found = usage["completion_tokens_details"]["reasoning_tokens"]
            assert found == num_reasoning if effort != "medium" else found > 11
            assert usage["completion_tokens_details"]["thinking_budget_reached"] is (effort != "medium")
        body = {"messages": HELLO, "max_tokens": 40, "thinking": {"type": "adaptive"}, "logit_bias": biased(mark)}
        for effort in ("low", "medium"):
            usage = server.http.post("/v1/messages", json=body | {"output_config": {"effort": effort}}).json()["usage"]
            assert usage["thinking_budget_reached"] is (effort == "low")
        body = {"input": "Hello", "max_output_tokens": 40, "reasoning_effort": "low", "logit_bias": biased(mark)}
        usage = server.http.post("/v1/responses", json=body).json()["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": 3, "thinking_budget_reached": True}


def test_other_apis_take_budgets(tiny: Running) -> None:
    fields: Any = {"max_tokens": 30, "messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 1}}
    answer = tiny.http.post("/v1/messages", json=fields).json()
    assert "thinking_budget_reached" in answer["usage"]
    fields = {"input": "Hello", "max_output_tokens": 30, "reasoning": {"effort": "low", "max_tokens": 0}}
    answer = tiny.http.post("/v1/responses", json=fields).json()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 0, "thinking_budget_reached": False}


def test_an_empty_answer_after_a_thought_says_so(scripted: Callable[..., Running]) -> None:
    with scripted("<|channel>thought\nHm, let me see.<channel|><turn|>") as server:
        (choice,) = server.chat(messages=HELLO).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "empty_after_thinking")
        assert choice["warning"].startswith("empty_after_thinking: the model ended its turn after ")
        for more in ({}, {"logprobs": True}):
            last = [chunk for chunk in events(server, "/v1/chat/completions", messages=HELLO, **more) if chunk["choices"]][-1]
            ends = [last["choices"][0], server.chat(messages=HELLO, **more).json()["choices"][0]]
            for end in ends:
                assert [end[name] for name in ("stop_reason", "warning")] == ["empty_after_thinking", choice["warning"]]
        answer = server.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 90}).json()
        assert (answer["stop_reason"], answer["warning"]) == ("end_turn", choice["warning"])
        delta = next(e for e in events(server, "/v1/messages", messages=HELLO, max_tokens=90) if e["type"] == "message_delta")
        assert delta["delta"]["warning"] == choice["warning"]
        answer = server.http.post("/v1/responses", json={"input": "Hello"}).json()
        assert (answer["status"], answer["stop_reason"]) == ("completed", "empty_after_thinking")
        assert answer["warning"] == choice["warning"]
        last = list(events(server, "/v1/responses", input="Hello"))[-1]["response"]
        assert (last["stop_reason"], last["warning"]) == ("empty_after_thinking", choice["warning"])
        answer = server.http.post("/api/chat", json={"model": "gemma", "messages": HELLO, "stream": False}).json()
        assert (answer["done_reason"], answer["warning"]) == ("stop", choice["warning"])
        (choice,) = server.chat(messages=HELLO, max_tokens=4).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "empty_after_thinking")
        assert "max_tokens was reached" in choice["warning"]


def test_other_answers_have_no_stop_reason(fake: Running) -> None:
    for more in ({}, {"logprobs": True}):
        assert not {"stop_reason", "warning"} & fake.chat(messages=HELLO, **more).json()["choices"][0].keys()


# Calls without the tokens around them


@pytest.mark.parametrize("is_setting", [False, True], ids=["field", "setting"])
def test_unmarked_calls(scripted: Callable[..., Running], is_setting: bool) -> None:
    text = 'I will ask. call:get_weather{city:<|"|>Paris<|"|>}<turn|>'
    tools = TOOLS[:1]
    asked: Any = {} if is_setting else {"unmarked_tool_calls": True}
    with scripted(text, settings={"unmarked_tool_calls": is_setting}) as server:
        (choice,) = server.chat(messages=HELLO, tools=tools, **asked).json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("I will ask. ", "tool_calls")
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
        chunks = list(events(server, "/v1/chat/completions", messages=HELLO, tools=tools, **asked))
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I will ask. "
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(call["function"]["arguments"] for call in calls) == call["function"]["arguments"]
        own = [{"name": "get_weather", "input_schema": tools[0]["function"]["parameters"]}]
        answer = server.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 90, "tools": own, **asked}).json()
        assert (answer["stop_reason"], answer["content"][-1]["input"]) == ("tool_use", {"city": "Paris"})
        own = [{"type": "function", **tools[0]["function"]}]
        answer = server.http.post("/v1/responses", json={"input": "Hello", "tools": own, **asked}).json()
        assert answer["output"][-1]["name"] == "get_weather"
        (choice,) = server.chat(messages=HELLO, tools=tools, guided_regex="I.*", **asked).json()["choices"]
        assert choice["message"]["content"] == "I will ask. call:get_weather{city:Paris}"
        refused: Any = {"unmarked_tool_calls": False} if is_setting else {}
        for fields in ({"tools": tools, **refused}, {"tools": tools[:0], **asked}, {"tools": TOOLS[1:2], **asked}):
            (choice,) = server.chat(messages=HELLO, **fields).json()["choices"]
            assert choice["message"]["content"] == "I will ask. call:get_weather{city:Paris}"


# The least number of tokens


def test_min_tokens_in_every_api(tiny: Running, mark: Callable[[str], str]) -> None:
    bias = {mark("<turn|>"): 100.0}
    fields: Any = {"min_tokens": 12, "max_tokens": 40}
    usage = tiny.chat(messages=HELLO, **fields, logit_bias=bias).json()["usage"]
    assert usage["completion_tokens"] == 13
    assert tiny.chat(messages=HELLO, max_tokens=40, logit_bias=bias).json()["usage"]["completion_tokens"] < 12
    answer = tiny.http.post("/v1/completions", json={"model": "gemma", "prompt": "x", **fields, "logit_bias": bias}).json()
    assert answer["usage"]["completion_tokens"] == 13
    answer = tiny.http.post("/v1/messages", json={"messages": HELLO, **fields}).json()
    assert answer["usage"]["output_tokens"] >= 12
    answer = tiny.http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 40, "min_tokens": 12}).json()
    assert answer["usage"]["output_tokens"] >= 12
    response = tiny.chat(messages=HELLO, min_tokens=5, max_tokens=4)
    assert response.status_code == 400
    assert "min_tokens" in response.json()["error"]["message"]


def test_no_stop_string_ends_an_answer_before_min_tokens(tiny: Running) -> None:
    fields: Any = {"max_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True, "stop": list("abcdefghijklmnop")}
    for least in (0, 9):
        usage = tiny.chat(messages=HELLO, **fields, min_tokens=least).json()["usage"]
        plain = tiny.http.post("/v1/completions", json={"model": "gemma", "prompt": "x", **fields, "min_tokens": least}).json()
        found = [usage["completion_tokens"], plain["usage"]["completion_tokens"]]
        assert (min(found) > 9) if least else (max(found) < 9)


def test_a_form_that_is_complete_ends_before_min_tokens(tiny: Running) -> None:
    fields: Any = {"messages": HELLO, "min_tokens": 30, "max_tokens": 60, "guided_choice": ["red", "green"]}
    answer = tiny.chat(**fields).json()
    assert answer["choices"][0]["message"]["content"] in ("red", "green")
    assert answer["choices"][0]["finish_reason"] == "stop"
