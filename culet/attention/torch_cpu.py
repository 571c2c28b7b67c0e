"""Attention in plain torch, the backend for CPUs. It is exact and slow, and runs on any device.

Rows with few queries and all keys in pages (decode, verify, tails) share one batched product over gathered keys. Other rows
are computed one at a time, in blocks of queries. A block reads only keys that at least one of its queries sees.

Only keys that a row may see are gathered, and padding repeats the row's last visible key. So other pages and unwritten parts
of the row's own pages cannot affect a result, even if they contain NaN.

Shapes: B rows · Q queries of a row · S keys · N query heads · G KV heads · R = N / G · H head size · W width of a stored row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup

FEW_QUERIES = 16  # rows with up to this many queries are batched
QUERY_BLOCK = 256  # queries of a long row that share one masked product
FEW_KEYS = 128  # rows that see fewer keys always share a product. Longer rows share one only within a factor of two.

Ints = NDArray[np.int64]
RowsView = tuple[tuple[int, int], tuple[int, int]]  # size and stride of a view of a layer's memory with one row per unit


@dataclass(frozen=True, slots=True)
class _Product:
    """Rows that share one product, padded to equal numbers of queries and keys."""

    num_rows: int
    num_queries: int
    num_keys: int
    key_rows: Tensor  # rows of the flat pool, [plane, B, G, S] flattened
    mask: Tensor | None  # [B, 1, Q * R, S], added to the scores, or None if every key is visible
    tokens: Tensor | None  # the query of each of the B * Q places, or None for the batch's tokens in order
    places: Tensor | None  # places that are not padding, or None for all


@dataclass(frozen=True, slots=True)
class _LongRow:
    """A row with its own products. Keys in pages come first, then fresh keys (none if all keys are in pages)."""

    tokens: slice  # its queries among the T tokens
    key_rows: Tensor  # rows of the flat pool, [plane, G, S] flattened
    num_paged: int
    has_fresh: bool
    first_key: int  # position of the first key
    lo_Q: Tensor
    hi_Q: Tensor
    bounds: tuple[tuple[int, int], ...]  # first and last key position that any query of a block sees, by block


class _ShareRow(NamedTuple):
    """A row whose tokens several ranks share. Its keys are those of this rank, from the first on."""

    begin: int  # its queries among the T tokens
    end: int
    key_rows: Tensor  # rows of the flat pool, [plane, G, S] flattened
    num_keys: int
    hi_Q: Tensor  # last key that each query sees, or -1


@dataclass(frozen=True, slots=True)
class _Plan:
    """The keys that a batch reads. All layers of the group share the plan."""

    batch: ForwardBatch
    rows_view: RowsView
    products: tuple[_Product, ...]
    long_rows: tuple[_LongRow, ...]
    share_rows: tuple[_ShareRow, ...] = ()  # instead of the others, if ranks share the tokens


class TorchCPUBackend:
    """Attention for the layers of one KV group, in torch."""

    is_capturable: ClassVar[bool] = False  # the host computes which keys a row reads

    def __init__(self, group: KVGroup, num_heads: int) -> None:
        self.group = group
        self.num_heads = num_heads
        self._plans: list[_Plan] = []  # for the step's batch and its tail, found by identity

    def plan(self, batch: ForwardBatch, pool: Pool) -> None:
        """Compute which keys each row reads."""
        planner = _Planner(self.group, self.num_heads, batch, pool)
        self._plans = [plan for plan in self._plans if plan.batch.tail is batch]
        self._plans.append(planner.plan())

    def run_share(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        """Compute out_TNH of one layer over this rank's tokens, and the log of the sum of exponentials of the scores."""
        plan = self._find(batch, pool)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        lse_TN = torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)
        num_kv = self.group.spec.num_kv_heads
        for begin, end, key_rows, num_keys, hi_Q in plan.share_rows:
            k_GSH, v_GSH = self._gather(layer, pool, plan.rows_view, key_rows, (num_kv, num_keys))
            for first in range(begin, end, QUERY_BLOCK):
                queries = slice(first, min(first + QUERY_BLOCK, end))
                is_seen_QS = (
                    torch.arange(num_keys, device=q_TNH.device) <= hi_Q[queries.start - begin : queries.stop - begin, None]
                )
                out_TNH[queries], lse_TN[queries] = _attend_share(q_TNH[queries], k_GSH, v_GSH, is_seen_QS)
        return out_TNH, lse_TN

    def _find(self, batch: ForwardBatch, pool: Pool) -> _Plan:
        plan = next((plan for plan in self._plans if plan.batch is batch), None)
        if plan is None:
            self.plan(batch, pool)
            plan = self._plans[-1]
        return plan

    def run(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        """Compute out_TNH of one layer."""
        plan = self._find(batch, pool)
        if len(plan.products) == 1 and plan.products[0].tokens is None:
            return self._run_product(plan.products[0], layer, pool, plan.rows_view, q_TNH)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for part in plan.products:
            assert part.tokens is not None
            result = self._run_product(part, layer, pool, plan.rows_view, q_TNH[part.tokens])
            if part.places is None:
                out_TNH[part.tokens] = result
            else:
                out_TNH[part.tokens[part.places]] = result[part.places]
        for row in plan.long_rows:
            shape = (self.group.spec.num_kv_heads, row.num_paged)
            k_GSH, v_GSH = self._gather(layer, pool, plan.rows_view, row.key_rows, shape)
            if row.has_fresh:
                k_GSH = torch.cat((k_GSH, k_TGH[row.tokens].float().transpose(0, 1)), 1)
                v_GSH = torch.cat((v_GSH, v_TGH[row.tokens].float().transpose(0, 1)), 1)
            out_TNH[row.tokens] = self._run_long(row, q_TNH[row.tokens], k_GSH, v_GSH)
        return out_TNH

    def _gather(
        self, layer: int, pool: Pool, rows_view: RowsView, key_rows: Tensor, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Gather keys and values [*shape, H] in float32 from rows of the flat pool."""
        spec = self.group.spec
        # index_select copies whole rows, which is 4 to 6 times as fast as indexing [page, head, token]. For 300 keys x 2 heads
        # x 64 it takes 12 us instead of 80.
        flat = pool.planes(layer).as_strided(*rows_view)
        planes = flat.index_select(0, key_rows).float().view(spec.num_planes, *shape, spec.width)
        if spec.latent:
            return planes[0][..., spec.width - spec.head_dim :], planes[0][..., : spec.head_dim]
        return planes[0], planes[1]

    def _run_product(self, part: _Product, layer: int, pool: Pool, rows_view: RowsView, q_XNH: Tensor) -> Tensor:
        """Compute the outputs of the B * Q places, in the shape of the queries."""
        rows, queries, num_kv = part.num_rows, part.num_queries, self.group.spec.num_kv_heads
        k_BGSH, v_BGSH = self._gather(layer, pool, rows_view, part.key_rows, (rows, num_kv, part.num_keys))
        # Treat query heads that share a KV head as more queries of that head, so that keys are read once for all of them.
        size = q_XNH.shape[-1]
        if queries == 1:
            q = q_XNH.float().view(rows, num_kv, -1, size)
        else:
            q = q_XNH.float().view(rows, queries, num_kv, -1, size).transpose(1, 2).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k_BGSH, v_BGSH, attn_mask=part.mask, scale=1.0)
        if queries > 1:
            out = out.view(rows, num_kv, queries, -1, size).transpose(1, 2)
        return out.reshape(q_XNH.shape).to(q_XNH.dtype)

    def _run_long(self, row: _LongRow, q_QNH: Tensor, k_GSH: Tensor, v_GSH: Tensor) -> Tensor:
        """Compute the outputs of one row's queries, block by block."""
        q_RGQH = q_QNH.float().unflatten(1, (k_GSH.shape[0], -1)).permute(2, 1, 0, 3)
        repeat = q_RGQH.shape[0]
        parts = []
        for block, (lo, hi) in enumerate(row.bounds):
            queries = slice(block * QUERY_BLOCK, (block + 1) * QUERY_BLOCK)
            keys = slice(lo - row.first_key, hi + 1 - row.first_key)
            position = torch.arange(lo, hi + 1, device=q_QNH.device)
            mask = (position >= row.lo_Q[queries, None]) & (position <= row.hi_Q[queries, None])
            k, v = k_GSH[:, keys].expand(repeat, -1, -1, -1), v_GSH[:, keys].expand(repeat, -1, -1, -1)
            out = F.scaled_dot_product_attention(q_RGQH[:, :, queries], k, v, attn_mask=mask, scale=1.0)
            parts.append(out.permute(2, 1, 0, 3))
        return torch.cat(parts).reshape(q_QNH.shape).to(q_QNH.dtype)


class _Planner:
    """Builds the plan for one batch on the host."""

    def __init__(self, group: KVGroup, num_heads: int, batch: ForwardBatch, pool: Pool) -> None:
        self.group, self.batch = group, batch
        self.repeat = num_heads // group.spec.num_kv_heads
        own = batch.groups[group.index]
        self.device = own.pages_BP.device
        self.pages_BP, self.first_B = own.pages_BP.cpu().numpy(), own.first_B.cpu().numpy()
        self.begin_B1 = batch.row_begin_B1.cpu().numpy().astype(np.int64)
        self.lo_T, self.hi_T = self._visible()
        # The last layer's planes begin last in memory, so a view that fits after them fits after those of every layer.
        planes = pool.planes(group.layers[-1])
        unit = math.gcd(planes.stride(1), planes.shape[-1])  # stored rows begin at multiples of it, whatever the slab size
        room = planes.untyped_storage().nbytes() // planes.element_size() - planes.storage_offset()
        self.rows_view: RowsView = ((room - planes.shape[-1]) // unit + 1, planes.shape[-1]), (unit, 1)
        self.plane_step, self.page_step, self.head_step = (planes.stride(dim) // unit for dim in range(3))
        self.token_step = planes.stride(3) // unit

    def plan(self) -> _Plan:
        rows = self.batch.rows
        if not rows:
            return _Plan(self.batch, self.rows_view, (), ())
        if self.group.spec.token_shares > 1:
            return _Plan(self.batch, self.rows_view, (), (), tuple(self._share_row(i) for i in range(len(rows))))
        index = self.group.index
        few = [i for i, row in enumerate(rows) if row.num_queries <= FEW_QUERIES and row.is_stored[index]]
        chosen = set(few) if len(few) < len(rows) else range(len(rows))
        long_rows = tuple(self._long_row(i) for i in range(len(rows)) if i not in chosen)
        return _Plan(self.batch, self.rows_view, self._products(np.array(few, dtype=np.int64)), long_rows)

    def _visible(self) -> tuple[Ints, Ints]:
        """Return the first and the last key position that each query sees."""
        visible_2T = self.batch.groups[self.group.index].visible_2T
        if visible_2T is not None:
            lo, hi = visible_2T.cpu().numpy().astype(np.int64)
            return np.maximum(lo, 0), hi
        hi = self.batch.positions_T.cpu().numpy()
        return (np.zeros_like(hi) if self.group.window is None else np.maximum(hi - self.group.window + 1, 0)), hi

    def _key_rows(self, position_BS: Ints, rows_B: Ints) -> Ints:
        """Return the rows of the flat pool, [plane, B, G, S], that hold the keys at these positions of these rows."""
        size, spec = self.group.stored_tokens, self.group.spec
        page_BS = self.pages_BP[rows_B[:, None], (position_BS - self.first_B[rows_B, None]) // size].astype(np.int64)
        row_BS = page_BS * self.page_step + position_BS % size * self.token_step
        planes, heads = np.arange(spec.num_planes) * self.plane_step, np.arange(spec.num_kv_heads) * self.head_step
        return row_BS[None, :, None] + heads[:, None] + planes[:, None, None, None]

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _products(self, rows_B: Ints) -> tuple[_Product, ...]:
        """Return the products for the rows with few queries. Rows of similar length share a product."""
        if rows_B.size == 0:
            return ()
        lo_B = np.minimum.reduceat(self.lo_T, self.begin_B1[:-1])[rows_B]
        hi_B = np.maximum.reduceat(self.hi_T, self.begin_B1[:-1])[rows_B]
        if rows_B.size == 1 or int((hi_B - lo_B).max()) < FEW_KEYS:
            return (self._product(rows_B, lo_B, hi_B),)
        # Bucket the rows by number of keys in powers of two, so that no row is padded to more than twice its length.
        bucket_B = np.frexp(np.maximum(hi_B - lo_B, FEW_KEYS).astype(np.float64))[1]
        products = []
        for bucket in np.unique(bucket_B):
            part = np.flatnonzero(bucket_B == bucket)
            products.append(self._product(rows_B[part], lo_B[part], hi_B[part]))
        return tuple(products)

    def _product(self, rows_B: Ints, lo_B: Ints, hi_B: Ints) -> _Product:
        begin_B = self.begin_B1[rows_B]
        queries_B = self.begin_B1[rows_B + 1] - begin_B
        num_queries, num_keys = int(queries_B.max()), int((hi_B - lo_B).max()) + 1
        # Padding repeats a row's last query and last key.
        query_BQ = np.minimum(np.arange(num_queries), queries_B[:, None] - 1)
        token_X = (begin_B[:, None] + query_BQ).reshape(-1)
        position_BS = lo_B[:, None] + np.arange(num_keys)
        mask = None
        if num_queries > 1 or not (hi_B - lo_B == num_keys - 1).all():
            position_XS = position_BS.repeat(num_queries, 0)
            seen_XS = (position_XS >= self.lo_T[token_X, None]) & (position_XS <= self.hi_T[token_X, None])
            shape = (rows_B.size, 1, num_queries * self.repeat, num_keys)
            mask_XS = np.where(seen_XS, np.float32(0), np.float32(-np.inf)).repeat(self.repeat, 0)
            mask = self._tensor(mask_XS.reshape(shape))
        is_padded = bool((queries_B < num_queries).any())
        is_whole = not is_padded and token_X.size == self.lo_T.size
        return _Product(
            num_rows=rows_B.size,
            num_queries=num_queries,
            num_keys=num_keys,
            key_rows=self._tensor(self._key_rows(np.minimum(position_BS, hi_B[:, None]), rows_B).reshape(-1)),
            mask=mask,
            tokens=None if is_whole else self._tensor(token_X),
            places=self._tensor(np.flatnonzero(np.arange(num_queries) < queries_B[:, None])) if is_padded else None,
        )

    def _share_row(self, index: int) -> _ShareRow:
        begin, end = int(self.begin_B1[index]), int(self.begin_B1[index + 1])
        hi_Q = self.hi_T[begin:end]
        keys = np.arange(int(hi_Q.max(initial=-1)) + 1)
        key_rows = self._tensor(self._key_rows(keys[None], np.array([index])).reshape(-1))
        return _ShareRow(begin, end, key_rows, keys.size, self._tensor(hi_Q))

    def _long_row(self, index: int) -> _LongRow:
        begin, end = int(self.begin_B1[index]), int(self.begin_B1[index + 1])
        row = self.batch.rows[index]
        lo_Q, hi_Q = self.lo_T[begin:end], self.hi_T[begin:end]
        blocks = np.arange(0, end - begin, QUERY_BLOCK)
        bounds = zip(np.minimum.reduceat(lo_Q, blocks).tolist(), np.maximum.reduceat(hi_Q, blocks).tolist(), strict=True)
        has_fresh = not row.is_stored[self.group.index]
        first_key = min(int(lo_Q.min()), row.start)
        paged = np.arange(first_key, row.start if has_fresh else int(hi_Q.max()) + 1)
        return _LongRow(
            tokens=slice(begin, end),
            key_rows=self._tensor(self._key_rows(paged[None], np.array([index])).reshape(-1)),
            num_paged=paged.size,
            has_fresh=has_fresh,
            first_key=first_key,
            lo_Q=self._tensor(lo_Q),
            hi_Q=self._tensor(hi_Q),
            bounds=tuple(bounds),
        )


def _attend_share(q_QNH: Tensor, k_GSH: Tensor, v_GSH: Tensor, is_seen_QS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of queries over the keys that they see, and the log of the sum of exponentials of their scores."""
    q_QGRH = q_QNH.float().unflatten(1, (k_GSH.shape[0], -1))
    score_GQRS = torch.einsum("qgrh,gsh->gqrs", q_QGRH, k_GSH).masked_fill_(~is_seen_QS[None, :, None], -torch.inf)
    lse_GQR = score_GQRS.logsumexp(-1)
    # A query without keys has -inf for both, and weights of 0.
    weight_GQRS = (score_GQRS - lse_GQR.masked_fill(lse_GQR == -torch.inf, 0.0)[..., None]).exp_()
    out_QGRH = torch.einsum("gqrs,gsh->qgrh", weight_GQRS, v_GSH)
    return out_QGRH.reshape(q_QNH.shape).to(q_QNH.dtype), lse_GQR.transpose(0, 1).flatten(1)
