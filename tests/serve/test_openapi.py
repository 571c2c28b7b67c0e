"""Requests generated from our own OpenAPI document, valid and invalid. None may end in a 500, a hang or a dead server.

The fake engine runs behind the real process boundary, so everything between a socket and the engine is tested.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from culet.testing.tiny import write_checkpoint
from culet.text.tokenizer import Tokenizer
from tests.serve.media.test_audio import recording
from tests.serve.running import Running

LIMIT_S = 60.0  # per answer, on a busy machine
NUM_DEFAULT, NUM_FULL = 50, 2000


def sensible(body: Any) -> Any:
    """Make a generated body plausible, with the served model and lengths that fit. The rest stays as generated."""
    if not isinstance(body, dict):
        return body
    body = {**body, "model": "gemma"}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = 1 + body[name] % 64
    for name, most in (("n", 4), ("top_logprobs", 20), ("best_of", 1)):
        if isinstance(body.get(name), int):
            body[name] = 1 + body[name] % most
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    for name in (
        "stop_token_ids",
        "logit_bias",
        "response_format",
        "structured_outputs",
        "tool_choice",
        "text",
        "output_format",
    ):
        body.pop(name, None)  # invalid ids and meaningless schemas, which the other half keeps
    for name in ("background", "previous_response_id"):
        body.pop(name, None)
    if isinstance(body.get("messages"), list) and len(str(body)) % 2:  # half of the conversations make sense, too
        body["messages"] = [{"role": "user", "content": "Hello"}]
        body.pop("prompt", None)
    if isinstance(body.get("tools"), list) and body["tools"]:  # generated schemas become a grammar
        is_anthropic = all(isinstance(tool, dict) and "input_schema" in tool for tool in body["tools"])
        body["tool_choice"] = {"type": "any"} if is_anthropic else "required"
    if isinstance(body.get("tokens"), list):
        body["tokens"] = [token % 300 for token in body["tokens"] if isinstance(token, int)]
    return body


def fuzz(server: Running, count: int) -> Counter[int]:
    """Return the statuses of `count` answers. A status of 500 or above, or a missing answer, fails the test."""
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    assert {operation.path for operation in posts} >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    }
    statuses: Counter[int] = Counter()
    for operation in operations:
        number = -(-count // len(posts)) if operation.method == "post" else max(1, count // 100)
        good, bad = operation.as_strategy(GenerationMode.POSITIVE), operation.as_strategy(GenerationMode.NEGATIVE)
        strategy = st.one_of(good.map(_plausible), good.map(_plausible), good, bad) if operation.method == "post" else good
        _run(server, strategy, number, statuses)
    return statuses


def _plausible(case: Any) -> Any:
    case.body = sensible(case.body)
    return case


def _run(server: Running, strategy: Any, number: int, statuses: Counter[int]) -> None:
    @hypothesis.seed(number)
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def send(case: Any) -> None:
        began = time.monotonic()
        response = case.call(base_url=server.url, timeout=LIMIT_S)
        seconds = time.monotonic() - began
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{response.status_code} {response.text[:300]} for {case.as_curl_command()[:2000]}"
        assert seconds < LIMIT_S

    send()


def check(scripted: Callable[..., Running], count: int) -> None:
    with scripted() as server:
        statuses = fuzz(server, count)
        total = sum(statuses.values())
        good = sum(number for status, number in statuses.items() if status < 300)
        print(f"{total} requests: {dict(sorted(statuses.items()))}")
        assert total >= count
        assert good >= count // 4, statuses
        assert statuses[400] >= count // 20, "the requests are too tame"
        server.check_well()
        assert "Traceback" not in server.log()


def test_generated_requests(scripted: Callable[..., Running]) -> None:
    check(scripted, NUM_DEFAULT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_generated_requests(scripted: Callable[..., Running]) -> None:
    check(scripted, NUM_FULL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generated_forms(tmp_path: Path) -> None:
    """The model of the other tests does not hear. This one does, and half of the forms have a recording that can be read."""
    speech = recording()

    def hear(case: Any) -> Any:
        case = _plausible(case)
        if isinstance(case.body, dict):
            case.body["file"] = speech
        return case

    folder = write_checkpoint(tmp_path, "E4B", towers=True)
    with Running(folder, script={"answers": [Tokenizer(folder).encode("A gem.<turn|>")]}) as server:
        schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
        operations = [found for result in schema.get_all_operations() if (found := result.ok()).path.startswith("/v1/audio/")]
        assert len(operations) == 2
        for operation in operations:
            good, bad = operation.as_strategy(GenerationMode.POSITIVE), operation.as_strategy(GenerationMode.NEGATIVE)
            statuses: Counter[int] = Counter()
            _run(server, st.one_of(good.map(hear), good.map(hear), good, bad), 150, statuses)
            assert min(statuses[200], statuses[400]) > 20, statuses
        server.check_well()
        assert "Traceback" not in server.log()
