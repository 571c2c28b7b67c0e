"""The drafters' losses: the target's sharpened next-token distribution, at the positions where serving uses them.

A draft is the drafter's likeliest token, so the target's likeliest token is what matters. The sharpened distribution also says
how sure the target is, which argmax labels do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.learning.batches import Batch
from training.learning.loop import LossOf
from training.models.drafters import Assistant, DFlash
from training.models.model import Target

SHARPNESS = 1.5  # factor on the teacher's logits
NUM_CHAINED = 3
CHAIN_WEIGHTS = (1.0, 0.8, 0.6)  # a later draft counts only if the earlier ones were accepted
BLOCK_DECAY = 0.8  # the same for the positions of a block


def soft_loss(logits_LV: Tensor, teacher_LV: Tensor, weight_L: Tensor) -> Tensor:
    """Return the sum over tokens of weight * cross-entropy with the teacher's sharpened distribution."""
    chance = (teacher_LV.float() * SHARPNESS).softmax(-1)
    return -((chance * F.log_softmax(logits_LV.float(), -1)).sum(-1) * weight_L).sum()


def mtp_loss(target: Target, assistant: Assistant, dtype: torch.dtype, per_row: object = None) -> LossOf:
    """Return a function for the loss at all positions of a batch, each with a chain of three steps."""
    row_loss = per_row or mtp_row_loss

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        ids, first, T = batch.ids_BT.long(), batch.first_BT, batch.ids_BT.shape[1]
        with torch.no_grad():
            passed = target(ids, first, dtype)
            turn = target.turns(T, ids.device)
            embedded = [target.embed(ids.roll(-step, 1), dtype) for step in range(1, NUM_CHAINED + 1)]
        hidden, place = passed.hidden_BTD, torch.arange(T, device=ids.device)
        losses, weights = [], []
        for step in range(1, NUM_CHAINED + 1):
            state = assistant.step(embedded[step - 1], hidden, passed.shared, turn, first)
            goal = place + step + 1
            is_goal = (goal < T) & (first.roll(-step - 1, 1) <= place) & batch.learnt_BT.roll(-step - 1, 1)
            weight = is_goal.float() * CHAIN_WEIGHTS[step - 1]
            teacher = passed.hidden_BTD.roll(-step, 1)
            for rows in range(0, len(ids), 8):
                part = slice(rows, rows + 8)
                losses.append(row_loss(target, assistant, state[part], teacher[part], weight[part]))  # type: ignore[operator]
            weights.append(weight.sum())
            hidden = assistant.next_hidden(state)
        return torch.stack(losses).sum(), torch.stack(weights).sum()

    return loss_of


def mtp_row_loss(target: Target, assistant: Assistant, state: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of some rows, from the assistant's states and the target's hidden states."""
    with torch.no_grad():
        wanted = target.logits(teacher.flatten(0, 1))
    return soft_loss(assistant.logits(state.flatten(0, 1)), wanted, weight.flatten())


def dflash_loss(target: Target, drafter: DFlash, dtype: torch.dtype, *, anchors: int, per_row: object = None) -> LossOf:
    """Return a function for the loss of `anchors` blocks at random positions of each row."""
    row_loss = per_row or dflash_row_loss
    K = drafter.shape.block_size
    decay = BLOCK_DECAY ** torch.arange(K - 1, device=target.embedding.device)

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        ids, first = batch.ids_BT.long(), batch.first_BT.long()
        B, T = ids.shape
        with torch.no_grad():
            passed = target(ids, batch.first_BT, dtype, drafter.shape.taps)
            place = 1 + torch.rand(B, T - K, device=ids.device).argsort(1)[:, :anchors]
            block_places = place[..., None] + torch.arange(1, K, device=ids.device)
            flat = block_places.flatten(1)
            begins = first.gather(1, place)
            same = first.gather(1, flat).view_as(block_places) == begins[..., None]
            learnt = batch.learnt_BT.gather(1, flat).view_as(block_places)
            weight = (same & learnt & (begins < place)[..., None]).float() * decay
            hidden = passed.hidden_BTD
            teacher = hidden.gather(1, (flat - 1)[..., None].expand(-1, -1, hidden.shape[-1])).view(*block_places.shape, -1)
        states = drafter(target, drafter.features(passed), ids.gather(1, place), place, begins)[:, :, 1:]
        losses = [
            row_loss(target, states[rows : rows + 8], teacher[rows : rows + 8], weight[rows : rows + 8])  # type: ignore[operator]
            for rows in range(0, B, 8)
        ]
        return torch.stack(losses).sum(), weight.sum()

    return loss_of


def dflash_row_loss(target: Target, states: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of some rows of blocks. The head is the target's, which is frozen."""
    with torch.no_grad():
        wanted = target.logits(teacher.flatten(0, -2))
    return soft_loss(target.logits(states.flatten(0, -2)), wanted, weight.flatten())
