"""The programs and commands in the documents that need a model, with the built-in one in place of Google's."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from culet.cli.main import run
from tests.docs.blocks import PAGES, ROOT, Command, blocks, commands, page_name
from tests.serve.running import Running

NAMES = "built-in,gemma,google/gemma-4-E4B-it"
MODEL = re.compile(r'"google/gemma-4-[\w-]+"')
OPTIONAL = ("langchain_openai",)  # clients that the tests do not install


def programs() -> list[tuple[str, str]]:
    """Return the Python programs of each page, except the signatures in the reference. The blocks of a page are one program.

    `tests/models/formats/test_rounding.py` runs the one for transformers.
    """
    found = []
    for page in PAGES:
        each = (block for block in blocks(page, "python") if "from transformers import" not in block)
        parts = [block for block in each if not any(is_missing(package, block) for package in OPTIONAL)]
        if parts and "reference" not in page.parts:
            found.append((page_name(page), "\n".join(parts)))
    return found


def is_missing(package: str, source: str) -> bool:
    return package in source and find_spec(package) is None


def needs_server(source: str) -> bool:
    return "127.0.0.1:8000" in source


def execute(source: str, name: str) -> str:
    """Run a program and return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, name, "exec"), {"__name__": "__main__"})
    return out.getvalue()


def test_the_readme_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's offline example runs as it is written."""
    [source] = [block for block in blocks(ROOT / "README.md", "python") if not needs_server(block)]
    exec(compile(source, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(Path("built-in"), settings={"served_model_name": NAMES}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), programs(), ids=[name for name, _ in programs()])
def test_programs_run(name: str, source: str, server: Running) -> None:
    source = source.replace("http://127.0.0.1:8000", server.url)
    if "from culet import" in source:
        source = re.sub(r"LLM\((model=)?" + MODEL.pattern, r'LLM(\1"built-in"', source)
    assert execute(source, name).strip()


def runnable() -> list[Command]:
    """Return the commands that use the built-in model or a server."""
    found = []
    for command in (command for page in PAGES for command in commands(page)):
        words = command.words
        is_built_in = words[0] == "culet" and words[1] in ("generate", "chat") and not {"--model", "-m"} & set(words)
        if is_built_in or words[:3] == ("culet", "bench", "serve") or words[0] == "curl":
            found.append(command)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", runnable(), ids=str)
def test_commands_run(
    command: Command, server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = re.compile(r"http://(127\.0\.0\.1|gpu1):8000")
    words = [address.sub(server.url, word) for word in command.words]
    if words[0] == "curl":
        block = address.sub(server.url, command.block).replace("curl ", "curl --fail --silent ")
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        return
    if words[1] == "bench":
        if "--base-url" not in words:
            words += ["--base-url", server.url]
        # The documented sizes are for a GPU.
        if "agent" in words:
            words += ["--agent-history", "200,600", "--agent-sessions", "2", "--agent-turns", "2", "--agent-result-len", "50"]
        else:
            words += ["--num-prompts", "2", "--random-input-len", "20", "--random-output-len", "4", "--request-rate", "inf"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(command.stdin or "Hello\n"))
    assert run(words[1:]) == 0
    assert capsys.readouterr().out.strip()
