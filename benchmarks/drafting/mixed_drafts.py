"""Alternate chats that draft well with chats that draft badly, and measure whether one kind slows down the other.

    python benchmarks/drafting/mixed_drafts.py  # the built-in model, both drafters, 1 and 8 chats at a time
    python benchmarks/drafting/mixed_drafts.py --runs 1 --drafters mtp=assistant --num-seqs 1

There are 40 chats, alternately good and bad, one after the other, or ten groups of eight. Good chats are the built-in model's
questions, answered to the end. Bad chats continue past the end of such an answer (`ignore_eos`). Three engines take
turns on the same chats, a few steps each, so that other load on the machine affects all of them:

- one without a drafter, which gives the plain speed,
- one that gets only the good chats, which gives their speed on their own,
- one that gets all chats.

The two with a drafter start from the same costs of draft rounds, because those measured at two starts may differ by half. If
each started from its own, `good` would compare their starts. With `--starts`, costs are measured that many times.

`good` is the speed of good chats among bad ones, relative to their speed on their own (goal: 0.95). `bad` is the speed of bad
chats among good ones, relative to plain (goal: 0.97). `good_gain` is the speed of good chats on their own, relative to plain.
`shared` is the total speed, relative to plain, if good and bad chats run in the same batch. Each is the median over all runs
except the first of each start, which is a warm-up. `by_start` has the medians of each start. `own` counts only the time that
this process ran, which is steadier on a busy CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from refused_drafts import Answering, add_options, draft_choice, engine_settings, share_weights

from culet import LLM, SamplingParams
from culet.scheduler.step_cost import MeasuredCost

QUESTIONS = Path(__file__).parents[2] / "training" / "questions"
NUM_CHATS = 40
NUM_SHARED = 2  # groups with chats of both kinds
MIN_GROUPS = 10  # a good group of eight takes a tenth of a second
TURN_STEPS = 4  # good groups of eight have only seven steps


@dataclass(frozen=True)
class Chats:
    """Prompts of one kind, with the parameters to continue them."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    def group(self, index: int, size: int) -> tuple[Sequence[Sequence[int]], SamplingParams]:
        return self.prompts[index * size : (index + 1) * size], self.params


def read_chats(llm: LLM, count: int, num_tokens: int) -> tuple[Chats, Chats]:
    """Return the good and the bad chats, `count` of each."""
    lines = [json.loads(line) for name in ("open", "questions") for line in (QUESTIONS / f"{name}.jsonl").open()]
    asked = [line.get("question") or line["turns"][0] for line in lines]
    encode, render = llm.engine.tokenizer.encode, llm.engine.chat_template.render
    prompts = [encode(render([{"role": "user", "content": text}])) for text in random.Random(1).sample(asked, count)]
    to_end = SamplingParams(temperature=0, max_tokens=num_tokens)
    answers = llm.generate(prompts, to_end)
    ended = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    return Chats(prompts, to_end), Chats(ended, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))


class OwnClock:
    """An engine's clock, which stands still during the turns of others. By it, the engine's policy times steps."""

    def __init__(self, llm: LLM) -> None:
        self._stopped_at, self._paused_s = time.monotonic(), 0.0
        llm.engine._scheduler._step_timer._clock = self

    def __call__(self) -> float:
        return time.monotonic() - self._paused_s

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._paused_s += time.monotonic() - self._stopped_at
        yield
        self._stopped_at = time.monotonic()


class Engine:
    """An engine that takes turns with others."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.clock = llm, OwnClock(llm)


def answer_in_turns(engines: Sequence[tuple[Engine, Speed]], prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Have all engines answer the prompts, a few steps each in turn."""
    answering = {}
    for engine, _ in engines:
        with engine.clock.turn():
            answering[engine] = Answering(engine.llm, prompts, params)
    running = [engine for engine, _ in engines]
    while running:
        for engine in list(running):
            with engine.clock.turn():
                if not answering[engine].advance(TURN_STEPS):
                    running.remove(engine)
        running.reverse()  # an engine that always came first would find the caches in a different state
    for engine, speed in engines:
        speed.add(answering[engine])


