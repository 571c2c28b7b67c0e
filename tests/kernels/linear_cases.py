"""The linear layers of all models in steps of few tokens, and the `hopper_stream` kernels they use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear import few_tokens
from culet.kernels.triton.linear.hopper_stream import blocks_of
from culet.kernels.triton.linear.tiles import GATED, GELU_TIMES, PLAIN, SOFTCAP, Tile, choose_stream
from culet.models.spec import LayerSpec, read_spec
from culet.models.variants import VARIANTS

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
CAP = 30.0


@dataclass(frozen=True)
class Shape:
    """A linear layer's outputs and inputs. With GATED, the weight has twice as many rows as outputs."""

    name: str
    num_rows: int
    size_k: int
    epilogue: int = PLAIN

    @property
    def weight_rows(self) -> int:
        return self.num_rows * (2 if self.epilogue == GATED else 1)


@cache
def shapes() -> tuple[Shape, ...]:
    """Return every shape of every model, once for each model that has it."""
    found: dict[Shape, None] = {}
    for name, config in VARIANTS.items():
        spec = read_spec(config)
        size = spec.hidden_size
        for layer in spec.layers:
            found |= dict.fromkeys(_shapes_of_layer(name, layer, size))
        if spec.ple_dim:
            found[Shape(f"{name}.ple_gate", spec.ple_dim, size, GELU_TIMES)] = None
            found[Shape(f"{name}.ple_proj", size, spec.ple_dim)] = None
            found[Shape(f"{name}.ple_of_all_layers", spec.ple_dim * len(spec.layers), size)] = None
        found[Shape(f"{name}.head", spec.vocab_size, size, SOFTCAP)] = None
    return tuple(found)


def _shapes_of_layer(name: str, layer: LayerSpec, size: int) -> Iterable[Shape]:
    kind = "global" if layer.is_global else "sliding"
    keys = layer.num_kv_heads * (1 if layer.k_eq_v else 2) if layer.owns_kv else 0
    yield Shape(f"{name}.{'qkv' if keys else 'q'}.{kind}", (layer.num_heads + keys) * layer.head_dim, size)
    yield Shape(f"{name}.o.{kind}", size, layer.num_heads * layer.head_dim)
    yield Shape(f"{name}.gate_up", layer.mlp_width, size, GATED)
    yield Shape(f"{name}.down", size, layer.mlp_width)


@dataclass(frozen=True)
class Case:
    """A launch of `hopper_stream` for `num_tokens` tokens, in parts [S, M, N] or whole."""

    shape: Shape
    num_tokens: int
    tile: Tile
    keeps_parts: bool = False

    def __str__(self) -> str:
        tile, kept = self.tile, "-parts" if self.keeps_parts else ""
        cut = f"{tile.block_n}x{tile.block_k}-s{tile.num_stages}-k{tile.split_k}"
        return f"{self.shape.name}-{self.num_tokens}-{cut}{kept}"

    @property
    def tile_class(self) -> tuple[object, ...]:
        """What decides which kernel is compiled, except K, which only sets the number of loop iterations."""
        return self.tile, self.shape.epilogue, blocks_of(self.num_tokens), self.keeps_parts

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.keeps_parts or self.shape.epilogue == SOFTCAP else torch.bfloat16

    @property
    def out_shape(self) -> tuple[int, ...]:
        whole = (self.num_tokens, self.shape.num_rows)
        return (self.tile.split_k, *whole) if self.keeps_parts else whole

    def launch(self, x: Tensor, weight: Tensor, out: Tensor, factor: Tensor | None) -> Launch:
        """Return the launch of a step, with dependent launch."""
        return few_tokens.describe(x, weight, out, self.tile, self.shape.epilogue, pdl=True, softcap=CAP, factor=factor)

    def on_meta(self) -> Launch:
        """Return the launch to compile without a GPU."""

        def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(*size, dtype=dtype, device="meta")

        shape, tokens = self.shape, self.num_tokens
        factor = meta(tokens, shape.num_rows) if shape.epilogue == GELU_TIMES else None
        out = meta(*self.out_shape, dtype=self.out_dtype)
        return self.launch(meta(tokens, shape.size_k), meta(shape.weight_rows, shape.size_k), out, factor)


@cache
def all_cases() -> tuple[Case, ...]:
    """Return one case for each kernel that any model needs at any of TOKENS."""
    found: dict[tuple[object, ...], Case] = {}
    for shape in shapes():
        for tokens in TOKENS:
            tile = choose_stream(tokens, shape.num_rows, shape.size_k, shape.epilogue)
            if tile is None:
                continue
            is_split = tile.split_k > 1 and shape.epilogue == PLAIN
            for keeps_parts in (False, True) if is_split else (False,):
                case = Case(shape, tokens, tile, keeps_parts)
                found.setdefault((case.tile_class, shape.size_k), case)
    return tuple(found.values())


@cache
def class_cases() -> tuple[Case, ...]:
    """Return one case for each class, the first of its kernels."""
    found: dict[tuple[object, ...], Case] = {}
    for case in all_cases():
        found.setdefault(case.tile_class, case)
    return tuple(found.values())
