"""The target's next-token loss on packed rows, and its loss on held-out text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.learning.batches import Batch, Part, fixed_rows
from training.learning.loop import LossOf
from training.models.model import Target, next_token_loss

HEAD_TOKENS = 16_384  # logits computed at a time


def target_loss(target: Target, dtype: torch.dtype, head: object = None) -> LossOf:
    """Return a function for a batch's loss: the sum of cross-entropies and the number of goals."""
    head_loss = head or next_token_loss

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = target(batch.ids_BT, batch.first_BT, dtype).hidden_BTD.flatten(0, 1)
        goals, weight = batch.goals.flatten(), batch.is_goal.flatten().float()
        pieces = zip(hidden.split(HEAD_TOKENS), goals.split(HEAD_TOKENS), weight.split(HEAD_TOKENS), strict=True)
        losses = [head_loss(target, *piece) for piece in pieces]  # type: ignore[operator]
        return torch.stack(losses).sum(), weight.sum()

    return loss_of


def held_out_losses(
    loss_of: LossOf, parts: dict[str, Part], *, row_len: int, rows: int, device: torch.device
) -> dict[str, float]:
    """Return the nats per token of each held-out part, over one batch of rows.

    Gradients are computed too, so that the functions compiled for training can be used.
    """
    losses = {}
    for name, part in parts.items():
        total, weight = loss_of(fixed_rows({name: part}, row_len, rows).to(device))
        losses[name] = float((total / weight.clamp(min=1)).detach())
    return losses


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 20.0))
