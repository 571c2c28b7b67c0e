"""lm-eval against a running server, end to end, on a small task in this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import Running

pytestmark = pytest.mark.slow
TASK = Path(__file__).with_name("lm_eval_task")


def run_lm_eval(server: Running, kind: str, path: str, task: str, folder: Path, *more: str) -> Any:
    """Run lm-eval and return its results file. `more` are additional model arguments, then flags."""
    pytest.importorskip("lm_eval")
    tasks = folder / "tasks"
    shutil.copytree(TASK, tasks)
    for file in tasks.glob("*.yaml"):  # datasets needs absolute paths
        file.write_text(file.read_text().replace("test: gems.jsonl", f"test: {tasks / 'gems.jsonl'}"))
    given = [argument for argument in more if not argument.startswith("--")]
    arguments = ",".join(["model=gemma", f"base_url={server.url}{path}", "num_concurrent=2", "max_retries=1", *given])
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--include_path", str(tasks)]
    command += ["--tasks", task, "--output_path", str(folder / "out"), "--log_samples"]
    command += [argument for argument in more if argument.startswith("--")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    return json.loads(results.read_text())


def test_local_completions(tiny: Running, folder: Path, encode: Callable[[str], list[int]], tmp_path: Path) -> None:
    """Log-likelihoods from echo and logprobs: lm-eval picks the choices that the server scores highest."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(folder / "tokenizer.json", tokenizer)
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    results = run_lm_eval(tiny, "local-completions", "/v1/completions", "culet_gems", tmp_path, f"tokenizer={tokenizer}")
    questions = [json.loads(line) for line in (TASK / "gems.jsonl").read_text().splitlines()]
    num_right = 0
    for question in questions:
        scores = []
        for choice in question["choices"]:
            context = f"Question: {question['question']}\nAnswer:"
            tokens, begin = encode(f"{context} {choice}"), len(encode(context))
            fields: Any = {"model": "gemma", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
            scored = tiny.openai().completions.create(prompt=tokens, **fields).choices[0].logprobs
            assert scored is not None
            scores.append(sum(scored.token_logprobs[begin : len(tokens)]))  # type: ignore[index, arg-type]
        num_right += scores.index(max(scores)) == question["answer"]
    assert results["results"]["culet_gems"]["acc,none"] == pytest.approx(num_right / len(questions))
    tiny.check_well()


def test_local_chat_completions(tiny: Running, tmp_path: Path) -> None:
    results = run_lm_eval(
        tiny, "local-chat-completions", "/v1/chat/completions", "culet_gems_words", tmp_path, "--apply_chat_template"
    )
    assert 0.0 <= results["results"]["culet_gems_words"]["exact_match,none"] <= 1.0
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(answers) == 6
    assert all(answer["resps"][0][0] for answer in answers), "an empty answer"
    tiny.check_well()
