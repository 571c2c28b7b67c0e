"""Decode and verify steps in fixed shapes, and the CUDA graphs that replay them with one launch.

A step whose every row needs logits for all of its few new tokens (decode: one, verify: drafts and one more) fits a
**bucket**: so many rows of at most so many tokens. It is filled into the bucket's own buffers and padded; where all sequences
go on by one token in the pages they have, the buffers are counted up on the device instead. Rows that only pad store nothing
and read the pool's spare page, which holds zeros. On a GPU each bucket is captured once at start, from the tokens' ids to the
last hidden states, and replayed: how long sequences are is read on the device, so a graph serves any lengths. Graphs share one
memory pool: they run one after another, and the largest is captured first.

Shapes: T tokens of a bucket, padding included · B rows · P table columns · S slots · L a slot's tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.kernels.replay import replayed
from culet.kernels.staging import Staged
from culet.models.gemma4 import Gemma4, Hidden
from culet.types import PageTable, Row, StepPlan

if TYPE_CHECKING:
    from culet.runner.late import Features  # it needs Captures

FIRST_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
SIZE_STEP = 32  # from the last of them on
MAX_SHAPES = 4096  # ways in which rows of different numbers of tokens share a step that are kept
Int32s = NDArray[np.int32]


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a captured step: up to `num_rows` sequences with up to `num_queries` new tokens each."""

    num_queries: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_queries

    @property
    def num_table_rows(self) -> int:
        """Rows of its page tables. Where sequences may have fewer tokens than fit, what is left goes to rows that pad."""
        return self.num_rows if self.num_queries == 1 else 2 * self.num_rows


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that get a bucket: close together where few rows run, `max_num_seqs` itself the last."""
    sizes = [*FIRST_SIZES, *range(FIRST_SIZES[-1] + SIZE_STEP, max_num_seqs, SIZE_STEP)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def table_columns(group: KVGroup, max_len: int, max_queries: int) -> int:
    """Columns of a page table that hold any decode or verify row of a sequence of up to `max_len` tokens."""
    if group.reach is None:
        return group.pages_for(max_len + group.ahead)
    seen = min(max_len, group.reach - 1 + max_queries)
    return min(group.pages_for(max_len), (seen + group.page_tokens - 2) // group.page_tokens + 1)


class TableRows:
    """The slots' page tables as host arrays. A row is written anew only when its PageTable is another object."""

    def __init__(self, group: KVGroup, num_slots: int, num_columns: int) -> None:
        self.group = group
        self.num_columns = num_columns
        self._pages_SP = np.zeros((num_slots, num_columns), dtype=np.int32)
        self._tables: list[PageTable | None] = [None] * num_slots

    def fits(self, row: Row) -> bool:
        return len(row.tables[self.group.index].pages) <= self.num_columns

    def read(self, rows: Sequence[Row], slot_B: NDArray[np.int64]) -> tuple[Int32s, Int32s]:
        """pages_BP, as wide as the longest of them, and first_B; columns behind a row's own hold old entries."""
        index, width, first = self.group.index, 1, []
        for row in rows:
            table = row.tables[index]
            count = len(table.pages)
            if self._tables[row.slot] is not table:
                self._pages_SP[row.slot, :count] = table.pages
                self._tables[row.slot] = table
            width = max(width, count)
            first.append(table.first)
        return self._pages_SP[slot_B, :width], np.array(first, dtype=np.int32) * np.int32(self.group.page_tokens)


@dataclass(frozen=True, slots=True)
class _Shape:
    """How rows lie among a bucket's tokens."""

    num_tokens: int  # without padding
    begin_B1: Int32s
    row_T: NDArray[np.int64]
    offset_T: NDArray[np.int64]  # of each token in its row


