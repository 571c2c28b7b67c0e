"""Decode and verify steps in fixed shapes, and the CUDA graphs that replay them with one launch.

A step fits a **bucket** if every row needs logits for all of its few new tokens. A decode row has one new token, and a verify
row has its drafts and one more. A bucket is a number of rows and a number of tokens for each row. The host sends the padded
rows, and their page tables if any have changed. The device computes the position of every token (`lay_out_tokens`). So a row
can begin after drafts whose acceptance the host does not know yet. Padding rows store nothing and read the pool's spare page,
which holds zeros.

On a GPU, each bucket is captured once at startup, from the rows to the last hidden states. Lengths are read on the device, so
one graph serves sequences of any length. Without a graph, the same launches run one by one.

Shapes: T tokens of a bucket, including padding · B rows · P table columns · S slots · L a slot's tokens · G groups of KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.kernels.captures import Captures
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays
from culet.kernels.replay import replayed
from culet.kernels.types import PlannedRows, TokenLayout
from culet.models.gemma4 import Hidden
from culet.runner.deferred_kv import DeferredKV
from culet.runner.fixed.page_tables import DeviceTables, aligned, table_columns
from culet.runner.target import ForwardOutput, NextTokens, Target
from culet.types import Row

FIRST_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
SIZE_STEP = 32  # distance between sizes beyond the last of them
MAX_SHAPES = 4096  # combinations of row lengths whose row begins are cached
Int32s = NDArray[np.int32]


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a fixed-shape step, with up to `num_rows` sequences of up to `num_queries` new tokens each."""

    num_queries: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_queries

    @property
    def num_table_rows(self) -> int:
        """Number of rows in its page tables. If sequences have fewer tokens than fit, padding rows take the rest."""
        return self.num_rows if self.num_queries == 1 else 2 * self.num_rows


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows that get a bucket. Small sizes are close together, and the last is `max_num_seqs`."""
    sizes = [*FIRST_SIZES, *range(FIRST_SIZES[-1] + SIZE_STEP, max_num_seqs, SIZE_STEP)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@lru_cache(maxsize=MAX_SHAPES)
def _row_begins(bucket: Bucket, counts: tuple[int, ...]) -> Int32s:
    """Return the first tokens of rows with `counts` tokens, followed by those of padding rows.

    Padding rows take as many tokens as fit until none are left. The last ones are empty.
    """
    left = bucket.num_tokens - sum(counts)
    pad_B = np.clip(left - np.arange(bucket.num_table_rows - len(counts)) * bucket.num_queries, 0, bucket.num_queries)
    begin_B1 = np.concatenate(([0], np.cumsum([*counts, *pad_B])))
    assert begin_B1[-1] == bucket.num_tokens, f"{sum(counts)} tokens in {len(counts)} rows do not fit into {bucket}"
    return begin_B1.astype(np.int32)


@dataclass
class FixedStep:
    """The buffers of one bucket, the graph once it is captured, and the output of its last run."""

    bucket: Bucket
    buffer: Tensor  # uint8, takes everything that a step sends to the device, in one copy
    planned: PlannedRows  # views of `buffer`
    layout: TokenLayout  # computed from `planned` on the device
    batch: ForwardBatch  # views of `planned` and `layout`
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Hidden | None = None  # output for all tokens, which replays write to the same place

    @property
    def next_tokens(self) -> NextTokens:
        """The next tokens of all tokens. Those of padding go to the spare slot."""
        return NextTokens(self.layout.next_positions_T, self.layout.next_places_T)

    def output(self, rows: Sequence[Row]) -> ForwardOutput:
        """Return the output of the last run for its rows. It is valid until the bucket runs again."""
        assert self.hidden is not None, "no step has run in this bucket"
        count = sum(row.num_new for row in rows)
        tapped = {layer: tensor[:count] for layer, tensor in self.hidden.tapped.items()}
        next_tokens = NextTokens(self.layout.next_positions_T[:count], self.layout.next_places_T[:count])
        return ForwardOutput(cut_batch(self.batch, len(rows), count), Hidden(self.hidden.last_LD[:count], tapped), next_tokens)


class FixedSteps:
    """All buckets of a runner. A step has the same result with and without a graph."""

    def __init__(
        self,
        target: Target,
        tokens_SL: Tensor,
        accepted_S: Tensor,
        *,
        query_counts: Sequence[int] = (1,),
        deferred: DeferredKV | None = None,
    ) -> None:
        """Allocate the buffers of all buckets.

        `tokens_SL` and `accepted_S` (number of drafts that each slot's last verify accepted, int32) have a spare slot at the
        end. `deferred` keeps the features that a drafter with its own KV needs from every step.
        """
        pool, groups = target.pool, target.pool.layout.groups
        assert pool.spare_page is not None, "rows that pad a batch need the pool's spare page"
        self.target, self.deferred = target, deferred
        self.tokens_SL, self.accepted_S = tokens_SL, accepted_S
        self._ops = for_device(target.device)
        self._page_tokens = [group.page_tokens for group in groups]
        num_slots, max_len = tokens_SL.shape[0] - 1, tokens_SL.shape[1]
        self.buckets = [Bucket(queries, size) for queries in sorted(query_counts) for size in bucket_sizes(num_slots)]
        # A row may begin after as many drafts as it has itself.
        columns = [table_columns(group, max_len, 2 * max(query_counts) - 1) for group in groups]
        num_rows = max(bucket.num_table_rows for bucket in self.buckets)
        self.tables = DeviceTables(
            pool.layout, columns, pool.spare_page, num_rows=num_rows, num_slots=num_slots, device=target.device
        )
        self._steps = {bucket: self._make_step(bucket) for bucket in self.buckets}

    def __getitem__(self, bucket: Bucket) -> FixedStep:
        return self._steps[bucket]

    def find(self, rows: Sequence[Row]) -> Bucket | None:
        """Return the smallest bucket that holds these rows, or None if they need a step of their own shape."""
        counts = [row.num_new for row in rows]
        if counts != [row.num_logits for row in rows] or any(row.is_prompt_logprobs for row in rows):
            return None
        num_queries = max(counts, default=0)
        if not self.tables.fit(rows):
            return None
        fitting = (bucket for bucket in self.buckets if bucket.num_queries >= num_queries and bucket.num_rows >= len(rows))
        return next(fitting, None)

    def run(self, rows: Sequence[Row], bucket: Bucket) -> FixedStep:
        """Launch a step of rows in the bucket that `find` returned for them."""
        step = self._steps[bucket]
        self._send(rows, step)
        if step.graph is not None:
            step.graph.replay()
            return step
        assert not any(row.num_open for row in rows), "only a graph can run open rows"
        self._lay_out(step)
        batch = self.target.own_share(self._batch_of(rows, step))
        self.target.plan(batch)
        step.hidden = self._forward(step, batch)
        return step

    @torch.inference_mode()
    def rehearse(self, rows: Sequence[Row], bucket: Bucket) -> FixedStep:
        """Run a step whose results do not matter, so that its kernels are compiled."""
        return self.run(rows, bucket)

    @torch.inference_mode()
    def capture(self, captures: Captures, buckets: Sequence[Bucket] | None = None) -> None:
        """Capture `buckets` (default: all), the largest first."""
        for bucket in sorted(buckets or self.buckets, key=lambda bucket: -bucket.num_tokens):
            step = self._steps[bucket]
            self._send((), step)
            self._lay_out(step)
            self.target.plan(step.batch)
            step.graph, step.hidden = captures.capture(partial(self._launch, step))

    @property
    def num_captured(self) -> int:
        return sum(step.graph is not None for step in self._steps.values())

    def _launch(self, step: FixedStep) -> Hidden:
        """Run a step. This is captured, so it only launches kernels."""
        self._lay_out(step)
        return self._forward(step, self.target.own_share(step.batch))

    def _lay_out(self, step: FixedStep) -> None:
        ring_len = 0 if self.deferred is None else self.deferred.ring_len
        inputs = self.tokens_SL, self.target.placeholder_P, self.accepted_S
        self._ops.lay_out_tokens(step.planned, self.tables.packed, *inputs, ring_len, step.layout)

    def _forward(self, step: FixedStep, batch: ForwardBatch) -> Hidden:
        with replayed():
            hidden = self.target.forward(batch)
        if self.deferred is not None and step.layout.ring_T is not None:
            self.deferred.keep(hidden.tapped, step.layout.ring_T)
        elif self.deferred is not None:
            self.deferred.write_now(batch, hidden.tapped)
        return hidden

    def _send(self, rows: Sequence[Row], step: FixedStep) -> None:
        """Send a step's rows to its buffer, and their page tables unless the device holds them."""
        bucket, staged = step.bucket, self._stage(rows, step.bucket)
        has_tables = self.tables.stage(staged, rows, bucket.num_rows, bucket.num_table_rows)
        staged.send_into(step.buffer)
        if has_tables:
            self.tables.spread(staged.unpack(step.buffer), len(rows), bucket.num_rows)

    def _stage(self, rows: Sequence[Row], bucket: Bucket) -> PackedArrays:
        """Stage the rows, padded to the bucket, as `_planned_rows` reads them."""
        count = len(rows)
        facts = np.zeros((3 + len(self._page_tokens), aligned(bucket.num_table_rows)), dtype=np.int32)
        facts[0, :count] = [row.start for row in rows]
        facts[1] = self.tokens_SL.shape[0] - 1  # the spare slot
        facts[1, :count] = [row.slot for row in rows]
        facts[2, :count] = [row.num_open > 0 for row in rows]
        for index, page_tokens in enumerate(self._page_tokens):
            facts[3 + index, :count] = [row.tables[index].first * page_tokens for row in rows]
        staged = PackedArrays()
        staged.add("begin", _row_begins(bucket, tuple([row.num_new for row in rows])))
        staged.add("rows", facts)
        return staged

    def _batch_of(self, rows: Sequence[Row], step: FixedStep) -> ForwardBatch:
        """Return the batch of a step without a graph, with its rows and the padding rows that have tokens."""
        left = step.bucket.num_tokens - sum(row.num_new for row in rows)
        is_stored = (True,) * len(self._page_tokens)
        facts = [RowFacts(row.start, row.num_new, is_stored) for row in rows]
        while left > 0:
            facts.append(RowFacts(0, min(left, step.bucket.num_queries), is_stored))
            left -= facts[-1].num_queries
        return replace(cut_batch(step.batch, len(facts), step.bucket.num_tokens), rows=tuple(facts))

    def _make_step(self, bucket: Bucket) -> FixedStep:
        """Allocate the buffers of a bucket. One takes everything that is sent, with the widest page tables at the end."""
        device, num_groups = self.target.device, len(self._page_tokens)
        num_rows, num_tokens = bucket.num_table_rows, bucket.num_tokens
        staged = self._stage((), bucket)
        room = sum(4 * aligned(num_rows * count) for count in self.tables.columns)
        buffer = torch.zeros(staged.num_bytes + room, dtype=torch.uint8, device=device)
        sent = staged.unpack(buffer[: staged.num_bytes])
        planned = _planned_rows(sent, num_rows, bucket.num_queries)
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        layout = TokenLayout(
            token_ids_T=zeros(num_tokens),
            embedded_ids_T=zeros(num_tokens),
            positions_T=zeros(num_tokens),
            next_places_T=zeros(num_tokens),
            next_positions_T=zeros(num_tokens).int(),
            kv_address_GT=zeros(num_groups, aligned(num_tokens)),
            context_B=zeros(num_rows).int(),
            # A step of one token for each sequence keeps features. Other steps write the drafter's KV at once.
            ring_T=zeros(num_tokens) if self.deferred is not None and bucket.num_queries == 1 else None,
        )
        groups = [
            GroupBatch(table[:num_rows], planned.first_GB[index, :num_rows], layout.kv_address_GT[index, :num_tokens])
            for index, table in enumerate(self.tables.groups)
        ]
        batch = ForwardBatch(
            token_ids_T=layout.embedded_ids_T,
            positions_T=layout.positions_T,
            row_begin_B1=planned.begin_B1,
            context_B=layout.context_B,
            logits_index_L=torch.arange(num_tokens, device=device),
            rows=(RowFacts(0, bucket.num_queries, (True,) * num_groups),) * num_rows,
            groups=tuple(groups),
            tail=None,
        )
        return FixedStep(bucket, buffer, planned, layout, batch)


def _planned_rows(sent: Mapping[str, Tensor], num_rows: int, most_tokens: int) -> PlannedRows:
    """Return the rows that were sent, with their starts, slots, open flags and first table positions, as kernels read them."""
    start_B, slot_B, is_open_B = (row[:num_rows] for row in sent["rows"][:3])
    return PlannedRows(sent["begin"], start_B, slot_B, is_open_B, sent["rows"][3:], most_tokens)


def cut_batch(batch: ForwardBatch, num_rows: int, num_tokens: int) -> ForwardBatch:
    """Return the first rows and tokens of a batch, as views."""
    return replace(
        batch,
        token_ids_T=batch.token_ids_T[:num_tokens],
        positions_T=batch.positions_T[:num_tokens],
        row_begin_B1=batch.row_begin_B1[: num_rows + 1],
        context_B=batch.context_B[:num_rows],
        logits_index_L=batch.logits_index_L[:num_tokens],
        rows=batch.rows[:num_rows],
        groups=tuple(
            GroupBatch(group.pages_BP[:num_rows], group.first_B[:num_rows], group.kv_address_T[:num_tokens])
            for group in batch.groups
        ),
    )
