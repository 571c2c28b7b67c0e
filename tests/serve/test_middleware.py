"""Which requests are accepted: keys, origins, host names, bounds on every field, and errors that reveal nothing internal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serve.running import Running, wait_for

HELLO: Any = [{"role": "user", "content": "Hello"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def locked(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server with two keys and one allowed origin, which logs JSON."""
    settings = {"api_key": "first-key,second-key", "allowed_origins": "https://good.example", "log_format": "json"}
    with scripted(settings=settings) as server:
        yield server


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"x-api-key": "second-key"},
    ],
)
def test_valid_keys_are_accepted(locked: Running, headers: dict[str, str]) -> None:
    assert httpx.get(f"{locked.url}/v1/models", headers=headers, verify=False).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer first-key,second-key"},
        {"authorization": "Bearer first-ke\xe9"},
        {"x-api-key": "first-key "[:-2]},
    ],
)
@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/chat/completions", "/stats", "/plan.svg", "/version", "/openapi.json", "/metrics", "/nope"],
)
def test_nothing_is_accepted_without_a_key(locked: Running, path: str, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = httpx.get(f"{locked.url}{path}", headers=raw, verify=False)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["//v1/models", "/health/../v1/models", "/health/", "/health%2f..%2fv1/models", "/./v1/models", "/HEALTH", "*"]
)
def test_similar_paths_are_not_public(locked: Running, path: str) -> None:
    """Paths that look like a public path are not public."""
    import socket

    with socket.create_connection(("127.0.0.1", locked.port)) as sock:
        sock.settimeout(60)
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-forwarded-prefix: /v1\r\nconnection: close\r\n\r\n".encode())
        status = sock.recv(4096).split()[1]
    assert status in (b"401", b"400")


def test_public_paths(locked: Running) -> None:
    for path in ("/health", "/ready"):
        assert httpx.get(f"{locked.url}{path}", verify=False).status_code == 200
        assert httpx.post(f"{locked.url}{path}", json={}, verify=False).status_code == 401


def test_the_client_raises_its_own_exception(locked: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_origins(locked: Running, fake: Running) -> None:
    """Pages of other origins are refused unless their origin is allowed."""
    ask = {"origin": "https://good.example", "access-control-request-method": "POST"}
    assert httpx.options(f"{locked.url}/v1/models", headers=ask).headers["access-control-allow-origin"] == ask["origin"]
    bad = ask | {"origin": "https://bad.example"}
    assert "access-control-allow-origin" not in httpx.options(f"{locked.url}/v1/models", headers=bad).headers
    for answer in (fake.http.options("/v1/models", headers=ask), fake.http.get("/v1/models", headers=ask)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_foreign_host_names(fake: Running, locked: Running) -> None:
    """Without a key, a server that listens only locally refuses foreign host names (DNS rebinding)."""
    for host, status in (
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
    ):
        assert fake.http.get("/v1/models", headers={"host": host}).status_code == status
    assert locked.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 200, "the key says who it is"


def test_only_json(fake: Running) -> None:
    """Pages of other sites can send forms without permission, so forms are refused."""
    body = json.dumps({"messages": HELLO})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = fake.http.post("/v1/chat/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == 415


def test_request_ids(fake: Running) -> None:
    assert fake.chat().headers["x-request-id"] != fake.chat().headers["x-request-id"]
    given = fake.http.get("/v1/models", headers={"x-request-id": "job-17.a:b"})
    assert given.headers["x-request-id"] == "job-17.a:b"
    refused = fake.http.get("/v1/models", headers={"x-request-id": "no good id!"})
    assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])


def test_log_lines_are_json(locked: Running) -> None:
    locked.http.post("/v1/chat/completions", json={"messages": HELLO}, headers={"x-request-id": "logged"})
    locked.http.get("/a%0ab")

    def logged() -> list[dict[str, Any]]:  # a thread writes the log
        lines = [json.loads(line) for line in locked.log().rpartition("\n")[0].splitlines()]
        return [line for line in lines if line.get("request_id") == "logged"]

    (entry,) = wait_for(logged, what="the line of the log")
    assert (entry["status"], entry["path"], entry["finish"]) == (200, "/v1/chat/completions", "stop")
    assert entry["generated_tokens"] > 5
    assert entry["first_token_s"] > 0
    assert "first-key" not in locked.log()


def test_paths_and_methods(fake: Running) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("PUT", "/v1/models", 405),
        ("POST", "/docs", 405),
    ):
        answer = fake.http.request(method, path, headers=JSON)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert ("allow" in answer.headers) is (status == 405)
    assert fake.http.put("/v1/models").headers["allow"] == "GET, HEAD"
    refused = fake.http.get("/v1/chat/completions")
    assert (refused.headers["allow"], refused.json()["error"]["message"]) == (
        "POST",
        "the path does not support GET (hint: use POST)",
    )


