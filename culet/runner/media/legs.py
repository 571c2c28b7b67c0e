"""Run a step in which only some of the layers run for one chunk, and all layers for the other rows (decision 26).

Such a step runs the layers in up to three spans: those before the chunk's leg for the other rows, those of the leg for all
rows, and those after it for the other rows again. The chunk's hidden states are kept after a leg. In the step of the next leg,
they join those of the other rows.

Shapes: T tokens of a batch · D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from culet.attention.batch import ForwardBatch
from culet.models.gemma4 import Between
from culet.models.pieces import DIRECT, Pieces
from culet.runner.fixed.prompts import FixedPrompts
from culet.runner.target import ForwardOutput, Target
from culet.types import Row


class _Kept(NamedTuple):
    """What a leg left."""

    row: Row
    between: Between


class LegPasses:
    """Runs steps with a leg, and keeps the hidden states between the legs of one chunk."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._num_layers = len(target.model.spec.layers)
        self._kept: _Kept | None = None

    def run(
        self, rows: Sequence[Row], batch: ForwardBatch, others: ForwardBatch, prompts: FixedPrompts | None
    ) -> ForwardOutput:
        """Run the forward pass of a step, given the batches of all rows and of all but the leg.

        Both may use graphs of `prompts`.
        """
        index = next(index for index, row in enumerate(rows) if not row.leg.is_whole)
        row, begin = rows[index], sum([row.num_new for row in rows[:index]])
        (first, last), end = row.leg.layers(self._num_layers), begin + row.num_new
        between: Between | None = None
        if not row.leg.is_first:
            between = self._take_kept(row)
            if others.num_tokens:
                between = _insert(self._run_span(others, None, first, prompts), begin, between)
        if row.leg.is_last:
            return self._run_to_end(batch, between, prompts)
        between = self._run_span(batch, between, last, prompts)
        self._kept = _Kept(row, Between(last, between.x_TD[begin:end].clone(), between.normed_TD[begin:end].clone()))
        return self._run_to_end(others, _without(between, begin, end), prompts)

    def _take_kept(self, row: Row) -> Between:
        """Return what the leg before `row` left."""
        kept, self._kept = self._kept, None
        assert kept is not None, f"slot {row.slot}: there is no leg before {row.leg}"
        before, now = (*kept.row[:3], kept.row.leg.end), (*row[:3], row.leg.begin)
        assert before == now, f"slot {row.slot}: the leg before was {before}, but this one is {now}"
        return kept.between

    def _run_span(self, batch: ForwardBatch, between: Between | None, last: int, prompts: FixedPrompts | None) -> Between:
        """Run the layers after `between` up to `last` - 1. The result is valid until other pieces run."""
        batch = self._plan(replace(batch, tail=None), between)  # only the last layers have a tail
        stream = self.target.forward_part(batch, last, _pieces_for(batch, prompts), between)
        assert stream.normed_TD is not None, "the last layer is not among them"
        return Between(last, stream.x_TD, stream.normed_TD)

    def _run_to_end(self, batch: ForwardBatch, between: Between | None, prompts: FixedPrompts | None) -> ForwardOutput:
        """Run the layers after `between`."""
        # Graphs end where a tail begins. If all tokens need logits, they are the tail.
        batch = self._plan(replace(batch, tail=batch.tail or batch), between)
        return ForwardOutput(batch, self.target.forward(batch, _pieces_for(batch, prompts), between))

    def _plan(self, batch: ForwardBatch, between: Between | None) -> ForwardBatch:
        """Do the host's work before some of the layers run. Features are read only before the first layer."""
        batch = batch if between is None else replace(batch, input_rows=None)
        self.target.plan(batch)
        return batch


def _pieces_for(batch: ForwardBatch, prompts: FixedPrompts | None) -> Pieces:
    return DIRECT if prompts is None else prompts.smallest(batch.num_tokens)


def _insert(others: Between, begin: int, chunk: Between) -> Between:
    """Return the stream of all tokens, those of `chunk` coming at token `begin`."""
    pairs = (others.x_TD, chunk.x_TD), (others.normed_TD, chunk.normed_TD)
    return Between(chunk.num_layers, *[torch.cat((own_TD[:begin], kept_TD, own_TD[begin:])) for own_TD, kept_TD in pairs])


def _without(between: Between, begin: int, end: int) -> Between:
    """Return the stream without the tokens from `begin` to `end` - 1."""
    streams = between.x_TD, between.normed_TD
    return Between(between.num_layers, *[torch.cat((each_TD[:begin], each_TD[end:])) for each_TD in streams])
