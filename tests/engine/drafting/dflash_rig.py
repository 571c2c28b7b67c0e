"""A tiny target with a tiny random DFlash drafter, under the real scheduler and runner. Every block is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from culet.attention.torch_cpu import TorchCPUBackend
from culet.cache.pool import HostPool, Pool
from culet.cache.spec import plan_cache
from culet.config import DraftChoice, ScheduleConfig
from culet.drafters.base import DraftBatch
from culet.drafters.dflash.drafter import DFlashDrafter
from culet.drafters.dflash.plan import DFlashPlan
from culet.engine.memory import least_slabs
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import load_model
from culet.runner.runner import Runner
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.sequence import Acceptance
from culet.testing.random_dflash import TINY, write_dflash
from culet.testing.tiny import write_checkpoint
from culet.types import Request
from tests.engine.runner.real_steps import check_pages, compute_at_once, run_to_end
from tests.engine.scheduler.fixed_lengths import FixedLengths
from tests.models.dflash_oracle import DFlashOracle
from tests.samplings import GREEDY

MAX_LEN = 160
CPU = torch.device("cpu")
# Layers to tap. In the KV-sharing shape, the last of them runs only on the tail unless it is tapped.
TAPS = {"E2B": [1, 3, 7], "12B": [0, 2, 4], "31B": [0, 2, 5]}


@dataclass
class Pair:
    """A target and the folder of its drafter."""

    model: Gemma4
    folder: Path
    spec: DFlashPlan

    @property
    def oracle(self) -> DFlashOracle:
        return DFlashOracle(self.folder, self.model.embedding.tensor.cpu(), self.model.embedding.scale)


def make_pair(folder: Path, shape: str, device=CPU, target_overrides=None, **overrides) -> Pair:
    """Make a random target of `shape` and a random drafter for it, both float32."""
    target = write_checkpoint(folder / "target", shape, dtype=torch.float32, overrides=target_overrides)
    checkpoint = open_checkpoint(str(target))
    own = {"dflash_config": {"mask_token_id": 4, "target_layer_ids": TAPS[shape]}}
    drafter = write_dflash(folder / "drafter", checkpoint.spec, overrides=TINY | own | overrides, dtype=torch.float32, seed=3)
    model = load_model(checkpoint, dtype=torch.float32, device=device, progress=False)
    return Pair(model, drafter, DFlashPlan.open(DraftChoice("dflash", str(drafter)), checkpoint.spec))


class Pauses(FixedLengths):
    """Wants drafts for a while, then none for longer."""

    def __init__(self, drafting: int = 3, pause: int = 11) -> None:
        super().__init__()
        self.drafting, self.pause, self.num_asked = drafting, pause, 0

    def length(self, state: Acceptance, num_seqs: int) -> int:
        self.num_asked += 1
        return 3 if self.num_asked % (self.drafting + self.pause) < self.drafting else 0


@dataclass
class Round:
    """One drafted block."""

    tokens: list[int]  # the sequence up to the newest token
    logits: Tensor  # [block, V]


class Watched(DFlashDrafter):
    """A drafter that records every block.

    It may propose known tokens instead: `told` has whole sequences by their first token.
    """

    def watch(self, tokens_SL: Tensor, told: dict[int, list[int]], is_wrong) -> Watched:
        self.tokens_SL, self.told, self.is_wrong = tokens_SL, told, is_wrong
        self.rounds: list[Round] = []
        return self

    def block_states(self, batch: DraftBatch, pool: Pool) -> Tensor:
        self.states = super().block_states(batch, pool)
        return self.states

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        proposals = super().propose(batch, pool, num_drafts)
        logits = self.model.logits(self.states).unflatten(0, (batch.num_rows, -1))
        assert torch.equal(proposals, logits[:, 1 : num_drafts + 1].argmax(-1))
        for row, (slot, length) in enumerate(zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True)):
            if int(batch.groups[0].pages_BP[row, 0]) == pool.spare_page:
                continue  # a padding row
            tokens = self.tokens_SL[slot, : length + 1].tolist()
            assert tokens[-1] == int(batch.newest_R[row])
            self.rounds.append(Round(tokens, logits[row].cpu()))
            for index in range(num_drafts):
                whole = self.told.get(tokens[0], [])
                place = length + 1 + index
                if place < len(whole):
                    proposals[row, index] = whole[place] + self.is_wrong(place)
        return proposals


class Rig:
    """A scheduler and a runner. `run` drives them until every request has ended."""

    def __init__(
        self,
        pair: Pair,
        *,
        drafts=True,
        budget=64,
        max_num_seqs=8,
        num_slabs=300,
        prefix_caching=False,
        told: dict[int, list[int]] | None = None,
        is_wrong=lambda place: False,
        has_spare=False,
        backend=TorchCPUBackend,  # the drafter's
        target_backend=TorchCPUBackend,
        longest=0,  # if set, the cache holds little more than one sequence of this many tokens
        policy=None,
        ahead=False,  # whether each step is planned before the previous result is applied
        num_host_pages=0,
    ):
        model = pair.model
        specs = model.spec.kv_specs(4) + (pair.spec.kv_specs(4) if drafts else [])
        kinds = {spec.kind for spec in specs}
        per_token = [sum(spec.bytes_per_token for spec in specs if spec.kind == kind) for kind in kinds]
        layout = plan_cache(specs, slab_bytes=16 * max(per_token))  # the smallest possible pages
        num_slabs = least_slabs(layout, longest) + 2 if longest else num_slabs
        self.pool = Pool(layout, num_slabs, torch.float32, model.device, has_spare=has_spare)
        num_heads = model.spec.layers[0].num_heads
        own = [target_backend(group, num_heads) for group in layout.groups if group.name != "dflash"]
        self.drafter: Watched | None = None
        if drafts:
            group = next(group for group in layout.groups if group.name == "dflash")
            planned = backend(group, pair.spec.num_heads)
            built = pair.spec.build(model, {group.index: planned}, progress=False)
            self.drafter = Watched(built.model, planned, max_drafts=built.max_drafts)
        self.scheduler = Scheduler(
            layout,
            num_slabs,
            ScheduleConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            max_model_len=MAX_LEN,
            prefix_caching=prefix_caching,
            max_drafts=self.drafter.max_drafts if self.drafter else 0,
            policy=policy,
        )
        self.ahead = ahead
        self.scheduler.page_allocator.host.grow(num_host_pages)
        sizes = {"max_num_seqs": max_num_seqs, "max_model_len": MAX_LEN}
        host_pool = HostPool(layout.slab_bytes, num_host_pages, model.device)
        self.runner = Runner(model, self.pool, own, **sizes, drafter=self.drafter, host_pool=host_pool)
        if self.drafter:
            self.drafter.watch(self.runner.tokens_SL, told or {}, is_wrong)

    @property
    def rounds(self) -> list[Round]:
        return self.drafter.rounds if self.drafter else []

    def run(self, *requests: Request, cancel_at: dict[int, str] | None = None) -> dict[tuple[str, int], list[int]]:
        """Run the requests and return tokens by (request id, sample). `cancel_at` maps step counts to requests to cancel."""
        return run_to_end(self.scheduler, self.runner.execute, *requests, cancel_at=cancel_at, ahead=self.ahead)

    def check_pages(self) -> None:
        check_pages(self.scheduler)


def make_request(name: str, prompt: list[int], num_tokens: int = 20, sampling=GREEDY, n: int = 1) -> Request:
    return Request(name, tuple(prompt), sampling, n, num_tokens, frozenset())


def taps_of(pair: Pair, tokens: list[int]) -> dict[int, Tensor]:
    """Return the target's streams [T, D] at the drafter's taps, computed in one step."""
    model = pair.model
    layout = plan_cache(model.spec.kv_specs(4))
    pool = Pool(layout, 200, torch.float32, model.device)
    backends = [TorchCPUBackend(group, model.spec.layers[0].num_heads) for group in layout.groups]
    runner = Runner(model, pool, backends, max_num_seqs=1, max_model_len=len(tokens) + 1)
    hidden = compute_at_once(model, runner, layout, tokens, pair.spec.taps)
    return {tap: stream.cpu() for tap, stream in hidden.tapped.items()}


def assert_like_oracle(pair: Pair, rounds: list[Round], at_least: int, tolerance: float = 1e-4) -> None:
    """Check every block's logits against the oracle's."""
    assert len(rounds) >= at_least, f"{len(rounds)} blocks were drafted, expected {at_least} at the least"
    oracle, streams = pair.oracle, {}
    for block in sorted(rounds, key=lambda block: -len(block.tokens)):
        context = tuple(block.tokens[:-1])
        whole = next((known for known in streams if known[: len(context)] == context), None)
        if whole is None:
            whole, streams[context] = context, taps_of(pair, list(context))
        tapped = {tap: stream[: len(context)] for tap, stream in streams[whole].items()}
        with torch.inference_mode():
            expected = oracle.logits(tapped, block.tokens[-1])
        error = float((block.logits - expected).abs().max())
        assert error < tolerance, f"block after {len(context)} tokens: off by {error:.2e}"
