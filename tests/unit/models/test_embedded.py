"""The default model: it is found in the package and announced, and its absence is an error with a hint."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from culet.cli.main import run
from culet.config import BUILT_IN, build_config
from culet.errors import CheckpointError, ConfigError
from culet.models import embedded
from culet.models.checkpoint import open_checkpoint
from culet.models.folder import find_folder, read_config
from culet.testing.tiny import write_checkpoint


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose built-in model is a tiny random one."""
    write_checkpoint(tmp_path / "target")
    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    return tmp_path


def test_no_model_is_the_built_in_one() -> None:
    assert build_config({}).model.model == BUILT_IN


def test_it_is_found_and_announced(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="culet"):
        logging.getLogger("culet").propagate = True
        assert open_checkpoint(BUILT_IN).folder == package / "target"
    assert "built-in" in caplog.text
    assert "--model google/gemma-4" in caplog.text


def test_its_drafters_have_names(package: Path) -> None:
    shutil.copytree(package / "target", package / "assistant")
    assert find_folder("built-in:assistant") == package / "assistant"
    assert read_config("built-in:assistant")["model_type"] == "gemma4"
    with pytest.raises(CheckpointError, match="does not include the weights"):
        find_folder("built-in:dflash")
    with pytest.raises(ConfigError, match="built-in:other") as caught:
        find_folder("built-in:other")
    assert "built-in:dflash" in caught.value.hint


def test_a_folder_of_that_name_needs_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint("built-in")
    assert find_folder("./built-in") == Path("./built-in")


def test_without_weights_the_error_names_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    assert run(["generate", "Hello"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert "does not include the weights" in error
    assert "--model google/gemma-4-E2B-it" in hint


def test_generate_without_a_model_answers(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt becomes a user turn, so the built-in model answers it instead of continuing it."""
    assert run(["generate", "Hello", "--max-tokens", "3", "--temperature", "0", "--json", "--device", "cpu"]) == 0
    chat = capsys.readouterr().out
    assert run(["generate", "Hello", "--no-chat", "--max-tokens", "3", "--temperature", "0", "--json", "--device", "cpu"]) == 0
    assert len(chat) > len(capsys.readouterr().out), "the turn's marks are in the prompt"