class Speed:
    """The tokens and seconds of one kind of chat in one engine."""

    def __init__(self) -> None:
        self.num_tokens, self.seconds, self.own_seconds = 0, 0.0, 0.0

    def add(self, answering: Answering) -> None:
        self.num_tokens += answering.num_tokens
        self.seconds += answering.seconds
        self.own_seconds += answering.own_seconds

    def over(self, slower: Speed) -> tuple[float, float]:
        """Return the speed relative to the other, by the clock and by the time that this process ran."""
        if not self.seconds or not slower.seconds:  # all answers had a single token
            return 1.0, 1.0
        tokens = self.num_tokens / slower.num_tokens
        return tokens * slower.seconds / self.seconds, tokens * slower.own_seconds / self.own_seconds


def count_groups(size: int) -> int:
    """Return how many groups of `size` chats a run has, half of them good."""
    return max(MIN_GROUPS, NUM_CHATS // size)


def run_once(plain: Engine, alone: Engine, mixed: Engine, good: Chats, bad: Chats, size: int) -> dict[str, tuple[float, float]]:
    """Run all chats once, in groups of `size`, and return the relative speeds."""
    names = ("plain good", "plain bad", "alone good", "mixed good", "mixed bad", "plain shared", "mixed shared")
    speeds = {name: Speed() for name in names}
    for index in range(count_groups(size)):
        kind, chats = ("good", good) if index % 2 == 0 else ("bad", bad)
        engines = {"plain": plain, "mixed": mixed} | ({"alone": alone} if kind == "good" else {})
        order = [(engine, speeds[f"{name} {kind}"]) for name, engine in engines.items()]
        first = index // 2 % len(order)
        answer_in_turns(order[first:] + order[:first], *chats.group(index // 2, size))
    for index in range(NUM_SHARED if size > 1 else 0):
        half = size // 2
        prompts = [*good.group(index, half)[0], *bad.group(index, half)[0]]
        answer_in_turns([(plain, speeds["plain shared"]), (mixed, speeds["mixed shared"])], prompts, bad.params)
    return {
        "good": speeds["mixed good"].over(speeds["alone good"]),
        "bad": speeds["mixed bad"].over(speeds["plain bad"]),
        "good_gain": speeds["alone good"].over(speeds["plain good"]),
        "shared": speeds["mixed shared"].over(speeds["plain shared"]),
    }


def start_alike(first: LLM, second: LLM) -> None:
    """Let the second engine start from the costs and the acceptance that the first has measured."""
    measured, policy = (llm.engine._scheduler.policy for llm in (first, second))
    if measured is not None and policy is not None:
        policy.cost, policy._general = MeasuredCost(measured.cost.model), measured._general


def measure(
    plain: LLM, settings: dict[str, Any], size: int, *, num_starts: int, num_runs: int, num_tokens: int
) -> dict[str, Any]:
    """Return the medians over the runs of all starts. `settings` are those of the engines with a drafter."""
    good, bad = read_chats(plain, max(NUM_CHATS, size * count_groups(size) // 2), num_tokens)
    runs, counters = [], []
    for _ in range(num_starts):
        alone, mixed = (LLM(**settings) for _ in range(2))
        share_weights(mixed, alone, plain)
        start_alike(alone, mixed)
        engines = [Engine(llm) for llm in (plain, alone, mixed)]
        runs.append([run_once(*engines, good, bad, size) for _ in range(num_runs + 1)][1:])
        counters.append(mixed.engine.stats().counters)
        del alone, mixed, engines
    summary: dict[str, Any] = {"num_seqs": size}
    for name in runs[0][0]:
        summary[name] = round(median(run[name][0] for start in runs for run in start), 3)
        summary[f"own_{name}"] = round(median(run[name][1] for start in runs for run in start), 3)
    for name in ("good", "bad"):
        summary[f"{name}_by_start"] = [round(median(run[name][0] for run in start), 3) for start in runs]
    return summary | {"verifies": sum(each.verifies for each in counters), "steps": sum(each.steps for each in counters)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--starts", type=int, default=3, help="how often the costs of draft rounds are measured")
    parser.add_argument("--runs", type=int, default=2, help="measured runs after each start")
    parser.add_argument(
        "--num-tokens", type=int, default=120, help="maximum number of tokens in a chat; bad chats have as many"
    )
    options = parser.parse_args()
    settings, results = engine_settings(options), {}
    plain = LLM(options.model, **settings)
    for drafter in options.drafters:
        results[drafter] = []
        drafting = settings | {"model": options.model, "speculative_config": draft_choice(options.model, drafter)}
        for size in options.num_seqs:
            sizes = {"num_starts": options.starts, "num_runs": options.runs, "num_tokens": options.num_tokens}
            results[drafter].append(measure(plain, drafting, size, **sizes))
            print(drafter, results[drafter][-1], flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
