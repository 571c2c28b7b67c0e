"""The Triton kernels over quantised weights compared with their eager twins, in Triton's interpreter, at odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interpreting import INTERPRETED, run_interpreted

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_kernels_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from culet.kernels.eager import quantised as eager
    from culet.kernels.triton.experts.expert_mlp import RowTile
    from culet.kernels.triton.linear.tiles import GATED, PLAIN, Tile
    from culet.kernels.triton.quantised import experts, few_tokens, linear, look_up, prefill
    from culet.kernels.triton.quantised.packed import PackedMatrix
    from culet.kernels.types import Int8Weight
    from tests.kernels.quantised.cases import FORMATS, NAMES, draw, errors

    TOLERANCE = 3e-6
    # One format of each kind in the default run.
    SOME = ("int4", "fp8", "nvfp4")
    EVERY = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
    TABLES = [each for each, name in zip(EVERY, FORMATS, strict=True) if name != "fp8-block"]  # no table has blocks
    EXPERTS = ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8", "nvfp4"))]

    @pytest.fixture(autouse=True)
    def seed() -> None:
        torch.manual_seed(3)

    def size_of(name: str) -> int:
        return 256 if name == "int4-128" else 192 if name == "int4-64" else 96

    @pytest.mark.parametrize("name", EVERY)
    def test_ops(name: str) -> None:
        """Rows that no tile divides, and a last tile of the inputs that is cut off."""
        size, num_tokens = size_of(name), 3
        weight = draw(name, 140 if name == "fp8-block" else 38, size)
        x = torch.randn(num_tokens, size)
        for op in NAMES if name == "int4" else ("linear", "gated_linear"):
            extra: tuple[Any, ...] = ()
            if op == "linear_gelu_times":
                extra = (torch.randn(num_tokens, weight[0].shape[0]),)
            if op == "capped_head":
                extra = (5.0,)
            got, wanted = (getattr(module, op)(x, weight, *extra) for module in (linear, eager))
            assert errors(got, wanted).max() < TOLERANCE, op

    @pytest.mark.parametrize("epilogue", [PLAIN, GATED])
    def test_split_inputs(epilogue: int) -> None:
        """Parts are summed by the last program, or kept. Tokens take several programs."""
        weight, x = draw("int4", 40, 160), torch.randn(133, 160)
        matrix = PackedMatrix.of(weight)
        num_rows = 20 if epilogue == GATED else 40
        out = torch.full((133, num_rows), torch.nan)
        few_tokens.describe(x, matrix, out, Tile("tiles", 16, 32, 4, 2, 3), epilogue).run()
        twin = eager.gated_linear if epilogue == GATED else eager.linear
        assert errors(out, twin(x, weight)).max() < TOLERANCE
        if epilogue == PLAIN:
            parts = torch.full((3, 133, num_rows), torch.nan)
            few_tokens.describe(x, matrix, parts, Tile("tiles", 16, 32, 4, 2, 3)).run()
            assert errors(parts, twin(x, weight)).max() < TOLERANCE

    @pytest.mark.parametrize("name", EVERY)
    def test_dequantising(name: str) -> None:
        weight = draw(name, 21, size_of(name))
        got = prefill.dequantise(PackedMatrix.of(weight), torch.float32)
        torch.testing.assert_close(got, eager.dequantise(weight), rtol=1e-6, atol=0.0)

    @pytest.mark.parametrize("name", TABLES)
    def test_lookups(name: str) -> None:
        """More tokens than a program has, the rows of a shard, and columns in the middle of a row."""
        size = size_of(name)
        weight, ids = draw(name, 21, size), torch.tensor([3, 20, 0, 11, 7, 3, 139])
        for first_row, columns in ((0, slice(None)), (5, slice(None)), (0, slice(32, 64)), (-1, slice(64, None))):
            given = ids, weight, first_row, columns, 39.25, torch.float32
            got, wanted = look_up.look_up(*given), eager.look_up(*given)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)
            held = (ids >= first_row) & (ids < first_row + weight[0].shape[0])
            assert torch.equal(got.any(1), held)
        assert look_up.look_up(ids[:0], weight, 0, slice(None), 1.0, torch.float32).shape == (0, size)

    def test_lookups_across_tiles() -> None:
        """Columns that begin in the middle of a tile, and end in a later one."""
        weight, ids = draw("int4", 9, 1600), torch.tensor([3, 8, 0])
        for columns in (slice(200, 300), slice(500, 1030), slice(1500, None)):
            given = ids, weight, 0, columns, 39.25, torch.float32
            got, wanted = look_up.look_up(*given), eager.look_up(*given)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)

    @pytest.mark.parametrize("name", ["int4", "fp8"])
    def test_lookups_round_rows_before_they_scale_them(name: str) -> None:
        """In float16, because the interpreter cuts off bits of bfloat16 instead of rounding."""
        given = torch.arange(21), draw(name, 21, 96), 0, slice(None), 39.25, torch.float16
        assert torch.equal(look_up.look_up(*given), eager.look_up(*given))

    @pytest.mark.parametrize("name", SOME)
    def test_heads_of_many_tokens(name: str) -> None:
        """Logits of more tokens than other layers have in tiles. Several tiles of tokens and rows, without and with the cap."""
        weight, x = draw(name, 400, 96), torch.randn(140, 96)
        for cap in (5.0, None):
            got, wanted = linear.capped_head(x, weight, cap), eager.capped_head(x, weight, cap)
            assert errors(got, wanted).max() < TOLERANCE

    @pytest.mark.parametrize("name", EXPERTS)
    @pytest.mark.parametrize("num_tokens", [2, 7])
    def test_experts(name: str, num_tokens: int) -> None:
        """By assignment and by groups. The width is 22 groups of 32 in the 26B, and 3 here."""
        gate_up, down = (draw(name, *shape) for shape in ((5, 192, 64), (5, 64, 96)))
        x, weights = torch.randn(num_tokens, 64), torch.rand(num_tokens, 2)
        ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)]).to(torch.int32)
        got, wanted = (module.experts(x, weights, ids, gate_up, down) for module in (experts, eager))
        assert errors(got, wanted).max() < TOLERANCE
        assert (num_tokens <= experts.ASSIGNED_TOKENS) == (num_tokens == 2)

    @pytest.mark.parametrize("name", EXPERTS)
    @pytest.mark.parametrize("num_tokens", [1, 3])
    def test_experts_by_assignment(name: str, num_tokens: int) -> None:
        """Three experts per token, in tiles that do not divide the sizes, over several steps."""
        gate_up, down = (draw(name, *shape) for shape in ((5, 2 * 160, 192), (5, 192, 160)))
        x, weights = torch.randn(num_tokens, 192), torch.rand(num_tokens, 3)
        ids = torch.stack([torch.randperm(5)[:3] for _ in range(num_tokens)]).to(torch.int32)
        y = torch.full_like(x, torch.nan)
        packed = PackedMatrix.of(gate_up), PackedMatrix.of(down)
        up_tile, down_tile = RowTile(32, 128, 4, 2), RowTile(16, 32)
        for launch in experts.describe_assigned(x, weights, ids, *packed, y, up_tile=up_tile, down_tile=down_tile):
            launch.run()
        assert errors(y, eager.experts(x, weights, ids, gate_up, down)).max() < TOLERANCE

    @pytest.mark.parametrize("num_tokens", [2, 7])
    def test_experts_of_two_formats(num_tokens: int) -> None:
        """Each matrix has its own format."""
        gate_up, down = draw("int4", 5, 192, 64), draw("int8", 5, 64, 96)
        x, weights = torch.randn(num_tokens, 64), torch.rand(num_tokens, 2)
        ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)]).to(torch.int32)
        got, wanted = (module.experts(x, weights, ids, gate_up, down) for module in (experts, eager))
        assert errors(got, wanted).max() < TOLERANCE

    def test_rounding_tokens() -> None:
        """Only scales are compared. The interpreter rounds to e4m3 in its own way."""
        x = torch.randn(3, 70) * torch.tensor([[1.0], [1e4], [0.0]])
        rounded, scale = prefill.quantise_tokens(x)
        torch.testing.assert_close(scale[:2, 0], x[:2].abs().amax(1) / 448)
        assert not rounded[2].float().any()
        assert not (rounded.float() * scale).isnan().any()

    def test_no_tokens_and_strided_weights() -> None:
        weight = draw("int8", 16, 64)
        assert linear.linear(torch.empty(0, 64), weight).shape == (0, 16)
        assert linear.capped_head(torch.empty(0, 64), weight, 5.0).shape == (0, 16)
        strided = Int8Weight(draw("int8", 16, 128)[0][:, :64], weight[1])
        x = torch.randn(2, 64)
        assert errors(linear.linear(x, strided), eager.linear(x, strided)).max() < TOLERANCE
