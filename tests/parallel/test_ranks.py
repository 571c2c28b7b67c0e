"""Ranks in gloo processes compute what one process computes, whatever they share: heads, tokens, widths or the vocabulary.

All tests are in one file, so that they share the ranks' processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from culet.models.checkpoint import open_checkpoint
from tests.models.formats.test_compressed_tensors import NVFP4, integers
from tests.models.formats.test_gguf import write_gguf
from tests.models.formats.writing import SHAPES, compressed, ct_config, write_pair
from tests.parallel import jobs
from tests.parallel.jobs import Asked, prompt
from tests.parallel.ranks import Ranks

RanksOf = Callable[[int], Ranks]
ModelOf = Callable[[str], str]

# Logits

EVERY_MODEL = [pytest.param(shape, size, marks=pytest.mark.slow) for shape in jobs.SHAPES for size in (2, 4)]
# 12B with two ranks shares tokens. 26B-A4B with four ranks shares heads, tokens and experts.
FEW_MODELS = [("12B", 2), ("26B-A4B", 4)]
SOME_MODELS = FEW_MODELS + [case for case in EVERY_MODEL if tuple(case.values) not in FEW_MODELS]


def check(found: list[Tensor], want: Tensor) -> None:
    """Check that all ranks have the same bits, close to those of one process."""
    for logits in found:
        assert torch.equal(logits, found[0])
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("shape", "size"), SOME_MODELS)
def test_every_position(ranks_of: RanksOf, model_of: ModelOf, shape: str, size: int) -> None:
    """Chunks end inside runs, on their edges, and after several of them. A rank may have no token at all at first."""
    chunks = (17, 46, 1, 1, 63, 2, 100, 30)
    want = jobs.every_logit(None, model_of(shape), chunks)
    assert want.shape[0] == sum(chunks)
    check(ranks_of(size).run(jobs.every_logit, model_of(shape), chunks), want)


@pytest.mark.parametrize(("shape", "size"), [("12B", 2), *(case for case in EVERY_MODEL if case.values != ("12B", 2))])
def test_ragged_batches(ranks_of: RanksOf, model_of: ModelOf, shape: str, size: int) -> None:
    want = jobs.ragged_logits(None, model_of(shape))
    found = ranks_of(size).run(jobs.ragged_logits, model_of(shape))
    for index, logits in enumerate(want):
        check([of_rank[index] for of_rank in found], logits)


@pytest.mark.parametrize(("shape", "size"), FEW_MODELS)
def test_a_rank_holds_its_part_of_the_weights(ranks_of: RanksOf, model_of: ModelOf, shape: str, size: int) -> None:
    whole = jobs.held_bytes(None, model_of(shape))
    for held in ranks_of(size).run(jobs.held_bytes, model_of(shape)):
        for part in {"embedding", "mlp", "experts"} & whole.keys():
            assert held[part] * size == whole[part], part
        assert held["all"] < 1.2 * whole["all"] / size + (0 if size <= jobs.SHAPES[shape] else whole["global"])


def write_int4(root: Path) -> Path:
    weights = integers(4, 32, symmetric=False)
    return write_pair(
        root, "31B", compressed(weights, "pack-quantized"), ct_config((["Linear"], weights, "pack-quantized"))
    ).folder


def write_nvfp4(root: Path) -> Path:
    config = ct_config((["Linear"], NVFP4, "nvfp4-pack-quantized"))
    return write_pair(root, "26B-A4B", compressed(NVFP4, "nvfp4-pack-quantized"), config).folder


@pytest.mark.parametrize(
    "write",
    [
        write_int4,
        pytest.param(write_nvfp4, marks=pytest.mark.slow),
        lambda root: write_gguf(root, "26B-A4B", "Q4_0")[0],
        pytest.param(lambda root: write_gguf(root, "31B", "Q8_0")[0], marks=pytest.mark.slow),
    ],
    ids=["int4 with zero points", "nvfp4", "Q4_0", "Q8_0"],
)
def test_stored_formats(
    ranks_of: RanksOf, write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks cut packed words, groups, zero points and blocks as one process reads them."""
    monkeypatch.setitem(SHAPES, "31B", SHAPES["31B"] | {"hidden_size": 256})
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path / "cache"))
    folder = open_checkpoint(str(write(tmp_path))).folder  # of a GGUF file, the folder that stands for it
    want = jobs.every_logit(None, str(folder), (20, 12, 1))
    for logits in ranks_of(2).run(jobs.every_logit, str(folder), (20, 12, 1)):
        torch.testing.assert_close(logits, want, rtol=0, atol=3e-4)


