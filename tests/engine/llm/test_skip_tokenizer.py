"""A checkpoint without tokenizer.json serves token ids, offline and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from culet import LLM, AsyncLLM, SamplingParams
from culet.errors import BadRequest, CheckpointError
from culet.testing.tiny import write_checkpoint
from culet.types import StructuredOutputs
from tests.serve.running import Running

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
PROMPT = [2, 17, 23, 42]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole"), "E2B")


@pytest.fixture(scope="module")
def expected(whole: Path) -> tuple[int, ...]:
    """The tokens that follow PROMPT."""
    with LLM(str(whole), **SETTINGS) as llm:
        return llm.generate(PROMPT, GREEDY)[0].token_ids


@pytest.fixture(scope="module")
def folder(whole: Path, expected: tuple[int, ...]) -> Path:
    """The same checkpoint without the files of its tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (whole / name).unlink(missing_ok=True)
    return whole


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), skip_tokenizer_init=True, **SETTINGS) as llm:
        yield llm


def test_without_the_setting_the_hint_names_it(folder: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        LLM(str(folder), **SETTINGS)
    assert "--skip-tokenizer-init" in error.value.hint


def test_token_ids(llm: LLM, expected: tuple[int, ...]) -> None:
    [result] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    assert (result.token_ids, result.text) == (expected, "")
    [stopped] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[expected[3]]))
    assert stopped.token_ids == expected[: expected.index(expected[3]) + 1]
    assert len([delta for delta in llm.stream(PROMPT, GREEDY) if delta.token_ids]) == len(expected)


def test_text_is_refused(llm: LLM) -> None:
    for ask in (
        lambda: llm.generate("Hello", GREEDY),
        lambda: llm.chat([{"role": "user", "content": "Hello"}], GREEDY),
        lambda: llm.generate(PROMPT, SamplingParams(stop="end")),
        lambda: llm.generate(PROMPT, SamplingParams(structured_outputs={"regex": "[0-9]+"})),
        lambda: llm.generate(PROMPT, SamplingParams(thinking_token_budget=5)),
        lambda: llm.get_tokenizer().encode("Hello"),
    ):
        with pytest.raises(BadRequest, match="the tokenizer was not loaded"):
            ask()
    form = replace(StructuredOutputs(regex="[0-9]+").spec(), field="guided_regex")
    with pytest.raises(BadRequest, match="guided_regex: it applies to text"):
        llm.generate(PROMPT, SamplingParams(structured_outputs=form))  # type: ignore[arg-type]


def test_async_llm(folder: Path, expected: tuple[int, ...]) -> None:
    async def run(llm: AsyncLLM) -> Any:
        return [result async for result in llm.generate(PROMPT, GREEDY)][-1]

    with AsyncLLM(str(folder), skip_tokenizer_init=True, **SETTINGS) as llm:
        assert asyncio.run(run(llm)).token_ids == expected


@pytest.mark.slow
def test_the_server(folder: Path, expected: tuple[int, ...]) -> None:
    with Running(folder, config={**SETTINGS, "skip_tokenizer_init": True}) as server:
        fields: Any = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        def complete(**more: Any) -> Any:
            return server.http.post("/v1/completions", json={**fields, **more})

        (choice,) = complete(logprobs=1).json()["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", list(expected))
        assert complete(echo=True).json()["choices"][0]["prompt_token_ids"] == PROMPT
        assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in expected]
        with server.openai().completions.create(model="gemma", **fields_of(fields), stream=True) as stream:
            streamed = [token_id for chunk in stream for token_id in chunk.choices[0].token_ids]  # type: ignore[attr-defined]
        assert streamed == list(expected)
        guided = complete(guided_choice=["a"])
        assert guided.json()["error"]["param"] == "guided_choice"
        for answer in (
            complete(prompt="Hello"),
            complete(stop=["end"]),
            guided,
            server.chat(),
            server.http.post("/tokenize", json={"prompt": "Hello"}),
            server.http.post("/detokenize", json={"tokens": PROMPT}),
        ):
            assert answer.status_code == 400, answer.text
            assert "the tokenizer was not loaded" in answer.json()["error"]["message"]


def fields_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Move the fields that OpenAI's client does not know."""
    known = {name: value for name, value in fields.items() if name != "ignore_eos"}
    return {**known, "extra_body": {"ignore_eos": True}}
