"""From TokenDeltas to OutputDeltas, which both `LLM` and the server rely on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from culet.engine.requests import resolve_sampling
from culet.text.output import OutputDelta, SampleOutput, chat_output, plain_output
from culet.text.tokenizer import Tokenizer
from culet.types import FinishReason, ModelDefaults, Request, SamplingParams, TokenDelta
from tests.unit.text.output_streams import CITY, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def make_request(tokenizer: Tokenizer, params: SamplingParams, prompt: str = "hi") -> Request:
    sampling = resolve_sampling(params, ModelDefaults(), tokenizer.vocab_size)
    stop_ids = frozenset() if params.ignore_eos else frozenset({tokenizer.token_id("<turn|>")})
    return Request("r", tuple(tokenizer.encode(prompt)), sampling, 1, 100, stop_ids | frozenset(params.stop_token_ids))


WEATHER = [{"type": "function", "function": {"name": "weather"}}]


def chat(
    tokenizer: Tokenizer,
    *,
    prompt: str = "hi",
    tools: Any = WEATHER,
    single_call: bool = False,
    calls_hold: bool = False,
    **params: Any,
) -> SampleOutput:
    given = SamplingParams(**params)
    request = make_request(tokenizer, given, prompt)
    return chat_output(tokenizer, request, given, tools=tools, single_call=single_call, calls_hold=calls_hold)


def plain(tokenizer: Tokenizer, *, prompt: str = "hi", **params: Any) -> SampleOutput:
    given = SamplingParams(**params)
    return plain_output(tokenizer, make_request(tokenizer, given, prompt), given)


def feed(
    output: SampleOutput, token_ids: list[int], size: int = 1, end: FinishReason | None = None, logprobs: bool = False
) -> list[OutputDelta]:
    """Push the tokens in groups of `size` until the output ends. `end` is the engine's finish reason for the last group."""
    deltas = []
    for begin in range(0, len(token_ids), size):
        group = tuple(token_ids[begin : begin + size])
        scores = tuple({token: -float(token)} for token in group) if logprobs else ()
        is_last = begin + size >= len(token_ids)
        deltas.append(output.push(TokenDelta("r", 0, group, scores, finish_reason=end if is_last else None)))
        if output.finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_chat_separates_thoughts_text_and_calls(tokenizer: Tokenizer, size: int) -> None:
    output = chat(tokenizer)
    ids = tokenizer.encode(f"<|channel>thought\nhm\n<channel|>I look.{CITY}<turn|>")
    deltas = feed(output, ids, size, FinishReason.STOP)
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.text for delta in deltas) == "I look."
    (call,) = [call for delta in deltas for call in delta.tool_calls]
    assert (call.name, call.arguments) == ("weather", {"city": "Paris"})
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["tool_calls"]
    whole = output.output()
    assert (whole.text, whole.reasoning, whole.tool_calls) == ("I look.", "hm", (call,))
    assert output.token_ids == [token for delta in deltas for token in delta.token_ids] == ids


@pytest.mark.parametrize(("thought", "count"), [("a", "1 token"), ("a b c d e f", "[0-9]+ tokens")])
def test_an_empty_answer_counts_the_thought(tokenizer: Tokenizer, thought: str, count: str) -> None:
    output = chat(tokenizer, prompt="hi<|channel>thought\n")
    feed(output, tokenizer.encode(f"{thought}<channel|><turn|>"), end=FinishReason.STOP)
    assert re.search(f"ended its turn after {count} of thought, without an answer", output.warning)


@pytest.mark.parametrize("before", ["", CITY])
def test_a_call_that_a_stop_token_cuts_is_no_call(tokenizer: Tokenizer, before: str) -> None:
    output = chat(tokenizer, calls_hold=True)
    feed(output, tokenizer.encode(f'{before}<|tool_call>call:weather{{city:<|"|>Par'), end=FinishReason.STOP)
    assert not output.output().tool_calls[-1].is_complete
    assert output.finish_reason == "stop"


def test_a_plain_completion_is_all_text(tokenizer: Tokenizer) -> None:
    output = plain(tokenizer)
    deltas = feed(output, tokenizer.encode(f"<|channel>thought\nhm<channel|>{CITY}"), end=FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "thought\nhmcall:weather{city:Paris}"
    assert not any(delta.reasoning or delta.tool_calls for delta in deltas)
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("yes", 0),
        ("<|channel>abc<channel|>yes", 3),
        ("<|channel>abc<channel|>yes<|channel>de<channel|>", 5),
        ("<|channel>abc", 3),
        ("<|channel>abc<|tool_call>yes", 3),
        ("<|channel>abc<turn|>", 3),
        ("<channel|>yes", 0),
    ],
)
@pytest.mark.parametrize("prompt", ["hi", "<|channel>", "<|channel>a<channel|>hi"])
def test_plain_completions_count_thoughts_as_chats_do(tokenizer: Tokenizer, prompt: str, text: str, count: int) -> None:
    both = [make(tokenizer, prompt=prompt, thinking_token_budget=3) for make in (plain, chat)]
    for output in both:
        feed(output, tokenizer.encode(text), end=FinishReason.LENGTH)
        assert output.is_thought_out is (output.output().num_thought_tokens >= 3)
    found = [output.output().num_thought_tokens for output in both]
    assert found[0] == found[1]
    assert prompt == "<|channel>" or found[0] == count
    assert both[0].warning == ""


