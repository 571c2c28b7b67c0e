"""MTP at work: an assistant drafts a chain of tokens over the target's own pages. It writes no KV.

With L tokens whose KV exists, every draft of a round stands at one position and sees the same keys; along the chain only the
token and the hidden state change. Where that position is, implementations differ: `hf` stands at L, the newest token's own
place, and its sliding layers see one key more than the window; `engine` stands at L - 1, an ordinary query of the last token.
It matters to how many drafts are accepted, never to what comes out.

Shapes: R sequences · K drafts · B the target's model width · X = 2 B · D the assistant's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch, RowFacts
from culet.cache.pool import Pool
from culet.drafters.base import DraftBatch
from culet.drafters.mtp.model import Assistant
from culet.drafters.mtp.spec import AssistantSpec
from culet.layers.attention import Pass
from culet.models.checkpoint import RandomDraw
from culet.models.gemma4 import Gemma4
from culet.models.random_weights import fill_randomly
from culet.models.weights import load_weights

_TIED_HEAD = "lm_head.weight"  # stored by some tools; it is the embedding table once more


class MTPDrafter:
    """An assistant beside its target."""

    taps: tuple[int, ...] = ()
    group = None  # the target's KV is all it reads

    def __init__(
        self,
        assistant: Assistant,
        target: Gemma4,
        backends: Mapping[int, AttentionBackend],
        *,
        max_drafts: int,
        position: str = "engine",
    ) -> None:
        self.assistant, self.target, self.max_drafts = assistant, target, max_drafts
        self.is_hf = position == "hf"
        self.backends = {index: _one_key_more(one) for index, one in backends.items()} if self.is_hf else dict(backends)

    def weight_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(weight.shape) for weight in self.assistant.parameters()]

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Nothing: it has no KV."""

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        """The likeliest token, then the one after it, and so on: int64 [R, num_drafts]."""
        assistant, ops, shared = self.assistant, self.assistant.ops, self.begin(batch, pool)
        table_VB, scale = self.target.embedding, self.target.embed_scale
        drafts_RK = torch.empty(batch.num_rows, num_drafts, dtype=torch.int64, device=batch.newest_R.device)
        weight_DX = assistant.pre_projection.weight
        x_RD = ops.embed_linear(None, batch.newest_R, batch.hidden_RD, table_VB, scale, weight_DX)
        for best_R in drafts_RK[:, :-1].unbind(1):
            state = assistant(x_RD, shared)
            found, hidden_RB = assistant.head.candidates(state), assistant.next_hidden(state)
            x_RD = ops.embed_linear(found, best_R, hidden_RB, table_VB, scale, weight_DX)
        ops.pick_best(assistant.head.candidates(assistant(x_RD, shared)), drafts_RK[:, -1])
        return drafts_RK

    def begin(self, batch: DraftBatch, pool: Pool) -> Pass:
        """What the drafts of a round share, planned once."""
        start = self.assistant.ops.begin_chain(batch.length_R, self.is_hf, self.assistant.inv_freqs)
        queries = ForwardBatch(
            token_ids_T=batch.newest_R,
            positions_T=start.last_R,
            row_begin_B1=start.row_begin_R1,
            context_B=start.context_R,
            logits_index_L=batch.newest_R[:0],
            # Where a row starts is known on the device alone; with all keys in pages and one query no backend asks.
            rows=(RowFacts(0, 1, (True,) * len(batch.groups)),) * batch.num_rows,
            groups=batch.groups,
            tail=None,
        )
        for backend in self.backends.values():
            backend.plan(queries, pool)
        return self.assistant.begin(queries, pool, self.backends, start.ropes)


def _one_key_more(planned: AttentionBackend) -> AttentionBackend:
    """A backend of the same class whose window reaches one key further back."""
    group = planned.group
    if group.window is None:
        return planned
    specs = tuple(replace(spec, window=group.window + 1) for spec in group.specs)
    return type(planned)(replace(group, specs=specs), planned.num_heads)


def load_assistant(folder: Path, spec: AssistantSpec, target: Gemma4, *, progress: bool = True) -> Assistant:
    """The assistant with its weights on the target's device in its precision, bound to the target's pages."""

    def build(where: torch.device) -> Assistant:
        return Assistant(spec, dtype=target.dtype, device=where, latent=target.latent)

    def match(names: Iterable[str]) -> dict[str, str]:
        return {name: name for name in names if name != _TIED_HEAD}

    assistant = load_weights(folder, build, match, device=target.device, progress=progress)
    assistant.bind(target)
    return assistant


def draw_assistant(spec: AssistantSpec, target: Gemma4, draw: RandomDraw) -> Assistant:
    """An assistant of random weights, for measurements."""
    assistant = Assistant(spec, dtype=target.dtype, device=target.device, latent=target.latent)
    fill_randomly(assistant.placements(), draw, target.device)
    assistant.finish()
    assistant.bind(target)
    return assistant
