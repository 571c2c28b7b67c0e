"""Stored responses through the official `openai` client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.serve.running import Running
from tests.serve.test_responses import CALL, TOOL

ALICE, BOB = "secret-of-alice", "secret-of-bob"
ANSWERS = (f"<|channel>thought\nWhich city?<channel|>Let me see.{CALL}<|tool_response>", "Sun.<channel|>It is sunny.<turn|>")


@pytest.fixture(scope="module")
def storing(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server that stores responses and has two keys. It calls a tool and answers, in turn."""
    with scripted(*ANSWERS, settings={"store_responses": True, "api_key": f"{ALICE},{BOB}"}) as server:
        yield server


def ask(client: openai.OpenAI, stream: bool = False, **fields: Any) -> Any:
    fields = {"model": "gemma", "tools": [TOOL], "reasoning": {"effort": "low"}, **fields}
    if not stream:
        return client.responses.create(**fields)
    return list(client.responses.create(**fields, stream=True))[-1].response


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_continues(storing: Running, stream: bool) -> None:
    client = storing.openai()
    first = ask(client, stream, input="What is the weather?", instructions="Be brief.")
    assert first.store is True
    (call,) = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = ask(client, stream, input=[result], instructions="Be brief.", previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("It is sunny.", first.id)

    again = ask(client, stream, input="What is the weather?", instructions="Be brief.")  # the same, sent as a whole
    whole: Any = [{"role": "user", "content": "What is the weather?"}, *again.output]
    calls = [item for item in again.output if item.type == "function_call"]
    whole.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"})
    sent = ask(client, stream, input=whole, instructions="Be brief.")
    assert sent.usage.input_tokens == second.usage.input_tokens

    found = client.responses.retrieve(second.id)
    assert (found.id, found.output_text, found.usage) == (second.id, "It is sunny.", second.usage)


def test_other_keys_see_nothing(storing: Running) -> None:
    alice, bob = storing.openai(), storing.openai().copy(api_key=BOB)
    answer = ask(alice, input="Hello")
    ask(alice, input="Hello")  # keeps the answers in step
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        bob.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.delete(answer.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: the response") as error:
        ask(bob, input="Hello", previous_response_id=answer.id)
    assert error.value.code == "previous_response_not_found"
    assert "(hint: send the whole conversation in input; " in str(error.value)
    assert alice.responses.retrieve(answer.id).id == answer.id
    alice.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(answer.id)


def test_a_client_may_ask_not_to_store(storing: Running) -> None:
    answer = ask(storing.openai(), input="Hello", store=False)
    ask(storing.openai(), input="Hello")
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        storing.openai().responses.retrieve(answer.id)


def test_without_the_flag(fake: Running) -> None:
    answer = fake.openai().responses.create(model="gemma", input="Hello", store=True)
    assert answer.store is False
    with pytest.raises(openai.BadRequestError, match="--store-responses"):
        fake.openai().responses.create(model="gemma", input="Hello", previous_response_id=answer.id)
    with pytest.raises(openai.NotFoundError, match="--store-responses"):
        fake.openai().responses.retrieve(answer.id)
