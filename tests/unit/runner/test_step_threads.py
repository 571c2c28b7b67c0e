"""How many of torch's threads a step on a CPU uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from culet.runner.step_threads import FIRST_RETRY_S, StepThreads, idle_seconds


class Machine:
    """A simulated machine with four cores. A step takes 10 ms of the engine's CPU time."""

    def __init__(self) -> None:
        self.now = self.cpu = self.idle = 0.0
        self.is_busy = False
        self.threads = StepThreads(clock=lambda: self.now, cpu_clock=lambda: self.cpu, idle_clock=lambda: self.idle)
        self.used: list[int] = []  # threads of each step

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.idle += 0.0 if self.is_busy else 3 * seconds

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            with self.threads.use(), self.threads.measure():
                self.used.append(torch.get_num_threads())
                self.cpu += 0.01
                self.wait(0.04 if self.is_busy and self.used[-1] > 1 else 0.011)


@pytest.fixture
def machine() -> Iterator[Machine]:
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield Machine()
    torch.set_num_threads(usual)


def test_idle_cores_are_all_used(machine: Machine) -> None:
    machine.run(20)
    assert set(machine.used) == {4}


def test_one_thread_while_others_use_the_cores(machine: Machine) -> None:
    machine.run(5)
    machine.is_busy = True
    machine.run(1000)
    assert machine.used[:6] == [4] * 6  # the sixth step found out
    assert set(machine.used[6:]) == {1}
    assert torch.get_num_threads() == 4  # outside of steps


def test_all_threads_again_when_cores_are_idle(machine: Machine) -> None:
    machine.is_busy = True
    machine.run(10)
    machine.is_busy = False
    machine.wait(2 * FIRST_RETRY_S)
    machine.run(3)
    assert machine.used[-3:] == [4] * 3


def test_tries_that_fail_become_rare(machine: Machine) -> None:
    """Cores may look idle and still be missing whenever the threads need them."""
    machine.is_busy = True
    for _ in range(10_000):
        machine.run(1)
        machine.idle += 1.0
    assert 3 <= machine.used.count(4) <= 10
    assert machine.used[-1000:].count(4) <= 1


def test_a_step_that_fails_leaves_torch_as_it_was(machine: Machine) -> None:
    machine.is_busy = True
    machine.run(2)
    with pytest.raises(RuntimeError), machine.threads.use(), machine.threads.measure():
        raise RuntimeError
    assert torch.get_num_threads() == 4


def test_the_machine_says_how_long_its_cores_were_idle() -> None:
    assert 0 < idle_seconds() <= float("inf")
