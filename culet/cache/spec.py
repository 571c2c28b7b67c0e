"""What the KV cache holds: one KVSpec per layer, like layers in a KVGroup, and the slab that all groups share.

A **slab** is the unit of the arena: one page of one group, with all KV-owning layers of that group together. A group
says how many tokens of it fill a slab, so sliding and global pages come out of one memory and no ratio is set.

Inside a slab: [layer][plane][kv_head][token][width]. A group has a K plane and a V plane, each `head_dim` wide, or, where
K and V come from one projection, a single latent plane of rows `v_rot | nope | k_rot`: V is the first `head_dim`
columns, K the last `head_dim`, and the part they share is stored once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_MULTIPLE = 16  # page tokens are a multiple of this, so that kernel tiles divide pages
PREFERRED_SLIDING_PAGE = 64  # tokens; larger pages waste window, smaller ones cost table entries
MAX_GROWN_SLAB = 4 << 20  # bytes up to which a slab is doubled to reach the preferred page
MAX_EXACT_SLAB = 16 << 20  # an exact division that needs a larger slab is given up, and the waste printed


@dataclass(frozen=True)
class KVSpec:
    """What one KV-owning layer stores per token."""

    layer: int
    num_kv_heads: int
    head_dim: int
    rotated_dims: int  # head dims that rope turns; only the latent cares
    window: int | None  # keys a query sees, itself included; None: all
    latent: bool  # K and V stored once
    itemsize: int  # bytes per element

    @property
    def width(self) -> int:
        """Elements of one row of one plane."""
        return self.head_dim + self.rotated_dims if self.latent else self.head_dim

    @property
    def num_planes(self) -> int:
        return 1 if self.latent else 2

    @property
    def bytes_per_token(self) -> int:
        return self.num_planes * self.num_kv_heads * self.width * self.itemsize

    @property
    def kind(self) -> tuple[int, int, int, int | None, bool, int]:
        """Layers of equal kind share a group."""
        return (self.num_kv_heads, self.head_dim, self.rotated_dims, self.window, self.latent, self.itemsize)


@dataclass(frozen=True)
class KVGroup:
    """Layers that store the same shape under the same window, and so share pages."""

    name: str  # "sliding", "global", or a drafter's name
    index: int  # position in CacheLayout.groups, Row.tables and ForwardBatch.groups
    specs: tuple[KVSpec, ...]
    page_tokens: int

    @property
    def spec(self) -> KVSpec:
        """The shape, equal for all layers of the group."""
        return self.specs[0]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(spec.layer for spec in self.specs)

    @property
    def window(self) -> int | None:
        return self.spec.window

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.specs)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens from position 0 on take."""
        return -(-num_tokens // self.page_tokens)

    def first_visible(self, position: int) -> int:
        """First key that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class CacheLayout:
    """The slab and how each group fills it."""

    slab_bytes: int
    groups: tuple[KVGroup, ...]

    def waste(self, group: KVGroup) -> int:
        """Bytes of a slab that a page of `group` leaves unused."""
        return self.slab_bytes - group.page_tokens * group.bytes_per_token

    def group_of(self, layer: int) -> KVGroup:
        """The group that holds `layer`'s KV."""
        return next(group for group in self.groups if layer in group.layers)


def group_name(spec: KVSpec) -> str:
    return "global" if spec.window is None else "sliding"


def plan_cache(specs: Sequence[KVSpec], *, page_multiple: int = PAGE_MULTIPLE, slab_bytes: int | None = None) -> CacheLayout:
    """Group like layers and choose the slab (or take the one given), exactly where the groups' sizes divide."""
    kinds: dict[tuple[object, ...], list[KVSpec]] = {}
    for spec in specs:
        kinds.setdefault(spec.kind, []).append(spec)
    # Sliding groups first: theirs is the larger number of pages, and the order is that of Row.tables.
    ordered = sorted(kinds.values(), key=lambda group: (group[0].window is None, group[0].layer))
    per_token = [sum(spec.bytes_per_token for spec in group) for group in ordered]
    slab_bytes = slab_bytes or _choose_slab(per_token, page_multiple)
    names = [group_name(group[0]) for group in ordered]
    groups = []
    for index, (members, size) in enumerate(zip(ordered, per_token, strict=True)):
        name = names[index] if names.count(names[index]) == 1 else f"{names[index]}{names[: index + 1].count(names[index])}"
        page_tokens = slab_bytes // size // page_multiple * page_multiple
        assert page_tokens > 0, f"a slab of {slab_bytes} bytes holds no page of {page_multiple} x {size} bytes"
        groups.append(KVGroup(name, index, tuple(members), page_tokens))
    return CacheLayout(slab_bytes, tuple(groups))


def _choose_slab(per_token: Sequence[int], page_multiple: int) -> int:
    """Smallest slab that every group fills exactly with a multiple of `page_multiple` tokens, grown to useful pages."""
    slab = math.lcm(*(size * page_multiple for size in per_token))
    if slab > max(MAX_EXACT_SLAB, max(per_token) * page_multiple):
        slab = max(per_token) * page_multiple
    largest = max(per_token)
    while slab // largest < PREFERRED_SLIDING_PAGE and slab * 2 <= MAX_GROWN_SLAB:
        slab *= 2
    return slab
