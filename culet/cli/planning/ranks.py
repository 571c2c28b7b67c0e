"""How ranks share a model, for `culet plan --tensor-parallel-size`: what each holds, why, and what they exchange. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from culet.attention.plan import heads_of_rank
from culet.cache.spec import CacheLayout, KVGroup
from culet.hardware import Link
from culet.models.sizes import attention_weights
from culet.models.spec import ModelSpec

STEP_TOKENS = (1, 8, 32, 256, 2048)  # numbers of tokens in a step for which exchanges are shown
_BY_WIDTH = {"dense MLP": "by width", "routed experts": "every expert by width"}
_BY_ROWS = ("token embedding", "head")


@dataclass(frozen=True)
class Share:
    """How ranks share a part of the model."""

    part: str
    how: str
    why: str
    rank_bytes: int


@dataclass(frozen=True)
class Exchange:
    """What the ranks exchange in a step of `num_tokens` tokens."""

    num_tokens: int
    num_reductions: int
    reduced_bytes: int  # of all reductions, as each rank sees them
    gathered_bytes: int  # that each rank receives: logits, and the weights of shared tokens
    link_s: float | None  # time at the link's rate, or None if the link is not known

    @classmethod
    def of(
        cls, spec: ModelSpec, layout: CacheLayout, num_ranks: int, itemsize: int, num_tokens: int, link: Link | None
    ) -> Exchange:
        """Count the exchanges. A ring moves 2 (N - 1) / N of a reduced tensor over each link."""
        per_layer = 3 if spec.moe is not None else 2  # attention, MLP and experts
        num_reductions = 1 + per_layer * len(spec.layers)  # the first one is the embedding
        reduced = num_reductions * num_tokens * spec.hidden_size * itemsize
        others = num_ranks - 1
        logits = min(num_tokens, 256) * spec.vocab_size * 4 * others // num_ranks
        shared = [group for group in layout.groups if group.spec.token_shares > 1]
        heads = sum(len(group.layers) * heads_of_rank(group, spec.layers[0].num_heads) for group in shared)
        gathered = logits + others * num_tokens * 4 * heads
        seconds = None if link is None else (2 * others / num_ranks * reduced + gathered) / link.bytes_per_s
        return cls(num_tokens, num_reductions, reduced, gathered, seconds)


def weight_shares(spec: ModelSpec, layout: CacheLayout, part_bytes: Mapping[str, int], num_ranks: int) -> list[Share]:
    """Return how ranks share the parts of the text decoder."""
    return [_weight_share(spec, layout, part, size, num_ranks) for part, size in part_bytes.items()]


def _weight_share(spec: ModelSpec, layout: CacheLayout, part: str, size: int, num_ranks: int) -> Share:
    if part == "attention":
        counts = [attention_weights(layer, spec.hidden_size) for layer in spec.layers]
        shares = [layout.group_of(layer.kv_source).spec.head_shares for layer in spec.layers]
        own = sum(count / share for count, share in zip(counts, shares, strict=True)) / sum(counts)
        why = "each rank computes whole heads"
        if min(shares) < num_ranks:
            why = f"global layers have {min(shares)} KV heads, so {num_ranks // min(shares)} ranks hold the same ones"
        return Share(part, "by heads", why, round(size * own))
    if part in _BY_WIDTH:
        return Share(part, _BY_WIDTH[part], "partial sums meet in a reduction", size // num_ranks)
    if part in _BY_ROWS:
        return Share(part, "by vocabulary", "each rank scores its own tokens", size // num_ranks)
    return Share(part, "whole on each rank", "too small to divide", size)


def cache_share(group: KVGroup, num_ranks: int) -> tuple[str, str]:
    """Return how ranks share the pages of a group, and why."""
    heads = group.spec.num_kv_heads * group.spec.head_shares
    if group.spec.owner:
        return "whole on each rank", "the drafter's own KV is small"
    if group.spec.token_shares == 1:
        return "by heads", f"{heads} KV heads for {num_ranks} ranks"
    shares = group.spec.token_shares
    why = f"{heads} KV heads for {num_ranks} ranks: {shares} ranks of a head take turns with runs of tokens"
    return ("by heads and tokens" if heads > 1 else "by tokens"), why
