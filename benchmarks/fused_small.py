"""Norms, q/k/v preparation and the other small pieces against their eager twins, at the dimensions of all models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from fused_timing import BANDWIDTH, EPS, graph_us, random, report, worst_row
from torch import Tensor

from culet.kernels.eager import ops as eager_ops
from culet.kernels.triton.norms import pointwise, qkv, residual


@dataclass(frozen=True)
class Dims:
    """What the small pieces of a model need to know."""

    hidden: int
    heads: int
    sliding_kv: int
    global_kv: int
    k_eq_v: bool
    ple_layers: int = 0
    is_moe: bool = False

    def head_shapes(self) -> dict[str, eager_ops.HeadShape]:
        """Sliding and global layers; of K=V models the global one with and without the latent."""
        found = {"sliding": eager_ops.HeadShape(self.heads, self.sliding_kv, 256, 256, False, False, EPS)}
        found["global"] = eager_ops.HeadShape(self.heads, self.global_kv, 512, 128, self.k_eq_v, self.k_eq_v, EPS)
        if self.k_eq_v:
            found["global, K and V"] = eager_ops.HeadShape(self.heads, self.global_kv, 512, 128, True, False, EPS)
        return found


MODELS = {
    "E2B": Dims(1536, 8, 1, 1, False, ple_layers=35),
    "E4B": Dims(2560, 8, 2, 2, False, ple_layers=42),
    "12B": Dims(3840, 16, 8, 1, True),
    "26B": Dims(2816, 16, 8, 2, True, is_moe=True),
    "31B": Dims(5376, 32, 16, 4, True),
}
SMALL_TOKENS = (1, 32, 2048)
PAGE = 32  # tokens of a page


@dataclass(frozen=True)
class Case:
    """One small kernel: what it leaves, what its twin leaves in float32, and the bytes it must move."""

    name: str
    ours: Callable[[], tuple[Tensor, ...]]
    twin: Callable[[], tuple[Tensor, ...]]
    num_bytes: int


def norm_cases(dims: Dims, tokens: int) -> Iterator[Case]:
    size = dims.hidden
    x, a, b = (random(tokens, size) for _ in range(3))
    w = [torch.rand(size, device="cuda") + 0.5 for _ in range(4)]
    scalar = torch.rand(1, device="cuda") + 0.5
    row = tokens * size * 2

    def two_twin() -> tuple[Tensor, ...]:
        out, first = eager_ops.residual_norm(x.float(), a.float(), w[0], None, w[1], EPS)
        return out, first, eager_ops.rms_norm(out, w[2], EPS)

    def joint_twin() -> tuple[Tensor, ...]:
        delta = eager_ops.sum_norms(a.float(), b.float(), w[0], w[1], EPS)
        return eager_ops.residual_norm(x.float(), delta, w[2], scalar, w[3], EPS)

    yield Case(
        "rms_norm", lambda: (residual.rms_norm(x, w[0], EPS),), lambda: (eager_ops.rms_norm(x.float(), w[0], EPS),), 2 * row
    )
    yield Case(
        "residual_norm",
        lambda: residual.residual_norm(x, a, w[0], scalar, w[1], EPS),
        lambda: eager_ops.residual_norm(x.float(), a.float(), w[0], scalar, w[1], EPS),
        4 * row,
    )
    if dims.is_moe:
        yield Case("residual_norm_two", lambda: residual.residual_norm_two(x, a, w[0], w[1], w[2], EPS), two_twin, 5 * row)
        yield Case(
            "residual_joint",
            lambda: residual.residual_norm_joint(x, a, b, (w[0], w[1], w[2]), scalar, w[3], EPS),
            joint_twin,
            5 * row,
        )
        yield Case(
            "sum_norms",
            lambda: (residual.sum_norms(a, b, w[0], w[1], EPS),),
            lambda: (eager_ops.sum_norms(a.float(), b.float(), w[0], w[1], EPS),),
            3 * row,
        )


def qkv_cases(dims: Dims, tokens: int) -> Iterator[Case]:
    for name, heads in dims.head_shapes().items():
        size, num_kv = heads.head_dim, heads.num_kv_heads
        columns = (heads.num_heads + num_kv * (1 if heads.k_eq_v else 2)) * size
        x, weight = random(tokens, columns), torch.rand(heads.num_heads + num_kv, size, device="cuda") + 0.5
        positions = torch.randint(0, 131072, (tokens,), device="cuda")
        theta = 1e4 if heads.rotated_dims == size else 1e6
        frequencies = theta ** (-torch.arange(0, heads.rotated_dims, 2, device="cuda", dtype=torch.float32) / size)
        width, planes = (size + heads.rotated_dims, 1) if heads.latent else (size, 2)
        page, pages = PAGE, -(-tokens // PAGE) + 3
        # Pages inside slabs that hold other layers too, and some tokens that are not stored.
        slab = torch.zeros(pages, 3 * planes * num_kv * page * width, dtype=torch.bfloat16, device="cuda")
        shape, stride = (planes, pages, num_kv, page, width), (num_kv * page * width, slab.stride(0), page * width, width, 1)
        mine, theirs = slab.clone(), slab.float()
        slots = torch.randperm(pages * page, device="cuda")[:tokens]
        slots[1::7] = -1
        begin = planes * num_kv * page * width
        my_planes, their_planes = (buffer.as_strided(shape, stride, begin) for buffer in (mine, theirs))
        turn, twin_turn = qkv.rope(positions, frequencies), eager_ops.rope(positions, frequencies)

        def ours(x=x, weight=weight, turn=turn, my_planes=my_planes, slots=slots, heads=heads, mine=mine) -> tuple[Tensor, ...]:
            return *qkv.prepare_qkv(x, weight, turn, my_planes, qkv.stores(slots, PAGE), heads), mine

        def twin(
            x=x, weight=weight, turn=twin_turn, planes=their_planes, slots=slots, heads=heads, buffer=theirs
        ) -> tuple[Tensor, ...]:
            return *eager_ops.prepare_qkv(x.float(), weight, turn, planes, eager_ops.stores(slots, PAGE), heads), buffer

        yield Case(
            f"qkv {name}", ours, twin, x.numel() * 2 + (heads.num_heads * size + 2 * num_kv * width * planes) * tokens * 2
        )
        yield Case(
            "rope", lambda p=positions, f=frequencies: qkv.rope(p, f), lambda t=twin_turn: t, tokens * heads.rotated_dims * 8
        )
        queries = eager_ops.HeadShape(heads.num_heads, 0, size, heads.rotated_dims, heads.k_eq_v, heads.latent, EPS)
        own = x[:, : heads.num_heads * size]
        yield Case(
            f"q {name}",
            lambda own=own, weight=weight, turn=turn, queries=queries: (qkv.prepare_q(own, weight, turn, queries),),
            lambda own=own, weight=weight, turn=twin_turn, queries=queries: (
                eager_ops.prepare_q(own.float(), weight[: queries.num_heads], turn, queries),
            ),
            own.numel() * 4,
        )


def other_cases(dims: Dims, tokens: int) -> Iterator[Case]:
    size = dims.hidden
    gate_up, logits = random(tokens, 2 * 4 * size), random(min(tokens, 32), 262144, scale=20.0)
    table, ids = random(8192, size), torch.randint(0, 8192, (tokens,), device="cuda")
    yield Case(
        "gelu_mul", lambda: (pointwise.gelu_mul(gate_up),), lambda: (eager_ops.gelu_mul(gate_up.float()),), gate_up.numel() * 3
    )
    yield Case(
        "embed",
        lambda: (pointwise.embed(ids, table, 50.5),),
        lambda: (eager_ops.embed(ids, table.float(), 50.5),),
        tokens * size * 4,
    )
    yield Case(
        "softcap", lambda: (pointwise.softcap(logits, 30.0),), lambda: (eager_ops.softcap(logits, 30.0),), logits.numel() * 6
    )
    if dims.ple_layers:
        context, embedded = random(tokens, dims.ple_layers * 256), random(tokens, dims.ple_layers * 256)
        weight, gate = torch.rand(256, device="cuda") + 0.5, random(tokens, 256)
        value = embedded.view(tokens, -1, 256)[:, 3]
        yield Case(
            "ple_combine",
            lambda: (pointwise.ple_combine(context, embedded, weight, size**-0.5, EPS),),
            lambda: (eager_ops.ple_combine(context.float(), embedded.float(), weight, size**-0.5, EPS),),
            context.numel() * 6,
        )
        yield Case(
            "gelu_gate",
            lambda: (pointwise.gelu_gate(gate, value),),
            lambda: (eager_ops.gelu_gate(gate.float(), value.float()),),
            gate.numel() * 6,
        )


def bench_small(model: str, is_timed: bool = True) -> None:
    for tokens in SMALL_TOKENS:
        for cases in (norm_cases, qkv_cases, other_cases):
            for case in cases(MODELS[model], tokens):
                error = max(worst_row(got, want) for got, want in zip(case.ours(), case.twin(), strict=True))
                if not is_timed:
                    continue
                micros = graph_us([case.ours] * 20)
                report(
                    "small", f"{model} {case.name}", tokens, "", us=micros, floor=case.num_bytes / BANDWIDTH * 1e6, err=error
                )
