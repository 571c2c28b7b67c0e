"""A decoder layer without its attention: cuBLAS and our small pieces, our linear kernels, and these chained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from fused_experts import EXPERTS, HIDDEN, TOP_K, WIDTH
from fused_linear import SHAPES, Shape, cublas, linear_launch, linear_out, random_weight
from fused_small import MODELS
from fused_timing import EPS, graph_us, random, report
from torch import Tensor

from culet.kernels.triton.experts import expert_mlp, route
from culet.kernels.triton.linear.tiles import Tile, choose_tile
from culet.kernels.triton.norms import qkv, residual

CUBLAS = Tile("cublas")
NUM_LAYERS = {"E2B": 12, "E4B": 12, "12B": 6, "26B": 8, "31B": 4}  # more than the L2 holds
Steps = list[Callable[[], Any]]


def layer_shapes(model: str) -> dict[str, Shape]:
    """The linear layers of a decoder layer: qkv, o, gate_up, down, and of some ple_gate and ple_proj."""
    found = (shape for shape in SHAPES if shape.name.startswith(f"{model}."))
    return {shape.name.split(".")[1]: shape for shape in found if not shape.name.endswith("head")}


class Layers:
    """Some layers' weights, and the kernels that they launch."""

    def __init__(self, model: str) -> None:
        self.dims, self.shapes, self.num_layers = MODELS[model], layer_shapes(model), NUM_LAYERS[model]
        self.linears = [{name: random_weight(shape) for name, shape in self.shapes.items()} for _ in range(self.num_layers)]
        self.experts: list[tuple[Tensor, Tensor, Tensor]] = []  # of each layer: router, gate and up, down
        if self.dims.is_moe:
            self.experts = [_random_experts() for _ in range(self.num_layers)]

    def launches(self, tokens: int, how: str, tiles: Mapping[str, Tile] = MappingProxyType({})) -> Steps:
        """The kernels of all layers, in order.

        `how`: torch (cuBLAS, our small pieces), ours, chained. `tiles`: by name, other than `choose_tile`'s.
        """
        return _Walk(self, tokens, how, tiles).steps

    def layer_us(self, tokens: int, how: str, tiles: Mapping[str, Tile] = MappingProxyType({})) -> float:
        """Microseconds a layer."""
        steps = self.launches(tokens, how, tiles)
        for step in steps:  # what is compiled or allocated at first must not be captured
            step()
        return graph_us(steps, repeats=20) * len(steps) / self.num_layers


def _random_experts() -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(EXPERTS, HIDDEN, scale=HIDDEN**-0.5, dtype=torch.float32),
        random(EXPERTS, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5),
        random(EXPERTS, HIDDEN, WIDTH, scale=WIDTH**-0.5),
    )


