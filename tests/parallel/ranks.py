"""Processes that are the ranks of one gloo group. They run functions of `jobs.py` together, so a start serves many tests."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank
from tests import forking
from tests.forking import Forked

CPU = torch.device("cpu")
_PIPE = 3  # the descriptor of a forked rank's end of the pipe
WAIT_S = 300.0  # for a job, on a busy machine


class Ranks:
    """Runs the same job on every rank. If one fails, the group cannot be used any more."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(size):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(_start(theirs, index, size, str(folder / "ranks")))
            theirs.close()
            self._pipes.append(ours)

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
            process.wait() if isinstance(process, Forked) else process.join()


def _start(pipe: Connection, *arguments: Any) -> Forked | BaseProcess:
    """Start a rank. It is forked from a process that has imported its modules, which takes seconds."""
    if forking.forker is not None:
        descriptors = {1: 1, 2: 2, _PIPE: pipe.fileno()}
        return forking.forker.start(_serve_pipe, *arguments, environment=os.environ, descriptors=descriptors)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.jobs"])
    process = context.Process(target=_serve, args=(pipe, *arguments), daemon=True)
    process.start()
    return process


def _serve_pipe(*arguments: Any) -> None:
    _serve(Connection(_PIPE), *arguments)


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
