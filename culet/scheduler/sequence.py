"""One sample of a request, with its tokens, its pages in every KV group, and its progress in planning and computation.

Steps run in the order they are planned, so a sequence is kept as if every planned step had run. `num_computed` counts the
tokens whose KV exists when the next plan begins. Planning does not know the tokens that steps in flight draw
(`draws_in_flight`), nor how many drafts they accept (`num_open`). Until its result arrives, a row with drafts counts only its
first token. If the sequence is planned again before that, its pages reach as far as if all drafts were accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from culet.cache.content import PrefixContent
from culet.cache.point_tree import Match, ResumePoint
from culet.cache.spec import CacheLayout
from culet.scheduler.group_pages import HOLE, GroupPages, ParkedPages
from culet.scheduler.media.features import FeatureLedger
from culet.scheduler.page_allocator import PageAllocator
from culet.types import Entry, FinishReason, Logprobs, MediaSpan, PageTable, Request, Sampling, TokenDelta

TILE = 64  # A step takes about as long with any number of tokens up to the next multiple of this.
MAX_TRAIL = 1024  # tokens by which a chunk may run past a resume length, because storing them costs less than another step
MIN_GAIN = 16  # a resume point that saves no more tokens than this is not worth another step
MIN_CUT_CHUNK = (
    256  # fewest tokens before media that are computed while their features are not ready; fewer are not worth a step
)
MIN_PARKED = TILE  # fewest computed tokens that are worth parking, because computing fewer takes hardly any time
MAX_SCORED_CHUNK = 256  # most tokens of a chunk that needs all its logits, because a row of logits is as wide as the vocabulary


class Acceptance:
    """The draft acceptance of one sequence."""

    def __init__(self) -> None:
        self.tried = self.accepted = 0.0  # drafts compared and drafts accepted, with less weight on older ones
        self.num_tried = self.num_accepted = 0  # the same over its whole life, without decay
        self.length: int | None = None  # drafts it gets now, or None before its first batch
        self.rest = 0  # steps without drafts before its next try
        self.try_at = -1  # step number of that try, or -1 if none is set
        self.is_trying = False
        self.min_accepted = 0  # drafts of the next verify that must be accepted for another round

    @property
    def estimate(self) -> float:
        return self.accepted / self.tried


class Sequence:
    """One sample of a request. It is waiting (without a slot or pages), running, or ended.

    While it waits after it was preempted, it may be **parked**: its pages are in host memory, and `num_computed` still counts
    its tokens there.
    """

    def __init__(
        self,
        request: Request,
        sample: int,
        arrival: int,
        layout: CacheLayout,
        features: FeatureLedger | None = None,
        *,
        is_cached: bool,
    ) -> None:
        self.request = request
        self.sample = sample
        self.sampling: Sampling = request.sampling_of(sample)
        self.arrival = arrival
        self.place = arrival, 0  # its place in the order. The second number is not 0 after it made way for another one.
        self.waiting_since = 0  # the work that `TimeSlices` had counted when it came
        self.started_at: int | None = None  # the work that it had counted when this last started
        self.was_preempted = False
        self.max_chunk = sys.maxsize  # tokens that a row may have while this is computed again in pieces
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        # What the prefix cache compares, or None without one.
        self.content = PrefixContent(request.cache_salt, request.media) if is_cached else None
        self.features = features if request.media else None
        self.media_end = request.media[-1].end if request.media else 0
        self.tenant = request.tenant
        self.num_older = 0  # how many older sequences its tenant runs (see `count_older`)
        self.groups = tuple(GroupPages(group) for group in layout.groups)
        self.slot: int | None = None
        self.num_computed = 0
        self.num_resumed = 0  # computed tokens that it began with when it last started
        self.parked: tuple[ParkedPages, ...] = ()  # one per KV group while it is parked
        self.parked_len = 0  # computed tokens in these pages
        self.rows_in_flight = 0
        self.draws_in_flight = 0
        self.num_proposed = 0  # drafts in the slot's buffer, now or after the row in flight has run
        self.num_open = 0  # drafts of rows in flight, which may or may not be accepted
        # Its next draw needs a mask that depends on the tokens before it. The runner says so with each result.
        self.is_bound = request.grammar is not None or request.rules is not None
        self.has_new_grammar = False  # its grammar was compiled for it, so its first masks are slow
        self.awaits_drafts = False  # its row in flight verifies drafts or asks for some, so its next row is not known
        self.acceptance = Acceptance()
        self.tables: tuple[PageTable, ...] = ()  # page tables of its last row
        self.unchanged_until = 0  # length up to which decoding does not change them
        self.num_underway = 0  # tokens of its next row if some of the layers have run for them (see `Legs`)
        self.prefill_end = 0  # tokens to compute before the first draw after (re)admission
        self.resume_lengths: tuple[int, ...] = ()  # uncomputed lengths that are worth a resume point, in ascending order
        self.num_scored = 0  # prompt positions whose log-probabilities were planned
        self.num_cached = 0  # prompt tokens found in the prefix cache
        self.is_announced = False  # whether its first TokenDelta was sent
        self.arrived_at = 0.0  # on the scheduler's clock
        self.queue_s = 0.0  # time it waited for its first start
        self.siblings: list[Sequence] = []  # samples that wait for this one's prompt to be computed
        self.finish_reason: FinishReason | None = None

    @property
    def order(self) -> tuple[int, tuple[int, int], int]:
        """The sort key of a tenant's sequences. They start in this order and are preempted in reverse."""
        return (self.request.priority, self.place, self.sample)

    @property
    def is_running(self) -> bool:
        return self.slot is not None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_left(self) -> int:
        """The least number of tokens that it may still draw after those in flight."""
        return self.request.max_tokens - self.num_output - self.draws_in_flight - self.num_open

    @property
    def max_kv_len(self) -> int:
        """The most tokens that ever need KV. The last token drawn needs none."""
        return self.prompt_len + self.request.max_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens without KV, known or in flight."""
        return len(self.tokens) + self.draws_in_flight - self.num_computed

    @property
    def num_held(self) -> int:
        return sum(pages.num_held for pages in self.groups)

    @property
    def needs_scoring(self) -> bool:
        """Whether log-probabilities of its prompt must still be computed. Sample 0 computes them for all samples."""
        return self.sampling.prompt_logprobs is not None and self.sample == 0 and self.num_scored < self.prompt_len

    @property
    def is_scored_next(self) -> bool:
        """Whether the next chunk needs all its logits."""
        return self.needs_scoring and self.num_computed >= self.num_scored

    @property
    def next_chunk(self) -> int:
        """The most tokens of the next row, not counting drafts."""
        return self._chunk_of(self.num_uncomputed)

    def _chunk_of(self, limit: int) -> int:
        """Return the most tokens of a next row of at most `limit`, which may still end inside media."""
        if self.num_underway:
            return self.num_underway
        end = self.num_computed + min(limit, self.num_uncomputed, self.max_chunk)
        if self.is_scored_next:
            end = min(end, max(self.num_computed + MAX_SCORED_CHUNK, self.num_computed + self.min_chunk))
        elif self.needs_scoring:
            end = min(end, self.num_scored)
        # A chunk ends at a resume length that is worth it, unless it is close to the chunk's end. Then the row stores more.
        # Where an earlier chunk ended, there may be no resume point, so a length right after that is worth it too.
        low = self.num_computed + (MIN_GAIN if self.num_computed == self.num_resumed else 0)
        high = end - MAX_TRAIL
        return next((length for length in self.resume_lengths if low < length < high), end) - self.num_computed

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens that it had when it last started are computed, or in flight, so that it draws new ones."""
        return self.num_computed >= self.prefill_end

    def piece_beside(self, num_others: int) -> int:
        """Return the size of a piece that fills whole tiles together with the other tokens of its step, or no limit."""
        return self.max_chunk - (num_others + self.max_chunk) % TILE if self.max_chunk < sys.maxsize else sys.maxsize

    def chunk_within(self, limit: int) -> int:
        """Return the largest chunk of at most `limit` tokens, or 0 if none fits. It never ends inside a whole media span."""
        if self.num_underway:
            return self.num_underway if self.num_underway <= limit else 0
        chunk = self.ready_part(self.num_computed, self._chunk_of(limit))
        if self.request.media and (span := self._whole_span_at(self.num_computed + chunk)) is not None:
            return max(0, span.start - self.num_computed)
        return chunk

    @property
    def min_chunk(self) -> int:
        """The smallest next chunk, which is one token, a whole media span, or a chunk for which some layers have run."""
        if self.num_underway:
            return self.num_underway
        span = self._whole_span_at(self.num_computed + 1) if self.request.media else None
        return 1 if span is None else span.end - self.num_computed

    def _whole_span_at(self, end: int) -> MediaSpan | None:
        """Return the whole media span that `end` is inside, if any. A chunk must not end there."""
        return next((span for span in self.request.media if span.is_whole and span.start < end < span.end), None)

    def ready_part(self, start: int, chunk: int) -> int:
        """Return how much of a chunk from `start` on can be computed with the features that are ready, or 0 if it must wait.

        A short part waits for the features after it, unless these wait themselves until it has freed the cache.
        """
        if self.features is None or start >= self.media_end:
            return chunk
        for span in self.request.media:
            if span.start >= start + chunk:
                break
            if span.end > start and not self.features.is_ready(span.key):
                part = max(0, span.start - start)
                return part if part >= MIN_CUT_CHUNK or not self.features.is_held(span.key) else 0
        return chunk

    def needs_features(self, key: bytes) -> bool:
        """Return whether it has media with this key that are not computed yet."""
        return any(span.key == key and span.end > self.num_computed for span in self.request.media)

    @property
    def awaits_features(self) -> bool:
        """Whether it can compute nothing before the features of its next media are ready."""
        return self.features is not None and self.num_computed < self.media_end and not self.chunk_within(self.num_uncomputed)

    @property
    def is_ready(self) -> bool:
        """Whether its next row can be planned now.

        It cannot while the row depends on drafts, a mask, features, or a token that may not come.
        """
        if self.awaits_features:
            return False
        return not self.draws_in_flight or (not self.awaits_drafts and self.num_left > 0 and not self.is_bound)

    def pages_unchanged(self, num_new: int = 1) -> bool:
        """Return whether `num_new` more tokens fit into its pages and no page falls behind the window."""
        return self.num_computed + self.num_open + num_new <= self.unchanged_until

    @property
    def is_plain(self) -> bool:
        """Whether only the position of its draws depends on which drafts are accepted."""
        return not self.is_bound and self.sampling.logprobs is None and not self.sampling.needs_history

    @property
    def num_useful_drafts(self) -> int:
        """Number of drafts worth verifying. Drafts beyond the last token it may draw are not."""
        return min(self.num_proposed, self.num_left - 1)

    def begin(self, match: Match, *, is_alone: bool) -> None:
        """Prepare to start from `match`, perhaps not for the first time. `is_alone` means that no others are running."""
        self.prefill_end = len(self.tokens)
        self.resume_lengths = self.lengths_beyond(match) if self.content is not None else ()
        if is_alone:  # there are no steps of others that small pieces could be part of
            self.max_chunk = sys.maxsize

    def lengths_beyond(self, match: Match) -> tuple[int, ...]:
        """Return the lengths beyond the match that are worth a resume point.

        They are the lengths that the request names and a junction. Prompts diverge at a junction, where other sequences have
        computed more than the match, and the next prompt will hit there.
        """
        assert self.content is not None
        named = {length for length in self.request.resume_lengths if self.content.resumable(length) == length}
        junction = self.content.resumable(match.known)
        if junction > match.resume + MIN_GAIN:
            named.add(junction)
        return tuple(sorted(length for length in named if match.resume < length < len(self.tokens)))

    def entry(self) -> Entry:
        """Return what the runner must know when the sequence takes its slot."""
        assert self.slot is not None
        request = self.request
        tokens = tuple(self.tokens)
        return Entry(self.slot, tokens, self.prompt_len, self.sampling, request.grammar, request.media, request.rules)

    def append(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append drawn tokens up to a stop. Return how many were appended, and why the sequence ends with them, if it does."""
        request, tokens = self.request, self.tokens
        for count, token_id in enumerate(token_ids, 1):
            tokens.append(token_id)
            if token_id in request.stop_token_ids:
                return count, FinishReason.STOP
            if len(tokens) - self.prompt_len >= request.max_tokens:
                return count, FinishReason.LENGTH
        return len(token_ids), None

    def delta(
        self,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[Logprobs, ...] = (),
        scores: tuple[Logprobs, ...] = (),
        error: str = "",
        drafts: tuple[int, int] = (0, 0),
    ) -> TokenDelta:
        """Return a report for the caller. `drafts` holds the numbers of accepted and rejected drafts."""
        is_stopped = self.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self.request.stop_token_ids
        is_first, self.is_announced = not self.is_announced, True
        # Positional arguments are faster, and this runs for every token.
        return TokenDelta(
            self.request.request_id,
            self.sample,
            token_ids,
            logprobs,
            scores,
            self.finish_reason,
            self.num_cached if is_first else 0,
            token_ids[-1] if is_stopped else None,
            error,
            self.queue_s if is_first else 0.0,
            *drafts,
        )

    def raw_tables(self) -> tuple[PageTable, ...]:
        """Return its pages with holes marked, for resume points."""
        return tuple(PageTable(pages.first, tuple(pages.pages)) for pages in self.groups)

    def release_behind(self, page_allocator: PageAllocator) -> None:
        """Give back the pages that no query from `num_computed` on sees."""
        if self.pages_unchanged():
            return
        for pages in self.groups:
            if behind := pages.cut_behind(self.num_computed):
                page_allocator.give_back(behind)
                self.unchanged_until = 0

    def release_beyond(self, page_allocator: PageAllocator) -> None:
        """Give back the pages that hold only rejected tokens."""
        for pages in self.groups:
            if beyond := pages.cut_beyond(self.num_computed):
                page_allocator.give_back(beyond)
                self.unchanged_until = 0

    def take_back(self, page_allocator: PageAllocator) -> None:
        """Forget its last row, whose draw needed a mask that was not known when the row was planned."""
        assert not self.rows_in_flight, "a sequence whose next draw needs a mask was planned ahead"
        if self.is_running:
            self.num_computed, self.num_proposed = len(self.tokens) - 1, 0
            self.release_beyond(page_allocator)
        elif self.parked:
            self.num_computed = self.parked_len = min(self.parked_len, len(self.tokens) - 1)

    def keep_drafts(self, num_accepted: int, num_proposed: int, page_allocator: PageAllocator, *, has_spare: bool) -> None:
        """Count accepted drafts as computed. `has_spare` means that it may hold pages for others, which were rejected.

        This changes nothing for a preempted sequence, which has no pages and forgets its drafts.
        """
        if not self.is_running:
            return
        self.num_computed += num_accepted
        if not self.rows_in_flight:  # otherwise its next row was planned with these proposals and pages for all of them
            self.num_proposed = num_proposed
            if has_spare:
                self.release_beyond(page_allocator)

    def release_all(self, page_allocator: PageAllocator) -> None:
        """Give back every page and start from nothing, or from what is parked."""
        for pages in self.groups:
            page_allocator.give_back(pages.held)
            pages.reset(0, [])
            pages.stored_from = 0
        self.num_computed = self.parked_len
        self.num_resumed = self.num_proposed = self.unchanged_until = self.num_underway = 0
        self.resume_lengths = ()

    def park(self, page_allocator: PageAllocator) -> bool:
        """Have the pages saved in host memory with the next plan. Call this before they are given back.

        Return False and change nothing if they do not fit or if it is not worth it. Drafts in flight are forgotten. A row in
        flight may draw no token, and then its last token is computed again, so the pages must also serve for that.
        """
        host, earliest = page_allocator.host, min(self.num_computed, len(self.tokens) - 1)
        if self.num_computed < MIN_PARKED:
            return False
        parts = [part for pages in self.groups if (part := pages.to_go_on(earliest, self.num_computed)) is not None]
        if len(parts) < len(self.groups) or sum(len(part) for _, part in parts) > host.num_free:
            return False
        if any(page_allocator.is_awaiting_copy(part) for _, part in parts):
            return False
        self.parked = tuple(
            ParkedPages(first, host.save(part), pages.stored_from)
            for pages, (first, part) in zip(self.groups, parts, strict=True)
        )
        self.parked_len = self.num_computed
        return True

    def unpark(self, page_allocator: PageAllocator) -> None:
        """Forget what is parked, if anything. All tokens are computed again."""
        for parked in self.parked:
            page_allocator.host.give_back(parked.host_pages)
        self.parked, self.parked_len = (), 0
        if not self.is_running:
            self.num_computed = 0

    def return_to_pages(self, page_allocator: PageAllocator) -> bool:
        """Take pages for those that are parked. Return False and change nothing if they do not fit."""
        parts = self._parts_to_load()
        if sum(len(part) for _, part in parts) > page_allocator.available:
            return False
        for pages, parked, (first, part) in zip(self.groups, self.parked, parts, strict=True):
            pages.reset(first, page_allocator.take(len(part)))
            pages.stored_from = parked.stored_from
        self.num_computed = self.num_resumed = self.parked_len
        return True

    def load_parked(self, page_allocator: PageAllocator) -> None:
        """Have the pages loaded from host memory with the next plan, which has the sequence's first row."""
        for pages, (_, part) in zip(self.groups, self._parts_to_load(), strict=True):
            page_allocator.host.load(part, pages.pages[: len(part)])
        self.unpark(page_allocator)

    def _parts_to_load(self) -> list[tuple[int, list[int]]]:
        """Return for each group the parked pages that are needed to go on, and the first's number."""
        parts = []
        for pages, parked in zip(self.groups, self.parked, strict=True):
            first = pages.group.first_visible(self.parked_len) // pages.page_tokens
            end = pages.group.pages_for(self.parked_len)
            parts.append((first, parked.host_pages[first - parked.first : end - parked.first]))
        return parts

    def resume_from(self, point: ResumePoint, length: int, page_allocator: PageAllocator) -> bool:
        """Begin with the first `length` tokens computed. Share full pages, and copy the pages it will write to.

        Return False and change nothing if the copies do not fit.
        """
        for pages, table in zip(self.groups, point.tables, strict=True):
            begin, end = pages.group.first_visible(length) // pages.page_tokens, length // pages.page_tokens
            shared = list(table.pages[begin - table.first : end - table.first])
            page_allocator.arena.share(shared)
            pages.reset(begin, shared)
        partial = [
            (pages, table.pages[length // pages.page_tokens - table.first])
            for pages, table in zip(self.groups, point.tables, strict=True)
            if length % pages.page_tokens
        ]
        # Hold the sources before taking anything, because taking may evict the resume point they belong to.
        page_allocator.arena.share([source for _, source in partial])
        fits = page_allocator.available >= len(partial)
        if fits:
            for pages, source in partial:
                pages.reset(pages.first, [*pages.pages, page_allocator.copy_of(source)])
            for pages, stored_from in zip(self.groups, point.stored_from, strict=True):
                pages.stored_from = stored_from
            self.num_computed = self.num_resumed = length
        else:
            for pages in self.groups:
                page_allocator.give_back(pages.pages)
                pages.reset(0, [])
        page_allocator.give_back([source for _, source in partial])
        return fits

    def take_heir(self) -> Sequence | None:
        """Return the first sibling, which gets the others, or None if there is none."""
        if not self.siblings:
            return None
        heir, *heir.siblings = self.siblings
        self.siblings = []
        return heir

    def fork_from(self, parent: Sequence, page_allocator: PageAllocator) -> None:
        """Continue from the state of `parent` after its current plan. The copies belong to the next plan."""
        length = parent.num_computed
        for pages, theirs in zip(self.groups, parent.groups, strict=True):
            begin, end = pages.group.first_visible(length) // pages.page_tokens, length // pages.page_tokens
            own = theirs.pages[begin - theirs.first : end - theirs.first]
            assert HOLE not in own, "the fork reaches into tokens that were not stored"
            page_allocator.arena.share(own)
            if length % pages.page_tokens:
                own.append(page_allocator.copy_of(theirs.pages[end - theirs.first]))
            pages.reset(begin, own)
            pages.stored_from = theirs.stored_from
        self.num_computed = self.num_resumed = length
        self.prefill_end = parent.prefill_end
        self.num_cached = parent.num_cached
        self.rows_in_flight = self.draws_in_flight = 1


def samples_of(
    request: Request, arrival: int, now: float, layout: CacheLayout, features: FeatureLedger | None, *, is_cached: bool
) -> Sequence:
    """Return the first sample of a request that arrives at `now`. The others are its siblings."""
    samples = range(request.n)
    first, *others = [Sequence(request, sample, arrival, layout, features, is_cached=is_cached) for sample in samples]
    first.siblings, first.arrived_at = others, now
    return first


def held_pages(running: Iterable[Sequence], layout: CacheLayout) -> dict[str, int]:
    """Return how many pages `running` hold, by the name of the KV group. A shared page counts once."""
    return {group.name: len({page for seq in running for page in seq.groups[group.index].held}) for group in layout.groups}
