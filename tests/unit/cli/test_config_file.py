"""`culet serve --config FILE`: keys, precedence, and errors that name the file. No server starts here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from culet.cli.main import run
from culet.config import Config, ServeConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, ServeConfig]]:
    """Collect what `culet serve` would start instead of starting it."""
    from culet.serve import server

    calls: list[tuple[Config, ServeConfig]] = []
    monkeypatch.setattr(server, "serve", lambda config, settings: calls.append((config, settings)))
    return calls


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> str:
        path = tmp_path / "culet.yaml"
        path.write_text(text)
        return str(path)

    return write_file


def test_every_kind_of_value(write: Any, started: list[tuple[Config, ServeConfig]]) -> None:
    path = write(
        "model: google/gemma-4-E4B-it\n"
        "port: 8080\n"
        "max-model-len: 32768  # a comment\n"
        "max_num_seqs: 16\n"
        "gpu-memory-utilization: 0.9\n"
        "latent: false\n"
        "revision:\n"
        "enable-auto-tool-choice: true\n"
        "tool-call-parser: gemma4\n"
        "served-model-name: [gemma, default]\n"
        "limits: {n: 4, body_mb: 64}\n"
        "kv-cache-dtype: {sliding: fp8}\n"
        "speculative-config:\n  method: mtp\n  model: google/gemma-4-E4B-it-assistant\n"
    )
    assert run(["serve", "--config", path]) == 0
    [(config, settings)] = started
    assert config.model.model == "google/gemma-4-E4B-it"
    assert (config.model.max_model_len, config.schedule.max_num_seqs) == (32768, 16)
    assert (config.cache.gpu_memory_utilization, config.cache.latent) == (0.9, False)
    assert config.cache.kv_cache_dtype == "sliding=fp8"
    assert config.draft.choice is not None
    assert config.draft.choice.model == "google/gemma-4-E4B-it-assistant"
    assert (settings.port, settings.served_model_name, settings.limits) == (8080, "gemma,default", "n=4,body_mb=64")
    assert "revision" not in config.given


def test_the_command_line_wins(write: Any, started: list[tuple[Config, ServeConfig]]) -> None:
    path = write("model: google/gemma-4-E4B-it\nport: 8080\nmax-num-seqs: 16\nlatent: true\n")
    assert run(["serve", "other/model", "--config", path, "--port", "9000", "--no-latent"]) == 0
    assert run(["serve", "--model", "third/model", "--config", path]) == 0
    [(config, settings), (third, _)] = started
    assert (config.model.model, settings.port, config.schedule.max_num_seqs) == ("other/model", 9000, 16)
    assert config.cache.latent is False
    assert third.model.model == "third/model"


def test_an_empty_file_sets_nothing(write: Any, started: list[tuple[Config, ServeConfig]]) -> None:
    assert run(["serve", "--config", write("# nothing yet\n")]) == 0
    assert started[0][0].given == frozenset()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("max-num-seq: 4\n", "has the unknown key 'max-num-seq'", "did you mean max-num-seqs?"),
        ("no-latent: true\n", "has the unknown key 'no-latent'", "did you mean latent?"),
        ("enable-lora: true\n", "has the unknown key 'enable-lora'", "merge the adapter"),
        ("config: other.yaml\n", "has the unknown key 'config'", ""),
        ("zzzzzz: 1\n", "has the unknown key 'zzzzzz'", "culet serve --help"),
        ("max-num-seqs: many\n", "culet.yaml: max-num-seqs: got 'many', expected int", ""),
        ("latent: maybe\n", "culet.yaml: latent: got 'maybe', expected bool", ""),
        ("port: 70000\n", "culet.yaml: port: got 70000", ""),
        ("dtype: int3\n", "culet.yaml: dtype: got 'int3', expected one of", ""),
        ("limits: {bodies: 3}\n", "culet.yaml: limits: unknown name 'bodies'", "body_mb"),
        ("tool-call-parser: hermes\n", "culet.yaml: tool-call-parser: got 'hermes'", ""),
        ("- port\n", "holds a list", "example"),
        ("port\n", "holds only 'port'", "example"),
        ("port: [\n", "is not valid YAML", "example"),
        ("model: !!python/object/apply:os.system ['true']\n", "is not valid YAML", "example"),
    ],
)
def test_mistakes(
    text: str, message: str, hint: str, write: Any, started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--config", write(text)]) == 2
    error, *rest = capsys.readouterr().err.splitlines()
    assert message in error
    assert len(rest) == 1
    assert hint in rest[0]
    assert not started


def test_a_file_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_flag_is_not_blamed_on_the_file(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--config", write("port: 8080\n"), "--port", "70000"]) == 2
    assert capsys.readouterr().err.startswith("error: port: got 70000")
