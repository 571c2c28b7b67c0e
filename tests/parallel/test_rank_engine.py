"""An engine whose worker is two processes: one scheduler sends its plans to both, and the output is that of one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from culet.config import build_config
from culet.engine.engine import Engine
from culet.engine.resolve import given_settings, resolve
from culet.engine.start import worker
from culet.errors import ConfigError
from culet.parallel.group import RankGroup
from culet.parallel.rank import ONLY_RANK
from culet.parallel.reduce.choice import LIBRARY_ALONE
from culet.runner.worker import ProcessWorker
from culet.scheduler.stats import SchedulerStats
from culet.types import FinishReason, GrammarSpec, SamplingParams
from tests.parallel.jobs import prompt, small_cache

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


def test_parked_sequences(model_of: Callable[[str], str]) -> None:
    """Each rank saves its part of a sequence's pages in host memory. One scheduler counts the pages that all have."""
    given: dict[str, Any] = {"model": model_of("12B"), "device": "cpu", "max_model_len": 160, "max_num_batched_tokens": 64}
    given |= {"max_num_seqs": 4, "async_scheduling": True, "enable_prefix_caching": False}

    def run(**changes: Any) -> tuple[list[list[int]], SchedulerStats]:
        """Return the outputs of four requests and the counts."""
        engine = Engine(build_config(given | changes), progress=False)
        out: list[list[int]] = [[] for _ in range(4)]
        try:
            for number in range(len(out)):
                params = SamplingParams(temperature=number % 2, seed=number, max_tokens=40, ignore_eos=True)
                engine.add(engine.rules.make_request(str(number), prompt(66, number), params))
            while engine.has_work:
                for delta in engine.step():
                    assert delta.finish_reason is not FinishReason.ERROR, delta
                    out[int(delta.request_id)] += delta.token_ids
            return out, engine.stats()
        finally:
            engine.close()

    small = small_cache(given | {"tensor_parallel_size": 2}, 1)
    found, stats = run(tensor_parallel_size=2, kv_cache_memory_bytes=small)
    assert found == run()[0]
    assert stats.counters.parked == stats.counters.restored == stats.counters.preemptions > 0
    assert stats.num_free_host_pages == stats.num_host_pages > 0


def test_kernels_that_ranks_compile(
    model_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine counts them as its own."""
    made = partial(ProcessWorker, "tests.parallel.jobs:build_compiling")
    monkeypatch.setattr("culet.engine.start.worker.ProcessWorker", lambda builder, **arguments: made(**arguments))
    config = build_config({"model": model_of("12B"), "device": "cpu", "max_model_len": 512, "tensor_parallel_size": 2})
    with caplog.at_level("INFO", logger="culet"):
        engine = Engine(config, progress=False)
    try:
        assert "(6 kernels compiled, 0 found on disk)" in caplog.text
        assert (engine.kernels_compiled, engine.stats().kernels_compiled) == (6, 0)
        engine.add(engine.rules.make_request("a", prompt(9), SamplingParams(max_tokens=3, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        assert engine.stats().kernels_compiled == engine.stats().counters.steps == 3
        assert engine.kernels_compiled == 6
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("odd", "fact"),
    [
        ("setting", "--enable-prefix-caching"),
        ("version", "the version of culet"),
        ("config.json", "the model's config.json"),
        ("files", "the list of the model's files"),
    ],
)
def test_ranks_that_differ(model_of: Callable[[str], str], tmp_path: Path, odd: str, fact: str) -> None:
    """They find out before they load the model."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(model_of("12B"), folder / "model")
    if odd == "config.json":
        file = folders[1] / "model/config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "note": "changed"}))
    if odd == "files":
        with (folders[1] / "model/model.safetensors").open("ab") as weights:
            weights.write(b" ")
    config = build_config({"model": "./model", "device": "cpu", "tensor_parallel_size": 2, "max_model_len": 128})
    given = {"settings": given_settings(config), "num_slabs": 50, "reductions": asdict(LIBRARY_ALONE)}
    with pytest.raises(ConfigError, match=f"^{fact} differs between ranks: rank 0 has .*, but rank 1 has ") as caught:
        ProcessWorker("tests.parallel.jobs:build_odd", num_ranks=2, odd=odd, folders=list(map(str, folders)), **given)
    assert caught.value.hint == "start all ranks with the same version, model and settings"


def test_nccl_needs_gpus(model_of: Callable[[str], str]) -> None:
    given = {"model": model_of("12B"), "device": "cpu", "all_reduce": "nccl"}
    resolve(build_config(given))  # there is nothing to add
    with pytest.raises(ConfigError, match="all-reduce: got nccl, which needs GPUs") as caught:
        resolve(build_config(given | {"tensor_parallel_size": 2}))
    assert caught.value.hint.startswith("omit --all-reduce")


def test_ranks_compile_kernels_before_they_serve(model_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the size of the cache is given. The smallest of all ranks counts."""

    class Pair(RankGroup):
        def __call__(self, part: Tensor, /) -> Tensor:
            return part

        def gather(self, part: Tensor, /) -> Tensor:
            return part[None]

        def least(self, value: int) -> int:
            return value - 7

    given: list[int | None] = []

    def size_cache(*arguments: Any) -> int:
        given.append(arguments[5])
        return arguments[5] or 50

    monkeypatch.setattr(worker, "_size_cache", size_cache)
    setup = resolve(build_config({"model": model_of("12B"), "device": "cpu", "max_model_len": 128}))
    assert [worker.build_in_group(setup, Pair(ONLY_RANK), num_slabs).num_slabs for num_slabs in (None, 40)] == [43, 33]
    assert given == [None, 40]


def test_a_rank_that_cannot_be_built(model_of: Callable[[str], str]) -> None:
    """The error of a rank is the error of the engine."""
    given = {"model": model_of("12B"), "device": "cpu", "tensor_parallel_size": 3}
    with pytest.raises(ConfigError, match="got 3, "):
        Engine(build_config(given), progress=False)
