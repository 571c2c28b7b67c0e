"""Measure what images cost the chats that run beside them, and what loaded towers cost text alone.

    python benchmarks/images_beside_decode.py E4B                                         # on a GPU
    python benchmarks/images_beside_decode.py 31B --leg-tokens 0                          # without legs
    python benchmarks/images_beside_decode.py FOLDER --chats 4 --steps 20 --images 4 --every-ms 20 --prompt-len 20   # on a CPU

The model has the dimensions of a variant or of the checkpoint in a folder, and random weights. Chats decode all the time. First
they are alone, then a request with an image arrives every `--every-ms`, then a burst of such requests at once. A step's time is
the time between its result and the one before, which is what a chat waits for its next token. `launch` is the host's part of
it. The steps are split into three kinds: those beside a tower, those with a prompt's chunk, and all others. `legs` counts the
steps that run only some of the layers for a chunk. `slower` is the worst step's time minus the median of the chats alone, and
`slower_median` the median step's. The time to the first token of a request with an image includes its tower. Before and after,
the same chats run alone in an engine without towers.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from culet.bench.answer_check import free_memory
from culet.bench.images import make_image
from culet.bench.workloads import IMAGE, Workload, make_tokens
from culet.config import build_config
from culet.engine.engine import Engine
from culet.media.items import MediaKind, Medium
from culet.media.prompt import expand_prompt
from culet.runner.worker import LaunchedStep
from culet.types import FinishReason, Request, SamplingParams, StepPlan

ALONE, BESIDE, CHUNK = "decode alone", "decode beside a tower", "with a prompt's chunk"
ANSWER_LEN = 8  # of a request with an image
TEXT_LEN = 32  # of its prompt, after the image
WARM_UP_STEPS = 20


@dataclass(frozen=True)
class TimedStep:
    kind: str
    num_tokens: int
    seconds: float
    launch_s: float
    has_leg: bool = False  # whether it runs only some of the layers for a chunk


@dataclass
class _Launched:
    """A step whose result has not been read."""

    step: LaunchedStep
    plan: StepPlan
    launch_s: float


class StepClock:
    """Drives an engine and times its steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[TimedStep] = []
        self.ended: set[str] = set()
        self.added_at: dict[str, float] = {}
        self.waited_s: dict[str, float] = {}  # from when a request was added to its first token
        self._worker, self._launched = engine._worker, deque[_Launched]()
        self._encoding: set[bytes] = set()  # keys of features that no result has reported yet
        self._last = 0.0
        engine._worker = self  # type: ignore[assignment]

    # The worker's side

    def launch(self, plan: StepPlan) -> StepClock:
        began = time.perf_counter()
        step = self._worker.launch(plan)
        self._encoding |= {item.key for item in plan.encodes}
        self._launched.append(_Launched(step, plan, time.perf_counter() - began))
        return self

    def result(self) -> Any:
        launched = self._launched.popleft()
        result = launched.step.result()
        now, rows = time.perf_counter(), launched.plan.rows
        kind = CHUNK if any(row.num_new > 1 for row in rows) else BESIDE if self._encoding else ALONE
        self._encoding -= set(result.encoded)
        if rows:
            has_leg, num_tokens = any(not row.leg.is_whole for row in rows), sum(row.num_new for row in rows)
            self.steps.append(TimedStep(kind, num_tokens, now - self._last, launched.launch_s, has_leg))
        self._last = now
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    # The caller's side

    def add(self, request: Request) -> None:
        self.added_at[request.request_id] = time.perf_counter()
        self.engine.add(request)

    def run_step(self) -> None:
        for delta in self.engine.step():
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            if delta.token_ids and delta.request_id not in self.waited_s:
                self.waited_s[delta.request_id] = time.perf_counter() - self.added_at[delta.request_id]
            if delta.finish_reason is not None:
                self.ended.add(delta.request_id)

    def take(self) -> list[TimedStep]:
        steps, self.steps = self.steps, []
        return steps