BAD_FIELDS: list[tuple[str, str]] = [
    ("temperature", "NaN"),
    ("temperature", "1e999"),
    ("temperature", "-0.1"),
    ("temperature", '"hot"'),
    ("temperature", "true"),
    ("top_p", "-0.5"),
    ("top_p", "1.5"),
    ("top_k", "-2"),
    ("top_k", "99999999999999999999"),
    ("min_p", "2"),
    ("n", "0"),
    ("n", "17"),
    ("n", "100000"),
    ("n", "1.5"),
    ("max_tokens", "-1"),
    ("max_tokens", "0"),
    ("max_tokens", "4294967296"),
    ("max_completion_tokens", "0"),
    ("seed", "99999999999999999999999"),
    ("stop", '""'),
    ("stop", json.dumps(["x"] * 17)),
    ("stop", '[""]'),
    ("stop_token_ids", "[-1]"),
    ("stop_token_ids", "[4000000]"),
    ("presence_penalty", "3"),
    ("repetition_penalty", "0"),
    ("logit_bias", '{"x": 1}'),
    ("logit_bias", '{"5": 101}'),
    ("logit_bias", '{"-5": 1}'),
    ("logit_bias", '{"4000000": 1}'),
    ("logit_bias", json.dumps(dict.fromkeys(map(str, range(1025)), 1))),
    ("top_logprobs", "3"),
    ("priority", "1001"),
    ("messages", "[]"),
    ("messages", '"hi"'),
    ("messages", '[{"role": "robot", "content": "x"}]'),
    ("messages", '[{"role": "user"}]'),
    ("messages", '[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]'),
    ("messages", '[{"role": "user", "content": [{"type": "text"}]}]'),
    ("messages", '[{"role": "user", "content": "\\ud800"}]'),
    ("messages", '[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{"}}]}]'),
    ("messages", '[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"[]"}}]}]'),
    ("messages", "[" * 3000),
    ("tools", '[{"type": "function", "function": {"name": "two words"}}]'),
    ("tools", json.dumps([{"type": "function", "function": {"name": "f"}}] * 129)),
    ("tool_choice", '"maybe"'),
    ("tool_choice", '"required"'),
    ("chat_template", '"{{ 7 * 7 }}"'),
    ("chat_template_kwargs", '{"messages": []}'),
    ("stream", '"yes"'),
    ("model", "7"),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_bad_fields(fake: Running, field: str, value: str) -> None:
    """Each bad field gives a 400 that names the field and reveals nothing internal."""
    parts = {"messages": json.dumps(HELLO), field: value}
    body = "{" + ",".join(f'"{name}": {part}' for name, part in parts.items()) + "}"
    answer = fake.http.post("/v1/chat/completions", content=body.encode("utf-8", "surrogatepass"), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert not re.search(r"Traceback|File \"|/culet/|0x[0-9a-f]{6}|msgspec", error["message"])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": 1}', b'"' + b"x" * 1000, b'{"a":' * 2000]
)
def test_invalid_bodies(fake: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert fake.http.post(path, content=body, headers=JSON).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [""]},
        {"prompt": [1, "x"]},
        {"prompt": [[]]},
        {"prompt": [4000000]},
        {"prompt": ["x"] * 129},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "logprobs": 21},
        {"prompt": "x", "best_of": 2},
        {"prompt": "x", "suffix": "y"},
        {},
    ],
)
def test_bad_completions(fake: Running, fields: dict[str, Any]) -> None:
    answer = fake.http.post("/v1/completions", json=fields)
    # An empty text is not an empty prompt, because the prompt begins with <bos>.
    assert answer.status_code == (200 if fields.get("prompt") in ("", [""]) else 400), answer.text


