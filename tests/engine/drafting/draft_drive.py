"""A small target with an MTP assistant under the real scheduler and runner, with some drafts replaced by the true tokens.

A random assistant's drafts are hardly ever accepted. `Hinted` lets it draft as usual over the target's pages and then replaces
some drafts with the tokens known to come next, so that rounds end in every possible way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from culet.attention.torch_cpu import TorchCPUBackend
from culet.cache.pool import Pool
from culet.cache.spec import CacheLayout, plan_cache
from culet.config import DraftChoice, ScheduleConfig
from culet.drafters.base import DraftBatch, cache_specs, open_drafter, target_groups
from culet.drafters.mtp.drafter import MTPDrafter
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import load_model
from culet.runner.fixed.draws import FixedDraws
from culet.runner.runner import Runner
from culet.scheduler.scheduler import Scheduler
from culet.testing.tiny import write_checkpoint
from culet.types import Request, Sampling, StepPlan, StepResult
from tests.engine.runner.real_steps import check_pages, run_to_end
from tests.samplings import draw_by_columns

T = TypeVar("T")
CPU = torch.device("cpu")
CLOSE = 1e-4  # the order of the two best logits is uncertain if they are closer than this


def make_target(folder: Path, shape: str, **changes: object) -> Gemma4:
    write_checkpoint(folder, shape, dtype=torch.float32, **changes)
    return load_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, progress=False)


class Hinted(MTPDrafter):
    """Replaces drafts with known tokens where `is_told(position)`. `known` has whole sequences by their first token."""

    def hint(self, tokens_SL: Tensor, known: Mapping[int, Sequence[int]], is_told: Callable[[int], bool]) -> None:
        self.tokens_SL, self.known, self.is_told = tokens_SL, known, is_told
        self.num_rounds = 0
        self.first_drafts: dict[tuple[int, int], int] = {}  # the assistant's own, by first token and length

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        proposals = super().propose(batch, pool, num_drafts)
        self.num_rounds += 1
        assert proposals.shape == (batch.num_rows, num_drafts)
        for row, (slot, length) in enumerate(zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True)):
            self.first_drafts[int(self.tokens_SL[slot, 0]), length] = int(proposals[row, 0])
            whole = self.known.get(int(self.tokens_SL[slot, 0]), ())
            for index in range(num_drafts):
                place = length + 1 + index
                if place < len(whole) and self.is_told(place):
                    proposals[row, index] = whole[place]
        return proposals


class DraftDrive:
    """A scheduler and a runner, with an assistant (`choice`) or without one (None)."""

    def __init__(
        self,
        target: Gemma4,
        choice: DraftChoice | None,
        *,
        known: Mapping[int, Sequence[int]] | None = None,
        is_told: Callable[[int], bool] = lambda place: False,
        budget: int = 64,
        max_num_seqs: int = 8,
        num_slabs: int = 300,
        max_len: int = 200,
        prefix_caching: bool = False,
        policy: object = None,
        is_fixed: bool = False,
    ) -> None:
        spec = None if choice is None else open_drafter(choice, target.spec)
        specs = cache_specs(target.spec, spec, 4, latent=True)
        per_token = [
            sum(layer.bytes_per_token for layer in specs if layer.kind == kind) for kind in {layer.kind for layer in specs}
        ]
        self.layout: CacheLayout = plan_cache(specs, slab_bytes=16 * max(per_token))  # the smallest possible pages
        self.pool = Pool(self.layout, num_slabs, torch.float32, CPU, has_spare=is_fixed)
        self.pool._slabs[:num_slabs] = 255  # NaN where nothing has been written
        own = [TorchCPUBackend(group, target.spec.layers[0].num_heads) for group in target_groups(self.layout)]
        self.drafter: Hinted | None = None
        if spec is not None:
            backends = {group.index: TorchCPUBackend(group, spec.num_heads) for group in self.layout.groups}
            built = spec.build(target, backends, progress=False)
            assert isinstance(built, MTPDrafter)
            assert choice is not None
            self.drafter = Hinted(built.model, target, backends, max_drafts=built.max_drafts, position=choice.position)
        self.scheduler = Scheduler(
            self.layout,
            num_slabs,
            ScheduleConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            max_model_len=max_len,
            prefix_caching=prefix_caching,
            max_drafts=0 if self.drafter is None else self.drafter.max_drafts,
            policy=policy,  # type: ignore[arg-type]
        )
        self.runner = Runner(target, self.pool, own, max_num_seqs=max_num_seqs, max_model_len=max_len, drafter=self.drafter)
        if self.drafter is not None:
            self.drafter.hint(self.runner.tokens_SL, known or {}, is_told)
        if is_fixed:
            self.runner.use_fixed_shapes()
        self.results: list[StepResult] = []

    def run(self, *requests: Request, cancel_at: Mapping[int, str] | None = None) -> dict[tuple[str, int], list[int]]:
        """Run the requests and return tokens by (request id, sample). `cancel_at` maps step counts to requests to cancel."""

        def execute(plan: StepPlan) -> StepResult:
            self.results.append(self.runner.execute(plan))
            return self.results[-1]

        return run_to_end(self.scheduler, execute, *requests, cancel_at=cancel_at)

    def check_pages(self) -> None:
        check_pages(self.scheduler)


def use_fixed_draws(runner: Runner) -> FixedDraws:
    """Give a runner's fixed-shape steps fixed-shape draws, as on a GPU."""
    assert runner.fixed is not None
    buckets = runner.fixed.steps.buckets
    runner.fixed.draws = FixedDraws(runner.target, buckets, runner.tokens_SL, runner.accepted_S, draw_by_columns)
    return runner.fixed.draws


