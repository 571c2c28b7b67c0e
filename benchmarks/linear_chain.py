"""What a linear layer's tile costs where it stands: `python benchmarks/linear_chain.py E4B 26B-A4B 31B [--tokens 8,32,80]`.

A kernel that asks for its weights before it waits gains what the kernel before leaves idle, and takes from it what they share:
timed alone it shows neither. So each candidate takes its place in a chain of the model's layers (without attention), captured
in one graph, while every other linear layer keeps the tile of `choose_tile`. `us` is what a layer then takes more, or less if
it is negative. Last comes the chain with all tiles of `choose_stream` together, and the first one again, which says how much is
noise. The head, which stands in no layer, is timed alone. Every candidate is checked against float32 before it is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fused_layer import NUM_LAYERS, Layers, layer_shapes
from fused_linear import SHAPES, Shape, describe_tile, linear_launch, linear_out, linear_twin, random_weight
from fused_timing import TOLERANCE, graph_us, random, report, results, worst_row
from kernels_fused import compile_all
from torch import Tensor

from culet.hardware import SHARED_BYTES
from culet.kernels.triton.launch import cdiv
from culet.kernels.triton.linear.hopper_stream import blocks_of
from culet.kernels.triton.linear.tiles import GATED, SOFTCAP, Tile, choose_stream, choose_tile

SPLITS = (1, 2, 3, 4, 5, 8, 10, 11)
PROGRAMS = range(100, 300)  # of a split K: fewer leave multiprocessors idle, more are too short
SCRATCH = 12 << 10  # bytes of shared memory besides the stages


def candidates(shape: Shape, tokens: int) -> list[Tile]:
    """`choose_stream`'s tile first, if it has one; then others that can be launched."""
    if shape.epilogue == SOFTCAP:
        sizes = [(64, 64, 5), (64, 128, 4), (128, 64, 3), (128, 64, 4), (128, 64, 5)]
    elif shape.epilogue == GATED:
        sizes = [(64, 64, stages) for stages in (2, 3, 4, 5, 8)] + [(64, 128, 3), (64, 128, 4)]
    else:
        sizes = [(64, 64, 4), (64, 64, 6), (64, 64, 8), (64, 128, 2), (64, 128, 4), (64, 128, 5)]
    splits = (1,) if shape.epilogue in (GATED, SOFTCAP) else SPLITS
    chosen = choose_stream(tokens, shape.n, shape.k, shape.epilogue)
    found = [] if chosen is None else [chosen]
    found += [Tile("stream", rows, size, 4, stages, split) for rows, size, stages in sizes for split in splits]
    return [tile for tile in dict.fromkeys(found) if tile == chosen or _is_worth_a_try(shape, tokens, tile)]


def _is_worth_a_try(shape: Shape, tokens: int, tile: Tile) -> bool:
    if shape.k % (tile.block_k * tile.split_k):
        return False
    rows = tile.block_n * (2 if shape.epilogue == GATED else 1) + sum(blocks_of(tokens))
    fits = tile.num_stages * rows * tile.block_k * 2 + SCRATCH <= SHARED_BYTES[90]
    steps = shape.k // (tile.block_k * tile.split_k)
    return fits and tile.num_stages <= steps and (tile.split_k == 1 or cdiv(shape.n, 64) * tile.split_k in PROGRAMS)


def error_of(shape: Shape, tile: Tile, weight: Tensor, tokens: int) -> float:
    """Of one launch on fresh inputs: the worst token's."""
    x, factor = random(tokens, shape.k), random(tokens, shape.n)
    out = linear_out(shape, tile, tokens).fill_(math.nan)
    torch.cuda.synchronize()
    linear_launch(shape, tile, x, weight, out, factor, pdl=True).run()
    return worst_row(out.sum(0) if out.dim() == 3 else out, linear_twin(shape, x, weight, factor))