class _Walk:
    """One walk through the layers: all that is launched, and the buffers that it is launched on."""

    def __init__(self, layers: Layers, tokens: int, how: str, tiles: Mapping[str, Tile]) -> None:
        self.tokens, self.pdl, self.dims, self.shapes = tokens, how == "chained", layers.dims, layers.shapes
        self.tiles = {
            name: CUBLAS if how == "torch" else tiles.get(name) or choose_tile(tokens, shape.n, shape.k, shape.epilogue)
            for name, shape in self.shapes.items()
        }
        self.outs = {name: linear_out(shape, self.tiles[name], tokens).normal_() for name, shape in self.shapes.items()}
        size = self.dims.hidden
        self.x, self.normed, self.second, self.routed = (random(tokens, size) for _ in range(4))
        self.attended, self.factor = random(tokens, self.shapes["o"].k), random(tokens, 256)
        self.weight = torch.rand(size, device="cuda") + 0.5
        self.chosen = torch.empty(tokens, TOP_K, device="cuda"), torch.empty(tokens, TOP_K, dtype=torch.int32, device="cuda")
        self.steps: Steps = []
        prepare = self._prepare()
        for index, weights in enumerate(layers.linears):
            self._add("qkv", self.normed, weights)
            self.steps.append(prepare)
            self._add("o", self.attended, weights)
            if self.dims.is_moe:
                self._add_experts(weights, *layers.experts[index])
            else:
                self._add_mlp(weights)

    def _prepare(self) -> Callable[[], Any]:
        heads, tokens = self.dims.head_shapes()["sliding"], self.tokens
        weight = torch.rand(heads.num_heads + heads.num_kv_heads, 256, device="cuda")
        turn = qkv.rope(torch.arange(tokens, device="cuda"), torch.rand(128, device="cuda"))
        pages = torch.zeros(2, 8, heads.num_kv_heads, 32, 256, dtype=torch.bfloat16, device="cuda")
        q, k, v = (random(tokens, n, 256) for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))
        slots = torch.arange(tokens, device="cuda")
        return qkv.describe_prepare(self.outs["qkv"], weight, turn, pages, slots, heads, (q, k, v), self.pdl).run

    def _add(self, name: str, source: Tensor, weights: Mapping[str, Tensor]) -> None:
        shape, tile, out, matrix = self.shapes[name], self.tiles[name], self.outs[name], weights[name]
        if tile.kernel == "cublas":
            self.steps.append(lambda: cublas(shape, source, matrix, self.factor))
        else:
            self.steps.append(linear_launch(shape, tile, source, matrix, out, self.factor, self.pdl).run)

    def _residual(self, name: str, num_next: int = 1) -> None:
        outs, following = (self.x, self.normed, self.second)[: 1 + num_next], (self.weight,) * num_next
        deltas, weights = (self.outs[name],), (self.weight,)
        self.steps.append(residual.describe_residual(self.x, deltas, weights, None, following, EPS, outs, self.pdl).run)

    def _add_mlp(self, weights: Mapping[str, Tensor]) -> None:
        has_ple = "ple_gate" in self.shapes
        self._residual("o")
        self._add("gate_up", self.normed, weights)
        self._add("down", self.outs["gate_up"], weights)
        self._residual("down", num_next=0 if has_ple else 1)
        if has_ple:
            self._add("ple_gate", self.x, weights)
            self._add("ple_proj", self.outs["ple_gate"], weights)
            self._residual("ple_proj")

    def _add_experts(self, weights: Mapping[str, Tensor], router: Tensor, gate_up: Tensor, down: Tensor) -> None:
        self._residual("o", num_next=2)
        scale = router[:, 0].abs().contiguous()
        self.steps.append(route.describe_route(self.x, router, scale, self.chosen, EPS, pdl=self.pdl).run)
        self._add("gate_up", self.normed, weights)
        self._add("down", self.outs["gate_up"], weights)
        describe = expert_mlp.describe_assigned if self.tokens <= expert_mlp.ASSIGNED_TOKENS else expert_mlp.describe_grouped
        experts = describe(self.second, *self.chosen, gate_up, down, self.routed, pdl=self.pdl)
        self.steps.extend(launch.run for launch in experts)
        deltas, three, outs = (self.outs["down"], self.routed), (self.weight,) * 3, (self.x, self.normed)
        self.steps.append(residual.describe_residual(self.x, deltas, three, None, (self.weight,), EPS, outs, self.pdl).run)


def chain_parts() -> list[tuple[str, Any]]:
    """The linear kernels of these layers as they are without chaining: the others are compiled for the linear section."""
    found = []
    for shape in SHAPES:
        for tokens in (1, 8, 32):
            tile = choose_tile(tokens, shape.n, shape.k, shape.epilogue)
            if tile.kernel != "cublas" and not shape.name.endswith("head"):
                found += [("linear", (shape, tile, tokens, is_chained, True)) for is_chained in (False, True)]
    return found


def bench_chain() -> None:
    for model in ("E4B", "26B", "31B"):
        layers = Layers(model)
        floor = sum(shape.floor_us for shape in layers.shapes.values())
        for tokens in (1, 8, 32):
            numbers: dict[str, float] = {"floor": floor}
            for how in ("torch", "ours", "chained"):
                numbers[how] = layers.layer_us(tokens, how)
            num_kernels = len(layers.launches(tokens, "chained")) // layers.num_layers
            report("chain", f"{model} layer", tokens, f"{num_kernels} kernels, no attention", **numbers)
        del layers
