"""The grammars of the sequences in a runner's slots. They give masks for a step's draws, and advance by the drawn tokens.

A mask needs the tokens before it on the host. So the scheduler plans no row with a grammar before the result of the previous
row is known. A drafter's proposals come to the host with the draws that they follow, because the next step's masks depend on
them.

Shapes: R draws of a step · A draws with a mask · W words of 32 tokens · G groups of draws · K proposals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.errors import InternalError
from culet.kernels.host_transfer import HostCopy, on_device
from culet.runner.draw_plan import DrawGroup
from culet.sampling.sampler import TokenMasks
from culet.types import Entry

if TYPE_CHECKING:  # the grammar engine is only loaded with the first grammar
    from culet.structured.compiler import GrammarCompiler
    from culet.structured.matcher import Matcher


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step's draws. `bits_AW[a]` is the mask of draw `draws[a]`."""

    draws: NDArray[np.int64]
    bits_AW: NDArray[np.int32]

    def of(self, part: slice) -> TokenMasks | None:
        """Return the masks of the draws in `part`, numbered from the beginning of `part`."""
        begin, end = np.searchsorted(self.draws, (part.start, part.stop))
        if begin == end:
            return None
        return TokenMasks((self.draws[begin:end] - part.start).tolist(), torch.from_numpy(self.bits_AW[begin:end]))


@dataclass(frozen=True, slots=True)
class StepGrammars:
    """The grammars of the sequences that drew in a step, by index of their group. They advance by the drawn tokens."""

    grammars: dict[int, Matcher]
    num_proposed: Sequence[int]  # number of proposals for each grammar
    proposals: HostCopy  # [A, K], on its way to the host

    def accept(self, group: int, token_ids: Sequence[int]) -> str:
        """Advance the grammar of a group by its tokens. Return why it cannot continue, or an empty string."""
        grammar = self.grammars.get(group)
        if grammar is None:
            return ""
        grammar.accept(token_ids)
        return grammar.fault

    def take_proposals(self) -> None:
        """Wait for the proposals and give them to the grammars."""
        flat = next(iter(self.proposals.lists()), [])
        width = len(flat) // max(1, len(self.grammars))
        for index, (grammar, count) in enumerate(zip(self.grammars.values(), self.num_proposed, strict=True)):
            grammar.drafts = tuple(int(token_id) for token_id in flat[index * width : index * width + count])


class SlotGrammars:
    """The grammar of each slot's sequence, if it has one."""

    def __init__(self) -> None:
        self.grammars: GrammarCompiler | None = None  # compiles grammars. Without it, no entry may have one.
        self._by_slot: dict[int, Matcher] = {}

    def enter(self, entries: Iterable[Entry]) -> None:
        """Start the grammars of sequences that take their slots."""
        for entry in entries:
            self._by_slot.pop(entry.slot, None)
            if entry.grammar is None:
                continue
            if self.grammars is None:
                raise InternalError(f"slot {entry.slot} has a grammar, but the runner was built without grammars")
            self._by_slot[entry.slot] = self.grammars.start(entry.grammar, entry.token_ids, entry.prompt_len)

    def bind(self, groups: Sequence[DrawGroup]) -> bool:
        """Return whether any of these draws has a grammar."""
        return bool(self._by_slot) and any(group.slot in self._by_slot for group in groups)

    def masks(self, groups: Sequence[DrawGroup]) -> StepMasks | None:
        """Return the masks for the draws of `groups`, or None if all are free. Runs while the device is busy with the step."""
        if not self.bind(groups):
            return None
        assert self.grammars is not None
        bound = [group for group in groups if group.slot in self._by_slot]
        bits_AW = self.grammars.masks([(self._by_slot[group.slot], group.num_drafts) for group in bound])
        draws = [group.first + index for group in bound for index in range(group.num_drafts + 1)]
        return StepMasks(np.array(draws), bits_AW)

    def follow(
        self, groups: Sequence[DrawGroup], accepted_G: Tensor | None, num_proposed: Sequence[int], tokens_SL: Tensor
    ) -> StepGrammars | None:
        """Start sending the proposals that the grammars need to the host. Call after the drafter has written them."""
        bound = [index for index, group in enumerate(groups) if group.slot in self._by_slot] if self._by_slot else []
        if not bound:
            return None
        counts = [num_proposed[index] for index in bound]
        proposals = []
        if width := max(counts):
            index_A = on_device(bound, tokens_SL.device)
            facts = [(groups[index].slot, groups[index].position) for index in bound]
            slots_A, length_A = on_device(facts, tokens_SL.device).T
            length_A = length_A + 1 if accepted_G is None else length_A + 1 + accepted_G[index_A]
            column_K = torch.arange(width, device=tokens_SL.device)
            # A sequence near the end of its slot has fewer proposals than columns.
            places_AK = (length_A[:, None] + column_K).clamp_(max=tokens_SL.shape[1] - 1)
            proposals = [tokens_SL[slots_A[:, None], places_AK].long()]
        return StepGrammars({index: self._by_slot[groups[index].slot] for index in bound}, counts, HostCopy(proposals))