def layer_us_with(layers: Layers, name: str, tile: Tile, tokens: int) -> float:
    """Microseconds a layer with one linear layer in this tile; infinitely many if that is wrong or cannot be launched."""
    shape = layers.shapes[name]
    try:
        error = error_of(shape, tile, layers.linears[0][name], tokens)
        if error <= TOLERANCE:
            return layers.layer_us(tokens, "chained", {name: tile})
        report("chain", shape.name, tokens, describe_tile(tile), wrong=error)
    except Exception as failure:  # a tile that does not fit is a result too
        report("chain", shape.name, tokens, describe_tile(tile), failed=str(failure).splitlines()[0][:80])
    return math.inf


def bench_layers(model: str, all_tokens: list[int]) -> None:
    """Each linear layer of the chain by turns in each candidate's tile, for each number of tokens."""
    layers = Layers(model)
    for tokens in all_tokens:
        base = layers.layer_us(tokens, "chained")
        report("chain", f"{model} layer", tokens, "choose_tile's", us=base)
        chosen: dict[str, Tile] = {}
        for name, shape in layers.shapes.items():
            streamed = choose_stream(tokens, shape.n, shape.k, shape.epilogue)
            if streamed is not None:
                chosen[name] = streamed
            timed = [(tile, layer_us_with(layers, name, tile, tokens)) for tile in candidates(shape, tokens)]
            for tile, micros in sorted(timed, key=lambda row: row[1]):
                is_chosen = "yes" if tile == streamed else ""
                report("chain", shape.name, tokens, describe_tile(tile), us=micros - base, chosen=is_chosen)
        together = layers.layer_us(tokens, "chained", chosen)
        again = layers.layer_us(tokens, "chained")
        report("chain", f"{model} layer", tokens, "choose_stream's, all", us=together, base=base, base_again=again)


def bench_head(shape: Shape, all_tokens: list[int]) -> None:
    """The head's candidates and `choose_tile`'s; its weights are many times what the L2 holds."""
    weight = random_weight(shape)
    for tokens in all_tokens:
        streamed = choose_stream(tokens, shape.n, shape.k, shape.epilogue)
        before = choose_tile(tokens, shape.n, shape.k, shape.epilogue)
        x = random(tokens, shape.k)
        for tile in [before] * (before.kernel != "cublas") + candidates(shape, tokens):
            out = linear_out(shape, tile, tokens)
            launch = linear_launch(shape, tile, x, weight, out, x, pdl=True)
            numbers: dict[str, Any] = {"err": error_of(shape, tile, weight, tokens), "us": graph_us([launch.run] * 3)}
            report("chain", shape.name, tokens, describe_tile(tile), **numbers, chosen="yes" if tile == streamed else "")


def parts_of(shapes: list[Shape], all_tokens: list[int]) -> list[tuple[str, Any]]:
    """The kernels to compile ahead."""
    found = []
    for shape in shapes:
        for tokens in all_tokens:
            tiles = [choose_tile(tokens, shape.n, shape.k, shape.epilogue), *candidates(shape, tokens)]
            found += [("linear", (shape, tile, tokens, True, True)) for tile in tiles if tile.kernel != "cublas"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="E2B, E4B, 12B, 26B-A4B, 31B")
    parser.add_argument("--tokens", default="8,32,80", help="numbers of tokens, separated by commas")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    models, all_tokens = [name.split("-")[0] for name in options.models], [int(one) for one in options.tokens.split(",")]
    unknown = [name for name in models if name not in NUM_LAYERS]
    if unknown or not all(1 <= tokens <= 128 for tokens in all_tokens):
        parser.error(f"no such model: {unknown[0]}" if unknown else "tokens: from 1 to 128")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("the kernel needs a Hopper GPU")
    heads = [shape for shape in SHAPES if shape.epilogue == SOFTCAP and shape.name.split(".")[0] in models]
    in_layers = [shape for model in models for shape in layer_shapes(model).values()]
    compile_all(parts_of(in_layers + heads, all_tokens), options.workers)
    torch.manual_seed(time.time_ns() % 2**31)
    for model in models:
        bench_layers(model, all_tokens)
    for shape in heads:
        bench_head(shape, all_tokens)
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
