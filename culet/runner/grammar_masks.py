"""Grammars of the sequences in a runner's slots: masks for a step's draws, and what was drawn on the way back to them.

A mask needs the tokens before it on the host, so the scheduler plans no row with a grammar before the last one's result is
known. Proposals of a drafter come to the host with the draws they follow, so that the next step's masks can go along them.
Shapes: R draws of a step · A draws with a mask · W words of 32 tokens · G groups of draws · K proposals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.kernels.host_transfer import on_device
from culet.runner.draw_plan import DrawGroup
from culet.sampling.sampler import TokenMasks
from culet.structured.compiler import GrammarCompiler
from culet.structured.matcher import Matcher
from culet.types import Entry


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of a step's draws: `bits_AW[a]` is for draw `draws[a]`."""

    draws: NDArray[np.int64]
    bits_AW: NDArray[np.int32]

    def of(self, part: slice) -> TokenMasks | None:
        """Those of the draws in `part`, counted from its beginning."""
        begin, end = np.searchsorted(self.draws, (part.start, part.stop))
        if begin == end:
            return None
        return TokenMasks((self.draws[begin:end] - part.start).tolist(), torch.from_numpy(self.bits_AW[begin:end]))


@dataclass(frozen=True, slots=True)
class Watched:
    """Sequences with a grammar that drew in a step: group number -> grammar. `proposals_AK` is still on the device."""

    grammars: dict[int, Matcher]
    counts: Sequence[int]  # proposals of each
    proposals_AK: Tensor | None

    def accept(self, group: int, token_ids: Sequence[int]) -> str:
        """Take over what a group drew; why its grammar cannot go on, or nothing."""
        grammar = self.grammars.get(group)
        if grammar is None:
            return ""
        grammar.accept(token_ids)
        return grammar.fault

    def take_proposals(self, flat: Sequence[int]) -> None:
        """The proposals have come to the host."""
        width = len(flat) // max(1, len(self.grammars))
        for index, (grammar, count) in enumerate(zip(self.grammars.values(), self.counts, strict=True)):
            grammar.drafts = tuple(int(token_id) for token_id in flat[index * width : index * width + count])


class Constraints:
    """Keeps the grammar of each slot's sequence, if it has one."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._by_slot: dict[int, Matcher] = {}

    def enter(self, entries: Iterable[Entry]) -> None:
        """Sequences take their slots."""
        for entry in entries:
            self._by_slot.pop(entry.slot, None)
            if entry.grammar is not None:
                self._by_slot[entry.slot] = self._grammars.start(entry.grammar, entry.token_ids, entry.prompt_len)

    def masks(self, groups: Sequence[DrawGroup]) -> StepMasks | None:
        """What the draws of `groups` may be; None where all are free. Computed while the device is busy with the step."""
        if not self._by_slot:
            return None
        bound = [group for group in groups if group.slot in self._by_slot]
        if not bound:
            return None
        bits_AW = self._grammars.masks([(self._by_slot[group.slot], group.num_drafts) for group in bound])
        draws = [group.first + index for group in bound for index in range(group.num_drafts + 1)]
        return StepMasks(np.array(draws), bits_AW)

    def watch(
        self, groups: Sequence[DrawGroup], accepted_G: Tensor | None, num_proposed: Sequence[int], tokens_SL: Tensor
    ) -> Watched | None:
        """What must come back to the host for the grammars' sake, after the drafter has written its proposals."""
        bound = [index for index, group in enumerate(groups) if group.slot in self._by_slot] if self._by_slot else []
        if not bound:
            return None
        counts = [num_proposed[index] for index in bound]
        proposals_AK = None
        if width := max(counts):
            index_A = on_device(bound, tokens_SL.device)
            facts = [(groups[index].slot, groups[index].position) for index in bound]
            slots_A, length_A = on_device(facts, tokens_SL.device).T
            length_A = length_A + 1 if accepted_G is None else length_A + 1 + accepted_G[index_A]
            column_K = torch.arange(width, device=tokens_SL.device)
            # A sequence near the end of its slot has fewer proposals than columns.
            places_AK = (length_A[:, None] + column_K).clamp_(max=tokens_SL.shape[1] - 1)
            proposals_AK = tokens_SL[slots_A[:, None], places_AK].long()
        return Watched({index: self._by_slot[groups[index].slot] for index in bound}, counts, proposals_AK)
