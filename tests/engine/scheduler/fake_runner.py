"""A runner without a model. It applies a StepPlan to a model of the page memory and checks every key that it would read.

The KV of a token is (position, hash of all tokens and media up to it), since that is what it depends on in a deep model. So a
page that was recycled, shared wrongly, copied too early or not stored shows up as a wrong key. Tokens are drawn by a hash of
(all tokens before, seed, sample), so the output of a request must not depend on how it was scheduled.

A group with pages ahead belongs to a drafter. It is written when the real runner's ledger says so, and read when proposals
are wanted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from culet.cache.spec import CacheLayout, KVGroup
from culet.runner.deferred_kv import DeferredWrite, Ledger, keeps_features
from culet.types import Drawn, Entry, MediaSpan, Request, Row, Sampling, StepPlan, StepResult

VOCAB = 50
ROOM = 3  # ring length of a drafter
STOP = 0
Key = tuple[int, int, int]  # page, group, offset


def chain(before: int, token: object) -> int:
    """Return the hash of a token sequence, given the hash of all but its last token."""
    return hash((before, token, 0x5EED))


def content_at(position: int, token: int, media: tuple[MediaSpan, ...]) -> object:
    """Return the content at a position: a token, or a part of media, whose features replace the token."""
    for span in media:
        if span.start <= position < span.end:
            return span.key, position - span.start
    return token


def draw(before: int, sampling: Sampling) -> int:
    """Return the token that follows the sequence with hash `before`."""
    return hash((before, sampling.seed, sampling.sample)) % VOCAB


def expected_tokens(request: Request, sample: int) -> list[int]:
    """Return what `sample` must draw, however it is scheduled."""
    state, sampling = 0, request.sampling_of(sample)
    for position, token in enumerate(request.prompt_token_ids):
        state = chain(state, content_at(position, token, request.media))
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(draw(state, sampling))
        if tokens[-1] in request.stop_token_ids:
            break
        state = chain(state, tokens[-1])
    return tokens


@dataclass
class Slot:
    """The runner's buffer of one slot."""

    entry: Entry
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)  # of tokens[: i + 1]
    proposals: list[int] = field(default_factory=list)
    first_start: int | None = None  # start of its first row, the number of tokens that were not computed
    num_computed: int = 0  # by its rows, until the first draw
    num_accepted: int = 0  # drafts of its last row
    underway: tuple[int, int, int, int] | None = None  # start, length, next layers and all layers of a chunk in legs

    def hashes_of(self, tokens: list[int]) -> list[int]:
        """Return the hash of each prefix of `tokens`, which begin with the slot's own."""
        for position in range(len(self.hashes), len(self.tokens)):
            content = content_at(position, self.tokens[position], self.entry.media)
            self.hashes.append(chain(self.hashes[-1] if self.hashes else 0, content))
        hashes = self.hashes[: len(tokens)]
        for token in tokens[len(hashes) :]:
            hashes.append(chain(hashes[-1] if hashes else 0, token))
        return hashes


