"""Attention of ranks that share the tokens of a sequence: every kernel against its eager twin, and the ranks against one."""

from __future__ import annotations

import pytest

from tests.interpreting import INTERPRETED, run_interpreted

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from dataclasses import replace

    import torch
    from torch import Tensor

    from culet.bench.attention_cases import AttentionCase, AttentionShape, make_case
    from culet.kernels.eager import attention as eager_attention
    from culet.kernels.eager import token_shares as eager
    from culet.kernels.triton.attention import token_shares
    from culet.kernels.triton.attention.decode import decode_attention
    from culet.kernels.triton.attention.prefill import prefill_attention, query_tiles
    from culet.kernels.triton.attention.tiles import DecodeTile, PrefillTile
    from culet.kernels.types import PagedKV, RaggedRows, TokenShare
    from culet.parallel.reduce.parts import join_shares

    RUN = 16
    SHAPES = {
        "plain": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=32, window=None, latent=False, page_tokens=64),
        "latent": AttentionShape(num_heads=8, num_kv_heads=1, head_dim=64, window=None, latent=True, page_tokens=64),
    }

    def positions_of(case: AttentionCase) -> Tensor:
        return eager_attention.visible_keys(case.kv, case.rows, case.q_TNH.shape[0])[1]

    def share_pages(kv: PagedKV, share: TokenShare) -> PagedKV:
        """Return the pages of one rank. What it does not store is NaN."""
        planes, page = kv.planes, share.page_tokens
        size = (*planes.shape[:3], page // share.num_parts, planes.shape[4])
        own = torch.full(size, float("nan"), dtype=planes.dtype)
        address = eager.own_addresses(torch.arange(planes.shape[1] * page), share)
        for place in (address >= 0).nonzero().flatten().tolist():
            into = int(address[place])
            own[:, into // size[3], :, into % size[3]] = planes[:, place // page, :, place % page]
        return replace(kv, planes=own)

    def share_rows(case: AttentionCase, share: TokenShare) -> RaggedRows:
        visible_2T, context_B = token_shares.own_keys(positions_of(case), case.rows.row_begin_B1, share)
        return RaggedRows(case.rows.row_begin_B1, context_B, visible_2T)

    @pytest.mark.parametrize("count", [2, 4])
    def test_own_tokens(count: int) -> None:
        address_T = torch.tensor([-1, *range(3 * 128), -1, 5 * 128 + 77])
        begin_B1 = torch.tensor([0, 1, 1, 60, 387], dtype=torch.int32)
        for index in range(count):
            share = TokenShare(index, count, RUN, 128)
            assert torch.equal(token_shares.own_addresses(address_T, share), eager.own_addresses(address_T, share))
            last_T = address_T.clamp(min=0)
            got, want = (module.own_keys(last_T, begin_B1, share) for module in (token_shares, eager))
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1][[0, 2, 3]], want[1][[0, 2, 3]])  # the context of an empty row has no meaning
        kept = torch.stack([eager.own_addresses(address_T, TokenShare(index, count, RUN, 128)) for index in range(count)])
        assert torch.equal((kept >= 0).sum(0), (address_T >= 0).long()), "each token has one owner"

    def check(case: AttentionCase, count: int, few: DecodeTile | None, many: PrefillTile | None) -> None:
        max_queries = case.max_queries
        outs, lses = [], []
        for index in range(count):
            share = TokenShare(index, count, RUN, case.kv.page_tokens)
            kv, rows = share_pages(case.kv, share), share_rows(case, share)
            results = []
            for is_eager in (True, False):
                out = torch.zeros_like(case.q_TNH)
                lse = torch.full(case.q_TNH.shape[:2], -torch.inf)
                if few is not None:
                    attend = eager_attention.decode_attention if is_eager else decode_attention
                    attend(case.q_TNH, kv, rows, max_queries=max_queries, out_TNH=out, lse_TN=lse, tile=few)
                if many is not None:
                    attend = eager_attention.prefill_attention if is_eager else prefill_attention
                    tiles = torch.from_numpy(query_tiles(case.tile_rows, many.rows // case.shape.group, None))
                    attend(case.q_TNH, kv, rows, tiles, out_TNH=out, lse_TN=lse, tile=many)
                results.append((out, lse))
            (want_out, want_lse), (out, lse) = results
            torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
            outs.append(out)
            lses.append(lse)
        assert any((lse == -torch.inf).any() for lse in lses[1:]), "some queries see no token of a rank"
        joined = sum(join_shares(out, lse, torch.stack(lses)) for out, lse in zip(outs, lses, strict=True))
        if many is None:
            whole = eager_attention.decode_attention(case.q_TNH, case.kv, case.rows, max_queries=max_queries)
        else:
            tiles = torch.from_numpy(query_tiles(case.tile_rows, 4, None))
            whole = eager_attention.prefill_attention(case.q_TNH, case.kv, case.rows, tiles)
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)

    LATENT_OFTEN = [pytest.param("plain", marks=pytest.mark.slow), "latent"]

    @pytest.mark.parametrize("shape", LATENT_OFTEN)
    @pytest.mark.parametrize("programs", [pytest.param(1, marks=pytest.mark.slow), 24])
    def test_few_queries(shape: str, programs: int) -> None:
        spans = [(130, 1), (0, 1), (14, 4), (60, 3), (200, 2)]
        case = make_case(SHAPES[shape], spans, dtype=torch.float32, seed=1)
        check(case, 2, DecodeTile(16, 16, 4, 2, programs=programs), None)

    @pytest.mark.slow
    def test_splits_that_programs_join(monkeypatch: pytest.MonkeyPatch) -> None:
        splits = DecodeTile.splits
        monkeypatch.setattr(DecodeTile, "splits", lambda *arguments: splits(*arguments)._replace(joins=True, at_once=4))
        case = make_case(SHAPES["latent"], [(150, 1), (0, 3), (90, 2)], dtype=torch.float32, seed=2)
        check(case, 4, DecodeTile(16, 16, 4, 2, programs=24), None)

    @pytest.mark.parametrize("shape", LATENT_OFTEN)
    def test_many_queries(shape: str) -> None:
        case = make_case(SHAPES[shape], [(0, 40), (50, 20), (120, 17)], dtype=torch.float32, seed=3)
        check(case, 2, None, PrefillTile(32, 16, 4, 2))
