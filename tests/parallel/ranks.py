"""Processes that are the ranks of one gloo group. They run functions of `jobs.py` together, so a start serves many tests."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank

CPU = torch.device("cpu")
WAIT_S = 300.0  # for a job, on a busy machine


class Ranks:
    """Runs the same job on every rank. If one fails, the group cannot be used any more."""

    def __init__(self, size: int, folder: Path) -> None:
        # Ranks are forked from a fresh process that has only imported their modules, which takes seconds and is done once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.jobs"])
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, index, size, str(folder / "ranks")), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run job(group, *arguments) on all ranks and return the results by rank."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        results = []
        for index, pipe in enumerate(self._pipes):
            assert pipe.poll(WAIT_S), f"rank {index} did not answer"
            is_error, result = pipe.recv()
            assert not is_error, f"rank {index}: {result}"
            results.append(result)
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, index: int, size: int, meeting_file: str) -> None:
    torch.set_num_threads(1)
    group = RankGroup.join(Rank(index, size), meeting_file, CPU)
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            sys.exit()
        try:
            pipe.send((False, job(group, *arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
