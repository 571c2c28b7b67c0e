"""Preempted sequences keep their KV in host memory. Outputs are those of an engine that preempts none."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest
import torch

from culet.engine import memory
from culet.engine.llm import LLM
from culet.engine.memory import GIB, num_host_pages
from culet.scheduler import sequence
from culet.scheduler.stats import Counters
from culet.types import FinishReason, SamplingParams, StructuredOutputs
from tests.engine.llm.oracle import folder_of, prompt
from tests.engine.llm.test_llm import cache_of
from tests.matrix import matrix

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
PROMPTS = [prompt(length, seed) for seed, length in enumerate((70, 81, 66, 75))]
SMALL = 10  # slabs of the structures with K=V layers, with which two of PROMPTS are preempted
Outputs = dict[tuple[str, int], list[int]]


@pytest.fixture(autouse=True)
def _check_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")


def make(shape: str, num_slabs: int = 60, **settings: Any) -> LLM:
    given = {"max_num_batched_tokens": 64, "max_model_len": 200, "kv_cache_memory_bytes": cache_of(shape, num_slabs)}
    return LLM(str(folder_of(shape)), device="cpu", dtype="float32", **{**given, **settings})


def outputs(llm: LLM, *params: SamplingParams, seed: int | None = None) -> Outputs:
    """Return the tokens of PROMPTS with each of `params`. With a `seed`, park random sequences after random steps."""
    engine, scheduler, chance = llm.engine, llm.engine._scheduler, random.Random(seed)
    for number, one in enumerate(params):
        for index, token_ids in enumerate(PROMPTS):
            request = engine.rules.make_request(f"{number}.{index}", token_ids, one)
            engine.check_grammar(request)
            engine.add(request)
    found: Outputs = defaultdict(list)
    while engine.has_work:
        for delta in engine.step():
            assert delta.finish_reason in (None, FinishReason.LENGTH, FinishReason.STOP), delta
            found[delta.request_id, delta.sample] += delta.token_ids
        if seed is not None and chance.random() < 0.2 and scheduler._running:
            seq = chance.choice(scheduler._running)
            seq.park(scheduler.page_allocator)
            scheduler._preempt(seq)
    stats = engine.stats()
    assert stats.num_free_host_pages == stats.num_host_pages
    return found


def counts(llm: LLM) -> Counters:
    return llm.engine.stats().counters


@matrix({"shape": ["31B", "12B", "26B-A4B"], "prefix_caching": [False, True], "ahead": [False, True]})
def test_a_small_cache(shape: str, prefix_caching: bool, ahead: bool) -> None:
    """Nothing is computed again, so the number of computed tokens is that of a cache with room for all."""
    with make(shape, SMALL, enable_prefix_caching=prefix_caching, async_scheduling=ahead) as llm, make(shape) as roomy:
        for params in (GREEDY, SEEDED):
            assert outputs(llm, params) == outputs(roomy, params)
        counters = counts(llm)
        assert counters.parked == counters.restored == counters.preemptions > 0 == counts(roomy).preemptions
        if not prefix_caching:
            assert counters.step_tokens - counters.dropped_tokens == 2 * sum(len(each) + 40 - 1 for each in PROMPTS)


def test_off() -> None:
    with make("31B", SMALL, swap_space=0) as llm, make("31B") as roomy:
        assert outputs(llm, GREEDY) == outputs(roomy, GREEDY)
        assert (counts(llm).parked, llm.engine.stats().num_host_pages) == (0, 0)
        assert counts(llm).preemptions > 0


def test_host_memory_for_one() -> None:
    """Sequences that find no room in host memory are computed again."""
    with make("31B") as roomy:
        slab_bytes = roomy.engine.layout.slab_bytes
        expected = outputs(roomy, GREEDY)
    with make("31B", swap_space=2.5 * slab_bytes / GIB) as llm:
        assert outputs(llm, GREEDY, seed=2) == expected
        assert llm.engine.stats().num_host_pages == 2
        assert 0 < counts(llm).parked < counts(llm).preemptions


MTP = {"method": "mtp", "model": "random:", "num_speculative_tokens": 2, "adaptive": False, "probe": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix cache": {"enable_prefix_caching": True},
    "ahead": {"async_scheduling": True},
    "suffix": {"speculative_config": json.dumps({"method": "suffix", "num_speculative_tokens": 3, "adaptive": False})},
    "mtp": {"speculative_config": json.dumps(MTP)},
    "mtp ahead": {"speculative_config": json.dumps(MTP), "async_scheduling": True},
    "fp8": {"kv_cache_dtype": "fp8"},
}


@matrix({"shape": ["31B", "E4B", "12B", "26B-A4B"], "name": list(SETTINGS)})
def test_parked_at_any_time(shape: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are parked in their prompts and answers, with rows and drafts in flight, alone and with other samples."""
    monkeypatch.setattr(sequence, "MIN_PARKED", 1)
    grammar = SamplingParams(temperature=1.0, seed=5, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-f]{12}"))
    params = (GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=30, n=2, ignore_eos=True), grammar)
    settings = {"enable_prefix_caching": False, **SETTINGS[name]}
    with make(shape, **settings) as llm:
        expected = outputs(llm, *params)
        before = counts(llm)
        assert outputs(llm, *params, seed=7) == expected
        counters = counts(llm).since(before)
        assert counters.restored > 5
        if "speculative_config" in settings:
            assert counters.verifies > 5


def test_log_probabilities_of_a_prompt() -> None:
    """A prompt is scored in chunks, and goes on where it was parked."""
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, ignore_eos=True)
    with make("31B", max_num_batched_tokens=33) as llm:
        (expected,) = llm.generate([PROMPTS[1]], params)
        engine, scores = llm.engine, []
        engine.add(engine.rules.make_request("a", PROMPTS[1], params))
        while engine.has_work:
            for delta in engine.step():
                scores += delta.prompt_logprobs
            for seq in list(engine._scheduler._running):
                if not counts(llm).parked and seq.num_computed == 66:
                    seq.park(engine._scheduler.page_allocator)
                    engine._scheduler._preempt(seq)
        assert counts(llm).restored == 1
        assert expected.prompt_logprobs is not None
        assert len(scores) == len(PROMPTS[1]) - 1
        for found, wanted in zip(scores, expected.prompt_logprobs, strict=True):
            assert found.keys() == wanted.keys()
            torch.testing.assert_close(
                torch.tensor(list(found.values())), torch.tensor(list(wanted.values())), rtol=0, atol=1e-4
            )


def test_the_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with make("31B") as llm:
        layout = llm.engine.layout
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 4 * 100 * layout.slab_bytes)
    assert num_host_pages(layout, 1000, 8.0, 1, 1) == 100  # a quarter of the free memory
    assert num_host_pages(layout, 1000, 8.0, 2, 5) == 10  # for each rank of each engine
    assert num_host_pages(layout, 30, 8.0, 1, 1) == 30  # as many as the cache has
    assert num_host_pages(layout, 1000, 50 * layout.slab_bytes / GIB, 1, 1) == 50
    assert num_host_pages(layout, 1000, 50 * layout.slab_bytes / GIB, 2, 1) == 25  # of the engine's memory
    assert num_host_pages(layout, 1000, 0.0, 1, 1) == 0
