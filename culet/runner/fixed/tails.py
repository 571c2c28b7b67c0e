"""CUDA graphs of fixed sizes for the layers that run only on the tail of a step with prompts.

E2B and E4B have many such layers. A tail has one token for each row, as a decode step has: the last token of a prompt, or the
token of a sequence that decodes beside it. So its attention depends only on the number of rows.

Shapes: L tokens of a tail, including padding · D model · X queries or a normed stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.kernels.captures import Captures
from culet.kernels.replay import replayed
from culet.models.pieces import TailInputs
from culet.runner.fixed.page_tables import DeviceTables
from culet.runner.fixed.steps import cut_batch
from culet.runner.target import Target


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    normed_LD: Tensor


class FixedTails:
    """Tails of all sizes. They share their buffers. A tail has the same result with and without a graph."""

    def __init__(self, target: Target, tables: DeviceTables, sizes: Sequence[int]) -> None:
        """Allocate the buffers. `tables` are the page tables of decode steps. They have at least as many rows as a tail."""
        model, spec = target.model, target.model.spec
        self.target, self.sizes, self._tables = target, tuple(sizes), tables
        self._graphs: dict[int, _Captured] = {}
        largest = max(self.sizes)
        self._first_layer = model.num_whole_layers(target.taps)
        x_LD = torch.zeros(largest, spec.hidden_size, dtype=model.dtype, device=model.device)
        heads = model.attention_of(self._first_layer).heads
        owns_kv = self._first_layer < model.num_kv_layers
        first_LX = x_LD.new_zeros(largest, heads.num_heads, heads.head_dim) if owns_kv else x_LD.clone()
        self._inputs = TailInputs(x_LD, x_LD.clone(), first_LX)
        zeros_L = torch.zeros(largest, dtype=torch.int64, device=model.device)
        first_GL = torch.zeros(len(tables.groups), largest, dtype=torch.int32, device=model.device)
        is_stored = (True,) * len(tables.groups)
        self._tail = ForwardBatch(
            token_ids_T=zeros_L,
            positions_T=zeros_L.clone(),
            row_begin_B1=torch.arange(largest + 1, dtype=torch.int32, device=model.device),
            context_B=zeros_L.int(),
            logits_index_L=torch.arange(largest, device=model.device),
            rows=(RowFacts(0, 1, is_stored),) * largest,
            groups=tuple(
                GroupBatch(table[:largest], first_L, zeros_L) for table, first_L in zip(tables.groups, first_GL, strict=True)
            ),
            tail=None,
        )

    def find(self, tail: ForwardBatch) -> int | None:
        """Return the smallest size that holds the tail, or None if it needs its own shape."""
        if not tail.num_tokens or len(tail.rows) != tail.num_tokens:
            return None
        widths = zip(tail.groups, self._tables.columns, strict=True)
        if any(group.visible_2T is not None or group.pages_BP.shape[-1] > width for group, width in widths):
            return None
        return next((size for size in self.sizes if size >= tail.num_tokens), None)

    def run(self, size: int, inputs: TailInputs, tail: ForwardBatch) -> Tensor:
        """Run a tail in the size that `find` returned for it. The result is valid until the next step."""
        count, own, batch = tail.num_tokens, self._inputs, self._tail
        own.x_LD[:count].copy_(inputs.x_LD)
        own.embedded_LD[:count].copy_(inputs.embedded_LD)
        own.first_LX[:count].copy_(inputs.first_LX)
        batch.token_ids_T[:count].copy_(tail.token_ids_T)
        batch.positions_T[:count].copy_(tail.positions_T)
        batch.context_B[:count].copy_(tail.context_B)
        for group, its_own in zip(tail.groups, batch.groups, strict=True):
            if group.first_B.numel():  # otherwise the step leaves this group out
                its_own.first_B[:count].copy_(group.first_B)
        self._tables.copy(tail.groups, None, count, size)
        if count < size:  # padding rows see one key of the spare page
            batch.context_B[count:size].fill_(0)
            batch.positions_T[count:size].fill_(0)
            for its_own in batch.groups:
                its_own.first_B[count:size].fill_(0)
        captured = self._graphs.get(size)
        if captured is None:
            return self._launch(size, tail.rows)[:count]
        captured.graph.replay()
        return captured.normed_LD[:count]

    @torch.inference_mode()
    def rehearse(self, size: int) -> None:
        """Run a tail that is all padding, to compile the kernels of this size."""
        self._tables.clear()
        self._launch(size)

    @torch.inference_mode()
    def capture(self, captures: Captures, sizes: Sequence[int] | None = None) -> None:
        """Capture tails of `sizes` (default: all), the largest first."""
        self._tables.clear()
        for size in sorted(sizes or self.sizes, reverse=True):
            self._graphs[size] = _Captured(*captures.capture(partial(self._launch, size)))

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def _launch(self, size: int, rows: tuple[RowFacts, ...] = ()) -> Tensor:
        """Run the layers on the first `size` rows of the buffers. This is captured, so it only launches kernels.

        Without a graph, backends may need the host's facts about `rows`.
        """
        target, batch = self.target, cut_batch(self._tail, size, size)
        batch = replace(batch, rows=(*rows, *batch.rows[len(rows) :]))
        inputs = TailInputs(self._inputs.x_LD[:size], self._inputs.embedded_LD[:size], self._inputs.first_LX[:size])
        target.plan(batch)
        with replayed():
            return target.model.forward_tail(target.pool, target.backends, self._first_layer, inputs, batch)
