"""Simulate chats of the 31B that do not fit the cache, with and without time slices: `python benchmarks/memory/time_slices.py`.

The scheduler and the pages are the real ones. A step takes as long as on one H200 (docs/log/memory-and-cache.md, "Steps of 80
chats"): the products by its tokens, then reading the keys and values at 4.3 TB/s. The attention of a chunk runs beside that.
"""

from __future__ import annotations

import argparse
from random import Random

from culet.cache.spec import CacheLayout, KVGroup, KVSpec
from culet.config import ScheduleConfig
from culet.scheduler import fairness
from culet.scheduler.scheduler import Scheduler
from culet.types import Drawn, Request, Sampling, StepPlan, StepResult

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0, None, None)
WINDOW, SLIDING_PAGE, GLOBAL_PAGE = 1024, 16, 256
SLIDING_BYTES, GLOBAL_BYTES = 819_200, 51_200  # per token, of all layers
BYTES_PER_S = 4.3e12
PRODUCTS_S = ((16, 0.0152), (80, 0.0170), (128, 0.0182))  # up to so many tokens
PADDED, MAX_PADDED = 64, 384
CHUNK_S = 0.003  # attention of a short chunk
PAGE_S = 12.5 * 2**20 / 50e9  # to move a page from or to host memory
FEW = ((2, 140), (4, 215), (8, 480), (16, 1000))  # chats of 73 pages, and pages that do not hold all of them


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def layout() -> CacheLayout:
    def group(index: int, window: int | None, page_tokens: int) -> KVGroup:
        spec = KVSpec(index, 1, 2, 2, window, latent=False, itemsize=2)
        return KVGroup(f"g{index}", index, (spec,), page_tokens)

    return CacheLayout(slab_bytes=1, groups=(group(0, WINDOW, SLIDING_PAGE), group(1, None, GLOBAL_PAGE)))


def seconds(plan: StepPlan) -> float:
    """Return how long a step takes."""
    ends = [row.start + row.num_new for row in plan.rows if row.num_new == 1]
    num_bytes = sum(min(end, WINDOW) * SLIDING_BYTES + end * GLOBAL_BYTES for end in ends)
    chunk_s = CHUNK_S if len(ends) < len(plan.rows) else 0.0
    moved_s = PAGE_S * (len(plan.saves) + len(plan.loads))
    return products_s(plan.num_tokens) + max(chunk_s, num_bytes / BYTES_PER_S) + moved_s


def products_s(num_tokens: int) -> float:
    """Return how long everything but attention takes. Up to 384 tokens, a step with a chunk is padded."""
    for limit, time_s in PRODUCTS_S:
        if num_tokens <= limit:
            return time_s
    return 0.004 + 94e-6 * (-(-num_tokens // PADDED) * PADDED if num_tokens <= MAX_PADDED else num_tokens)


def simulate(num_pages: int, num_host_pages: int, arrivals: list[tuple[float, int, int]]) -> str:
    """Run requests, given as (arrival in seconds, tokens of the prompt, tokens of the answer). Return a row of the table."""
    clock, waiting = Clock(), sorted(arrivals, reverse=True)
    config = ScheduleConfig(128, 8192, 10_000, max_step_ms=0)
    scheduler = Scheduler(layout(), num_pages, config, max_model_len=34_000, prefix_caching=False, clock=clock)
    scheduler.page_allocator.host.grow(num_host_pages)
    begun: dict[str, float] = {}
    last: dict[str, float] = {}
    pauses, durations, num_tokens = [0.0], [], 0
    plans: list[StepPlan] = []  # whose results are not applied yet
    while waiting or scheduler.has_work:
        while waiting and (waiting[-1][0] <= clock.now or not scheduler.has_work):
            at, prompt_len, max_tokens = waiting.pop()
            clock.now = max(clock.now, at)
            name = f"r{len(begun)}"
            begun[name] = at
            tokens = (len(begun), *[7] * (prompt_len - 1))
            scheduler.add(Request(name, tokens, GREEDY, 1, max_tokens, frozenset()))
        if (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        if plan is not None and len(plans) < 2:
            continue  # as on a GPU, a step is planned before the result of the last one is known
        plan = plans.pop(0)
        clock.now += seconds(plan)
        drawn = tuple(Drawn(slot, (5,), (), 0) for row in plan.rows for slot in row.draw_slots)
        scheduler.apply(StepResult(plan.step_id, drawn, {}))
        for delta in scheduler.deltas():
            num_tokens += len(delta.token_ids)
            pauses.append(clock.now - last.get(delta.request_id, clock.now))
            last[delta.request_id] = clock.now
            if delta.finish_reason is not None:
                durations.append(clock.now - begun[delta.request_id])
    mean, count = sum(durations) / len(durations), scheduler.counters.preemptions
    long = sum(pause > 1 for pause in pauses)
    parked = scheduler.counters.parked
    return f"{num_tokens / clock.now:7,.0f} {mean:9.1f} {count:12} {parked:7} {long:17} {max(pauses):11.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="5300,5476,5570,5669,5840", help="sizes of the cache in pages of 12.5 MiB")
    parser.add_argument("--host-pages", default="0,655", help="pages of 12.5 MiB in host memory; 655 are 8 GiB")
    parser.add_argument("--only", default="", help="simulate only requests whose name begins with this, such as 80")
    arguments = parser.parse_args()
    random = Random(0)
    chats = [(0.0, 1000, 1000)] * 80
    mixed = [(0.35 * number, random.randint(200, 1800), random.randint(100, 1900)) for number in range(300)]
    print("requests    pages   host  slices  tok/s  mean time  preemptions  parked  pauses above 1 s  longest, s")
    pages = [int(size) for size in arguments.pages.split(",")]
    cases = [(name, arrivals, size) for name, arrivals in (("80 chats", chats), ("mixed", mixed)) for size in pages]
    cases += [(f"{count} chats", chats[:count], size) for count, size in FEW]
    kept, choices = fairness.SLICE_FACTOR, [int(size) for size in arguments.host_pages.split(",")]
    for name, arrivals, num_pages in cases:
        for num_host_pages in choices if name.startswith(arguments.only) else ():
            for word, fairness.SLICE_FACTOR in (("no", 10**9), ("yes", kept)):
                row = simulate(num_pages, num_host_pages, arrivals)
                print(f"{name:10} {num_pages:6} {num_host_pages:6} {word:>6}", row, flush=True)


if __name__ == "__main__":
    main()
