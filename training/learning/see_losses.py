"""The loss of a model that learns to see: answers about pictures, names of what they show, and its own former words on text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.pictures.labels import UNCLEAR
from training.learning.batches import Batch
from training.learning.loop import LossOf
from training.learning.pictures import SeeBatch
from training.models.model import Target, next_token_loss
from training.models.tower import Seer, Tower

TEXT_WEIGHT = 1.0  # of text, relative to answers about pictures
NAME_WEIGHT = 0.5  # of the names of soft tokens
NOTHING_WEIGHT = 0.3  # of soft tokens that show nothing of a kind
HEAD_TOKENS = 8192  # logits computed at a time


def see_loss(seer: Seer, dtype: torch.dtype, teacher: Target | None = None) -> LossOf:
    """Return a function for a batch's loss. `teacher` is the decoder as it was, which text is compared with."""

    def loss_of(batch: SeeBatch) -> tuple[Tensor, Tensor]:
        total, weight = picture_loss(seer, batch, dtype)
        if batch.text is not None and teacher is not None:
            text_total, text_weight = text_loss(seer.target, teacher, batch.text, dtype)
            total = total + TEXT_WEIGHT * text_total / text_weight * weight
        return total, weight

    return loss_of


def picture_loss(seer: Seer, batch: SeeBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropies of the answers, with the names', and the number of the answers' tokens."""
    pooled_PMD = seer.tower.pooled(batch.pictures_PCHW, dtype)
    rows = seer.rows(batch.rows.ids_BT, batch.soft_BT, seer.tower.projected(pooled_PMD), dtype)
    hidden = seer.target.pass_rows(rows, batch.rows.first_BT).hidden_BTD
    is_goal = batch.rows.is_goal
    hidden_LD, goals_L = hidden[is_goal], batch.rows.goals[is_goal]
    weight_L = torch.ones_like(goals_L, dtype=torch.float32)
    total, weight = next_token_loss(seer.target, hidden_LD, goals_L, weight_L), weight_L.sum()
    return total + NAME_WEIGHT * name_loss(seer.tower, pooled_PMD, batch.labels_PMK) * weight, weight


def name_loss(tower: Tower, pooled_PMD: Tensor, labels_PMK: Tensor) -> Tensor:
    """Return the mean cross-entropy of the names of soft tokens."""
    losses = []
    for logits, labels_PM in zip(tower.named(pooled_PMD), labels_PMK.unbind(-1), strict=True):
        weights = torch.ones(logits.shape[-1], device=logits.device)
        weights[0] = NOTHING_WEIGHT
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels_PM.flatten().long(), weights, ignore_index=UNCLEAR))
    return torch.stack(losses).sum()


def text_loss(target: Target, teacher: Target, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum over all tokens of the divergence from the teacher's distribution, and their number."""
    with torch.no_grad():
        taught = teacher(batch.ids_BT, batch.first_BT, dtype).hidden_BTD.flatten(0, 1)
    hidden = target(batch.ids_BT, batch.first_BT, dtype).hidden_BTD.flatten(0, 1)
    weight = (batch.ids_BT != 0).flatten().float()
    losses = []
    for own, theirs, part in zip(*(each.split(HEAD_TOKENS) for each in (hidden, taught, weight)), strict=True):
        with torch.no_grad():
            wanted = F.log_softmax(teacher.logits(theirs), -1)
        divergence = F.kl_div(F.log_softmax(target.logits(own), -1), wanted, reduction="none", log_target=True).sum(-1)
        losses.append((divergence * part).sum())
    return torch.stack(losses).sum(), weight.sum()
