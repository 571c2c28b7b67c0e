"""Every file in examples/ runs on a tiny checkpoint as its docstring describes."""

from __future__ import annotations

import os
import subprocess
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
def test_example_runs(path: Path, checkpoint: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path), str(checkpoint)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert f"python examples/{path.name}" in path.read_text()
