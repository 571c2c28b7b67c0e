"""Run steps on the GPU before the KV cache is sized, to compile every kernel and to measure how much memory steps need.

A rehearsal's cache has a single page, which every page table points to. Its steps have realistic shapes but meaningless data.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.cache.pool import Pool
from culet.cache.spec import CacheLayout
from culet.config import ScheduleConfig
from culet.drafters.base import Drafter
from culet.engine.memory import Needs, measure_peak
from culet.engine.start.sample_media import heaviest_images, sample_media
from culet.kernels.captures import Captures
from culet.kernels.compiling import compile_ahead, mark_of
from culet.media.items import MediaItem, MediaKind
from culet.models.gemma4 import LOGITS_ROWS, Gemma4
from culet.models.towers.towers import Towers
from culet.runner.draft_round import draft_lengths
from culet.runner.fixed.shapes import FixedShapes
from culet.runner.media.step_media import ImageMask
from culet.runner.runner import Runner
from culet.scheduler.sequence import MAX_SCORED_CHUNK
from culet.structured.compiler import GrammarCompiler
from culet.structured.matcher import Vocabulary
from culet.types import Entry, MediaSpan, OutputRules, PageTable, Row, Sampling, StepPlan

# Kernels vary with the number of tokens in a step (matmul tiles, grouped experts), of rows, and of queries in a short row.
TOKEN_COUNTS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 513, 768, 1024, 2048, 4096, 8192)
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 16, 17, 32, 33, 65, 129, 257)
QUERY_COUNTS = (1, 2, 4, 8, 16)
BESIDE = 128  # tokens of a prompt next to short rows, enough to use the kernels of large steps
CONTEXT = 64  # tokens before the new ones in steps with a context
LEAST_GRAPH = 1 << 20  # minimum bytes counted for each further graph, which may be too small to measure
SCORED_TOP = 20  # log-probabilities per position when a step scores a prompt

PROBED = 8  # tokens of the step that checks the logits

T = TypeVar("T")
Shape = tuple[int, int, int]  # a row's tokens before the new ones, new tokens and logits


class Rehearsal:
    """A model with its attention backends, its schedule and a cache of one page."""

    def __init__(
        self,
        model: Gemma4,
        layout: CacheLayout,
        backends: Sequence[AttentionBackend],
        schedule: ScheduleConfig,
        sampling: Sampling,
        *,
        max_model_len: int,
        has_graphs: bool,
        drafter: Drafter | None = None,
        image_mask: ImageMask = ImageMask.CAUSAL,
        towers: Towers | None = None,
    ) -> None:
        self.model, self.layout, self.backends = model, layout, backends
        self.max_num_seqs, self.budget = schedule.max_num_seqs, schedule.max_num_batched_tokens
        self.sampling = sampling
        self.max_model_len = max_model_len
        self.has_graphs = has_graphs
        self.drafter = drafter
        self.image_mask = image_mask
        self.towers = towers

    # Kernels

    def compile_kernels(self) -> bool:
        """Compile every kernel that a step may need. Return False if all of them were already on disk."""
        properties = torch.cuda.get_device_properties(self.model.device)
        gpu = (properties.name, properties.major, properties.minor, properties.multi_processor_count)
        backends = [type(backend).__qualname__ for backend in self.backends]
        model = self.model
        target = model.spec, model.dtype, model.latent, model.kernel_keys()
        towers = None if self.towers is None else self.towers.specs
        facts = (target, self.layout, backends, self._drafter_facts(), self.image_mask, towers)
        # With a short context or without graphs, some kernels are not compiled, and a later start may need them.
        mark = mark_of(gpu, torch.__version__, facts, self.max_num_seqs, self.budget, self._longest, self.has_graphs)
        if mark.exists():
            return False
        runner = self._runner()
        with compile_ahead(mark), self.model.one_of_each_kind():
            if mark.exists():  # another process compiled them while this one was waiting
                return False
            if self.towers is not None:
                for media in sample_media(self.towers.specs):
                    self.towers.encode(media)
            for plan in self._ladder():
                runner.launch(plan)
            if self.has_graphs:
                fixed = runner.use_fixed_shapes(self.budget)
                fixed.rehearse_prompts()
                for bucket in fixed.steps.buckets:
                    shapes = [(0, bucket.num_queries, bucket.num_queries)] * bucket.num_rows
                    fixed.rehearse_step(self._plan(shapes).rows, bucket)
                fixed.rehearse_rounds()
                fixed.rehearse_deferred()
        torch.cuda.synchronize(self.model.device)
        return True

    def compile_for(self, num_seqs: Sequence[int], prompt_len: int) -> None:
        """Compile the kernels for prompts of `prompt_len`, and for decode, verify and draft rounds of each `num_seqs`."""
        runner = self._runner()
        with compile_ahead(), self.model.one_of_each_kind():
            for count in num_seqs:
                runner.launch(self._plan([(0, min(prompt_len, self._longest), 1)] * count))
            fixed = runner.use_fixed_shapes()
            buckets = [bucket for bucket in fixed.steps.buckets if bucket.num_rows in num_seqs]
            for bucket in buckets:
                shapes = [(0, bucket.num_queries, bucket.num_queries)] * bucket.num_rows
                fixed.rehearse_step(self._plan(shapes).rows, bucket)
            for bucket in buckets:
                runner.launch(self._verify_plan(bucket.num_rows, bucket.num_queries))
            fixed.rehearse_rounds(num_seqs)
            fixed.rehearse_deferred()
        torch.cuda.synchronize(self.model.device)

    def _drafter_facts(self) -> object:
        """Return the properties of the drafter that its kernels depend on."""
        if self.drafter is None:
            return None
        return type(self.drafter).__qualname__, self.drafter.max_drafts, self.drafter.kernel_keys()

    @property
    def _longest(self) -> int:
        """The maximum number of new tokens in a row. Leaves room for a context if max_model_len allows one."""
        return max(1, min(self.budget, self.max_model_len - CONTEXT))

    def _ladder(self) -> Iterator[StepPlan]:
        """Yield steps that together use every kernel outside of graphs."""
        for count in sorted({min(count, self._longest) for count in (*TOKEN_COUNTS, self.budget)}):
            yield self._plan([(0, count, 1)])
            if count > max(QUERY_COUNTS):
                yield self._plan([(CONTEXT, count, 1)])
                yield self._plan([(0, count, 0)])  # the middle of a prompt
        windows = [group.window or self.max_model_len for group in self.layout.groups]
        for queries in sorted({min(count, window) for count in QUERY_COUNTS for window in windows}):
            yield from self._short_rows(queries)
        for settings in self.drawn_together:
            yield self._plan([(0, 1, 1)] * len(settings), settings)
        yield self._bound_plan()
        # The head's kernel varies with the number of logits. A prompt that is scored may have any, and so may drafts.
        for count in TOKEN_COUNTS:
            if count <= LOGITS_ROWS and count < self._longest:
                yield self._scored_plan(count + 1)  # the last token of a prompt is not scored
        yield from self._scored_beside()
        for num_drafts in () if self.drafter is None else draft_lengths(self.drafter.max_drafts):
            plan = self._plan([(0, 1, 1)])
            yield plan.with_rows(row._replace(num_wanted=num_drafts) for row in plan.rows)
        yield from self._image_steps()

    def _short_rows(self, queries: int) -> Iterator[StepPlan]:
        """Yield steps whose rows have up to `queries` tokens, alone and beside a prompt, up to the most rows that fit.

        All rows have `queries` tokens if the budget allows it. Otherwise only one has, and the others have one token each.
        """
        context, most = min(CONTEXT, self.max_model_len - queries - 1), min(self.max_num_seqs, self.budget - queries + 1)
        if context < 0 or most < 1:
            return
        for num_rows in sorted({min(count, most) for count in (*ROW_COUNTS, most)}):
            length = queries if num_rows * queries <= self.budget else 1
            others = [(context, length, 1)] * (num_rows - 1)
            # Every query of this row has a logit, so that the tail of the step has a row of this length too.
            yield self._plan([*others, (context, queries, queries)])
            beside = min(BESIDE, self.budget - len(others) * length, self.max_model_len - context - 1)
            if beside > max(QUERY_COUNTS):
                yield self._plan([*others, (context, beside, 1)])

    def _scored_beside(self) -> Iterator[StepPlan]:
        """Yield a step with two long prompts, of which one is scored. Its tail has many queries, but no fresh keys."""
        length = min(BESIDE, self.budget // 2, self.max_model_len - 1)
        if self.max_num_seqs > 1 and length > max(QUERY_COUNTS):
            plan, scored = self._plan([(0, length, 1)] * 2), self._scored_plan(length)
            yield replace(plan, entries=(*scored.entries, plan.entries[1]), rows=(*scored.rows, plan.rows[1]))

    def _image_steps(self) -> Iterator[StepPlan]:
        """Yield steps with an image whose tokens see each other, alone and beside a decode row."""
        if self.image_mask is ImageMask.CAUSAL or self._longest < BESIDE or self.max_model_len <= CONTEXT + BESIDE:
            return
        image = MediaItem(MediaKind.IMAGE, b"rehearsal", BESIDE - 2, (0,), b"")
        yield StepPlan(0, (), (), (), encodes=(image,))
        shapes: list[list[Shape]] = [[(0, BESIDE, 1)], [(CONTEXT, BESIDE, 1)]]
        if self.max_num_seqs > 1 and self.budget > BESIDE:
            shapes.append([(CONTEXT, BESIDE, 1), (CONTEXT, 1, 1)])
        for rows in shapes:
            plan, start = self._plan(rows), rows[0][0]
            entry = replace(plan.entries[0], media=(MediaSpan(start + 1, image.num_tokens, image.key),))
            yield replace(plan, entries=(entry, *plan.entries[1:]))

    @property
    def drawn_together(self) -> list[tuple[Sampling, ...]]:
        """Settings of rows that are drawn in one step. Together, they use every kernel that draws."""
        greedy = replace(self.sampling, temperature=0.0)
        whole = replace(self.sampling, temperature=1.0, top_k=0, top_p=1.0)  # from the whole vocabulary
        few = replace(self.sampling, temperature=1.0, top_k=64, top_p=0.95)
        steps = [(greedy,), (whole,), (few,), (few, whole), (self._demanding,)]
        return [settings for settings in steps if len(settings) <= self.max_num_seqs]

    @property
    def _demanding(self) -> Sampling:
        """Settings that change the logits before drawing, and also need the original ones for log-probabilities."""
        return replace(self.sampling, repetition_penalty=1.1, logit_bias=((0, 1.0),), logprobs=SCORED_TOP)

    # Memory

    def measure(self) -> Needs:
        """Measure the memory that the heaviest steps and images, buffers and graphs need. Keep only that of activations."""
        device = self.model.device
        before = torch.cuda.memory_allocated(device)
        runner = self._runner()
        fixed = runner.use_fixed_shapes(self.budget) if self.has_graphs else None
        buffers = max(0, torch.cuda.memory_allocated(device) - before - 2 * self.layout.slab_bytes)
        graphs = 0
        if fixed is not None:
            graphs = self._graph_bytes(runner, fixed)
            fixed = None
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
        # The heaviest step comes last, because torch's allocator keeps its blocks and later steps need the same sizes.
        with self.model.one_of_each_kind(() if self.drafter is None else self.drafter.taps):
            peak = max(measure_peak(device, _launching(runner, plan)) for plan in self._heavy_steps())
        return Needs(peak, buffers, graphs, self._measure_towers())

    def _measure_towers(self) -> int:
        """Return the peak GPU bytes of the vision tower's heaviest pass, which needs more than any pass over audio."""
        if self.towers is None:
            return 0
        images = heaviest_images(self.towers.specs.vision)
        return measure_peak(self.model.device, partial(self.towers.encode, images))

    def _graph_bytes(self, runner: Runner, fixed: FixedShapes) -> int:
        """Estimate the memory of all the runner's graphs by capturing a few of them and freeing them again."""
        captures, prompts = Captures(self.model.device), fixed.prompts
        total = self._measure_graphs(prompts.sizes, lambda size: prompts.capture(captures, [size])) if prompts.sizes else 0
        if (tails := prompts.tails) is not None:
            total += self._measure_graphs(tails.sizes, lambda size: tails.capture(captures, [size]))
        total += self._measure_graphs(fixed.steps.buckets, lambda bucket: fixed.steps.capture(captures, [bucket]))
        if fixed.draws is not None:
            largest = max(fixed.draws.buckets, key=lambda bucket: bucket.num_tokens)
            fixed.steps.capture(captures, [largest])
            total += self._measure_graphs([largest], lambda bucket: fixed.capture_draws(captures, [bucket]))
            total += LEAST_GRAPH * (len(fixed.draws.buckets) * (1 if fixed.rounds is None else 2) - 1)
        if (rounds := fixed.rounds) is not None:
            total += self._measure_graphs(rounds.shapes, lambda shape: rounds.capture(captures, [shape]))
        if (deferred := fixed.deferred) is not None:
            total += self._measure_graphs(deferred.sizes, lambda size: deferred.capture(captures, [size]))
        runner.drop_fixed_shapes()
        return total

    def _measure_graphs(self, shapes: Sequence[T], capture: Callable[[T], None]) -> int:
        """Estimate the bytes of the graphs of all shapes from the largest two."""
        sizes = []
        for shape in [shapes[-1], *shapes[-2:-1]]:
            free = _free(self.model.device)
            capture(shape)
            sizes.append(max(0, free - _free(self.model.device)))
        return sizes[0] + max(sizes[-1] if len(sizes) > 1 else 0, LEAST_GRAPH) * (len(shapes) - 1)

    def _heavy_steps(self) -> Iterator[StepPlan]:
        """Yield the heaviest steps.

        They are a prompt with logits at every position, the maximum number of rows with the most demanding draws, and one
        long chunk.
        """
        yield self._scored_plan(min(MAX_SCORED_CHUNK, self.budget, self.max_model_len - 1))
        num_rows = min(self.max_num_seqs, self.budget)
        lengths = [self.budget // num_rows + (index < self.budget % num_rows) for index in range(num_rows)]
        shapes = [(0, min(length, self.max_model_len - 1), 1) for length in lengths]
        yield self._plan(shapes, [self._demanding] * num_rows)
        yield self._plan([(0, min(self.budget, self.max_model_len - 1), 1)])

    # Steps

    def _runner(self) -> Runner:
        pool = Pool(self.layout, 1, self.model.dtype, self.model.device, has_spare=True)
        num_seqs, max_len = self.max_num_seqs, self.max_model_len
        runner = Runner(self.model, pool, self.backends, max_num_seqs=num_seqs, max_model_len=max_len, drafter=self.drafter)
        runner.use_grammars(GrammarCompiler(Vocabulary(self.model.spec.vocab_size, lambda _: b"", frozenset(), (0,))))
        runner.use_media(_BlankEncoder(self.model), self.image_mask)
        return runner

    def _bound_plan(self) -> StepPlan:
        """Plan a draw with a mask, as for a grammar."""
        plan = self._plan([(0, 1, 1)])
        entries = [replace(entry, rules=OutputRules(min_tokens=1, end_ids=(0,))) for entry in plan.entries]
        return StepPlan(0, tuple(entries), (), tuple(row._replace(is_bound=True, num_wanted=0) for row in plan.rows))

    def _plan(self, shapes: Sequence[Shape], settings: Sequence[Sampling] | None = None) -> StepPlan:
        entries, rows = [], []
        for slot, (start, num_new, num_logits) in enumerate(shapes):
            end = start + num_new
            entries.append(Entry(slot, (0,) * end, end, self.sampling if settings is None else settings[slot]))
            tables, store_from = [], []
            for group in self.layout.groups:
                first = group.first_visible(start) // group.page_tokens
                tables.append(PageTable(first, (0,) * (group.pages_for(end + group.ahead) - first)))
                last = end if group.reach is None else end - group.reach - max(num_logits, 1) + 1
                store_from.append(start if group.reach is None else max(start, last))
            draws = (slot,) if num_logits else ()
            row = Row(slot, start, num_new, num_logits, tuple(tables), tuple(store_from), draw_slots=draws)
            rows.append(row._replace(num_wanted=self.drafter.max_drafts) if self.drafter is not None and draws else row)
        return StepPlan(0, tuple(entries), (), tuple(rows))

    def _verify_plan(self, num_seqs: int, num_queries: int) -> StepPlan:
        """Plan a verify step with `num_queries - 1` drafts. With one query, this is a decode step."""
        plan = self._plan([(CONTEXT, num_queries, num_queries)] * num_seqs)
        return plan.with_rows(row._replace(num_drafts=num_queries - 1) for row in plan.rows)

    def _scored_plan(self, num_tokens: int) -> StepPlan:
        """Plan a chunk of a prompt that needs logits at every position."""
        plan = self._plan([(0, num_tokens, num_tokens)], [replace(self.sampling, prompt_logprobs=SCORED_TOP)])
        row = plan.rows[0]._replace(draw_slots=(), is_prompt_logprobs=True)
        return plan.with_rows([row])


class _BlankEncoder:
    """Returns zeros, because only the decoder's kernels are rehearsed."""

    def __init__(self, model: Gemma4) -> None:
        self._model = model

    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        model = self._model
        return [torch.zeros(item.num_tokens, model.spec.hidden_size, dtype=model.dtype, device=model.device) for item in items]


def has_finite_logits(model: Gemma4, layout: CacheLayout, backends: Sequence[AttentionBackend], sampling: Sampling) -> bool:
    """Run a short prompt and return whether its logits are finite. They are not if weights are NaN or infinite."""
    num_tokens = min(PROBED, *(group.page_tokens for group in layout.groups), model.spec.vocab_size)
    num_pages = max(group.pages_for(num_tokens + group.ahead) for group in layout.groups)
    pool = Pool(layout, num_pages * len(layout.groups), model.dtype, model.device, has_spare=True)
    runner = Runner(model, pool, backends, max_num_seqs=1, max_model_len=num_tokens + 1)
    entry = Entry(0, tuple(range(num_tokens)), num_tokens, replace(sampling, temperature=0.0, logprobs=SCORED_TOP))
    pages = [tuple(range(group.index * num_pages, (group.index + 1) * num_pages)) for group in layout.groups]
    tables = tuple(PageTable(0, of_group) for of_group in pages)
    row = Row(0, 0, num_tokens, 1, tables, (0,) * len(tables), draw_slots=(0,))
    (drawn,) = runner.launch(StepPlan(0, (entry,), (), (row,))).result().drawn
    # A log-probability is the logit minus a sum over all logits, so it is finite only if all of them are.
    return all(math.isfinite(value) for logprobs in drawn.logprobs for value in logprobs.values())


def _launching(runner: Runner, plan: StepPlan) -> Callable[[], object]:
    return lambda: runner.launch(plan)


def _free(device: torch.device) -> int:
    """Return the free bytes on the GPU after torch has released everything it can."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
