"""Make the draws of a step of any shape, with logits, samples, log-probabilities and accepted drafts.

Shapes: S slots · L a slot's tokens, or tokens whose logits are needed · R draws · G groups of draws, one per slot that draws ·
K draws of the longest group · X draws and rows of a bucket · D model · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from culet.kernels.host_transfer import HostCopy, RepeatedCopy, on_device
from culet.models.gemma4 import LOGITS_ROWS
from culet.runner.draw_plan import DrawGroup
from culet.runner.grammar_masks import StepMasks
from culet.runner.target import ForwardOutput, NextTokens, Target
from culet.sampling.logprobs import LogprobTensors, compute_logprobs
from culet.sampling.sampler import EagerSampler, History, Sampler
from culet.sampling.verify import Accept, count_accepted
from culet.types import Entry, Row


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities on the device, of draws (by index) or of prompt tokens (by id)."""

    of: list[int]
    counts: list[int]  # how many of the most likely tokens are wanted for each
    tensors: LogprobTensors


@dataclass(frozen=True, slots=True)
class StepDraws:
    """The draws of a step, on the device."""

    tokens_R: Tensor
    accepted_G: Tensor | None  # number of accepted drafts in each group, or None if no row has drafts
    scored: Sequence[Scored] = ()
    prompts: dict[int, list[Scored]] = field(default_factory=dict)  # by slot

    def send(self) -> HostCopy:
        """Start to copy tokens, accepted drafts and log-probabilities to the host."""
        parts = [*self.scored, *(part for parts in self.prompts.values() for part in parts)]
        tensors = [tensor for part in parts for tensor in (part.tensors.chosen_L, part.tensors.top_LK, part.tensors.top_ids_LK)]
        return HostCopy([self.tokens_R, *([] if self.accepted_G is None else [self.accepted_G]), *tensors])


@dataclass(frozen=True, slots=True)
class FixedDrawn:
    """The draws of a fixed-shape step (`FixedDraws`), on the device. Valid until the same bucket draws again."""

    out_X: Tensor  # int64, the draws of all tokens, then how many drafts each row keeps, both with padding
    copy: RepeatedCopy  # copies `out_X` to the host

    def send(self) -> HostCopy:
        """Start to copy tokens and accepted drafts to the host."""
        return self.copy.send()


