"""Writing to a log that nobody reads never blocks. Lines are dropped and counted instead."""

from __future__ import annotations

import io
import os
import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from culet.child import child_environment, python_command
from culet.log import QueuedWriter, logger

LINE = b"x" * 999 + b"\n"
PATIENCE_S = 60.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def drain(reader: int, writer: QueuedWriter) -> bytes:
    """Read everything that was queued."""
    os.set_blocking(reader, False)
    data, deadline = b"", time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline
        is_idle = writer._is_idle.is_set()
        try:
            data += os.read(reader, 1 << 16)
        except BlockingIOError:
            if is_idle:
                return data
            time.sleep(0.01)


def test_a_full_pipe_drops_whole_lines(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, descriptor = pipe
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("WARNING", logger="culet"):
        writer = QueuedWriter(descriptor, max_pending_bytes=100_000)
        for _ in range(1000):  # the pipe holds 64 KB
            assert writer.write(LINE) == len(LINE)
        assert 800 <= writer.num_dropped < 1000
        data = drain(reader, writer)
    assert data == LINE * (1000 - writer.num_dropped)
    records = {id(record): record for record in caplog.records}.values()  # another test may have attached the handler twice
    reports = [re.match(r"(\d+) lines of the log were dropped", record.getMessage()) for record in records]
    assert sum(int(report[1]) for report in reports if report) == writer.num_dropped


def test_a_reader_that_left_does_not_matter(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    duplicate = os.dup(reader)
    writer = QueuedWriter(descriptor)
    os.close(duplicate)
    os.dup2(os.open(os.devnull, os.O_RDONLY), reader)  # closes the last reader of the pipe
    writer.write(LINE)
    writer.flush_within(PATIENCE_S)
    assert writer.num_dropped == 1


def test_flushing_has_a_limit(pipe: tuple[int, int]) -> None:
    _, descriptor = pipe
    writer = QueuedWriter(descriptor)
    writer.write(b"x" * 500_000)
    began = time.monotonic()
    writer.flush_within(0.2)
    assert time.monotonic() - began < PATIENCE_S


def test_text_is_written_as_it_is(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    writer = QueuedWriter(descriptor)
    stream = io.TextIOWrapper(writer, encoding="utf-8", write_through=True)
    stream.write("a line with é\n")
    writer.flush_within(PATIENCE_S)
    assert os.read(reader, 100) == "a line with é\n".encode()
    stream.detach()


def test_a_program_ends_although_nobody_reads(tmp_path: os.PathLike[str]) -> None:
    """It logs more than fits, and ends by itself. Its last lines get a short time, not forever."""
    code = "from culet.log import *; setup_logging(); queue_stderr(); [logger.info('x' * 500) for _ in range(3000)]"
    *python, main, folder, _ = python_command("module")
    main = main[: main.index("runpy.run_module")] + code
    process = subprocess.Popen([*python, main, folder, "module"], env=child_environment(), stderr=subprocess.PIPE)
    try:
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()
