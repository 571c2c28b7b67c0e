"""`culet generate` and `culet chat` with files of images and audio."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from culet import LLM, SamplingParams
from culet.cli.chat import Conversation, _path_of
from culet.cli.chat_screen import Screen
from culet.cli.generate import _chat_request, _plain_request
from culet.cli.main import run
from culet.errors import ContextTooLong
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


class Typed(Screen):
    """A screen at which somebody types. It keeps the notes."""

    def __init__(self) -> None:
        super().__init__(markdown=False)
        self.is_interactive = True
        self.notes: list[str] = []

    def note(self, text: str, *, color: str | None = None) -> None:
        self.notes.append(text)


def typed(llm: LLM, *lines: str) -> tuple[list[str], Conversation]:
    """Return what a chat notes for these lines, and the chat."""
    screen = Typed()
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    chat = Conversation(llm, params, screen, system=None, enable_thinking=False)
    for line in lines:
        if line.startswith("/"):
            chat._command(line)
        else:
            chat._answer(line)
    return screen.notes, chat


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    (folder / "bad.png").write_bytes(b"no image")
    with LLM(str(folder), device="cpu", max_model_len=1024, max_num_seqs=2, limit_mm_per_prompt={"image": 2}) as loaded:
        yield loaded


def test_a_refused_message_keeps_its_files(folder: Path, llm: LLM) -> None:
    notes, chat = typed(llm, f"/image {folder / 'red.png'}", f"/audio {folder / 'tone.wav'}", "word " * 2000)
    assert notes[2].startswith("error: ")
    assert notes[3] == "kept for the next message: red.png, tone.wav (/clear drops all)"
    chat._answer("What is it?")
    assert [part["type"] for part in chat.messages[0]["content"]] == ["image", "audio", "text"]
    assert all("where" not in part for part in chat.messages[0]["content"])  # it is saved
    notes, chat = typed(llm, f"/image {folder / 'red.png'}", "word " * 2000, "/clear", "What is it?")
    assert chat.messages[0]["content"] == "What is it?"


def test_a_file_that_cannot_be_read_is_dropped(folder: Path, llm: LLM) -> None:
    bad = folder / "bad.png"
    notes, chat = typed(llm, f"/image {folder / 'red.png'}", f"/image {bad}", "What is it?")
    error, *others = notes[2:]
    assert error.startswith(f"error: /image {bad}: this is not an image that can be read")
    assert others == ["dropped: bad.png", "kept for the next message: red.png (/clear drops all)"]
    chat._answer("What is it?")
    assert [part.get("path") for part in chat.messages[0]["content"]] == [str(folder / "red.png"), None]


def test_a_file_that_is_too_large_for_the_engine_is_dropped(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ContextTooLong("media: 280 tokens must be computed in one step", hint="raise --max-num-batched-tokens")

    monkeypatch.setattr(llm, "stream", refuse)
    notes, chat = typed(llm, f"/image {folder / 'red.png'}", "What is it?")
    assert notes[1].endswith("hint: raise --max-num-batched-tokens")
    assert notes[2:] == ["dropped: red.png"]
    assert not chat._attached


def test_a_file_of_an_earlier_message_that_is_gone(folder: Path, llm: LLM) -> None:
    gone = folder / "gone.png"
    gone.write_bytes((folder / "red.png").read_bytes())
    notes, chat = typed(llm, f"/image {gone}", "What is it?")
    gone.unlink()
    chat._answer("And now?")
    assert notes[-1].startswith(f"error: /image {gone}: cannot read")
    assert notes[-1].endswith("hint: /clear starts a new conversation")


def test_too_many_files(folder: Path, llm: LLM) -> None:
    red = folder / "red.png"
    notes, chat = typed(llm, f"/image {red}", "What is it?", f"/image {red}", f"/image {red}")
    assert notes[-1].startswith(f"error: /image {red}: got 3 media of kind image, but a prompt may have at most 2")
    assert len(chat._attached) == 1


def test_a_kind_that_the_model_does_not_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = write_checkpoint(tmp_path, "31B", towers=True)
    tone = folder / "tone.wav"
    problem = f"/audio {tone}: got audio, but this model reads image, video"
    with LLM(str(deaf), device="cpu", max_model_len=512, max_num_seqs=2) as llm:
        notes, chat = typed(llm, f"/audio {tone}", "/audio")
        assert notes == [f"error: {problem}", "error: /audio: got audio, but this model reads image, video"]
        assert not chat._attached
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/audio {tone}\nWhat is it?\n"))
    assert run(("chat", "-m", str(deaf), *GREEDY)) != 0
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("chat", ["--chat", "--no-chat"])
def test_an_error_names_the_flag_that_turned_media_off(folder: Path, capsys: pytest.CaptureFixture[str], chat: str) -> None:
    files = ("--image", str(folder / "red.png"), "-m", str(folder))
    assert run(("generate", "What?", chat, *files, "--language-model-only", *GREEDY)) != 0
    assert "turned off by --language-model-only" in capsys.readouterr().err