def _lay_out(bucket: Bucket, counts: tuple[int, ...]) -> _Shape:
    """Rows of `counts` tokens, then padding rows, which take what is left, as many each as fit; behind them rows of none."""
    num_tokens = sum(counts)
    left = bucket.num_tokens - num_tokens
    pad_B = np.clip(left - np.arange(bucket.num_table_rows - len(counts)) * bucket.num_queries, 0, bucket.num_queries)
    count_B = np.concatenate((np.array(counts, dtype=np.int64), pad_B))
    begin_B1 = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(count_B)))
    assert begin_B1[-1] == bucket.num_tokens, f"{num_tokens} tokens in {len(counts)} rows do not fit {bucket}"
    row_T = np.repeat(np.arange(len(count_B)), count_B)
    return _Shape(num_tokens, begin_B1.astype(np.int32), row_T, np.arange(bucket.num_tokens) - begin_B1[row_T])


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the token that follows each of a step's tokens stands, on the device."""

    bucket: Bucket
    positions_R: Tensor  # int32; in its sequence
    places_R: Tensor  # int64; among all slots' tokens


@dataclass
class FixedStep:
    """One bucket: its buffers as a batch, what its last run left, and once captured the graph."""

    bucket: Bucket
    buffer: Tensor  # uint8; what a step sends to the device, in one copy
    flat_T: Tensor  # int64; where each token's id stands among all slots' tokens
    following: Placed  # of padding: in the spare slot
    batch: ForwardBatch
    ring_T: Tensor | None  # int64; where the drafter's features of each token are kept, if they are
    rows: Sequence[Row] = ()  # those that the buffer was filled for last
    increments: dict[int, Tensor] = field(default_factory=dict)  # by number of rows: what one token more adds to the buffer
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Hidden | None = None  # of all tokens; a captured step leaves it always in the same place


T = TypeVar("T")


class Captures:
    """CUDA graphs of one device that share memory, since they run one after another; the largest should come first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: Any = torch.cuda.graph_pool_handle()
        # One stream for all captures: libraries keep a workspace for each.
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of one call, and what the call leaves, which every replay leaves in the same place."""
        # Once outside of a capture: kernels are compiled and loaded, and what is made at first use is made.
        run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph, result


