"""lm_eval, as people run it, against a running server and a task whose data are here. Needs the command `lm_eval`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Running

from culet import LLM, SamplingParams

TASKS = Path(__file__).parent / "lm_eval_task"
COMMAND = shutil.which("lm_eval")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="lm_eval is not installed (pip install 'culet[eval]')"),
]


def evaluate(kind: str, url: str, task: str, output: Path, *arguments: str, **options: str) -> list[dict[str, Any]]:
    """Run a task; what became of each of its documents."""
    options = {"base_url": url, "model": "gemma", "num_concurrent": "4", **options}
    given = ",".join(f"{name}={value}" for name, value in options.items())
    command = [str(COMMAND), "--model", kind, "--model_args", given, "--tasks", task, "--include_path", ".", "--log_samples"]
    subprocess.run(
        [*command, "--output_path", str(output), *arguments],
        cwd=TASKS,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(output / "home")},
        check=True,
        timeout=300,
    )
    (samples,) = output.rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def test_multiple_choice(tiny: Running, folder: Path, encode: Callable[[str], list[int]], tmp_path: Path) -> None:
    """Log-likelihoods of answers are those that the model gives without a server."""
    found = evaluate("local-completions", f"{tiny.url}/v1/completions", "culet_gems", tmp_path, tokenizer=str(folder))
    assert len(found) == 6
    llm = LLM(str(folder), device="cpu", max_model_len=2048)
    for sample in found:
        for number, choice in enumerate(sample["doc"]["choices"]):
            question = encode(f"Question: {sample['doc']['question']}\nAnswer:")
            whole = encode(f"Question: {sample['doc']['question']}\nAnswer: {choice}")
            # lm_eval sends token ids as the tokenizer gives them, which here is without <bos>.
            (result,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
            assert result.prompt_logprobs is not None
            scores = [next(iter(each.values())) for each in result.prompt_logprobs]
            expected = sum(scores[len(question) - 1 :])
            assert float(sample["resps"][number][0][0]) == pytest.approx(expected, abs=1e-3)


def test_chat(tiny: Running, tmp_path: Path) -> None:
    url = f"{tiny.url}/v1/chat/completions"
    found = evaluate("local-chat-completions", url, "culet_gems_chat", tmp_path, "--apply_chat_template")
    assert len(found) == 6
    assert all(isinstance(sample["resps"][0][0], str) and sample["resps"][0][0] for sample in found)
