"""From a StepPlan to a StepResult: fill, forward, logits, draws.

`launch` gives a step to the device and returns at once; `Pending.result` waits for that step, and for none that was launched
after it. Steps run in the order in which they are launched, so the next one may be launched before the result is there.

Shapes: S slots · L a slot's tokens, or tokens whose logits are needed · R draws · G groups of draws, one per slot that
draws · K draws of the longest group · D model · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from culet import env
from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.drafters.base import Drafter
from culet.kernels.host_transfer import HostCopy, on_device
from culet.models.gemma4 import Gemma4, Hidden
from culet.runner.checks import check_late, check_step
from culet.runner.clock import DeviceClock
from culet.runner.deferred_kv import Features, LateWrite, Ledger
from culet.runner.draft_round import Drafting, Drawer, draft_lengths
from culet.runner.draw_plan import DrawGroup, draw_groups, draws_follow_rows, has_drafts, is_repeated, moved
from culet.runner.fill import fill
from culet.runner.fixed_steps import Bucket, Captures, FixedSteps, Placed
from culet.runner.grammar_masks import Constraints, StepMasks, Watched
from culet.sampling.logprobs import LogprobTensors, as_mappings, compute_logprobs
from culet.sampling.sampler import History, sample
from culet.sampling.verify import Accept, count_accepted, force_accepted
from culet.structured.compiler import GrammarCompiler
from culet.types import Drawn, Entry, Logprobs, Row, Sampling, StepPlan, StepResult

if TYPE_CHECKING:
    from culet.runner.draws import FixedDraws, Settled  # on GPUs alone: it needs Triton

LOGITS_ROWS = 256  # logits computed at a time: 256 MiB at Gemma's vocabulary


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probabilities, still on the device, of draws (by their numbers) or of prompt tokens (by themselves)."""

    of: list[int]
    counts: list[int]  # how many of the most likely tokens are wanted beside each
    tensors: LogprobTensors


