"""Every file in examples/ runs on a tiny checkpoint as its docstring describes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from culet.testing.tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "31B")


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} >= {"generate.py", "chat.py", "sample.py"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(
    path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), str(checkpoint)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert f"python examples/{path.name}" in path.read_text()