def make_chats(engine: Engine, options: argparse.Namespace, num_tokens: int) -> list[Request]:
    """Make chats that answer with `num_tokens` tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    draw, vocab_size, without = random.Random(0), engine.spec.vocab_size, engine.media.spec.tokens.all_ids
    prompts = [make_tokens(options.prompt_len, vocab_size, draw, without=without) for _ in range(options.chats)]
    return [engine.rules.make_request(f"chat {number}", prompt, params) for number, prompt in enumerate(prompts)]


def image_request(engine: Engine, budget: int, seed: str) -> Request:
    """Make a request with an image of its own."""
    spec = engine.media.spec
    image = make_image(Workload(IMAGE, budget=budget), seed)
    text = make_tokens(TEXT_LEN, engine.spec.vocab_size, random.Random(seed), without=spec.tokens.all_ids)
    media = [Medium(MediaKind.IMAGE, (image,))]
    prompt = expand_prompt([spec.tokens.image, *text], media, spec, lambda text: ())
    params = SamplingParams(temperature=0, max_tokens=ANSWER_LEN, ignore_eos=True)
    return engine.rules.make_request(f"image {seed}", prompt.token_ids, params, media=prompt.spans, items=prompt.items)


def start_chats(clock: StepClock, chats: Sequence[Request]) -> None:
    """Add the chats, and run until all of them decode."""
    for chat in chats:
        clock.add(chat)
    for _ in range(10_000):
        clock.run_step()
        *_, last = clock.steps
        if last.kind == ALONE and last.num_tokens == len(chats):
            break
    run_alone(clock, WARM_UP_STEPS)


def run_alone(clock: StepClock, num_steps: int) -> list[TimedStep]:
    """Run steps of the chats without anything else."""
    clock.run_step()  # its time includes what happened before
    clock.take()
    while len(clock.steps) < num_steps:
        clock.run_step()
    return clock.take()


def run_requests(clock: StepClock, requests: Sequence[Request], every_s: float) -> list[TimedStep]:
    """Add a request every `every_s` seconds, and run until all have ended. Return the steps from the first to the last."""
    clock.run_step()
    clock.take()
    began, waiting = time.perf_counter(), deque(requests)
    while waiting or any(request.request_id not in clock.ended for request in requests):
        due = int((time.perf_counter() - began) / every_s) + 1 if every_s else len(requests)
        while waiting and len(requests) - len(waiting) < due:
            clock.add(waiting.popleft())
        clock.run_step()
    return clock.take()


def figures(steps: Iterable[TimedStep], alone_ms: float | None) -> dict[str, Any]:
    """Return the median, the 99th percentile and the worst of the steps' times in ms."""
    steps = list(steps)
    times = sorted(1e3 * step.seconds for step in steps)
    worst = max(steps, key=lambda step: step.seconds)
    found: dict[str, Any] = {"steps": len(times), "median_ms": median(times), "p99_ms": times[int(0.99 * (len(times) - 1))]}
    found |= {"worst_ms": times[-1], "worst_launch_ms": 1e3 * worst.launch_s, "worst_tokens": worst.num_tokens}
    found["legs"] = sum(step.has_leg for step in steps)
    if alone_ms is not None:
        found |= {"slower_ms": times[-1] - alone_ms, "slower_median_ms": found["median_ms"] - alone_ms}
    return found


def by_kind(name: str, steps: Sequence[TimedStep], alone_ms: float) -> dict[str, Any]:
    """Print and return the figures of all steps, and of each kind."""
    found = {"all steps": figures(steps, alone_ms)}
    for kind in (ALONE, BESIDE, CHUNK):
        if own := [step for step in steps if step.kind == kind]:
            found[kind] = figures(own, alone_ms)
    for kind, values in found.items():
        show(f"{name}, {kind}", values)
    return found


def first_tokens(name: str, clock: StepClock, requests: Iterable[Request]) -> dict[str, float]:
    """Print and return how long requests waited for their first tokens, in ms."""
    waited = sorted(1e3 * clock.waited_s[request.request_id] for request in requests)
    found = {"median_ms": median(waited), "worst_ms": waited[-1]}
    show(f"{name}, time to the first token", found)
    return found


def show(name: str, values: dict[str, Any]) -> None:
    parts = [f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()]
    print(f"{name}: {', '.join(parts)}", flush=True)


