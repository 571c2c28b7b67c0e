"""The contents of the KV cache. Each layer has a KVSpec, layers of the same kind form a KVGroup, and all groups share slabs.

A **slab** is the unit of the arena. It is one page of one group, with all KV-owning layers of that group. Each group has its
own number of tokens per slab, so sliding and global pages share one memory without a fixed ratio between them.

The order inside a slab is [layer][plane][kv_head][token][width]. A group has a K plane and a V plane, each `head_dim` wide. If
K and V come from one projection, it has a single latent plane instead, with rows `v_rot | nope | k_rot`. V is the first
`head_dim` columns, K is the last `head_dim` columns, and the part they share is stored once.

With several ranks, each holds some of the KV heads, and a layout describes what one of them stores. If there are more ranks
than KV heads, the ranks of a head share its tokens. A page is cut into runs of RUN_TOKENS tokens, and the ranks take turns. So
page numbers are the same on all ranks, and a page covers several times as many tokens as each rank stores of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from culet.errors import ConfigError
from culet.registry import lookup

PAGE_MULTIPLE = 16  # page tokens are a multiple of this, so that kernel tiles divide pages
RUN_TOKENS = 64  # consecutive tokens that one of the ranks of a KV head holds. A multiple of PAGE_MULTIPLE.
PREFERRED_SLIDING_PAGE = 64  # tokens. Larger pages waste memory at the window's edge, smaller ones cost table entries.
MAX_GROWN_SLAB = 4 << 20  # bytes up to which a slab is doubled to reach the preferred page
REPLICAS_HINT = "omit --tensor-parallel-size; `culet serve --data-parallel-size N` gives each of N GPUs the whole model"
MAX_EXACT_SLAB = 16 << 20  # if an exact division needs a larger slab, some waste is accepted and reported


@dataclass(frozen=True)
class KVSpec:
    """What one KV-owning layer stores per token."""

    layer: int
    num_kv_heads: int
    head_dim: int
    rotated_dims: int  # head dims that rope rotates (used only for latents)
    window: int | None  # number of keys that a query sees, including its own, or None for all
    latent: bool  # whether K and V are stored once
    itemsize: int  # bytes per element, where one byte means fp8 (e4m3)
    owner: str = ""  # the drafter that the layer belongs to, or "" for the target
    ahead: int = 0  # positions after a sequence's end that a drafter uses as scratch space in every round
    lookback: int = 0  # keys before the window that a drafter also sees
    head_shares: int = 1  # number of ranks among which the KV heads are divided. `num_kv_heads` are those of one rank.
    token_shares: int = 1  # number of ranks among which the tokens of each KV head are divided

    @property
    def width(self) -> int:
        """Number of elements in one row of one plane."""
        return self.head_dim + self.rotated_dims if self.latent else self.head_dim

    @property
    def num_planes(self) -> int:
        return 1 if self.latent else 2

    @property
    def is_fp8(self) -> bool:
        """Whether rows are rounded to e4m3. A query reads the same values whether or not they passed through a page."""
        return self.itemsize == 1

    @property
    def stored_bytes(self) -> int:
        """Bytes of a token in a rank that stores it."""
        return self.num_planes * self.num_kv_heads * self.width * self.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in each rank, on average."""
        return self.stored_bytes // self.token_shares

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of the layer's group. Layers of equal kind share a group, and all layers of a drafter are one group."""
        if self.owner:
            return (self.owner,)
        return (self.num_kv_heads, self.head_dim, self.rotated_dims, self.window, self.latent, self.itemsize)


@dataclass(frozen=True)
class KVGroup:
    """Layers that store the same shape with the same window, and therefore share pages."""

    name: str  # "sliding", "global", or a drafter's name
    index: int  # position in CacheLayout.groups, Row.tables and ForwardBatch.groups
    specs: tuple[KVSpec, ...]
    page_tokens: int  # tokens of a sequence that a page covers

    @property
    def stored_tokens(self) -> int:
        """Number of a page's tokens that each rank stores."""
        return self.page_tokens // self.spec.token_shares

    @property
    def spec(self) -> KVSpec:
        """The spec of the first layer. All layers of the group have the same shape."""
        return self.specs[0]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(spec.layer for spec in self.specs)

    @property
    def window(self) -> int | None:
        return self.spec.window

    @property
    def reach(self) -> int | None:
        """Number of keys that must stay (the window and the keys that a drafter sees before it), or None for all."""
        return None if self.window is None else self.window + self.spec.lookback

    @property
    def ahead(self) -> int:
        """Number of positions after a sequence's end that also need pages."""
        return self.spec.ahead

    @property
    def stored_bytes(self) -> int:
        """Bytes of a token in a rank that stores it."""
        return sum(spec.stored_bytes for spec in self.specs)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in each rank, on average."""
        return self.stored_bytes // self.spec.token_shares

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for the first `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def first_visible(self, position: int) -> int:
        """Return the first key that a query at `position` sees, including a drafter's query."""
        return 0 if self.reach is None else max(0, position - self.reach + 1)


@dataclass(frozen=True)
class CacheLayout:
    """The slab and how each group fills it."""

    slab_bytes: int
    groups: tuple[KVGroup, ...]

    def waste(self, group: KVGroup) -> int:
        """Return the bytes of a slab that a page of `group` leaves unused."""
        return self.slab_bytes - group.stored_tokens * group.stored_bytes

    def group_of(self, layer: int) -> KVGroup:
        """Return the group that holds the KV of `layer`."""
        return next(group for group in self.groups if layer in group.layers)


