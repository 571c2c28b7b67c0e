"""The Triton attention kernels compared with their eager twins, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreting import INTERPRETED, run_interpreted
from tests.matrix import matrix

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_kernels_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from culet.attention import triton as triton_module
    from culet.bench.attention_cases import AttentionCase, AttentionShape, make_case
    from culet.kernels.captures import side_by_side
    from culet.kernels.eager import attention as eager_attention
    from culet.kernels.triton.attention.decode import decode_attention, decode_launches
    from culet.kernels.triton.attention.prefill import prefill_attention, prefill_launch, query_tiles
    from culet.kernels.triton.attention.splits import Scratch, scratch_rows
    from culet.kernels.triton.attention.tiles import DecodeTile, PrefillTile
    from culet.kernels.types import PagedKV, RaggedRows
    from tests.kernels.attention_backend import run_backend

    SLIDING = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=32, window=40, latent=False, page_tokens=16)
    SLIDING_BIG_PAGES = replace(SLIDING, page_tokens=64)
    GLOBAL = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32, window=None, latent=False, page_tokens=48)
    LATENT = AttentionShape(num_heads=8, num_kv_heads=1, head_dim=64, window=None, latent=True, page_tokens=64)
    FEW_SHAPES = {"sliding": SLIDING, "global": GLOBAL, "latent": LATENT}
    SHAPES = {"sliding": SLIDING, "big": SLIDING_BIG_PAGES, "global": GLOBAL, "latent": LATENT}

    def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
        assert not got.isnan().any()
        error = (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() < 1e-5, f"worst token {int(error.argmax())}: {float(error.max()):.2e}"

    def check_decode(case: AttentionCase, tile: DecodeTile) -> None:
        expected = eager_attention.decode_attention(case.q_TNH, case.kv, case.rows, max_queries=case.max_queries)
        got = decode_attention(
            case.q_TNH,
            case.kv,
            case.rows,
            max_queries=case.max_queries,
            out_TNH=torch.full_like(case.q_TNH, float("nan")),
            tile=tile,
        )
        assert_close(got, expected)

    def check_prefill(case: AttentionCase, tile: PrefillTile, with_fresh: bool) -> None:
        fresh = case.fresh if with_fresh else None
        tiles = torch.from_numpy(query_tiles(case.tile_rows, tile.rows // case.shape.group, case.shape.window))
        expected = eager_attention.prefill_attention(case.q_TNH, case.kv, case.rows, tiles, fresh=fresh)
        out = torch.full_like(case.q_TNH, float("nan"))
        got = prefill_attention(case.q_TNH, case.kv, case.rows, tiles, fresh=fresh, out_TNH=out, tile=tile)
        assert_close(got, expected)

    @matrix({"shape": SHAPES, "programs": {"one-split": 1, "split": 24}})
    def test_decode_of_ragged_rows(shape: AttentionShape, programs: int) -> None:
        spans = [(100, 1), (0, 1), (39, 1), (40, 1), (63, 1), (150, 1)]
        case = make_case(shape, spans, dtype=torch.float32, seed=1)
        check_decode(case, DecodeTile(16, 32, 4, 2, programs=programs))

    @matrix({"shape": FEW_SHAPES, "rows, columns": [(16, 32), (64, 16)]})
    def test_verify_mixed_with_decode(shape: AttentionShape, rows: int, columns: int) -> None:
        case = make_case(shape, [(90, 4), (17, 1), (0, 5), (130, 2)], dtype=torch.float32, seed=2)
        check_decode(case, DecodeTile(rows, columns, 4, 2, programs=16))

    @pytest.mark.parametrize("shape", [SLIDING, LATENT], ids=["sliding", "latent"])
    def test_one_row_is_split(shape: AttentionShape) -> None:
        case = make_case(shape, [(200, 1)], dtype=torch.float32, seed=3)
        check_decode(case, DecodeTile(16, 16, 4, 2, programs=20))

    @matrix({"shape": FEW_SHAPES, "at_once": [1, 4]})
    def test_programs_of_many_rows_join_their_splits(
        monkeypatch: pytest.MonkeyPatch, shape: AttentionShape, at_once: int
    ) -> None:
        """One launch is enough, and it resets its counters for the next."""
        splits = DecodeTile.splits
        monkeypatch.setattr(DecodeTile, "splits", lambda *arguments: splits(*arguments)._replace(joins=True, at_once=at_once))
        tile = DecodeTile(16, 16, 4, 2, programs=24)
        case = make_case(shape, [(150, 1), (0, 3), (90, 2)], dtype=torch.float32, seed=16)
        scratch = Scratch.allocate(scratch_rows(tile, shape.num_kv_heads, shape.group, 3), shape.head_dim, "cpu")
        arguments = (case.q_TNH, case.kv, case.rows)
        out = torch.full_like(case.q_TNH, float("nan"))
        (launch,) = decode_launches(*arguments, max_queries=3, out_TNH=out, tile=tile, scratch=scratch)
        for _ in range(2):
            out.fill_(float("nan"))
            launch.run()
            assert_close(out, eager_attention.decode_attention(*arguments, max_queries=3))
            assert not scratch.arrived.any()

    def test_decode_does_not_write_long_and_empty_rows() -> None:
        case = make_case(SLIDING, [(20, 1), (5, 12), (60, 1)], dtype=torch.float32, seed=4)
        rows = case.rows
        begins = torch.cat((rows.row_begin_B1[:1], rows.row_begin_B1)).contiguous()  # an empty row in front, like padding
        kv = replace_tables(case)
        padded = RaggedRows(begins, torch.cat((rows.context_B[:1] * 0, rows.context_B)))
        out = torch.full_like(case.q_TNH, 7.0)
        decode_attention(case.q_TNH, kv, padded, max_queries=4, out_TNH=out, tile=DecodeTile(16, 32, 4, 2, programs=8))
        assert (out[1:13] == 7.0).all()
        expected = eager_attention.decode_attention(case.q_TNH, case.kv, case.rows, max_queries=4)
        assert_close(out[[0, 13]], expected[[0, 13]])

    def replace_tables(case: AttentionCase) -> PagedKV:
        kv = case.kv
        return replace(
            kv, pages_BP=torch.cat((kv.pages_BP[:1] * 0, kv.pages_BP)), first_B=torch.cat((kv.first_B[:1] * 0, kv.first_B))
        )

    def test_decode_with_intervals() -> None:
        case = make_case(SLIDING, [(50, 8), (10, 1)], dtype=torch.float32, seed=5, images=[(0, 52, 5)])
        check_decode(case, DecodeTile(16, 32, 4, 2, programs=8))

    def test_split_follows_the_lengths_on_the_device() -> None:
        """A CUDA graph replays the same launch with other lengths."""
        long = make_case(GLOBAL, [(200, 1), (150, 1)], dtype=torch.float32, seed=6)
        tile = DecodeTile(16, 32, 4, 2, programs=24)
        for contexts in ([3, 150], [200, 0], [90, 91]):
            rows = replace(long.rows, context_B=torch.tensor(contexts, dtype=torch.int32))
            expected = eager_attention.decode_attention(long.q_TNH, long.kv, rows, max_queries=1)
            assert_close(decode_attention(long.q_TNH, long.kv, rows, max_queries=1, tile=tile), expected)

    @matrix({"shape": SHAPES, "with_fresh": {"fresh": True, "paged": False}})
    def test_prefill_of_ragged_rows(shape: AttentionShape, with_fresh: bool) -> None:
        case = make_case(shape, [(0, 50), (33, 20), (70, 17)], dtype=torch.float32, seed=7)
        check_prefill(case, PrefillTile(32, 32, 4, 2), with_fresh)

    def test_chunk_longer_than_the_window_reads_fresh_keys() -> None:
        case = make_case(SLIDING, [(25, 100), (64, 90)], dtype=torch.float32, seed=8, stored_tail=40)
        check_prefill(case, PrefillTile(32, 32, 4, 2), True)

    @matrix({"shape": {"sliding": SLIDING, "latent": LATENT}, "tokens": {"longer": 60, "shorter": 20}})
    def test_prefill_with_images(shape: AttentionShape, tokens: int) -> None:
        images = [(0, 30, tokens), (1, 45, 11)]
        case = make_case(shape, [(10, 90), (40, 20)], dtype=torch.float32, seed=9, images=images)
        check_prefill(case, PrefillTile(32, 32, 4, 2), True)

    def test_tiles_are_ordered_by_work() -> None:
        tiles = query_tiles([(0, 0, 40, 0), (2, 50, 20, 100)], 16, None)
        assert tiles[0].tolist() == [2, 16, 50, 20, 100]
        assert sorted(map(tuple, tiles[:, :2].tolist())) == [(0, 0), (0, 16), (0, 32), (2, 0), (2, 16)]
        assert query_tiles([], 16, None).shape == (0, 5)

    def all_rows(case: AttentionCase) -> torch.Tensor:
        rows = torch.tensor([[row, 0] for row in range(len(case.spans))])
        return eager_attention.prefill_attention(case.q_TNH, case.kv, case.rows, rows, fresh=case.fresh)

    @pytest.mark.parametrize("shape", [SLIDING, LATENT], ids=["sliding", "latent"])
    def test_backend_takes_any_mix_of_rows(shape: AttentionShape) -> None:
        case = make_case(shape, [(100, 1), (0, 50), (30, 4), (70, 33), (5, 1)], dtype=torch.float32, seed=10)
        assert_close(run_backend(case, is_stored=True), all_rows(case))

    def test_backend_reads_fresh_keys_of_a_long_chunk() -> None:
        case = make_case(SLIDING, [(25, 90), (60, 1)], dtype=torch.float32, seed=11, stored_tail=40)
        assert_close(run_backend(case, is_stored=False), all_rows(case))

    def test_backend_reads_a_long_tail_from_pages() -> None:
        """A tail has fewer tokens than the step that its fresh keys come from."""
        case = make_case(SLIDING, [(70, 20), (3, 1)], dtype=torch.float32, seed=12)
        assert_close(run_backend(case, is_stored=True, with_fresh=False), all_rows(case))

    def test_text_rows_have_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
        """In a step with images, rows without an image use the text kernels."""
        spans, images = [(0, 17), (20, 20), (30, 1), (60, 17)], [(1, 25, 15)]
        case = make_case(SLIDING, spans, dtype=torch.float32, seed=13, images=images)
        seen: list[tuple[int, ...]] = []

        def launch(q_TNH, kv, rows, tiles_X5, **options):  # type: ignore[no-untyped-def]
            if rows.visible_2T is not None:
                seen.append(tuple(sorted(set(tiles_X5[:, 0].tolist()))))
            return prefill_launch(q_TNH, kv, rows, tiles_X5, **options)

        def decode(q_TNH, kv, rows, **options):  # type: ignore[no-untyped-def]
            assert rows.visible_2T is None
            return decode_launches(q_TNH, kv, rows, **options)

        monkeypatch.setattr(triton_module, "prefill_launch", launch)
        monkeypatch.setattr(triton_module, "decode_launches", decode)
        assert_close(run_backend(case, is_stored=True, text_rows=(0, 2, 3)), all_rows(case))
        assert seen == [(1,)]
        monkeypatch.undo()
        assert_close(run_backend(case, is_stored=True), all_rows(case))  # without `is_text`, all rows use intervals

    @matrix({"shape": FEW_SHAPES, "with_fresh": {"paged": False, "fresh": True}})
    def test_fp8_pages(shape: AttentionShape, with_fresh: bool) -> None:
        """Decode, verify, prompts and chunks over e4m3 pages. Unwritten memory is NaN there too."""
        few = make_case(shape, [(60, 1), (30, 3)], dtype=torch.float32, seed=14, kv_dtype=torch.float8_e4m3fn)
        assert few.kv.planes.float().isnan().any()
        check_decode(few, DecodeTile(16, 32, 4, 2, programs=8))
        long = make_case(shape, [(30, 20)], dtype=torch.float32, seed=15, kv_dtype=torch.float8_e4m3fn)
        check_prefill(long, PrefillTile(32, 32, 4, 2), with_fresh)

    def test_long_rows_run_beside_few_queries_that_read_much(monkeypatch: pytest.MonkeyPatch) -> None:
        """A window's keys before it are not read. Without few queries, there is nothing to run beside."""
        seen: list[bool] = []

        def note(first, second, device, *, is_long, is_urgent):  # type: ignore[no-untyped-def]
            assert is_urgent
            seen.append(is_long)
            return side_by_side(first, second, device, is_long=is_long, is_urgent=is_urgent)

        monkeypatch.setattr(triton_module, "side_by_side", note)
        case = make_case(SLIDING, [(100, 1), (0, 50), (20, 4)], dtype=torch.float32, seed=17)
        num_bytes = (40 + 24) * 4 * 2 * 2 * 32  # float32, keys and values, two heads of 32
        for many in (num_bytes, num_bytes + 1):
            monkeypatch.setattr(triton_module, "MANY_BYTES", many)
            assert_close(run_backend(case, is_stored=True), all_rows(case))
        assert seen == [True, False]
        run_backend(make_case(SLIDING, [(0, 50)], dtype=torch.float32, seed=18), is_stored=True)
        assert seen == [True, False, False]
