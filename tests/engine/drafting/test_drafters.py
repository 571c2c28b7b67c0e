"""What every drafter in DRAFTERS must satisfy: its interface, its use of the cache, and that it never changes a token."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from culet import LLM, SamplingParams
from culet.attention.batch import GroupBatch
from culet.attention.plan import BACKENDS
from culet.attention.torch_cpu import TorchCPUBackend
from culet.cache.pool import Pool
from culet.cache.spec import CacheLayout, plan_cache
from culet.config import Config, DraftChoice, ScheduleConfig, build_config
from culet.drafters.base import DRAFTERS, DraftBatch, Drafter, cache_specs, open_drafter, target_groups
from culet.engine import resolve
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import load_model
from culet.registry import load
from culet.runner.runner import Runner
from culet.scheduler.scheduler import Scheduler
from culet.testing.tiny import write_checkpoint
from culet.types import Request
from tests.matrix import matrix
from tests.samplings import GREEDY

CPU = torch.device("cpu")
MAX_LEN = 128
NUM_DRAFTS = 4
LENGTHS = (1, 9, 40, 70)
SHAPES = ["E2B", "26B-A4B", "31B"]


@functools.cache
def target_folder(shape: str) -> Path:
    return write_checkpoint(Path(tempfile.mkdtemp(prefix="culet-drafters-")), shape, dtype=torch.float32)


@functools.cache
def target_model(shape: str) -> Gemma4:
    return load_model(open_checkpoint(str(target_folder(shape))), dtype=torch.float32, device=CPU, progress=False)


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(120, 600, (length,), generator=generator).tolist()


@dataclass
class Met:
    """A drafter in the middle of its work, with its last batch and the pool as it was before that batch."""

    model: Gemma4
    layout: CacheLayout
    pool: Pool
    drafter: Drafter
    batch: DraftBatch

    def propose(self, batch: DraftBatch | None = None, num_drafts: int = NUM_DRAFTS) -> Tensor:
        with torch.inference_mode():
            return self.drafter.propose(batch or self.batch, self.pool, num_drafts)


def meet(method: str, shape: str) -> Met:
    """Run prompts of different lengths for some steps with drafts, and return the drafter."""
    model = target_model(shape)
    spec = open_drafter(DraftChoice(method, "random:", num_speculative_tokens=NUM_DRAFTS), model.spec)
    layout = plan_cache(cache_specs(model.spec, spec, 4, latent=True))
    pool = Pool(layout, 200, torch.float32, CPU, has_spare=True)
    backends = [TorchCPUBackend(group, model.spec.layers[0].num_heads) for group in target_groups(layout)]
    own = {g.index: TorchCPUBackend(g, spec.num_heads) for g in layout.groups if g.name in spec.readers(layout)}
    drafter = spec.build(model, own, progress=False)
    assert (drafter.taps, drafter.max_drafts) == (spec.taps, NUM_DRAFTS)
    scheduler = Scheduler(layout, 200, ScheduleConfig(8, 100), max_model_len=MAX_LEN, max_drafts=NUM_DRAFTS)
    runner = Runner(model, pool, backends, max_num_seqs=8, max_model_len=MAX_LEN, drafter=drafter)
    met: list[DraftBatch] = []
    original = drafter.propose

    def keep(batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        met.append(batch)
        return original(batch, pool, num_drafts)

    drafter.propose = keep  # type: ignore[method-assign]
    for length in LENGTHS:
        scheduler.add(Request(f"r{length}", tuple(prompt(length)), GREEDY, 1, 30, frozenset()))
    while len(met) < 4 or met[-1].num_rows < len(LENGTHS):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(runner.execute(plan))
    del drafter.propose  # type: ignore[method-assign]
    return Met(model, layout, pool, drafter, met[-1])


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=sorted(DRAFTERS.keys() - {"suffix"}))  # suffix drafting has no layers (test_suffix.py)
def met(request: Any, shape: str) -> Met:
    return meet(request.param, shape)


# The interface


@pytest.mark.parametrize("method", sorted(DRAFTERS))
def test_spec(method: str, shape: str) -> None:
    target = target_model(shape).spec
    spec = open_drafter(DraftChoice(method, "random:", num_speculative_tokens=2), target)
    assert (spec.method, spec.max_drafts) == (method, 2)
    assert all(0 <= tap < len(target.layers) for tap in spec.taps)
    own = spec.kv_specs(4)
    assert all(spec.owner == method and spec.itemsize == 4 and spec.layer >= len(target.layers) for spec in own)
    assert bool(own) != spec.reads_target_pages
    layout = plan_cache(cache_specs(target, spec, 4, latent=True))
    assert [group.layers for group in target_groups(layout)] == [g.layers for g in plan_cache(target.kv_specs(4)).groups]
    readers = spec.readers(layout)
    assert set(readers) <= {group.name for group in layout.groups}
    numbers = sorted(layer for layers in readers.values() for layer in layers)
    assert numbers == list(range(len(target.layers), len(target.layers) + len(numbers)))
    assert spec.weight_bytes(4) == 4 * sum(spec.num_parameters().values())
    assert (spec.weight_bytes(4) > 0) == (method != "suffix")


def test_proposals(met: Met) -> None:
    proposals = met.propose()
    assert proposals.shape == (len(LENGTHS), NUM_DRAFTS)
    assert proposals.dtype == torch.int64
    assert bool(((proposals >= 0) & (proposals < met.model.spec.vocab_size)).all())
    assert len(set(proposals.flatten().tolist())) > 1
    for count in (1, 3):  # fewer drafts are the first of more
        assert torch.equal(met.propose(num_drafts=count), proposals[:, :count])


def test_rows_do_not_know_each_other(met: Met) -> None:
    expected = met.propose()
    for order in ([2], [3, 1], [3, 2, 1, 0]):
        assert torch.equal(met.propose(rows_of(met.batch, order)), expected[order])


def rows_of(batch: DraftBatch, order: list[int]) -> DraftBatch:
    index = torch.tensor(order)
    groups = tuple(GroupBatch(group.pages_BP[index], group.first_B[index], group.kv_address_T) for group in batch.groups)
    parts = {name: getattr(batch, name)[index] for name in ("newest_R", "length_R", "slot_R", "hidden_RD")}
    return replace(batch, groups=groups, **parts)


def test_rows_that_pad(met: Met) -> None:
    """Padding rows after the real ones, as in a graph of fixed shape, have no effect."""
    assert met.pool.spare_page is not None
    expected, spare = met.propose(), met.pool._slabs[met.pool.spare_page].clone()
    padded = rows_of(met.batch, [0, 1, 2, 3, 0, 0])
    padded.length_R[4:], padded.newest_R[4:], padded.hidden_RD[4:] = 1, 0, 0.0
    for group in padded.groups:
        group.pages_BP[4:], group.first_B[4:] = met.pool.spare_page, 0
    assert torch.equal(met.propose(padded)[:4], expected)
    assert torch.equal(met.pool._slabs[met.pool.spare_page], spare)


def test_what_it_may_write(met: Met) -> None:
    """It may not write the target's pages, nor those of its own that hold context."""
    before = met.pool._slabs.clone()
    met.propose()
    changed = {int(page) for page in (met.pool._slabs != before).any(1).nonzero()}
    for group in met.layout.groups:
        pages = set(met.batch.groups[group.index].pages_BP.flatten().tolist())
        if not group.ahead:
            assert not changed & pages, f"pages of {group.name} were written"
            continue
        met.pool._slabs.copy_(before)
        context = [met.pool.planes(layer).clone() for layer in group.layers]
        met.propose()
        for row, length in enumerate(met.batch.length_R.tolist()):
            table = met.batch.groups[group.index].pages_BP[row].tolist()
            for layer, old in zip(group.layers, context, strict=True):
                for position in range(length):
                    at = (slice(None), table[position // group.page_tokens], slice(None), position % group.page_tokens)
                    assert torch.equal(met.pool.planes(layer)[at], old[at]), f"{group.name}: position {position} was written"


def test_no_graph_of_what_is_planned_on_the_host() -> None:
    """A replay would read the keys of another step, so such a backend, the target's or the drafter's, runs without graphs."""
    spec = open_drafter(DraftChoice("dflash", "random:"), target_model("31B").spec)
    *_, group = plan_cache(cache_specs(target_model("31B").spec, spec, 4, latent=True)).groups
    backends = [load(backend.path)(group, spec.num_heads) for backend in BACKENDS.values()]
    by_kind = {backend.is_capturable: backend for backend in backends}
    cuda = torch.device("cuda")
    assert resolve._can_capture(Config(), cuda, [by_kind[True]])
    assert not resolve._can_capture(Config(), cuda, [by_kind[True], by_kind[False]])
    assert not resolve._can_capture(Config(), CPU, [by_kind[True]])
    assert not resolve._can_capture(build_config({"enforce_eager": True}), cuda, [by_kind[True]])


# Through the engine, where greedy output is token for token the same as without a drafter


def make(shape: str, method: str | None, **settings: Any) -> LLM:
    draft = {"method": method, "model": "random:", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False, "probe": False}
    given = {"device": "cpu", "dtype": "float32", "max_model_len": MAX_LEN, **settings}
    return LLM(str(target_folder(shape)), **given, **({} if method is None else {"speculative_config": draft}))


ALL = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
# They all cross a page of 64 tokens at once, a few steps after they start, which admission does not foresee.
CROSSING = (56, 57, 58, 59)


@functools.cache
def plain(shape: str, lengths: tuple[int, ...] = LENGTHS) -> dict[int, tuple[int, ...]]:
    """Output without a drafter, by prompt length."""
    results = make(shape, None).generate([prompt(length) for length in lengths], ALL)
    return {length: result.token_ids for length, result in zip(lengths, results, strict=True)}


@matrix({"method": sorted(DRAFTERS), "shape": SHAPES}, fixtures=["shape"])
def test_greedy_output_is_the_same(shape: str, method: str) -> None:
    """Run in batches, in chunks, and a second time from the prefix cache."""
    prompts = [prompt(length) for length in LENGTHS]
    llm = make(shape, method, max_num_batched_tokens=33)
    for _ in range(2):
        assert [result.token_ids for result in llm.generate(prompts, ALL)] == list(plain(shape).values())
    counters = llm.engine.stats().counters
    assert counters.verifies > (5 if method == "suffix" else 50)  # it drafts only where text repeats
    assert counters.prefix_hits >= 3


@matrix({"method": sorted(DRAFTERS), "shape": SHAPES[::-1]}, fixtures=["shape"])
def test_greedy_output_after_preemption_and_cancels(shape: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with few pages and with the debug switch that checks every page index of every step."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    target = target_model(shape).spec
    spec = open_drafter(DraftChoice(method, "random:", num_speculative_tokens=NUM_DRAFTS), target)
    layout = plan_cache(cache_specs(target, spec, 4, latent=True))
    engine = make(shape, method, kv_cache_memory_bytes=(4 * len(layout.groups) + 1) * layout.slab_bytes).engine
    heard: dict[str, list[int]] = {}
    for length in (*CROSSING, *LENGTHS[:2]):
        engine.add(engine.rules.make_request(str(length), prompt(length), ALL))
    steps = 0
    while engine.has_work:
        for delta in engine.step():
            heard.setdefault(delta.request_id, []).extend(delta.token_ids)
        steps += 1
        if steps == 25:
            num_left = ALL.max_tokens - len(heard.get(str(CROSSING[1]), ()))  # none with suffix drafts in 31B
            engine.cancel(str(CROSSING[1]))
    expected = plain(shape) | plain(shape, CROSSING)
    for name, tokens in heard.items():
        assert tuple(tokens) == expected[int(name)][: len(tokens)], name
        assert len(tokens) == ALL.max_tokens or name == str(CROSSING[1])
    stats = engine.stats()
    assert stats.counters.preemptions
    assert stats.counters.cancelled == (num_left > 0)
    assert num_left > 0 or (shape, method) == ("31B", "suffix")
    assert stats.num_free_pages + stats.num_resume_point_pages == stats.num_pages


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(DRAFTERS))
def test_two_thousand_tokens(method: str, tmp_path: Path) -> None:
    """Run greedily over 2,000 tokens after a long prompt.

    Where two tokens are nearly equal, either may follow, which is reported.
    """
    overrides = {"max_position_embeddings": 32768}
    folder = str(write_checkpoint(tmp_path, "31B", dtype=torch.float32, overrides=overrides, seed=2))
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, logprobs=2, repetition_penalty=1.3)
    draft = {"method": method, "model": "random:", "num_speculative_tokens": NUM_DRAFTS, "probe": False}
    given = {"device": "cpu", "dtype": "float32", "max_model_len": 4096}
    start = prompt(600)
    (plain,) = LLM(folder, **given).generate([start], params)
    (drafted,) = LLM(folder, **given, speculative_config=draft).generate([start], params)
    assert len(set(plain.token_ids)) > 100
    pairs = zip(plain.token_ids, drafted.token_ids, strict=True)
    place = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if place is not None:
        assert plain.logprobs is not None
        best, second = sorted(plain.logprobs[place].values(), reverse=True)[:2]
        print(f"token {place}: the two best differ by {best - second:.1e}")
        assert best - second < 1e-4