class CpuGraph:
    """A stand-in for a CUDA graph. A replay calls the captured function again."""

    def __init__(self, replay: Callable[[], object]) -> None:
        self.replay = replay


class CpuCaptures:
    """A stand-in for `Captures`."""

    def capture(self, run: Callable[[], T]) -> tuple[CpuGraph, T]:
        return CpuGraph(run), run()


def make_request(name: str, prompt: Sequence[int], sampling: Sampling, num_tokens: int = 20, n: int = 1) -> Request:
    return Request(name, tuple(prompt), sampling, n, num_tokens, frozenset())


def sequences(requests: Sequence[Request], out: Mapping[tuple[str, int], Sequence[int]]) -> dict[int, list[int]]:
    """Return the whole sequences of the first samples, by their first token."""
    return {request.prompt_token_ids[0]: [*request.prompt_token_ids, *out[request.request_id, 0]] for request in requests}


def margin_at(target: Gemma4, tokens: Sequence[int]) -> float:
    """Return the distance between the two best logits after `tokens`, computed from scratch."""
    drive = DraftDrive(target, None, num_slabs=600, max_len=len(tokens) + 2, budget=512)
    logits: list[Tensor] = []
    original = target.logits
    target.logits = lambda last_LD: logits.append(original(last_LD)) or logits[-1]  # type: ignore[method-assign, func-returns-value]
    try:
        sampling = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0, None, None)
        drive.run(make_request("margin", tokens, sampling, num_tokens=1))
    finally:
        del target.logits
    best = logits[-1][-1].topk(2).values
    return float(best[0] - best[1])


def assert_same(target: Gemma4, requests: Sequence[Request], got: Mapping, want: Mapping) -> int:
    """Check that greedy outputs are equal except where the two best logits are within 1e-4.

    Return the number of such places.
    """
    num_close = 0
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    for key, tokens in want.items():
        if got[key] == tokens:
            continue
        place = next(index for index, (a, b) in enumerate(zip(got[key], tokens, strict=False)) if a != b)
        margin = margin_at(target, [*prompts[key[0]], *tokens[:place]])
        print(f"{key}: parted at token {place}, where the two best logits lie {margin:.2e} apart")
        assert margin < CLOSE, f"{key} parts at token {place} of {len(tokens)}, logits {margin:.2e} apart"
        num_close += 1
    return num_close


def greedy(seed: int = 11) -> Sampling:
    return replace(Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0, None, None), seed=seed)
