"""Decide which requests to reject at once, and how many pages a waiting sequence needs before it starts."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import pairwise

from culet.cache.spec import CacheLayout, KVGroup
from culet.errors import BadRequest, ContextTooLong, QueueFull
from culet.scheduler.group_pages import max_held_pages
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.sequence import Sequence
from culet.types import Request

GROWTH_TOKENS = 64  # that running sequences can draw before one makes way after a parked one is back


def least_pages(group: KVGroup, num_tokens: int, chunk: int = 1, num_logits: int = 1) -> int:
    """Return how many pages of `group` a sequence needs to finish.

    `num_tokens` of its tokens have KV, and they are computed in chunks of `chunk` tokens, the last `num_logits` with logits.
    """
    bound = max_held_pages(group, chunk, num_logits)
    most = group.pages_for(num_tokens + group.ahead)
    return most if bound is None else min(most, bound)


def check_fits(request: Request, layout: CacheLayout, num_pages: int, max_model_len: int, max_chunk: int) -> None:
    """Raise if a request could never finish, even alone. The error shows the arithmetic.

    `max_chunk` is the number of prompt tokens that a step has room for, whatever else runs.
    """
    prompt_len = len(request.prompt_token_ids)
    if not prompt_len:
        raise BadRequest("prompt: got no tokens, expected at least one")
    largest = _check_media(request, max_chunk)
    total = prompt_len + request.max_tokens
    if total > max_model_len:
        raise ContextTooLong(
            f"prompt of {prompt_len} tokens + max_tokens {request.max_tokens} = {total}, above max_model_len {max_model_len}",
            hint=f"lower max_tokens to {max_model_len - prompt_len}"
            if prompt_len < max_model_len
            else "shorten the prompt, or raise --max-model-len if the model allows it",
        )
    # The last sampled token needs no KV.
    num_logits = 1 if request.sampling.prompt_logprobs is None else largest
    need = {group.name: least_pages(group, total - 1, largest, num_logits) for group in layout.groups}
    if sum(need.values()) > num_pages:
        parts = " + ".join(f"{count} {name}" for name, count in need.items())
        asked = f"prompt of {prompt_len} tokens + max_tokens {request.max_tokens}"
        raise ContextTooLong(
            f"{asked} needs {parts} pages, but the cache has only {num_pages}",
            hint="lower max_tokens, shorten the prompt, or give the cache more memory (--kv-cache-memory-bytes)",
        )


def check_queue(request: Request, alive: Container[str], num_queued: int, max_queued: int) -> None:
    """Raise if a request cannot be queued now. `alive` are the ids of those that have not ended.

    `num_queued` are the sequences that run or wait. A free slot counts as room, because the next step may fill it.
    """
    if request.request_id in alive:
        raise BadRequest(f"request_id: got {request.request_id!r}, but the request with this id is still running")
    if num_queued >= max_queued:
        raise QueueFull(f"the queue is full: {num_queued} sequences are running or waiting", hint="try again later")


def _check_media(request: Request, max_chunk: int) -> int:
    """Raise if media spans are misplaced or too long for a step. Return the largest chunk that must be computed at once."""
    spans, prompt_len = request.media, len(request.prompt_token_ids)
    for span in spans:
        if span.length < 1 or span.start < 0 or span.end > prompt_len:
            raise BadRequest(
                f"media: got tokens {span.start} to {span.end}, expected a span in the prompt of {prompt_len} tokens"
            )
    if any(span.end > after.start for span, after in pairwise(spans)):
        raise BadRequest("media: expected spans in ascending order that do not overlap")
    largest = max((span.length for span in spans if span.is_whole), default=1)
    if largest > max_chunk:
        raise ContextTooLong(
            f"media: {largest} tokens must be computed in one step, but a step has room for only {max_chunk}",
            hint="raise --max-num-batched-tokens",
        )
    return largest


def reserved_pages(seq: Sequence, budget: int) -> int:
    """Return how many pages `seq` still needs for the tokens it is admitted with, plus one per group to grow.

    In groups with a window, the count covers the pages it holds while its next chunk is in flight.
    """
    reserved = 0
    for pages in seq.groups:
        group = pages.group
        peak = min(group.pages_for(seq.prefill_end) + 1, group.pages_for(seq.max_kv_len))
        peak = max(peak, group.pages_for(seq.prefill_end + group.ahead))
        bound = max_held_pages(group, min(budget, seq.max_chunk, seq.num_uncomputed), 1)
        if bound is not None:
            peak = min(peak, bound)
        reserved += max(0, peak - pages.num_held)
    return reserved


def growth_pages(seq: Sequence, running: Iterable[Sequence]) -> int:
    """Return how many pages must be left for others when the waiting `seq` starts.

    A parked sequence is back in one step. Without pages for what the running ones draw next, one of them would soon make way.
    Other sequences come back in pieces, for which they need about as many pages for a while. It does not wait for more pages
    than it needs itself.
    """
    most, grown = sum(len(pages.host_pages) for pages in seq.parked), 0
    for other in running if most else ():
        length = other.num_computed + min(GROWTH_TOKENS, max(0, other.num_left))
        for pages in other.groups:
            group = pages.group
            bound, peak = max_held_pages(group, 1, 1), group.pages_for(length + group.ahead)
            grown += max(0, (peak if bound is None else min(peak, bound)) - pages.num_held)
    return min(grown, most)


def promised_pages(running: Iterable[Sequence], budget: int) -> int:
    """Return the pages that prompts in progress were promised and do not hold yet."""
    return sum(reserved_pages(seq, budget) for seq in running if seq.num_uncomputed > 1)


def lacking_pages(running: Iterable[Sequence], available: int) -> int:
    """Return how many pages the sequences that decode lack for their next tokens.

    Each gives back the pages behind its window before it takes others. They count as free, even if others share them.
    """
    needed = most = 0
    for seq in running:
        if seq.num_uncomputed == 1 and not seq.pages_unchanged():
            start = seq.num_computed
            missing = [pages.num_missing(start + 1 + pages.ahead, start) - pages.num_behind(start) for pages in seq.groups]
            needed += sum(missing)
            most = max(most, needed)
    return most - available


@dataclass(frozen=True)
class Shortage:
    """How many pages are missing, for the running sequences and for those that wait."""

    running: Sequences[Sequence]
    page_allocator: PageAllocator
    budget: int
    max_running: int

    def num_missing(self, seq: Sequence, leaving: Collection[Sequence] = ()) -> int:
        """Return how many pages a waiting sequence lacks to start, and at least one if it lacks a slot.

        Those that are `leaving` have given back their pages by then.
        """
        staying = [other for other in self.running if other not in leaving] if leaving else self.running
        others = promised_pages(staying, self.budget) + growth_pages(seq, staying)
        available = self.page_allocator.available + sum(other.num_held for other in leaving)
        return max(pages_to_start(seq, self.budget) + others - available, int(len(staying) == self.max_running))

    def num_lacking(self) -> int:
        """Return how many pages the running sequences lack for their next tokens."""
        return lacking_pages(self.running, self.page_allocator.available)


def pages_to_start(seq: Sequence, budget: int) -> int:
    """Return how many pages a waiting sequence needs if nothing of it is cached."""
    seq.prefill_end = len(seq.tokens)
    return reserved_pages(seq, budget)
