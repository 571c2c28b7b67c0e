"""What the engine and the runner know of a drafter. It proposes tokens; the target draws its own and keeps those that agree.

Each drafter is a package with four files:

    spec.py      its `config.json` as plain facts (MTPSpec, DFlashSpec). No torch.
    plan.py      a DrafterPlan: what `culet plan` and the engine need before the weights are loaded. No torch.
    model.py     its layers and weights.
    drafter.py   a Drafter: what the runner calls in every draft round.

`DRAFTERS` names the plan of each method, `open_drafter` opens it, and `DrafterPlan.build` loads the weights. A draft round is:

    the target's forward pass -> commit(what it tapped) -> draws, accepted drafts -> propose(draft batch) -> the next step

`commit` writes the drafter's own KV, if it has any (`group`): that of prompts and drafts in their own step, that of other
tokens perhaps many steps later, but always before `propose` or another sequence can read it (`runner/deferred_kv.py`). It is
part of the captured graph of a verify step, and also a graph of its own. `propose` is another graph, replayed at other
lengths. So on a GPU both only launch kernels: no branch on a value on the device, no copy from or to the host, no tensor that
is kept between calls. What a backend plans on the host per draft round must depend only on shapes. A batch may be padded: rows
after the real ones have length 1, page tables of the spare page, and proposals that nobody reads. Tokens that pad `commit` are
written nowhere.

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

if TYPE_CHECKING:  # `culet plan` imports this module, and needs no torch
    from torch import Tensor

    from culet.attention.base import AttentionBackend
    from culet.attention.batch import GroupBatch
    from culet.cache.pool import Pool
    from culet.config import DraftChoice
    from culet.models.gemma4 import Gemma4
    from culet.models.spec import ModelSpec

# By `method` of --speculative-config: its DrafterPlan. A new drafter is its package and one line here.
DRAFTERS: dict[str, str] = {
    "mtp": "culet.drafters.mtp.plan:MTPPlan",
    "dflash": "culet.drafters.dflash.plan:DFlashPlan",
}


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences to draft for, after rejected drafts were removed. All tensors are on the device."""

    newest_R: Tensor  # int64; the newest token of each sequence, which has no KV yet
    length_R: Tensor  # int64; tokens whose KV exists, so the position of the newest
    slot_R: Tensor  # int64; the runner's slot of each sequence
    hidden_RD: Tensor  # the target's hidden state after its final norm, at the token that the newest was drawn from
    groups: tuple[GroupBatch, ...]  # in the layout's order, with pages_BP and first_B of these sequences; kv_address_T is empty

    @property
    def num_rows(self) -> int:
        return self.newest_R.shape[0]


class Drafter(Protocol):
    """Proposes tokens from the results of the target's forward pass."""

    taps: tuple[int, ...]  # target layers whose output its own KV is computed from
    group: KVGroup | None  # of its own KV; None: it has none, and `commit` is never called
    max_drafts: int  # most tokens that it proposes for a sequence

    def weight_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all its weights. With the method, they decide which kernels are compiled."""

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Write its own KV of tokens, computed from the taps, to addresses in its group (-1: nowhere).

        The tokens may belong to several sequences and steps. Rejected drafts are overwritten by the tokens that replace them.
        """

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        """Proposals for the tokens after each sequence's newest one: int64 [R, num_drafts]."""


class DrafterPlan(Protocol):
    """Which drafter, for which target, and what it needs: known before its weights are loaded. No torch."""

    method: str  # its key in DRAFTERS
    model: str  # folder, hub id or random:... of the weights
    taps: tuple[int, ...]
    max_drafts: int
    reads_target_pages: bool  # True: it depends on the target's cache layout
    num_heads: int  # query heads of its layers
    lookback: int  # keys before the target's window that it also sees, so their pages must stay
    needs_intervals: bool  # its attention masks are an interval per query (`visible_2T`), not the text rule

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> DrafterPlan:
        """Read the config of `choice.model`, and refuse a drafter that was not made for `target`."""

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        """The layers that store KV of their own; [] if it reads the target's KV.

        Their `owner` is the method, which names their group, and their numbers start at `len(target.layers)`.
        """

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        """Its layers by the name of the KV group that they read. Their numbers start at `len(target.layers)`."""

    def num_parameters(self) -> Mapping[str, int]:
        """Number of weights by part, for `culet plan`."""

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> Drafter:
        """Load the weights to the target's device, in its precision. `backends` are its own, by index of the KV group."""


def open_drafter(choice: DraftChoice, target: ModelSpec) -> DrafterPlan:
    """The drafter that `choice` names, checked against `target`. No weights are read."""
    plan: DrafterPlan = load(lookup("speculative method", choice.method, DRAFTERS)).open(choice, target)
    return plan


def cache_specs(target: ModelSpec, drafter: DrafterPlan | None, itemsize: int, *, latent: bool) -> list[KVSpec]:
    """What each layer of the target and of its drafter stores."""
    specs = target.kv_specs(itemsize, latent=latent)
    if drafter is None:
        return specs
    return [*(replace(spec, lookback=drafter.lookback) for spec in specs), *drafter.kv_specs(itemsize)]


def target_groups(layout: CacheLayout) -> tuple[KVGroup, ...]:
    """The KV groups of the target. They come first."""
    return tuple(group for group in layout.groups if not group.spec.owner)


def plan_drafter_attention(drafter: DrafterPlan, layout: CacheLayout, gpu: Gpu | str, choice: str = "auto") -> AttentionPlan:
    """The attention backends of the drafter's layers. They do not depend on those of the target."""
    readers = drafter.readers(layout)
    groups = [group for group in layout.groups if group.name in readers]
    intervals = tuple(readers) if drafter.needs_intervals else ()
    try:
        return plan_attention(groups, drafter.num_heads, gpu, choice, readers=readers, interval_groups=intervals)
    except ConfigError as error:
        raise ConfigError(f"speculative-config: {error.message}", hint=error.hint) from error
