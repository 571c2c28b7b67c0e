"""What a drafter is to the engine and to the runner. It proposes tokens; the target draws its own and keeps those that agree.

A drafter comes in two parts. Its **DrafterSpec** holds what its config says and needs no torch, so that `culet plan` can
show it; `DRAFTERS` names the class by method, `open_drafter` opens it. `DrafterSpec.build` loads the weights and gives the
**Drafter**, which the runner calls in every round:

    the target's forward pass -> commit(what it tapped) -> draws, accepted drafts -> propose(draft batch) -> the next step

`commit` writes the drafter's own KV, if it has any (`group`): of a prompt's tokens and of drafts in their own step, of others
perhaps many steps later, but always before `propose` or another sequence could read it (`runner/late.py`). It is part of the
captured graph of a verify step and a graph of its own; `propose` is another, replayed at other lengths. So on a GPU both only
launch: no branch on a value on the device, no copy to the host or from it, no tensor that is kept from call to call. What a
backend plans on the host once a round must follow from shapes alone. A batch may be padded: rows behind the real ones have
length 1, page tables of the spare page, and proposals that nobody reads; tokens that pad `commit` are written nowhere.

Shapes: R sequences that drew in a step, padding included · K proposals of each · T new tokens of a step · D model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from culet.attention.plan import AttentionPlan, plan_attention
from culet.cache.spec import CacheLayout, KVGroup, KVSpec
from culet.errors import ConfigError
from culet.hardware import Gpu
from culet.registry import load, lookup

if TYPE_CHECKING:  # this module is read by `culet plan`, which does without torch
    from torch import Tensor

    from culet.attention.base import AttentionBackend
    from culet.attention.batch import GroupBatch
    from culet.cache.pool import Pool
    from culet.config import DraftChoice
    from culet.models.gemma4 import Gemma4
    from culet.models.spec import ModelSpec

# By `method` of --speculative-config: where its DrafterSpec is. A new drafter is its files and one line here.
DRAFTERS: dict[str, str] = {
    "mtp": "culet.drafters.mtp.plan:MTPSpec",
    "dflash": "culet.drafters.dflash.plan:DFlashSpec",
}


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences to draft for, after rejected drafts were taken back. Everything lies on the device."""

    newest_R: Tensor  # int64; the newest token of each sequence, which has no KV yet
    length_R: Tensor  # int64; tokens whose KV exists, so the position of the newest
    slot_R: Tensor  # int64; the runner's slot of each sequence
    hidden_RD: Tensor  # the target's hidden state after its final norm, at the token that the newest was drawn from
    groups: tuple[GroupBatch, ...]  # in the layout's order: pages_BP and first_B of these sequences; kv_address_T is empty

    @property
    def num_rows(self) -> int:
        return self.newest_R.shape[0]


class Drafter(Protocol):
    """Proposes tokens from what the target's forward pass leaves behind."""

    taps: tuple[int, ...]  # target layers whose output its own KV is made of
    group: KVGroup | None  # of its own KV; None: it has none, and `commit` is never called
    max_drafts: int  # most tokens it proposes for a sequence

    def weight_shapes(self) -> list[tuple[int, ...]]:
        """Of all its weights: with the method, what its kernels are compiled for."""

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Write its own KV of tokens, made of what was tapped, to the slots of its group (-1: nowhere).

        The tokens may be of several sequences and steps. Rejected drafts are written over by what comes in their place.
        """

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        """Proposals for the tokens after the newest one of each sequence: int64 [R, num_drafts]."""


class DrafterSpec(Protocol):
    """A drafter's config as plain facts. No torch."""

    method: str  # its key in DRAFTERS
    model: str  # folder, hub name or random:... that the weights come from
    taps: tuple[int, ...]
    max_drafts: int
    reads_target_pages: bool  # True binds it to the target's cache layout
    num_heads: int  # query heads of its layers
    lookback: int  # keys behind the target's window that it sees too, so that their pages must stay
    needs_intervals: bool  # its attention masks are intervals per query (`visible_2T`), not the text rule

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> DrafterSpec:
        """Read the config that `choice.model` names, and refuse a drafter that was not made for `target`."""

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        """Layers of its own that store KV: [] where it reads the target's. They carry `owner=method`, which names their group,
        and layer numbers from `len(target.layers)` on."""

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        """By name of the KV groups that it reads: its layers, numbered from `len(target.layers)` on."""

    def num_parameters(self) -> Mapping[str, int]:
        """Weights by part, for `culet plan`."""

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> Drafter:
        """Load the weights to the target's device in its precision. `backends` are its own, by index of the KV group."""


def open_drafter(choice: DraftChoice, target: ModelSpec) -> DrafterSpec:
    """The drafter that `choice` names, fit for `target`; no weights are read."""
    spec: DrafterSpec = load(lookup("speculative method", choice.method, DRAFTERS)).open(choice, target)
    return spec


def cache_specs(target: ModelSpec, drafter: DrafterSpec | None, itemsize: int, *, latent: bool) -> list[KVSpec]:
    """What the layers of the target and of its drafter store."""
    specs = target.kv_specs(itemsize, latent=latent)
    if drafter is None:
        return specs
    return [*(replace(spec, lookback=drafter.lookback) for spec in specs), *drafter.kv_specs(itemsize)]


def target_groups(layout: CacheLayout) -> tuple[KVGroup, ...]:
    """The KV groups of the target; they come first."""
    return tuple(group for group in layout.groups if not group.spec.owner)


def plan_drafter(drafter: DrafterSpec, layout: CacheLayout, gpu: Gpu | str, choice: str = "auto") -> AttentionPlan:
    """Who serves the drafter's own layers: planned by itself, whatever serves the target's."""
    readers = drafter.readers(layout)
    groups = [group for group in layout.groups if group.name in readers]
    intervals = tuple(readers) if drafter.needs_intervals else ()
    try:
        return plan_attention(groups, drafter.num_heads, gpu, choice, readers=readers, interval_groups=intervals)
    except ConfigError as error:
        raise ConfigError(f"speculative-config: {error.message}", hint=error.hint) from error
