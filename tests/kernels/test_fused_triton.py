"""The fused Triton kernels other than attention, compared with their eager twins in Triton's interpreter.

The tests use float32 and small sizes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreting import INTERPRETED, run_interpreted
from tests.matrix import matrix

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_kernels_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from triton.runtime import interpreter

    from culet.kernels.eager import fused as eager_fused
    from culet.kernels.eager import ops as eager_ops
    from culet.kernels.eager import sampling as eager_sampling
    from culet.kernels.eager import towers as eager_towers
    from culet.kernels.triton.attention.patch_retries import describe_patch_retries
    from culet.kernels.triton.experts import expert_mlp, route
    from culet.kernels.triton.linear import few_tokens
    from culet.kernels.triton.linear.tiles import GATED, GELU_TIMES, PLAIN, SOFTCAP, Tile
    from culet.kernels.triton.norms import patches, pointwise, qkv, residual
    from culet.kernels.triton.sampling import draw as sampling
    from culet.kernels.triton.sampling import masks, penalties
    from culet.kernels.types import HeadShape, Penalties, RowSettings
    from culet.sampling import sampler
    from culet.sampling.logprobs import compute_logprobs
    from culet.types import Sampling

    EPS = 1e-6

    @pytest.fixture(autouse=True)
    def seed() -> None:
        torch.manual_seed(11)
        random.seed(11)

    def assert_close(got: Tensor | None, expected: Tensor | None) -> None:
        if expected is None:
            assert got is None
            return
        assert got is not None
        assert got.shape == expected.shape
        assert not got.isnan().any()
        error = (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() < 3e-6, f"worst row {int(error.argmax())}: {float(error.max()):.2e}"

    @pytest.fixture
    def rounds_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter's rounding to e4m3 loses the carry (1.97 becomes 1), while torch rounds like the hardware."""
        convert = interpreter._convert_float

        def by_torch(given: Any, given_type: Any, wanted_type: Any, rounding: Any) -> Any:
            if str(wanted_type) != "fp8e4nv" or str(given_type) != "fp32":
                return convert(given, given_type, wanted_type, rounding)
            return torch.from_numpy(given.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", by_torch)

    def weight(size: int) -> Tensor:
        return torch.rand(size) + 0.5

    # --- linear ---

    def twin(epilogue: int, x: Tensor, w: Tensor, factor: Tensor) -> Tensor:
        if epilogue == GATED:
            return eager_fused.gated_linear(x, w)
        if epilogue == GELU_TIMES:
            return eager_fused.linear_gelu_times(x, w, factor)
        return eager_fused.capped_head(x, w, 3.0) if epilogue == SOFTCAP else eager_fused.linear(x, w)

    @matrix(
        {
            "epilogue": [PLAIN, GATED, GELU_TIMES, SOFTCAP],
            "tokens, tile": [
                (1, Tile("rows", 16, 128)),
                (2, Tile("rows", 8, 256)),
                (3, Tile("rows", 16, 64)),
                (4, Tile("rows", 16, 512)),
                (1, Tile("tiles", 16, 64)),
                (9, Tile("tiles", 32, 64, split_k=2)),
                (17, Tile("tiles", 16, 128, split_k=4)),
            ],
        }
    )
    def test_linear(epilogue: int, tokens: int, tile: Tile) -> None:
        size, rows = 320, 44  # not divisible by the tile
        x, factor = torch.randn(tokens, 2 * size)[:, :size], torch.randn(tokens, 3 * rows)[:, rows : 2 * rows]
        w = torch.randn(rows * (2 if epilogue == GATED else 1), size) / size**0.5
        out = torch.full((tokens, rows), float("nan"))
        for _ in range(2):  # twice, because the arrival counters must be reset
            few_tokens.describe(x, w, out, tile, epilogue, factor=factor, softcap=3.0).run()
            assert_close(out, twin(epilogue, x, w, factor))

    @pytest.mark.parametrize("tokens", [0, 1, 2, 5, 33])
    def test_linear_chooses_a_tile(tokens: int) -> None:
        x, w, factor = torch.randn(tokens, 128), torch.randn(64, 128), torch.randn(tokens, 64)
        assert_close_or_empty(few_tokens.linear(x, w), eager_fused.linear(x, w))
        assert_close_or_empty(few_tokens.gated_linear(x, w), eager_fused.gated_linear(x, w))
        assert_close_or_empty(few_tokens.linear_gelu_times(x, w, factor), eager_fused.linear_gelu_times(x, w, factor))
        assert_close_or_empty(few_tokens.capped_head(x, w, 30.0), eager_fused.capped_head(x, w, 30.0))
        assert_close_or_empty(few_tokens.capped_head(x, w, None), eager_fused.capped_head(x, w, None))

    # --- vision towers ---

    @pytest.mark.parametrize(("heads", "size"), [(3, 24), (4, 16)])
    @pytest.mark.parametrize("bounds", [None, [[0.4, 0.9], [-0.5, 0.7], [-0.2, 1.0]]])
    def test_patch_qkv(heads: int, size: int, bounds: list[list[float]] | None) -> None:
        projected, weights = torch.randn(5, 4 * heads * size)[:, : 3 * heads * size], torch.rand(2, size) + 0.5
        rope = eager_ops.rope(torch.arange(5) * 7, torch.rand(size // 2))
        arguments = projected, weights, rope, heads, EPS, None if bounds is None else torch.tensor(bounds)
        expected = eager_towers.patch_qkv(projected.contiguous(), *arguments[1:])
        for got, wanted in zip(patches.patch_qkv(*arguments), expected, strict=True):
            assert_close(got, wanted)
        assert [x.shape[0] for x in patches.patch_qkv(projected[:0], *arguments[1:])] == [0, 0, 0]

    def test_padding_of_patches(monkeypatch: pytest.MonkeyPatch) -> None:
        """With padding, the values of a head are followed by a 1, and everything else by zeros."""
        monkeypatch.setattr(patches, "head_pitch", lambda x, head_dim: head_dim + 5)
        rope = eager_ops.rope(torch.arange(3), torch.rand(12))
        q, k, v = patches.patch_qkv(torch.randn(3, 3 * 2 * 24), torch.rand(2, 24), rope, 2, EPS)
        padding = torch.stack([x.as_strided((3, 2, 29), (58, 29, 1), x.storage_offset())[..., 24:] for x in (q, k, v)])
        assert padding[2, ..., 0].eq(1).all()
        padding[2, ..., 0] = 0
        assert padding.eq(0).all()

    def test_patch_retries() -> None:
        """Tiles with a row that asks for it are computed with a maximum. The others stay as they are."""
        lengths, heads, size, rows = [21, 21], 2, 24, 8
        q, k, v = torch.randn(3, 5 + sum(lengths), heads, 32)[..., :size].unbind(0)  # five rows belong to other images
        q *= 20  # scores in the hundreds
        out = torch.full((5 + sum(lengths), heads, size), float("nan"))
        retry = torch.zeros(2 * heads * 4, rows, dtype=torch.int8)  # four tiles per head and image
        retry[::3, 2] = 1
        describe_patch_retries(retry, q, k, v, out, 5, 21).run()
        expected = eager_towers.patch_attention(q[5:], k[5:], v[5:], lengths).unflatten(0, (2, 21)).transpose(1, 2)
        got = out[5:].unflatten(0, (2, 21)).transpose(1, 2)
        for tile, (image, head, query) in enumerate(itertools.product(range(2), range(heads), range(0, 32, rows))):
            part = image, head, slice(query, query + rows)
            if tile % 3:
                assert got[part].isnan().all()
            elif query < 21:
                assert_close(got[part], expected[part])
        assert out[:5].isnan().all()

    def test_clipped_gelu_mul() -> None:
        gate_up, bounds = torch.randn(5, 2 * 1100), torch.tensor([[-0.5, 1.0], [-0.7, 0.8], [0.01, 0.6]])
        assert_close(patches.clipped_gelu_mul(gate_up, bounds), eager_towers.clipped_gelu_mul(gate_up, bounds))
        assert patches.clipped_gelu_mul(gate_up[:0], bounds).shape == (0, 1100)

    def test_callers_sum_the_parts_of_a_split() -> None:
        x, w = torch.randn(5, 1024), torch.randn(64, 1024) / 32
        parts = few_tokens.linear_parts(x, w)
        assert parts.shape[0] > 1
        assert_close(parts.sum(0), eager_fused.linear(x, w))
        assert few_tokens.linear_parts(x[:1], w).shape == (1, 64)  # not split
        stream, weights, other = torch.randn(5, 64), [weight(64) for _ in range(4)], torch.randn(5, 64)
        for got, wanted in (
            (residual.residual_norm, eager_ops.residual_norm),
            (residual.residual_norm_two, eager_fused.residual_norm_two),
        ):
            last = None if got is residual.residual_norm else weights[2]
            for mine, theirs in zip(
                got(stream, parts, weights[0], last, weights[1], EPS),
                wanted(stream, parts.sum(0), weights[0], last, weights[1], EPS),
                strict=True,
            ):
                assert_close(mine, theirs)
        three = (weights[0], weights[1], weights[2])
        joint = residual.residual_norm_joint(stream, parts, other, three, None, weights[3], EPS)
        wanted = eager_fused.residual_norm_joint(stream, parts, other, three, None, weights[3], EPS)
        for mine, theirs in zip(joint, wanted, strict=True):
            assert_close(mine, theirs)

    def assert_close_or_empty(got: Tensor, expected: Tensor) -> None:
        assert got.shape == expected.shape
        if got.numel():
            assert_close(got, expected)

    # --- norms and pointwise ops ---

    @pytest.mark.parametrize("size", [96, 130])
    def test_norms(size: int) -> None:
        x, a, b = (torch.randn(3, 2 * size)[:, :size] for _ in range(3))
        w = [weight(size) for _ in range(4)]
        scalar = torch.tensor([0.7])
        assert_close(residual.rms_norm(x, w[0], EPS), eager_ops.rms_norm(x, w[0], EPS))
        with pytest.raises(AssertionError, match="must be adjacent"):
            residual.rms_norm(torch.randn(size, 3).t(), w[0], EPS)
        assert_close(residual.sum_norms(a, b, w[0], w[1], EPS), eager_ops.sum_norms(a, b, w[0], w[1], EPS))
        for factor in (None, scalar):
            for following in (None, w[1]):
                got = residual.residual_norm(x, a, w[0], factor, following, EPS)
                for mine, theirs in zip(got, eager_ops.residual_norm(x, a, w[0], factor, following, EPS), strict=True):
                    assert_close(mine, theirs)
        plain = residual.residual_norm(x, a, None, None, w[1], EPS)
        for mine, theirs in zip(plain, eager_ops.residual_norm(x, a, None, None, w[1], EPS), strict=True):
            assert_close(mine, theirs)
        assert_close(plain[0], x + a)
        two = residual.residual_norm_two(x, a, w[0], w[1], w[2], EPS)
        for mine, theirs in zip(two, eager_fused.residual_norm_two(x, a, w[0], w[1], w[2], EPS), strict=True):
            assert_close(mine, theirs)
        for following in (None, w[3]):
            joint = residual.residual_norm_joint(x, a, b, (w[0], w[1], w[2]), scalar, following, EPS)
            wanted = eager_fused.residual_norm_joint(x, a, b, (w[0], w[1], w[2]), scalar, following, EPS)
            for mine, theirs in zip(joint, wanted, strict=True):
                assert_close(mine, theirs)

    def test_pointwise_ops() -> None:
        table, ids = torch.randn(50, 128), torch.randint(0, 50, (5,))
        assert_close(pointwise.embed(ids, table[:, 32:96], 2.5), eager_ops.embed(ids, table[:, 32:96], 2.5))
        gate_up = torch.randn(5, 2 * 1100) * 3
        assert_close(pointwise.gelu_mul(gate_up), eager_ops.gelu_mul(gate_up))
        assert_close(pointwise.silu_mul(gate_up), eager_ops.silu_mul(gate_up))
        gate, values = torch.randn(5, 32), torch.randn(5, 6, 32)
        assert_close(pointwise.gelu_gate(gate, values[:, 2]), eager_ops.gelu_gate(gate, values[:, 2]))
        context, embedded, w = torch.randn(5, 6 * 32), torch.randn(5, 6 * 32), weight(32)
        assert_close(
            pointwise.ple_combine(context, embedded, w, 0.3, EPS), eager_ops.ple_combine(context, embedded, w, 0.3, EPS)
        )
        logits = torch.randn(3, 1500) * 40
        assert_close(pointwise.softcap(logits.clone(), 30.0), eager_ops.softcap(logits.clone(), 30.0))
        assert pointwise.softcap(logits, None) is logits

    @matrix(
        {
            "has_few_tokens": [True, False],  # one head per program, and several
            "heads": {
                "plain": HeadShape(4, 2, 32, 32, False, False, EPS),
                "partly rotated": HeadShape(4, 1, 64, 16, False, False, EPS),
                "V as it is": HeadShape(4, 2, 32, 32, False, False, EPS, norm_v=False),
                "K and V only": HeadShape(0, 2, 32, 32, False, False, EPS, norm_v=False),
                "K as V": HeadShape(4, 2, 64, 16, True, False, EPS),
                "latent": HeadShape(6, 3, 64, 16, True, True, EPS),
            },
            "is_fp8": {"float32": False, "fp8": True},
        }
    )
    @pytest.mark.usefixtures("rounds_as_gpus_do")
    def test_prepare_qkv(has_few_tokens: bool, heads: HeadShape, is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        tokens = 5
        monkeypatch.setattr(qkv, "FEW_TOKENS", tokens if has_few_tokens else tokens - 1)
        size, num_kv, rotated = heads.head_dim, heads.num_kv_heads, heads.rotated_dims
        x = torch.randn(tokens, (heads.num_heads + num_kv * (1 if heads.k_eq_v else 2)) * size)
        w = torch.rand(heads.num_heads + num_kv, size) + 0.5
        positions = torch.randint(0, 100000, (tokens,))
        frequencies = 1e4 ** (-torch.arange(0, rotated, 2) / size)
        rope, twin_rope = qkv.rope(positions, frequencies), eager_ops.rope(positions, frequencies)
        for mine, theirs in zip(rope, twin_rope, strict=True):
            assert_close(mine, theirs)
        # Pages inside larger slabs, whose other bytes must not change.
        width, planes, page, pages = (size + rotated, 1, 16, 40) if heads.latent else (size, 2, 16, 40)
        slab = torch.full((pages, 700 + planes * num_kv * page * width), float("nan"))
        shape, stride = (planes, pages, num_kv, page, width), (num_kv * page * width, slab.stride(0), page * width, width, 1)
        slab = slab.to(torch.float8_e4m3fn) if is_fp8 else slab
        mine, theirs = slab.clone(), slab.clone()
        addresses = torch.randperm(pages * page)[:tokens]
        addresses[1::3] = -1
        where, twin_where = qkv.stores(addresses, page), eager_ops.stores(addresses, page)
        got = qkv.prepare_qkv(x, w, rope, mine.as_strided(shape, stride, 320), where, heads)
        wanted = eager_ops.prepare_qkv(x.clone(), w, twin_rope, theirs.as_strided(shape, stride, 320), twin_where, heads)
        for tensor, twin in zip(got, wanted, strict=True):
            if tensor.numel():
                assert_close(tensor, twin)
        mine, theirs = mine.float(), theirs.float()
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.allclose(mine.nan_to_num(0), theirs.nan_to_num(0), atol=1e-5)
        if is_fp8 and heads.latent:
            stored = mine.as_strided(shape, stride, 320)[0][addresses[0] // page, :, addresses[0] % page]
            assert torch.equal(stored[:, :size], got[2][0])  # fresh values equal those in the pages
        if not heads.num_heads:
            return
        queries = replace(heads, num_kv_heads=0)
        own = x[:, : heads.num_heads * size]
        mine_q = qkv.prepare_q(own, w[: heads.num_heads], rope, queries)
        assert_close(mine_q, eager_ops.prepare_q(own.clone(), w[: heads.num_heads], twin_rope, queries))
        # As parts to be summed.
        parts = torch.randn(3, *x.shape)
        parts[2] = x - parts[0] - parts[1]
        again = qkv.prepare_qkv(parts, w, rope, mine.as_strided(shape, stride, 320), where, heads, torch.bfloat16)
        for tensor, twin in zip(again, wanted, strict=True):
            assert tensor.dtype is torch.bfloat16
            assert torch.allclose(tensor.float(), twin, atol=0.07 if is_fp8 else 0.02, rtol=0.07 if is_fp8 else 0.02)
        assert_close(qkv.prepare_q(parts[..., : own.shape[1]], w[: heads.num_heads], rope, queries), mine_q)

    # --- experts ---

    D, E, K, WIDTH = 192, 8, 3, 48

    @pytest.mark.parametrize("tokens", [1, 3, 17, 40])
    def test_route(tokens: int) -> None:
        x, router, scale = torch.randn(tokens, D), torch.randn(E, D) / D**0.5, torch.rand(E) + 0.5
        for _ in range(2):
            weights, ids = route.route(x, router, scale, K, EPS)
            wanted, wanted_ids = eager_ops.route(x, router, scale, K, EPS)
            assert torch.equal(ids.long(), wanted_ids)
            assert_close(weights, wanted)

    def test_the_parts_of_the_router_are_exact() -> None:
        # The interpreter cannot multiply bfloat16 tiles. tests/kernels/test_experts_gpu.py compares the whole router.
        router, out = torch.randn(E, D) / D**0.5, (torch.empty(99, K), torch.empty(99, K, dtype=torch.int32))
        split, _ = route.describe_route(torch.randn(99, D).bfloat16(), router, torch.ones(E), out, EPS, is_large=True)
        split.run()
        assert torch.equal(split.arguments["parts"].float().sum(0), router)

    @pytest.mark.parametrize("tokens", [2, 20])
    def test_route_prefers_the_lower_id_of_equal_experts(tokens: int) -> None:
        router = torch.randn(1, D).expand(E, D).contiguous()
        _, ids = route.route(torch.randn(tokens, D), router, torch.ones(E), K, EPS)
        assert ids.tolist() == [list(range(K))] * tokens

    @pytest.mark.parametrize("tokens", [2, 20])
    def test_route_of_nan_gives_distinct_experts(tokens: int) -> None:
        x = torch.full((tokens, D), float("nan"))
        _, ids = route.route(x, torch.randn(E, D), torch.ones(E), K, EPS)
        assert all(len(set(row)) == K and set(row) <= set(range(E)) for row in ids.tolist())

    @matrix(
        {
            "tokens": [1, 4, 19, 90],
            "way": {"grouped": expert_mlp.describe_grouped, "assigned": expert_mlp.describe_assigned},
        }
    )
    def test_experts(tokens: int, way: object) -> None:
        if tokens > 20 and way is expert_mlp.describe_assigned:
            pytest.skip("not served by assignment")
        x, gate_up = torch.randn(tokens, D), torch.randn(E, 2 * WIDTH, D) / D**0.5
        down = torch.randn(E, D, WIDTH) / WIDTH**0.5
        weights, ids = (
            torch.rand(tokens, K),
            torch.stack([torch.randperm(E - 1)[:K] for _ in range(tokens)]),
        )  # the last is idle
        wanted = eager_ops.experts(x, weights, ids, gate_up, down)
        y = torch.full_like(x, float("nan"))
        tiles = {"up": expert_mlp.RowTile(16, 128), "down": expert_mlp.RowTile(32, 64)}
        if way is expert_mlp.describe_grouped:
            tiles = {"up": expert_mlp.GroupTile(16, 32, 64), "down": expert_mlp.GroupTile(32, 64, 32)}
        for launch in way(x, weights, ids.int(), gate_up, down, y, **tiles):  # type: ignore[operator]
            launch.run()
        assert_close(y, wanted)

    # --- sampling ---

    def setting(**given: object) -> Sampling:
        plain = Sampling(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), random.getrandbits(64), random.randrange(3), None, None)
        return replace(plain, **given)  # type: ignore[arg-type]

    SETTINGS = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "min_p": 0.1},
        {"top_k": 1},
        {"top_k": 5, "top_p": 0.5},
        {"top_k": 64, "top_p": 0.95},
        {"top_k": 64, "temperature": 0.3, "min_p": 0.05},
        {"top_k": 64, "top_p": 0.3, "temperature": 5.0},
    ]

    def on_rows(settings: list[Sampling]) -> RowSettings:
        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(row, name) for row in settings], dtype=dtype)

        return RowSettings(
            column("temperature", torch.float64),
            column("top_k", torch.int32),
            column("top_p", torch.float64),
            column("min_p", torch.float64),
            torch.tensor([row.seed - (1 << 64) * (row.seed >> 63) for row in settings]),
            column("sample", torch.int32),
        )

    def logits_of(kind: str, rows: int, width: int) -> Tensor:
        logits = torch.randn(rows, width) * 4
        if kind == "rounded":  # like a head in bfloat16: many equal logits
            return logits.bfloat16().float()
        if kind == "equal":
            return torch.zeros(rows, width)
        if kind == "one":
            logits[:, width // 2] += 30
        return logits

    @matrix({"width": [300, 4500], "kind": ["plain", "rounded", "equal", "one"]})
    def test_draw(kind: str, width: int) -> None:
        settings = [setting(**given) for given in SETTINGS]
        logits = logits_of(kind, len(settings), width)
        positions = [random.randrange(100000) for _ in settings]
        at = torch.tensor(positions, dtype=torch.int32)
        assert sampling.draw(logits, on_rows(settings), at).tolist() == sampler.sample(logits, settings, positions).tolist()

    def bits_of(is_allowed: Tensor) -> Tensor:
        """Pack flags into int32 words of 32 tokens each."""
        words = torch.zeros(len(is_allowed), -(-is_allowed.shape[1] // 32), dtype=torch.int64)
        for token in range(is_allowed.shape[1]):
            words[:, token // 32] |= is_allowed[:, token].long() << (token % 32)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    @pytest.mark.parametrize("width", [64, 300, 4500])
    @pytest.mark.parametrize("serve", [masks.apply_bitmask, eager_sampling.apply_bitmask], ids=["kernel", "twin"])
    def test_bitmask(serve: Callable[..., Tensor], width: int) -> None:
        logits = torch.randn(5, width)
        is_allowed = torch.rand(5, width) > 0.5
        wanted = logits.masked_fill(~is_allowed, float("-inf"))
        assert torch.equal(serve(logits.clone(), bits_of(is_allowed)), wanted)
        rows = torch.tensor([3, 0], dtype=torch.int32)
        some = logits.clone()
        some[rows.long()] = wanted[rows.long()]
        got = serve(logits.clone(), bits_of(is_allowed)[rows.long()], rows)
        assert torch.equal(got, some)
        # Tokens without a bit are not allowed.
        short = serve(logits.clone(), bits_of(is_allowed)[:, :2])
        assert torch.equal(short[:, :64], wanted[:, :64])
        assert (short[:, 64:] == float("-inf")).all()

    def test_bias() -> None:
        logits = torch.randn(4, 700)
        rows, tokens = torch.randint(0, 4, (600,), dtype=torch.int32), torch.randint(0, 30, (600,), dtype=torch.int32)
        values = torch.randn(600)
        values[::50] = float("-inf")
        wanted = eager_sampling.add_bias(logits.clone(), rows, tokens, values)
        assert wanted.isinf().any()
        assert torch.allclose(masks.add_bias(logits, rows, tokens, values), wanted, atol=1e-4)

    @pytest.mark.parametrize("kind", ["plain", "rounded", "equal"])
    def test_logprobs(kind: str) -> None:
        logits, chosen = logits_of(kind, 3, 4500), torch.randint(0, 4500, (3,))
        for num_top in (0, 1, 20, 64):
            got, wanted = sampling.logprobs(logits, chosen, num_top), compute_logprobs(logits, chosen, num_top)
            assert torch.allclose(got.chosen_L, wanted.chosen_L, atol=1e-5)
            assert torch.allclose(got.top_LK, wanted.top_LK, atol=1e-5)
            assert torch.equal(got.top_ids_LK, wanted.top_ids_LK)

    def test_penalties() -> None:
        width, tokens = 500, torch.randint(0, 60, (4, 600))
        settings = [
            setting(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
            setting(),
            setting(repetition_penalty=0.8, frequency_penalty=-0.3),
        ]
        lengths, slots, prompts = [300, 10, 571], [2, 0, 3], [100, 5, 571]
        logits = torch.randn(3, width) * 3
        wanted = sampler.adjust(logits, settings, lengths, sampler.History(tokens, slots, prompts))
        rows = [0, 2]

        def whole(values: list[int]) -> Tensor:
            return torch.tensor([values[row] for row in rows], dtype=torch.int32)

        def number(name: str) -> Tensor:
            return torch.tensor([getattr(settings[row], name) for row in rows], dtype=torch.float32)

        some = Penalties(
            whole([0, 1, 2]),
            whole(slots),
            whole(lengths),
            whole(prompts),
            number("repetition_penalty"),
            number("frequency_penalty"),
            number("presence_penalty"),
        )
        counts = torch.zeros(2, width, dtype=torch.int32)
        penalties.penalise(logits, tokens, some, max(lengths), counts)
        assert torch.allclose(logits, wanted, atol=1e-6)
        assert not counts.any()
