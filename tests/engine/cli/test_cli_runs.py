"""`culet generate` and `culet chat` with a model: stdout, stderr, and how a conversation proceeds."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from culet.cli.main import run
from culet.engine.jobs import Result, Sample
from culet.engine.llm import LLM
from culet.testing import tiny
from culet.testing.tiny import write_checkpoint
from culet.text.output_pieces import ToolCall


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch):
    """Put text on stdin."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def culet(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Run a command that must succeed and return (stdout, stderr)."""
    code = run(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


GREEDY = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")


def test_generate_writes_only_the_answer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("generate", "The stone", "-m", str(folder), *GREEDY)
    out, err = culet(capsys, *command)
    assert out.endswith("\n")
    assert len(out) > 12
    assert err == ""
    assert "INFO dtype: float32" in culet(capsys, *command, "-v")[1], "every derived setting is logged, on stderr"
    monkeypatch.setenv("CULET_LOG_LEVEL", "info")
    assert "INFO dtype: float32" in culet(capsys, *command)[1]
    assert culet(capsys, *command, "-q") == (out, "")


def test_generate_reads_stdin(folder: Path, capsys: pytest.CaptureFixture[str], pipe) -> None:
    expected, _ = culet(capsys, "generate", "The stone", "-m", str(folder), *GREEDY)
    pipe("The stone\n")
    assert culet(capsys, "generate", "-m", str(folder), *GREEDY)[0] == expected


def test_generate_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = culet(capsys, "generate", "The stone", "-m", str(folder), *GREEDY)
    out, _ = culet(capsys, "generate", "The stone", "-m", str(folder), *GREEDY, "--json", "--logprobs", "2")
    document = json.loads(out)
    assert document["text"] + "\n" == text
    assert document["finish_reason"] == "length"
    assert len(document["token_ids"]) == len(document["logprobs"]) == 12
    assert document["samples"][0]["token_ids"] == document["token_ids"]
    out, _ = culet(capsys, "generate", "The stone", "-m", str(folder), "--n", "3", "--max-tokens", "5", "--json")
    assert len(json.loads(out)["samples"]) == 3


def test_generate_as_chat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = json.loads(culet(capsys, "generate", "Hello", "-m", str(folder), *GREEDY, "--json")[0])
    chat = json.loads(culet(capsys, "generate", "Hello", "--chat", "-m", str(folder), *GREEDY, "--json")[0])
    assert len(chat["prompt_token_ids"]) > len(plain["prompt_token_ids"])
    assert 105 in chat["prompt_token_ids"], "<|turn>"


def test_generate_json_has_thoughts_and_calls(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ToolCall(0, "call_1", "get_weather", '{"city": "Zürich"}', {"city": "Zürich"})
    samples = (
        Sample("", (1, 2), None, "tool_calls", reasoning="Let me see.", tool_calls=(call,)),
        Sample("Sunny.", (3,), None, "stop"),
    )
    monkeypatch.setattr(LLM, "chat", lambda self, messages, params: [Result((5,), samples, 0)])
    document = json.loads(culet(capsys, "generate", "Hello", "--chat", "-m", str(folder), "--json")[0])
    assert document["reasoning"] == "Let me see."
    assert document["tool_calls"] == [{"id": "call_1", "name": "get_weather", "arguments": {"city": "Zürich"}}]
    assert document["samples"][0]["tool_calls"] == document["tool_calls"]
    assert not {"reasoning", "tool_calls"} & document["samples"][1].keys()


def test_chat_from_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str], pipe) -> None:
    def answers(text: str, *options: str) -> list[str]:
        pipe(text)
        out, err = culet(capsys, "chat", "-m", str(folder), *GREEDY, *options)
        assert err == "" or "unknown command" in err
        return out.split("\n")[:-1]

    [alone] = answers("Hello\n")
    first, second = answers("Hello\n\nHello\n")
    assert first == alone
    assert second != alone, "the second answer sees the first turn"
    assert answers("Hello\n/clear\nHello\n/exit\nHello\n") == [alone, alone]
    [systematic] = answers("/system Be brief.\nHello\n")
    assert systematic != alone
    assert answers("Hello\n", "--system", "Be brief.") == [systematic]
    assert answers("/magic\n/system Be brief.\n/system\nHello\n") == [alone]
    assert answers("") == []


def test_a_full_context_is_a_one_line_error(folder: Path, capsys: pytest.CaptureFixture[str], pipe) -> None:
    pipe("word " * 400)
    assert run(["chat", "-m", str(folder), "--max-model-len", "64", "-q"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "context" in err


@pytest.fixture
def obeys_ctrl_c() -> Iterator[None]:
    """Make new processes obey Ctrl-C. They ignore it if the tests themselves run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("obeys_ctrl_c")
def test_ctrl_c_stops_the_answer_but_not_the_chat(folder: Path) -> None:
    """In a separate process, send SIGINT while it answers, then another line, then end of input."""
    process = subprocess.Popen(
        [sys.executable, "-m", "culet.cli.main", "chat", "-m", str(folder), "--ignore-eos", "-q", "--max-tokens", "1900"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    assert os.read(process.stdout.fileno(), 1), "it answers"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(b"/exit\n", timeout=60)
    assert process.returncode == 0, err
    assert b"[stopped]" in err
    assert b"Traceback" not in err


def test_a_broken_pipe_is_not_an_error(folder: Path) -> None:
    command = f"{sys.executable} -m culet.cli.main generate hello -m {folder} --ignore-eos -q --max-tokens 900 | head -c 20"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert len(done.stdout) == 20
    assert done.stderr == b""


def test_tiny_says_that_its_text_is_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "folder"
    monkeypatch.setattr(sys, "argv", ["tiny", str(target), "--shape", "12B"])
    assert tiny.main() == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(target)
    assert "noise" in err
    assert {path.name for path in target.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    monkeypatch.setattr(sys, "argv", ["tiny", str(target), "--shape", "7B"])
    assert tiny.main() == 2
    assert "unknown shape: '7B'" in capsys.readouterr().err


def test_tiny_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tiny", str(tmp_path / "new")])
    monkeypatch.delitem(sys.modules, "culet.testing.tiny")  # runpy warns of modules that are imported
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("culet.testing.tiny", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out.strip() == str(tmp_path / "new")
