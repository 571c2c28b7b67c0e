"""One sample of a request: its tokens, its pages in every KV group, and how far it is planned and computed.

Steps run in the order they are planned. So a sequence is kept as if every planned step had run: `num_computed` counts
the tokens whose KV exists when the next plan begins. What planning cannot know is the tokens drawn meanwhile
(`draws_in_flight`) and how many drafts a verify accepts (`num_open`): a row with drafts counts only its first token until its
result is there. If the sequence is planned again before, its pages reach as far as if all were accepted.
"""

from __future__ import annotations

from culet.cache.prefix import Checkpoint, Match, PageKeys
from culet.cache.spec import CacheLayout, KVGroup
from culet.scheduler.draft_length import Pace
from culet.scheduler.page_allocator import PageAllocator
from culet.types import Entry, FinishReason, Logprobs, PageTable, Request, Sampling, TokenDelta

HOLE = -1  # entry of a page that was never taken, since all its positions were skipped
MAX_TRAIL = 32  # tokens that a chunk may go on for behind a resume point: so few are not worth a step of their own
MAX_SCORED_CHUNK = 256  # tokens of a chunk whose every logit is needed: the logits of the vocabulary are large


def span(num_tokens: int, page_tokens: int) -> int:
    """Most pages that `num_tokens` consecutive tokens touch, wherever they begin."""
    return 0 if num_tokens == 0 else (num_tokens + page_tokens - 2) // page_tokens + 1


def max_held_pages(group: KVGroup, num_new: int, num_logits: int) -> int | None:
    """Most pages a sequence holds in `group` while a row of `num_new` tokens is in flight; None: no bound but its length.

    The window before the first new token, and what the row stores. A chunk longer than the window has a hole between
    the two; the pages on both sides of it may be cut anywhere.
    """
    if group.reach is None:
        return None
    context = max(group.reach - 1, 1)  # a window of one token still keeps the page that the next one goes to
    num_stored = min(num_new, group.reach + max(num_logits, 1) - 1)
    if num_stored == num_new:
        return span(context + num_new, group.page_tokens)
    return span(context, group.page_tokens) + span(num_stored, group.page_tokens)


