"""Rehearsals plan valid steps for any settings, and compile each kernel only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from culet.cache.spec import plan_cache
from culet.config import ScheduleConfig
from culet.engine.start.rehearsal import QUERY_COUNTS, Rehearsal
from culet.kernels.triton.launch import next_power_of_2
from culet.kernels.triton.linear.few_tokens import MIN_COLUMNS
from culet.kernels.triton.linear.tiles import SOFTCAP, choose_tile
from culet.kernels.triton.sampling.draw import logprobs
from culet.models.gemma4 import LOGITS_ROWS
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.sampling.gpu_sampler import GpuSampler
from culet.sampling.sampler import History, TokenMasks
from culet.types import Sampling
from tests.kernels.linear_cases import Shape, shapes

SAMPLING = Sampling(
    temperature=1.0, top_k=64, top_p=0.95, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
    logit_bias=(), seed=0, sample=0, logprobs=None, prompt_logprobs=None,
)  # fmt: skip


def make_rehearsal(max_model_len: int, max_num_seqs: int = 20, budget: int = 2048) -> Rehearsal:
    layout = plan_cache(read_spec(VARIANTS["E2B"]).kv_specs(torch.bfloat16.itemsize, latent=True))
    return Rehearsal(
        None,  # type: ignore[arg-type]  # plans need no model
        layout,
        [],
        ScheduleConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        SAMPLING,
        max_model_len=max_model_len,
        has_graphs=True,
    )


@pytest.mark.parametrize("max_model_len", [2, 63, 64, 65, 130, 5000])
def test_steps_are_valid(max_model_len: int) -> None:
    rehearsal = make_rehearsal(max_model_len)
    plans = [*rehearsal._ladder(), *rehearsal._heavy_steps()]
    assert len(plans) > 5
    for plan in plans:
        assert 1 <= plan.num_tokens <= 2048
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= 20
        for entry, row in zip(plan.entries, plan.rows, strict=True):
            assert row.num_new >= max(1, row.num_logits)
            assert len(entry.token_ids) == row.start + row.num_new <= max_model_len


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (8, 128), (20, 2048), (60, 50), (300, 8192)])
def test_no_step_has_more_short_rows_than_a_rehearsed_one(max_num_seqs: int, budget: int) -> None:
    """A rehearsed step also compiles the kernels for fewer rows, so these are covered as well."""
    most: dict[int, int] = {}
    for plan in make_rehearsal(5000, max_num_seqs, budget)._ladder():
        lengths = [row.num_new for row in plan.rows if row.num_new <= max(QUERY_COUNTS)]
        assert plan.num_tokens <= budget
        if lengths:
            width = next_power_of_2(max(lengths))
            most[width] = max(len(plan.rows), most.get(width, 0))
    fitting = {queries: min(max_num_seqs, budget - queries + 1) for queries in QUERY_COUNTS}
    assert most == {queries: num_rows for queries, num_rows in fitting.items() if num_rows >= 1}


def test_a_scored_prompt_beside_another_is_rehearsed() -> None:
    """In its last layers, the step has many queries of one row, and one of the other."""
    plans = [plan for plan in make_rehearsal(130)._ladder() if len(plan.rows) == 2]
    (plan,) = [plan for plan in plans if plan.rows[0].is_prompt_logprobs]
    assert [row.num_logits for row in plan.rows] == [128, 1]
    assert plan.rows[1].num_new == 128


@pytest.mark.parametrize("is_compiled", [False, True])
def test_kernels_that_another_process_compiled_are_not_compiled_again(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched: list[object] = []

    @contextmanager
    def compile_ahead(mark: Path) -> Iterator[None]:
        if is_compiled:
            mark.touch()
        yield

    gpu = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("culet.engine.start.rehearsal.mark_of", lambda *facts: tmp_path / "mark")
    monkeypatch.setattr("culet.engine.start.rehearsal.compile_ahead", compile_ahead)
    rehearsal = make_rehearsal(130)
    rehearsal.has_graphs = False
    model = SimpleNamespace(device="cuda", spec=None, dtype=None, latent=True, kernel_keys=list, one_of_each_kind=nullcontext)
    monkeypatch.setattr(rehearsal, "model", model)
    monkeypatch.setattr(rehearsal, "_runner", lambda: SimpleNamespace(launch=launched.append))
    assert rehearsal.compile_kernels() is not is_compiled
    assert bool(launched) is not is_compiled


# Draws

OPTIONS = {
    "greedy": {"temperature": 0.0},
    "whole": {"top_k": 0, "top_p": 1.0},
    "few": {"top_k": 20, "top_p": 0.9},
    "min p": {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.2},
    "presence": {"presence_penalty": 0.5, "top_k": 0, "top_p": 1.0},
    "frequency": {"frequency_penalty": 0.5, "temperature": 0.0},
    "bias": {"logit_bias": ((3, 1.0), (7, -2.0))},
    **{f"logprobs {count}": {"logprobs": count} for count in (0, 1, 5, 16, 20)},
}
VOCABULARY = 4096


def draw(settings: Sequence[Sampling], *, is_bound: bool = False) -> None:
    """Make the launches of one draw for each of `settings`, as `Draws` does."""
    count = len(settings)
    logits_RV = torch.zeros(count, VOCABULARY)
    history = History(torch.zeros(count + 1, 65, dtype=torch.int32), list(range(count)), [4] * count)
    masks = TokenMasks([0], torch.full((1, VOCABULARY // 32), -1, dtype=torch.int32)) if is_bound else None
    tokens_R = GpuSampler().sample(logits_RV, settings, [9] * count, history, masks=masks)
    if any(sampling.logprobs is not None for sampling in settings):
        logprobs(logits_RV, tokens_R, max(sampling.logprobs or 0 for sampling in settings))


def test_every_way_to_draw_is_rehearsed(launched: set[tuple[object, ...]]) -> None:
    """No option of a request, and no two options in one batch, need a kernel that the startup has not compiled."""
    rehearsal = make_rehearsal(130)
    for settings in rehearsal.drawn_together:
        draw(settings)
    assert any(row.is_bound for plan in rehearsal._ladder() for row in plan.rows)
    draw([SAMPLING], is_bound=True)
    rehearsed = set(launched)
    assert len(rehearsed) > 5
    options = [replace(SAMPLING, **changes) for changes in OPTIONS.values()]  # type: ignore[arg-type]
    for first, name in zip(options, OPTIONS, strict=True):
        for second in options:
            for is_bound in (False, True):
                draw([first, second, SAMPLING], is_bound=is_bound)
                assert launched <= rehearsed, name


# Linear layers


def kernel_of(count: int, shape: Shape) -> tuple[object, int]:
    """Return what makes Triton compile another kernel for a linear layer of `count` tokens outside of graphs."""
    tile = choose_tile(count, shape.num_rows, shape.size_k, shape.epilogue)
    return tile, 0 if tile.kernel == "cublas" else max(MIN_COLUMNS, next_power_of_2(count))


@pytest.mark.parametrize("max_num_seqs", [1, 4, 20])
def test_every_number_of_tokens_and_logits_is_rehearsed(max_num_seqs: int) -> None:
    """However few sequences may run, a prompt that is scored or drafts with masks have any number of logits."""
    rehearsal = make_rehearsal(5000)
    rehearsal.max_num_seqs = max_num_seqs
    num_tokens, num_logits = set(), set()
    for plan in rehearsal._ladder():
        num_tokens.add(plan.num_tokens)
        scored = [row.num_new - 1 for row in plan.rows if row.is_prompt_logprobs]
        num_logits |= set(scored or [sum(row.num_logits for row in plan.rows)])
    for shape in shapes():
        rehearsed = num_logits if shape.epilogue == SOFTCAP else num_tokens
        known = {kernel_of(count, shape) for count in rehearsed if count}
        for count in range(1, LOGITS_ROWS + 1):
            assert kernel_of(count, shape) in known, (shape.name, count)
