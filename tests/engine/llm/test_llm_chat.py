"""LLM.chat and LLM.stream separate thoughts, text and tool calls. The engine is scripted; the last test uses a real model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from culet import LLM, SamplingParams
from culet.cli.chat import Conversation
from culet.cli.chat_screen import Screen
from culet.config import BUILT_IN, ScheduleConfig
from culet.engine.requests import RequestRules
from culet.errors import BadRequest
from culet.media.reader import MediaReader
from culet.media.spec import MediaSpec
from culet.models.checkpoint import open_checkpoint
from culet.serve.process.wire import Script
from culet.testing.fake_engine import FakeEngine
from culet.testing.tiny import write_checkpoint
from culet.text.template import ChatTemplate
from culet.text.tokenizer import Tokenizer
from culet.types import Request

HELLO = [{"role": "user", "content": "Hello"}]
THOUGHT = "<|channel>thought\nThe user greets me.\n<channel|>Good day.<turn|>"
CALL = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_response>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}]


class ScriptedEngine(FakeEngine):
    """The parts of Engine that LLM uses, with scripted answers."""

    def __init__(self, folder: Path, *answers: str, tokens_per_step: int = 1) -> None:
        checkpoint = open_checkpoint(str(folder))
        self.tokenizer = Tokenizer(folder)
        self.chat_template = ChatTemplate.of_checkpoint(folder, empty_thought=False)
        self.media = MediaReader(MediaSpec())
        self.rules = RequestRules(checkpoint.spec.vocab_size, checkpoint.defaults, 4096, 4096, 8)
        script = Script(tuple(tuple(self.tokenizer.encode(answer)) for answer in answers), tokens_per_step=tokens_per_step)
        super().__init__(script, ScheduleConfig(max_num_seqs=8, max_queue_len=8))

    def check_grammar(self, request: Request) -> None:
        """Accept every grammar."""

    def tool_call_grammar(self, tools: Any, document: Any = None) -> None:
        """Leave tool calls free."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "31B")


def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch, *answers: str, **options: Any) -> LLM:
    monkeypatch.setattr("culet.engine.llm.Engine", lambda config: ScriptedEngine(folder, *answers, **options))
    return LLM(str(folder))


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_thoughts_are_not_text(folder: Path, monkeypatch: pytest.MonkeyPatch, tokens_per_step: int) -> None:
    llm = scripted(folder, monkeypatch, THOUGHT, tokens_per_step=tokens_per_step)
    [result] = llm.chat(HELLO, enable_thinking=True)
    assert (result.text, result.reasoning, result.tool_calls) == ("Good day.", "The user greets me.", ())
    assert result.finish_reason == "stop"
    with llm.stream(HELLO, enable_thinking=True) as stream:
        deltas = list(stream)
    assert "".join(delta.reasoning for delta in deltas) == result.reasoning
    assert "".join(delta.text for delta in deltas) == result.text
    assert not any(delta.reasoning and delta.text for delta in deltas[: 2 if tokens_per_step == 1 else 1])
    # A plain prompt is not parsed.
    [plain] = llm.generate("Hello")
    assert plain.text == "thought\nThe user greets me.\nGood day."
    assert plain.reasoning == ""


def test_tool_calls_come_parsed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, CALL)
    [result] = llm.chat(HELLO, tools=TOOLS)
    [call] = result.tool_calls
    assert (call.name, call.arguments) == ("weather", {"city": "Paris", "days": 3})
    assert (result.text, result.finish_reason) == ("", "tool_calls")
    streamed = [call for delta in llm.stream(HELLO, tools=TOOLS) for call in delta.tool_calls]
    assert [(call.name, call.arguments) for call in streamed] == [(call.name, call.arguments)]


def test_without_tools_a_call_is_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, CALL)
    for tools in (None, []):
        [result] = llm.chat(HELLO, tools=tools)
        assert (result.text, result.tool_calls) == (CALL.removesuffix("<|tool_response>"), ())
        assert (result.finish_reason, result.stop_reason) == ("stop", None)
        assert "".join(delta.text for delta in llm.stream(HELLO, tools=tools)) == result.text


def test_a_budget_of_zero_turns_thinking_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, "Good day.<turn|>")
    budgets = [SamplingParams(thinking_token_budget=budget) for budget in (0, 1)]
    none, some = llm.chat([HELLO, HELLO], budgets, enable_thinking=True)
    assert none.prompt_token_ids == llm.chat(HELLO)[0].prompt_token_ids
    assert some.prompt_token_ids == llm.chat(HELLO, chat_template_kwargs={"enable_thinking": True})[0].prompt_token_ids
    assert none.prompt_token_ids != some.prompt_token_ids
    stream = llm.stream(HELLO, budgets[0], enable_thinking=True)
    assert stream._job.request.prompt_token_ids == none.prompt_token_ids


def test_arguments_of_earlier_calls_may_be_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, "Sunny.<turn|>")
    prompts = []
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        talk = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "sun"}]
        prompts.append(llm.chat(talk, tools=TOOLS)[0].prompt_token_ids)
    assert prompts[0] == prompts[1]


