"""Media over HTTP, with a tiny model that sees and hears: every API, long conversations, and requests that must be refused."""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.serve.running import Running

GREEDY: dict[str, Any] = {"model": "gemma", "temperature": 0, "max_tokens": 4}


def picture(seed: int = 0) -> str:
    """Return a PNG as base64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def source() -> dict[str, str]:
    return {"type": "base64", "media_type": "image/png", "data": picture()}


def url(seed: int = 0) -> str:
    return f"data:image/png;base64,{picture(seed)}"


def image(seed: int = 0, detail: str = "low") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(seed), "detail": detail}}


def ask(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def count(server: Running, name: str) -> float:
    """Return a count of the engine. It reports after each answer, so before the next one."""
    assert server.chat(messages=ask(), **GREEDY).status_code == 200
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_openai_client(seeing):
    client = seeing.openai()
    answer = client.chat.completions.create(messages=ask(image()), **GREEDY)
    assert answer.usage.prompt_tokens > 60
    again = client.chat.completions.create(messages=ask(image()), stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in again) == answer.choices[0].message.content
    two = client.chat.completions.create(messages=ask(image(), image(1)), **GREEDY)
    assert two.usage.prompt_tokens - answer.usage.prompt_tokens == 62  # soft tokens, and marks around them
    body = {"messages": ask(image(detail="auto")), "mm_processor_kwargs": {"max_soft_tokens": 70}}
    assert seeing.http.post("/tokenize", json=body).json()["count"] == answer.usage.prompt_tokens


def test_the_other_apis_show_the_same_image(seeing):
    client = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)
    messages: Any = [
        {"role": "user", "content": [{"type": "image", "source": source()}, {"type": "text", "text": "What is it?"}]}
    ]
    seen = client.messages.create(model="gemma", max_tokens=4, messages=messages, extra_body={"temperature": 0})
    usage = seen.usage
    counted = client.messages.count_tokens(model="gemma", messages=messages).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 200

    content = [{"type": "input_image", "image_url": url()}, {"type": "input_text", "text": "What is it?"}]
    given: Any = [{"role": "user", "content": content}]
    response = seeing.openai().responses.create(model="gemma", input=given, temperature=0, max_output_tokens=4)
    assert response.usage.input_tokens == counted
    assert response.output_text == seen.content[0].text

    chat = {"role": "user", "content": "What is it?", "images": [picture()]}
    options = {"temperature": 0, "num_predict": 4}
    body = {"model": "gemma", "messages": [chat], "stream": False, "options": options}
    answer = seeing.http.post("/api/chat", json=body).json()
    assert answer["prompt_eval_count"] == counted
    assert "vision" in seeing.http.post("/api/show", json={"model": "gemma"}).json()["capabilities"]
    assert answer["message"]["content"] == seen.content[0].text


def test_audio(seeing):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(8000) / 10), 16000, format="WAV")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "wav"}}
    with_audio = seeing.chat(messages=ask(part), **GREEDY).json()["usage"]["prompt_tokens"]
    without = seeing.chat(messages=ask(), **GREEDY).json()["usage"]["prompt_tokens"]
    assert with_audio - without == 13 + 2


def test_a_long_conversation_encodes_its_image_once(seeing):
    names = ("culet:encoded_items_total", "culet:encoded_tokens_total")
    before = [count(seeing, name) for name in names]
    messages = ask(image(seed=7))
    num_earlier = 0
    for turn in range(20):
        answer = seeing.chat(messages=messages, **GREEDY).json()
        usage = answer["usage"]
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] >= num_earlier - 4
        num_earlier = usage["prompt_tokens"]
        text = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And number {turn}?"}]
    assert count(seeing, names[0]) - before[0] == 1
    assert count(seeing, names[1]) - before[1] == 60


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}], "not an image"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}], "base64"),
        ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], "URL"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "https"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}], "https"),
        ([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}], "allowed-media-domains"),
        ([{"type": "image", "path": "/etc/passwd"}], "messages[0].content[0]"),
        ([{"type": "video_url", "video_url": {"url": url()}}], "video"),
        ([{"type": "input_audio", "input_audio": {"data": picture()}}], "audio"),
        ([{"type": "file", "file": {"file_data": "data:text/plain;base64,QUJD"}}], "no image, video or audio"),
        ([image(), image(), image(), image()], "at most 3"),
        ([image(detail="extreme")], "detail"),
    ],
)
def test_hostile_requests_are_refused(seeing, parts, problem):
    reply = seeing.chat(messages=ask(*parts), **GREEDY)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]
    assert "root:" not in reply.text


def test_an_image_in_a_system_message_or_a_result_is_refused(seeing):
    """The template shows only their text. The error names the client's own field."""
    system = {"role": "system", "content": [image()]}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": [image()]}
    blocks = [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source()}]}]
    used = [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]
    output = [{"type": "input_image", "image_url": url()}]
    looked = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    cases = [
        ("/v1/chat/completions", {"messages": [system, *ask()]}, "messages[0].content[0]", "system"),
        (
            "/v1/chat/completions",
            {"messages": [*ask(), {"role": "assistant", "tool_calls": [call]}, result]},
            "messages[2].content[0]",
            "tool",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 4,
                "messages": [*ask(), {"role": "assistant", "content": used}, {"role": "user", "content": blocks}],
            },
            "messages[2].content[0].content[0]",
            "tool",
        ),
        (
            "/v1/responses",
            {"input": [looked, {"type": "function_call_output", "call_id": "1", "output": output}]},
            "input[1].output[0]",
            "tool",
        ),
    ]
    for path, body, name, role in cases:
        reply = seeing.http.post(path, json={"model": "gemma", **body})
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400
        assert message.startswith(f"{name}: the chat template shows no image in a message with the role {role}"), message


def test_a_placeholder_that_the_model_draws_is_text(seeing):
    """It is not taken for an image, in the same answer or when the answer is sent back."""
    before = count(seeing, "culet:encoded_items_total")
    messages = ask(image(seed=11))
    drawn = seeing.chat(messages=messages, logit_bias={"112": 100}, **GREEDY).json()
    assert drawn["usage"]["completion_tokens"] == 4
    messages += [{"role": "assistant", "content": "<|image|><|image|>"}, {"role": "user", "content": "And now?"}]
    assert seeing.chat(messages=messages, **GREEDY).status_code == 200
    assert count(seeing, "culet:encoded_items_total") - before == 1


def test_the_media_of_a_request_fit_the_context(seeing):
    reply = seeing.chat(messages=ask(*[image(seed, "high") for seed in range(3)]), **GREEDY)
    assert (reply.status_code, "but the context holds 2048" in reply.text) == (400, True)


def test_a_body_that_is_too_large_names_the_setting(seeing):
    huge = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (17 << 20)}}
    reply = seeing.chat(messages=ask(huge), **GREEDY)
    assert (reply.status_code, "body_mb" in reply.text) == (413, True)


def test_a_model_without_towers_says_so(fake):
    reply = fake.chat(messages=ask(image()))
    assert (reply.status_code, "this model reads only text" in reply.text) == (400, True)