class Runner:
    """Executes steps on one device. Keeps, for every slot, the tokens and the sampling settings of its sequence."""

    def __init__(
        self,
        model: Gemma4,
        pool: Pool,
        backends: Sequence[AttentionBackend],
        *,
        max_num_seqs: int,
        max_model_len: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backends = backends
        self.drafter = drafter
        # The step after the last may be planned before the last token is known to be the last: one place more.
        width = max_model_len + 1 + (drafter.max_drafts if drafter is not None else 0)
        # One slot more: what padding draws goes there.
        self.tokens_SL = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=model.device)
        # Drafts that the last verify of each slot accepted.
        self.accepted_S = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=model.device)
        self.fixed: FixedSteps | None = None  # steps of fixed shapes, once `use_fixed_steps` has made them
        self.draws: FixedDraws | None = None  # and their draws, on a GPU
        self.clock = DeviceClock(model.device)  # of steps that verify drafts, and of drafting
        self.accept: Accept = count_accepted
        self.drafting = None if drafter is None else Drafting(drafter, pool, self.tokens_SL)
        # What the drafter makes KV of its own of, if it has any.
        self.features = None if drafter is None else Features.make(drafter, pool, max_num_seqs + 1, model.embedding[0])
        self._entries: list[Entry | None] = [None] * max_num_seqs
        self._last: _Last | None = None  # the step before, if it was all graphs
        self._constraints: Constraints | None = None  # grammars of sequences, once `use_grammars` was called
        self._sample = _sampler_for(model.device)

    def use_fixed_steps(self) -> FixedSteps:
        """From now on run decode and verify steps in fixed shapes, so that they can be captured as CUDA graphs."""
        drafter = self.drafter
        counts = () if drafter is None else draft_lengths(drafter.max_drafts)
        self.fixed = FixedSteps(
            self.model,
            self.pool,
            self.backends,
            self.tokens_SL,
            self.accepted_S,
            query_counts=(1, *(count + 1 for count in counts)),
            features=self.features,
        )
        if self.features is not None:
            self.features.use_fixed_sizes()
        rounds = None if self.drafting is None else self.drafting.use_fixed_rounds(self.fixed)
        if self.model.device.type == "cuda":
            from culet.kernels.triton.sampling.draw import draw
            from culet.runner.draws import FixedDraws  # needs Triton, as above

            self.draws = FixedDraws(self.fixed, rounds, draw)
        return self.fixed

    def capture(self, captures: Captures) -> int:
        """Capture every step of a fixed shape, and every drafting round; returns how many graphs that are."""
        assert self.fixed is not None, "no steps of fixed shapes were made"
        rounds = None if self.drafting is None else self.drafting.fixed
        parts = [part for part in (self.fixed, self.draws, rounds, self.features) if part is not None]
        for part in parts:
            part.capture(captures)
        return sum(part.num_captured for part in parts)

    def force_accepted(self, count: int) -> None:
        """For measurements: from now on every verify keeps `count` drafts, or all of fewer. What comes out means nothing."""
        self.accept = force_accepted(count)
        if self.draws is not None:
            self.draws.forced_1.fill_(count)

    def use_grammars(self, grammars: GrammarCompiler) -> None:
        """From now on entries may have a grammar of these."""
        if self._constraints is None:
            self._constraints = Constraints(grammars)

    def device_seconds(self) -> Mapping[str, float]:
        """Seconds of verify steps and of draft rounds on the device, so far."""
        return {name: self.clock.seconds(name) for name in ("verify", "draft")}

    def close(self) -> None:
        """Nothing to release: the memory goes with the object."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Plans must come in the order in which they were made."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Give one step to the device. Plans must come in the order in which they were made.

        Nothing here waits for the device, unless it alone knows where a row begins and no graph serves the step.
        """
        last = self._last
        if last is not None and not plan.entries and self._is_like(plan, last):
            return self._repeat(plan, last)
        self._last = None
        bucket = None if self.fixed is None else self.fixed.find(plan.rows)
        if any(row.num_open for row in plan.rows) and not self._serves_open(plan, bucket):
            plan = self._close(plan)
        self._check(plan)
        ledger = None if self.features is None else self.features.ledger
        if ledger is not None:
            self._write_late(plan, ledger.left(plan))
        self._enter(plan.entries)
        self.pool.copy_pages(plan.copies)
        if not plan.rows:
            return Pending(plan.step_id, [], HostCopy([]), False, [], {}, ())
        groups = draw_groups(plan.rows)
        with self._verify_span(plan.rows):
            forward = self._forward(plan, groups, bucket)
            masks = None if self._constraints is None else self._constraints.masks(groups)
            settings = self._settings(groups)
            settled = None
            if self.draws is not None and forward.bucket is not None and masks is None:
                settled = self.draws.run(forward.bucket, settings)
            if settled is None:
                _, hidden, placed = forward.left()
                prompts = self._score_prompts(plan.rows, hidden.last_LD)
                tokens_R, scored = self._draw(groups, hidden.last_LD, placed, masks)
                accepted_G = self._verify(groups, tokens_R)
                self._append(groups, tokens_R, placed)
        if settled is not None:
            self._last = _Last(plan.rows, settled.bucket, groups, settings)
            return self._settle(plan, settled, groups, ledger)
        parts = [*scored, *(part for parts in prompts.values() for part in parts)]
        tensors = [tensor for part in parts for tensor in (part.tensors.chosen_L, part.tensors.top_LK, part.tensors.top_ids_LK)]
        # Before the drafter: the next step is planned while it drafts.
        copy = HostCopy([tokens_R, *([] if accepted_G is None else [accepted_G]), *tensors])
        if ledger is not None:
            self._write_late(plan, ledger.due(plan.rows))
        num_proposed = self._propose(forward, groups, accepted_G)
        watched, proposals = None, HostCopy([])
        if self._constraints is not None and masks is not None:
            watched = self._constraints.watch(groups, accepted_G, num_proposed, self.tokens_SL)
        if watched is not None and watched.proposals_AK is not None:
            proposals = HostCopy([watched.proposals_AK])
        is_verify = accepted_G is not None
        return Pending(plan.step_id, groups, copy, is_verify, scored, prompts, num_proposed, watched, proposals)

    def _is_like(self, plan: StepPlan, last: _Last) -> bool:
        """Whether a step differs from the last one, which was all graphs, in where its rows begin and in their pages alone."""
        return self.fixed is not None and is_repeated(plan.rows, last.rows) and self.fixed.fits(plan.rows)

    def _repeat(self, plan: StepPlan, last: _Last) -> Pending:
        """Launch a step like the last one: what to launch is known, and by which settings to draw."""
        assert self.fixed is not None
        assert self.draws is not None
        self._check(plan)
        features = self.features
        ledger = None if features is None else features.ledger
        if ledger is not None and ledger.has_same_tables(plan.rows, last.rows) and ledger.goes_on():
            ledger = None  # nothing of the drafter's own KV is to be written before this step or behind it
        if ledger is not None:
            self._write_late(plan, ledger.left(plan))
        self.pool.copy_pages(plan.copies)
        with self._verify_span(last.rows):
            self.fixed.run(plan, last.bucket)
            self._last = _Last(plan.rows, last.bucket, last.groups, last.settings)
            settled = self.draws.run(last.bucket, last.settings)
        assert settled is not None, "no graph serves what one has served before"
        return self._settle(plan, settled, last.groups, ledger)

    def _settle(self, plan: StepPlan, settled: Settled, groups: Sequence[DrawGroup], ledger: Ledger | None) -> Pending:
        """What comes behind draws that were a graph: they go to the host, and the drafter's work begins."""
        copy = settled.copy.send()
        if ledger is not None:
            self._write_late(plan, ledger.due(plan.rows))
        wanted = tuple([group.num_wanted for group in groups])
        if any(wanted) and self.draws is not None and self.drafting is not None and self.drafting.fixed is not None:
            with self.clock.span("draft"):
                # For all rows at once: what was not wanted is not verified, and the next draw is written over it.
                self.draws.begin_round(settled.bucket)
                self.drafting.fixed.run_settled(settled.num_rows, max(wanted))
        return Pending(plan.step_id, groups, copy, True, [], {}, wanted)

    def _verify_span(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        return self.clock.span("verify") if has_drafts(rows) else nullcontext()

    def _check(self, plan: StepPlan) -> None:
        """Look at every page index of a step, if that is asked for."""
        if env.CHECK_PAGES.is_set():
            num_slots, room = self.tokens_SL.shape[0] - 1, self.tokens_SL.shape[1]
            check_step(plan, self.pool.layout, num_slots=num_slots, room=room, num_slabs=self.pool.num_slabs)

    def _serves_open(self, plan: StepPlan, bucket: Bucket | None) -> bool:
        """Whether graphs serve all of a step, so that nothing in it needs to be known here."""
        if self.fixed is None or self.draws is None or bucket is None or self.fixed.step_of(bucket).graph is None:
            return False
        entries = [self._entry(row.slot) for row in plan.rows for _ in range(row.num_new)]
        is_free = self._constraints is None or all(entry.grammar is None for entry in entries)
        return is_free and self.draws.serves(bucket, [entry.sampling for entry in entries])

    def _close(self, plan: StepPlan) -> StepPlan:
        """The same step with rows that begin where the device says. Waits for the steps before it."""
        accepted = self.accepted_S.tolist()
        return plan.with_rows(moved(row, accepted[row.slot]) if row.num_open else row for row in plan.rows)

    def _forward(self, plan: StepPlan, groups: Sequence[DrawGroup], bucket: Bucket | None) -> _Forward:
        """Fill and forward: in a fixed shape where there is one for these rows, else in the step's own."""
        fixed = self.fixed
        if fixed is not None and bucket is not None:
            fixed.run(plan, bucket)
            if draws_follow_rows(plan.rows, groups):
                return _Forward(bucket, lambda: fixed.left(plan, bucket))
            return _Forward(None, lambda: (*fixed.left(plan, bucket)[:2], None))
        batch = fill(plan, self.pool.layout, self.tokens_SL, self.tokens_SL.device, num_slabs=self.pool.num_slabs)
        self.model.plan(batch, self.pool, self.backends)
        features = self.features
        hidden = self.model.forward(batch, self.pool, self.backends, () if features is None else features.drafter.taps)
        if features is not None:
            features.leave(plan.rows, batch, hidden.tapped)
        return _Forward(None, lambda: (batch, hidden, None))

    def _enter(self, entries: Sequence[Entry]) -> None:
        """Sequences take their slots; their tokens go to the device in one copy."""
        if not entries:
            return
        tokens = on_device(list(chain.from_iterable(entry.token_ids for entry in entries)), self.tokens_SL.device, torch.int32)
        begin = 0
        for entry in entries:
            end = begin + len(entry.token_ids)
            self.tokens_SL[entry.slot, : end - begin].copy_(tokens[begin:end])
            self._entries[entry.slot] = entry
            begin = end
        if self._constraints is not None:
            self._constraints.enter(entries)

    def _entry(self, slot: int) -> Entry:
        entry = self._entries[slot]
        assert entry is not None, f"slot {slot} is in use, but no sequence has entered it"
        return entry

    def _settings(self, groups: Sequence[DrawGroup]) -> list[Sampling]:
        """Those of each draw."""
        settings: list[Sampling] = []
        for group in groups:
            settings += [self._entry(group.slot).sampling] * group.size
        return settings

    def _score_prompts(self, rows: Sequence[Row], last_LD: Tensor) -> dict[int, list[_Scored]]:
        """By slot: log-probabilities of the prompt tokens that follow the tokens with logits, where they are asked for."""
        found: dict[int, list[_Scored]] = {}
        begin = 0
        for row in rows:
            if row.is_prompt_logprobs:
                entry = self._entry(row.slot)
                first = row.start + row.num_new - row.num_logits + 1  # position of the token that the first logits are for
                count = max(0, min(row.num_logits, entry.prompt_len - first))
                num_top = entry.sampling.prompt_logprobs or 0
                found[row.slot] = []
                for part in _parts(count):
                    logits_LV = self.model.logits(last_LD[begin + part.start : begin + part.stop])
                    chosen_L = self.tokens_SL[row.slot, first + part.start : first + part.stop].long()
                    tensors = compute_logprobs(logits_LV, chosen_L, num_top)
                    chosen = list(entry.token_ids[first + part.start : first + part.stop])
                    found[row.slot].append(_Scored(chosen, [num_top] * len(chosen), tensors))
            begin += row.num_logits
        return found

    def _draw(
        self, groups: Sequence[DrawGroup], last_LD: Tensor, placed: Placed | None, masks: StepMasks | None = None
    ) -> tuple[Tensor, list[_Scored]]:
        """Draw all tokens of the step, as if every draft were accepted: tokens [R], and the log-probabilities asked for.

        `placed` has the draws' positions on the device already, where they are those of the step's tokens. `masks` are what
        grammars allow.
        """
        slots = [group.slot for group in groups for _ in range(group.size)]
        sources = [group.source + index for group in groups for index in range(group.size)]
        positions = [group.position + index for group in groups for index in range(group.size)]
        entries = [self._entry(slot) for slot in slots]
        tokens, scored = [torch.empty(0, dtype=torch.int64, device=last_LD.device)], []
        for part in _parts(len(slots)):
            logits_RV = self._logits(last_LD, sources[part])
            settings = [entry.sampling for entry in entries[part]]
            history = History(self.tokens_SL, slots[part], [entry.prompt_len for entry in entries[part]])
            extra: dict[str, Any] = {} if placed is None else {"positions_R": placed.positions_R[part]}
            if masks is not None:
                extra["masks"] = masks.of(part)
            tokens_R = self._sample(logits_RV, settings, positions[part], history, **extra)
            tokens.append(tokens_R)
            wanted = {row: one.logprobs for row, one in enumerate(settings) if one.logprobs is not None}
            if wanted:
                rows, counts = list(wanted), list(wanted.values())
                if len(rows) < len(settings):
                    index = on_device(rows, logits_RV.device)
                    logits_RV, tokens_R = logits_RV[index], tokens_R[index]
                tensors = compute_logprobs(logits_RV, tokens_R, max(counts))
                scored.append(_Scored([part.start + row for row in rows], counts, tensors))
        return tokens[1] if len(tokens) == 2 else torch.cat(tokens), scored

    def _logits(self, last_LD: Tensor, sources: list[int]) -> Tensor:
        """Logits of the given tokens; those that several samples draw from are computed once."""
        if sources == list(range(last_LD.shape[0])):
            return self.model.logits(last_LD)
        distinct = sorted(set(sources))
        logits_LV = self.model.logits(last_LD[on_device(distinct, last_LD.device)])
        if sources == distinct:
            return logits_LV
        place = {source: index for index, source in enumerate(distinct)}
        return logits_LV[on_device([place[source] for source in sources], last_LD.device)]

    def _verify(self, groups: Sequence[DrawGroup], tokens_R: Tensor) -> Tensor | None:
        """How many drafts each group keeps, [G]; None where no row has drafts. Before the draws are written over them."""
        width = max((group.size for group in groups), default=1)
        if width == 1:
            return None
        device = tokens_R.device
        # Padding repeats a group's last draw; its columns are not compared.
        draws_GK = on_device([[group.first + min(k, group.num_drafts) for k in range(width)] for group in groups], device)
        facts = [(group.slot, group.position, group.num_drafts) for group in groups]
        slots_G, positions_G, num_drafts_G = on_device(facts, device).T
        column_K = torch.arange(width, device=device)
        positions_GK = torch.minimum(positions_G[:, None] + column_K, (positions_G + num_drafts_G)[:, None])
        accepted_G = self.accept(tokens_R[draws_GK], self.tokens_SL[slots_G[:, None], positions_GK], num_drafts_G)
        self.accepted_S.index_copy_(0, slots_G, accepted_G.to(self.accepted_S.dtype))
        return accepted_G

    def _append(self, groups: Sequence[DrawGroup], tokens_R: Tensor, placed: Placed | None) -> None:
        """Write the draws to the slots. What lies behind the first rejected draft is no token yet, and written again."""
        if not groups:
            return
        if placed is None:
            width = self.tokens_SL.shape[1]
            places = [group.slot * width + group.position + index for group in groups for index in range(group.size)]
            places_R = on_device(places, tokens_R.device)
        else:
            places_R = placed.places_R
        self.tokens_SL.view(-1).index_copy_(0, places_R, tokens_R.to(self.tokens_SL.dtype))

    def _write_late(self, plan: StepPlan, late: Sequence[LateWrite]) -> None:
        """A drafter's own KV of earlier tokens."""
        if not late or self.features is None:
            return
        if env.CHECK_PAGES.is_set():
            check_late(plan, late, self.pool.layout, self.features.group, num_slabs=self.pool.num_slabs)
        self.features.write(late)

    def _propose(self, forward: _Forward, groups: Sequence[DrawGroup], accepted_G: Tensor | None) -> tuple[int, ...]:
        """Let the drafter write its proposals behind each sequence; returns how many there are for each group."""
        wanted = tuple([group.num_wanted for group in groups])
        if self.drafting is None or not any(wanted):
            return (0,) * len(groups)
        with self.clock.span("draft"):
            drafted = [index for index, count in enumerate(wanted) if count]
            if accepted_G is not None and len(drafted) < accepted_G.shape[0]:
                accepted_G = accepted_G[on_device(drafted, accepted_G.device)]
            drawers = [Drawer(one.slot, one.row, one.source, one.position) for one in (groups[index] for index in drafted)]
            batch, hidden, _ = forward.left()
            self.drafting.propose(drawers, batch, hidden.last_LD, accepted_G, max(wanted))
        return wanted


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward pass that was launched."""

    bucket: Bucket | None  # the fixed shape that it ran in, if there is a draw for each of its tokens
    left: Callable[[], tuple[ForwardBatch, Hidden, Placed | None]]  # the batch, what came out, where draws go; no padding


class _Last(NamedTuple):
    """A step of fixed shape whose draws were a graph too, for one after it that is like it."""

    rows: tuple[Row, ...]
    bucket: Bucket
    groups: Sequence[DrawGroup]
    settings: list[Sampling]


class Pending(NamedTuple):
    """A step that was launched: its draws are on their way to the host."""

    step_id: int
    groups: Sequence[DrawGroup]
    copy: HostCopy  # drawn tokens, accepted drafts if any row has drafts, log-probabilities
    has_drafts: bool
    scored: Sequence[_Scored]
    prompts: Mapping[int, Sequence[_Scored]]
    num_proposed: Sequence[int]
    watched: Watched | None = None
    proposals: HostCopy | None = None  # those that grammars must know

    def result(self) -> StepResult:
        """Wait for this step and tell what it drew."""
        values = iter(self.copy.lists())
        tokens, accepted = next(values, []), next(values) if self.has_drafts else [0] * len(self.groups)
        if self.scored or self.prompts:  # beside log-probabilities whole numbers come as floats
            tokens, accepted = list(map(int, tokens)), list(map(int, accepted))

        def mappings(part: _Scored, chosen: Sequence[int]) -> Iterator[Logprobs]:
            return as_mappings(chosen, next(values), next(values), next(values), part.counts)

        logprobs: dict[int, Logprobs] = {}
        for part in self.scored:
            logprobs.update(zip(part.of, mappings(part, [tokens[draw] for draw in part.of]), strict=True))
        drawn = []
        # Rows that pad a step of fixed shape are behind the groups'.
        for index, (group, num_kept, count) in enumerate(zip(self.groups, accepted, self.num_proposed, strict=False)):
            first, end = group.first, group.first + num_kept + 1
            kept = tuple(tokens[first:end])
            own = tuple([logprobs[draw] for draw in range(first, end) if draw in logprobs]) if logprobs else ()
            fault = "" if self.watched is None else self.watched.accept(index, kept)
            drawn.append(Drawn(group.slot, kept, own, count, fault))
        prompts = {
            slot: tuple(one for part in parts for one in mappings(part, part.of)) for slot, parts in self.prompts.items()
        }
        if self.watched is not None:
            self.watched.take_proposals(next(iter(self.proposals.lists()), []) if self.proposals is not None else [])
        return StepResult(self.step_id, tuple(drawn), prompts)


def _sampler_for(device: torch.device) -> Callable[..., Tensor]:
    """`sample`, or what does the same on a GPU and takes the positions there too, if it is given them."""
    if device.type != "cuda":
        return lambda *arguments, positions_R=None, masks=None: sample(*arguments, masks=masks)
    from culet.sampling.on_gpu import GpuSampler  # needs Triton

    return GpuSampler().sample


def _parts(count: int) -> Iterator[slice]:
    """Slices of at most LOGITS_ROWS that make up `count`."""
    for begin in range(0, count, LOGITS_ROWS):
        yield slice(begin, min(begin + LOGITS_ROWS, count))
