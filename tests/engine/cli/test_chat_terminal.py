"""`culet chat` at a terminal: prompt, Markdown, commands, messages of several lines, speed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pytest

from culet.config import BUILT_IN

LIMIT_S = 120.0


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._process_id, self._descriptor = pty.fork()
        if self._process_id == 0:
            os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24", OMP_NUM_THREADS="1")
            os.environ.pop("NO_COLOR", None)
            os.execv(command[0], command)
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def read_until(self, text: str) -> str:
        """Return what is shown up to `text`, without colours and cursor movements."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self._unread:
            assert time.monotonic() < deadline, self._unread
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self._unread = plain(self._unread + os.read(self._descriptor, 65536).decode(errors="replace"))
        shown, _, self._unread = self._unread.partition(text)
        return shown

    def end(self) -> int:
        """Send Ctrl-D and return the exit code."""
        self.type("\x04")
        _, status = os.waitpid(self._process_id, 0)
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(status)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.slow
def test_a_conversation(tmp_path: Path) -> None:
    terminal = Terminal(sys.executable, "-m", "culet.cli.main", "chat", "-m", BUILT_IN, "--seed", "1")
    start = terminal.read_until("> ")
    assert "built-in model" in start
    assert "INFO" not in start, "it is quiet by default"
    terminal.type("Make a list of these: bread, milk and apples.\n")
    answer = terminal.read_until("tokens/s")
    assert " • bread" in answer
    terminal.read_until("> ")
    terminal.type('"""Hello!\nMy name is Mira."""\n')
    assert "Mira" in terminal.read_until("tokens/s")
    terminal.read_until("> ")
    terminal.type("/help\n")
    shown = terminal.read_until("Ctrl-C")
    assert all(command in shown for command in ("/clear", "/system", "/save", "/exit"))
    terminal.read_until("> ")
    for name in ("chat.json", "chat.md", "chat.md"):
        terminal.type(f"/save {tmp_path / name}\n")
        terminal.read_until("> ")
    assert terminal.end() == 0
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [message["role"] for message in saved] == ["user", "assistant", "user", "assistant"]
    assert saved[2]["content"] == "Hello!\nMy name is Mira."
    assert "- bread" in (tmp_path / "chat.md").read_text()


def test_messages_of_several_lines_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from culet.cli.chat import Conversation
    from culet.cli.chat_screen import Screen
    from culet.types import SamplingParams

    lines = iter(['"""first', "", 'second"""', "one \\", "two", '"""open', "end"])
    screen = Screen(markdown=True)
    screen.read_line = lambda prompt="> ": next(lines, None)  # type: ignore[method-assign]
    conversation = Conversation(None, SamplingParams(), screen, system=None, enable_thinking=False)  # type: ignore[arg-type]
    assert [conversation._read() for _ in range(4)] == ["first\n\nsecond", "one \ntwo", "open\nend", None]
