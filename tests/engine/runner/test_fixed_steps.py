"""Fixed-shape steps compared with steps of exact shape: buckets, padding, and page tables kept between steps.

The code that a GPU captures as graphs runs here without a capture.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from culet.cache.pool import Pool
from culet.hardware import ARCHS
from culet.layers.weight.weights import Weights
from culet.models.gemma4 import Gemma4
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.runner.fixed.page_tables import table_columns
from culet.runner.fixed.prompts import SIZES, PaddedPieces, prompt_sizes
from culet.runner.fixed.steps import Bucket, FixedSteps, bucket_sizes
from culet.runner.runner import Runner
from culet.runner.target import Target
from culet.types import PageTable, Row
from tests.engine.drafting.draft_drive import use_fixed_draws
from tests.engine.runner.test_runner import (
    GEMMA,
    GREEDY,
    MAX_LEN,
    SETTINGS,
    SHAPES,
    ListDrafter,
    Rig,
    make_request,
    model,
    one_model,
    parts,
    watch,
)
from tests.matrix import matrix
from tests.samplings import PLAIN

__all__ = ["model", "one_model"]  # fixtures


class FixedRig(Rig):
    """A Rig whose decode and verify steps run in buckets. It records which buckets were used."""

    def __init__(self, model, *, max_num_seqs=8, num_slabs=200, drafter=None, is_poisoned=False, **rest):
        super().__init__(model, max_num_seqs=max_num_seqs, num_slabs=num_slabs, drafter=drafter, **rest)
        layout, _, backends = parts(model, 1)
        pool = Pool(layout, num_slabs, torch.float32, torch.device("cpu"), has_spare=True)
        if is_poisoned:  # every page but the spare one
            pool._slabs[:num_slabs] = 255  # a NaN in every precision
        self.pool = pool
        self.runner = Runner(model, pool, backends, max_num_seqs=max_num_seqs, max_model_len=MAX_LEN, drafter=drafter)
        if drafter is not None:
            watch(self.runner, drafter)
        shapes = self.runner.use_fixed_shapes(max_prompt=128)
        self.fixed = shapes.steps
        self.used: list[Bucket] = []
        self.sizes: list[int | None] = []  # of steps with prompts, None if they were not padded
        run, pieces_for = self.fixed.run, shapes.prompts.pieces_for

        def spy(rows, bucket):
            self.used.append(bucket)
            return run(rows, bucket)

        def spy_pieces(batch):
            pieces = pieces_for(batch)
            self.sizes.append(pieces.size if isinstance(pieces, PaddedPieces) else None)
            return pieces

        self.fixed.run = spy  # type: ignore[method-assign]
        shapes.prompts.pieces_for = spy_pieces  # type: ignore[method-assign]


def test_bucket_sizes():
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(7) == (1, 2, 4, 7)
    assert bucket_sizes(128) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
    assert bucket_sizes(200) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 200)
    for count in range(1, 300):  # no count is padded by more than half of itself plus one
        size = next(size for size in bucket_sizes(300) if size >= count)
        assert size - count <= count // 2 + 1


def test_prompt_sizes():
    """The smaller the model and the faster the GPU, the longer are prompts whose launches take longest."""
    longest = {}
    for name in ("E2B", "E4B", "12B", "26B-A4B", "31B"):
        spec = read_spec(VARIANTS[name])
        _, expert_bytes = Gemma4(spec, Weights(torch.bfloat16, torch.device("meta"))).step_bytes()
        longest[name] = prompt_sizes(spec, expert_bytes, 8192, ARCHS["sm_90"])[-1]
    assert longest == {"E2B": 2048, "E4B": 2048, "12B": 768, "26B-A4B": 1280, "31B": 384}
    small = read_spec(VARIANTS["E4B"])
    assert prompt_sizes(small, 0, 8192, ARCHS["sm_89"])[-1] == 768
    assert prompt_sizes(small, 0, 500, ARCHS["sm_90"]) == tuple(size for size in SIZES if size <= 500)
    assert prompt_sizes(small, 0, 0, ARCHS["sm_90"]) == ()
    mixed = read_spec(VARIANTS["26B-A4B"])
    sizes = [prompt_sizes(mixed, count, 8192, ARCHS["sm_90"])[-1] for count in (0, 3 * 10**10, 6 * 10**10)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3  # the fewer bytes experts have, the longer are the sizes


def test_prompts_in_sizes(model):
    """A prompt that grows in chunks, beside others and alone, has the same answer in each size and without one."""
    requests = [make_request(f"p{length}", length, GREEDY, num_tokens=4) for length in (63, 65, 120, 72)]
    plain = Rig(model, max_num_seqs=6, budget=130).run(*requests)
    rig = FixedRig(model, max_num_seqs=6, budget=130, is_poisoned=True)
    assert rig.run(*requests) == plain
    assert set(rig.sizes) >= {128, None}
    assert not rig.pool._slabs[rig.pool.spare_page].any()  # padding stored nothing


def fixed_steps(model, max_num_seqs=16, query_counts=(1,)) -> FixedSteps:
    layout, _, backends = parts(model, 1)
    pool = Pool(layout, 4, torch.float32, torch.device("cpu"), has_spare=True)
    tokens_SL = torch.zeros(max_num_seqs + 1, 400, dtype=torch.int32)  # a spare slot
    accepted_S = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
    return FixedSteps(Target(model, pool, backends), tokens_SL, accepted_S, query_counts=query_counts)


def row(slot=0, start=40, num_new=1, num_logits=1, num_pages=3, **changes) -> Row:
    tables = (PageTable(0, (0,) * num_pages),) * 2
    return Row(slot, start, num_new, num_logits, tables, (start, start), draw_slots=(slot,))._replace(**changes)


def test_which_bucket(one_model):
    fixed = fixed_steps(one_model, query_counts=(1, 5))
    assert fixed.find([row()]) == Bucket(1, 1)
    assert fixed.find([row(slot) for slot in range(5)]) == Bucket(1, 8)
    assert fixed.find([row(slot) for slot in range(16)]) == Bucket(1, 16)
    assert fixed.find([row(0), row(1, num_new=3, num_logits=3, num_drafts=2)]) == Bucket(5, 2)
    assert fixed.find([row(0, num_new=6, num_logits=6, num_drafts=5)]) is None  # more drafts than expected
    assert fixed.find([row(0), row(1, num_new=4, num_logits=1)]) is None  # a prompt's end
    assert fixed.find([row(0), row(1, num_logits=0)]) is None  # a prompt's middle
    assert fixed.find([row(is_prompt_logprobs=True)]) is None
    assert fixed.find([row(slot) for slot in range(17)]) is None
    too_wide = table_columns(fixed.target.pool.layout.groups[0], 400, 5) + 1
    assert fixed.find([row(num_pages=too_wide)]) is None


@matrix({"name": list(SETTINGS), "model": SHAPES}, fixtures=["model"])
def test_fixed_steps_change_nothing(model, name):
    lengths = (1, 3, 31, 70, 90)
    requests = [make_request(f"{name}{n}", n, SETTINGS[name], num_tokens=16 + 6 * index) for index, n in enumerate(lengths)]
    plain = Rig(model, max_num_seqs=6, budget=40).run(*requests)
    rig = FixedRig(model, max_num_seqs=6, budget=40, is_poisoned=True)
    assert rig.run(*requests) == plain
    assert {bucket.num_rows for bucket in rig.used} >= {1, 2, 4, 6}
    assert set(rig.sizes) == {64}
    has_tails = rig.runner.fixed.prompts.tails is not None
    assert has_tails == (model.spec.ple_dim > 0), "E2B has many layers that run only for the tail"
    assert not rig.pool._slabs[rig.pool.spare_page].any()  # padding stored nothing


def test_fixed_steps_under_preemption(model):
    requests = [make_request(f"r{index}", 40, GEMMA, num_tokens=30) for index in range(4)]
    layout, _, _ = parts(model, 1)
    tight = FixedRig(model, num_slabs=2 * sum(group.pages_for(70) for group in layout.groups), is_poisoned=True)
    out = tight.run(*requests)
    assert tight.scheduler.counters.preemptions > 0
    assert out == Rig(model, num_slabs=400).run(*requests)


def test_fixed_steps_after_prefix_hits(model):
    requests = [make_request(f"r{index}", 130, GEMMA, num_tokens=20) for index in range(3)]
    rig = FixedRig(model, prefix_caching=True, is_poisoned=True)
    first, again = rig.run(*requests), rig.run(*requests)
    assert rig.scheduler.counters.prefix_hits == 3
    assert again == first == Rig(model).run(*requests)


def test_samples_that_part_ways(model):
    request = make_request("n", 37, replace(GEMMA, logprobs=2), n=5)
    rig = FixedRig(model)
    out, plain = rig.run(request), Rig(model).run(request)
    assert {key: tokens for key, (tokens, _, _) in out.items()} == {key: tokens for key, (tokens, _, _) in plain.items()}
    assert Bucket(1, 8) in rig.used


@matrix({"mistake": ["right", "sometimes"], "model": SHAPES}, fixtures=["model"])
def test_verify_steps(model, mistake):
    """Rows with all drafts, some and none share one bucket, padded by rows of many tokens, of one and of none."""
    requests = [
        make_request(f"d{length}", length, replace(GREEDY, seed=length), num_tokens=length + 1) for length in (5, 13, 33, 41)
    ]
    expected = Rig(model, max_num_seqs=5).run(*requests)
    drafter = ListDrafter(
        {request.prompt_token_ids[0]: expected[request.request_id, 0][0] for request in requests},
        {request.prompt_token_ids[0]: len(request.prompt_token_ids) for request in requests},
        max_drafts=3,
        is_wrong=lambda position: mistake == "sometimes" and position % 3 == 0,
    )
    rig = FixedRig(model, max_num_seqs=5, drafter=drafter, is_poisoned=True)
    out = rig.run(*requests)
    assert {key: value[0] for key, value in out.items()} == {key: value[0] for key, value in expected.items()}
    assert {bucket.num_queries for bucket in rig.used} == {1, 4}
    plans = [plan.rows for plan, _ in rig.results if rig.fixed.find(plan.rows) is not None]
    assert any(len({row.num_new for row in rows}) > 1 for rows in plans)


def test_drafts_may_be_placeholders(one_model):
    """They are embedded as token 0, but a draft is compared by its own id."""

    def seeing(rig):
        rig.runner.target.placeholder_P = torch.arange(0, one_model.spec.vocab_size, 2)
        return rig

    requests = [
        make_request(f"d{length}", length, replace(PLAIN, temperature=3.0, seed=length), num_tokens=20) for length in (5, 33)
    ]
    expected = seeing(Rig(one_model, max_num_seqs=2)).run(*requests)
    outputs = {request.prompt_token_ids[0]: expected[request.request_id, 0][0] for request in requests}
    assert all(sum(token % 2 == 0 for token in output) > 4 for output in outputs.values())
    assert outputs != {key: value[0] for key, value in Rig(one_model, max_num_seqs=2).run(*requests).items()}
    prompt_lens = {request.prompt_token_ids[0]: len(request.prompt_token_ids) for request in requests}
    rig = seeing(FixedRig(one_model, max_num_seqs=2, drafter=ListDrafter(outputs, prompt_lens, max_drafts=3)))
    use_fixed_draws(rig.runner)
    assert {key: value[0] for key, value in rig.run(*requests).items()} == {key: value[0] for key, value in expected.items()}
    counters = rig.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 20


def test_fixed_shapes_need_a_spare_page(one_model):
    rig = Rig(one_model)
    with pytest.raises(AssertionError, match="spare page"):
        rig.runner.use_fixed_shapes()


def test_page_tables_are_sent_when_they_change(one_model, monkeypatch) -> None:
    """A page is added, freed behind the window or replaced, in several rows at once.

    The device always has the plan's tables.
    """
    fixed, chance = fixed_steps(one_model), random.Random(0)
    groups, spare_page = fixed.target.pool.layout.groups, fixed.target.pool.spare_page
    sent: list[int] = []
    spread = fixed.tables.spread
    monkeypatch.setattr(fixed.tables, "spread", lambda *given: (sent.append(1), spread(*given)))
    widths = fixed.tables.columns
    fresh = iter(range(10**6))
    rows = [row(slot, 3 + slot, tables=tuple(PageTable(0, (next(fresh),)) for _ in widths)) for slot in range(3)]
    for number in range(300):
        num_changed, before = chance.choice((0, 0, 1, 1, 2, 3)), len(sent)
        for index in chance.sample(range(3), num_changed):
            tables = list(rows[index].tables)
            group = chance.randrange(len(tables))
            old, kind = tables[group], chance.random()
            if kind < 0.6 and len(old.pages) < widths[group]:
                tables[group] = PageTable(old.first, (*old.pages, next(fresh)))
            elif kind < 0.9 and len(old.pages) > 1:
                tables[group] = PageTable(old.first + 1, old.pages[1:])
            else:
                tables[group] = PageTable(old.first, tuple(next(fresh) for _ in old.pages))
            rows[index] = rows[index]._replace(tables=tuple(tables))
        rows = [each._replace(start=each.start + 1) for each in rows]
        step = fixed[fixed.find(rows)]
        fixed._send(rows, step)
        assert len(sent) - before == (num_changed > 0 or number == 0)
        assert step.planned.start_B[:3].tolist() == [each.start for each in rows]
        for group, table in enumerate(fixed.tables.groups):
            for index, each in enumerate(rows):
                pages = each.tables[group]
                assert table[index, : len(pages.pages)].tolist() == list(pages.pages)
                assert step.batch.groups[group].first_B[index] == pages.first * groups[group].page_tokens
            assert (table[3 : step.bucket.num_rows] == spare_page).all()


def test_page_tables_of_another_bucket_are_sent_again(one_model) -> None:
    """Buckets share their tables, and each pads its own rows."""
    fixed = fixed_steps(one_model, query_counts=(1, 5))
    verify = [row(slot, num_new=2, num_logits=2, num_drafts=1) for slot in range(3)]
    decode = [row(slot) for slot in range(4)]
    for rows in (decode, verify, decode, decode[:3], verify):
        step = fixed[fixed.find(rows)]
        fixed._send(rows, step)
        for group in step.batch.groups:
            assert (group.pages_BP[: len(rows), :3] == 0).all()
            assert (group.pages_BP[len(rows) :, :1] == fixed.target.pool.spare_page).all()
