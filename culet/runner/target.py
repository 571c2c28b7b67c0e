"""The target model with its KV pages and attention backends, and the output of its forward pass.

Shapes: T new tokens of a step · R draws · L tokens whose logits are needed · D model ·
P placeholders of media.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch, own_share
from culet.cache.pool import Pool
from culet.models.gemma4 import Between, Gemma4, Hidden, ResidualStream
from culet.models.pieces import DIRECT, Pieces


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The places of the tokens that follow each of a step's tokens, on the device."""

    positions_R: Tensor  # int32, position in its sequence
    places_R: Tensor  # int64, index among all slots' tokens


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The output of a forward pass, without padding."""

    batch: ForwardBatch
    hidden: Hidden
    next_tokens: NextTokens | None = None  # set if they are known on the device and each token has one draw


@dataclass
class Target:
    """Runs the model. `taps` are the layers whose outputs a drafter needs."""

    model: Gemma4
    pool: Pool
    backends: Sequence[AttentionBackend]
    taps: tuple[int, ...] = ()
    placeholder_P: Tensor = field(init=False)  # int64, ids that are embedded as token 0

    def __post_init__(self) -> None:
        self.placeholder_P = torch.tensor(self.model.spec.placeholder_ids, dtype=torch.int64, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def own_share(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch of this rank. It is the same unless ranks share the tokens of a KV group."""
        return own_share(batch, self.pool.layout.groups, self.model.rank.index)

    def plan(self, batch: ForwardBatch) -> None:
        """Do the backends' work on the host. Call before `forward`."""
        self.model.plan(batch, self.pool, self.backends)

    def forward(self, batch: ForwardBatch, pieces: Pieces = DIRECT, between: Between | None = None) -> Hidden:
        """Run the forward pass, or what is left of it after `between`. It only launches kernels."""
        return self.model.forward(batch, self.pool, self.backends, self.taps, pieces, between)

    def forward_part(
        self, batch: ForwardBatch, num_layers: int, pieces: Pieces, between: Between | None = None
    ) -> ResidualStream:
        """Run the first `num_layers` layers, or those of them after `between`. The result is valid until other pieces run."""
        return self.model.forward_whole(batch, self.pool, self.backends, self.taps, num_layers, pieces, between)

    def logits(self, last_LD: Tensor) -> Tensor:
        return self.model.logits(last_LD)