class FakeRunner:
    """Executes plans, and raises AssertionError where a real runner would compute nonsense."""

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        *,
        max_num_seqs: int,
        budget: int,
        max_drafts: int = 0,
        num_host_pages: int = 0,
    ) -> None:
        self.layout = layout
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.max_drafts, self.proposes_all = max_drafts, False  # whether there are as many proposals as were asked for
        self.slots: dict[int, Slot] = {}
        self.page_group: list[int | None] = [None] * num_pages
        self.memory: list[dict[int, tuple[int, int]]] = [{} for _ in range(num_pages)]  # page -> offset -> KV
        # The group and content of each host page.
        self.host: list[tuple[int | None, dict[int, tuple[int, int]]]] = [(None, {}) for _ in range(num_host_pages)]
        self.counts: Counter[str] = Counter()
        self.rows: list[Row] = []  # of the last plan
        self._last_step = -1
        self.kept: int | None = None  # the slot of the leg whose hidden states are kept
        self.ledgers = [Ledger(group.index, ROOM) for group in layout.groups if group.ahead]
        self.rings: dict[tuple[int, int, int], tuple[int, int]] = {}  # group, slot, place -> KV

    def execute(self, plan: StepPlan) -> StepResult:
        self._check_plan(plan)
        for ledger in self.ledgers:
            self._write_deferred(ledger, ledger.due_before(plan), "left")
        for entry in plan.entries:
            self.slots[entry.slot] = Slot(entry, list(entry.token_ids))
        self._move(plan)
        self._copy(plan.copies)
        plan = plan.with_rows(self._close(row) for row in plan.rows)
        self.rows = list(plan.rows)
        written: dict[Key, int] = {}
        for row in plan.rows:
            self._write(row, written)
        for row in plan.rows:
            self._read(row, written)
        drawn: list[Drawn] = []
        for row in plan.rows:
            drawn += self._draw(row)
        for ledger in self.ledgers:
            self._write_deferred(ledger, ledger.due_after(plan.rows), "due")
        for row in plan.rows:
            self._read_context(row)
            self._scribble(row)
        scores = {row.slot: self._score(row) for row in plan.rows if row.is_prompt_logprobs}
        return StepResult(plan.step_id, tuple(drawn), scores)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.step_id == self._last_step + 1
        self._last_step = plan.step_id
        assert plan.rows
        assert plan.num_tokens <= self.budget
        assert sum(not row.leg.is_whole for row in plan.rows) <= 1
        self.counts["tokens"] += plan.num_tokens
        self.counts["mixed"] += any(row.num_logits for row in plan.rows) and not all(row.num_logits for row in plan.rows)
        for slots in ([row.slot for row in plan.rows], [entry.slot for entry in plan.entries]):
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < self.max_num_seqs for slot in slots)

    def _close(self, row: Row) -> Row:
        """Return the row with its final start, once the previous row has run. Any tokens stand in for missing proposals."""
        slot = self.slots[row.slot]
        slot.proposals += [1] * (row.num_drafts - len(slot.proposals))
        if not row.num_open:
            return row
        assert slot.num_accepted <= row.num_open
        assert row.draw_slots == (row.slot,)
        self.counts["open"] += 1
        self.counts["moved on"] += slot.num_accepted
        store_from = tuple(first + slot.num_accepted for first in row.store_from)
        return row._replace(start=row.start + slot.num_accepted, store_from=store_from, num_open=0)

    def _move(self, plan: StepPlan) -> None:
        """Save pages in host memory, then load others from it."""
        for targets in ([host_page for _, host_page in plan.saves], [page for _, page in plan.loads]):
            assert len(set(targets)) == len(targets)
        for page, host_page in plan.saves:
            self.host[host_page] = self.page_group[page], dict(self.memory[page])
        for host_page, page in plan.loads:
            group, memory = self.host[host_page]
            self.page_group[page], self.memory[page] = group, dict(memory)
        self.counts["saved pages"] += len(plan.saves)
        self.counts["loaded pages"] += len(plan.loads)

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not set(sources) & set(targets), "copies would depend on their order"
        self.counts["copies"] += len(copies)
        for source, target in copies:
            self.memory[target] = dict(self.memory[source])
            self.page_group[target] = self.page_group[source]

    def _tokens_of(self, row: Row) -> list[int]:
        """Return all tokens of the row's sequence up to its end, including drafts."""
        slot = self.slots[row.slot]
        end = row.start + row.num_new
        assert row.num_drafts <= len(slot.proposals)
        assert end - row.num_drafts <= len(slot.tokens)
        if row.num_drafts:
            assert row.start == len(slot.tokens) - 1
        return slot.tokens[: end - row.num_drafts] + slot.proposals[: row.num_drafts]

    def _at(self, row: Row, group: KVGroup, position: int) -> Key:
        table = row.tables[group.index]
        index = position // group.page_tokens - table.first
        assert 0 <= index < len(table.pages), f"position {position} is not in the table {table}"
        return table.pages[index], group.index, position % group.page_tokens

    def _write(self, row: Row, written: dict[Key, int]) -> None:
        slot, end = self.slots[row.slot], row.start + row.num_new
        if slot.first_start is None:
            slot.first_start = row.start
            self.counts["hits"] += row.start > 0
            self.counts["hit tokens"] += row.start
        for span in slot.entry.media:
            inside = [edge for edge in (row.start, end) if span.start < edge < span.end]
            assert not (span.is_whole and inside), f"a chunk ends inside {span}"
            self.counts["media computed"] += row.leg.is_last and row.start <= span.start and span.end <= end
        hashes = slot.hashes_of(self._tokens_of(row))
        self._check_leg(row, slot)
        for group in self.layout.groups:
            store_from = row.store_from[group.index]
            rule = row.start
            if group.window is not None:
                rule = max(row.start, end - group.window - max(row.num_logits, 1) + 1)
            assert row.start <= store_from <= rule  # earlier if a resume point lies within the row; see `audit`
            self.counts["holes"] += store_from > row.start
            if group.ahead and keeps_features(self.rows):
                assert store_from == row.start
                self.rings[group.index, row.slot, row.start % ROOM] = row.start, hashes[row.start]
                continue
            for position in range(store_from, end):
                key = self._at(row, group, position)
                assert written.setdefault(key, row.slot) == row.slot, f"{key} written by two rows"
                # Before the last layer has run, nobody may read it.
                self._put(key, (position, hashes[position] if row.leg.is_last else -1))

    def _check_leg(self, row: Row, slot: Slot) -> None:
        """Check that a leg follows the one before it of the same chunk, whose keys are still there."""
        chunk, leg = (row.start, row.num_new), row.leg
        assert 0 <= leg.begin < leg.end <= leg.of
        if not leg.is_last:
            assert row.num_logits == len(row.draw_slots) == 0
            assert len(self.rows) > 1, "there is no reason for legs"
        if not leg.is_first:
            assert self.kept == row.slot
            assert slot.underway == (*chunk, leg.begin, leg.of)
            self.counts["in legs"] += leg.is_last
            self.counts["middle legs"] += not leg.is_last
            for group in self.layout.groups:
                for position in range(row.store_from[group.index], row.start + row.num_new):
                    page, _, offset = self._at(row, group, position)
                    assert self.page_group[page] == group.index
                    assert self.memory[page].get(offset) == (position, -1), "the keys of the leg before are gone"
        elif not leg.is_last:
            assert any(other.num_new == 1 for other in self.rows), "there is no reason for legs"
        slot.underway = None if leg.is_last else (*chunk, leg.end, leg.of)
        if not leg.is_last:
            self.kept = row.slot

    def _put(self, key: Key, value: tuple[int, int]) -> None:
        page, group, offset = key
        if self.page_group[page] != group:  # the slab's bytes now mean something else
            self.page_group[page], self.memory[page] = group, {}
        self.memory[page][offset] = value

    def _write_deferred(self, ledger: Ledger, writes: list[DeferredWrite], why: str) -> None:
        """Write a drafter's KV for tokens of earlier steps from the rings."""
        size = self.layout.groups[ledger.group].page_tokens
        for write in writes:
            assert 0 < write.count <= ROOM
            for _, first, count, page in write.pieces(size):
                for position in range(first, first + count):
                    self._put((page, ledger.group, position % size), self.rings[ledger.group, write.slot, position % ROOM])
            self.counts[f"deferred tokens, {why}"] += write.count

    def _read_context(self, row: Row) -> None:
        """Read what a drafter with its own pages reads before it proposes, its KV of all tokens but the newest."""
        for group in self.layout.groups if row.num_wanted else ():
            hashes = self.slots[row.slot].hashes_of(self.slots[row.slot].tokens)
            end = len(hashes) - 1
            for position in range(group.first_visible(end), end) if group.ahead else ():
                page, _, offset = self._at(row, group, position)
                got = self.memory[page].get(offset) if self.page_group[page] == group.index else None
                assert got == (position, hashes[position]), f"slot {row.slot} drafts from a wrong key of position {position}"
                self.counts["drafted keys"] += 1

    def _read(self, row: Row, written: dict[Key, int]) -> None:
        """Read every key that must come from pages: the context of all queries and, for the tail, the row's own keys too."""
        end = row.start + row.num_new
        hashes = self.slots[row.slot].hashes_of(self._tokens_of(row))
        for group in self.layout.groups:
            if group.ahead:
                continue  # only the drafter reads it
            context = range(group.first_visible(row.start), row.start)
            tail = range(group.first_visible(end - row.num_logits), end) if row.num_logits else ()
            for position in sorted({*context, *tail}):
                key = self._at(row, group, position)
                page, _, offset = key
                assert self.page_group[page] == group.index, f"page {page} belongs to group {self.page_group[page]}"
                assert self.memory[page].get(offset) == (position, hashes[position]), (
                    f"slot {row.slot} reads a wrong key at {key}"
                )
                assert written.get(key, row.slot) == row.slot, f"{key} is read and written in the same step"

    def _scribble(self, row: Row) -> None:
        """Write a block after the tokens with KV, as a drafter with its own pages does after the draws."""
        for group in self.layout.groups if row.draw_slots else ():
            begin = len(self.slots[row.slot].tokens) - 1  # the newest token has no KV
            for position in range(begin, begin + group.ahead):
                self._put(self._at(row, group, position), (position, -1))
                self.counts["scribbled"] += 1

    def _draw(self, row: Row) -> list[Drawn]:
        slot, end = self.slots[row.slot], row.start + row.num_new
        if not row.leg.is_last:
            return []
        is_last = end - row.num_drafts == len(slot.tokens)
        assert bool(row.draw_slots) == is_last
        if not row.is_prompt_logprobs:
            assert row.num_logits == (row.num_drafts + 1 if is_last else 0)
        assert slot.first_start is not None
        if len(slot.tokens) == len(slot.entry.token_ids):
            slot.num_computed += row.num_new
            if is_last:  # a hit saves exactly the tokens before it, and nothing is computed twice
                assert slot.num_computed == len(slot.entry.token_ids) - slot.first_start
        if not is_last:
            return []
        assert row.draw_slots[0] == row.slot
        hashes = slot.hashes_of(self._tokens_of(row))
        drafts = slot.proposals[: row.num_drafts]
        drawn = []
        for slot_id in row.draw_slots:
            drawer = self.slots[slot_id]
            assert drawer.tokens == slot.tokens
            assert slot_id == row.slot or not drafts
            if drawer.first_start is None:
                drawer.first_start = len(drawer.tokens)  # forked
                self.counts["forks"] += 1
            tokens: list[int] = []
            for index in range(end - row.num_drafts - 1, end):
                tokens.append(draw(hashes[index], drawer.entry.sampling))
                if len(tokens) > len(drafts) or drafts[len(tokens) - 1] != tokens[-1]:
                    break
            drawn.append((slot_id, tokens))
        self.counts["verifies"] += bool(drafts)
        return [self._append(slot_id, tokens, row.num_wanted if slot_id == row.slot else 0) for slot_id, tokens in drawn]

    def _append(self, slot_id: int, tokens: list[int], num_wanted: int) -> Drawn:
        slot = self.slots[slot_id]
        slot.tokens += tokens
        slot.num_accepted = len(tokens) - 1
        state = slot.hashes_of(slot.tokens)[-1]
        slot.proposals = []
        for number in range(num_wanted if self.proposes_all else hash((state, 1)) % (num_wanted + 1)):
            token = draw(state, slot.entry.sampling)
            if hash((state, number, 2)) % 3 == 0:
                token = (token + 1) % VOCAB  # a wrong one
            slot.proposals.append(token)
            state = chain(state, token)
        logprobs = tuple({token: -1.0} for token in tokens)
        return Drawn(slot_id, tuple(tokens), logprobs, len(slot.proposals))

    def _score(self, row: Row) -> tuple[dict[int, float], ...]:
        """Return the prompt's log-probabilities. That of token i is minus i."""
        assert row.num_logits == row.num_new <= 256
        slot, end = self.slots[row.slot], row.start + row.num_new
        assert end <= slot.entry.prompt_len
        return tuple({slot.tokens[i]: float(-i)} for i in range(row.start + 1, min(end + 1, slot.entry.prompt_len)))
