"""lm-eval: log-likelihoods with the tokenizer that the server has, and chat answers. The argument is a folder with tasks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, run

TASKS = Path(sys.argv[1])


def evaluate(kind: str, path: str, task: str, *more: str) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in TASKS.iterdir():  # datasets needs absolute paths
            text = file.read_text().replace("test: gems.jsonl", f"test: {folder / 'gems.jsonl'}")
            (folder / file.name).write_text(text)
        arguments = ",".join([f"model={MODEL}", f"base_url={URL}{path}", "max_retries=1", *(m for m in more if "--" not in m)])
        command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments]
        command += ["--include_path", name, "--tasks", task, "--output_path", str(folder / "out"), "--log_samples"]
        command += [argument for argument in more if "--" in argument]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr[-1500:]
        (results,) = (folder / "out").rglob("results_*.json")
        return json.loads(results.read_text())["results"][task]


def remote_tokenizer() -> None:
    more = ("tokenizer_backend=remote", "tokenized_requests=True")
    assert 0.0 <= evaluate("local-completions", "/v1/completions", "culet_gems", *more)["acc,none"] <= 1.0


def chat() -> None:
    result = evaluate("local-chat-completions", "/v1/chat/completions", "culet_gems_words", "--apply_chat_template")
    assert 0.0 <= result["exact_match,none"] <= 1.0


run(plain=chat, remote_tokenizer=remote_tokenizer)
