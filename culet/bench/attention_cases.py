"""Attention inputs at the shapes of the Gemma 4 variants, with random pages, ragged rows, and NaN wherever no row wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from culet.kernels.types import PagedKV, RaggedRows


@dataclass(frozen=True)
class AttentionShape:
    """The attention shape of a model's KV group."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    latent: bool
    page_tokens: int

    @property
    def width(self) -> int:
        return self.head_dim + (self.head_dim // 4 if self.latent else 0)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def bytes_per_key(self) -> int:
        """Bytes of one key and its value in a bf16 cache."""
        return 2 * (1 if self.latent else 2) * self.num_kv_heads * self.width


SHAPES: dict[str, AttentionShape] = {
    "31B.sliding": AttentionShape(32, 16, 256, 1024, False, 16),
    "31B.global": AttentionShape(32, 4, 512, None, True, 256),
    "26B.sliding": AttentionShape(16, 8, 256, 1024, False, 16),
    "26B.global": AttentionShape(16, 2, 512, None, True, 256),
    "12B.sliding": AttentionShape(16, 8, 256, 1024, False, 16),
    "12B.global": AttentionShape(16, 1, 512, None, True, 512),
    "E4B.sliding": AttentionShape(8, 2, 256, 512, False, 64),
    "E4B.global": AttentionShape(8, 2, 512, None, False, 160),
    "E2B.sliding": AttentionShape(8, 1, 256, 512, False, 64),
    "E2B.global": AttentionShape(8, 1, 512, None, False, 128),
}


@dataclass(frozen=True)
class AttentionCase:
    """The inputs of a call."""

    shape: AttentionShape
    q_TNH: Tensor
    kv: PagedKV
    rows: RaggedRows
    fresh: tuple[Tensor, Tensor]  # k_TGH, v_TGH
    spans: tuple[tuple[int, int], ...]  # (context, query tokens) for each row

    @property
    def max_queries(self) -> int:
        return max(queries for _, queries in self.spans)

    @property
    def tile_rows(self) -> list[tuple[int, int, int, int]]:
        """(row, first token, query tokens, position of the first token) for each row, as input for `query_tiles`."""
        begins = self.rows.row_begin_B1.tolist()
        return [(row, begins[row], queries, context) for row, (context, queries) in enumerate(self.spans)]


def make_case(
    shape: AttentionShape,
    spans: Sequence[tuple[int, int]],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    images: Sequence[tuple[int, int, int]] = (),
    stored_tail: int | None = None,
    whole_pages: bool = False,
    num_layers: int = 2,
    kv_dtype: torch.dtype | None = None,
) -> AttentionCase:
    """Make random inputs for rows of (context, query tokens).

    `images` are (row, first position, tokens) within the rows' query tokens. These tokens see the whole image. `stored_tail`
    keeps only that many of a row's last query tokens in pages, like a chunk longer than the window. `whole_pages` fills a
    sliding row's first page from its beginning. Pages are in random order and `num_layers` apart, as in a slab. Page 0 is
    unused, and anything that no row wrote is NaN. With `kv_dtype` (e4m3), pages have that type and fresh keys are rounded to
    it.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    width, page_tokens = shape.width, shape.page_tokens
    placed: list[_Placed] = []
    owned = 1
    for context, queries in spans:
        placed.append(_place(shape, context, queries, owned, stored_tail, whole_pages))
        owned = max(owned, 1 + int(placed[-1].table.max()))
    begins = [0, *accumulate(queries for _, queries in spans)]
    shuffle = torch.cat(
        (torch.zeros(1, dtype=torch.long), 1 + torch.randperm(owned - 1, generator=torch.Generator().manual_seed(seed)))
    )
    num_tokens = begins[-1]

    def random(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * 0.3).to(dtype)

    def rounded(*size: int) -> Tensor:
        values = random(*size)
        return values if kv_dtype is None else values.to(kv_dtype).to(dtype)

    fresh = rounded(num_tokens, shape.num_kv_heads, width) if shape.latent else None
    fresh_k = fresh[..., width - shape.head_dim :] if fresh is not None else rounded(num_tokens, shape.num_kv_heads, width)
    fresh_v = fresh[..., : shape.head_dim] if fresh is not None else rounded(num_tokens, shape.num_kv_heads, width)
    num_planes = 1 if shape.latent else 2
    slab = torch.full(
        (owned, num_layers, num_planes, shape.num_kv_heads, page_tokens, width), float("nan"), dtype=dtype, device=device
    )
    planes = slab[:, num_layers - 1].transpose(0, 1)
    pages_BP = torch.zeros(len(spans), max(len(row.table) for row in placed), dtype=torch.int32)
    for row, (first, table, position) in enumerate(placed):
        page, context = shuffle[table], spans[row][0]
        pages_BP[row, : len(page)] = page.to(torch.int32)
        page_K, offset_K = page[(position - first) // page_tokens].to(device), ((position - first) % page_tokens).to(device)
        is_new = position >= context
        for plane in range(num_planes):
            content = random(len(position), shape.num_kv_heads, width)
            source = fresh if fresh is not None else (fresh_k, fresh_v)[plane]
            content[is_new.to(device)] = source[(begins[row] + position[is_new] - context).to(device)]
            planes[plane][page_K, :, offset_K] = content
    if kv_dtype is not None:
        planes = slab.to(kv_dtype)[:, num_layers - 1].transpose(0, 1)
    first_B = torch.tensor([row.first for row in placed], dtype=torch.int32, device=device)
    kv = PagedKV(planes, pages_BP.to(device), first_B, shape.head_dim, shape.window)
    visible_2T = _visible(shape, spans, begins, images).to(device) if images else None
    row_begin_B1 = torch.tensor(begins, dtype=torch.int32, device=device)
    context_B = torch.tensor([context for context, _ in spans], dtype=torch.int32, device=device)
    rows = RaggedRows(row_begin_B1, context_B, visible_2T)
    q_TNH = random(num_tokens, shape.num_heads, shape.head_dim)
    return AttentionCase(shape, q_TNH, kv, rows, (fresh_k, fresh_v), tuple((int(c), int(q)) for c, q in spans))


class _Placed(NamedTuple):
    """The location of a row's keys in pages."""

    first: int  # position at which the row's first page begins
    table: Tensor  # the row's pages by column, or 0 if it has written nothing there
    position: Tensor  # positions of the keys that the row has written


def _place(
    shape: AttentionShape, context: int, queries: int, next_page: int, stored_tail: int | None, whole_pages: bool
) -> _Placed:
    """Place a row in pages, starting at `next_page`. See `make_case` for the options."""
    lowest = 0 if shape.window is None else max(0, context - shape.window + 1)
    first = lowest // shape.page_tokens * shape.page_tokens
    lowest = first if whole_pages else lowest
    stored_from = context if stored_tail is None else max(context, context + queries - stored_tail)
    position = torch.cat((torch.arange(lowest, context), torch.arange(stored_from, context + queries)))
    used = torch.zeros(-(-(context + queries - first) // shape.page_tokens), dtype=torch.bool)
    used[(position - first) // shape.page_tokens] = True
    table = torch.zeros(len(used), dtype=torch.long)
    table[used] = torch.arange(next_page, next_page + int(used.sum()))
    return _Placed(first, table, position)


def _visible(
    shape: AttentionShape, spans: Sequence[tuple[int, int]], begins: Sequence[int], images: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Return the visible intervals of the 12B. An image token sees its whole image, and earlier text like a text token does."""
    position_T = torch.cat([torch.arange(context, context + queries) for context, queries in spans])
    lo_T = torch.zeros_like(position_T) if shape.window is None else (position_T - shape.window + 1).clamp(min=0)
    visible_2T = torch.stack((lo_T, position_T))
    for row, first, tokens in images:
        begin = begins[row] + first - spans[row][0]
        visible_2T[0, begin : begin + tokens].clamp_(max=first)
        visible_2T[1, begin : begin + tokens] = first + tokens - 1
    return visible_2T.to(torch.int32)