# Engines. Each rank schedules for itself, and the schedulers are equal.

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


FULL = [[Asked(prompt(66, seed), 64) for seed in range(4)]]
CASES: dict[str, tuple[dict[str, Any], list[list[Asked]]]] = {
    "greedy and sampled": (SMALL, [LONG, SAMPLED]),
    "preemption": (SMALL | {"enable_prefix_caching": False, "swap_space": 0}, FULL),
    "parking": (SMALL | {"enable_prefix_caching": False}, FULL),
    "prefix hits": (SMALL, SHARED),
    "mtp": (drafted(MTP), [LONG, SAMPLED]),
    "mtp at its own position": (drafted(MTP | {"position": "hf"}), [LONG]),
    "dflash": (drafted(DFLASH), [LONG, SAMPLED]),
    "look-ahead": (SMALL | {"async_scheduling": True}, [LONG]),
    "without the latent": (SMALL | {"latent": False}, [LONG]),
    "fp8 cache": (SMALL | {"kv_cache_dtype": "fp8"}, [LONG]),
    "int4": (SMALL | {"quantization": "int4"}, [LONG]),
    "fp8": (SMALL | {"quantization": "fp8"}, [LONG]),
    "fp8 head": (SMALL | {"head_quantization": "fp8"}, [LONG]),
    "int4 head": (SMALL | {"quantization": "fp8", "head_quantization": "int4"}, [LONG]),
}
SHORT, WHOLE = 17, 64  # most tokens of an answer. A short one still crosses a run and a page.
OFTEN = [
    ("greedy and sampled", "12B", 2, SHORT),
    *((name, "12B", 2, SHORT) for name in ("preemption", "parking", "prefix hits", "mtp", "int4 head")),
]
RARELY = [(name, shape, size, WHOLE) for name in CASES for shape in jobs.SHAPES for size in (2, 4)]
EVERY = OFTEN + [pytest.param(*case, marks=pytest.mark.slow) for case in RARELY if case not in OFTEN]


@pytest.mark.parametrize(("name", "shape", "size", "most_tokens"), EVERY)
def test_the_same_output(ranks_of: RanksOf, model_of: ModelOf, name: str, shape: str, size: int, most_tokens: int) -> None:
    settings, rounds = CASES[name]
    rounds = [[replace(asked, max_tokens=min(asked.max_tokens, most_tokens)) for asked in requests] for requests in rounds]
    settings = {"model": model_of(shape), **settings}
    ranks_settings = settings | {"tensor_parallel_size": size}
    if name in (
        "preemption",
        "parking",
    ):  # too few pages for all sequences. One process and its ranks have slabs of different sizes.
        num_more = 2 if shape == "31B" else 1  # With one, its fourth sequence waits and none is preempted.
        settings = settings | {"kv_cache_memory_bytes": jobs.small_cache(settings, num_more)}
        ranks_settings = ranks_settings | {"kv_cache_memory_bytes": jobs.small_cache(ranks_settings, num_more)}
    want, counters = jobs.run_engine(None, settings, rounds)
    for found, own_counters in ranks_of(size).run(jobs.run_engine, ranks_settings, rounds):
        assert found == want
        if name in ("preemption", "parking"):
            assert min(counters.preemptions, own_counters.preemptions) > 0
            assert (own_counters.parked, own_counters.restored) == (own_counters.preemptions * (name == "parking"),) * 2
        if name == "prefix hits":
            assert own_counters.prefix_hit_tokens == counters.prefix_hit_tokens > 200
        if "speculative_config" in settings:
            assert own_counters.drafted_tokens > 50


# Agreement


@pytest.mark.parametrize(
    ("name", "values"),
    [("the version of culet", ("0.2.0", "0.3.0")), ("--max-num-seqs", (8, 16)), ("the model's config.json", ("ab", "cd"))],
)
def test_ranks_that_disagree(ranks_of: RanksOf, name: str, values: tuple[object, object]) -> None:
    """Every rank gets the error, and it names both values."""
    errors = ranks_of(2).run(jobs.differing_facts, [{"same": 1, name: value} for value in values])
    want = f"{name} differs between ranks: rank 0 has {values[0]}, but rank 1 has {values[1]}"
    assert [error.partition("\n")[0] for error in errors] == [want] * 2
    assert ranks_of(2).run(jobs.differing_facts, [{name: values[0]}] * 2) == ["", ""]
