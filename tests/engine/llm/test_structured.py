"""Structured output through the engine: a random model constrained by a schema writes valid documents.

A random model writes nonsense, so every valid document is due to the grammar. Look-ahead, drafts, forked samples, preemption
and neighbours without a grammar change no token.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from culet import LLM, SamplingParams
from culet.errors import BadRequest
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from culet.structured.compiler import GrammarCompiler
from culet.testing.tiny import write_checkpoint
from culet.text.tokenizer import Tokenizer
from culet.types import Request, StructuredOutputs
from tests.engine.runner.test_runner import GEMMA, MISTAKES, Rig

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": -5, "maximum": 5},
        "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "left"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cutter", "buyer", 3, None]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "height": {"type": "number", "minimum": 0.5, "maximum": 2.5},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
    "tree": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "formats": {
        "type": "object",
        "properties": {
            "on": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "ok": {"const": True},
        },
        "required": ["on", "code", "ok"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B", dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", max_model_len=1024, max_num_seqs=16)


def params(schema: Any, seed: int, **others: Any) -> SamplingParams:
    form = StructuredOutputs(json=schema)
    return SamplingParams(**{"max_tokens": 200, "seed": seed, "temperature": 1.0, "structured_outputs": form, **others})


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_an_answer_is_a_document_or_calls(llm: LLM, bias: float) -> None:
    weather = {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]},
    }
    opens = llm.get_tokenizer().convert_tokens_to_ids("<|tool_call>")
    asked = params({"enum": ["yes", "no"]}, 3, max_tokens=40, logit_bias={opens: bias})
    (result,) = llm.chat([{"role": "user", "content": "Hi"}], asked, tools=[{"type": "function", "function": weather}])
    if bias < 0:
        assert json.loads(result.text) in ("yes", "no")
    else:
        assert not result.text.strip()
        assert all(call.arguments["days"] in (1, 2) for call in result.tool_calls if call.is_complete)
        assert result.tool_calls[0].is_complete


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_finished_document_is_valid(llm: LLM, name: str) -> None:
    """This holds at every temperature, with penalties and biases that work against the grammar."""
    pulls: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 5.0, "top_k": 0, "top_p": 1.0},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": {106: 100.0, 1: 100.0, 500: 100.0}},
        {"min_p": 0.5, "top_k": 2},
        {},
    ]
    settings = [params(SCHEMAS[name], seed, **pull) for pull in pulls for seed in range(2)]
    num_whole = 0
    for result in llm.generate(["The stone"] * len(settings), settings):
        assert result.finish_reason in ("stop", "length"), result.samples[0].error
        if result.finish_reason == "stop":
            num_whole += 1
            jsonschema.validate(json.loads(result.text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    assert num_whole >= len(settings) * 2 // 3


def test_regex_choice_grammar_and_json_object(llm: LLM) -> None:
    forms = [
        StructuredOutputs(regex=r"[A-F]{2}-[0-9]{4}"),
        StructuredOutputs(choice=["yes", "no", 'it "depends"\n']),
        StructuredOutputs(grammar='start: "<" NAME ">" /[0-9]/ "</" NAME ">"\nNAME: "a" | "b"'),
        StructuredOutputs(grammar='root ::= "x" [0-9] ("," [0-9])?'),
        StructuredOutputs(json_object=True),
    ]
    settings = [SamplingParams(max_tokens=200, seed=seed, structured_outputs=form) for form in forms for seed in range(4)]
    results = llm.generate(["A"] * len(settings), settings)
    texts = [[result.text for result in results[begin : begin + 4]] for begin in range(0, len(results), 4)]
    assert all(re.fullmatch(r"[A-F]{2}-[0-9]{4}", text) for text in texts[0])
    assert set(texts[1]) <= {"yes", "no", 'it "depends"\n'}
    assert all(re.fullmatch(r"<[ab]>[0-9]</[ab]>", text) for text in texts[2])
    assert all(re.fullmatch(r"x[0-9](,[0-9])?", text) for text in texts[3])
    whole = [result.text for result in results[16:] if result.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


def test_samples_and_neighbours(llm: LLM) -> None:
    """Samples of one prompt differ, and a neighbour without a grammar draws the same tokens as on its own."""
    alone = llm.generate("The diamond", SamplingParams(max_tokens=30, seed=5)).pop()
    settings = [params(SCHEMAS["person"], 1, n=4, temperature=3.0), SamplingParams(max_tokens=30, seed=5)]
    first, second = llm.generate(["The stone", "The diamond"], settings)
    assert second.token_ids == alone.token_ids
    texts = [sample.text for sample in first.samples if sample.finish_reason == "stop"]
    assert len(set(texts)) == len(texts) >= 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS["person"])


def test_thinking_comes_first(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    opens, closes = tokenizer.token_id("<|channel>"), tokenizer.token_id("<channel|>")
    talk = [{"role": "user", "content": "Why?"}]
    # Biases make the random model open and close a thought.
    wishes = params(SCHEMAS["either"], 3, max_tokens=300, logit_bias={opens: 100.0, closes: 9.0})
    result = llm.chat(talk, wishes, enable_thinking=True).pop()
    tokens = list(result.token_ids)
    assert tokens[0] == opens
    assert result.finish_reason == "stop"
    end = tokens.index(closes)
    assert end > 1
    document = tokenizer.decode(tokens[end + 1 :])
    jsonschema.validate(json.loads(document), SCHEMAS["either"])
    assert not set(tokens[1:end]) & set(tokenizer.special_ids)
    # Without thinking it cannot open a thought.
    result = llm.chat(talk, wishes).pop()
    assert opens not in result.token_ids
    jsonschema.validate(json.loads(result.text), SCHEMAS["either"])


def test_look_ahead_changes_nothing(folder: Path, llm: LLM) -> None:
    """A row with a grammar waits for its last token while others run ahead. No tokens change."""
    settings = [params(SCHEMAS[name], seed) for name in ("person", "tree") for seed in range(3)]
    settings += [SamplingParams(max_tokens=60, seed=seed) for seed in range(3)]
    prompts = [f"The stone {index}" for index in range(len(settings))]
    expected = [result.token_ids for result in llm.generate(prompts, settings)]
    with LLM(str(folder), device="cpu", max_model_len=1024, max_num_seqs=16, async_scheduling=True) as ahead:
        assert ahead.engine._max_in_flight == 2
        assert [result.token_ids for result in ahead.generate(prompts, settings)] == expected


def test_preemption_changes_nothing(folder: Path, llm: LLM) -> None:
    settings = [params(SCHEMAS["person"], seed, max_tokens=120) for seed in range(8)]
    prompts = [f"Tell me a story about a diamond, {index}" for index in range(8)]
    expected = [result.token_ids for result in llm.generate(prompts, settings)]
    slab = llm.engine.layout.slab_bytes
    with LLM(str(folder), device="cpu", max_model_len=200, max_num_seqs=8, kv_cache_memory_bytes=24 * slab) as tight:
        assert [result.token_ids for result in tight.generate(prompts, settings)] == expected
        assert tight.engine.stats().counters.preemptions > 0


def test_cancel_while_compiling_and_bad_schemas(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.engine
    monkeypatch.setattr(engine._grammars._check, "time_limit_s", 1.0)
    request = engine.rules.make_request("gone", [5, 6], params({"const": "never seen before"}, 1))
    engine.add(request)
    engine.cancel("gone")
    while engine.has_work:
        engine.step()
    engine.step()
    assert llm.generate("A", params({"const": "good"}, 1)).pop().text == '"good"'
    with pytest.raises(BadRequest, match=r"prompt 1: structured_outputs\.json: invalid type"):
        llm.generate(["A", "B"], [SamplingParams(max_tokens=1), params({"type": "strin"}, 1)])
    endless = {"allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967, 9949, 9941)]}
    with pytest.raises(BadRequest, match="compiling it took more than 1 s"):
        llm.generate("A", params(endless, 1))
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_pages + stats.num_resume_point_pages == stats.num_pages


def test_a_grammar_that_becomes_too_complex_ends_only_its_request(llm: LLM) -> None:
    settings = [
        SamplingParams(max_tokens=200, seed=1, structured_outputs=StructuredOutputs(regex=r"((\w{1,50}){1,50}){1,50}")),
        params({"const": 5}, 1),
    ]
    first, second = llm.generate(["A", "B"], settings)
    assert (first.finish_reason, second.finish_reason) == ("error", "stop")
    assert first.samples[0].error.startswith("structured output:")
    assert second.text == "5"


# Drafts


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"), progress=False)


class ClairvoyantDrafter:
    """Proposes the tokens that sequences will draw, with mistakes where `is_wrong` says so, and nonsense after their ends."""

    taps = ()
    group = None
    max_drafts = 4

    def __init__(self, outputs: dict[int, list[int]], is_wrong: Any) -> None:
        self.outputs, self.is_wrong = outputs, is_wrong  # prompt and output, by first prompt token
        self.tokens_SL: Any = None  # set to the runner's

    def propose(self, batch: Any, pool: Any, num_drafts: int) -> torch.Tensor:
        rows = []
        for slot, length in zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True):
            output = self.outputs[int(self.tokens_SL[slot, 0])]
            ahead = (output[length + 1 :] + [0] * num_drafts)[:num_drafts]
            rows.append([token + self.is_wrong(length + 1 + index) for index, token in enumerate(ahead)])
        return torch.tensor(rows)


class GrammarRig(Rig):
    """A Rig whose runner supports grammars."""

    def __init__(self, model: Any, folder: Path, **options: Any) -> None:
        super().__init__(model, **options)
        checkpoint = open_checkpoint(str(folder))
        end_ids = checkpoint.defaults.eos_token_ids
        self.runner.use_grammars(GrammarCompiler.for_tokenizer(Tokenizer(folder), model.spec.vocab_size, end_ids))


@dataclass(frozen=True)
class Drawn:
    """What requests draw without a drafter."""

    requests: list[Request]
    tokens: dict[tuple[str, int], list[int]]
    num_steps: int


@pytest.fixture(scope="module")
def drawn(model: Any, folder: Path) -> Drawn:
    """Three documents and a free text."""
    form = StructuredOutputs(json=SCHEMAS["formats"]).spec()
    free = Request("free", (201, 140, 150), replace(GEMMA, seed=4), 1, 60, frozenset({1, 106}))
    requests = [
        replace(
            free, request_id=f"r{seed}", prompt_token_ids=(202 + seed, 130), sampling=replace(GEMMA, seed=seed), grammar=form
        )
        for seed in range(3)
    ]
    requests = [replace(request, max_tokens=120) for request in requests] + [free]
    plain = GrammarRig(model, folder, max_num_seqs=4)
    expected = plain.run(*requests)
    for request in requests[:3]:
        tokens = expected[request.request_id, 0][0]
        assert tokens[-1] in request.stop_token_ids
        jsonschema.validate(json.loads(Tokenizer(folder).decode(tokens)), SCHEMAS["formats"])
    return Drawn(requests, {key: tokens for key, (tokens, _, _) in expected.items()}, len(plain.results))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_drafts_change_nothing_but_the_number_of_steps(model: Any, folder: Path, drawn: Drawn, mistake: str) -> None:
    """Proposals may be right, wrong or against the grammar. The drawn tokens are the same as without them."""
    outputs = {
        request.prompt_token_ids[0]: [*request.prompt_token_ids, *drawn.tokens[request.request_id, 0]]
        for request in drawn.requests
    }
    drafter = ClairvoyantDrafter(outputs, MISTAKES[mistake])
    rig = GrammarRig(model, folder, max_num_seqs=4, drafter=drafter)
    out = rig.run(*drawn.requests)
    assert {key: tokens for key, (tokens, _, _) in out.items()} == drawn.tokens
    if mistake == "always right":
        assert len(rig.results) < drawn.num_steps / 2
    else:
        assert rig.scheduler.counters.rolled_back_tokens > 0