class GroupPages:
    """The pages of one sequence in one KV group, from logical page `first` on."""

    def __init__(self, group: KVGroup) -> None:
        self.group = group
        # Read for every row of every step, so without the detour through the group's layers.
        self.reach = group.reach
        self.page_tokens = group.page_tokens
        self.ahead = group.ahead
        self.first = 0
        self.pages: list[int] = []  # page ids, or HOLE
        self._table: PageTable | None = None

    @property
    def held(self) -> list[int]:
        return [page for page in self.pages if page != HOLE]

    @property
    def num_held(self) -> int:
        return len(self.pages) - self.pages.count(HOLE)

    @property
    def table(self) -> PageTable:
        """As the runner reads it. Kept until the pages change: most decode steps change none."""
        if self._table is None:
            self._table = PageTable(self.first, tuple(0 if page == HOLE else page for page in self.pages))
        return self._table

    @property
    def calm_until(self) -> int:
        """Where tokens added one by one end at the last without a fresh page and without one that nobody sees any more."""
        calm = (self.first + len(self.pages)) * self.page_tokens - self.ahead
        return calm if self.reach is None else min(calm, (self.first + 1) * self.page_tokens + self.reach - 1)

    def reset(self, first: int, pages: list[int]) -> None:
        """Replace all pages."""
        self.first, self.pages, self._table = first, pages, None

    def cut_behind(self, position: int) -> list[int]:
        """Drop the pages that no query at `position` or later sees; returns those that were held."""
        if self.reach is None:
            return []
        first = (position - self.reach + 1) // self.page_tokens
        if first <= self.first or not self.pages:
            return []
        behind = [page for page in self.pages[: first - self.first] if page != HOLE]
        self.reset(first, self.pages[first - self.first :])
        return behind

    def cut_beyond(self, num_tokens: int) -> list[int]:
        """Drop the pages of tokens from `num_tokens` on alone, but for what is kept ahead; returns those that were held."""
        end = -(-(num_tokens + self.ahead) // self.page_tokens) - self.first
        if end >= len(self.pages):
            return []
        beyond = self.pages[end:]
        assert HOLE not in beyond, "rolled back into tokens that were not stored"
        self.reset(self.first, self.pages[:end])
        return beyond

    def first_stored(self, start: int, num_new: int, num_queries: int) -> int:
        """Position from which a row's new tokens leave KV: all that its last `num_queries` queries or a later step can see."""
        if self.reach is None:
            return start
        return max(start, start + num_new - self.reach - max(num_queries, 1) + 1)

    def num_missing(self, end: int, stored: int) -> int:
        """Fresh pages needed to hold positions `stored .. end - 1`."""
        begin = max(self.first + len(self.pages), stored // self.page_tokens)
        return max(0, -(-end // self.page_tokens) - begin)

    def extend(self, end: int, stored: int, fresh: list[int]) -> None:
        """Add pages up to position `end`: `fresh` ones from `stored` on, holes before."""
        if not self.pages:
            self.first = max(self.first, stored // self.page_tokens)
        num_added = -(-end // self.page_tokens) - self.first - len(self.pages)
        if num_added > 0:
            self.reset(self.first, [*self.pages, *[HOLE] * (num_added - len(fresh)), *fresh])


class Sequence:
    """One sample of a request, waiting (without slot and pages), running, or ended."""

    def __init__(self, request: Request, sample: int, arrival: int, layout: CacheLayout, keys: PageKeys | None) -> None:
        self.request = request
        self.sample = sample
        self.sampling: Sampling = request.sampling_of(sample)
        self.arrival = arrival
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.keys = keys
        self.groups = tuple(GroupPages(group) for group in layout.groups)
        self.slot: int | None = None
        self.num_computed = 0
        self.rows_in_flight = 0
        self.draws_in_flight = 0
        self.num_proposed = 0  # drafts that wait in the slot's buffer, or will when the row in flight has run
        self.num_open = 0  # drafts of rows in flight: it is not known yet which are accepted
        self.awaits_drafts = False  # its row in flight verifies drafts or asks for some: what comes next is not known
        self.pace = Pace()  # what of its drafts was accepted
        self.tables: tuple[PageTable, ...] = ()  # of its last row
        self.calm_until = 0  # up to where rows of one token leave them as they are
        self.prefill_end = 0  # tokens to compute before the first draw after (re)admission
        self.resume_points: tuple[int, ...] = ()  # lengths still to be computed that are worth a checkpoint, ascending
        self.num_scored = 0  # prompt positions whose log-probabilities were planned already
        self.num_cached = 0  # prompt tokens found in the prefix cache
        self.is_announced = False  # its first TokenDelta has left
        self.arrived_at = 0.0  # on the scheduler's clock
        self.queue_s = 0.0  # how long it waited for its first start
        self.siblings: list[Sequence] = []  # samples that wait for this one's prompt to be computed
        self.finish_reason: FinishReason | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first, and in reverse who is preempted first."""
        return (self.request.priority, self.arrival, self.sample)

    @property
    def is_running(self) -> bool:
        return self.slot is not None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_left(self) -> int:
        """Tokens it may still draw, those in flight not counted; the fewest that can be left."""
        return self.request.max_tokens - self.num_output - self.draws_in_flight - self.num_open

    @property
    def max_kv_len(self) -> int:
        """Most tokens that ever need KV: the last one drawn needs none."""
        return self.prompt_len + self.request.max_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens, known or in flight, without KV."""
        return len(self.tokens) + self.draws_in_flight - self.num_computed

    @property
    def num_held(self) -> int:
        return sum(pages.num_held for pages in self.groups)

    @property
    def needs_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed. Sample 0 brings them for all."""
        return self.sampling.prompt_logprobs is not None and self.sample == 0 and self.num_scored < self.prompt_len

    @property
    def is_scored_next(self) -> bool:
        """Whether the next chunk is one whose logits are all needed."""
        return self.needs_scoring and self.num_computed >= self.num_scored

    @property
    def next_chunk(self) -> int:
        """Most tokens the next row may have besides drafts."""
        end = self.num_computed + self.num_uncomputed
        if self.is_scored_next:
            end = min(end, self.num_computed + MAX_SCORED_CHUNK)
        elif self.needs_scoring:
            end = min(end, self.num_scored)
        # A chunk ends at a resume point, unless few tokens lie before or behind it: where behind, the row stores more instead.
        low, high = self.num_computed + MAX_TRAIL, end - MAX_TRAIL
        return next((point for point in self.resume_points if low < point < high), end) - self.num_computed

    @property
    def is_ready(self) -> bool:
        """Whether its next row can be planned now: not if that hangs on a token that may not come, on drafts or a grammar."""
        return not self.draws_in_flight or (not self.awaits_drafts and self.num_left > 0 and self.request.grammar is None)

    def is_calm(self, num_new: int = 1) -> bool:
        """Whether so many tokens more find room in the pages it has, and leave none that nobody sees any more."""
        return self.num_computed + self.num_open + num_new <= self.calm_until

    @property
    def is_plain(self) -> bool:
        """Whether its draws need nothing that hangs on which drafts are accepted, but for where they stand."""
        return self.request.grammar is None and self.sampling.logprobs is None and not self.sampling.needs_history

    @property
    def num_useful_drafts(self) -> int:
        """Drafts worth verifying: not beyond the last token it may draw."""
        return min(self.num_proposed, self.num_left - 1)

    def points_beyond(self, match: Match) -> tuple[int, ...]:
        """Lengths beyond the match that are worth a checkpoint: those that the request names, and a junction.

        What others have computed beyond the match shows where prompts part ways: the next one will hit there.
        """
        points = {*self.request.resume_points, match.known}
        return tuple(sorted(point for point in points if match.resume < point < len(self.tokens)))

    def entry(self) -> Entry:
        """What the runner must know when it takes its slot."""
        assert self.slot is not None
        return Entry(self.slot, tuple(self.tokens), self.prompt_len, self.sampling, self.request.grammar)

    def append(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Take what was drawn, up to a stop: how many tokens that are, and why it ends with them, if it does."""
        request, tokens = self.request, self.tokens
        for count, token_id in enumerate(token_ids, 1):
            tokens.append(token_id)
            if token_id in request.stop_token_ids:
                return count, FinishReason.STOP
            if len(tokens) - self.prompt_len >= request.max_tokens:
                return count, FinishReason.LENGTH
        return len(token_ids), None

    def tell(
        self,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[Logprobs, ...] = (),
        scores: tuple[Logprobs, ...] = (),
        error: str = "",
        drafts: tuple[int, int] = (0, 0),
    ) -> TokenDelta:
        """What happened to it, for its caller; `drafts` are those that were accepted and rejected with the tokens."""
        is_stopped = self.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self.request.stop_token_ids
        is_first, self.is_announced = not self.is_announced, True
        # By position: it is made for every token.
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
        """Its pages with holes marked, for checkpoints."""
        return tuple(PageTable(pages.first, tuple(pages.pages)) for pages in self.groups)

    def release_behind(self, page_allocator: PageAllocator) -> None:
        """Give back the pages that no query from `num_computed` on sees."""
        if self.is_calm():
            return
        for pages in self.groups:
            if behind := pages.cut_behind(self.num_computed):
                page_allocator.give_back(behind)
                self.calm_until = 0

    def release_beyond(self, page_allocator: PageAllocator) -> bool:
        """Give back the pages that hold only rejected tokens; whether there were any."""
        has_given = False
        for pages in self.groups:
            if beyond := pages.cut_beyond(self.num_computed):
                page_allocator.give_back(beyond)
                self.calm_until, has_given = 0, True
        return has_given

    def release_all(self, page_allocator: PageAllocator) -> None:
        """Give back every page and start from nothing."""
        for pages in self.groups:
            page_allocator.give_back(pages.held)
            pages.reset(0, [])
        self.num_computed = self.num_proposed = self.calm_until = 0
        self.resume_points = ()

    def resume_from(self, checkpoint: Checkpoint, length: int, page_allocator: PageAllocator) -> bool:
        """Begin with the first `length` tokens computed: share full pages, copy those it will write into.

        False, and nothing done, where the copies do not fit.
        """
        for pages, table in zip(self.groups, checkpoint.tables, strict=True):
            begin, end = pages.group.first_visible(length) // pages.page_tokens, length // pages.page_tokens
            shared = list(table.pages[begin - table.first : end - table.first])
            page_allocator.arena.share(shared)
            pages.reset(begin, shared)
        partial = [
            (pages, table.pages[length // pages.page_tokens - table.first])
            for pages, table in zip(self.groups, checkpoint.tables, strict=True)
            if length % pages.page_tokens
        ]
        # Hold the sources before taking anything: taking may evict the very checkpoint they belong to.
        page_allocator.arena.share([source for _, source in partial])
        fits = page_allocator.available >= len(partial)
        if fits:
            for pages, source in partial:
                pages.reset(pages.first, [*pages.pages, page_allocator.copy_of(source)])
            self.num_computed = length
        else:
            for pages in self.groups:
                page_allocator.give_back(pages.pages)
                pages.reset(0, [])
        page_allocator.give_back([source for _, source in partial])
        return fits

    def fork_from(self, parent: Sequence, page_allocator: PageAllocator) -> None:
        """Go on from `parent`'s state as its current plan leaves it; the copies are for the next plan."""
        length = parent.num_computed
        for pages, theirs in zip(self.groups, parent.groups, strict=True):
            begin, end = pages.group.first_visible(length) // pages.page_tokens, length // pages.page_tokens
            own = theirs.pages[begin - theirs.first : end - theirs.first]
            assert HOLE not in own, "forked into tokens that were not stored"
            page_allocator.arena.share(own)
            if length % pages.page_tokens:
                own.append(page_allocator.copy_of(theirs.pages[end - theirs.first]))
            pages.reset(begin, own)
        self.num_computed = length
        self.prefill_end = parent.prefill_end
        self.num_cached = parent.num_cached
        self.rows_in_flight = self.draws_in_flight = 1