def open_engine(options: argparse.Namespace, *, has_towers: bool) -> Engine:
    # The number of steps while images come is not known. Chats that are too short would end.
    max_model_len = options.prompt_len + answer_len(options)
    settings: dict[str, Any] = {name: json.loads(value) for name, value in (part.split("=", 1) for part in options.set)}
    settings |= {
        "device": options.device,
        "model": f"random:{options.model}",
        "max_model_len": max_model_len,
        "max_num_seqs": options.chats + 32,
    }
    return Engine(build_config(settings | {"language_model_only": not has_towers}), progress=False)


def answer_len(options: argparse.Namespace) -> int:
    return options.steps + WARM_UP_STEPS + options.room


def measure_alone(options: argparse.Namespace) -> dict[str, Any]:
    """Measure chats in an engine without towers."""
    engine = open_engine(options, has_towers=False)
    clock = StepClock(engine)
    start_chats(clock, make_chats(engine, options, answer_len(options)))
    gc.collect()
    found = figures(run_alone(clock, options.steps), None)
    show("chats alone, without towers", found)
    engine.close()
    del engine, clock
    free_memory()
    return found


def measure_images(options: argparse.Namespace) -> dict[str, Any]:
    """Measure chats in an engine with towers: alone, while images stream in, and beside a burst of images."""
    engine = open_engine(options, has_towers=True)
    assert MediaKind.IMAGE in engine.media.spec.kinds, "the model does not see images"
    if options.leg_tokens is not None:
        engine._scheduler._legs.leg_tokens = options.leg_tokens
    clock = StepClock(engine)
    streamed = [image_request(engine, options.budget, f"streamed {number}") for number in range(options.images)]
    burst = [image_request(engine, options.budget, f"burst {number}") for number in range(options.burst)]
    warm_up = [image_request(engine, options.budget, f"warm-up {number}") for number in range(4)]
    start_chats(clock, make_chats(engine, options, answer_len(options)))
    gc.collect()
    alone = run_alone(clock, options.steps)
    run_requests(clock, warm_up[:1], 0)
    run_requests(clock, warm_up[1:], 0)
    gc.collect()
    gc.freeze()  # as the server does
    found: dict[str, Any] = {"alone": figures(alone, None)}
    show("chats alone", found["alone"])
    alone_ms = found["alone"]["median_ms"]
    found["stream"] = by_kind("images stream in", run_requests(clock, streamed, options.every_ms / 1e3), alone_ms)
    found["burst"] = by_kind("a burst of images", run_requests(clock, burst, 0), alone_ms)
    found["stream first tokens"] = first_tokens("images stream in", clock, streamed)
    found["burst first tokens"] = first_tokens("a burst of images", clock, burst)
    counters = engine.stats().counters
    found["chunks_in_legs"] = counters.chunks_in_legs
    print(f"chunks in legs: {counters.chunks_in_legs}", flush=True)
    assert counters.encoded_items == len(streamed) + len(burst) + len(warm_up), "an image was not encoded exactly once"
    assert clock.ended.isdisjoint(f"chat {number}" for number in range(options.chats)), "a chat ended too early: raise --room"
    found["kernels_compiled_while_serving"] = engine.stats().kernels_compiled
    print(f"kernels compiled while serving: {found['kernels_compiled_while_serving']}", flush=True)
    engine.close()
    gc.unfreeze()
    del engine, clock
    free_memory()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a variant, or the folder of a checkpoint whose dimensions are used")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300, help="measured steps of the chats alone")
    parser.add_argument("--images", type=int, default=40, help="images that arrive one by one")
    parser.add_argument("--every-ms", type=float, default=100)
    parser.add_argument("--burst", type=int, default=16, help="images that arrive at once")
    parser.add_argument("--budget", type=int, default=280, help="most soft tokens of an image")
    parser.add_argument("--room", type=int, default=4000, help="tokens that chats may write while images come")
    parser.add_argument("--leg-tokens", type=int, help="cut longer chunks into legs (0: none; default: as when serving)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="settings of the engine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    options = parser.parse_args()
    before = measure_alone(options)
    with_towers = measure_images(options)
    after = measure_alone(options)
    ratios = [with_towers["alone"]["median_ms"] / without["median_ms"] for without in (before, after)]
    print(f"text-only step with towers / without: {ratios[0]:.4f} (before), {ratios[1]:.4f} (after)", flush=True)
    results = {"model": options.model, "with_towers": with_towers, "without_towers": [before, after], "ratios": ratios}
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
