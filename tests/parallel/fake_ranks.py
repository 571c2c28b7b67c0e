"""Ranks without a model, for tests of processes. They start fast, and wait for each other in every step as real ones do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from culet.errors import ConfigError
from culet.kernels.compiling import CompileCount
from culet.parallel.progress import begin, mark_progress
from culet.types import Drawn, StepPlan, StepResult


class FakeRank:
    """Draws the step's number. A step waits until every rank has launched it, like a reduction."""

    num_slabs = 7

    def __init__(self, index: int, size: int, folder: Path, odd_step: int, compile_step: int) -> None:
        self.index, self.size, self.folder = index, size, folder
        self.odd_step, self.compile_step = odd_step, compile_step
        self.compile_count = CompileCount(compiled=4 + 2 * index, found=9)

    def launch(self, plan: StepPlan) -> FakeStep:
        (self.folder / f"{plan.step_id}.{self.index}").touch()
        if plan.step_id < 0 and self.index == 1:
            raise ValueError("a bad step")
        if plan.step_id == self.compile_step and self.index == 0:
            self.compile_count.compiled += 1
            self.compile_count.while_serving += self.compile_count.is_serving
        while not all((self.folder / f"{plan.step_id}.{index}").exists() for index in range(self.size)):
            time.sleep(0.005)
        token = plan.step_id + (self.index if plan.step_id == self.odd_step else 0)
        return FakeStep(StepResult(plan.step_id, (Drawn(0, (token,)),)))

    @property
    def num_host_pages(self) -> int:
        """Each rank has allocated more than the one before it."""
        return 5 + self.index

    def device_seconds(self) -> Mapping[str, float]:
        return {"verify": float(self.index), "draft": 0.0}

    def begin_serving(self) -> None:
        self.compile_count.begin_serving()

    descriptors = ()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeStep:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


def build(
    folder: str, rank_index: int, meeting_file: str, size: int = 2, odd_step: int = -1, compile_step: int = -1
) -> FakeRank:
    assert Path(meeting_file).parent.is_dir()
    return FakeRank(rank_index, size, Path(folder), odd_step, compile_step)


def build_slowly(folder: str, rank_index: int, meeting_file: str, build_s: float) -> FakeRank:
    time.sleep(build_s)
    return build(folder, rank_index, meeting_file)


def build_in_parts(folder: str, rank_index: int, meeting_file: str, build_s: float) -> FakeRank:
    """Let the last rank make progress. The other one waits for it."""
    begin("the meeting")
    deadline = time.monotonic() + build_s
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if rank_index == 1:
            mark_progress()
    return build(folder, rank_index, meeting_file)


def wait(folder: str, rank_index: int, meeting_file: str) -> FakeRank:
    """Hang on the last rank, without being stopped. The other one waits for it."""
    begin("the weights" if rank_index else "the meeting")
    while True:
        time.sleep(0.1)


def hang(folder: str, rank_index: int, meeting_file: str) -> FakeRank:
    """Stop the last rank. The other one waits for it."""
    while rank_index == 0:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("nobody lets it continue")


def refuse(folder: str, rank_index: int, meeting_file: str) -> FakeRank:
    """Refuse on the last rank. The others wait for it."""
    while rank_index == 0:
        time.sleep(0.1)
    raise ConfigError("rank 1 does not like this", hint="try something else")