def test_tokenize_and_detokenize(fake: Running) -> None:
    text = "A cut gem: ünïcode, \N{GEM STONE}, <|turn>"
    tokens = fake.http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert fake.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == f"<bos>{text}"
    assert fake.http.post("/detokenize", json={"tokens": [4000000]}).status_code == 400
    chat = fake.http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    rendered = fake.http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert rendered.startswith("<bos><|turn>user\nHello<turn|>\n<|turn>model\n")


def test_a_chat_is_counted_as_it_is_answered(fake: Running) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    counts = set()
    for fields in (
        {},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "none"},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning": {"enabled": True}},
        {"reasoning": {"enabled": True}, "thinking_token_budget": 0},
        {"reasoning": {"enabled": True, "max_tokens": 0}},
        {"reasoning_effort": "low", "thinking_token_budget": 9},
    ):
        body = {"messages": HELLO, "temperature": 0, **fields}
        count = fake.http.post("/tokenize", json=body).json()["count"]
        assert count == fake.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"], fields
        counts.add(count)
    assert len(counts) == 3


@pytest.mark.parametrize(
    "fields", [{"chat_template": "x"}, {"enable_thinking": True}, {"system": "x"}, {"extra_body": {"n": 2}}]
)
def test_fields_that_would_change_the_tokens_are_refused(fake: Running, fields: dict[str, Any]) -> None:
    answer = fake.http.post("/tokenize", json={"messages": HELLO, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *fields)
    neutral = {"chat_template": None, "enable_thinking": False, "system": "", "extra_body": {}, "stop_sequences": ["x"]}
    assert fake.http.post("/tokenize", json={"messages": HELLO, **neutral}).status_code == 200


def test_texts_of_tokens(fake: Running) -> None:
    text = "A cut gem. " * 600  # more than one step
    answer = fake.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]) == f"<bos>{text}"
    assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])
    assert fake.http.post("/tokenize", json={"prompt": text}).json()["token_strs"] is None
    plain = fake.http.post("/detokenize", json={"tokens": answer["tokens"], "skip_special_tokens": True}).json()
    assert plain["prompt"] == text
    bad = fake.http.post("/detokenize", json={"tokens": [*answer["tokens"], 4000000]}).json()["error"]
    assert bad["param"] == f"tokens[{answer['count']}]"


def test_thinking_is_off_by_default(fake: Running) -> None:
    def has_thought(fields: dict[str, Any]) -> bool:
        tokens = fake.http.post("/tokenize", json={"messages": HELLO, **fields}).json()["tokens"]
        return "<|think|>" in fake.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]

    assert not has_thought({})
    assert has_thought({"chat_template_kwargs": {"enable_thinking": True}})


def walk(schema: Any, place: str = "") -> Iterator[str]:
    """Yield the paths in a JSON schema that are not bounded."""
    if isinstance(schema, list):
        for index, inner in enumerate(schema):
            yield from walk(inner, f"{place}[{index}]")
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "integer" and not {"minimum", "maximum"} <= set(schema):
        yield place
    if kind == "number" and not ({"maximum"} <= set(schema) and {"minimum", "exclusiveMinimum"} & set(schema)):
        yield place
    if kind == "array" and "maxItems" not in schema:
        yield place
    if kind == "string" and not {"maxLength", "pattern", "enum", "const"} & set(schema):
        yield place
    for name, inner in schema.items():
        yield from walk(inner, f"{place}.{name}")


def test_every_field_is_bounded(fake: Running) -> None:
    document = fake.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    bodies = {
        content["schema"]["$ref"].rsplit("/", 1)[1]
        for path in document["paths"].values()
        for operation in path.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
    }
    assert {"ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest", "TranscriptionRequest"} <= bodies
    todo, seen = list(bodies), set()
    while todo:
        name = todo.pop()
        seen.add(name)
        assert list(walk(schemas[name])) == [], name
        todo += [ref for ref in re.findall(r"schemas/(\w+)", json.dumps(schemas[name])) if ref not in seen]
