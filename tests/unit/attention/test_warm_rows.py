"""While kernels are compiled ahead, a call with few queries per row also compiles those for all smaller numbers of rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from culet.attention.triton import TritonBackend
from culet.bench.attention_cases import AttentionShape, make_case
from culet.cache.spec import KVGroup, KVSpec
from culet.kernels.triton.launch import only_warm
from culet.kernels.types import PagedKV, RaggedRows

# As in E2B (sliding) and 12B (global). Both have numbers of rows that need a kernel of their own.
SLIDING = AttentionShape(num_heads=8, num_kv_heads=1, head_dim=256, window=512, latent=False, page_tokens=16)
LATENT = AttentionShape(num_heads=16, num_kv_heads=1, head_dim=512, window=None, latent=True, page_tokens=16)
MOST_ROWS = 160


@pytest.mark.parametrize("max_queries", [1, 2, 8])
@pytest.mark.parametrize("shape", [SLIDING, LATENT], ids=["sliding", "latent"])
def test_fewer_rows(shape: AttentionShape, max_queries: int, launched: set[tuple[object, ...]]) -> None:
    case = make_case(shape, [(3, 1)], dtype=torch.bfloat16)
    rotated = shape.width - shape.head_dim
    spec = KVSpec(0, shape.num_kv_heads, shape.head_dim, rotated, shape.window, shape.latent, itemsize=2)
    backend = TritonBackend(KVGroup("tested", 0, (spec,), shape.page_tokens), shape.num_heads)

    def run(num_rows: int) -> None:
        pages_BP = case.kv.pages_BP[:1].expand(num_rows, -1).contiguous()
        kv = PagedKV(case.kv.planes, pages_BP, torch.zeros(num_rows, dtype=torch.int32), shape.head_dim, shape.window)
        rows = RaggedRows(torch.arange(num_rows + 1, dtype=torch.int32), torch.full((num_rows,), 3, dtype=torch.int32))
        q_TNH = torch.zeros(num_rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
        backend._run_few(max_queries, q_TNH, kv, rows, torch.empty_like(q_TNH))

    run(MOST_ROWS)
    alone = set(launched)
    with only_warm():
        run(MOST_ROWS)
    warmed = set(launched)
    for num_rows in range(1, MOST_ROWS):
        run(num_rows)
    assert launched == warmed > alone
