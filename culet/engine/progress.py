"""A progress bar for offline runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(count: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if there are several prompts and stderr is a terminal.

    Yields a function to call with the number of tokens of each finished prompt.
    """
    if count < 2 or not sys.stderr.isatty():
        yield lambda num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    speed = TextColumn("{task.fields[speed]}")
    began, total = time.monotonic(), 0
    with Progress(*columns, speed, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=count, speed="")

        def advance(num_tokens: int) -> None:
            nonlocal total
            total += num_tokens
            bar.update(task, advance=1, speed=f"{total / (time.monotonic() - began):.0f} tokens/s")

        yield advance
