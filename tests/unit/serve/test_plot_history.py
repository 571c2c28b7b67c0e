"""The history shown by the page's plots."""

from __future__ import annotations

from culet.scheduler.stats import Counters, SchedulerStats
from culet.serve.plot_history import MAX_POINTS, PlotHistory
from culet.serve.process.wire import Stats


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def stats(generated: int, *, prompt: int | None = None, verifies: int = 0, accepted: int = 0) -> Stats:
    scheduler = SchedulerStats(
        num_running=3,
        num_waiting=1,
        num_pages=100,
        num_free_pages=60,
        num_resume_point_pages=10,
        num_held_pages={"sliding": 20, "global": 10},
        num_resume_points=2,
        counters=Counters(verifies=verifies, accepted_tokens=accepted),
    )
    num_prompt = 2 * generated if prompt is None else prompt
    return Stats(scheduler=scheduler, num_prompt_tokens=num_prompt, num_generated_tokens=generated, memory_bytes=1)


def test_rates_cover_the_time_between_points() -> None:
    clock = Clock()
    history = PlotHistory(clock)
    history.record(stats(100))
    clock.now += 2
    history.add_first_token(0.2)
    history.add_first_token(0.4)
    history.record(stats(150, verifies=10, accepted=15))
    first, second = history.since(0)
    assert (first.output_tokens_per_s, first.ttft_ms, first.tokens_per_verify) == (0, None, None)
    assert (second.output_tokens_per_s, second.prompt_tokens_per_s) == (25, 50)
    assert abs(second.ttft_ms - 300) < 1e-9
    assert second.tokens_per_verify == 2.5
    assert (second.kv_groups, second.kv_reusable) == ({"sliding": 0.2, "global": 0.1}, 0.1)


def test_a_restarted_engine_gives_no_negative_rates() -> None:
    clock = Clock()
    history = PlotHistory(clock)
    history.record(stats(1000, verifies=9, accepted=9))
    clock.now += 1
    history.record(stats(5))
    assert history.since(0)[-1].output_tokens_per_s == 0
    assert history.since(0)[-1].tokens_per_verify is None
    clock.now += 1
    history.record(stats(9, prompt=4))  # one of several, which had generated less than the others have since
    assert history.since(0)[-1].prompt_tokens_per_s == 0


def test_only_new_points_are_returned_and_old_ones_are_dropped() -> None:
    clock = Clock()
    history = PlotHistory(clock)
    for _ in range(MAX_POINTS + 5):
        clock.now += 1
        history.record(stats(1))
    assert len(history.since(0)) == MAX_POINTS
    assert [point.time for point in history.since(clock.now - 1)] == [clock.now]
