"""How ranks share a model, for `culet plan --tensor-parallel-size`: what each holds, why, and what they exchange. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from culet.attention.plan import heads_of_rank
from culet.cache.spec import CacheLayout, KVGroup
from culet.hardware import Link
from culet.models.spec import ModelSpec
from culet.parallel.reduce.choice import Method, Reductions

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
class RankFacts:
    """What the exchanges of a step depend on, besides the model and the number of tokens."""

    num_ranks: int
    itemsize: int  # of activations
    max_logits: int  # the most rows of logits in a step
    is_gpu: bool
    link: Link | None  # between the GPUs, or None if it is not known


@dataclass(frozen=True)
class Exchange:
    """What the ranks exchange in a step of `num_tokens` tokens."""

    num_tokens: int
    num_reductions: int
    method: str  # how each of them is added if symmetric memory works
    reduced_bytes: int  # of all tensors that are added
    moved_bytes: int  # that each rank receives for the sums
    gathered_bytes: int  # that each rank receives: logits, and the weights of shared tokens
    link_s: float | None  # time at the link's rate, or None if the link is not known

    @classmethod
    def of(cls, spec: ModelSpec, layout: CacheLayout, ranks: RankFacts, num_tokens: int) -> Exchange:
        """Count the exchanges."""
        per_layer = 3 if spec.moe is not None else 2  # attention, MLP and experts
        num_reductions = 1 + per_layer * len(spec.layers)  # the first one is the embedding
        each = num_tokens * spec.hidden_size * ranks.itemsize
        method = Reductions(has_torch_ops=ranks.is_gpu).method(each)
        name = method.value if method is not Method.LIBRARY else "NCCL" if ranks.is_gpu else "gloo"
        others = ranks.num_ranks - 1
        moved = num_reductions * _moved_bytes(each, method, ranks.num_ranks)
        logits = min(num_tokens, ranks.max_logits) * spec.vocab_size * 4 * others // ranks.num_ranks
        shared = [group for group in layout.groups if group.spec.token_shares > 1]
        heads = sum(len(group.layers) * heads_of_rank(group, spec.layers[0].num_heads) for group in shared)
        gathered = logits + others * num_tokens * 4 * heads
        seconds = None if ranks.link is None else (moved + gathered) / ranks.link.bytes_per_s
        return cls(num_tokens, num_reductions, name, num_reductions * each, moved, gathered, seconds)


def _moved_bytes(num_bytes: int, method: Method, num_ranks: int) -> int:
    """Return how many bytes each rank receives while a tensor of `num_bytes` is added.

    In one shot, it receives every other rank's tensor. Otherwise, and in a ring, it receives the other ranks' terms of its own
    part, and then the sums of the other parts.
    """
    others = num_ranks - 1
    return others * num_bytes if method is Method.ONE_SHOT else 2 * others * num_bytes // num_ranks


def weight_shares(spec: ModelSpec, layout: CacheLayout, part_bytes: Mapping[str, int], num_ranks: int) -> list[Share]:
    """Return how ranks share the parts of the text decoder. `part_bytes` are those of each rank."""
    return [Share(part, *_part_share(spec, layout, part, num_ranks), size) for part, size in part_bytes.items()]


def _part_share(spec: ModelSpec, layout: CacheLayout, part: str, num_ranks: int) -> tuple[str, str]:
    """Return how ranks share a part, and why."""
    if part == "attention":
        shares = [layout.group_of(layer.kv_source).spec.head_shares for layer in spec.layers]
        why = "each rank computes whole heads"
        if min(shares) < num_ranks:
            why = f"global layers have {min(shares)} KV heads, so {num_ranks // min(shares)} ranks hold the same ones"
        return "by heads", why
    if part in _BY_WIDTH:
        return _BY_WIDTH[part], "partial sums meet in a reduction"
    if part in _BY_ROWS:
        return "by vocabulary", "each rank scores its own tokens"
    return "whole on each rank", "too small to divide"


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
