"""The torch_cpu backend compared with attention over a dense mask, in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.attention.torch_cpu import FEW_KEYS, FEW_QUERIES, QUERY_BLOCK, TorchCPUBackend
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup, KVSpec, plan_cache

NAN = float("nan")
LAYERS = (0, 1)  # two layers, so that a wrong layer offset shows


class Scene:
    """A cache of one group with random KV for some rows, and the batch that reads it.

    Keys and values stay here as [position, G, H]. Only what a row may read is written to pages, and all else is NaN.
    """

    def __init__(
        self, rows: list[tuple[int, int, bool]], *, window: int | None, latent: bool = False, num_kv: int = 2, head_dim: int = 8
    ) -> None:
        spec = KVSpec(0, num_kv, head_dim, head_dim // 4, window, latent, 4)
        other = replace(spec, window=None if window else 8, head_dim=12, rotated_dims=4, num_kv_heads=1, latent=False)
        # A second group with an odd size, so that the slab is not a multiple of a row of the first.
        specs = [replace(spec, layer=layer) for layer in LAYERS] + [replace(other, layer=9)]
        self.layout = plan_cache(specs, page_multiple=4, slab_bytes=len(LAYERS) * spec.bytes_per_token * 8 + 4 * 28)
        self.group: KVGroup = self.layout.group_of(0)
        self.rows = rows
        generator = torch.Generator().manual_seed(7)
        self.num_heads = 2 * num_kv
        num_tokens = sum(num_new for _, num_new, _ in rows)
        self.q_TNH = torch.randn(num_tokens, self.num_heads, head_dim, generator=generator) * 2
        # A latent row: V is its first columns, K its last.
        self.rows_kv = {
            layer: [torch.randn(start + new, 2, num_kv, spec.width, generator=generator) for start, new, _ in rows]
            for layer in LAYERS
        }
        self.latent, self.head_dim = latent, head_dim
        self.batch, self.pool = self._write()

    def kv(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        data = self.rows_kv[layer][row]
        if self.latent:
            return data[:, 0, :, -self.head_dim :], data[:, 0, :, : self.head_dim]
        return data[:, 0], data[:, 1]

    def _write(self) -> tuple[ForwardBatch, Pool]:
        size, window = self.group.page_tokens, self.group.window
        total = sum(-(-(start + new) // size) + 1 for start, new, _ in self.rows) + 3
        pool = Pool(self.layout, total, torch.float32, torch.device("cpu"))
        pool._slabs.fill_(255)  # a NaN in every precision
        free = list(range(1, total))  # page 0 belongs to no row; unused columns point at it
        random.Random(3).shuffle(free)
        tables, firsts = [], []
        for row, (start, new, is_stored) in enumerate(self.rows):
            end = start + new if is_stored else start
            first_seen = 0 if window is None else max(0, start - window + 1)
            first = first_seen // size
            pages = [free.pop() for _ in range(first, -(-end // size))] if end > first_seen else []
            for layer in LAYERS:
                planes = pool.planes(layer)
                for position in range(first_seen, end):
                    page = pages[position // size - first]
                    planes[:, page, :, position % size] = self.rows_kv[layer][row][position][: planes.shape[0]]
            tables.append(pages)
            firsts.append(first * size)
        width = max(1, *(len(pages) for pages in tables))
        table = torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32)
        begin = torch.tensor([0, *(new for _, new, _ in self.rows)]).cumsum(0)
        own = GroupBatch(table, torch.tensor(firsts, dtype=torch.int32), torch.full((int(begin[-1]),), -1))
        groups = tuple(own for _ in self.layout.groups)
        positions = torch.cat([torch.arange(start, start + new) for start, new, _ in self.rows])
        batch = ForwardBatch(
            token_ids_T=torch.zeros_like(positions),
            positions_T=positions,
            row_begin_B1=begin.int(),
            context_B=torch.tensor([start for start, _, _ in self.rows], dtype=torch.int32),
            logits_index_L=torch.arange(len(positions)),
            rows=tuple(RowFacts(start, new, (stored,) * len(groups)) for start, new, stored in self.rows),
            groups=groups,
            tail=None,
        )
        return batch, pool

    def with_intervals(self, visible_2T: Tensor) -> None:
        groups = tuple(replace(group, visible_2T=visible_2T.int()) for group in self.batch.groups)
        self.batch = replace(self.batch, groups=groups)

    def text_rule(self) -> Tensor:
        hi = self.batch.positions_T
        lo = torch.zeros_like(hi) if self.group.window is None else (hi - self.group.window + 1).clamp(min=0)
        return torch.stack((lo, hi))

    def run(self, layer: int, dtype: torch.dtype = torch.float32) -> Tensor:
        backend = TorchCPUBackend(self.group, self.num_heads)
        backend.plan(self.batch, self.pool)
        fresh = [self.kv(layer, row) for row in range(len(self.rows))]
        k, v = (torch.cat([kv[i][start:] for kv, (start, _, _) in zip(fresh, self.rows, strict=True)]) for i in (0, 1))
        # Fresh tensors of stored rows must not be read, since a tail gets those of other tokens.
        for row, (_, _, is_stored) in enumerate(self.rows):
            if is_stored:
                tokens = slice(int(self.batch.row_begin_B1[row]), int(self.batch.row_begin_B1[row + 1]))
                k[tokens], v[tokens] = NAN, NAN
        return backend.run(layer, self.batch, self.pool, self.q_TNH.to(dtype), k.to(dtype), v.to(dtype))

    def want(self, layer: int, visible_2T: Tensor | None = None) -> Tensor:
        lo, hi = self.text_rule() if visible_2T is None else visible_2T
        out = torch.empty_like(self.q_TNH, dtype=torch.float64)
        begin = self.batch.row_begin_B1.tolist()
        for row in range(len(self.rows)):
            k, v = (part.double().repeat_interleave(2, 1) for part in self.kv(layer, row))
            tokens = slice(begin[row], begin[row + 1])
            keys = torch.arange(len(k))
            mask = (keys >= lo[tokens, None]) & (keys <= hi[tokens, None])
            scores = torch.einsum("qnh,snh->nqs", self.q_TNH[tokens].double(), k).masked_fill(~mask, float("-inf"))
            out[tokens] = torch.einsum("nqs,snh->qnh", scores.softmax(-1), v)
        return out

    def check(self, visible_2T: Tensor | None = None) -> None:
        for layer in LAYERS:
            got = self.run(layer)
            assert torch.isfinite(got).all()
            torch.testing.assert_close(got.double(), self.want(layer, visible_2T), atol=2e-5, rtol=0)


# (start, new tokens, all in pages)
DECODES = [(5, 1, True), (0, 1, True), (40, 1, True), (17, 1, True)]
VERIFIES = [(5, 3, True), (21, 1, True), (0, 5, True), (33, 3, True)]
PROMPTS = [(0, 30, False), (13, 45, False), (50, 20, False)]
MIXED = [*DECODES, (9, 37, False), (30, FEW_QUERIES + 9, True), (2, 4, True), (3, 2, False)]


@pytest.mark.parametrize(
    "rows", [DECODES, DECODES[:1], VERIFIES, PROMPTS, MIXED], ids=["decode", "one", "verify", "prompt", "mixed"]
)
@pytest.mark.parametrize("window", [None, 1, 7, 12, 100])
@pytest.mark.parametrize("latent", [False, True])
def test_text_rule(rows: list[tuple[int, int, bool]], window: int | None, latent: bool) -> None:
    # Without a window everything is stored, so only a first chunk reads fresh keys.
    Scene(rows, window=window, latent=latent).check()


@pytest.mark.parametrize("num_kv", [1, 3])
def test_kv_heads(num_kv: int) -> None:
    Scene(MIXED, window=9, num_kv=num_kv, head_dim=16).check()


def test_rows_of_very_different_length() -> None:
    """One step has several products, each for rows of similar length, and a long prompt has blocks of queries."""
    rows = [
        (3 * FEW_KEYS, 1, True),
        (4, 1, True),
        (FEW_KEYS + 9, 2, True),
        (0, QUERY_BLOCK + 77, False),
        (9 * FEW_KEYS, 1, True),
    ]
    Scene(rows, window=None).check()
    Scene(rows, window=300).check()
    Scene(rows, window=20).check()


def image_intervals(scene: Scene, row: int, first: int, last: int, rule: str) -> Tensor:
    """Return the text rule with one image at positions first .. last of a row, by the rule of a model family."""
    lo, hi = scene.text_rule()
    begin = int(scene.batch.row_begin_B1[row])
    start = scene.rows[row][0]
    for position in range(first, last + 1):
        token = begin + position - start
        hi[token] = last
        if rule == "all" and scene.group.window is not None:
            lo[token] = min(first, int(lo[token]))
    return torch.stack((lo, hi))


@pytest.mark.parametrize("rule", ["sliding", "all"])
@pytest.mark.parametrize("window", [None, 6, 24])
@pytest.mark.parametrize(("first", "last"), [(2, 5), (0, 29), (10, 40), (44, 47)])
@pytest.mark.parametrize("latent", [False, True])
def test_images(rule: str, window: int | None, first: int, last: int, latent: bool) -> None:
    """Images shorter and longer than the window, beside rows of text, in a prompt whose keys are fresh."""
    scene = Scene([(7, 1, True), (0, 48, False), (11, 3, True)], window=window, latent=latent)
    visible = image_intervals(scene, 1, first, last, rule)
    scene.with_intervals(visible)
    scene.check(visible)
    assert not torch.equal(visible, scene.text_rule())


@pytest.mark.parametrize("num_new", [8, FEW_QUERIES + 4])
def test_image_in_a_stored_chunk(num_new: int) -> None:
    """A chunk whose keys are all in pages, with few queries or many, and context before the image."""
    scene = Scene([(20, num_new, True), (4, 1, True)], window=6)
    visible = image_intervals(scene, 0, 21, 20 + num_new - 2, "all")
    scene.with_intervals(visible)
    scene.check(visible)


def test_image_mask_matters() -> None:
    """The image rule and the text rule give different results."""
    scene = Scene([(0, 30, False)], window=6)
    visible = image_intervals(scene, 0, 3, 20, "all")
    assert (scene.want(0, visible) - scene.want(0)).abs().max() > 0.1


def test_bfloat16_rounds_once() -> None:
    scene = Scene(MIXED, window=9)
    got = scene.run(0, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), scene.want(0), atol=0.2, rtol=0.05)


def test_nothing_outlives_a_step() -> None:
    """Two batches run through one backend in turn, and the second uses its own tables."""
    first, second = Scene(DECODES, window=9), Scene(VERIFIES, window=9)
    backend = TorchCPUBackend(first.group, first.num_heads)
    for scene in (first, second, first):
        backend.plan(scene.batch, scene.pool)
        got = backend.run(0, scene.batch, scene.pool, scene.q_TNH, scene.q_TNH, scene.q_TNH)
        torch.testing.assert_close(got.double(), scene.want(0), atol=2e-5, rtol=0)
    assert len(backend._plans) == 1
    # A batch that was not planned is planned when it runs, without using the last plan.
    got = backend.run(0, second.batch, second.pool, second.q_TNH, second.q_TNH, second.q_TNH)
    torch.testing.assert_close(got.double(), second.want(0), atol=2e-5, rtol=0)


def test_step_and_tail_are_planned_together() -> None:
    scene = Scene(VERIFIES, window=9)
    tail = replace(scene.batch)
    step = replace(scene.batch, tail=tail)
    backend = TorchCPUBackend(scene.group, scene.num_heads)
    backend.plan(step, scene.pool)
    backend.plan(tail, scene.pool)
    assert [plan.batch for plan in backend._plans] == [step, tail]
