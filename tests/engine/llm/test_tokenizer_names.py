"""The tokenizer of an LLM as users of transformers know it, continued chats, priorities and engine arguments, as in vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from culet import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputs
from culet.errors import BadRequest

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HELLO: Any = [{"role": "user", "content": "Hello"}]
BEGUN: Any = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]}]
CONTINUE: Any = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def test_text_and_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.encode("Hello", add_special_tokens=False) == ids[1:]
    assert tokenizer("Hello").input_ids == tokenizer("Hello")["input_ids"] == ids
    assert tokenizer(["Hello", "x"], return_tensors=None, padding=False).attention_mask[0] == [1] * len(ids)
    with pytest.raises(BadRequest, match="return_tensors"):
        tokenizer("Hello", return_tensors="pt")
    assert tokenizer.decode(ids) == "<bos>Hello"
    assert tokenizer.batch_decode([ids, ids[1:]], skip_special_tokens=True) == ["Hello", "Hello"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 1)
    assert tokenizer.convert_ids_to_tokens(tokenizer.convert_tokens_to_ids(["<bos>", "<turn|>"])) == ["<bos>", "<turn|>"]
    assert tokenizer.eos_token_id in tokenizer.all_special_ids
    assert len(tokenizer) == tokenizer.vocab_size > 256
    with pytest.raises(AttributeError):
        _ = tokenizer("Hello").offsets


def test_chat_template(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><|turn>user\nHello<turn|>\n<|turn>model\n"
    ids = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tuple(ids) == llm.chat(HELLO, GREEDY)[0].prompt_token_ids
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=True).input_ids == ids
    assert "<|think|>" in tokenizer.apply_chat_template(HELLO, tokenize=False, enable_thinking=True)
    assert tokenizer.apply_chat_template(BEGUN, tokenize=False, continue_final_message=True).endswith("model\nOnce upon")


def test_a_continued_chat(llm: LLM) -> None:
    [result] = llm.chat(BEGUN, GREEDY, **CONTINUE)
    prompt = llm.get_tokenizer().encode("<bos><|turn>user\nHello<turn|>\n<|turn>model\nOnce upon")
    assert list(result.prompt_token_ids) == prompt
    assert result.token_ids == llm.generate(prompt, GREEDY)[0].token_ids
    [closed] = llm.chat(BEGUN, GREEDY, add_generation_prompt=False)
    assert llm.get_tokenizer().decode(closed.prompt_token_ids).endswith("<turn|>\n")
    for messages, options in ((BEGUN, {"continue_final_message": True}), (HELLO, CONTINUE)):
        with pytest.raises(BadRequest, match="continue_final_message"):
            llm.chat(messages, GREEDY, **options)


def test_a_form_holds_for_the_text_and_its_continuation(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=StructuredOutputs(json=schema))
    messages = [*HELLO, {"role": "assistant", "content": '{"a":'}]
    [result] = llm.chat(messages, params, **CONTINUE)
    assert json.loads('{"a":' + result.text)["a"] in (1, 2)


def test_priorities(llm: LLM) -> None:
    results = llm.generate(["Hello", "x"], GREEDY, priority=[1, 0], use_tqdm=False)
    assert [result.token_ids for result in results] == [llm.generate(text, GREEDY)[0].token_ids for text in ("Hello", "x")]
    with pytest.raises(BadRequest, match="priority: got 1 for 2 prompts"):
        llm.generate(["Hello", "x"], GREEDY, priority=[1])


def test_engine_args(folder: Path, llm: LLM) -> None:
    async def run() -> tuple[int, ...]:
        with AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **SETTINGS)) as engine:
            tokenizer = await engine.get_tokenizer()
            stream = engine.generate(tokenizer("Hello").input_ids, GREEDY, "1", priority=3)
            return [result.token_ids async for result in stream][-1]

    assert asyncio.run(run()) == llm.generate("Hello", GREEDY)[0].token_ids
