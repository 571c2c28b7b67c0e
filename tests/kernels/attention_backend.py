"""One layer of the Triton attention backend, run on an attention case."""

from __future__ import annotations

import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.attention.triton import TritonBackend
from culet.bench.attention_cases import AttentionCase
from culet.cache.spec import KVGroup, KVSpec


class OneLayerPool:
    """The part of a pool that a backend uses."""

    def __init__(self, planes: Tensor) -> None:
        self._planes = planes

    def planes(self, layer: int) -> Tensor:
        assert layer == 0
        return self._planes


def run_backend(case: AttentionCase, *, is_stored: bool, with_fresh: bool = True, text_rows: tuple[int, ...] = ()) -> Tensor:
    """Return the output of a new backend. Rows `is_stored` if all their keys are in pages."""
    shape = case.shape
    rotated = shape.width - shape.head_dim
    itemsize = case.kv.planes.element_size()
    spec = KVSpec(0, shape.num_kv_heads, shape.head_dim, rotated, shape.window, shape.latent, itemsize=itemsize)
    backend = TritonBackend(KVGroup("tested", 0, (spec,), shape.page_tokens), shape.num_heads)
    tokens = torch.zeros(case.q_TNH.shape[0], dtype=torch.long, device=case.q_TNH.device)
    group = GroupBatch(case.kv.pages_BP, case.kv.first_B, tokens, case.rows.visible_2T)
    facts = tuple(
        RowFacts(start, queries, (is_stored,), is_text=row in text_rows) for row, (start, queries) in enumerate(case.spans)
    )
    begins, contexts = case.rows.row_begin_B1, case.rows.context_B
    batch = ForwardBatch(tokens, tokens, begins, contexts, tokens, facts, (group,), None)
    pool = OneLayerPool(case.kv.planes)
    fresh = case.fresh if with_fresh else tuple(part[:0] for part in case.fresh)
    backend.plan(batch, pool)
    return backend.run(0, batch, pool, case.q_TNH, *fresh)
