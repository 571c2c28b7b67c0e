"""The kernels of draft rounds compared with their eager twins, in Triton's interpreter, with odd sizes and padding rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.interpreting import INTERPRETED, run_interpreted
from tests.matrix import matrix

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_rounds_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from culet.kernels.eager import draft_round as eager_draft_round
    from culet.kernels.eager import fused as eager_fused
    from culet.kernels.triton.drafting import context_kv, copy_suffix, draft_head
    from culet.kernels.triton.drafting import draft_round as draft_round_module
    from culet.kernels.triton.linear import norm_linear
    from culet.kernels.types import BlockShape, Candidates, ContextLayer, HeadShape

    EPS = 1e-6
    SPARE = 77  # the page of padding rows

    @pytest.fixture(autouse=True)
    def seed() -> None:
        torch.manual_seed(12)

    def flat(nested: object) -> list[Tensor]:
        """Return all tensors of nested tuples and lists, in order."""
        if isinstance(nested, Tensor):
            return [nested]
        assert isinstance(nested, tuple | list)
        return [tensor for part in nested for tensor in flat(part)]

    def assert_same(got: object, wanted: object, tolerance: float = 0.0) -> None:
        for mine, theirs in zip(flat(got), flat(wanted), strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            if mine.dtype.is_floating_point and tolerance:
                assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance)
            else:
                assert torch.equal(mine, theirs)

    # --- inputs and outputs of a round ---

    @pytest.mark.parametrize(("num_rows", "num_drafts"), [(1, 1), (3, 7), (131, 2), (0, 3)])
    def test_tokens_of_slots(num_rows: int, num_drafts: int) -> None:
        """Several rows may pad the batch. They share the spare slot, whose tokens are never read."""
        width, num_pad = 41, min(2, num_rows // 2)
        slots = torch.randperm(num_rows + 3)[:num_rows]
        lengths = torch.randint(1, width - num_drafts, (num_rows,))
        spare = num_rows + 3
        if num_pad:
            slots[-num_pad:], lengths[-num_pad:] = spare, 1
        tokens = torch.randint(0, 9000, (spare + 1, width), dtype=torch.int32)
        drafts = torch.randint(0, 9000, (num_rows, num_drafts + 2))[:, 1:-1]
        assert_same(
            draft_round_module.newest_tokens(tokens, slots, lengths), eager_draft_round.newest_tokens(tokens, slots, lengths)
        )
        got, wanted = tokens.clone(), tokens.clone()
        draft_round_module.keep_drafts(got, slots, lengths, drafts)
        eager_draft_round.keep_drafts(wanted, slots, lengths, drafts)
        assert_same(got[:-1], wanted[:-1])
        for row in range(num_rows - num_pad):
            slot, length = int(slots[row]), int(lengths[row])
            assert got[slot, length + 1 : length + 1 + num_drafts].tolist() == drafts[row].tolist()

    def test_drafts_that_are_not_made() -> None:
        """They are stored as token 0, because the target reads them if the step was planned ahead."""
        tokens, drafts = torch.full((2, 9), 5, dtype=torch.int32), torch.tensor([[7, -1, -1]])
        for module in (draft_round_module, eager_draft_round):
            got = tokens.clone()
            module.keep_drafts(got, torch.tensor([1]), torch.tensor([2]), drafts)
            assert got.tolist() == [[5] * 9, [5, 5, 5, 7, 0, 0, 5, 5, 5]]

    @matrix({"num_drafts": [1, 8], "match_lens": [(1, 1), (2, 4), (3, 8)], "block": [16, 1024]})
    def test_copy_suffix(num_drafts: int, match_lens: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Few different tokens repeat often. Rows of padding share a slot and have length 1."""
        monkeypatch.setattr(copy_suffix, "BLOCK", block)
        monkeypatch.setattr(copy_suffix, "NUM_PARTS", 4)
        tokens = torch.randint(0, 4, (9, 120), dtype=torch.int32)
        tokens[3] = torch.arange(120)
        slots, lengths = torch.tensor([0, 5, 3, 2, 1, 8, 8]), torch.tensor([100, 17, 90, 3, 0, 1, 1])
        wanted = torch.randint(10, 99, (7, num_drafts))
        got = torch.cat((wanted, wanted), 1)[:, :num_drafts]  # rows with a stride
        eager_draft_round.copy_suffix(tokens, slots, lengths, match_lens, wanted)
        copy_suffix.copy_suffix(tokens, slots, lengths, match_lens, got)
        assert_same(got, wanted)
        assert bool((wanted[0] < 4).all())
        assert bool((wanted[2] >= 10).all())

    @matrix({"num_rows": [1, 4, 7], "is_ahead": [False, True], "halves": [(24,), (32, 7), (16, 8, 5)]})
    def test_begin_chain(num_rows: int, is_ahead: bool, halves: tuple[int, ...]) -> None:
        lengths = torch.randint(1, 4000, (num_rows,))
        inv_freqs = [torch.rand(half) for half in halves]
        wanted = eager_draft_round.begin_chain(lengths, is_ahead, inv_freqs)
        assert_same(draft_round_module.begin_chain(lengths, is_ahead, inv_freqs), wanted, 1e-5)

    @matrix(
        {"num_rows, size, has_spare": [(1, 8, True), (5, 6, True), (3, 16, False)], "windows": [(), (None,), (5,), (20, None)]}
    )
    def test_begin_blocks(num_rows: int, size: int, has_spare: bool, windows: tuple[int | None, ...]) -> None:
        """Page tables begin anywhere and have more columns than a row uses. The last row pads the batch."""
        columns, page_tokens = 6, 16
        pages = torch.randint(0, 60, (num_rows, columns + 3), dtype=torch.int32)[:, :columns]
        first = torch.randint(0, 3, (num_rows,), dtype=torch.int32) * page_tokens
        lengths = first.long() + torch.randint(1, columns * page_tokens - size, (num_rows,))
        if has_spare:
            pages[-1], first[-1], lengths[-1] = SPARE, 0, 1
        newest, inv_freq = torch.randint(0, 9000, (num_rows,)), torch.rand(12)
        shape = BlockShape(size, 4, page_tokens, SPARE if has_spare else None, windows)
        given = newest, lengths, (pages, first), shape, inv_freq, (torch.randn(9000, 304)[:, :300], 5.75)
        wanted = eager_draft_round.begin_blocks(*given)
        assert_same(draft_round_module.begin_blocks(*given), wanted, 1e-5)
        assert (wanted.kv_address_T.view(num_rows, size)[-1] == -1).all() == has_spare

    @pytest.mark.parametrize(("num_taps", "size"), [(1, 24), (4, 40), (8, 16), (11, 1030)])
    def test_taps(num_taps: int, size: int) -> None:
        taps = [torch.randn(5, size) for _ in range(num_taps)]
        assert_same(draft_round_module.join_taps(taps), eager_draft_round.join_taps(taps))
        places = torch.randperm(9)[:5]
        rings = torch.zeros(9, num_taps * size), torch.zeros(9, num_taps * size)
        for ops, ring in zip((draft_round_module, eager_draft_round), rings, strict=True):
            ops.keep_taps(taps, ring, places)
        assert_same(*rings)
        wide = torch.randn(5, num_taps * size + 4)
        parts = wide[:, : num_taps * size].split(size, -1)
        assert_same(draft_round_module.join_taps(parts), wide[:, : num_taps * size].contiguous())
        assert_same(
            draft_round_module.join_taps([*taps[1:], parts[0]]), torch.cat([*taps[1:], parts[0]], -1)
        )  # with different strides

    # --- the head ---

    def pick(ops: object, found: Candidates) -> Tensor:
        out = torch.zeros(found.scores_RC.shape[0], 3, dtype=torch.int64)
        ops.pick_best(found, out[:, 1])  # type: ignore[attr-defined]
        assert not out[:, ::2].any()
        return out[:, 1]

    def head_of(kind: str, size: int) -> tuple[Tensor, Tensor | None, float | None]:
        table = torch.randn(650, size)
        if kind == "e4m3":
            return table.to(torch.float8_e4m3fn), torch.rand(650) + 0.5, None
        return table, None, 20.0 if kind == "capped" else None

    @matrix(
        {
            "num_rows, size": [(1, 96), (3, 256), (19, 300), (70, 64)],
            "kind": ["plain", "capped", "e4m3"],
            "is_large": [False, True],
        }
    )
    def test_head_candidates(num_rows: int, size: int, kind: str, is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if is_large:
            monkeypatch.setattr(draft_head, "SMALL_TABLE_BYTES", 0)
        table, scale, cap = head_of(kind, size)
        x = torch.randn(num_rows, size)
        logits = eager_draft_round.head_candidates(x, table, scale, cap).scores_RC
        chosen = pick(draft_head, draft_head.head_candidates(x, table, scale, cap))
        assert torch.equal(pick(eager_draft_round, Candidates(logits, None)), logits.argmax(-1))
        reached = logits.gather(1, chosen[:, None]).flatten()
        assert torch.allclose(reached, logits.max(dim=1).values, atol=1e-4)
        # The first of equal scores wins.
        same = table[:1].expand(650, size).contiguous()
        assert (
            pick(draft_head, draft_head.head_candidates(x, same, None if scale is None else torch.ones(650), cap)).tolist()
            == [0] * num_rows
        )

    def test_head_candidates_of_some_tokens_of_each_block() -> None:
        table, blocks = torch.randn(200, 48), torch.randn(3, 8, 48)
        wanted = torch.empty(15, dtype=torch.int64)
        eager_draft_round.pick_best(eager_draft_round.head_candidates(blocks[:, 1:6], table, None, 30.0), wanted)
        assert torch.equal(pick(draft_head, draft_head.head_candidates(blocks[:, 1:6], table, None, 30.0)), wanted)
        assert torch.equal(wanted.view(3, 5), (blocks[:, 1:6] @ table.t()).argmax(-1))

    @pytest.mark.parametrize(("num_rows", "each", "size"), [(1, 16, 40), (5, 50, 300)])
    def test_cluster_candidates(num_rows: int, each: int, size: int) -> None:
        z, table = torch.randn(num_rows, size + 3)[:, :size], torch.randn(7 * each, size)
        ids, chosen = torch.randperm(7 * each).view(7, each), torch.stack([torch.randperm(7)[:3] for _ in range(num_rows)])
        wanted = eager_draft_round.cluster_candidates(z, table, ids, chosen)
        assert_same(draft_head.cluster_candidates(z, table, ids, chosen), wanted, 1e-4)
        token = int(wanted.ids_RC[0, each + 1])  # type: ignore[index]
        assert torch.allclose(wanted.scores_RC[0, each + 1], z[0] @ table[ids.flatten().tolist().index(token)], atol=1e-4)

    @pytest.mark.parametrize(
        ("num_rows", "count", "size"), [(4, 1, 40), (19, 37, 96), (33, 37, 40), (4, 5000, 40), (4, 37, 1100)]
    )
    def test_embed_linear(num_rows: int, count: int, size: int) -> None:
        """Candidates may be in any order, and the first of equal scores wins, in one launch or in several."""
        scores = torch.randint(0, 9, (num_rows, count)).float()
        scores[1] = float("-inf")
        ids, weight = torch.randint(0, 90, (num_rows, count)), torch.randn(21, 2 * size)
        table, hidden = torch.randn(90, size + 3)[:, :size], torch.randn(num_rows, size + 5)[:, :size]
        found, kept = Candidates(scores, ids), torch.zeros(2, num_rows, 3, dtype=torch.int64)
        results = [
            ops.embed_linear(found, out[:, 2], hidden, table, 5.75, weight)
            for ops, out in zip((draft_head, eager_draft_round), kept, strict=True)
        ]
        assert_same(results[0], results[1], 1e-3)
        assert_same(*kept)
        tokens = kept[0, :, 2]
        assert tokens.tolist() == [int(ids[row, scores[row].argmax()]) for row in range(num_rows)]
        assert torch.equal(pick(draft_head, found), tokens)
        assert_same(draft_head.embed_linear(None, tokens, hidden, table, 5.75, weight), results[1], 1e-3)
        pair = eager_draft_round.embed_beside(tokens, hidden, table, 5.75)
        assert_same(draft_head.embed_beside(tokens, hidden, table, 5.75), pair)
        assert torch.equal(pair[:, size:], hidden)

    def test_nan_gives_a_valid_token() -> None:
        """Rows that pad the batch may hold anything, but their tokens must be valid."""
        x, table = torch.full((2, 32), float("nan")), torch.randn(100, 32)
        chosen = pick(draft_head, draft_head.head_candidates(x, table, None, None))
        assert ((chosen >= 0) & (chosen < 100)).all()

    # --- layers of small drafters ---

    @matrix(
        {
            "tokens, size, num_rows": [(1, 64, 48), (5, 96, 50), (19, 128, 16), (32, 40, 33), (33, 64, 32)],
            "gate": ["", "gelu", "silu"],
            "kind": ["none", "plain", "normed", "parts"],
        }
    )
    def test_residual_norm_linear(tokens: int, size: int, num_rows: int, gate: str, kind: str) -> None:
        """The delta is absent, plain, with its norm and the layer's scalar, or in parts."""
        x, delta = torch.randn(tokens, size + 8)[:, :size], torch.randn(tokens, size + 8)[:, :size]
        own, after, scalar = torch.rand(size) + 0.5, torch.rand(size) + 0.5, torch.tensor([0.75])
        weight = torch.randn(num_rows * (2 if gate else 1), size)
        given: tuple[Tensor | None, Tensor | None, Tensor | None] = {
            "none": (None, None, None),
            "plain": (delta, None, None),
            "normed": (delta, own, scalar),
            "parts": (torch.randn(3, tokens, size), own, None),
        }[kind]
        arguments = x, given[0], (given[1], after), given[2], EPS, weight, gate
        got, wanted = norm_linear.residual_norm_linear(*arguments), eager_fused.residual_norm_linear(*arguments)
        assert got[0].shape == wanted[0].shape
        assert torch.allclose(got[0], wanted[0], atol=1e-5)
        y = got[1] if got[1].dim() == 2 else got[1].sum(0)
        assert y.shape == (tokens, num_rows)
        assert torch.allclose(y, wanted[1], atol=1e-4, rtol=1e-4)

    def test_large_shapes_use_separate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
        x, weight, norm = torch.randn(3, 1024), torch.randn(64, 1024), torch.rand(1024)
        wanted = eager_fused.residual_norm_linear(x, x, (None, norm), None, EPS, weight, "gelu")
        monkeypatch.setattr(norm_linear, "describe_normed", None)
        got = norm_linear.residual_norm_linear(x, x, (None, norm), None, EPS, weight, "gelu")
        assert torch.allclose(got[1], wanted[1], atol=1e-3)

    @matrix({"tokens, size, head": [(1, 96, 32), (21, 256, 128), (35, 64, 32), (4, 300, 64)], "num_layers": [1, 3, 8]})
    def test_store_context(tokens: int, size: int, head: int, num_layers: int) -> None:
        """All layers' pages are in one memory, and padding is not written."""
        heads = HeadShape(0, 2, head, head, False, False, EPS, norm_v=False)
        num_pages, page_tokens = 7, 16
        plane = 2 * page_tokens * head
        weights = [(torch.randn(4 * head, size), torch.rand(2, head) + 0.5) for _ in range(num_layers)]
        feature, hidden_norm = torch.randn(tokens, size), torch.rand(size) + 0.5
        angles = torch.randint(0, 3000, (tokens,)), torch.rand(head // 2)
        slots = torch.randperm(num_pages * page_tokens)[:tokens]
        slots[tokens // 2 :: 3] = -1
        stored = []
        for ops in (context_kv, eager_draft_round):
            memory = torch.zeros(num_pages, num_layers * 2 * plane + 64)
            layers = [
                ContextLayer(
                    *weights[index],
                    memory.as_strided(
                        (2, num_pages, 2, page_tokens, head),
                        (plane, memory.stride(0), page_tokens * head, head, 1),
                        index * 2 * plane,
                    ),
                )
                for index in range(num_layers)
            ]
            ops.store_context(feature, hidden_norm, angles, slots, layers, heads)
            stored.append(memory)
        assert torch.allclose(*stored, atol=1e-4, rtol=1e-4)
        assert (stored[0] != 0).sum() == (slots >= 0).sum() * num_layers * 4 * head
