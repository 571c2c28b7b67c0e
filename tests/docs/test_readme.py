"""The README's Python runs as written, and its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from culet.cli.main import COMMANDS, cli
from culet.testing.tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, "E4B")
    [source] = blocks("python")
    assert '"path/to/a/gemma-4"' in source
    exec(compile(source.replace("path/to/a/gemma-4", str(folder)), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_commands_parse() -> None:
    """Every `culet ...` line names an existing command with existing flags."""
    lines = [line.partition("#")[0] for block in blocks("bash") for line in block.splitlines() if line.startswith("culet ")]
    assert len(lines) >= 4
    for line in lines:
        name, *arguments = shlex.split(line)[1:]
        assert name in COMMANDS
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        command.make_context(name, arguments)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {match for block in blocks("bash") for match in re.findall(r"^make (\S+)", block, re.MULTILINE)}
    assert targets >= {"run", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
