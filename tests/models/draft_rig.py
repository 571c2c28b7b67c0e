"""An MTP drafter over a Harness, with prompts of different lengths in one batch and the logits of every draft."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from culet.attention.batch import GroupBatch
from culet.attention.torch_cpu import TorchCPUBackend
from culet.config import DraftChoice
from culet.drafters.base import DraftBatch, open_drafter
from culet.drafters.mtp.drafter import MTPDrafter
from culet.kernels.types import Candidates
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import AFTER_FINAL_NORM, Gemma4
from culet.models.weights import load_model
from tests.models import tiny_assistants
from tests.models import tiny_checkpoints as tiny
from tests.models.harness import Harness, Track


@functools.cache
def target_of(shape: str, latent: bool = True) -> Gemma4:
    checkpoint = open_checkpoint(str(tiny.checkpoint_folder(shape)))
    return load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), latent=latent)


def choice_of(shape: str, **changes: object) -> DraftChoice:
    return DraftChoice("mtp", str(tiny_assistants.assistant_folder(shape)), **changes)  # type: ignore[arg-type]


class DraftRig:
    """A target, its drafter, and sequences whose prompts are computed. `position` is an option of the drafter."""

    def __init__(
        self,
        shape: str,
        *,
        latent: bool = True,
        position: str = "engine",
        page_tokens: int = 4,
        backend: type = TorchCPUBackend,  # the drafter's
    ) -> None:
        target = target_of(shape, latent)
        plan = open_drafter(choice_of(shape, position=position), target.spec)
        # The harness frees pages behind the next token's window immediately. The engine frees them after the draft round.
        self.harness = Harness(target, page_tokens=page_tokens, lookback=plan.lookback + 1)
        layout = self.harness.layout
        backends = {
            group.index: backend(group, plan.num_heads) for group in layout.groups if group.name in plan.readers(layout)
        }
        drafter = plan.build(target, backends)
        assert isinstance(drafter, MTPDrafter)
        self.drafter = drafter

    def read(self, prompts: Sequence[Sequence[int]], chunk: int = 10**9) -> tuple[list[Track], Tensor]:
        """Compute prompts in one batch. Return their tracks and their last tokens' hidden states after the final norm."""
        tracks = [self.harness.add(tokens) for tokens in prompts]
        hidden: dict[int, Tensor] = {}
        while any(track.start < len(track.tokens) for track in tracks):
            parts = []
            for track in (track for track in tracks if track.start < len(track.tokens)):
                size = min(chunk, len(track.tokens) - track.start)
                parts.append((track, size, int(track.start + size == len(track.tokens))))
            self.harness.step(parts, taps=(AFTER_FINAL_NORM,))
            assert self.harness.hidden is not None
            ended = [track for track, _, num_logits in parts if num_logits]
            hidden.update(zip((track.slot for track in ended), self.harness.hidden.tapped[AFTER_FINAL_NORM], strict=True))
        return tracks, torch.stack([hidden[track.slot] for track in tracks])

    def batch(self, tracks: Sequence[Track], newest: Sequence[int], hidden_RD: Tensor) -> DraftBatch:
        groups = []
        for group in self.harness.layout.groups:
            own = [track.pages[group.index] for track in tracks]
            width = max(max(pages) - min(pages) + 1 for pages in own)
            pages_BP = torch.zeros(len(tracks), width, dtype=torch.int32)
            for row, pages in enumerate(own):
                for page, slab in pages.items():
                    pages_BP[row, page - min(pages)] = slab
            first_B = torch.tensor([min(pages) * group.page_tokens for pages in own], dtype=torch.int32)
            groups.append(GroupBatch(pages_BP, first_B, torch.empty(0, dtype=torch.int64)))
        slots = torch.tensor([track.slot for track in tracks])
        lengths = torch.tensor([track.start for track in tracks])
        return DraftBatch(torch.tensor(newest), lengths, slots, hidden_RD, tuple(groups), torch.zeros(1, 1, dtype=torch.int32))

    @torch.inference_mode()
    def drafts(
        self, prompts: Sequence[Sequence[int]], newest: Sequence[int], num_drafts: int, chunk: int = 10**9
    ) -> tuple[list[list[int]], Tensor]:
        """Draft after each prompt and its newest token. Return tokens [R][K] and the logits [R, K, V] they were chosen by."""
        tracks, hidden_RD = self.read(prompts, chunk)
        head = self.drafter.model.head
        states: list[Tensor] = []
        candidates = head.candidates

        def spy(z_RD: Tensor) -> Candidates:
            states.append(z_RD)
            return candidates(z_RD)

        head.candidates = spy  # type: ignore[method-assign]
        try:
            tokens = self.drafter.propose(self.batch(tracks, newest, hidden_RD), self.harness.pool, num_drafts)
        finally:
            del head.candidates
        return tokens.tolist(), torch.stack([head.logits(z_RD) for z_RD in states], dim=1)
