"""`culet generate` and `culet chat` with files of images and audio."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from culet.cli.chat import _path_of
from culet.cli.generate import _chat_request, _plain_request
from culet.cli.main import run
from culet.testing.tiny import write_checkpoint

GREEDY = ("--temperature", "0", "--max-tokens", "4", "--ignore-eos", "--max-model-len", "2048", "-q")
IMAGE, AUDIO = 112, 115  # the placeholders' ids in a tiny vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B", towers=True)
    Image.new("RGB", (64, 48), "red").save(folder / "red.png")
    soundfile.write(folder / "tone.wav", np.sin(np.arange(8000) / 10), 16000)
    return folder


def culet(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


@pytest.mark.slow
def test_generate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--image", str(folder / "red.png"), "--image", str(folder / "red.png"), "--audio", str(folder / "tone.wav"))
    out, _ = culet(capsys, "generate", "What is it?", *files, "-m", str(folder), "--json", *GREEDY)
    prompt = json.loads(out)["prompt_token_ids"]
    assert (prompt.count(IMAGE), prompt.count(AUDIO)) == (2 * 266, 13)


def test_requests() -> None:
    """Media come before the text, unless a plain prompt says with placeholders where they are."""
    files = {"image": ("a.png", "b.png"), "video": (), "audio": ("c.wav",)}
    (message,) = _chat_request("What?", files)
    assert [part.get("path", "text") for part in message["content"]] == ["a.png", "b.png", "c.wav", "text"]
    data = {"image": [Path("a.png"), Path("b.png")], "audio": [Path("c.wav")]}
    assert _plain_request("What?", files) == {"prompt": "<|image|><|image|><|audio|>What?", "multi_modal_data": data}
    assert _plain_request("<|image|> or <|image|>?", files)["prompt"] == "<|audio|><|image|> or <|image|>?"
    nothing = dict.fromkeys(files, ())
    assert (_chat_request("Hi", nothing)[0]["content"], _plain_request("Hi", nothing)) == ("Hi", "Hi")


def test_a_file_that_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("generate", "What?", "--chat", "--image", str(folder / "no.png"), "-m", str(folder), *GREEDY)) != 0
    assert f"--image {folder / 'no.png'}: cannot read" in capsys.readouterr().err


def test_names_as_terminals_write_dropped_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my 'red' cat.png"
    path.touch()
    for name in (str(path), f'"{path}"', shlex.quote(str(path)), str(path).replace(" ", "\\ ").replace("'", "\\'")):
        assert _path_of(name) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "b.png").touch()
    assert _path_of("~/b.png") == tmp_path / "b.png"
    for name in ("'no end", "two words", "", str(tmp_path)):
        assert not _path_of(name).is_file()


def test_chat(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "chat.json"
    lines = (
        f"/image {folder / 'red.png'}",
        f"/audio {folder / 'tone.wav'}",
        "What is it?",
        "And now?",
        f"/save {saved}",
        f"/save {tmp_path / 'chat.md'}",
        "",
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    out, err = culet(capsys, "chat", "-m", str(folder), *GREEDY)
    assert "red.png goes with the next message" in err
    assert out.strip()
    first, _, second, _ = json.loads(saved.read_text())
    assert [part["type"] for part in first["content"]] == ["image", "audio", "text"]
    assert second["content"] == "And now?"  # files belong to one message
    assert f"[image: {folder / 'red.png'}]\n[audio: {folder / 'tone.wav'}]\nWhat is it?" in (tmp_path / "chat.md").read_text()


@pytest.mark.parametrize("chat", ["--chat", "--no-chat"])
def test_an_error_names_the_flag_that_turned_media_off(folder: Path, capsys: pytest.CaptureFixture[str], chat: str) -> None:
    files = ("--image", str(folder / "red.png"), "-m", str(folder))
    assert run(("generate", "What?", chat, *files, "--language-model-only", *GREEDY)) != 0
    assert "turned off by --language-model-only" in capsys.readouterr().err
