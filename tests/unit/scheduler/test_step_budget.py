"""Chunks of prompts follow measured step times, so that running answers do not stop while a long prompt is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from culet.config import ScheduleConfig
from culet.errors import ConfigError
from culet.scheduler.budget import BRISK_SHARE, CPU_MIN_STEP, LEARN_SHARE, MIN_STEP, NUM_SPEEDS, StepBudget, make_step_budget
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.sequence import Sequence
from culet.types import Drawn, MediaSpan, Request, StepPlan, StepResult
from tests.engine.scheduler.drive import make_layout, make_request

LAYOUT = make_layout((1024, 64), (None, 256))
NUM_CHATS, NUM_PROMPTS, PROMPT_LEN = 31, 30, 8000


def cost(num_tokens: int) -> float:
    """Return the seconds of a step of the 31B on an H200: 22 ms for a decode step, and 774 ms for 8192 tokens."""
    return 0.004 + max(0.018, num_tokens * 94e-6)


@dataclass
class Simulation:
    """What clients see of a scheduler whose steps take the time of `cost`."""

    gaps: list[float]  # seconds between two tokens of a chat
    first_tokens: list[float]  # seconds from the arrival of a prompt to its first token
    num_tokens: int  # of prompts and answers, until the last prompt was answered
    seconds: float

    def percentile(self, share: float) -> float:
        return sorted(self.gaps)[int(share * (len(self.gaps) - 1))]

    @property
    def throughput(self) -> float:
        return self.num_tokens / self.seconds


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(plan: StepPlan) -> StepResult:
    drawn = tuple(Drawn(slot, (5,), (), 0) for row in plan.rows for slot in row.draw_slots)
    return StepResult(plan.step_id, drawn, {})


def request(name: str, first: int, prompt_len: int, max_tokens: int) -> Request:
    return make_request(name, [first, *[7] * (prompt_len - 1)], max_tokens, stop=False)


def simulate(
    budget: int,
    max_step_ms: int,
    num_prompts: int = NUM_PROMPTS,
    cost: Callable[[int], float] = cost,
    num_chats: int = NUM_CHATS,
    on_cpu: bool = False,
) -> Simulation:
    """Run chats, and let a long prompt arrive every second."""
    clock = Clock()
    scheduler = Scheduler(
        LAYOUT,
        20_000,
        ScheduleConfig(64, budget, max_step_ms=max_step_ms),
        max_model_len=20_000,
        prefix_caching=False,
        clock=clock,
        on_cpu=on_cpu,
    )
    for number in range(num_chats):
        scheduler.add(request(f"chat {number}", number, 100, 10_000))
    while scheduler.stats().counters.step_tokens < num_chats * 101:  # until all chats decode
        scheduler.apply(answer(scheduler.schedule()))  # type: ignore[arg-type]
        clock.now += cost(num_chats)
    scheduler.deltas()
    begin, before, last, gaps, firsts, arrived = clock.now, scheduler.stats().counters.step_tokens, {}, [], {}, 0
    while len(firsts) < num_prompts:
        while arrived < num_prompts and begin + arrived <= clock.now:
            scheduler.add(request(f"prompt {arrived}", 100 + arrived, PROMPT_LEN, 16))
            arrived += 1
        plan = scheduler.schedule()
        assert plan is not None
        clock.now += cost(plan.num_tokens)
        scheduler.apply(answer(plan))
        for delta in scheduler.deltas():
            kind, number = delta.request_id.split()
            if kind == "prompt":
                firsts.setdefault(number, clock.now - begin - int(number))
            else:
                gaps += [clock.now - last[number]] if number in last else []
                last[number] = clock.now
    num_tokens = scheduler.stats().counters.step_tokens - before
    return Simulation(gaps, list(firsts.values()), num_tokens, clock.now - begin)


def test_chats_do_not_stop_while_long_prompts_arrive() -> None:
    """31 chats run while a prompt of 8,000 tokens arrives every second."""
    fixed, followed = simulate(8192, 0), simulate(8192, 100)
    assert fixed.percentile(0.99) > 0.7
    assert followed.percentile(0.99) <= 0.120
    assert followed.throughput >= 0.95 * fixed.throughput


def test_prompts_advance_beside_chats_where_every_step_is_slow() -> None:
    """A large model on a CPU: half a second to read the weights, and 4 ms per token. Chats get at most half as fast."""

    def slow(num_tokens: int) -> float:
        return 0.5 + 0.004 * num_tokens

    whole = simulate(1024, 0, 1, slow, 4, on_cpu=True)
    followed = simulate(1024, 100, 1, slow, 4, on_cpu=True)
    assert followed.first_tokens[0] < 3 * whole.first_tokens[0]
    assert followed.percentile(0.99) < 2 * slow(4)


def test_steps_may_take_twice_as_long_as_decoding_only_on_a_cpu() -> None:
    budget = make_step_budget(ScheduleConfig(8, 1024, max_step_ms=100), on_cpu=True)
    for _ in range(9):
        budget.took(4, 0.5, 0)
        budget.took(64, 1.0, 60)
    assert budget._num_tokens == 64
    on_gpu = make_step_budget(ScheduleConfig(8, 8192, max_step_ms=100), on_cpu=False)
    for _ in range(9):
        on_gpu.took(4, 0.5, 0)
        on_gpu.took(1024, 1.0, 1020)
    assert on_gpu._num_tokens == MIN_STEP


def test_steps_are_short_again_when_decoding_is_no_longer_slow() -> None:
    """The machine was busy with something else for a while. No step without a chunk follows."""
    budget = make_step_budget(ScheduleConfig(8, 1024, max_step_ms=100), on_cpu=True)
    for _ in range(NUM_SPEEDS):
        budget.took(16, 1.0, 12)
    seconds = 0.0
    for _ in range(4 * NUM_SPEEDS):
        num_tokens = int(budget._num_tokens)
        seconds = 0.01 + 0.001 * num_tokens
        budget.took(num_tokens, seconds, num_tokens - 4)
    assert seconds == pytest.approx(0.1, rel=0.1)


def test_without_running_answers_chunks_are_as_long_as_the_budget() -> None:
    scheduler = Scheduler(LAYOUT, 2000, ScheduleConfig(64, 8192, max_step_ms=1), max_model_len=20_000, clock=Clock())
    scheduler.add(request("a", 1, 10_000, 2))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == 8192


@pytest.mark.parametrize("base_s", [0.0, 0.02, 0.09])
def test_the_number_of_tokens_settles_where_a_step_takes_its_time(base_s: float) -> None:
    budget = StepBudget(8192, 0.1)
    for _ in range(60):
        num_tokens = int(budget._num_tokens)
        budget.took(num_tokens, base_s + num_tokens * 2e-5)
    assert base_s + budget._num_tokens * 2e-5 == pytest.approx(0.1, rel=0.05)


def test_one_slow_step_changes_nothing_and_more_of_them_halve_the_number_each_time() -> None:
    budget = StepBudget(8192, 0.1)
    budget.took(1024, 0.1)
    budget.took(1024, 30.0)
    assert budget._num_tokens == 1024
    budget.took(1024, 30.0)
    assert budget._num_tokens == 512
    for _ in range(5):
        budget.took(1024, 30.0)
    assert budget._num_tokens == MIN_STEP


def test_a_step_with_few_tokens_says_nothing() -> None:
    budget = StepBudget(8192, 0.1)
    for num_tokens in (MIN_STEP - 1, int(LEARN_SHARE * 1024) - 1):
        for _ in range(3):
            budget.took(num_tokens, 1e-4)
    assert budget._num_tokens == 1024


def test_the_number_grows_again_when_slow_steps_are_long_ago() -> None:
    budget = StepBudget(8192, 0.1)
    for seconds in (0.1, 0.2, 0.2, *[0.1] * NUM_SPEEDS):
        budget.took(1024, seconds)
    assert budget._num_tokens == pytest.approx(1024)


def test_steps_have_few_sizes() -> None:
    budget = StepBudget(8192, 0.1)
    chat = Sequence(request("chat", 1, 1, 4), 0, 0, LAYOUT, is_cached=False)
    sizes = set()
    for num_tokens in range(257, 8192):
        budget._num_tokens = num_tokens
        sizes.add(size := budget.of_step([chat], None))
        assert 8 / 9 * num_tokens < size <= num_tokens
    assert len(sizes) == 5 * 8


def test_slow_steps_count_if_times_vary() -> None:
    """Answers wait for slow steps, so chunks are sized for them: few steps take longer than the limit."""
    random, budget, times = Random(0), StepBudget(8192, 0.1), []
    for _ in range(2000):
        num_tokens = int(budget._num_tokens)
        times.append(num_tokens * 1e-4 * random.uniform(0.85, 1.15))
        budget.took(num_tokens, times[-1])
    assert sum(seconds > 0.1 for seconds in times) < 0.15 * len(times)
    assert max(times) < 0.12
    assert sum(times) / len(times) > 0.08


def test_an_image_larger_than_the_chunk_is_computed_as_a_whole() -> None:
    clock = Clock()
    scheduler = Scheduler(LAYOUT, 2000, ScheduleConfig(8, 4096, max_step_ms=1), max_model_len=20_000, clock=clock)
    scheduler.add(request("chat", 1, 100, 1000))
    scheduler.apply(answer(scheduler.schedule()))  # type: ignore[arg-type]
    image = replace(request("image", 2, 3000, 4), media=(MediaSpan(10, 2000, b"cat"),))
    scheduler.add(image)
    sizes = []
    while not any(delta.request_id == "image" for delta in scheduler.deltas()):
        plan = scheduler.schedule()
        assert plan is not None
        sizes.append(plan.num_tokens)
        clock.now += 1.0
        scheduler.apply(answer(plan))
    assert 2001 in sizes
    assert max(sizes) < 3000


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="max-step-ms: got -1"):
        ScheduleConfig(max_step_ms=-1)


def test_steps_between_short_prompts_take_their_share_of_the_time() -> None:
    """A step takes 14 ms and 1.1 ms per token, as on a CPU. One slow step does not make the next ones small for good."""
    budget = StepBudget(1024, 0.1, CPU_MIN_STEP)
    for _ in range(20):
        budget.took(CPU_MIN_STEP, 1.0)  # something else was using the cores
    num_tokens = 0
    for _ in range(20):
        num_tokens = budget.of_step((), None, is_brisk=True)
        budget.took(num_tokens, 0.014 + 0.0011 * num_tokens)
    assert 0.014 + 0.0011 * num_tokens == pytest.approx(BRISK_SHARE * 0.1, rel=0.1)


def test_tenants_do_not_shrink_each_others_chunks() -> None:
    budget = StepBudget(1024, 0.1, CPU_MIN_STEP)
    for _ in range(20):
        budget.took(64, 1.0)  # far too slow
    assert budget.of_step((), None, is_brisk=True) == CPU_MIN_STEP
    assert budget.of_step((), None, is_brisk=True, is_shared=True) == MIN_STEP