def group_name(spec: KVSpec) -> str:
    if spec.owner:
        return spec.owner
    return "global" if spec.window is None else "sliding"


PRECISIONS = {"auto": 0, "bfloat16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1}  # bytes per element, or 0 for the model's own
DTYPE_NAMES = {1: "fp8_e4m3", 2: "bfloat16", 4: "float32"}  # by bytes per element


def stored_as(specs: Sequence[KVSpec], choice: str) -> list[KVSpec]:
    """Convert `specs` from the model's precision to that of `--kv-cache-dtype`. Raise ConfigError if that is impossible.

    `choice` is a name in PRECISIONS for all groups, or sliding=NAME,global=NAME. A drafter's own layers do not change,
    because they are few and their keys are not scaled to fit into e4m3.
    """
    names = list(dict.fromkeys(group_name(spec) for spec in specs if not spec.owner))
    chosen = dict.fromkeys(names, choice.strip())
    if "=" in choice:
        chosen = dict.fromkeys(names, "auto")
        for part in choice.split(","):
            group, is_pair, name = (word.strip() for word in part.partition("="))
            if not is_pair:
                raise ConfigError(
                    f"kv-cache-dtype: got {part.strip()!r}, expected GROUP=NAME", hint="example: sliding=fp8,global=auto"
                )
            lookup("group of layers", group, chosen)
            chosen[group] = name
    return [spec if spec.owner else _stored_as(spec, chosen[group_name(spec)]) for spec in specs]


def _stored_as(spec: KVSpec, name: str) -> KVSpec:
    itemsize = lookup("kv-cache-dtype", name, PRECISIONS) or spec.itemsize
    # Kernels multiply queries and keys in the model's precision, or widen e4m3 to it.
    if itemsize not in (1, spec.itemsize):
        own = next(known for known, size in PRECISIONS.items() if size == spec.itemsize)
        raise ConfigError(f"kv-cache-dtype: got {name}, but the model runs in {own}", hint=f"use auto, fp8 or {own}")
    return replace(spec, itemsize=itemsize)


def share_among(specs: Sequence[KVSpec], num_ranks: int) -> list[KVSpec]:
    """Return what one of `num_ranks` ranks stores. Raise ConfigError if the KV heads cannot be divided among them.

    A drafter's own layers are the same on every rank.
    """
    return [spec if spec.owner else _share_among(spec, num_ranks) for spec in specs]


def _share_among(spec: KVSpec, num_ranks: int) -> KVSpec:
    heads = spec.num_kv_heads
    if heads % num_ranks == 0:
        return replace(spec, num_kv_heads=heads // num_ranks, head_shares=num_ranks)
    if spec.window is None and num_ranks % heads == 0:
        return replace(spec, num_kv_heads=1, head_shares=heads, token_shares=num_ranks // heads)
    raise ConfigError(
        f"tensor-parallel-size: got {num_ranks}, but the {group_name(spec)} layers have {heads} KV heads, "
        "which cannot be divided among that many ranks",
        hint=f"use a power of two of at most {heads}; `culet serve --data-parallel-size` is for more GPUs"
        if heads > 1
        else REPLICAS_HINT,
    )


def plan_cache(specs: Sequence[KVSpec], *, page_multiple: int = PAGE_MULTIPLE, slab_bytes: int | None = None) -> CacheLayout:
    """Group layers of the same kind and choose the slab size if none is given. Groups fill the slab exactly if sizes allow."""
    kinds: dict[tuple[object, ...], list[KVSpec]] = {}
    for spec in specs:
        kinds.setdefault(spec.kind, []).append(spec)
    # Sliding groups come first because they have more pages. Row.tables has the same order.
    # A drafter's groups come last and do not affect the size of the slab.
    ordered = sorted(kinds.values(), key=lambda group: (group[0].owner, group[0].window is None, group[0].layer))
    multiples = [page_multiple if group[0].token_shares == 1 else RUN_TOKENS for group in ordered]
    sizes = [sum(spec.stored_bytes for spec in group) for group in ordered]  # of a stored token
    own = [pair for pair, group in zip(zip(sizes, multiples, strict=True), ordered, strict=True) if not group[0].owner]
    slab_bytes = slab_bytes or max(
        _choose_slab(own), *(size * multiple for size, multiple in zip(sizes, multiples, strict=True))
    )
    names = [group_name(group[0]) for group in ordered]
    groups = []
    for index, (members, size, multiple) in enumerate(zip(ordered, sizes, multiples, strict=True)):
        name = names[index] if names.count(names[index]) == 1 else f"{names[index]}{names[: index + 1].count(names[index])}"
        stored_tokens = slab_bytes // size // multiple * multiple
        assert stored_tokens > 0, f"a slab of {slab_bytes} bytes has no room for a page of {multiple} x {size} bytes"
        groups.append(KVGroup(name, index, tuple(members), stored_tokens * members[0].token_shares))
    return CacheLayout(slab_bytes, tuple(groups))


def _choose_slab(sizes: Sequence[tuple[int, int]]) -> int:
    """Return the size of a slab that every group fills exactly. A group has a size per stored token and a multiple of tokens.

    It is the smallest such size, doubled until pages have a useful size. If it is too large, accept some waste.
    """
    least = max(size * multiple for size, multiple in sizes)
    slab = math.lcm(*(size * multiple for size, multiple in sizes))
    if slab > max(MAX_EXACT_SLAB, least):
        slab = least
    largest = max(size for size, _ in sizes)
    while slab // largest < PREFERRED_SLIDING_PAGE and slab * 2 <= MAX_GROWN_SLAB:
        slab *= 2
    return slab