def test_without_tools_a_call_is_text(tokenizer: Tokenizer) -> None:
    for tools in (None, []):
        output = chat(tokenizer, tools=tools)
        deltas = feed(output, tokenizer.encode(f"<|channel>hm<channel|>Well.{CITY}{CITY} Yes.<turn|>"), end=FinishReason.STOP)
        assert "".join(delta.text for delta in deltas) == output.output().text == f"Well.{CITY}{CITY} Yes."
        assert (output.output().tool_calls, output.finish_reason, output.output().reasoning) == ((), "stop", "hm")
        assert output.warning == ""


@pytest.mark.parametrize("make", [chat, plain])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stop_string_ends_the_sample_and_drops_the_rest(tokenizer: Tokenizer, make: Any, size: int) -> None:
    output = make(tokenizer, stop=["STOP"])
    ids = tokenizer.encode("one STOP two")
    deltas = feed(output, ids, size)
    assert "".join(delta.text for delta in deltas) == "one "
    assert (output.finish_reason, output.output().stop) == ("stop", "STOP")
    assert tokenizer.decode(output.token_ids) == "one STOP"
    assert sum(len(delta.token_ids) for delta in deltas) == len(output.token_ids) < len(ids)


def test_a_stop_token_leaves_no_text(tokenizer: Tokenizer) -> None:
    (mark,) = tokenizer.encode("!")
    for make in (chat, plain):
        output = make(tokenizer, stop_token_ids=[mark])
        feed(output, tokenizer.encode("yes!"), end=FinishReason.STOP)
        assert (output.output().text, output.finish_reason, output.token_ids[-1]) == ("yes", "stop", mark)


def test_text_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    output = plain(tokenizer, stop=["STOP"])
    *others, last = feed(output, tokenizer.encode("a ST"), end=FinishReason.LENGTH)
    assert "".join(delta.text for delta in others) == "a "
    assert (last.text, last.finish_reason) == ("ST", "length")


@pytest.mark.parametrize("reason", [FinishReason.CANCEL, FinishReason.TIMEOUT, FinishReason.ERROR])
def test_the_engines_reason_wins(tokenizer: Tokenizer, reason: FinishReason) -> None:
    output = chat(tokenizer)
    feed(output, tokenizer.encode(CITY))
    delta = output.push(TokenDelta("r", 0, (), finish_reason=reason, error="why"))
    assert (delta.finish_reason, delta.error, output.error) == (reason.value, "why", "why")


@pytest.mark.parametrize("size", [1, 1000])
def test_a_single_call_ends_the_sample(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode(CITY + CITY)
    output = chat(tokenizer, single_call=True)
    deltas = feed(output, ids, size)
    assert output.finish_reason == deltas[-1].finish_reason == "tool_calls"
    assert len(output.output().tool_calls) == 1
    assert len(output.token_ids) == len(ids) // 2
    both = chat(tokenizer)
    feed(both, ids, size, FinishReason.STOP)
    assert len(both.output().tool_calls) == 2


@pytest.mark.parametrize("size", [1, 1000])
def test_a_single_call_that_is_cut_is_no_call(tokenizer: Tokenizer, size: int) -> None:
    output = chat(tokenizer, single_call=True)
    feed(output, tokenizer.encode(CITY)[:-4], size, FinishReason.LENGTH)
    assert output.finish_reason == "length"


def test_tools_decide_what_bare_words_mean(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"zip": {"type": "string"}}}}}]
    ids = tokenizer.encode("<|tool_call>call:f{zip:7}<tool_call|>")
    typed, untyped = chat(tokenizer, tools=tools), chat(tokenizer, tools=[{"function": {"name": "f"}}])
    for output in (typed, untyped):
        feed(output, ids, end=FinishReason.STOP)
    assert typed.output().tool_calls[0].arguments == {"zip": "7"}
    assert untyped.output().tool_calls[0].arguments == {"zip": 7}


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_visible_logprobs_leave_out_thoughts_and_markup(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode("<|channel>thought\nhm\n<channel|>ok<turn|>")
    output = chat(tokenizer, logprobs=1)
    deltas = feed(output, ids, size, FinishReason.STOP, logprobs=True)
    assert [token for token, _ in output.visible_logprobs] == tokenizer.encode("ok")
    assert [entry for delta in deltas for entry in delta.visible_logprobs] == output.visible_logprobs
    assert output.logprobs == [{token: -float(token)} for token in ids]
    text = plain(tokenizer, logprobs=1)
    feed(text, ids, size, FinishReason.STOP, logprobs=True)
    assert [token for token, _ in text.visible_logprobs] == ids


def test_an_open_thought_in_the_prompt(tokenizer: Tokenizer) -> None:
    output = chat(tokenizer, prompt="<|turn>model\n<|channel>thought\n")
    feed(output, tokenizer.encode("hm<channel|>yes"), end=FinishReason.LENGTH)
    assert (output.output().reasoning, output.output().text) == ("hm", "yes")


def test_drafts_are_counted(tokenizer: Tokenizer) -> None:
    output = plain(tokenizer)
    first = output.push(TokenDelta("r", 0, (300, 301), num_accepted_drafts=1, num_rejected_drafts=2, num_cached_tokens=5))
    output.push(TokenDelta("r", 0, (302,), num_rejected_drafts=3))
    assert (first.num_accepted_drafts, first.num_rejected_drafts, first.num_cached_tokens) == (1, 2, 5)
    assert (output.num_accepted_drafts, output.num_rejected_drafts) == (1, 5)
    assert 0 < output.first_token_at <= output.last_token_at
