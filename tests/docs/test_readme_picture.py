"""The picture in the README, and the built-in model's answer about it."""

from __future__ import annotations

import base64
import re
import shlex

import pytest
from openai import OpenAI

from culet import LLM, SamplingParams
from scripts.draw_example import scene
from tests.docs.blocks import ROOT
from tests.serve.running import Running
from training.data.pictures.scenes import held_out_in

DRAFTERS = {"mtp": "built-in:assistant", "dflash": "built-in:dflash"}


def shown() -> tuple[str, str, str]:
    """Return the picture's file, the question and the answer in the README."""
    pattern = r"```bash\n(culet generate [^\n]* --image [^\n]*)\n```\n\n```\n([^`]*)\n```"
    [(command, answer)] = re.findall(pattern, (ROOT / "README.md").read_text())
    words = shlex.split(command)
    assert words[3:] == ["--image", words[4], "--temperature", "0"]
    return words[4], words[2], answer


def drafting(method: str | None, *, probe: bool = False) -> dict[str, object]:
    if method is None:
        return {}
    # The answer is too short to adapt the number of drafts.
    return {"speculative_config": {"method": method, "model": DRAFTERS[method], "probe": probe, "adaptive": False}}


def test_the_picture_is_new_to_the_model() -> None:
    file, _, _ = shown()
    assert f"]({file})" in (ROOT / "README.md").read_text()
    assert set(held_out_in(scene())) == {"orange star", "green ring"}


@pytest.mark.parametrize("method", [None, "mtp", "dflash"])
def test_the_answer_is_the_models(method: str | None, caplog: pytest.LogCaptureFixture) -> None:
    file, question, answer = shown()
    content = [{"type": "image", "path": str(ROOT / file)}, {"type": "text", "text": question}]
    with LLM(device="cpu", max_model_len=512, **drafting(method, probe=True)) as llm:
        [result] = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0), use_tqdm=False)
        accepted = llm.engine.stats().counters.accepted_tokens
    assert result.text == answer
    assert (accepted > 0) == (method is not None)
    assert "DRAFTS ARE NOT ACCEPTED" not in caplog.text  # the built-in drafters fit their model


@pytest.mark.parametrize("method", ["mtp", *(pytest.param(name, marks=pytest.mark.slow) for name in (None, "dflash"))])
def test_a_server_gives_the_same_answer(method: str | None) -> None:
    file, question, answer = shown()
    url = f"data:image/png;base64,{base64.b64encode((ROOT / file).read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    with Running("built-in", config={"device": "cpu", "max_model_len": 512, **drafting(method)}) as server:
        client: OpenAI = server.openai()
        reply = client.chat.completions.create(model="gemma", messages=[{"role": "user", "content": content}], temperature=0)
    assert reply.choices[0].message.content == answer
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 60
