"""Media in `LLM` and `AsyncLLM`: every form in which a caller may give an image gives the same answer."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from culet import LLM, SamplingParams
from culet.engine.async_llm import AsyncLLM
from culet.engine.prompts import PromptReader
from culet.errors import BadRequest, UserError
from culet.testing.tiny import write_checkpoint
from culet.text.template import ChatTemplate

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LIMITS = {"image": 3, "video": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B", towers=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 4, "limit_mm_per_prompt": LIMITS}
    with LLM(str(folder), **settings) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def ask(part: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def test_every_form_of_an_image_gives_the_same_answer(llm, pixels, tmp_path):
    file = tmp_path / "some.png"
    file.write_bytes(png(pixels))
    text = base64.b64encode(png(pixels)).decode()
    parts = [
        {"type": "image", "image": Image.fromarray(pixels)},
        {"type": "image_pil", "image_pil": Image.fromarray(pixels)},
        {"type": "image", "image": pixels},
        {"type": "image", "image": file},
        {"type": "image", "path": str(file)},
        {"type": "image", "image": png(pixels)},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{text}"},
        {"type": "image", "base64": text},
        {"type": "file", "file": {"file_data": f"data:image/png;base64,{text}", "filename": "some.png"}},
    ]
    before = llm.engine.stats()
    results = llm.chat([ask(part) for part in parts], PARAMS, use_tqdm=False)
    assert {result.text for result in results} == {results[0].text}
    assert len({result.prompt_token_ids for result in results}) == 1
    after = llm.engine.stats()
    assert after.counters.encoded_items - before.counters.encoded_items == 1  # the content decides, whatever its form
    other = llm.chat(ask({"type": "image", "image": 255 - pixels}), PARAMS, use_tqdm=False)[0]
    assert other.num_cached_tokens < results[0].prompt_token_ids.index(112)  # nothing of the first image is reused


def test_the_budget_decides_how_many_tokens(llm, pixels):
    image = {"type": "image", "image": pixels}
    few, many = (
        llm.chat(ask(image), PARAMS, mm_processor_kwargs={"max_soft_tokens": count}, use_tqdm=False)[0] for count in (70, 280)
    )
    detailed = llm.chat(ask({**image, "detail": "low"}), PARAMS, use_tqdm=False)[0]
    assert few.prompt_token_ids == detailed.prompt_token_ids
    assert len(many.prompt_token_ids) > 3 * len(few.prompt_token_ids)


def test_options_of_another_type(llm):
    with pytest.raises(BadRequest, match="mm_processor_kwargs: got int, expected a mapping"):
        llm.chat([{"role": "user", "content": "Hi"}], PARAMS, mm_processor_kwargs=3, use_tqdm=False)
    with pytest.raises(BadRequest, match="mm_processor_kwargs: got list, expected a mapping"):
        llm.generate({"prompt": "Hi", "mm_processor_kwargs": ["max_soft_tokens"]}, PARAMS, use_tqdm=False)


def test_prompts_with_multi_modal_data(llm, folder, pixels):
    settings = {"mm_processor_kwargs": {"max_soft_tokens": 70}}
    prompt = {"prompt": "<|image|> and <|image|>", "multi_modal_data": {"image": [pixels, png(pixels)]}, **settings}
    result = llm.generate(prompt, PARAMS, use_tqdm=False)[0]
    assert result.prompt_token_ids.count(112) == 2 * 60
    with pytest.raises(BadRequest, match="1 placeholders for 2 media"):
        llm.generate(prompt | {"prompt": "<|image|>"}, PARAMS, use_tqdm=False)

    async def run() -> str:
        with AsyncLLM(str(folder), device="cpu", max_model_len=512, max_num_seqs=2) as other:
            async for answer in other.generate(prompt, PARAMS):
                last = answer
        return last.text

    assert asyncio.run(run()) == result.text


@pytest.mark.parametrize(("shape", "num_dropped"), [("E4B", 0), ("31B", 8)])  # the tokens of an empty thought
def test_what_the_next_turn_computes_again(shape, num_dropped, pixels, tmp_path):
    """All that the two prompts share is reused. The larger models' past turns have no empty thought, so less is shared."""
    path = write_checkpoint(tmp_path, shape, towers=True)
    messages = ask({"type": "image", "image": pixels, "detail": "low"})
    with LLM(str(path), device="cpu", max_model_len=512, max_num_seqs=2) as other:
        known: tuple[int, ...] = ()
        num_earlier = 0
        for turn in range(3):
            (result,) = other.chat(messages, PARAMS, use_tqdm=False)
            ids = result.prompt_token_ids
            shared = next((i for i, (old, new) in enumerate(zip(known, ids, strict=False)) if old != new), len(known))
            assert result.num_cached_tokens == shared
            if turn:
                assert shared >= num_earlier if num_dropped == 0 else shared == num_earlier - num_dropped
            num_earlier = len(ids)
            known = (*ids, *result.samples[0].token_ids[:-1])  # the last token of an answer has no KV
            messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": f"And number {turn}?"}]
        assert other.engine.stats().counters.encoded_items == 1


