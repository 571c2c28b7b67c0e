"""Simulate what requests with images cost the chats of the 31B that run beside them: `python benchmarks/image_legs.py`.

The scheduler is the real one. A step of the chats takes as long as on one H200. Each token of a prompt adds the time of its
products at the GPU's power limit, in the layers that run for it. Towers take no time. `images_beside_decode.py` measures the
same on a GPU. `slower` is the time that a step takes longer than a step of the chats alone.
"""

from __future__ import annotations

import argparse
from statistics import mean, median

from memory.time_slices import GREEDY, Clock, layout

from culet.config import ScheduleConfig
from culet.scheduler.scheduler import Scheduler
from culet.types import Drawn, MediaSpan, Request, StepPlan, StepResult

CHATS_S = 0.0222  # a step of 32 chats
TOKEN_S = 94e-6  # a token of a prompt in all layers
NUM_CHATS, TEXT_LEN = 32, 22  # text of a request, before and after its image
NUM_PAGES = 20_000  # no request waits for pages


def seconds(plan: StepPlan) -> float:
    chunks = [row for row in plan.rows if row.num_new > 1]
    return CHATS_S + sum(row.num_new * TOKEN_S * (row.leg.end - row.leg.begin) / row.leg.of for row in chunks)


def request(name: str, image_len: int) -> Request:
    image = MediaSpan(TEXT_LEN // 2, image_len, name.encode())
    tokens = tuple([7] * (image_len + TEXT_LEN))
    return Request(name, tokens, GREEDY, 1, 2, frozenset(), media=(image,))


def simulate(leg_tokens: int, image_len: int, count: int, every_s: float) -> str:
    """Add `count` requests with images, one every `every_s` seconds. Return a row of the table."""
    clock = Clock()
    config = ScheduleConfig(128, 8192, 10_000)
    scheduler = Scheduler(
        layout(), NUM_PAGES, config, max_model_len=34_000, prefix_caching=False, leg_tokens=leg_tokens, clock=clock
    )
    for number in range(NUM_CHATS):
        scheduler.add(Request(f"chat {number}", (number, 7), GREEDY, 1, 20_000, frozenset()))
    begun: dict[str, float] = {}
    waited: dict[str, float] = {}
    slower: list[float] = []
    plans: list[StepPlan] = []  # whose results are not applied yet
    while len(waited) < count:
        while len(begun) < count and (at := 1 + every_s * len(begun)) <= clock.now:
            name = f"image {len(begun)}"
            begun[name] = at
            scheduler.add(request(name, image_len))
        if (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        if plan is not None and len(plans) < 2:
            continue  # as on a GPU, a step is planned before the result of the last one is known
        plan = plans.pop(0)
        clock.now += seconds(plan)
        if begun and any(row.num_new > 1 for row in plan.rows):
            slower.append(seconds(plan) - CHATS_S)
        drawn = tuple(Drawn(slot, (5,), (), 0) for row in plan.rows for slot in row.draw_slots)
        scheduler.apply(StepResult(plan.step_id, drawn, {}))
        for delta in scheduler.deltas():
            if delta.request_id in begun and delta.token_ids:
                waited.setdefault(delta.request_id, clock.now - begun[delta.request_id])
    times = [1e3 * value for value in (median(slower), max(slower), mean(waited.values()), max(waited.values()))]
    return " ".join(f"{value:11.1f}" for value in times) + f"{scheduler.counters.chunks_in_legs:9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leg-tokens", default="0,200,133", help="most tokens of a chunk that runs in one step (0: any)")
    parser.add_argument("--images", type=int, default=40)
    options = parser.parse_args()
    print(" tokens   every, ms  leg tokens  slower, ms  at most  first token, ms  at most  in legs")
    for image_len, gaps in ((280, (100, 70, 0)), (1120, (500, 250, 0))):
        for every_ms in gaps:
            for leg_tokens in map(int, options.leg_tokens.split(",")):
                row = simulate(leg_tokens, image_len, options.images if every_ms else 16, every_ms / 1e3)
                print(f"{image_len:7} {every_ms:11} {leg_tokens:11}", row, flush=True)


if __name__ == "__main__":
    main()
