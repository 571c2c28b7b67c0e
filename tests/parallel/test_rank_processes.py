"""Ranks live and die together: their processes end as one, whichever of them dies, hangs or fails, and with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from culet.errors import ConfigError, WorkerDied
from culet.kernels.compiling import CompileCount
from culet.media.items import MediaItem, MediaKind
from culet.runner import worker as worker_module
from culet.runner.worker import ProcessWorker, StepDone
from culet.types import StepPlan
from tests.serve.running import wait_for

PATIENCE_S = 60  # for what takes no time on an idle machine
LIMIT_S = 8  # for a rank to give a sign of life, which takes a fraction of a second on an idle machine
SILENCE = rf"rank \d has given no sign of life for {LIMIT_S} s"
BUILDER = "tests.parallel.fake_ranks:build"


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, (), (), ())


def is_gone(pid: int) -> bool:
    """Return whether a process has ended. Nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@contextmanager
def ranks(folder: Path, **arguments: int) -> Iterator[ProcessWorker]:
    worker = ProcessWorker(BUILDER, num_ranks=arguments.get("size", 2), folder=str(folder), **arguments)
    try:
        yield worker
    finally:
        worker.close()
    assert all(map(is_gone, worker.pids))


def test_steps(tmp_path: Path) -> None:
    """Every rank gets every plan, also ahead of results. What the first rank reports counts."""
    with ranks(tmp_path, size=3) as worker:
        assert worker.num_slabs == 7
        steps = [worker.launch(plan(step_id)) for step_id in range(4)]
        assert [step.result().drawn[0].token_ids for step in steps] == [(0,), (1,), (2,), (3,)]
        assert worker.device_seconds()["verify"] == 0.0
        assert worker.num_host_pages == 5  # what every rank has
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{step}.{rank}" for step in range(4) for rank in range(3)]


