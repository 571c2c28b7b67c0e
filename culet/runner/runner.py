"""Run a StepPlan and return a StepResult.

`Runner.launch` gives a step to the device and returns at once. `Pending.result` waits for that step, but not for steps launched
after it. Steps run in the order in which they are launched, so the next one may be launched before a result is read.

`_launch` reads top to bottom. The parts that it calls do not call back, and share only the buffers that they are given:

    target         the model, its KV pages and attention backends
    fill           rows -> ForwardBatch, for steps of any shape
    legs           steps that run only some of the layers for a chunk
    draws          logits -> tokens, accepted drafts, log-probabilities, for steps of any shape
    rounds         the drafter's proposals for the next step, in any shape
    deferred       a drafter's KV that is written later
    grammars       masks for sequences with structured output
    media          features of images, video and audio, and where a step reads them
    fixed          steps, draws and rounds in fixed shapes, which a GPU replays as graphs

Shapes: S slots · L a slot's tokens · G groups of draws, one per slot that draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from culet import env
from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import HostPool, Pool
from culet.cache.spec import KVGroup
from culet.drafters.base import ABSTAINED, Drafter
from culet.kernels.captures import Captures, step_stream
from culet.kernels.compiling import CompileCount
from culet.kernels.host_transfer import HostCopy, on_device
from culet.models.gemma4 import Gemma4
from culet.models.pieces import DIRECT
from culet.runner.checks import check_deferred, check_step
from culet.runner.clock import DeviceClock
from culet.runner.deferred_kv import DeferredKV, DeferredWrite, keeps_features
from culet.runner.draft_round import DraftRounds
from culet.runner.draw_plan import DrawGroup, draw_groups, draws_follow_tokens, has_drafts
from culet.runner.draws import Draws, FixedDrawn, Scored, StepDraws, entry_of
from culet.runner.fill import fill
from culet.runner.fixed.shapes import FixedShapes
from culet.runner.fixed.steps import Bucket, FixedStep
from culet.runner.grammar_masks import SlotGrammars, StepGrammars
from culet.runner.media.features import Encoder, FeatureStore
from culet.runner.media.legs import LegPasses
from culet.runner.media.step_media import ImageMask, SlotMedia, StepMedia
from culet.runner.step_threads import StepThreads
from culet.runner.target import ForwardOutput, Target
from culet.sampling.logprobs import as_mappings
from culet.sampling.verify import force_accepted
from culet.types import Drawn, Entry, Logprobs, Row, Sampling, StepPlan, StepResult

if TYPE_CHECKING:
    from culet.structured.compiler import GrammarCompiler  # loaded with the first grammar


class Runner:
    """Runs steps on one device. This is the in-process `Worker`. It has a slot for every running sequence."""

    def __init__(
        self,
        model: Gemma4,
        pool: Pool,
        backends: Sequence[AttentionBackend],
        *,
        max_num_seqs: int,
        max_model_len: int,
        drafter: Drafter | None = None,
        compile_count: CompileCount | None = None,
        host_pool: HostPool | None = None,
    ) -> None:
        """Set up slots and buffers. Without a `host_pool`, no pages are saved in host memory."""
        device = model.device
        # A step may be planned before it is known that the sequence has ended, so a slot has room for one more token.
        width = max_model_len + 1 + (0 if drafter is None else drafter.max_drafts)
        # Tokens by slot. Draws of padding go to the spare slot, which is the last.
        self.tokens_SL = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=device)
        # Number of drafts that the last verify of each slot accepted.
        self.accepted_S = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._entries: list[Entry | None] = [None] * max_num_seqs  # by slot

        self.pool, self.drafter, self.compile_count = pool, drafter, compile_count
        self.host_pool = HostPool(pool.layout.slab_bytes, 0, torch.device("cpu")) if host_pool is None else host_pool
        self.deferred: DeferredKV | None = None
        if drafter is not None:
            sizes = max_num_seqs + 1, model.spec.hidden_size, model.dtype
            self.deferred = DeferredKV.create(drafter, pool, *sizes, device)
        taps = () if drafter is None or self.deferred is None else drafter.taps
        self.target = Target(model, pool, backends, taps)
        self.legs = LegPasses(self.target)
        self.draws = Draws(self.target, self.tokens_SL, self.accepted_S)
        self.rounds = None if drafter is None else DraftRounds(drafter, pool, self.tokens_SL)
        self.grammars = SlotGrammars(model.rank.size)
        self.media = SlotMedia(ImageMask.CAUSAL, None)
        self.clock = DeviceClock(device)
        # Ranks also wait for each other, which says nothing about their threads.
        self.threads = StepThreads() if device.type == "cpu" and model.rank.size == 1 else None
        self.fixed: FixedShapes | None = None
        self._stream: torch.cuda.Stream | None = None  # of steps; None means torch's default

    # Preparation

    def use_fixed_shapes(self, max_prompt: int = 0) -> FixedShapes:
        """Run decode and verify steps in fixed shapes from now on, so that they can be captured as CUDA graphs.

        Pad steps with prompts to fixed sizes if they have at most `max_prompt` tokens.
        """
        shared = self.tokens_SL, self.accepted_S
        self.fixed = FixedShapes.create(self.target, *shared, self.drafter, self.deferred, max_prompt)
        return self.fixed

    def drop_fixed_shapes(self) -> None:
        """Go back to running every step in its own shape, and free the buffers and graphs."""
        self.fixed = None
        if self.deferred is not None:
            self.deferred.drop_fixed_sizes()

    def capture(self, captures: Captures) -> int:
        """Capture everything that runs in fixed shapes. Return the number of graphs."""
        assert self.fixed is not None, "there are no fixed shapes to capture"
        return self.fixed.capture(captures)

    def use_grammars(self, grammars: GrammarCompiler) -> None:
        """From now on, entries may have a grammar."""
        self.grammars.grammars = grammars

    def use_media(self, encoder: Encoder, mask: ImageMask) -> None:
        """From now on, entries may have media."""
        self.media = SlotMedia(mask, FeatureStore(encoder, self.target.device))

    def prioritise_steps(self) -> None:
        """Give steps a higher priority than towers from now on. Call this last, when everything is prepared.

        No stream has a lower priority than torch's default stream, so steps move to another one. The allocator keeps freed
        memory for the stream that used it, so that memory is given back first.
        """
        torch.cuda.synchronize(self.target.device)
        torch.cuda.empty_cache()
        self._stream = step_stream(self.target.device)

    def force_accepted(self, count: int) -> None:
        """Make every verify keep `count` drafts, or all if it has fewer. This is for measurements. The output is nonsense."""
        self.draws.accept = force_accepted(count)
        if self.fixed is not None and self.fixed.draws is not None:
            with self._on_stream():
                self.fixed.draws.forced_1.fill_(count)

    # A step

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its result."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Give one step to the device. Plans must come in the order in which they were made.

        Wait for the device only if the step has open rows and no graph serves it, to learn where they begin.
        """
        with self._on_stream() if self.threads is None else self.threads.use():
            return self._launch(plan)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _launch(self, plan: StepPlan) -> Pending:
        self._check(plan)
        if self.deferred is not None:
            self._write_deferred(plan, self.deferred, self.deferred.ledger.due_before(plan))
        self._enter(plan.entries)
        self._ban()
        # After deferred writes, which may belong to pages that are saved, and before anything is written to these pages.
        self.pool.save_pages(plan.saves, self.host_pool)
        self.pool.load_pages(plan.loads, self.host_pool)
        self.pool.copy_pages(plan.copies)
        if not plan.rows:
            return Pending(plan.step_id, HostCopy([]), features=self._encode(plan), waits=True)
        route = self._route(plan.rows, self.media.find(plan.rows))
        with self.clock.span("verify") if has_drafts(plan.rows) else nullcontext():
            with nullcontext() if self.threads is None else self.threads.measure():
                output = self._forward(route)
            drawn = self._draw(route, output)
        # Send the draws before the draft round, so that the host plans the next step while the drafter works.
        copy = drawn.send()
        if self.deferred is not None:
            self._write_deferred(plan, self.deferred, self.deferred.ledger.due_after(route.rows))
        num_proposed = self._propose(route, output, drawn)
        accepted_G = None if isinstance(drawn, FixedDrawn) else drawn.accepted_G  # fixed draws have no masks
        grammars = self.grammars.follow(route.groups, accepted_G, num_proposed, self.tokens_SL)
        # The host launches the towers' kernels last, while the device is busy with the step.
        store = self._encode(plan)
        if isinstance(drawn, FixedDrawn):
            return Pending(plan.step_id, copy, route.groups, num_proposed, True, grammars=grammars, features=store)
        has_accepted = accepted_G is not None
        scores = drawn.scored, drawn.prompts
        return Pending(plan.step_id, copy, route.groups, num_proposed, has_accepted, *scores, grammars, store)

    @property
    def num_slabs(self) -> int:
        return self.pool.num_slabs

    @property
    def num_host_pages(self) -> int:
        return self.host_pool.num_pages

    def device_seconds(self) -> Mapping[str, float]:
        """Return how many seconds the device has spent on verifying and on proposing drafts since the start."""
        return {name: self.clock.seconds(name) for name in ("verify", "draft")}

    def begin_serving(self) -> None:
        """From now on, warn about every kernel that is compiled."""
        if self.compile_count is not None:
            self.compile_count.begin_serving()

    @property
    def descriptors(self) -> Sequence[int]:
        """There is nothing to watch, because the runner has no process of its own."""
        return ()

    def check(self) -> None:
        """Do nothing. The runner lives as long as this process."""

    def close(self) -> None:
        """Allocate no more host pages. Memory is freed with the runner."""
        self.host_pool.close()

    # The parts of a step, in order

    def _check(self, plan: StepPlan) -> None:
        """Check every page index of a step, if the debug switch is set."""
        if env.CHECK_PAGES.is_set():
            num_slots, room = self.tokens_SL.shape[0] - 1, self.tokens_SL.shape[1]
            sizes = {"num_slabs": self.pool.num_slabs, "num_host_pages": self.num_host_pages}
            check_step(plan, self.pool.layout, num_slots=num_slots, room=room, **sizes)

    def _write_deferred(self, plan: StepPlan, deferred: DeferredKV, writes: Sequence[DeferredWrite]) -> None:
        """Write a drafter's KV for earlier tokens, before or after the forward pass of `plan`."""
        if not writes:
            return
        if env.CHECK_PAGES.is_set():
            check_deferred(plan, writes, self.pool.layout, deferred.group, num_slabs=self.pool.num_slabs)
        deferred.write(writes)

    def _enter(self, entries: Sequence[Entry]) -> None:
        """Put sequences into their slots. Their tokens go to the device in one copy."""
        if not entries:
            return
        tokens = on_device(list(chain.from_iterable(entry.token_ids for entry in entries)), self.tokens_SL.device, torch.int32)
        begin = 0
        for entry in entries:
            end = begin + len(entry.token_ids)
            self.tokens_SL[entry.slot, : end - begin].copy_(tokens[begin:end])
            self._entries[entry.slot] = entry
            begin = end
        self.grammars.enter(entries)
        self.media.enter(entries)

    def _ban(self) -> None:
        """Rule out tokens that sequences may not draw any more, by a bias in their settings."""
        for slot, token_id in self.grammars.take_bans():
            entry = entry_of(self._entries, slot)
            bias = tuple(sorted({**dict(entry.sampling.logit_bias), token_id: float("-inf")}.items()))
            self._entries[slot] = replace(entry, sampling=replace(entry.sampling, logit_bias=bias))

    def _route(self, rows: Sequence[Row], media: StepMedia | None) -> _Route:
        """Decide whether a step and its draws run in a fixed shape or in their own. Close open rows that no graph serves."""
        groups, fixed = draw_groups(rows), self.fixed if media is None else None
        bucket = None if fixed is None else fixed.steps.find(rows)
        settings: list[Sampling] = []
        has_fixed_draws = can_open = False
        if fixed is not None and bucket is not None and fixed.draws is not None:
            if draws_follow_tokens(rows, groups) and not self.grammars.bind(groups):
                for group in groups:
                    settings += [entry_of(self._entries, group.slot).sampling] * group.size
                has_fixed_draws = fixed.draws.serves(bucket, settings)
            can_open = has_fixed_draws and fixed.steps[bucket].graph is not None
        if not can_open and any(row.num_open for row in rows):
            accepted = self.accepted_S.tolist()  # waits for the previous steps
            rows = [row.close(accepted[row.slot]) if row.num_open else row for row in rows]
            groups = draw_groups(rows)
        return _Route(rows, groups, bucket, settings if has_fixed_draws else None, media)

    def _forward(self, route: _Route) -> FixedStep | ForwardOutput:
        """Run the target."""
        rows = route.rows
        if self.fixed is not None and route.bucket is not None:
            step = self.fixed.steps.run(rows, route.bucket)
            if route.settings is not None:
                return step
            output = step.output(rows)
            return output if draws_follow_tokens(rows, route.groups) else replace(output, next_tokens=None)
        if any(not row.leg.is_whole for row in rows):
            assert self.deferred is None, "a drafter with its own KV needs every step's features at once"
            others = [row for row in rows if row.leg.is_whole]
            batches = self._batch_of(rows, route.media), self._batch_of(others, self.media.find(others))
            return self.legs.run(rows, *batches, None if self.fixed is None else self.fixed.prompts)
        unread = None
        if self.deferred is not None and keeps_features(rows) and not any(row.num_wanted for row in rows):
            unread = self.deferred.group
        batch = self._batch_of(rows, route.media, unread)
        self.target.plan(batch)
        pieces = DIRECT if self.fixed is None else self.fixed.prompts.pieces_for(batch)
        hidden = self.target.forward(batch, pieces)
        if self.deferred is not None:
            self.deferred.keep_or_write(rows, batch, hidden.tapped)
        return ForwardOutput(batch, hidden)

    def _batch_of(self, rows: Sequence[Row], media: StepMedia | None, unread: KVGroup | None = None) -> ForwardBatch:
        placeholder_P = self.target.placeholder_P
        return self.target.own_share(fill(rows, self.pool.layout, self.tokens_SL, placeholder_P, unread, media))

    def _draw(self, route: _Route, output: FixedStep | ForwardOutput) -> FixedDrawn | StepDraws:
        """Draw from the logits, and count accepted drafts."""
        if isinstance(output, ForwardOutput):
            # Masks are computed on the host while the device is busy with the forward pass.
            masks = self.grammars.masks(route.groups)
            return self.draws.run(route.rows, route.groups, self._entries, output, masks)
        assert self.fixed is not None
        assert self.fixed.draws is not None
        assert route.settings is not None
        return self.fixed.draws.run(output, route.settings)

    def _propose(self, route: _Route, output: FixedStep | ForwardOutput, drawn: FixedDrawn | StepDraws) -> Sequence[int]:
        """Run a draft round. Return the number of proposals for each group."""
        wanted = [group.num_wanted for group in route.groups]
        if any(group.min_accepted for group in route.groups) and isinstance(drawn, StepDraws):
            wanted = _worth_proposing(route.groups, drawn.accepted_G)
        if self.rounds is None or not any(wanted):
            return [0] * len(wanted)
        rounds, num_drafts = None if self.fixed is None else self.fixed.rounds, max(wanted)
        with self.clock.span("draft"):
            if isinstance(output, FixedStep) and isinstance(drawn, FixedDrawn):
                assert rounds is not None
                rounds.run_after(output, drawn.out_X, num_drafts)
                return wanted
            assert isinstance(output, ForwardOutput)
            assert isinstance(drawn, StepDraws)
            accepted_G, chosen = drawn.accepted_G, [index for index, count in enumerate(wanted) if count]
            if accepted_G is not None and len(chosen) < len(wanted):
                accepted_G = accepted_G[on_device(chosen, accepted_G.device)]
            groups = [route.groups[index] for index in chosen]
            arguments = groups, output.batch, output.hidden.last_LD, accepted_G, num_drafts
            if rounds is None or not rounds.run(*arguments):
                proposed_RK = self.rounds.run(*arguments)
                if proposed_RK.device.type == "cpu":  # a GPU would have to wait to learn where the drafter abstained
                    for index, count in zip(chosen, (proposed_RK != ABSTAINED).sum(1).tolist(), strict=True):
                        wanted[index] = min(wanted[index], count)
        return wanted

    def _encode(self, plan: StepPlan) -> FeatureStore | None:
        """Drop and encode features. Return where they are, if there are towers."""
        store = self.media.store
        if store is not None and (plan.drops or plan.encodes):
            store.change(plan.drops, plan.encodes)
        return store


