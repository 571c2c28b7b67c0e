"""Engines whose ranks share a model write what an engine of one process writes, with everything that a scheduler does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.parallel import jobs
from tests.parallel.jobs import Asked, prompt
from tests.parallel.ranks import Ranks

RanksOf = Callable[[int], Ranks]
ModelOf = Callable[[str], str]
SMALL = {"max_num_batched_tokens": 48, "max_num_seqs": 4}
MTP = {"method": "mtp", "model": "random:", "num_speculative_tokens": 3, "adaptive": False, "probe": False}
DFLASH = {"method": "dflash", "model": "random:layers=2,block=4", "adaptive": False, "probe": False}
GEMMA = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 5}

LONG = [Asked(prompt(length, length), 64) for length in (5, 70, 130)]
SAMPLED = [
    Asked(prompt(40, 9), 20, GEMMA),
    Asked(prompt(90, 8), 12, {"temperature": 0.7, "seed": 2**63, "repetition_penalty": 1.2, "logprobs": 3}),
]
# Each later prompt continues an earlier one in the middle of a page, and of a run.
SHARED = [[Asked(prompt(150), 8)], [Asked(prompt(170), 8), Asked(prompt(99), 8)], [Asked(prompt(260), 8)]]


def drafted(choice: dict[str, Any]) -> dict[str, Any]:
    return {**SMALL, "speculative_config": json.dumps(choice)}


CASES: dict[str, tuple[dict[str, Any], list[list[Asked]]]] = {
    "greedy and sampled": (SMALL, [LONG, SAMPLED]),
    "preemption": (SMALL | {"enable_prefix_caching": False}, [[Asked(prompt(66, seed), 64) for seed in range(4)]]),
    "prefix hits": (SMALL, SHARED),
    "mtp": (drafted(MTP), [LONG, SAMPLED]),
    "mtp at its own position": (drafted(MTP | {"position": "hf"}), [LONG]),
    "dflash": (drafted(DFLASH), [LONG, SAMPLED]),
    "look-ahead": (SMALL | {"async_scheduling": True}, [LONG]),
    "without the latent": (SMALL | {"latent": False}, [LONG]),
    "fp8 cache": (SMALL | {"kv_cache_dtype": "fp8"}, [LONG]),
    "int4": (SMALL | {"quantization": "int4"}, [LONG]),
    "fp8": (SMALL | {"quantization": "fp8"}, [LONG]),
}
OFTEN = [
    *((name, "12B", 2) for name in ("preemption", "prefix hits", "mtp", "dflash", "look-ahead")),
    *((name, "26B-A4B", 2) for name in ("greedy and sampled", "int4")),
    ("prefix hits", "26B-A4B", 4),
]
RARELY = [(name, shape, size) for name in CASES for shape in jobs.SHAPES for size in (2, 4)]
EVERY = OFTEN + [pytest.param(*case, marks=pytest.mark.slow) for case in RARELY if case not in OFTEN]


@pytest.mark.parametrize(("name", "shape", "size"), EVERY)
def test_the_same_output(ranks_of: RanksOf, model_of: ModelOf, name: str, shape: str, size: int) -> None:
    settings, rounds = CASES[name]
    settings = {"model": model_of(shape), **settings}
    ranks_settings = settings | {"tensor_parallel_size": size}
    if name == "preemption":  # too few pages for all sequences. One process and its ranks have slabs of different sizes.
        settings = settings | {"kv_cache_memory_bytes": jobs.small_cache(settings)}
        ranks_settings = ranks_settings | {"kv_cache_memory_bytes": jobs.small_cache(ranks_settings)}
    want, counters = jobs.run_engine(None, settings, rounds)
    for found, own_counters in ranks_of(size).run(jobs.run_engine, ranks_settings, rounds):
        assert found == want
        if name == "preemption":
            assert min(counters.preemptions, own_counters.preemptions) > 0
        if name == "prefix hits":
            assert own_counters.prefix_hit_tokens == counters.prefix_hit_tokens > 200
        if "speculative_config" in settings:
            assert own_counters.drafted_tokens > 100
