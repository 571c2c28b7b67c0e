"""A decoder layer without its attention: cuBLAS and our small pieces, our linear kernels, and these chained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fused_experts import EXPERTS, HIDDEN, TOP_K, WIDTH
from fused_linear import SHAPES, cublas, linear_launch
from fused_small import MODELS
from fused_timing import EPS, graph_us, random, report
from torch import Tensor

from culet.kernels.triton import linear, moe, norms, qkv, route


def chain_launches(model: str, layers: int, tokens: int, how: str) -> list[Callable[[], Any]]:
    """The linear layers and small pieces of some layers, in order. `how`: torch (cuBLAS, our small pieces), ours, chained."""
    shapes = {
        shape.name.split(".")[1]: shape for shape in SHAPES if shape.name.startswith(model) and not shape.name.endswith("head")
    }
    dims, pdl = MODELS[model], how == "chained"
    heads = dims.head_shapes()["sliding"]
    x, normed = random(tokens, dims.hidden), random(tokens, dims.hidden)
    attended, factor = random(tokens, shapes["o"].k), random(tokens, 256)
    weight = torch.rand(dims.hidden, device="cuda") + 0.5
    head_weight = torch.rand(heads.num_heads + heads.num_kv_heads, 256, device="cuda")
    turn = qkv.rope(torch.arange(tokens, device="cuda"), torch.rand(128, device="cuda"))
    pages = torch.zeros(2, 8, heads.num_kv_heads, 32, 256, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(tokens, device="cuda")
    outs = {name: random(tokens, shape.n) for name, shape in shapes.items()}
    q, k, v = (
        torch.empty(tokens, n, 256, dtype=torch.bfloat16, device="cuda")
        for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    second, routed = torch.empty_like(x), torch.empty_like(x)
    chosen = torch.empty(tokens, TOP_K, device="cuda"), torch.empty(tokens, TOP_K, dtype=torch.int32, device="cuda")
    steps: list[Callable[[], Any]] = []

    def add(name: str, source: Tensor) -> None:
        shape = shapes[name]
        matrix = random(shape.weight_rows, shape.k, scale=shape.k**-0.5)
        tile = linear.choose_tile(tokens, shape.n, shape.k, shape.epilogue)
        if how == "torch" or tile.kernel == "cublas":
            steps.append(lambda: cublas(shape, source, matrix, factor))
        else:
            steps.append(linear_launch(shape, tile, source, matrix, outs[name], factor, pdl).run)

    def residual(delta: Tensor, has_next: bool) -> None:
        following = (weight,) if has_next else ()
        steps.append(
            norms.describe_residual(x, (delta,), (weight,), None, following, EPS, (x, normed)[: 1 + has_next], pdl).run
        )

    def add_experts() -> None:
        gate_up = random(EXPERTS, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5)
        down = random(EXPERTS, HIDDEN, WIDTH, scale=WIDTH**-0.5)
        describe = moe.describe_assigned if tokens <= moe.ASSIGNED_TOKENS else moe.describe_grouped
        steps.extend(launch.run for launch in describe(second, *chosen, gate_up, down, routed, pdl=pdl))

    for _ in range(layers):
        add("qkv", normed)
        steps.append(qkv.describe_prepare(outs["qkv"], head_weight, turn, pages, slots, heads, (q, k, v), pdl).run)
        add("o", attended)
        if dims.is_moe:
            router = random(EXPERTS, HIDDEN, scale=HIDDEN**-0.5, dtype=torch.float32)
            outputs = (x, normed, second)
            steps.append(norms.describe_residual(x, (outs["o"],), (weight,), None, (weight, weight), EPS, outputs, pdl).run)
            steps.append(route.describe_route(x, router, router[:, 0].abs().contiguous(), chosen, EPS, pdl=pdl).run)
        else:
            residual(outs["o"], True)
        add("gate_up", normed)
        add("down", outs["gate_up"])
        if dims.is_moe:
            add_experts()
            parts, weights = (outs["down"], routed), (weight, weight, weight)
            steps.append(norms.describe_residual(x, parts, weights, None, (weight,), EPS, (x, normed), pdl).run)
        else:
            residual(outs["down"], "ple_gate" not in shapes)
        if "ple_gate" in shapes:
            add("ple_gate", x)
            add("ple_proj", outs["ple_gate"])
            residual(outs["ple_proj"], True)
    return steps


def chain_parts() -> list[tuple[str, Any]]:
    """The linear kernels of these layers as they are without chaining: the others are compiled for the linear section."""
    found = []
    for shape in SHAPES:
        for tokens in (1, 8, 32):
            tile = linear.choose_tile(tokens, shape.n, shape.k, shape.epilogue)
            if tile.kernel != "cublas" and not shape.name.endswith("head"):
                found += [("linear", (shape, tile, tokens, is_chained)) for is_chained in (False, True)]
    return found


def bench_chain() -> None:
    for model, layers in (("E4B", 12), ("26B", 8), ("31B", 4)):
        floor = sum(shape.floor_us for shape in SHAPES if shape.name.startswith(model) and not shape.name.endswith("head"))
        for tokens in (1, 8, 32):
            numbers: dict[str, float] = {"floor": floor}
            for how in ("torch", "ours", "chained"):
                steps = chain_launches(model, layers, tokens, how)
                numbers[how] = graph_us(steps) * len(steps) / layers
            report("chain", f"{model} layer", tokens, f"{len(steps) // layers} kernels, no attention", **numbers)
