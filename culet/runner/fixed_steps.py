"""Decode and verify steps in fixed shapes, and the CUDA graphs that replay them with one launch.

A step whose every row needs logits for all of its few new tokens (decode: one, verify: drafts and one more) fits a
**bucket**: so many rows of at most so many tokens. The host sends the rows, padded: where each begins, and its page tables if
they are others than before; where every token stands is worked out on the device (`lay_out_tokens`). So a row can begin behind
drafts of which the host does not know yet how many were accepted, and where all sequences simply go on in the pages they have,
nothing is sent. Rows that only pad store nothing and read the pool's spare page, which holds zeros. On a GPU each bucket is
captured once at start, from the rows to the last hidden states, and replayed: how long sequences are is read on the device, so
a graph serves any lengths. Graphs share one memory pool: they run one after another, and the largest is captured first.

Shapes: T tokens of a bucket, padding included · B rows · P table columns · S slots · L a slot's tokens · G groups of KV.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays, send_into
from culet.kernels.replay import replayed
from culet.kernels.types import PageTables, PlannedRows, TokenLayout
from culet.models.gemma4 import Gemma4, Hidden
from culet.types import PageTable, Row, StepPlan

if TYPE_CHECKING:
    from culet.runner.deferred_kv import Features  # it needs Captures

FIRST_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
SIZE_STEP = 32  # from the last of them on
MAX_PATCHED = 2  # rows whose page tables are sent one by one: for more, all are sent together
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
        self._pages_SP = np.zeros((num_slots, num_columns), dtype=np.int32)
        self._tables: list[PageTable | None] = [None] * num_slots

    def read(self, rows: Sequence[Row], slot_B: Int32s) -> Int32s:
        """pages_BP, as wide as the longest of them; columns behind a row's own hold old entries."""
        index, width = self.group.index, 1
        for row in rows:
            table = row.tables[index]
            count = len(table.pages)
            if self._tables[row.slot] is not table:
                self._pages_SP[row.slot, :count] = table.pages
                self._tables[row.slot] = table
            width = max(width, count)
        return self._pages_SP[slot_B, :width]