class FixedSteps:
    """All buckets of a runner. `run` answers a step that `find` has a bucket for; captured or not, the result is the same."""

    def __init__(
        self,
        model: Gemma4,
        pool: Pool,
        backends: Sequence[AttentionBackend],
        tokens_SL: Tensor,
        *,
        query_counts: Sequence[int] = (1,),
        features: Features | None = None,
    ) -> None:
        """`tokens_SL` has a spare slot behind the others. `features` are what a drafter makes its own KV of."""
        assert pool.spare_page is not None, "rows that pad a batch need the pool's spare page"
        self.model, self.pool, self.backends, self.features = model, pool, backends, features
        self.tokens_SL, self._spare = tokens_SL, pool.spare_page
        num_slots, max_len = tokens_SL.shape[0] - 1, tokens_SL.shape[1]
        self.buckets = [Bucket(queries, size) for queries in sorted(query_counts) for size in bucket_sizes(num_slots)]
        groups = pool.layout.groups
        most_rows = max(bucket.num_table_rows for bucket in self.buckets)
        columns = [table_columns(group, max_len, max(query_counts)) for group in groups]
        self._rows = [TableRows(group, num_slots, count) for group, count in zip(groups, columns, strict=True)]
        self.tables = [torch.full((most_rows, n), pool.spare_page, dtype=torch.int32, device=model.device) for n in columns]
        # The bucket that the tables were filled for last, and the page tables in its first rows: most steps change none.
        self._filled: tuple[Bucket | None, list[tuple[PageTable, ...]]] = (None, [])
        self._shapes: dict[tuple[Bucket, tuple[int, ...]], _Shape] = {}
        # Where a position is a multiple of one of these, places of the next token do not follow those of the last.
        self._breaks = {group.page_tokens for group in groups} | ({features.room} if features is not None else set())
        self._steps = {bucket: self._make_step(bucket) for bucket in self.buckets}

    def find(self, rows: Sequence[Row]) -> Bucket | None:
        """The smallest bucket that holds these rows; None where they need a step of their own shape."""
        most = 0
        for row in rows:
            if row.num_logits != row.num_new or row.is_prompt_logprobs or not all(table.fits(row) for table in self._rows):
                return None
            most = max(most, row.num_new)
        return next((one for one in self.buckets if one.num_queries >= most and one.num_rows >= len(rows)), None)

    def run(self, plan: StepPlan, bucket: Bucket) -> None:
        """Launch a step; `left` tells what it leaves."""
        step = self._steps[bucket]
        batch = self._fill(plan.rows, step)
        if step.graph is None:
            self.model.plan(batch, self.pool, self.backends)
            step.hidden = self._forward(step, batch)
        else:
            step.graph.replay()

    def left(self, plan: StepPlan, bucket: Bucket) -> tuple[ForwardBatch, Hidden, Placed]:
        """The batch of the last run, what the forward pass left, and where what is drawn from it goes; all without padding.

        Good until the next run of the same bucket is launched.
        """
        step, num_tokens = self._steps[bucket], plan.num_tokens
        batch, hidden = step.batch, step.hidden
        assert hidden is not None, "no step has run in this bucket"
        tapped = {layer: tensor[:num_tokens] for layer, tensor in hidden.tapped.items()}
        following = Placed(bucket, step.following.positions_R[:num_tokens], step.following.places_R[:num_tokens])
        return _cut(batch, len(plan.rows), num_tokens), Hidden(hidden.last_LD[:num_tokens], tapped), following

    @torch.inference_mode()
    def capture(self, captures: Captures, buckets: Sequence[Bucket] | None = None) -> None:
        """Capture `buckets` (default: all), the largest first."""
        for bucket in sorted(buckets or self.buckets, key=lambda one: -one.num_tokens):
            step = self._steps[bucket]
            self._fill((), step)
            self.model.plan(step.batch, self.pool, self.backends)
            step.graph, step.hidden = captures.capture(partial(self._forward, step, step.batch))

    def step_of(self, bucket: Bucket) -> FixedStep:
        """The buffers of a bucket, and its graph if there is one."""
        return self._steps[bucket]

    @property
    def num_captured(self) -> int:
        return sum(step.graph is not None for step in self._steps.values())

    def _forward(self, step: FixedStep, batch: ForwardBatch) -> Hidden:
        step.batch.token_ids_T.copy_(self.tokens_SL.view(-1).index_select(0, step.flat_T))
        features = self.features
        with replayed():
            hidden = self.model.forward(batch, self.pool, self.backends, () if features is None else features.drafter.taps)
        if features is not None and step.ring_T is not None:
            features.keep(hidden.tapped, step.ring_T)
        elif features is not None:
            features.commit(batch, hidden.tapped)
        return hidden

    def _make_step(self, bucket: Bucket) -> FixedStep:
        """Buffers of a bucket. Small arrays lie in one buffer; page tables, which all buckets share, are widened from it."""
        device, groups = self.model.device, self.pool.layout.groups
        staged = self._stage((), bucket)
        # `staged` has tables of one column; they stand last, and the widest ones need this much more.
        room = sum(bucket.num_table_rows * table.shape[1] * 4 for table in self.tables)
        buffer = torch.zeros(staged.num_bytes + room, dtype=torch.uint8, device=device)
        sent = staged.unpack(buffer[: staged.num_bytes])
        is_stored = (True,) * len(groups)
        batch = ForwardBatch(
            token_ids_T=torch.zeros(bucket.num_tokens, dtype=torch.int64, device=device),
            positions_T=sent["position"],
            row_begin_B1=sent["begin"],
            context_B=sent["context"],
            logits_index_L=torch.arange(bucket.num_tokens, device=device),
            rows=(RowFacts(0, bucket.num_queries, is_stored),) * bucket.num_table_rows,
            groups=tuple(
                GroupBatch(self.tables[g.index][: bucket.num_table_rows], sent[f"first{g.index}"], sent[f"slot{g.index}"])
                for g in groups
            ),
            tail=None,
        )
        following = Placed(bucket, sent["next_position"], sent["next_flat"])
        return FixedStep(bucket, buffer, sent["flat"], following, batch, sent.get("ring"))

    def forget_tables(self) -> None:
        """Somebody has written to `tables`: the next step fills them anew."""
        self._filled = (None, [])

    def _stage(self, rows: Sequence[Row], bucket: Bucket, *, has_tables: bool = True) -> Staged:
        """The step's small arrays, padded to the bucket, then the rows' page tables, as wide as they are."""
        shape = self._shape(bucket, tuple([row.num_new for row in rows]))
        num_rows, num_tokens, row_T, width = len(rows), shape.num_tokens, shape.row_T, self.tokens_SL.shape[1]
        slot_B = np.array([row.slot for row in rows], dtype=np.int64)
        context_B = np.zeros(bucket.num_table_rows, dtype=np.int64)
        context_B[:num_rows] = [row.start for row in rows]
        owner_B = np.full(bucket.num_table_rows, self.tokens_SL.shape[0] - 1, dtype=np.int64)  # the spare slot
        owner_B[:num_rows] = slot_B
        position_T, owner_T = shape.offset_T + context_B[row_T], owner_B[row_T]
        flat_T = position_T + owner_T * width
        staged = Staged()
        staged.add("flat", flat_T)
        staged.add("position", position_T)
        staged.add("next_flat", flat_T + 1)
        staged.add("next_position", (position_T + 1).astype(np.int32))
        staged.add("begin", shape.begin_B1)
        staged.add("context", context_B.astype(np.int32))
        if self.features is not None and bucket.num_queries == 1:
            staged.add("ring", owner_T * self.features.room + position_T % self.features.room)
        real_T, position = row_T[:num_tokens], position_T[:num_tokens]
        tables = []
        for table in self._rows:
            size, slot_T = table.group.page_tokens, np.full(bucket.num_tokens, -1, dtype=np.int64)
            first_B = np.zeros(bucket.num_table_rows, dtype=np.int32)
            pages_BP, first_B[:num_rows] = table.read(rows, slot_B)
            slot_T[:num_tokens] = pages_BP[real_T, (position - first_B[real_T]) // size] * np.int64(size) + position % size
            staged.add(f"first{table.group.index}", first_B)
            staged.add(f"slot{table.group.index}", slot_T)
            tables.append(pages_BP)
        if has_tables:
            for index, pages_BP in enumerate(tables):
                # What an earlier, larger step left in the rows that pad belongs to somebody else.
                spare_BP = np.full((bucket.num_table_rows, pages_BP.shape[1]), self._spare, dtype=np.int32)
                spare_BP[:num_rows] = pages_BP
                staged.add(f"pages{index}", spare_BP)
        return staged

    def _shape(self, bucket: Bucket, counts: tuple[int, ...]) -> _Shape:
        """How rows of these numbers of tokens lie in a bucket; most steps are like one before them."""
        found = self._shapes.get((bucket, counts))
        if found is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            found = self._shapes[bucket, counts] = _lay_out(bucket, counts)
        return found

    def _fill(self, rows: Sequence[Row], step: FixedStep) -> ForwardBatch:
        """Send a step to its bucket's buffers; the batch has its rows, and the padding ones that are not empty."""
        bucket, tables = step.bucket, [row.tables for row in rows]
        last, filled = self._filled
        is_filled = last is not None and last.num_rows >= bucket.num_rows and last.num_table_rows >= bucket.num_table_rows
        is_filled = is_filled and len(filled) == len(tables) and all(map(_are_same, filled, tables))
        if is_filled and self._go_on(rows, step.rows):
            self._count_up(step, len(rows))
        else:
            staged = self._stage(rows, bucket, has_tables=not is_filled)
            staged.send_into(step.buffer)
            if not is_filled:
                self._filled = bucket, tables
                self._spread_tables(staged.unpack(step.buffer), bucket, len(rows))
        step.rows = rows
        if step.graph is not None:
            return step.batch
        counts = [row.num_new for row in rows]
        left = step.bucket.num_tokens - sum(counts)
        facts = [RowFacts(row.start, row.num_new, (True,) * len(self.tables)) for row in rows]
        while left > 0:
            facts.append(RowFacts(0, min(left, step.bucket.num_queries), (True,) * len(self.tables)))
            left -= facts[-1].num_queries
        return replace(_cut(step.batch, len(facts), step.bucket.num_tokens), rows=tuple(facts))

    def _spread_tables(self, sent: Mapping[str, Tensor], bucket: Bucket, num_rows: int) -> None:
        """Copy the page tables that were sent to where all buckets read them."""
        for index, table in enumerate(self.tables):
            pages_BP = sent[f"pages{index}"]
            table[: pages_BP.shape[0], : pages_BP.shape[1]].copy_(pages_BP)
            if num_rows < bucket.num_rows:
                # A drafter's block may reach beyond the columns above: its padding must find nobody's pages there.
                table[num_rows : bucket.num_rows].fill_(self._spare)

    def _go_on(self, rows: Sequence[Row], before: Sequence[Row]) -> bool:
        """Whether each of `rows` is one token further than before, its places too, and nothing else is different."""
        if not rows or len(rows) != len(before):
            return False
        for row, last in zip(rows, before, strict=True):
            start = row.start
            if row.slot != last.slot or start != last.start + 1 or row.num_new != 1 or last.num_new != 1:
                return False
            if not _are_same(row.tables, last.tables) or 0 in map(start.__mod__, self._breaks):
                return False
        return True

    def _count_up(self, step: FixedStep, num_rows: int) -> None:
        """Let the first `num_rows` rows of a step's buffer go on by one token, on the device."""
        increments = step.increments.get(num_rows)
        if increments is None:
            staged = self._stage((), step.bucket, has_tables=False).map(partial(_increments, num_rows=num_rows))
            packed = torch.zeros(staged.num_bytes, dtype=torch.uint8, device=step.buffer.device)
            staged.send_into(packed)
            increments = step.increments[num_rows] = packed.view(torch.int64)
        # Numbers of 32 bits are counted up two at a time: none of them is large enough to reach into the other.
        step.buffer[: 8 * increments.shape[0]].view(torch.int64).add_(increments)


def _increments(name: str, array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """What one token more adds to an array of `FixedSteps._stage`, where each of so many rows has one."""
    added = np.zeros_like(array)
    if not name.startswith(("begin", "first")):
        added[:num_rows] = 1
    return added


def _are_same(some: tuple[PageTable, ...], others: tuple[PageTable, ...]) -> bool:
    """Whether they are the same objects: a sequence keeps its table until its pages change."""
    return all(map(operator.is_, some, others))


def _cut(batch: ForwardBatch, num_rows: int, num_tokens: int) -> ForwardBatch:
    """The first rows and tokens of a batch, as views."""
    return ForwardBatch(
        token_ids_T=batch.token_ids_T[:num_tokens],
        positions_T=batch.positions_T[:num_tokens],
        row_begin_B1=batch.row_begin_B1[: num_rows + 1],
        context_B=batch.context_B[:num_rows],
        logits_index_L=batch.logits_index_L[:num_tokens],
        rows=batch.rows[:num_rows],
        groups=tuple(
            GroupBatch(group.pages_BP[:num_rows], group.first_B[:num_rows], group.slot_T[:num_tokens]) for group in batch.groups
        ),
        tail=None,
    )
