"""Answers at a terminal: blocks of Markdown, control characters, speed. Shell completion."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from culet.cli.chat_screen import LiveAnswer, split_blocks

TEXT = """# Title

Some *words*
and more.


```python
x = 1

y = 2
```

1. one

2. two"""


def test_blocks() -> None:
    blocks, rest = split_blocks(TEXT)
    assert blocks == ["# Title", "Some *words*\nand more.", "```python\nx = 1\n\ny = 2\n```", "1. one"]
    assert rest == "2. two"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_blocks_do_not_depend_on_the_pieces(size: int) -> None:
    blocks, rest = [], ""
    for start in range(0, len(TEXT), size):
        more, rest = split_blocks(rest + TEXT[start : start + size])
        blocks += more
    assert (blocks, rest) == split_blocks(TEXT)


def test_a_longer_fence_holds_a_shorter_one() -> None:
    text = "````\n```\n\ninside\n```\n````\n\nafter"
    assert split_blocks(text) == (["````\n```\n\ninside\n```\n````"], "after")


def rendered(*pieces: str) -> str:
    """Return what a terminal without colours shows of an answer."""
    file = io.StringIO()
    with LiveAnswer(Console(file=file, width=60, force_terminal=False)) as answer:
        for piece in pieces:
            answer.add(piece, "", 1)
    assert answer.text == "".join(pieces)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_markdown_is_rendered_once() -> None:
    shown = rendered("Here is **bold**", " text.\n\n- one\n- t", "wo\n\n```\nco", "de\n```\n", "\nThe end.")
    assert shown.count("Here is bold text.") == 1
    assert shown.count("• one") == shown.count("• two") == shown.count("code") == shown.count("The end.") == 1
    assert "**" not in shown
    assert "```" not in shown


def test_control_characters_are_not_shown() -> None:
    shown = rendered("red\x1b[31m \x1b]0;title\x07\x9b2J", "\ttab\r")
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r"}
    assert "red" in shown


def test_plain_answers_are_written_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveAnswer(None) as answer:
        answer.add("", "a thought", 2)
        answer.add("**not", "", 1)
        answer.add(" rendered**", "", 3)
    out, err = capsys.readouterr()
    assert out == "**not rendered**\n"
    assert "a thought" in err
    assert answer.speed().startswith("6 tokens, ")
    assert "tokens/s, first after" in answer.speed()


def test_speed_of_one_token() -> None:
    with LiveAnswer(None) as answer:
        answer.add("x", "", 1)
    assert "tokens/s" not in answer.speed()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    environment = {**os.environ, "_CULET_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-m", "culet.cli.main"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "_CULET_COMPLETE" in done.stdout


def test_completion_of_commands_and_flags() -> None:
    def complete(words: str) -> str:
        environment = {
            **os.environ,
            "_CULET_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        return subprocess.run([sys.executable, "-m", "culet.cli.main"], env=environment, capture_output=True, text=True).stdout

    assert "plain,serve" in complete("culet ser")
    assert "plain,--max-num-seqs" in complete("culet serve --max-n")
    assert "plain,json" in complete("culet serve --log-format j")
