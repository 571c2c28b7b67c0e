"""Commands in the documents exist with their flags, and those that can run here do so."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from culet.cli.main import cli, run
from culet.cli.options import read_settings
from culet.cli.vllm_flags import ADVICE
from culet.errors import NO_RETRY
from culet.registry import load
from tests.docs.blocks import (
    PAGES,
    ROOT,
    Command,
    all_flags,
    blocks,
    check_culet,
    commands,
    page_name,
    shell_lines,
    split_pipe,
)

COMMANDS = [command for page in PAGES for command in commands(page)]
CULET = [command for command in COMMANDS if command.words[0] == "culet"]
# Flags of other programs that the text mentions.
OTHER_FLAGS = {"--gpus", "--entrypoint", "--max-thing"} | ADVICE.keys()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_exist(page: Path) -> None:
    for command in commands(page):
        if command.words[0] == "culet":
            check_culet(command.words)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_and_flags_in_the_text_exist(page: Path) -> None:
    """Inline code that begins with `culet` names a command, and all flags in it, or in code that is a flag, exist."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    known = all_flags() | OTHER_FLAGS
    for code in re.findall(r"`([^`]*)`", text):
        name = re.match(r"culet ([a-z]+)", code)
        if name:
            assert name[1] in cli.list_commands(click.Context(cli)), code
        if name or (code.startswith("--") and "log" not in page.parts and "decisions" not in page.parts):
            assert set(re.findall(r"(?:^|\s)(--[a-z][a-z-]+)", code)) - known == set(), code


def test_the_readme_has_two_commands_for_a_fresh_machine() -> None:
    first = blocks(ROOT / "README.md", "bash")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make run", "make test"]


def test_other_commands_exist() -> None:
    """Targets of make, scripts and modules that Python runs, and extras that pip installs."""
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = ("venv", "pip", "sglang_router.launch_router")
    for command in COMMANDS:
        words = command.words
        if words[0] == "make" and len(words) > 1:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), command
        if words[0] in ("python", "python3") and words[1] == "-m" and words[2] not in others:
            assert (ROOT / (words[2].replace(".", "/") + ".py")).exists(), command
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), command
        for extra in re.findall(r"\[(\w+)\]", shlex.join(words)) if words[0] == "pip" else ():
            assert extra in extras, command


# Commands that run at once


def in_folder(command: Command, folder: Path) -> list[str]:
    """Return a command's arguments, with files that it writes placed in a folder."""
    arguments = list(command.words[1:])
    for index, word in enumerate(arguments[:-1]):
        if word in ("--svg", "--json", "--plot") and "." in arguments[index + 1]:
            arguments[index + 1] = str(folder / arguments[index + 1])
    return arguments


PLANS = [command for command in CULET if command.words[1] in ("plan", "doctor", "--version")]


@pytest.mark.parametrize("command", PLANS, ids=str)
def test_plans_run(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_refusal = "--gpu cpu --attention-backend triton" in shlex.join(command.words)
    assert run(in_folder(command, tmp_path)) == (NO_RETRY if is_refusal else 0)
    out, err = capsys.readouterr()
    assert err.startswith("error: ") if is_refusal else out


# Files in the documents


def yaml_blocks() -> list[tuple[str, str]]:
    return [(page_name(page), block) for page in PAGES for block in blocks(page, "yaml")]


def test_config_files(tmp_path: Path) -> None:
    files = [block for _, block in yaml_blocks() if block.startswith("# culet.yaml")]
    assert files
    for text in files:
        path = tmp_path / "culet.yaml"
        path.write_text(text)
        assert read_settings(path, load("culet.cli.serve:serve"))["model"]


def test_kubernetes() -> None:
    """The manifest starts the server with flags that exist, and probes paths that exist."""
    from culet.serve.api import health

    documents = [entry for _, block in yaml_blocks() if "apiVersion" in block for entry in yaml.safe_load_all(block)]
    [deployment] = [entry for entry in documents if entry["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    check_culet(("culet", "serve", *container["args"]))
    paths = {endpoint.path for endpoint in health.ENDPOINTS}
    assert {container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")} <= paths
    drain_s = float(container["args"][container["args"].index("--drain-timeout") + 1])
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain_s + pause_s


def test_systemd(tmp_path: Path) -> None:
    service, socket = blocks(ROOT / "docs/guides/deployment.md", "ini")
    [command] = re.findall(r"^ExecStart=(.+)$", service, re.MULTILINE)
    program, *words = shlex.split(command)
    assert program.endswith("/culet")
    check_culet(("culet", *words))
    if shutil.which("systemd-analyze") is None:
        return
    service = service.replace(program, "/bin/true").replace("User=culet\n", "")
    for name, text in (("culet.service", service), ("culet.socket", socket)):
        (tmp_path / name).write_text(text)
    check = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "culet.service"), str(tmp_path / "culet.socket")]
    done = subprocess.run(check, capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "culet." in line]
    assert ours == []


def test_troubleshooting_quotes_real_messages() -> None:
    """Each message in a heading is written by Culet, or is known to come from another program."""
    others = {"Failed to find C compiler", "error: externally-managed-environment"}
    sources = "\n".join(path.read_text() for path in (ROOT / "culet").rglob("*.py"))
    sources = sources.replace("{CONFIG_FILE}", "config.json")
    text = (ROOT / "docs/guides/troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if message not in others and message not in sources] == []


# The checks themselves


@pytest.mark.parametrize("line", ["culet serve x --no-such-flag", "culet bench nonsense", "culet magic", "culet plan"])
def test_the_checks_find_mistakes(line: str) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check_culet(tuple(line.split()))


def test_pipes_and_environments_are_read() -> None:
    text = "A=1 culet serve x  # why\necho hi | culet chat \\\n    --seed 1\n"
    found = [command for words in shell_lines(text) for command in split_pipe("page.md", words)]
    assert [(entry.words, entry.stdin) for entry in found] == [
        (("culet", "serve", "x"), ""),
        (("echo", "hi"), ""),
        (("culet", "chat", "--seed", "1"), "hi\n"),
    ]