class Draws:
    """Draws tokens after the forward pass of any step, and writes them to the slots."""

    def __init__(self, target: Target, tokens_SL: Tensor, accepted_S: Tensor) -> None:
        self.target, self.tokens_SL, self.accepted_S = target, tokens_SL, accepted_S
        self.accept: Accept = count_accepted
        self._sampler = _sampler_for(target.device)

    def run(
        self,
        rows: Sequence[Row],
        groups: Sequence[DrawGroup],
        entries: Sequence[Entry | None],
        output: ForwardOutput,
        masks: StepMasks | None,
    ) -> StepDraws:
        """Draw all tokens of a step. `entries` holds the entry of each slot, and `masks` the tokens that grammars allow."""
        last_LD = output.hidden.last_LD
        prompts = self._score_prompts(rows, entries, last_LD)
        tokens_R, scored = self._draw(groups, entries, last_LD, output.next_tokens, masks)
        accepted_G = self._verify(groups, tokens_R)
        self._append(groups, tokens_R, output.next_tokens)
        return StepDraws(tokens_R, accepted_G, scored, prompts)

    def _score_prompts(self, rows: Sequence[Row], entries: Sequence[Entry | None], last_LD: Tensor) -> dict[int, list[Scored]]:
        """Return the requested log-probabilities of the prompt tokens that follow the tokens with logits, by slot."""
        scored: dict[int, list[Scored]] = {}
        begin = 0
        for row in rows:
            if row.is_prompt_logprobs:
                entry = entry_of(entries, row.slot)
                first = row.start + row.num_new - row.num_logits + 1  # position of the token that the first logits are for
                count = max(0, min(row.num_logits, entry.prompt_len - first))
                num_top = entry.sampling.prompt_logprobs or 0
                scored[row.slot] = []
                for part in _parts(count):
                    logits_LV = self.target.logits(last_LD[begin + part.start : begin + part.stop])
                    chosen_L = self.tokens_SL[row.slot, first + part.start : first + part.stop].long()
                    tensors = compute_logprobs(logits_LV, chosen_L, num_top)
                    chosen = list(entry.token_ids[first + part.start : first + part.stop])
                    scored[row.slot].append(Scored(chosen, [num_top] * len(chosen), tensors))
            begin += row.num_logits
        return scored

    def _draw(
        self,
        groups: Sequence[DrawGroup],
        entries: Sequence[Entry | None],
        last_LD: Tensor,
        next_tokens: NextTokens | None,
        masks: StepMasks | None,
    ) -> tuple[Tensor, list[Scored]]:
        """Draw as if every draft were accepted. Return tokens [R] and the requested log-probabilities."""
        slots = [group.slot for group in groups for _ in range(group.size)]
        sources = [group.source + index for group in groups for index in range(group.size)]
        positions = [group.position + index for group in groups for index in range(group.size)]
        drawing = [entry_of(entries, slot) for slot in slots]
        tokens, scored = [torch.empty(0, dtype=torch.int64, device=last_LD.device)], []
        for part in _parts(len(slots)):
            logits_RV = self._logits(last_LD, sources[part])
            settings = [entry.sampling for entry in drawing[part]]
            history = History(self.tokens_SL, slots[part], [entry.prompt_len for entry in drawing[part]])
            positions_R = None if next_tokens is None else next_tokens.positions_R[part]
            part_masks = None if masks is None else masks.of(part)
            tokens_R = self._sampler.sample(logits_RV, settings, positions[part], history, positions_R, masks=part_masks)
            tokens.append(tokens_R)
            wanted = {row: sampling.logprobs for row, sampling in enumerate(settings) if sampling.logprobs is not None}
            if wanted:
                wanted_rows, counts = list(wanted), list(wanted.values())
                if len(wanted_rows) < len(settings):
                    index = on_device(wanted_rows, logits_RV.device)
                    logits_RV, tokens_R = logits_RV[index], tokens_R[index]
                tensors = compute_logprobs(logits_RV, tokens_R, max(counts))
                scored.append(Scored([part.start + row for row in wanted_rows], counts, tensors))
        return tokens[1] if len(tokens) == 2 else torch.cat(tokens), scored

    def _logits(self, last_LD: Tensor, sources: list[int]) -> Tensor:
        """Return the logits of the given tokens. They are computed once if several samples draw from the same token."""
        if sources == list(range(last_LD.shape[0])):
            return self.target.logits(last_LD)
        distinct = sorted(set(sources))
        logits_LV = self.target.logits(last_LD[on_device(distinct, last_LD.device)])
        if sources == distinct:
            return logits_LV
        place = {source: index for index, source in enumerate(distinct)}
        return logits_LV[on_device([place[source] for source in sources], last_LD.device)]

    def _verify(self, groups: Sequence[DrawGroup], tokens_R: Tensor) -> Tensor | None:
        """Return how many drafts each group keeps, [G], or None if no row has drafts. The drafts are still in the slots."""
        width = max((group.size for group in groups), default=1)
        if width == 1:
            return None
        device = tokens_R.device
        # Padding repeats a group's last draw. Its columns are not compared.
        draws_GK = on_device([[group.first + min(k, group.num_drafts) for k in range(width)] for group in groups], device)
        facts = [(group.slot, group.position, group.num_drafts) for group in groups]
        slots_G, positions_G, num_drafts_G = on_device(facts, device).T
        column_K = torch.arange(width, device=device)
        positions_GK = torch.minimum(positions_G[:, None] + column_K, (positions_G + num_drafts_G)[:, None])
        accepted_G = self.accept(tokens_R[draws_GK], self.tokens_SL[slots_G[:, None], positions_GK], num_drafts_G)
        self.accepted_S.index_copy_(0, slots_G, accepted_G.to(self.accepted_S.dtype))
        return accepted_G

    def _append(self, groups: Sequence[DrawGroup], tokens_R: Tensor, next_tokens: NextTokens | None) -> None:
        """Write the draws to the slots. The next step overwrites the draws after the first rejected draft."""
        if not groups:
            return
        if next_tokens is None:
            width = self.tokens_SL.shape[1]
            places = [group.slot * width + group.position + index for group in groups for index in range(group.size)]
            places_R = on_device(places, tokens_R.device)
        else:
            places_R = next_tokens.places_R
        self.tokens_SL.view(-1).index_copy_(0, places_R, tokens_R.to(self.tokens_SL.dtype))


def entry_of(entries: Sequence[Entry | None], slot: int) -> Entry:
    entry = entries[slot]
    assert entry is not None, f"slot {slot} is in use, but no sequence has entered it"
    return entry


def _sampler_for(device: torch.device) -> Sampler:
    if device.type != "cuda":
        return EagerSampler()
    from culet.sampling.gpu_sampler import GpuSampler  # needs Triton

    return GpuSampler()


def _parts(count: int) -> Iterator[slice]:
    """Yield slices of at most LOGITS_ROWS that cover `count` rows."""
    for begin in range(0, count, LOGITS_ROWS):
        yield slice(begin, min(begin + LOGITS_ROWS, count))