@lru_cache(maxsize=MAX_SHAPES)
def _row_begins(bucket: Bucket, counts: tuple[int, ...]) -> Int32s:
    """Where rows begin: those of `counts` tokens, padding rows of what is left, as many each as fit, and rows of none."""
    left = bucket.num_tokens - sum(counts)
    pad_B = np.clip(left - np.arange(bucket.num_table_rows - len(counts)) * bucket.num_queries, 0, bucket.num_queries)
    begin_B1 = np.concatenate(([0], np.cumsum([*counts, *pad_B])))
    assert begin_B1[-1] == bucket.num_tokens, f"{sum(counts)} tokens in {len(counts)} rows do not fit {bucket}"
    return begin_B1.astype(np.int32)


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
    planned: PlannedRows  # views of it
    places: TokenLayout  # what follows from them
    following: Placed  # of padding: in the spare slot
    batch: ForwardBatch
    last_id: int = -2  # of the step that ran in it last,
    rows: Sequence[Row] = ()  # the rows that it was filled for,
    num_later: int = 0  # and how many tokens the device has moved them on by since
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
        accepted_S: Tensor,
        *,
        query_counts: Sequence[int] = (1,),
        features: Features | None = None,
    ) -> None:
        """`tokens_SL` has a spare slot behind the others, and so has `accepted_S`: drafts that its last verify accepted, int32.

        `features` are what a drafter makes its own KV of.
        """
        assert pool.spare_page is not None, "rows that pad a batch need the pool's spare page"
        self.model, self.pool, self.backends, self.features = model, pool, backends, features
        self.tokens_SL, self.accepted_S, self._spare = tokens_SL, accepted_S, pool.spare_page
        self.ops = for_device(model.device)
        num_slots, max_len = tokens_SL.shape[0] - 1, tokens_SL.shape[1]
        self.buckets = [Bucket(queries, size) for queries in sorted(query_counts) for size in bucket_sizes(num_slots)]
        groups = pool.layout.groups
        most_rows = max(bucket.num_table_rows for bucket in self.buckets)
        # A row may begin behind as many drafts as it has itself.
        columns = [table_columns(group, max_len, 2 * max(query_counts) - 1) for group in groups]
        self._widths = columns
        self._rows = [TableRows(group, num_slots, count) for group, count in zip(groups, columns, strict=True)]
        self._page_tokens = [group.page_tokens for group in groups]
        self._page_tables = self._make_tables(most_rows, columns)
        parts = self._page_tables.pages_E.split([_aligned(most_rows * count) for count in columns])
        self.tables = [part[: most_rows * count].view(most_rows, count) for part, count in zip(parts, columns, strict=True)]
        # The bucket that the tables were filled for last, and the page tables in its first rows: most steps change none.
        self._filled: tuple[Bucket | None, list[tuple[PageTable, ...]]] = (None, [])
        self._steps = {bucket: self._make_step(bucket) for bucket in self.buckets}

    def find(self, rows: Sequence[Row]) -> Bucket | None:
        """The smallest bucket that holds these rows; None where they need a step of their own shape."""
        most = 0
        for row in rows:
            if row.num_logits != row.num_new or row.is_prompt_logprobs:
                return None
            most = max(most, row.num_new)
        if not self.fits(rows):
            return None
        return next((one for one in self.buckets if one.num_queries >= most and one.num_rows >= len(rows)), None)

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether the page tables of rows are no wider than ours."""
        for row in rows:
            for table, width in zip(row.tables, self._widths, strict=True):
                if len(table.pages) > width:
                    return False
        return True

    def run(self, plan: StepPlan, bucket: Bucket) -> None:
        """Launch a step; `left` tells what it leaves."""
        step = self._steps[bucket]
        self._fill(plan, step)
        if step.graph is not None:
            step.graph.replay()
            return
        assert not any(row.num_open for row in plan.rows), "where a row begins must be known outside of a graph"
        self._place(step)
        batch = self._filled_batch(plan.rows, step)
        self.model.plan(batch, self.pool, self.backends)
        step.hidden = self._forward(step, batch)

    def repeat(self, plan: StepPlan, bucket: Bucket) -> None:
        """Launch the step before, which ran in `bucket`, once more, each row a token later."""
        step = self._steps[bucket]
        assert plan.step_id == step.last_id + 1, "another step ran in between"
        if step.graph is None:
            self.run(plan, bucket)
            return
        step.last_id, step.num_later = plan.step_id, step.num_later + 1
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
            self._fill(StepPlan(0, (), (), ()), step)
            self._place(step)
            self.model.plan(step.batch, self.pool, self.backends)
            step.graph, step.hidden = captures.capture(partial(self._run, step))

    def step_of(self, bucket: Bucket) -> FixedStep:
        """The buffers of a bucket, and its graph if there is one."""
        return self._steps[bucket]

    @property
    def num_captured(self) -> int:
        return sum(step.graph is not None for step in self._steps.values())

    def _run(self, step: FixedStep) -> Hidden:
        """What is captured: it only launches."""
        self._place(step)
        return self._forward(step, step.batch)

    def _place(self, step: FixedStep) -> None:
        room = 0 if self.features is None else self.features.room
        self.ops.lay_out_tokens(step.planned, self._page_tables, self.tokens_SL, self.accepted_S, room, step.places)

    def _forward(self, step: FixedStep, batch: ForwardBatch) -> Hidden:
        features = self.features
        with replayed():
            hidden = self.model.forward(batch, self.pool, self.backends, () if features is None else features.drafter.taps)
        if features is not None and step.places.ring_T is not None:
            features.keep(hidden.tapped, step.places.ring_T)
        elif features is not None:
            features.commit(batch, hidden.tapped)
        return hidden

    def _make_tables(self, num_rows: int, columns: Sequence[int]) -> PageTables:
        """Room for the page tables of all groups, full of the spare page."""
        sizes = [_aligned(num_rows * count) for count in columns]
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        facts = [(at, n, group.page_tokens) for at, n, group in zip(begins, columns, self.pool.layout.groups, strict=True)]
        pages_E = torch.full((sum(sizes),), self._spare, dtype=torch.int32, device=self.model.device)
        return PageTables(pages_E, torch.tensor(facts, dtype=torch.int32, device=self.model.device))

    def _make_step(self, bucket: Bucket) -> FixedStep:
        """Buffers of a bucket. What is sent lies in one buffer; page tables, which all buckets share, are widened from it."""
        device, groups = self.model.device, self.pool.layout.groups
        num_rows, num_tokens = bucket.num_table_rows, bucket.num_tokens
        staged = self._stage((), bucket)
        # `staged` has tables of one column; they stand last, and the widest ones need this much more.
        room = sum(num_rows * table.shape[1] * 4 for table in self.tables)
        buffer = torch.zeros(staged.num_bytes + room, dtype=torch.uint8, device=device)
        sent = staged.unpack(buffer[: staged.num_bytes])
        start_B, slot_B, is_open_B = (row[:num_rows] for row in sent["rows"][:3])
        planned = PlannedRows(sent["begin"], start_B, slot_B, is_open_B, sent["rows"][3:], bucket.num_queries)
        long = partial(torch.zeros, dtype=torch.int64, device=device)
        places = TokenLayout(
            token_ids_T=long(num_tokens),
            positions_T=long(num_tokens),
            next_places_T=long(num_tokens),
            next_positions_T=long(num_tokens).int(),
            kv_address_GT=long(len(groups), _aligned(num_tokens)),
            context_B=long(num_rows).int(),
            # A step of one token for each sequence keeps the features of it.
            ring_T=long(num_tokens) if self.features is not None and bucket.num_queries == 1 else None,
        )
        pages = [
            GroupBatch(
                self.tables[g.index][:num_rows],
                planned.first_GB[g.index, :num_rows],
                places.kv_address_GT[g.index, :num_tokens],
            )
            for g in groups
        ]
        batch = ForwardBatch(
            token_ids_T=places.token_ids_T,
            positions_T=places.positions_T,
            row_begin_B1=planned.begin_B1,
            context_B=places.context_B,
            logits_index_L=torch.arange(num_tokens, device=device),
            rows=(RowFacts(0, bucket.num_queries, (True,) * len(groups)),) * num_rows,
            groups=tuple(pages),
            tail=None,
        )
        following = Placed(bucket, places.next_positions_T, places.next_places_T)
        return FixedStep(bucket, buffer, planned, places, following, batch)

    def forget_tables(self) -> None:
        """Somebody has written to `tables`: the next step fills them anew."""
        self._filled = (None, [])

    def _stage(self, rows: Sequence[Row], bucket: Bucket, *, has_tables: bool = True) -> PackedArrays:
        """The rows, padded to the bucket, then their page tables, as wide as they are."""
        num_rows, num_real = bucket.num_table_rows, len(rows)
        facts = np.zeros((3 + len(self._rows), _aligned(num_rows)), dtype=np.int32)  # start, slot, is it open, firsts
        facts[1] = self.tokens_SL.shape[0] - 1  # the spare slot
        if rows:
            facts[:, :num_real] = np.array([self._facts(row) for row in rows], dtype=np.int32).T
        staged = PackedArrays()
        staged.add("begin", _row_begins(bucket, tuple([row.num_new for row in rows])))
        staged.add("rows", facts)
        for table in self._rows if has_tables else ():
            pages_BP = table.read(rows, facts[1, :num_real])
            # What an earlier, larger step left in the rows that pad belongs to somebody else.
            spare_BP = np.full((num_rows, pages_BP.shape[1]), self._spare, dtype=np.int32)
            spare_BP[:num_real] = pages_BP
            staged.add(f"pages{table.group.index}", spare_BP)
        return staged

    def _facts(self, row: Row) -> list[int]:
        """Where it starts, its slot, whether it is open, and the first position of its tables."""
        firsts = [table.first * size for table, size in zip(row.tables, self._page_tokens, strict=True)]
        return [row.start, row.slot, row.num_open > 0, *firsts]

    def _fill(self, plan: StepPlan, step: FixedStep) -> None:
        """Send a step's rows to its bucket, and their page tables, unless the device has them."""
        rows, bucket = plan.rows, step.bucket
        tables = [row.tables for row in rows]
        changed = self._changed(bucket, tables)
        goes_on = plan.step_id == step.last_id + 1 and _go_on(rows, step.rows, step.num_later)
        if changed is None or not goes_on or any(_begin_elsewhere(self._filled[1][row], tables[row]) for row in changed):
            staged = self._stage(rows, bucket, has_tables=changed is None)
            staged.send_into(step.buffer)
            if changed is None:
                self._filled = bucket, tables
                self._spread_tables(staged.unpack(step.buffer), bucket, len(rows))
        for row in changed or ():
            self._patch_tables(row, tables[row])
        step.last_id, step.rows, step.num_later = plan.step_id, rows, 0

    def _changed(self, bucket: Bucket, tables: Sequence[tuple[PageTable, ...]]) -> list[int] | None:
        """Rows whose page tables are others than the device has; None: all must be sent, or as good as all."""
        last, filled = self._filled
        if last is None or last.num_rows < bucket.num_rows or last.num_table_rows < bucket.num_table_rows:
            return None
        if len(filled) != len(tables):
            return None
        changed = [row for row, (old, new) in enumerate(zip(filled, tables, strict=True)) if not _are_same(old, new)]
        return changed if len(changed) <= MAX_PATCHED else None

    def _patch_tables(self, row: int, tables: tuple[PageTable, ...]) -> None:
        """Send what is new in one row's page tables."""
        _, filled = self._filled
        for into, old, new in zip(self.tables, filled[row], tables, strict=True):
            # Most have one more page than before.
            count = len(old.pages) if old.first == new.first and old.pages == new.pages[: len(old.pages)] else 0
            if old is not new and count < len(new.pages):
                send_into(into[row, count : len(new.pages)], new.pages[count:])
        filled[row] = tables

    def _filled_batch(self, rows: Sequence[Row], step: FixedStep) -> ForwardBatch:
        """The rows that a step was filled with, and the padding ones that are not empty."""
        left = step.bucket.num_tokens - sum(row.num_new for row in rows)
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