def test_counts_of_compiled_kernels(tmp_path: Path) -> None:
    """Those of the rank that compiled most, above all while serving. A result has them only if they have changed."""

    def run(step_id: int) -> tuple[CompileCount | None, CompileCount | None]:
        step = worker.launch(plan(step_id))
        step.result()
        assert isinstance(step.report, StepDone)
        return step.report.compile_count, worker.compile_count

    with ranks(tmp_path, compile_step=3) as worker:
        assert worker.compile_count == CompileCount(compiled=6, found=9)
        assert run(0)[1] == CompileCount(compiled=6, found=9)
        assert run(1) == (None, CompileCount(compiled=6, found=9))
        worker.begin_serving()
        assert run(2)[1] == CompileCount(compiled=6, found=9, is_serving=True)
        of_first_rank = CompileCount(compiled=5, found=9, is_serving=True, while_serving=1)
        assert run(3) == (of_first_rank, of_first_rank)
        assert run(4) == (None, of_first_rank)


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_is_killed(tmp_path: Path, index: int) -> None:
    with ranks(tmp_path) as worker:
        worker.launch(plan(0)).result()
        os.kill(worker.pids[1 - index], signal.SIGSTOP)  # so that the step cannot end
        step = worker.launch(plan(1))
        os.kill(worker.pids[index], signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            step.result()
        assert (
            caught.value.message == f"rank {index}'s worker process {worker.pids[index]} exited unexpectedly with exit code -9"
        )
        assert "out of memory" in caught.value.hint
        with pytest.raises(WorkerDied, match=f"rank {index}'s worker process {worker.pids[index]} exited"):
            worker.launch(plan(2))  # the other rank was killed only afterwards
        assert all(map(is_gone, worker.pids))


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_is_killed_between_steps(tmp_path: Path, index: int) -> None:
    """The engine sees it without a step."""
    with ranks(tmp_path) as worker:
        worker.launch(plan(0)).result()
        worker.check()
        assert select.select(worker.descriptors, [], [], 0)[0] == []
        os.kill(worker.pids[index], signal.SIGKILL)
        assert select.select(worker.descriptors, [], [], PATIENCE_S)[0] == [worker.descriptors[index]]
        with pytest.raises(WorkerDied, match=f"process {worker.pids[index]} exited unexpectedly with exit code -9"):
            worker.check()
        assert all(map(is_gone, worker.pids))


def test_ranks_ignore_the_signals_that_end_a_server(tmp_path: Path) -> None:
    """A signal to a whole control group must not end the ranks before running requests have ended."""
    with ranks(tmp_path) as worker:
        worker.launch(plan(0)).result()
        for pid in worker.pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert worker.launch(plan(1)).result().drawn[0].token_ids == (1,)


def test_a_process_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are ended."""
    started: list[subprocess.Popen[bytes]] = []
    start = worker_module.start_bound_process

    def start_one(module: str, descriptor: int) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start(module, descriptor))
        return started[0]

    monkeypatch.setattr(worker_module, "start_bound_process", start_one)
    with pytest.raises(OSError, match="no more processes"), ranks(tmp_path):
        pass
    assert started[0].returncode is not None


def test_a_check_keeps_results(tmp_path: Path) -> None:
    with ranks(tmp_path) as worker:
        steps = [worker.launch(plan(step_id)) for step_id in range(2)]
        assert select.select(worker.descriptors, [], [], PATIENCE_S)[0]
        worker.check()
        assert [step.result().drawn[0].token_ids for step in steps] == [(0,), (1,)]


def test_a_rank_that_hangs_in_a_step(tmp_path: Path) -> None:
    with ranks(tmp_path, limit_s=LIMIT_S) as worker:
        os.kill(worker.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=SILENCE):
            worker.launch(plan(0)).result()
        assert all(map(is_gone, worker.pids))


@pytest.mark.slow
def test_a_rank_that_hangs_and_reads_nothing(tmp_path: Path) -> None:
    """A plan with many images is larger than what a connection holds."""
    with ranks(tmp_path, limit_s=LIMIT_S) as worker:
        os.kill(worker.pids[1], signal.SIGSTOP)
        items = tuple(MediaItem(MediaKind.IMAGE, bytes(32), 9, (144, 144, 3), bytes(1 << 20)) for _ in range(8))
        with pytest.raises(WorkerDied, match=SILENCE):
            worker.launch(StepPlan(0, (), (), (), encodes=items))
        assert all(map(is_gone, worker.pids))


def test_a_rank_that_hangs_at_start(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=SILENCE):
        ProcessWorker("tests.parallel.fake_ranks:hang", num_ranks=2, limit_s=LIMIT_S, folder=str(tmp_path))


def test_a_rank_that_lives_but_makes_no_progress(tmp_path: Path) -> None:
    """Its signs of life come from a thread of their own."""
    with pytest.raises(WorkerDied) as caught:
        ProcessWorker("tests.parallel.fake_ranks:wait", num_ranks=2, build_limit_s=5.0, folder=str(tmp_path))
    problem = "no rank has made progress with its start for 5 s (rank 0 is at: the meeting, rank 1 is at: the weights)"
    assert caught.value.message == problem
    assert "step_s" in str(caught.value.hint)


def test_ranks_that_make_progress_may_take_long(tmp_path: Path) -> None:
    """It is enough if one of them does, because others wait for it."""
    worker = ProcessWorker(
        "tests.parallel.fake_ranks:build_in_parts", num_ranks=2, build_limit_s=4.0, folder=str(tmp_path), build_s=7.0
    )
    worker.close()
    assert worker.num_slabs == 7


@pytest.mark.slow
def test_ranks_that_take_long_to_start(tmp_path: Path) -> None:
    """The limit is on silence, not on the start."""
    worker = ProcessWorker(
        "tests.parallel.fake_ranks:build_slowly", num_ranks=2, limit_s=15, folder=str(tmp_path), build_s=20.0
    )
    worker.close()
    assert worker.num_slabs == 7


def test_a_rank_that_fails(tmp_path: Path) -> None:
    """The other rank would wait for it forever."""
    with ranks(tmp_path) as worker:
        with pytest.raises(WorkerDied, match="rank 1 failed: ValueError: a bad step"):
            worker.launch(plan(-1)).result()
        assert all(map(is_gone, worker.pids))


def test_ranks_that_draw_different_tokens(tmp_path: Path) -> None:
    with ranks(tmp_path, odd_step=1) as worker:
        worker.launch(plan(0)).result()
        for step_id in (1, 2):
            with pytest.raises(WorkerDied, match="ranks 0 and 1 drew different tokens"):
                worker.launch(plan(step_id)).result()


def test_a_rank_that_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1 does not like this") as caught:
        ProcessWorker("tests.parallel.fake_ranks:refuse", num_ranks=2, folder=str(tmp_path))
    assert caught.value.hint == "try something else"


_PARENT = f"""
import sys, threading
from culet.runner.worker import ProcessWorker
made = []
thread = threading.Thread(target=lambda: made.append(ProcessWorker("{BUILDER}", num_ranks=2, folder=sys.argv[1])))
thread.start()
thread.join()  # the ranks outlive the thread that started them
print(*made[0].pids, flush=True)
sys.stdin.read()
"""


HEALTHY = pytest.param(signal.SIGCONT, marks=pytest.mark.slow)


@pytest.mark.parametrize("number", [signal.SIGSTOP, HEALTHY], ids=["hanging", "healthy"])
def test_a_parent_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """Ranks end with their engine, even those that are stopped and cannot notice it."""
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.2)
        assert not any(map(is_gone, pids))
        for pid in pids:
            os.kill(pid, number)
        parent.kill()
    wait_for(lambda: all(map(is_gone, pids)), 5, "the ranks to end")


@pytest.mark.slow
def test_a_parent_that_exits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120, check=True)
    assert all(is_gone(int(pid)) for pid in done.stdout.split())
    assert not done.stderr
