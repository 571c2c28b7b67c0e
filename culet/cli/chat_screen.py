"""What `culet chat` shows: answers as Markdown at a terminal, and as plain text elsewhere.

Only answers go to stdout. Thoughts, notes and the speed go to stderr.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import click

from culet import env
from culet.log import logger

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

# An answer may hold the control characters that move the cursor or change the terminal. They are not shown.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_REFRESHES_PER_S = 12


def split_blocks(text: str) -> tuple[list[str], str]:
    """Return the finished Markdown blocks of a text and the rest. An empty line ends a block, except within a code fence."""
    blocks: list[str] = []
    lines: list[str] = []
    fence = ""
    *complete, last = text.split("\n")
    for line in complete:
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip(fence[0] + " "):
            fence = ""
        if line.strip() or fence:
            lines.append(line)
        elif lines:
            blocks.append("\n".join(lines))
            lines = []
    return blocks, "\n".join([*lines, last])


class LiveAnswer:
    """One answer while it arrives. Use it with `with`."""

    def __init__(self, console: Console | None) -> None:
        """Create an answer that is rendered on `console`, or written to stdout as it is."""
        self._console = console
        self._live: Live | None = None
        self._pieces: list[str] = []
        self._unfinished = ""
        self._num_blocks = 0
        self._is_thinking = False
        self._num_tokens = self._num_first = 0
        self._started_at = time.perf_counter()
        self._first_at = self._last_at = self._started_at

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def __enter__(self) -> LiveAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        """Show what is left of the answer. After Ctrl-C this is a part of it."""
        if self._is_thinking:
            click.echo(err=True)
        if self._console is None:
            click.echo()
            return
        self._stop_live()
        if self._unfinished.strip():
            self._print_block(self._unfinished)

    def add(self, text: str, reasoning: str, num_tokens: int) -> None:
        """Show the next part of the answer or of the thought."""
        self._last_at = time.perf_counter()
        if not self._num_tokens:
            self._first_at, self._num_first = self._last_at, num_tokens
        self._num_tokens += num_tokens
        if reasoning:
            click.echo(click.style(reasoning.translate(_CONTROLS), dim=True), nl=False, err=True)
            self._is_thinking = True
        if not text:
            return
        if self._is_thinking:
            click.echo("\n", err=True)
            self._is_thinking = False
        self._pieces.append(text)
        if self._console is None:
            click.echo(text, nl=False)
            sys.stdout.flush()
        else:
            self._render(text.translate(_CONTROLS))

    def speed(self) -> str:
        """Return the number of tokens, their rate after the first, and the time to the first."""
        wait = self._first_at - self._started_at
        parts = [f"{self._num_tokens} tokens", f"first after {wait:.2f} s"]
        if self._num_tokens > self._num_first:
            rate = (self._num_tokens - self._num_first) / (self._last_at - self._first_at)
            parts.insert(1, f"{rate:.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s")
        return ", ".join(parts)

    @property
    def is_empty(self) -> bool:
        return self._num_tokens == 0

    # Markdown

    def _render(self, text: str) -> None:
        """Print the blocks that are finished, and show the one that is not until it is."""
        from rich.live import Live
        from rich.markdown import Markdown

        blocks, self._unfinished = split_blocks(self._unfinished + text)
        if blocks:
            self._stop_live()
            for block in blocks:
                self._print_block(block)
        if not self._unfinished.strip():
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=_REFRESHES_PER_S)
            self._live.start()
        self._live.update(Markdown(self._unfinished))

    def _print_block(self, block: str) -> None:
        from rich.markdown import Markdown

        assert self._console is not None
        if self._num_blocks:
            self._console.print()
        self._console.print(Markdown(block))
        self._num_blocks += 1

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def loading(model: str) -> AbstractContextManager[object]:
    """Show that the model is being loaded, if someone is watching and the log does not say so."""
    if not sys.stderr.isatty() or logger.isEnabledFor(logging.INFO):
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True, no_color=bool(env.NO_COLOR.get())).status(f"loading {model}")


class Screen:
    """Where a chat reads and writes. `markdown` renders answers if stdout is a terminal."""

    def __init__(self, *, markdown: bool) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._has_color = not env.NO_COLOR.get()
        self._has_readline = False
        self._console: Console | None = None
        if markdown and sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False, no_color=not self._has_color)

    def answer(self) -> LiveAnswer:
        return LiveAnswer(self._console)

    def note(self, text: str, *, color: str | None = None) -> None:
        """Show a line that is not part of the conversation."""
        click.secho(text, err=True, dim=color is None, fg=color, color=None if self._has_color else False)

    def read_line(self, prompt: str = "> ") -> str | None:
        """Return the next line, or None at the end of input."""
        if not self.is_interactive:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        self._load_readline()
        try:
            if sys.stdout.isatty():
                return input(self._styled(prompt))
            # input() would write its prompt to stdout, between the answers.
            click.echo(prompt, nl=False, err=True)
            return input()
        except EOFError:
            click.echo(err=True)
            return None

    def _styled(self, prompt: str) -> str:
        if not self._has_color:
            return prompt
        start, end = "\x1b[1;32m", "\x1b[0m"
        # readline must know which characters take no room.
        return f"\x01{start}\x02{prompt}\x01{end}\x02" if self._has_readline else f"{start}{prompt}{end}"

    def _load_readline(self) -> None:
        """Give input() line editing and history, where the platform has them."""
        if not self._has_readline:
            try:
                import readline  # noqa: F401
            except ImportError:
                return
            self._has_readline = True
