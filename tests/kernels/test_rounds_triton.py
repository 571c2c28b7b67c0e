"""The kernels of drafting rounds against their eager twins, in Triton's interpreter: odd sizes, and rows that only pad."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.interpreting import INTERPRETED, run_interpreted

pytest.importorskip("triton")

if not INTERPRETED:

    def test_rounds_in_the_interpreter() -> None:
        run_interpreted(__file__)

else:
    from culet.kernels import reference_rounds
    from culet.kernels.reference_rounds import BlockShape, Candidates
    from culet.kernels.triton import best, rounds

    EPS = 1e-6
    SPARE = 77  # the page of rows that pad

    @pytest.fixture(autouse=True)
    def seed() -> None:
        torch.manual_seed(12)

    def flat(found: object) -> list[Tensor]:
        """All tensors of nested tuples and lists, in order."""
        if isinstance(found, Tensor):
            return [found]
        assert isinstance(found, tuple | list)
        return [one for part in found for one in flat(part)]

    def assert_same(got: object, wanted: object, tolerance: float = 0.0) -> None:
        for one, other in zip(flat(got), flat(wanted), strict=True):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            if one.dtype.is_floating_point and tolerance:
                assert torch.allclose(one, other, atol=tolerance, rtol=tolerance)
            else:
                assert torch.equal(one, other)

    # --- what a round begins with and leaves ---

    @pytest.mark.parametrize(("num_rows", "num_drafts"), [(1, 1), (3, 7), (131, 2), (0, 3)])
    def test_tokens_of_slots(num_rows: int, num_drafts: int) -> None:
        """Several rows may pad: they share the spare slot, whose tokens nobody reads."""
        width, num_pad = 41, min(2, num_rows // 2)
        slots = torch.randperm(num_rows + 3)[:num_rows]
        lengths = torch.randint(1, width - num_drafts, (num_rows,))
        spare = num_rows + 3
        if num_pad:
            slots[-num_pad:], lengths[-num_pad:] = spare, 1
        tokens = torch.randint(0, 9000, (spare + 1, width), dtype=torch.int32)
        drafts = torch.randint(0, 9000, (num_rows, num_drafts + 2))[:, 1:-1]
        assert_same(rounds.newest_tokens(tokens, slots, lengths), reference_rounds.newest_tokens(tokens, slots, lengths))
        got, wanted = tokens.clone(), tokens.clone()
        rounds.keep_drafts(got, slots, lengths, drafts)
        reference_rounds.keep_drafts(wanted, slots, lengths, drafts)
        assert_same(got[:-1], wanted[:-1])
        for row in range(num_rows - num_pad):
            slot, length = int(slots[row]), int(lengths[row])
            assert got[slot, length + 1 : length + 1 + num_drafts].tolist() == drafts[row].tolist()

    @pytest.mark.parametrize("num_rows", [1, 4, 7])
    @pytest.mark.parametrize("is_ahead", [False, True])
    @pytest.mark.parametrize("halves", [(24,), (32, 7), (16, 8, 5)])
    def test_begin_chain(num_rows: int, is_ahead: bool, halves: tuple[int, ...]) -> None:
        lengths = torch.randint(1, 4000, (num_rows,))
        inv_freqs = [torch.rand(half) for half in halves]
        wanted = reference_rounds.begin_chain(lengths, is_ahead, inv_freqs)
        assert_same(rounds.begin_chain(lengths, is_ahead, inv_freqs), wanted, 1e-5)

    @pytest.mark.parametrize("windows", [(), (None,), (5,), (20, None)])
    @pytest.mark.parametrize(("num_rows", "size", "has_spare"), [(1, 8, True), (5, 6, True), (3, 16, False)])
    def test_begin_blocks(num_rows: int, size: int, has_spare: bool, windows: tuple[int | None, ...]) -> None:
        """Tables begin anywhere, and have more columns than a row uses; the last row pads the batch."""
        columns, page_tokens = 6, 16
        pages = torch.randint(0, 60, (num_rows, columns + 3), dtype=torch.int32)[:, :columns]
        first = torch.randint(0, 3, (num_rows,), dtype=torch.int32) * page_tokens
        lengths = first.long() + torch.randint(1, columns * page_tokens - size, (num_rows,))
        if has_spare:
            pages[-1], first[-1], lengths[-1] = SPARE, 0, 1
        newest, inv_freq = torch.randint(0, 9000, (num_rows,)), torch.rand(12)
        shape = BlockShape(size, 4, page_tokens, SPARE if has_spare else None, windows)
        wanted = reference_rounds.begin_blocks(newest, lengths, pages, first, shape, inv_freq)
        assert_same(rounds.begin_blocks(newest, lengths, pages, first, shape, inv_freq), wanted, 1e-5)
        assert (wanted.slot_T.view(num_rows, size)[-1] == -1).all() == has_spare

    @pytest.mark.parametrize("size", [48, 200])
    def test_embed_norm(size: int) -> None:
        table, ids, weight = torch.randn(90, size + 8)[:, :size], torch.randint(0, 90, (5,)), torch.rand(size)
        wanted = reference_rounds.embed_norm(ids, table, 3.25, weight, EPS)
        assert_same(rounds.embed_norm(ids, table, 3.25, weight, EPS), wanted, 1e-6)

    @pytest.mark.parametrize(("num_taps", "size"), [(1, 24), (4, 40), (8, 16), (11, 1030)])
    def test_taps(num_taps: int, size: int) -> None:
        taps = [torch.randn(5, size) for _ in range(num_taps)]
        assert_same(rounds.join_taps(taps), reference_rounds.join_taps(taps))
        places = torch.randperm(9)[:5]
        rings = torch.zeros(9, num_taps * size), torch.zeros(9, num_taps * size)
        for ops, ring in zip((rounds, reference_rounds), rings, strict=True):
            ops.keep_taps(taps, ring, places)
        assert_same(*rings)
        wide = torch.randn(5, num_taps * size + 4)
        parts = wide[:, : num_taps * size].split(size, -1)
        assert_same(rounds.join_taps(parts), wide[:, : num_taps * size].contiguous())
        assert_same(rounds.join_taps([*taps[1:], parts[0]]), torch.cat([*taps[1:], parts[0]], -1))  # of several strides

    # --- the best token ---

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

    @pytest.mark.parametrize("kind", ["plain", "capped", "e4m3"])
    @pytest.mark.parametrize(("num_rows", "size"), [(1, 96), (3, 256), (19, 300), (70, 64)])
    @pytest.mark.parametrize("is_large", [False, True])
    def test_head_candidates(num_rows: int, size: int, kind: str, is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if is_large:
            monkeypatch.setattr(best, "SMALL_TABLE_BYTES", 0)
        table, scale, cap = head_of(kind, size)
        x = torch.randn(num_rows, size)
        logits = reference_rounds.head_candidates(x, table, scale, cap).scores_RC
        chosen = pick(best, best.head_candidates(x, table, scale, cap))
        assert torch.equal(pick(reference_rounds, Candidates(logits, None)), logits.argmax(-1))
        reached = logits.gather(1, chosen[:, None]).flatten()
        assert torch.allclose(reached, logits.max(dim=1).values, atol=1e-4)
        # Of equal ones the first.
        same = table[:1].expand(650, size).contiguous()
        assert (
            pick(best, best.head_candidates(x, same, None if scale is None else torch.ones(650), cap)).tolist()
            == [0] * num_rows
        )

    def test_head_candidates_of_some_tokens_of_each_block() -> None:
        table, blocks = torch.randn(200, 48), torch.randn(3, 8, 48)
        wanted = torch.empty(15, dtype=torch.int64)
        reference_rounds.pick_best(reference_rounds.head_candidates(blocks[:, 1:6], table, None, 30.0), wanted)
        assert torch.equal(pick(best, best.head_candidates(blocks[:, 1:6], table, None, 30.0)), wanted)
        assert torch.equal(wanted.view(3, 5), (blocks[:, 1:6] @ table.t()).argmax(-1))

    @pytest.mark.parametrize("count", [1, 37, 5000])
    @pytest.mark.parametrize("size", [40, 1100])
    def test_embed_best(count: int, size: int) -> None:
        """Candidates in any order, with equal ones among them: the first of these counts."""
        scores = torch.randint(0, 9, (4, count)).float()
        scores[1] = float("-inf")
        ids = torch.randint(0, 90, (4, count))
        table, hidden = torch.randn(90, size + 3)[:, :size], torch.randn(4, size + 5)[:, :size]
        found, kept = Candidates(scores, ids), torch.zeros(2, 4, 3, dtype=torch.int64)
        pairs = [
            ops.embed_best(found, hidden, table, 5.75, out[:, 2])
            for ops, out in zip((best, reference_rounds), kept, strict=True)
        ]
        assert_same(*pairs)
        assert_same(*kept)
        assert kept[0, :, 2].tolist() == [int(ids[row, scores[row].argmax()]) for row in range(4)]
        assert torch.equal(pick(best, found), kept[0, :, 2])
        tokens = kept[0, :, 2]
        assert_same(best.embed_beside(tokens, hidden, table, 5.75), pairs[1])

    def test_what_is_no_number_names_a_token() -> None:
        """Rows that pad may hold anything: their tokens must exist."""
        x, table = torch.full((2, 32), float("nan")), torch.randn(100, 32)
        chosen = pick(best, best.head_candidates(x, table, None, None))
        assert ((chosen >= 0) & (chosen < 100)).all()