def test_frames_and_tuples(llm, pixels):
    prompt = {"prompt": "<|image|><|image|><|video|>", "mm_processor_kwargs": {"max_soft_tokens": 70}}
    picture = Image.fromarray(pixels)
    data = {"image": (picture, pixels), "video": [picture, picture, pixels]}
    result = llm.generate(prompt | {"multi_modal_data": data}, PARAMS, use_tqdm=False)[0]
    assert (result.prompt_token_ids.count(112), result.prompt_token_ids.count(116)) == (2 * 60, 3 * 60)


def test_audio_and_video(llm, pixels):
    tone = np.sin(np.arange(8000) / 10).astype(np.float32)
    heard = llm.chat(ask({"type": "audio", "audio": (tone, 16000)}), PARAMS, use_tqdm=False)[0]
    assert heard.prompt_token_ids.count(115) == 13
    frames = np.stack([pixels, 255 - pixels])
    seen = llm.chat(ask({"type": "video", "video": (frames, {"fps": 2})}), PARAMS, use_tqdm=False)[0]
    assert seen.prompt_token_ids.count(116) == 2 * 60


def test_a_typed_placeholder_is_no_medium(llm, pixels):
    result = llm.chat(ask({"type": "image", "image": pixels, "detail": "low"}, "<|image|> is text"), PARAMS, use_tqdm=False)[0]
    assert result.prompt_token_ids.count(112) == 60
    plain = llm.chat([{"role": "user", "content": "<|image|>"}], PARAMS, use_tqdm=False)[0]
    assert 112 not in plain.prompt_token_ids


def test_a_template_may_show_media_anywhere(llm, pixels):
    """The built-in template shows none in system messages and results of tools. Another one decides for itself."""
    source = (
        "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n"
        "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<|image|>' }}{% endfor %}"
        "<turn|>\n{% endfor %}"
    )
    template = ChatTemplate({"default": source}, origin="test", empty_thought=False)
    image = {"type": "image", "image": pixels, "detail": "low"}
    messages = [{"role": role, "content": [image]} for role in ("system", "user")]
    prompt = PromptReader(llm.engine.tokenizer, template, llm.engine.media).render(messages, None, enable_thinking=False)
    template.close()
    assert [span.length for span in prompt.media] == [60, 60]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (ask({"type": "image"}), "got no image"),
        (ask({"type": "image", "image": "/no/such/file.png"}), "cannot read"),
        (ask({"type": "image", "image": b"not an image"}), "not an image"),
        (ask({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}), "allowed-media-domains"),
        (ask({"type": "image_url", "image_url": {"url": 7}}), "expected exactly one text"),
        (ask({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}), "no image, video or audio"),
        (ask({"type": "file", "file": {"file_id": "file-1"}}), "file_id"),
        (ask({"type": "image", "image": np.zeros((4, 4, 2), np.uint8)}), "expected uint8"),
        (ask({"type": "hologram"}), "expected one of text"),
        (
            [{"role": "system", "content": [{"type": "image", "image": b"GIF"}]}, *ask({"type": "text", "text": "Hi"})],
            "role system",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": b"GIF"}] * 4}],
            r"messages\[0\].content\[3\]: got 4 media of kind image, but a prompt may have at most 3",
        ),
    ],
)
def test_bad_parts_are_refused(llm, messages, problem):
    with pytest.raises(UserError) as caught:
        llm.chat(messages, PARAMS, use_tqdm=False)
    assert re.search(problem, str(caught.value)), str(caught.value)