def test_what_is_not_sampling_params_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, "Hi.<turn|>")
    bad: Any
    for bad, kind in (({"max_tokens": 3}, "dict"), ("x", "str"), ([{"max_tokens": 3}], "dict"), (3, "int")):
        for call in (lambda bad=bad: llm.generate("Hi", bad), lambda bad=bad: llm.chat(HELLO, bad)):
            with pytest.raises(BadRequest, match=f"sampling_params: got {kind}, expected SamplingParams"):
                call()
    bad = {"max_tokens": 3}
    with pytest.raises(BadRequest, match="expected SamplingParams"):
        llm.stream("Hi", bad)
    for options in ({"bogus": 1}, {"enable_thinking": "false"}):
        with pytest.raises(BadRequest, match="chat_template_kwargs"):
            llm.chat(HELLO, chat_template_kwargs=options)


def test_results_have_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, "Hi.<turn|>")
    ids = [result.request_id for result in [*llm.generate(["a", "b"]), *llm.chat(HELLO)]]
    assert len(set(ids)) == 3
    assert all(ids)


def test_calls_without_marks_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, "call:weather{days:3}<turn|>")
    [result] = llm.chat(HELLO, tools=TOOLS)
    assert (result.text, result.tool_calls) == ("call:weather{days:3}", ())
    [result] = llm.chat(HELLO, tools=TOOLS, unmarked_tool_calls=True)
    assert (result.text, [call.arguments for call in result.tool_calls]) == ("", [{"days": 3}])
    streamed = [call for delta in llm.stream(HELLO, tools=TOOLS, unmarked_tool_calls=True) for call in delta.tool_calls]
    assert [call.arguments for call in streamed] == [{"days": 3}]


def test_an_empty_answer_after_a_thought_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = scripted(folder, monkeypatch, "<|channel>thought\nHm.\n<channel|><turn|>")
    [result] = llm.chat(HELLO, enable_thinking=True)
    assert (result.text, result.finish_reason, result.stop_reason) == ("", "stop", "empty_after_thinking")
    assert result.samples[0].warning.startswith("empty_after_thinking: the model ended its turn")
    assert list(llm.stream(HELLO, enable_thinking=True))[-1].stop_reason == "empty_after_thinking"
    assert scripted(folder, monkeypatch, THOUGHT).chat(HELLO)[0].stop_reason is None
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    Conversation(llm, SamplingParams(), Screen(markdown=False), system=None, enable_thinking=True).run("tiny")
    assert "[empty_after_thinking: the model ended its turn" in capsys.readouterr().err


def test_every_sample_has_its_own_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, THOUGHT, CALL)
    first, second = llm.chat([HELLO, HELLO], SamplingParams(n=3), tools=TOOLS, enable_thinking=True)
    assert [sample.reasoning for sample in first.samples] == ["The user greets me."] * 3
    assert [sample.text for sample in first.samples] == ["Good day."] * 3
    calls = [sample.tool_calls[0] for sample in second.samples]
    assert [call.arguments for call in calls] == [{"city": "Paris", "days": 3}] * 3
    assert len({call.id for call in calls}) == 3


def test_stop_strings_end_the_text_not_the_thought(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, "<|channel>thought\nday 1\n<channel|>Good day. More.<turn|>")
    [result] = llm.chat(HELLO, SamplingParams(stop=["day"], n=2), enable_thinking=True)
    assert [(sample.text, sample.reasoning, sample.finish_reason) for sample in result.samples] == [
        ("Good ", "day 1", "stop")
    ] * 2
    assert not [delta for delta in llm.engine.step() if delta.token_ids], "the engine was told that they have ended"
    assert not llm.engine.has_work


def test_token_ids_and_logprobs_are_those_of_all_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, THOUGHT)
    [result] = llm.chat(HELLO, SamplingParams(logprobs=2), enable_thinking=True)
    assert list(result.token_ids) == llm.engine.tokenizer.encode(THOUGHT)
    assert [next(iter(entry)) for entry in result.logprobs or ()] == list(result.token_ids)


def test_a_failed_step_ends_open_streams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted(folder, monkeypatch, THOUGHT)
    stream = llm.stream(HELLO)
    next(stream)

    def fail() -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", fail)
        with pytest.raises(RuntimeError, match="broken"):
            llm.generate("Hello")
    with pytest.raises(Exception, match="ended this request"):
        next(stream)


def test_the_built_in_model_thinks() -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(BUILT_IN, device="cpu", max_model_len=512) as llm:
        [result] = llm.chat(question, SamplingParams(temperature=0, max_tokens=120), enable_thinking=True)
        [direct] = llm.chat(question, SamplingParams(temperature=0, max_tokens=120))
        written = llm.engine.tokenizer.decode(result.token_ids, skip_special=False)
    assert "<|channel>" in written
    assert result.reasoning
    assert result.text
    assert result.reasoning not in result.text
    assert (direct.reasoning, bool(direct.text)) == ("", True)
