"""The code blocks of the documents, and the commands in them."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from culet.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@dataclass(frozen=True)
class Command:
    """One command of a shell line: its words, what is piped into it, its environment, and the block that it is in."""

    page: str
    words: tuple[str, ...]
    stdin: str = ""
    environment: tuple[str, ...] = ()
    block: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    """Return a page's code blocks in any of the languages. An empty language is a block without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def shell_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of a shell block. Comments are dropped and continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def commands(path: Path) -> list[Command]:
    """Return the commands of a page's shell blocks."""
    found = []
    for block in blocks(path, "bash"):
        for words in shell_lines(block):
            found += [replace(command, block=block) for command in split_pipe(page_name(path), words)]
    for block in blocks(path, ""):
        lines = [line for line in block.splitlines() if line.startswith("culet ")]
        found += [Command(page_name(path), tuple(shlex.split(line, comments=True))) for line in lines]
    return found


def split_pipe(page: str, words: list[str]) -> Iterator[Command]:
    """Yield the commands of a pipe. What `echo` writes is the next one's stdin."""
    stdin = ""
    while words:
        end = words.index("|") if "|" in words else len(words)
        part, words = words[:end], words[end + 1 :]
        start = next((index for index, word in enumerate(part) if not re.match(r"^[A-Z_]+=", word)), len(part))
        if part[start:]:
            yield Command(page, tuple(part[start:]), stdin, tuple(part[:start]))
        stdin = part[1] + "\n" if part[0] == "echo" else ""


def check_arguments(command: click.Command, name: str, arguments: list[str]) -> None:
    """Raise if a command does not take these arguments."""
    context = command.make_context(name, list(arguments), resilient_parsing=False)
    if isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        chosen = command.get_command(context, rest[0]) if rest else None
        assert chosen is not None, f"no such command: {name} {' '.join(rest)}"
        check_arguments(chosen, rest[0], rest[1:])


def check_culet(words: tuple[str, ...]) -> None:
    """Raise if `culet` does not take these words."""
    _, name, *arguments = words
    if name in ("--version", "--help"):
        return
    assert name in COMMANDS, f"no such command: {name}"
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    with contextlib.suppress(click.exceptions.Exit):  # --help
        check_arguments(command, name, arguments)


def all_flags() -> set[str]:
    """Return every flag of every command."""
    found: set[str] = {"--version", "--help"}

    def visit(command: click.Command) -> None:
        for option in command.params:
            if isinstance(option, click.Option):
                found.update(option.opts + option.secondary_opts)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                visit(child)

    visit(cli)
    return found
