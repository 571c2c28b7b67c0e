"""Precomputed rows replace embeddings at marked positions, where per-layer embeddings look up token 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch, InputRows
from culet.cache.pool import Pool
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4, Hidden
from culet.models.pieces import DIRECT
from culet.models.weights import load_model
from tests.models import tiny_checkpoints as tiny
from tests.models.harness import Harness

LENGTH = 2 * tiny.WINDOW + 5
MARKED = tuple(range(3, 9)) + tuple(range(LENGTH - 4, LENGTH))
FAR_ID = 10**6  # no table has this row


def load(shape: str) -> Gemma4:
    checkpoint = open_checkpoint(str(tiny.checkpoint_folder(shape)))
    return load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)


class WithRows(Gemma4):
    """A model whose batches get `rows` by position."""

    rows: dict[int, Tensor]

    def forward(self, batch: ForwardBatch, pool: Pool, backends: Sequence[Any], *others: Any) -> Hidden:
        marked = [i for i, position in enumerate(batch.positions_T.tolist()) if position in self.rows]
        if marked:
            rows = torch.stack([self.rows[int(batch.positions_T[i])] for i in marked])
            token_ids = batch.token_ids_T.index_fill(0, torch.tensor(marked), FAR_ID)
            tail = batch.tail and replace(batch.tail, token_ids_T=token_ids[batch.logits_index_L])
            batch = replace(batch, token_ids_T=token_ids, tail=tail, input_rows=InputRows(torch.tensor(marked), rows))
        return super().forward(batch, pool, backends, *others)


def with_rows(model: Gemma4, rows: dict[int, Tensor]) -> Gemma4:
    model.__class__ = WithRows
    model.rows = rows  # type: ignore[attr-defined]
    return model


def run(model: Gemma4, token_ids: Sequence[int], chunks: Sequence[int], num_logits: int = 0) -> Tensor:
    """Return the logits of all tokens, or of the last `num_logits` of each chunk.

    The latter cut short the layers after the last KV.
    """
    harness = Harness(model, num_slots=1)
    track = harness.add(token_ids)
    return torch.cat([harness.step([(track, size, num_logits or size)])[0] for size in chunks])


CHUNKS = [(LENGTH,), (5, LENGTH - 11, 6)]


@pytest.mark.parametrize("num_logits", [0, 2])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("shape", ["E2B", "31B"])
def test_rows_that_are_embeddings(shape: str, chunks: tuple[int, ...], num_logits: int) -> None:
    """Rows of the tokens' own scaled embeddings change only the per-layer embedding, which uses token 0 there."""
    token_ids = tiny.prompt(LENGTH)
    model = load(shape)
    rows = {position: model.embedding.embed(torch.tensor([token_ids[position]]))[0] for position in MARKED}
    if model.ple is not None:
        at_zero = torch.tensor([0 if i in MARKED else token_id for i, token_id in enumerate(token_ids)])
        wanted = run(looking_up(load(shape), at_zero), token_ids, chunks, num_logits)
        unchanged = run(load(shape), token_ids, chunks, num_logits)
        assert (wanted - unchanged).abs().max() > 1e-2, "the token of the per-layer embedding matters"
    else:
        wanted = run(model, token_ids, chunks, num_logits)
    got = run(with_rows(model, rows), token_ids, chunks, num_logits)
    assert torch.equal(got, wanted)


def looking_up(model: Gemma4, ids_by_position: Tensor) -> Gemma4:
    """Return `model` with the per-layer embeddings of other tokens."""
    per_layer, forward = model._per_layer, model.forward
    batches: list[ForwardBatch] = []

    def spied_forward(batch: ForwardBatch, *others: Any) -> Hidden:
        batches[:] = [batch]
        return forward(batch, *others)

    def spied(token_ids_T: Tensor, embedded_TD: Tensor, layers: slice) -> Tensor | None:
        (batch,) = batches
        is_tail = token_ids_T.shape[0] != batch.num_tokens
        positions_T = batch.positions_T[batch.logits_index_L] if is_tail else batch.positions_T
        return per_layer(ids_by_position[positions_T], embedded_TD, layers)

    model.forward, model._per_layer = spied_forward, spied  # type: ignore[method-assign, assignment]
    return model


@pytest.mark.parametrize("shape", ["E2B", "31B"])
def test_rows_are_used_as_they_are(shape: str) -> None:
    """At marked positions the first layer reads the row itself, neither scaled nor normed."""
    model = load(shape)
    rows = {position: torch.randn(model.spec.hidden_size) for position in MARKED}
    seen: list[Tensor] = []
    first = model._layers[0].forward

    def spied(x_TD: Tensor, *others: Any) -> Any:
        seen.append(x_TD.clone())
        return first(x_TD, *others)

    model._layers[0].forward = spied  # type: ignore[method-assign]
    token_ids = tiny.prompt(LENGTH)
    run(with_rows(model, rows), token_ids, (LENGTH,))
    plain = model.embedding.embed(torch.tensor(token_ids))
    for position in range(LENGTH):
        assert torch.equal(seen[0][position], rows.get(position, plain[position]))


@pytest.mark.parametrize("shape", ["E2B", "31B"])
def test_chunks_do_not_matter(shape: str) -> None:
    model = load(shape)
    model = with_rows(model, {position: torch.randn(model.spec.hidden_size) for position in MARKED})
    whole, parts = (run(model, tiny.prompt(LENGTH), chunks) for chunks in CHUNKS)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_no_rows_no_ops() -> None:
    """A batch without rows is embedded as it is, without a further launch."""
    calls: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    ids = torch.tensor([1, 2, 3])
    batch = ForwardBatch(ids, ids, ids, ids, ids, (), (), None)
    with Watch():
        DIRECT.inputs(batch)
    assert calls == []
