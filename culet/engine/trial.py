"""A model on the GPU before its KV cache is there: compiles kernels ahead, and finds out by trial what memory steps need.

All pages of a trial are page 0 of a cache of one page: its steps have the shapes of real ones, and no meaning.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from culet.attention.base import AttentionBackend
from culet.cache.pool import Pool
from culet.cache.spec import CacheLayout
from culet.config import ScheduleConfig
from culet.engine.memory import Needs, measure_peak
from culet.kernels.compiling import compile_ahead, mark_of
from culet.models.gemma4 import Gemma4
from culet.runner.runner import Runner
from culet.scheduler.sequence import MAX_SCORED_CHUNK
from culet.types import Entry, PageTable, Row, Sampling, StepPlan

# Kernels differ by the number of tokens in a step (tiles of products, grouped experts), of rows, and of a row's few queries.
TOKEN_COUNTS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 513, 1024, 2048, 4096, 8192)
ROW_COUNTS = (1, 2, 17, 33, 65, 129, 257)
QUERY_COUNTS = (1, 2, 4, 8, 16)
CONTEXT = 64  # tokens before the new ones, where a step is to have a context
LEAST_GRAPH = 1 << 20  # bytes; what a further graph takes may be too small to see
SCORED_TOP = 20  # log-probabilities per position in the step that scores a prompt

Shape = tuple[int, int, int]  # of a row: tokens before it, new tokens, logits


class Trial:
    """One model, its attention backends and its schedule, tried out with a cache of one page."""

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
    ) -> None:
        self.model, self.layout, self.backends = model, layout, backends
        self.max_num_seqs, self.budget = schedule.max_num_seqs, schedule.max_num_batched_tokens
        self.sampling = sampling
        self.max_model_len = max_model_len
        self.has_graphs = has_graphs

    # Kernels

    def compile_kernels(self) -> bool:
        """Compile every kernel that a step may need, unless all are known to be on disk; True if there was work."""
        properties = torch.cuda.get_device_properties(self.model.device)
        gpu = (properties.name, properties.major, properties.minor, properties.multi_processor_count)
        backends = [type(backend).__qualname__ for backend in self.backends]
        facts = (self.model.spec, self.model.dtype, self.model.latent, self.layout, backends)
        # A short context or no graphs leave kernels out, which a later start may need.
        mark = mark_of(gpu, torch.__version__, facts, self.max_num_seqs, self.budget, self._longest, self.has_graphs)
        if mark.exists():
            return False
        runner = self._runner()
        with compile_ahead():
            for plan in self._ladder():
                runner.launch(plan)
            if self.has_graphs:
                fixed = runner.use_fixed_steps()
                for bucket in fixed.buckets:
                    shapes = [(0, bucket.num_queries, bucket.num_queries)] * bucket.num_rows
                    fixed.run(self._plan(shapes), bucket)
        torch.cuda.synchronize(self.model.device)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        return True

    @property
    def _longest(self) -> int:
        """Most new tokens of a row, with room for a context before it unless there is none at all."""
        return max(1, min(self.budget, self.max_model_len - CONTEXT))

    def _ladder(self) -> Iterator[StepPlan]:
        for count in sorted({min(count, self._longest) for count in TOKEN_COUNTS}):
            yield self._plan([(0, count, 1)])
            if count > max(QUERY_COUNTS):
                yield self._plan([(CONTEXT, count, 1)])
                yield self._plan([(0, count, 0)])  # the middle of a prompt
        for num_rows in sorted({min(count, self.max_num_seqs) for count in ROW_COUNTS}):
            for queries in QUERY_COUNTS:
                if num_rows * queries + 64 <= self.budget and self.max_model_len > CONTEXT + 64:
                    few = [(CONTEXT, queries, 1)] * (num_rows - 1)
                    yield self._plan([*few, (CONTEXT, queries, 1)])
                    yield self._plan([*few, (CONTEXT, 64, 1)])  # beside a prompt
        for settings in (
            replace(self.sampling, temperature=0.0),
            replace(self.sampling, temperature=1.0, top_k=0, top_p=1.0),
            replace(self.sampling, temperature=1.0, top_k=64, top_p=0.95),
        ):
            yield self._plan([(0, 1, 1)], settings)

    # Memory

    def measure(self) -> Needs:
        """What the heaviest steps and a few graphs take; all but the steps' own is given back."""
        device = self.model.device
        before = torch.cuda.memory_allocated(device)
        runner = self._runner()
        fixed = runner.use_fixed_steps() if self.has_graphs else None
        buffers = max(0, torch.cuda.memory_allocated(device) - before - 2 * self.layout.slab_bytes)
        graphs = 0
        if fixed is not None:
            taken, memory = [], None
            for bucket in [fixed.buckets[-1], *fixed.buckets[-2:-1]]:
                free = _free(device)
                memory = fixed.capture([bucket], memory=memory)
                taken.append(max(0, free - _free(device)))
            graphs = taken[0] + max(taken[-1] if len(taken) > 1 else 0, LEAST_GRAPH) * (len(fixed.buckets) - 1)
            runner.fixed = fixed = None
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
        # The heaviest last: what it took stays with torch's allocator, cut to size for the steps to come.
        return Needs(max(measure_peak(device, _launching(runner, plan)) for plan in self._heavy_steps()), buffers, graphs)

    def _heavy_steps(self) -> Iterator[StepPlan]:
        """Prompt tokens whose every logit is wanted; as many rows as may run; one long chunk."""
        yield self._scored_plan(min(MAX_SCORED_CHUNK, self.budget, self.max_model_len - 1))
        num_rows = min(self.max_num_seqs, self.budget)
        lengths = [self.budget // num_rows + (index < self.budget % num_rows) for index in range(num_rows)]
        yield self._plan([(0, min(length, self.max_model_len - 1), 1) for length in lengths])
        yield self._plan([(0, min(self.budget, self.max_model_len - 1), 1)])

    # Steps

    def _runner(self) -> Runner:
        pool = Pool(self.layout, 1, self.model.dtype, self.model.device, has_spare=True)
        return Runner(self.model, pool, self.backends, max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len)

    def _plan(self, shapes: Sequence[Shape], sampling: Sampling | None = None) -> StepPlan:
        entries, rows = [], []
        for slot, (start, num_new, num_logits) in enumerate(shapes):
            end = start + num_new
            entries.append(Entry(slot, (0,) * end, end, sampling or self.sampling))
            tables, store_from = [], []
            for group in self.layout.groups:
                first = group.first_visible(start) // group.page_tokens
                tables.append(PageTable(first, (0,) * (group.pages_for(end + group.ahead) - first)))
                last = end if group.reach is None else end - group.reach - max(num_logits, 1) + 1
                store_from.append(start if group.reach is None else max(start, last))
            draws = (slot,) if num_logits else ()
            rows.append(Row(slot, start, num_new, num_logits, tuple(tables), tuple(store_from), draw_slots=draws))
        return StepPlan(0, tuple(entries), (), tuple(rows))

    def _scored_plan(self, num_tokens: int) -> StepPlan:
        """A chunk of a prompt whose every logit is wanted."""
        plan = self._plan([(0, num_tokens, num_tokens)], replace(self.sampling, prompt_logprobs=SCORED_TOP))
        row = replace(plan.rows[0], draw_slots=(), is_prompt_logprobs=True)
        return replace(plan, rows=(row,))


def _launching(runner: Runner, plan: StepPlan) -> Callable[[], object]:
    return lambda: runner.launch(plan)


def _free(device: torch.device) -> int:
    """Bytes that are free on the GPU, once everything that can be given back is."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