def _worth_proposing(groups: Sequence[DrawGroup], accepted_G: Tensor | None) -> list[int]:
    """Return the proposals to make for each group, after it is known how many of its drafts were accepted."""
    assert accepted_G is not None, "only rows with drafts need accepted ones"
    pairs = zip(groups, accepted_G.tolist(), strict=True)
    return [group.num_wanted if accepted >= group.min_accepted else 0 for group, accepted in pairs]


class _Route(NamedTuple):
    """How a step runs."""

    rows: Sequence[Row]
    groups: Sequence[DrawGroup]
    bucket: Bucket | None  # the fixed shape of the forward pass, or None for its own shape
    settings: Sequence[Sampling] | None  # settings of each draw, if the draws have a fixed shape too
    media: StepMedia | None  # a step with media runs in its own shape


class Pending(NamedTuple):
    """A step that was launched. Its draws are on their way to the host."""

    step_id: int
    copy: HostCopy  # drawn tokens, accepted drafts, log-probabilities
    groups: Sequence[DrawGroup] = ()
    num_proposed: Sequence[int] = ()
    has_accepted: bool = False  # whether `copy` has accepted drafts
    scored: Sequence[Scored] = ()
    prompts: Mapping[int, Sequence[Scored]] = MappingProxyType({})
    grammars: StepGrammars | None = None
    features: FeatureStore | None = None  # None without towers
    waits: bool = False  # for the features that are being encoded, because the plan has no rows

    def result(self) -> StepResult:
        """Wait for this step and return what it drew."""
        values = iter(self.copy.lists())
        tokens, accepted = next(values, []), next(values) if self.has_accepted else [0] * len(self.groups)
        if self.scored or self.prompts:  # next to log-probabilities, whole numbers arrive as floats
            tokens, accepted = list(map(int, tokens)), list(map(int, accepted))

        def mappings(part: Scored, chosen: Sequence[int]) -> Iterator[Logprobs]:
            return as_mappings(chosen, next(values), next(values), next(values), part.counts)

        logprobs: dict[int, Logprobs] = {}
        for part in self.scored:
            logprobs.update(zip(part.of, mappings(part, [tokens[draw] for draw in part.of]), strict=True))
        drawn = []
        # `accepted` may have more numbers than there are groups, because padding rows of a fixed shape have one too.
        for index, (group, num_kept, count) in enumerate(zip(self.groups, accepted, self.num_proposed, strict=False)):
            first, end = group.first, group.first + num_kept + 1
            kept = tuple(tokens[first:end])
            if self.grammars is None:
                fault, is_bound = "", False
            else:
                kept, count, fault, is_bound = self.grammars.accept(index, kept, count)
                end = first + len(kept)
            own = tuple([logprobs[draw] for draw in range(first, end) if draw in logprobs]) if logprobs else ()
            drawn.append(Drawn(group.slot, kept, own, count, fault, is_bound))
        prompts = {
            slot: tuple(scores for part in parts for scores in mappings(part, part.of)) for slot, parts in self.prompts.items()
        }
        if self.grammars is not None:
            self.grammars.take_proposals()
        encoded = () if self.features is None else self.features.take_ready(wait=self.waits)
        return StepResult(self.step_id, tuple(drawn), prompts, encoded)
