"""The interface of drafters. A drafter proposes tokens. The target draws its own tokens and keeps the proposals that agree.

Each drafter with weights is a package with four files:

    spec.py      its `config.json` as plain facts (MTPSpec, DFlashSpec). No torch.
    plan.py      a DrafterPlan, which `culet plan` and the engine need before the weights are loaded. No torch.
    model.py     its layers and weights.
    drafter.py   a Drafter, which the runner calls in every draft round.

`DRAFTERS` names the plan of each method, and `open_drafter` opens it. `DrafterPlan.check` checks the files before the target
fills the device, and `DrafterPlan.build` loads them. A draft round is:

    the target's forward pass -> commit(taps) -> draws, accepted drafts -> propose(draft batch) -> the next step

`commit` writes the drafter's own KV, if it has any (`group`). The KV of prompts and drafts is written in their own step. The KV
of other tokens may be written many steps later, but always before `propose` or another sequence can read it
(`runner/deferred_kv.py`). `commit` is part of the captured graph of a verify step, and also a graph of its own. `propose` is
another graph, which is replayed at other lengths. So on a GPU both only launch kernels. They do not branch on a value on the
device, copy from or to the host, or keep a tensor between calls. A backend's host work for a draft round must depend only on
shapes. A batch may be padded with rows after the real ones. Those have length 1, page tables of the spare page, and proposals
that nobody reads. Tokens that pad `commit` are written nowhere.

Shapes: R sequences that drew in a step, including padding · K proposals of each · T new tokens of a step · D model.
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

if TYPE_CHECKING:  # `culet plan` imports this module without torch
    from torch import Tensor

    from culet.attention.base import AttentionBackend
    from culet.attention.batch import GroupBatch
    from culet.cache.pool import Pool
    from culet.config import DraftChoice
    from culet.layers.weight.weights import Weights
    from culet.models.gemma4 import Gemma4
    from culet.models.spec import ModelSpec

# The DrafterPlan for each `method` of --speculative-config. To add a drafter, add its package and one line here.
DRAFTERS: dict[str, str] = {
    "mtp": "culet.drafters.mtp.plan:MTPPlan",
    "dflash": "culet.drafters.dflash.plan:DFlashPlan",
    "suffix": "culet.drafters.suffix.plan:SuffixPlan",
}
BESIDE = "culet.drafters.suffix.plan:BesidePlan"  # another drafter's plan, with suffix drafting beside it
ABSTAINED = -1  # stands for a proposal that a drafter does not make


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences to draft for, after rejected drafts were removed. All tensors are on the device."""

    newest_R: Tensor  # int64, the newest token of each sequence, which has no KV yet
    length_R: Tensor  # int64, the number of tokens with KV, which is the position of the newest
    slot_R: Tensor  # int64, the runner's slot of each sequence
    hidden_RD: Tensor  # the target's hidden state after its final norm, at the token that the newest was drawn from
    groups: tuple[GroupBatch, ...]  # in the layout's order, with pages_BP and first_B of these sequences and no kv_address_T
    tokens_SL: Tensor  # int32, the tokens of all slots

    @property
    def num_rows(self) -> int:
        return self.newest_R.shape[0]


class Drafter(Protocol):
    """Proposes tokens from the results of the target's forward pass."""

    taps: tuple[int, ...]  # target layers whose outputs its own KV is computed from
    group: KVGroup | None  # group of its own KV, or None if it has none (`commit` is then never called)
    max_drafts: int  # the most tokens that it proposes for a sequence

    @property
    def pass_bytes(self) -> int:
        """The bytes of the weights that one pass reads, including its head."""

    def kernel_keys(self) -> list[tuple[object, ...]]:
        """Return the facts about its weights that decide which kernels are compiled."""

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Compute its own KV from the taps and write it to addresses in its group (-1 means nowhere).

        The tokens may belong to several sequences and steps. Rejected drafts are overwritten by the tokens that replace them.
        """

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        """Return proposals for the tokens after each sequence's newest one, int64 [R, num_drafts].

        It may abstain from the last ones of a row, which are then ABSTAINED. Where the host plans ahead, they are verified as
        token 0.
        """


class DrafterPlan(Protocol):
    """What is known about a drafter for a target before its weights are loaded. No torch."""

    method: str  # its key in DRAFTERS
    model: str  # folder or hub id of the weights, or random:...
    taps: tuple[int, ...]
    max_drafts: int
    reads_target_pages: bool  # whether it depends on the target's cache layout
    num_heads: int  # query heads of its layers
    lookback: int  # keys before the target's window that it also sees, so their pages must stay
    needs_intervals: bool  # whether its attention masks are an interval per query (`visible_2T`) instead of the text rule

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> DrafterPlan:
        """Read the config of `choice.model`. Raise if the drafter was not made for `target`."""

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        """Return the layers that store their own KV, or [] if it reads the target's KV.

        Their `owner` is the method, which also names their group. Their numbers start at `len(target.layers)`.
        """

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        """Return its layers by the name of the KV group that they read. Their numbers start at `len(target.layers)`."""

    def num_parameters(self) -> Mapping[str, int]:
        """Return the number of weights by part."""

    def weight_bytes(self, itemsize: int, layout: CacheLayout | None = None) -> int:
        """Return the bytes of its weights, or of the part that a rank with this cache layout holds.

        `itemsize` is the size of an activation.
        """

    def check(self, weights: Weights, *, latent: bool) -> None:
        """Raise if `build` would reject its files or settings. The target is made from `weights`. Nothing is loaded.

        `latent` is whether the target's cache is latent.
        """

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> Drafter:
        """Load the weights to the target's device in its precision. `backends` are the drafter's, by index of the KV group."""


def open_drafter(choice: DraftChoice, target: ModelSpec) -> DrafterPlan:
    """Return the drafter that `choice` names, checked against `target`. No weights are read."""
    path = lookup("speculative method", choice.method, DRAFTERS)
    plan: DrafterPlan = load(BESIDE if choice.suffix and choice.method != "suffix" else path).open(choice, target)
    return plan


def cache_specs(target: ModelSpec, drafter: DrafterPlan | None, itemsize: int, *, latent: bool) -> list[KVSpec]:
    """Return the KVSpec of each layer of the target and of its drafter that stores KV."""
    specs = target.kv_specs(itemsize, latent=latent)
    if drafter is None:
        return specs
    return [*(replace(spec, lookback=drafter.lookback) for spec in specs), *drafter.kv_specs(itemsize)]


def target_groups(layout: CacheLayout) -> tuple[KVGroup, ...]:
    """Return the KV groups of the target. They come first in the layout."""
    return tuple(group for group in layout.groups if not group.spec.owner)


def plan_drafter_attention(drafter: DrafterPlan, layout: CacheLayout, gpu: Gpu | str, choice: str = "auto") -> AttentionPlan:
    """Choose the attention backends of the drafter's layers. They do not depend on those of the target."""
    readers = drafter.readers(layout)
    groups = [group for group in layout.groups if group.name in readers]
    intervals = tuple(readers) if drafter.needs_intervals else ()
    try:
        return plan_attention(groups, drafter.num_heads, gpu, choice, readers=readers, interval_groups=intervals)
    except ConfigError as error:
        raise ConfigError(f"speculative-config: {error.message}", hint=error.hint) from error