def _go_on(rows: Sequence[Row], before: Sequence[Row], num_later: int) -> bool:
    """Whether `rows` begin where the device has moved those of the step before to, which it did by itself.

    The step before had the rows `before`, `num_later` tokens later.
    """
    if not rows or len(rows) != len(before):
        return False
    for row, last in zip(rows, before, strict=True):
        if row.slot != last.slot or row.num_new != last.num_new or (row.num_open > 0) != (last.num_open > 0):
            return False
        # By what `before` knew; what its own open drafts came to is known by now.
        if not 0 < row.start - last.start - num_later <= 1 + last.num_open:
            return False
    return True


def _aligned(count: int) -> int:
    """Numbers of 32 bits in steps of 16 bytes, so that kernels find every part of a tensor aligned alike."""
    return -(-count // 4) * 4


def _are_same(some: tuple[PageTable, ...], others: tuple[PageTable, ...]) -> bool:
    """Whether they are the same objects: a sequence keeps its table until its pages change."""
    return some is others or all(map(operator.is_, some, others))


def _begin_elsewhere(some: tuple[PageTable, ...], others: tuple[PageTable, ...]) -> bool:
    """Whether any of them have different first pages."""
    return any(one.first != other.first for one, other in zip(some, others, strict=True))


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
            GroupBatch(group.pages_BP[:num_rows], group.first_B[:num_rows], group.kv_address_T[:num_tokens])
            for group in batch.groups
        ),
        tail=None,
    )
