"""`culet bench draft`: compare a draft round and a verify with a decode step, and measure the speed at a forced acceptance.

It uses the engine's scheduler and runner, without text. With random weights no draft would be accepted, so the number of
accepted drafts is forced. All work is still done. Steps that run as CUDA graphs are also timed on the device alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from culet.attention.plan import plan_attention
from culet.bench.answer_check import free_memory
from culet.cache.pool import Pool
from culet.cache.spec import CacheLayout, plan_cache
from culet.config import MAX_BATCHED_TOKENS, Config, DraftChoice, ScheduleConfig
from culet.drafters.base import Drafter, cache_specs, open_drafter, plan_drafter_attention, target_groups
from culet.engine.memory import least_slabs
from culet.engine.resolve import resolve_device, resolve_dtype
from culet.engine.start.rehearsal import Rehearsal
from culet.errors import ConfigError
from culet.kernels.captures import Captures
from culet.kernels.compiling import use_disk_cache
from culet.layers.weight.weights import Weights
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import load_model
from culet.registry import load
from culet.runner.fixed.steps import Bucket
from culet.runner.runner import Runner
from culet.scheduler.scheduler import Scheduler
from culet.types import Request, Sampling

PROMPT_LEN = 1000
NUM_ROUNDS = 48  # rounds that are timed after the warm-up
WARM_ROUNDS = 8
REPLAYS = 20
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0, None, None)


@dataclass(frozen=True)
class DraftLine:
    """The results for a number of sequences, with times in milliseconds."""

    num_seqs: int
    num_drafts: int
    num_accepted: int  # forced, per round
    plain_ms: float  # a decode step, with the next one launched before its result arrives
    round_ms: float  # verify, draft, and everything in between
    decode_graph_ms: float | None  # time on the device only
    verify_graph_ms: float | None
    draft_graph_ms: float | None

    @property
    def speedup(self) -> float:
        """Tokens per second relative to decoding without drafts."""
        return (self.num_accepted + 1) * self.plain_ms / self.round_ms

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup}


class DraftBench:
    """A target and its drafter, loaded once."""

    def __init__(self, config: Config, *, max_num_seqs: int) -> None:
        choice = config.draft.choice
        if choice is None:
            raise ConfigError(
                "no drafter was given", hint="""pass --speculative-config '{"method": "mtp", "model": "random:"}'"""
            )
        checkpoint = open_checkpoint(config.model.model, config.model.revision)
        self.spec = checkpoint.spec
        self.device = resolve_device(config.model.device)
        self.dtype = resolve_dtype(config.model.dtype, self.device)
        self.is_gpu = self.device.type == "cuda"
        if self.is_gpu:
            torch.cuda.set_device(self.device)
            use_disk_cache()
        self.max_num_seqs, self.max_len = max_num_seqs, config.model.max_model_len or PROMPT_LEN + 512
        # All prompts fit into one step before the timed steps.
        budget = min(MAX_BATCHED_TOKENS, max_num_seqs * self.max_len)
        self.schedule = ScheduleConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        draft_plan = open_drafter(choice, self.spec)
        specs = cache_specs(self.spec, draft_plan, self.dtype.itemsize, latent=config.cache.latent)
        self.layout: CacheLayout = plan_cache(specs)
        self.num_heads = self.spec.layers[0].num_heads
        self.plan = plan_attention(target_groups(self.layout), self.num_heads, str(self.device))
        draft_plan.check(Weights(self.dtype, self.device), latent=config.cache.latent)
        self.model: Gemma4 = load_model(
            checkpoint,
            dtype=self.dtype,
            device=self.device,
            latent=config.cache.latent,
            quantization=config.model.quantization,
            head_quantization=config.model.head_quantization,
            progress=False,
        )
        self.drafter: Drafter = draft_plan.build(self.model, self._draft_backends(draft_plan, choice), progress=False)

    def _draft_backends(self, draft_plan: Any, choice: DraftChoice) -> dict[int, Any]:
        plan = plan_drafter_attention(draft_plan, self.layout, str(self.device), choice.attention_backend)
        groups = [group for group in self.layout.groups if group.name in draft_plan.readers(self.layout)]
        return {group.index: load(plan.path(group))(group, draft_plan.num_heads) for group in groups}

    def _backends(self) -> list[Any]:
        return [load(self.plan.path(group))(group, self.num_heads) for group in target_groups(self.layout)]

    def compile(self, num_seqs: Sequence[int], prompt_len: int) -> None:
        """Compile the kernels that will be timed, several in parallel."""
        if self.is_gpu:
            for drafter in (self.drafter, None):
                rehearsal = Rehearsal(
                    self.model,
                    self.layout,
                    self._backends(),
                    self.schedule,
                    GREEDY,
                    max_model_len=self.max_len,
                    has_graphs=True,
                    drafter=drafter,
                )
                rehearsal.compile_for(num_seqs, prompt_len)

    @torch.inference_mode()
    def measure(self, num_seqs: int, *, prompt_len: int, num_accepted: int) -> DraftLine:
        """Time rounds and plain steps with `num_seqs` sequences."""
        drafts = self.drafter.max_drafts
        with_drafts = _Loop(self, num_seqs, self.drafter)
        with_drafts.runner.force_accepted(num_accepted)
        round_ms = with_drafts.time(prompt_len, tokens_per_step=num_accepted + 1)
        verify, draft = with_drafts.graph_ms(Bucket(drafts + 1, num_seqs)), with_drafts.draft_ms(num_seqs, drafts)
        del with_drafts
        free_memory()
        plain = _Loop(self, num_seqs, None)
        plain_ms = plain.time(prompt_len, tokens_per_step=1)
        decode = plain.graph_ms(Bucket(1, num_seqs))
        del plain
        free_memory()
        return DraftLine(num_seqs, drafts, num_accepted, plain_ms, round_ms, decode, verify, draft)


class _Loop:
    """The engine's loop for `num_seqs` sequences, without text."""

    def __init__(self, bench: DraftBench, num_seqs: int, drafter: Drafter | None) -> None:
        self.num_seqs = num_seqs
        max_len = bench.max_len
        num_slabs = num_seqs * (least_slabs(bench.layout, max_len) + 2 * len(bench.layout.groups)) + 600
        pool = Pool(bench.layout, num_slabs, bench.dtype, bench.device, has_spare=bench.is_gpu)
        self.runner = Runner(
            bench.model, pool, bench._backends(), max_num_seqs=num_seqs, max_model_len=max_len, drafter=drafter
        )
        self.scheduler = Scheduler(
            bench.layout,
            num_slabs,
            ScheduleConfig(max_num_seqs=num_seqs, max_num_batched_tokens=bench.schedule.max_num_batched_tokens),
            max_model_len=max_len,
            prefix_caching=False,
            max_drafts=0 if drafter is None else drafter.max_drafts,
            plans_open=bench.is_gpu,
        )
        self.vocab_size, self.device, self.is_gpu = bench.spec.vocab_size, bench.device, bench.is_gpu
        self.rounds = None
        if self.is_gpu:
            captures = Captures(self.device)
            fixed = self.runner.use_fixed_shapes()
            buckets = [Bucket(1, num_seqs) if drafter is None else Bucket(drafter.max_drafts + 1, num_seqs)]
            fixed.steps.capture(captures, buckets)
            fixed.capture_draws(captures, buckets)
            self.rounds = fixed.rounds
            if self.rounds is not None and drafter is not None:
                self.rounds.capture(captures, [(num_seqs, drafter.max_drafts)])

    def time(self, prompt_len: int, *, tokens_per_step: int) -> float:
        """Return the median milliseconds between steps while all sequences decode."""
        num_tokens = (WARM_ROUNDS + NUM_ROUNDS + 4) * tokens_per_step + 4
        generator = torch.Generator().manual_seed(0)
        for index in range(self.num_seqs):
            prompt = torch.randint(0, self.vocab_size, (prompt_len,), generator=generator).tolist()
            self.scheduler.add(Request(str(index), tuple(prompt), GREEDY, 1, num_tokens, frozenset()))
        in_flight: deque[Any] = deque()
        times, num_decoding = [], 0
        while self.scheduler.has_work and num_decoding < WARM_ROUNDS + NUM_ROUNDS:
            while len(in_flight) < 2 and (plan := self.scheduler.schedule()) is not None:
                in_flight.append(self.runner.launch(plan))
            result = in_flight.popleft().result()
            self.scheduler.apply(result)
            self.scheduler.deltas()
            if len(result.drawn) == self.num_seqs:
                num_decoding += 1
                times.append(time.perf_counter())
        gaps = [1e3 * (after - before) for before, after in pairwise(times)]
        return median(gaps[WARM_ROUNDS:])

    def graph_ms(self, bucket: Bucket) -> float | None:
        """Return the milliseconds of one replay of a captured step, or None if it was not captured."""
        step = None if self.runner.fixed is None else self.runner.fixed.steps[bucket]
        return None if step is None or step.graph is None else _replay_ms(step.graph.replay)

    def draft_ms(self, num_seqs: int, num_drafts: int) -> float | None:
        """Return the milliseconds of one replay of a captured draft round, or None if it was not captured."""
        graph = None if self.rounds is None else self.rounds[num_seqs, num_drafts].graph
        return None if graph is None else _replay_ms(graph.replay)


def _replay_ms(replay: Callable[[], None]) -> float:
    replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPLAYS
