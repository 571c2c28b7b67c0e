"""`culet bench offline`: time the workloads through `LLM.generate`, and those with images through the engine.

Prompts are random tokens. All requests of a row are submitted together. Decoding is greedy and ignores the end token. Nothing
is reused between prompts. Sampling, detokenisation and stop strings are active.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from culet.bench.answer_check import TwinVerdict, check_rows, free_memory
from culet.bench.images import measure_requests, time_tower
from culet.bench.workloads import IMAGE, START, THROUGHPUT, TPOT, Workload, make_prompts
from culet.child import child_environment, python_command
from culet.config import Config
from culet.engine.jobs import Result
from culet.engine.llm import LLM
from culet.engine.resolve import given_settings
from culet.errors import CuletError, InternalError
from culet.log import logger
from culet.scheduler.stats import SchedulerStats
from culet.types import SamplingParams

NEVER = "\x00 no model writes this \x00"  # a stop string that never occurs
WARM_UP_LENS = (16, 8)  # prompt tokens and output tokens of the warm-up
START_LIMIT_S = 900


@dataclass(frozen=True)
class Measured:
    """The result of a row."""

    row: Workload
    value: float  # the best of `runs`, in the row's unit
    runs: tuple[float, ...]
    details: dict[str, Any] = field(default_factory=dict)
    verdict: TwinVerdict | None = None  # None if not checked


def run_rows(
    config: Config,
    rows: Sequence[Workload],
    *,
    best_of: int = 3,
    check: bool = True,
    check_layers: int | None = None,
    report: Callable[[Measured], None] = lambda measured: None,
) -> list[Measured]:
    """Measure each row and call `report` with the result. The start comes first, while the GPU is free, and then the check."""
    done: list[Measured] = []

    def note(measured: Measured) -> None:
        done.append(measured)
        logger.info("%s: %.2f %s", measured.row.label, measured.value, measured.row.unit)
        report(measured)

    timed = [row for row in rows if row.kind != START]
    with ExitStack() as stack:
        if len(timed) < len(rows):
            caches = _cache_folders(stack.enter_context(tempfile.TemporaryDirectory(prefix="culet-bench-")))
            note(measure_start(config, caches))
            stack.enter_context(_environment(caches))  # the other rows use the compiled kernels
        if timed:
            texts = [row for row in timed if row.kind != IMAGE]
            verdicts = check_rows(config, texts, num_layers=check_layers) if check else {}
            towers = {row: 1e3 * time_tower(config, row, best_of) for row in timed if row.kind == IMAGE}
            free_memory()
            with LLM.from_config(config) as llm:
                _warm_up(llm, timed)
                for row in timed:
                    if row in towers:
                        details = measure_requests(llm.engine, row, best_of)
                        note(Measured(row, towers[row], (towers[row],), details))
                    else:
                        note(measure(llm, row, best_of=best_of, verdict=verdicts.get(row)))
            free_memory()
    return done


def _warm_up(llm: LLM, rows: Sequence[Workload]) -> None:
    """Do a short run with each number of sequences."""
    prompt_len, output_len = WARM_UP_LENS
    for num_seqs in sorted({row.num_seqs for row in rows}):
        row = Workload(THROUGHPUT, num_seqs, prompt_len, output_len)
        llm.generate(make_prompts(row, llm.engine.spec.vocab_size, seed=0), _params(row))


def _params(row: Workload) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=row.output_len, ignore_eos=True, stop=(NEVER,))


def measure(llm: LLM, row: Workload, *, best_of: int = 3, verdict: TwinVerdict | None = None) -> Measured:
    """Time a row. The best of its runs counts."""
    runs: list[float] = []
    details: dict[str, Any] = {}
    for number in range(row.repeats(best_of)):
        prompts = make_prompts(row, llm.engine.spec.vocab_size, seed=2 + number)
        before = llm.engine.stats()
        _synchronize(llm)
        began = time.perf_counter()
        results = llm.generate(prompts, _params(row))
        seconds = time.perf_counter() - began
        value, run_details = _evaluate(row, results, began, seconds)
        stats = llm.engine.stats()
        counts = stats.counters.since(before.counters)
        run_details |= {"preemptions": counts.preemptions, "parked": counts.parked, "num_pages": stats.num_pages}
        run_details |= _draft_figures(before, stats)
        is_better = not runs or (value > max(runs) if row.is_larger_better else value < min(runs))
        details = run_details if is_better else details
        runs.append(value)
    return Measured(row, max(runs) if row.is_larger_better else min(runs), tuple(runs), details, verdict)


def _draft_figures(before: SchedulerStats, after: SchedulerStats) -> dict[str, Any]:
    """Return the drafting figures between two snapshots, or {} if nothing was drafted."""
    counts = after.counters.since(before.counters)
    if not counts.verifies:
        return {}
    return {
        "tokens_per_verify": counts.tokens_per_verify,
        "acceptance_by_place": list(counts.acceptance_at),
        "verify_s": after.verify_seconds - before.verify_seconds,
        "draft_s": after.draft_seconds - before.draft_seconds,
    }


def _synchronize(llm: LLM) -> None:
    if llm.engine.device.type == "cuda":
        torch.cuda.synchronize(llm.engine.device)


def _evaluate(row: Workload, results: Sequence[Result], began: float, seconds: float) -> tuple[float, dict[str, Any]]:
    """Return (the row's value, further details) for a run."""
    samples = [result.samples[0] for result in results]
    for sample in samples:
        if len(sample.token_ids) != row.output_len:
            raise InternalError(
                f"{row.label}: a sequence ended with {sample.finish_reason} after {len(sample.token_ids)} of "
                f"{row.output_len} tokens: {sample.error or 'no reason given'}"
            )
    first = [1e3 * (sample.first_token_at - began) for sample in samples]
    details = {"seconds": seconds, "ttft_ms_median": median(first), "ttft_ms_max": max(first)}
    total = sum(len(sample.token_ids) for sample in samples)
    gaps = [1e3 * (sample.last_token_at - sample.first_token_at) / max(1, row.output_len - 1) for sample in samples]
    if row.output_len > 1:
        # Without preemptions, all sequences were in the cache at once if none ended before the last one started.
        is_together = max(sample.first_token_at for sample in samples) <= min(sample.last_token_at for sample in samples)
        details |= {"tpot_ms_median": median(gaps), "tpot_ms_max": max(gaps), "tokens_per_s": total / seconds}
        details["all_at_once"] = is_together
    if row.kind == THROUGHPUT:
        return total / seconds, details
    return median(gaps) if row.kind == TPOT else median(first), details


def _cache_folders(folder: str) -> dict[str, str]:
    """Return environment variables that put all caches of compiled code into `folder`."""
    names = ("CULET_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
    return {name: str(Path(folder) / name.lower()) for name in names}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def measure_start(config: Config, caches: Mapping[str, str]) -> Measured:
    """Measure the seconds until the first request is accepted, in two processes: with empty `caches`, then with full ones."""
    cold, cached = _start_once(config, caches), _start_once(config, caches)
    seconds = cold["ready_s"]
    details = {"cold_s": seconds, "cached_s": cached["ready_s"], "cold": cold, "cached": cached}
    return Measured(Workload(START), seconds, (seconds,), details)


def _start_once(config: Config, caches: Mapping[str, str]) -> dict[str, Any]:
    """Run `culet.bench.start` and return its report."""
    done = subprocess.run(
        python_command("culet.bench.start", json.dumps(given_settings(config))),
        stdout=subprocess.PIPE,
        text=True,
        timeout=START_LIMIT_S,
        env={**child_environment(), **caches},
        check=False,
    )
    if done.returncode:
        raise CuletError(f"{START}: the timed process failed with exit code {done.returncode}; its output is above")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
