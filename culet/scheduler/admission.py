"""What is refused at once, and how many pages a waiting sequence needs before it starts."""

from __future__ import annotations

from culet.cache.spec import CacheLayout, KVGroup
from culet.errors import BadRequest, ContextTooLong
from culet.scheduler.sequence import Sequence, max_held_pages
from culet.types import Request


def least_pages(group: KVGroup, num_tokens: int) -> int:
    """Pages of `group` without which a sequence of `num_tokens` tokens with KV cannot end, computed token by token."""
    bound = max_held_pages(group, 1, 1)
    most = group.pages_for(num_tokens + group.ahead)
    return most if bound is None else min(most, bound)


def check_fits(request: Request, layout: CacheLayout, num_pages: int, max_model_len: int) -> None:
    """Refuse a request that could never end, even alone, with the arithmetic."""
    prompt_len = len(request.prompt_token_ids)
    if not prompt_len:
        raise BadRequest("prompt: got no tokens, expected at least one")
    total = prompt_len + request.max_tokens
    if total > max_model_len:
        raise ContextTooLong(
            f"prompt of {prompt_len} tokens + max_tokens {request.max_tokens} = {total}, over max_model_len {max_model_len}",
            hint=f"lower max_tokens to {max_model_len - prompt_len}"
            if prompt_len < max_model_len
            else "shorten the prompt, or raise --max-model-len where the model allows",
        )
    # The last token drawn leaves no KV.
    need = {group.name: least_pages(group, total - 1) for group in layout.groups}
    if sum(need.values()) > num_pages:
        parts = " + ".join(f"{count} {name}" for name, count in need.items())
        raise ContextTooLong(
            f"prompt of {prompt_len} tokens + max_tokens {request.max_tokens} takes {parts} pages, the cache has {num_pages}",
            hint="lower max_tokens, shorten the prompt, or give the cache more memory (--kv-cache-memory-bytes)",
        )


def reserved_pages(sequence: Sequence, budget: int) -> int:
    """Pages that `sequence` lacks for the tokens it is admitted with, and one more per group to grow.

    In groups with a window that is what it holds while its next chunk is in flight.
    """
    reserved = 0
    for pages in sequence.groups:
        group = pages.group
        peak = min(group.pages_for(sequence.prefill_end) + 1, group.pages_for(sequence.max_kv_len))
        peak = max(peak, group.pages_for(sequence.prefill_end + group.ahead))
        bound = max_held_pages(group, min(budget, sequence.num_uncomputed), 1)
        if bound is not None:
            peak = min(peak, bound)
        reserved += max(0, peak - pages.num_held)
    return reserved
