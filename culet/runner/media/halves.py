"""Run a step with half a chunk (decision 26): half of the layers for one row, and all layers for the others.

So the lower layers run for some rows and the upper ones for others, each with a batch of their own. The hidden states that a
first half leaves are kept. In the step of the second half they join those of the other rows, before the upper layers.

Shapes: T tokens of a batch · D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.models.gemma4 import Between
from culet.models.pieces import DIRECT, Pieces
from culet.runner.fixed.prompts import FixedPrompts
from culet.runner.target import ForwardOutput, Target
from culet.types import Half, Row


class _Kept(NamedTuple):
    """What a first half left."""

    row: Row
    x_TD: Tensor
    normed_TD: Tensor


def rows_of_layers(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows for which the lower and the upper layers run."""
    return [row for row in rows if row.which_half is not Half.SECOND], [row for row in rows if row.which_half is not Half.FIRST]


class HalfPasses:
    """Runs steps with half a chunk, and keeps the hidden states between the halves of one chunk."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._num_lower = len(target.model.spec.layers) // 2
        self._kept: _Kept | None = None

    def run(self, rows: Sequence[Row], lower: ForwardBatch, upper: ForwardBatch, prompts: FixedPrompts | None) -> ForwardOutput:
        """Run the forward pass of a step, given the batches of its lower and upper layers. Both may use graphs of `prompts`."""
        index = next(index for index, row in enumerate(rows) if row.which_half)
        half, begin = rows[index], sum([row.num_new for row in rows[:index]])
        if half.which_half is Half.FIRST:
            end, states = begin + half.num_new, self._run_lower(lower, prompts)
            self._kept = _Kept(half, *[each_TD[begin:end].clone() for each_TD in states])
            return self._run_upper(upper, [torch.cat((each_TD[:begin], each_TD[end:])) for each_TD in states], prompts)
        kept, self._kept = self._kept, None
        assert kept is not None, f"slot {half.slot}: there is no first half"
        assert kept.row[:3] == half[:3], f"slot {half.slot}: the first half was {kept.row[:3]}, but the second is {half[:3]}"
        states = [kept.x_TD, kept.normed_TD]
        if lower.num_tokens:
            pairs = zip(self._run_lower(lower, prompts), states, strict=True)
            states = [torch.cat((each_TD[:begin], own_TD, each_TD[begin:])) for each_TD, own_TD in pairs]
        return self._run_upper(upper, states, prompts)

    def _run_lower(self, batch: ForwardBatch, prompts: FixedPrompts | None) -> list[Tensor]:
        """Run the lower layers. Return the stream and the normed stream, valid until other pieces run."""
        batch = replace(batch, tail=None)  # which only the last layers have
        self.target.plan(batch)
        stream = self.target.forward_part(batch, self._num_lower, _pieces_for(batch, prompts))
        assert stream.normed_TD is not None, "the lower layers do not include the last one"
        return [stream.x_TD, stream.normed_TD]

    def _run_upper(self, batch: ForwardBatch, states: Sequence[Tensor], prompts: FixedPrompts | None) -> ForwardOutput:
        """Run the upper layers on the streams that `_run_lower` returned, for the tokens of `batch`."""
        # Graphs end where a tail begins. If all tokens need logits, they are the tail. The lower layers have read all features.
        batch = replace(batch, tail=batch.tail or batch, input_rows=None)
        self.target.plan(batch)
        x_TD, normed_TD = states
        hidden = self.target.forward(batch, _pieces_for(batch, prompts), Between(self._num_lower, x_TD, normed_TD))
        return ForwardOutput(batch, hidden)


def _pieces_for(batch: ForwardBatch, prompts: FixedPrompts | None) -> Pieces:
    return DIRECT if prompts is None else prompts.smallest(batch.num_tokens)
