"""MTP drafting. It drafts a chain of tokens over the target's own pages and writes no KV.

All drafts of a draft round have the same position and see the same keys. Along the chain, only the token and the hidden state
change. Implementations use different positions. With L tokens whose KV exists, `hf` uses L, the newest token's own position,
where sliding layers see one key more than the window. `engine` uses L - 1, like an ordinary query of the last token with KV.
The choice affects how many drafts are accepted, but never the output.

Shapes: R sequences · K drafts · B the target's model width · X = 2 B · D the drafter's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch, RowFacts, own_share
from culet.cache.pool import Pool
from culet.drafters.base import DraftBatch
from culet.drafters.mtp.model import MTPModel
from culet.drafters.mtp.spec import MTPSpec
from culet.layers.attention import Pass
from culet.layers.weight.weights import Weights
from culet.models.gemma4 import Gemma4
from culet.models.random_checkpoint import RandomDraw
from culet.models.random_weights import fill_randomly
from culet.models.weights import check_weights, choose_rounding, load_weights

_TIED_HEAD = "lm_head.weight"  # some tools store it, though it equals the embedding table


class MTPDrafter:
    """An MTP model and its target."""

    taps: tuple[int, ...] = ()
    group = None  # it reads only the target's KV

    def __init__(
        self,
        model: MTPModel,
        target: Gemma4,
        backends: Mapping[int, AttentionBackend],
        *,
        max_drafts: int,
        position: str = "engine",
    ) -> None:
        self.model, self.target, self.max_drafts = model, target, max_drafts
        self.is_hf = position == "hf"
        self.backends = dict(backends)
        if self.is_hf:
            self.backends = {index: _one_key_more(backend) for index, backend in backends.items()}

    @property
    def pass_bytes(self) -> int:
        return self.model.num_bytes

    def kernel_keys(self) -> list[tuple[object, ...]]:
        return self.model.kernel_keys()

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Do nothing, since it has no KV."""

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        """Return the most likely next token, then the most likely one after it, and so on, int64 [R, num_drafts]."""
        model, table, shared = self.model, self.target.embedding, self.begin(batch, pool)
        drafts_RK = torch.empty(batch.num_rows, num_drafts, dtype=torch.int64, device=batch.newest_R.device)
        x_RD = model.pre_projection.embed_linear(None, batch.newest_R, batch.hidden_RD, table)
        for best_R in drafts_RK[:, :-1].unbind(1):
            state = model(x_RD, shared)
            candidates, hidden_RB = model.head.candidates(state), model.next_hidden(state)
            x_RD = model.pre_projection.embed_linear(candidates, best_R, hidden_RB, table)
        model.ops.pick_best(model.head.candidates(model(x_RD, shared)), drafts_RK[:, -1])
        return drafts_RK

    def begin(self, batch: DraftBatch, pool: Pool) -> Pass:
        """Plan what all drafts of a draft round share."""
        start = self.model.ops.begin_chain(batch.length_R, self.is_hf, self.model.inv_freqs)
        queries = ForwardBatch(
            token_ids_T=batch.newest_R,
            positions_T=start.last_R,
            row_begin_B1=start.row_begin_R1,
            context_B=start.context_R,
            logits_index_L=batch.newest_R[:0],
            # Only the device knows where a row starts. With all keys in pages and one query, no backend asks.
            rows=(RowFacts(0, 1, (True,) * len(batch.groups)),) * batch.num_rows,
            groups=batch.groups,
            tail=None,
        )
        queries = own_share(queries, pool.layout.groups, self.target.rank.index)
        for backend in self.backends.values():
            backend.plan(queries, pool)
        return self.model.begin(queries, pool, self.backends, start.ropes)


def _one_key_more(planned: AttentionBackend) -> AttentionBackend:
    """Return a backend of the same class with one more key in its window."""
    group = planned.group
    if group.window is None:
        return planned
    specs = tuple(replace(spec, window=group.window + 1) for spec in group.specs)
    return type(planned)(replace(group, specs=specs), planned.num_heads)


def check_mtp(folder: Path, spec: MTPSpec, weights: Weights, *, latent: bool, quantization: str = "auto") -> MTPModel:
    """Raise if `load_mtp` would reject the files. The target is made from `weights`.

    Return the model on the meta device.
    """
    build = partial(MTPModel, spec, latent=latent)
    return check_weights(folder, build, _match_names, weights, quantization=quantization).model


def load_mtp(folder: Path, spec: MTPSpec, target: Gemma4, *, quantization: str = "auto", progress: bool = True) -> MTPModel:
    """Load the drafter to the target's device, in its precision, and bind it to the target's pages."""
    build = partial(MTPModel, spec, latent=target.latent)
    model = load_weights(folder, build, _match_names, _weights(target), quantization=quantization, progress=progress)
    model.bind(target)
    return model


def _match_names(stored: Iterable[str]) -> dict[str, str]:
    return {name: name for name in stored if name != _TIED_HEAD}


def _weights(target: Gemma4) -> Weights:
    """Return the drafter's weights. Its attention reads the target's pages, so ranks share its heads as they do there."""
    return Weights(target.dtype, target.device, target.rank, target.all_reduce)


def draw_mtp(spec: MTPSpec, target: Gemma4, draw: RandomDraw, *, quantization: str = "auto") -> MTPModel:
    """Return a drafter with random weights, for measurements."""
    weights = choose_rounding(_weights(target), quantization)
    model = MTPModel(spec, weights, latent=target.latent)
    fill_randomly(model.placements(), draw, target.device)
    model.finish()
    model.bind(target)
    return model
