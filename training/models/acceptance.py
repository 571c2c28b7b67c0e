"""How many tokens a draft round emits: the accepted drafts and the target's own token.

The engine accepts a draft that equals the target's draw, so acceptance can be counted on finished outputs. One pass over an
output gives the drafter's proposals at every position, and a walk over it counts the rounds that would have happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.learning.batches import Batch
from training.models.drafters import Assistant, DFlash
from training.models.model import Target

MAX_REPEATS = 3  # outputs that repeat an 8-gram this often are left out
ANCHORS_AT_ONCE = 64


@dataclass(frozen=True)
class Output:
    """A prompt and the target's answer."""

    prompt: Sequence[int]
    tokens: Sequence[int]

    @property
    def is_repetitive(self) -> bool:
        grams = Counter(tuple(self.tokens[index : index + 8]) for index in range(len(self.tokens) - 7))
        return bool(grams) and max(grams.values()) >= MAX_REPEATS


@dataclass(frozen=True)
class Acceptance:
    """The counts over the outputs."""

    num_outputs: int
    num_repetitive: int  # left out
    tokens_per_verify: float
    by_draft: tuple[float, ...]  # share of the rounds in which the first, second, ... draft was accepted


def mtp_drafts(target: Target, assistant: Assistant, batch: Batch, num_drafts: int, dtype: torch.dtype) -> Tensor:
    """Return [B, T, num_drafts]. Column p has the proposals from p + 2 on, with tokens 0 .. p cached and p + 1 the newest."""
    passed = target(batch.ids_BT, batch.first_BT, dtype)
    turn = target.turns(batch.ids_BT.shape[1], batch.ids_BT.device)
    hidden, drafts = passed.hidden_BTD, []
    ids = batch.ids_BT.long()
    for step in range(1, num_drafts + 1):
        embedded = target.embed(ids.roll(-step, 1), dtype)
        state = assistant.step(embedded, hidden, passed.shared, turn, batch.first_BT)
        drafts.append(torch.stack([assistant.logits(row).argmax(-1) for row in state]))
        hidden = assistant.next_hidden(state)
    return torch.stack(drafts, -1)


def dflash_drafts(target: Target, drafter: DFlash, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return [B, T, block - 1]. Column p has the proposals from p + 2 on, with tokens 0 .. p cached and p + 1 the newest."""
    passed = target(batch.ids_BT, batch.first_BT, dtype, drafter.shape.taps)
    features = drafter.features(passed)
    B, T = batch.ids_BT.shape
    ids, first = batch.ids_BT.long(), batch.first_BT
    drafts = []
    for begin in range(0, T, ANCHORS_AT_ONCE):
        place = torch.arange(begin, min(T, begin + ANCHORS_AT_ONCE), device=ids.device)
        anchor = (place + 1).clamp(max=T - 1).expand(B, -1)
        states = drafter(target, features, ids.gather(1, anchor), anchor, first.gather(1, place.expand(B, -1)).long())
        drafts.append(torch.stack([target.logits(row[:, 1:]).argmax(-1) for row in states]))
    return torch.cat(drafts, 1)


def as_batch(outputs: Sequence[Output], row_len: int, device: torch.device) -> Batch:
    """Return a batch with one output per row, preceded by its prompt."""
    ids = torch.zeros(len(outputs), row_len, dtype=torch.int32)
    for row, output in enumerate(outputs):
        text = [*output.prompt, *output.tokens]
        ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    first = torch.zeros_like(ids)
    return Batch(ids.to(device), first.to(device), torch.ones_like(ids, dtype=torch.bool, device=device))


def count(outputs: Sequence[Output], drafts: Sequence[Tensor], num_drafts: int) -> Acceptance:
    """Count acceptance. `drafts[i]` [T, columns] has the drafts at each position of output i. The first token has no drafts."""
    rounds = emitted = 0
    accepted_at = [0] * num_drafts
    kept = [(output, own) for output, own in zip(outputs, drafts, strict=True) if not output.is_repetitive]
    for output, own in kept:
        text = [*output.prompt, *output.tokens]
        proposals = own[: len(text), :num_drafts].tolist()
        newest = len(output.prompt)
        while newest + 1 < len(text):
            coming, proposed = text[newest + 1 :], proposals[newest - 1]
            accepted = 0
            while accepted < min(num_drafts, len(coming)) and proposed[accepted] == coming[accepted]:
                accepted_at[accepted] += 1
                accepted += 1
            num_emitted = min(accepted + 1, len(coming))
            rounds, emitted, newest = rounds + 1, emitted + num_emitted, newest + num_emitted
    shares = tuple(round(num_accepted / max(rounds, 1), 4) for num_accepted in accepted_at)
    return Acceptance(len(outputs), len(outputs) - len(kept), round(emitted / max(rounds, 1), 4), shares)


@torch.no_grad()
def measure(
    target: Target, drafter: Assistant | DFlash, outputs: Sequence[Output], *, num_drafts: int, row_len: int, dtype: torch.dtype
) -> Acceptance:
    """Return the acceptance over outputs of the target that fit rows of `row_len`."""
    device = target.embedding.device
    fitting = [output for output in outputs if len(output.prompt) + len(output.tokens) <= row_len]
    drafts: list[Tensor] = []
    for begin in range(0, len(fitting), 32):
        batch = as_batch(fitting[begin : begin + 32], row_len, device)
        if isinstance(drafter, Assistant):
            drafts.extend(mtp_drafts(target, drafter, batch, num_drafts, dtype).cpu())
        else:
            drafts.extend(dflash_drafts(target, drafter, batch, dtype).cpu())
    return count(fitting, drafts, num_drafts)
