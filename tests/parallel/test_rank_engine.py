"""An engine whose worker is two processes: one scheduler sends its plans to both, and the output is that of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from culet.config import build_config
from culet.engine.engine import Engine
from culet.errors import ConfigError
from culet.runner.worker import ProcessWorker
from culet.types import FinishReason, GrammarSpec, SamplingParams
from tests.parallel.jobs import prompt

DRAFTS = {"method": "mtp", "model": "random:", "num_speculative_tokens": 2, "adaptive": False, "probe": False}


def settings(folder: str) -> dict[str, Any]:
    return {
        "model": folder,
        "device": "cpu",
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "async_scheduling": True,
        "speculative_config": json.dumps(DRAFTS),
    }


def ask(engine: Engine) -> dict[str, list[int]]:
    """Return greedy, sampled and constrained outputs, and those of a request that reuses an earlier one's pages."""
    sampled = SamplingParams(temperature=1.0, top_k=64, seed=3, max_tokens=12, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    asked = {"greedy": (prompt(90), greedy), "sampled": (prompt(30, 1), sampled), "bound": (prompt(9, 2), greedy)}
    out: dict[str, list[int]] = {}
    for round_ in (list(asked), ["reused"]):
        for name in round_:
            tokens, params = asked.get(name, (prompt(120), greedy))
            request = engine.rules.make_request(name, tokens, params)
            if name == "bound":
                request = replace(request, grammar=GrammarSpec("regex", "[a-f]{40}"))
                engine.check_grammar(request)
            out[name] = []
            engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                assert delta.finish_reason is not FinishReason.ERROR, delta
                out[delta.request_id] += delta.token_ids
    return out


def test_one_scheduler_for_two_ranks(model_of: Callable[[str], str]) -> None:
    given = settings(model_of("12B"))
    want = ask(Engine(build_config(given), progress=False))
    engine = Engine(build_config(given | {"tensor_parallel_size": 2}), progress=False)
    try:
        assert isinstance(engine._worker, ProcessWorker)
        assert len(engine._worker.pids) == 2
        assert ask(engine) == want
        text = engine.tokenizer.decode(want["bound"])
        assert set(text) <= set("abcdef"), text
        counters = engine.stats().counters
        assert counters.prefix_hit_tokens > 60
        assert counters.drafted_tokens > 0
    finally:
        engine.close()


def test_a_rank_that_cannot_be_built(model_of: Callable[[str], str]) -> None:
    """The error of a rank is the error of the engine."""
    given = {"model": model_of("12B"), "device": "cpu", "tensor_parallel_size": 3}
    with pytest.raises(ConfigError, match="got 3, "):
        Engine(build_config(given), progress=False)
