"""Time the layers of a model without their attention, and search for tiles of their products that make them faster.

    python benchmarks/kernels/layers.py [--models 31B,E4B] [--formats bf16,fp8,int4] [--tokens 1,8,32] [--json PATH]
                                        [--search [--only experts]] [--head]

The layers of a model with fewer layers run in one CUDA graph, as in a decode step, with a norm in place of attention. A kernel
that is fast alone may slow down its neighbours: programs of the next kernel start early and share the multiprocessors. So tiles
are compared by the time of whole layers.

`--search` tries other tiles for one linear layer or expert product after the other, from the one with the most weights on, and
keeps those that are faster and give the same outputs. It prints the best of each. At the end it times layers with all chosen
tiles and with the current ones in turns. `--head` does the same with the head in place of the layers. Times are medians of
graph replays in microseconds per layer or head. `floor` is the time to read the weights at 4.2 TB/s; of experts, it counts
those that the tokens choose.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from replays import replay_us
from torch import Tensor

from culet.kernels.captures import Captures
from culet.kernels.compiling import compile_ahead, use_disk_cache
from culet.kernels.replay import replayed
from culet.kernels.triton.experts import expert_mlp
from culet.kernels.triton.experts.expert_mlp import GroupTile, RowTile
from culet.kernels.triton.linear import few_tokens
from culet.kernels.triton.linear.tiles import GATED, GELU_TIMES, MAX_TOKENS, PLAIN, SOFTCAP, Tile
from culet.kernels.triton.quantised import experts, hopper_stream, linear
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.tiles import Product, has_stream_groups
from culet.kernels.triton.quantised.unpack import FP8, INT8
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.random_checkpoint import random_name
from culet.models.weights import load_model

BANDWIDTH = 4.2e12  # bytes/s that an H200 moves
MULTIPROCESSORS = 132
NUM_LAYERS = {"E2B": 10, "E4B": 12}  # with layers that share KV; six layers of the others have both kinds
REPLAYS = 9
MIN_GAIN = 0.998  # a tile must be faster than this share of the time before
MAX_DIFFERENCE = 0.02  # of outputs, ||a - b|| / ||b||. Another order of sums changes about 3e-3 of bfloat16 values.
EPILOGUES = {PLAIN: "", GATED: "gated", GELU_TIMES: "gelu", SOFTCAP: "head"}
HEADS = 4  # in a graph
CURRENT = "current"


@dataclass(frozen=True, order=True)
class Op:
    """A linear layer of some shape. `num_rows` are its outputs."""

    num_rows: int
    size_k: int
    epilogue: int
    format: int | None  # of quantised weights

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.size_k}" + (f" {EPILOGUES.get(self.epilogue, '?')}" if self.epilogue else "")

    @property
    def num_weights(self) -> int:
        return self.num_rows * self.size_k * (2 if self.epilogue == GATED else 1)


@dataclass(frozen=True)
class ExpertOp:
    """One of the two products of experts, by assignment (for few tokens) or by groups."""

    is_up: bool
    is_grouped: bool
    num_weights: int  # of all experts

    def __str__(self) -> str:
        return f"experts {'up' if self.is_up else 'down'}{', grouped' if self.is_grouped else ''}"


@dataclass(frozen=True)
class Choice:
    """A tile, None for torch, or CURRENT. `registers` per thread overrides the choice of `hopper_stream`."""

    tile: Tile | RowTile | GroupTile | str | None
    registers: int | None = None

    def __str__(self) -> str:
        if self.tile is None or isinstance(self.tile, str):
            return self.tile or "torch"
        tile = self.tile
        text = f"{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages}"
        if isinstance(tile, Tile):
            text = f"{tile.kernel} {text} k{tile.split_k}"
        return text + (f" r{self.registers}" if self.registers else "")


AnyOp = Op | ExpertOp


@dataclass
class Tiles:
    """Decides the tile of every product while `installed`. Notes those that Culet chooses."""

    overrides: dict[AnyOp, Choice] = field(default_factory=dict)
    current: dict[AnyOp, tuple[Choice, PackedMatrix | None]] = field(default_factory=dict)
    _registers: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        plain, quantised, registers = few_tokens._tile_for, linear._choose, hopper_stream._registers

        def plain_tile(x_MK: Tensor, weight_NK: Tensor, num_rows: int, epilogue: int) -> Tile | None:
            found = plain(x_MK, weight_NK, num_rows, epilogue)
            return self._decide(Op(num_rows, x_MK.shape[1], epilogue, None), found, None)

        def quantised_tile(x_MK: Tensor, matrix: PackedMatrix, product: Product) -> Tile | None:
            found = quantised(x_MK, matrix, product)
            return self._decide(Op(product.num_rows, matrix.num_columns, product.epilogue, matrix.format), found, matrix)

        few_tokens._tile_for, linear._choose = plain_tile, quantised_tile
        hopper_stream._registers = lambda *facts: self._registers or registers(*facts)
        with self._experts(expert_mlp, "up", "down"), self._experts(experts, "up_tile", "down_tile"):
            try:
                yield
            finally:
                few_tokens._tile_for, linear._choose, hopper_stream._registers = plain, quantised, registers

    @contextmanager
    def _experts(self, module: Any, *names: str) -> Iterator[None]:
        """Pass tiles to the functions of `module` that describe the products of experts, which call them `names`."""
        describers = {name: getattr(module, name) for name in ("describe_assigned", "describe_grouped")}

        def describe(
            function: str, x: Tensor, weights: Tensor, ids: Tensor, up: Any, down: Any, y: Tensor, **extra: Any
        ) -> Any:
            for name, stack in zip(names, (up, down), strict=True):
                size = (
                    stack.words.shape[0] * stack.num_rows * stack.num_columns
                    if isinstance(stack, PackedMatrix)
                    else stack.numel()
                )
                op = ExpertOp(stack is up, function == "describe_grouped", size)
                self.current.setdefault(op, (Choice(CURRENT), None))
                if op in self.overrides:
                    extra[name] = self.overrides[op].tile
            return describers[function](x, weights, ids, up, down, y, **extra)

        for name in describers:
            setattr(module, name, partial(describe, name))
        try:
            yield
        finally:
            for name, function in describers.items():
                setattr(module, name, function)

    def _decide(self, op: Op, found: Tile | None, matrix: PackedMatrix | None) -> Any:
        self.current.setdefault(op, (Choice(found), matrix))
        choice = self.overrides.get(op, Choice(found))
        self._registers = choice.registers
        return choice.tile


class Layers:
    """The layers of a model for some number of tokens."""

    def __init__(self, model: Gemma4, num_tokens: int) -> None:
        spec, device, dtype = model.spec, model.device, model.dtype
        self.model, self.eps = model, spec.rms_eps
        generator = torch.Generator(device=device).manual_seed(num_tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.x_TD = draw(num_tokens, spec.hidden_size)
        self.heads = [draw(num_tokens, layer.num_heads * layer.head_dim) for layer in spec.layers]
        self.ones = [torch.ones(heads.shape[1], device=device) for heads in self.heads]
        self.ple = draw(num_tokens, len(spec.layers), spec.ple_dim) if spec.ple_dim else None

    def run(self) -> Tensor:
        """Return the stream after the last layer's norm."""
        x, ops = self.x_TD, self.model.ops
        normed = ops.rms_norm(x, self.model._layers[0].input_norm, self.eps)
        for index, layer in enumerate(self.model._layers):
            layer.attention.qkv.linear_parts(normed)
            heads = ops.rms_norm(self.heads[index], self.ones[index], self.eps)
            x, normed = layer.finish(x, heads, None if self.ple is None else self.ple[:, index], self.model._next_norm(index))
        return normed

    @property
    def count(self) -> int:
        """How many layers run."""
        return len(self.heads)

    @property
    def floor_us(self) -> float:
        return floor_us(self.model, self.x_TD.shape[0])


class Head:
    """The final norm and the head of a model for some number of tokens, several times. The head is larger than any cache."""

    count = HEADS

    def __init__(self, model: Gemma4, num_tokens: int) -> None:
        generator = torch.Generator(device=model.device).manual_seed(num_tokens)
        self.model = model
        size = num_tokens, model.spec.hidden_size
        self.x_TD = torch.randn(size, generator=generator, device=model.device).to(model.dtype)

    def run(self) -> Tensor:
        """Return the logits of the last time."""
        model = self.model
        for _ in range(HEADS):
            logits = model.logits(model.ops.rms_norm(self.x_TD, model.norm, model.spec.rms_eps))
        return logits

    @property
    def floor_us(self) -> float:
        return self.model.head_bytes / BANDWIDTH * 1e6


class Timer:
    """Times layers or heads in graphs, with a choice of tiles."""

    def __init__(self, layers: Layers | Head, tiles: Tiles) -> None:
        self.layers, self.tiles = layers, tiles

    def graph(self, overrides: dict[AnyOp, Choice]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.tiles.overrides = overrides
        with self.tiles.installed(), replayed():
            graph, out = Captures(self.layers.model.device).capture(self.layers.run)
        graph.replay()
        return graph, out.clone()

    def layer_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the median microseconds of a layer or head."""
        return replay_us(graph, self.layers.count, REPLAYS)


def divisors(count: int, most: int) -> list[int]:
    return [parts for parts in range(1, most + 1) if count % parts == 0]


def candidates(op: AnyOp, num_tokens: int, matrix: PackedMatrix | None) -> Iterator[Choice]:
    """Yield the tiles worth trying: those that give every multiprocessor something to do, and are not cut too finely."""
    if isinstance(op, ExpertOp):
        yield from _expert_candidates(op)
        return

    def splits(block_n: int, block_k: int, most: int) -> list[int]:
        programs, steps = -(-op.num_rows // block_n), op.size_k // block_k
        parts = divisors(steps, most) if op.size_k % block_k == 0 else []
        useful = [count for count in parts if 0.6 * MULTIPROCESSORS <= programs * count <= 6 * MULTIPROCESSORS]
        return useful or ([1] if parts and programs > MULTIPROCESSORS else [])

    if op.format is None:
        yield from _plain_candidates(op, num_tokens, splits)
        return
    assert matrix is not None
    is_wide = op.format in (FP8, INT8)
    if num_tokens <= 8 and has_stream_groups(matrix):
        for block_n, some_stages in ((32, (3,)), (64, (2, 4, 6))):
            for split in splits(block_n, 256, 6):
                for stages in some_stages:
                    yield Choice(Tile("bits", block_n, 256, 4, stages, split))
    if num_tokens <= MAX_TOKENS and (is_wide or has_stream_groups(matrix)):
        block_k = 128 if is_wide else 256
        for block_n in (64,) if num_tokens <= 8 else (64, 128):
            for split in splits(block_n, block_k, 6):
                for stages in (2, 3, 4, 5, 6):
                    for registers in (64, 96, 128):
                        yield Choice(Tile("stream", block_n, block_k, 4, stages, split), registers)
    if num_tokens <= 16 and (op.num_weights < 60e6 or op.epilogue == SOFTCAP):
        for block_k in (128, 256):
            for split in splits(64, block_k, 16):
                yield Choice(Tile("warps", 64, block_k, 4, 1, split))
    if op.epilogue == SOFTCAP and num_tokens > 8:
        for block_n, block_k, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8), (256, 64, 8)):
            for stages in (2, 3, 4):
                yield Choice(Tile("tiles", block_n, block_k, warps, stages))


def _expert_candidates(op: ExpertOp) -> Iterator[Choice]:
    if not op.is_grouped:
        for block_n, block_k, warps in (
            *((rows, 1024, warps) for rows in (1, 2, 4, 8) for warps in (4, 8)),
            *((rows, 512, 4) for rows in (2, 4, 8)),
            *((rows, 256, 4) for rows in (4, 8, 16)),
        ):
            for stages in (1, 2, 3):
                yield Choice(RowTile(block_n, block_k, warps, stages))
        return
    for block_n, block_k, warps in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 8)):
        for stages in (2, 3, 4, 6):
            yield Choice(GroupTile(16, block_n, block_k, warps, stages))


def _plain_candidates(op: Op, num_tokens: int, splits: Callable[[int, int, int], list[int]]) -> Iterator[Choice]:
    if num_tokens <= 2:
        for block_n in (2, 4, 8):
            for block_k in (512, 1024):
                yield Choice(Tile("rows", block_n, block_k))
    if op.size_k % 64 or num_tokens > MAX_TOKENS:
        return
    for block_n, block_k in ((32, 128), (64, 128), (64, 64)):
        for split in splits(block_n, block_k, 8):
            for stages in (3, 5):
                yield Choice(Tile("tiles", block_n, block_k, 4, stages, split))
                if block_n == 64:  # the fewest rows of `hopper_stream`
                    yield Choice(Tile("stream", block_n, block_k, 4, stages, split))


def search(timer: Timer, num_tokens: int, only: str, report: Callable[..., None]) -> dict[AnyOp, Choice]:
    """Return the tiles that make the layers faster than the current ones."""
    chosen: dict[AnyOp, Choice] = {}
    graph, current_out = timer.graph(chosen)
    best_us = timer.layer_us(graph)
    for op in sorted((op for op in timer.tiles.current if only in str(op)), key=lambda op: -op.num_weights):
        before, matrix = timer.tiles.current[op]
        found: list[tuple[float, Choice]] = [(best_us, before)]
        for choice in candidates(op, num_tokens, matrix):
            try:
                graph, out = timer.graph({**chosen, op: choice})
            except Exception as error:  # a tile that the kernel refuses, or that does not fit
                report("refused", op=str(op), choice=str(choice), error=str(error)[:80])
                continue
            difference = float((out.float() - current_out.float()).norm() / current_out.float().norm())
            if difference > MAX_DIFFERENCE:
                report("WRONG", op=str(op), choice=str(choice), difference=difference)
                continue
            found.append((timer.layer_us(graph), choice))
        found.sort(key=lambda pair: pair[0])
        for us, choice in found[:4]:
            mark = " (current)" if choice == before else ""
            report("tile", op=str(op), choice=f"{choice}{mark}", us=us, current_us=best_us)
        us, choice = found[0]
        if us < MIN_GAIN * best_us:
            chosen[op], best_us = choice, us
    return chosen


def compile_all(timer: Timer, num_tokens: int, only: str) -> None:
    """Compile the kernels of all candidates, several at a time."""
    with compile_ahead(), replayed():
        with timer.tiles.installed():
            timer.layers.run()
        for op, (_, matrix) in list(timer.tiles.current.items()):
            for choice in candidates(op, num_tokens, matrix) if only in str(op) else ():
                timer.tiles.overrides = {op: choice}
                try:
                    with timer.tiles.installed():
                        timer.layers.run()
                except Exception:  # reported by the search
                    continue
    timer.tiles.overrides = {}


def floor_us(model: Gemma4, num_tokens: int) -> float:
    """Return the microseconds to read a layer's weights, of experts only those that random tokens choose."""
    total = 0.0
    for layer in model._layers:
        for name, module in layer.named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            size = sum(tensor.numel() * tensor.element_size() for tensor in own)
            moe = model.spec.moe
            if moe is not None and name.startswith("experts.stack"):
                size *= 1 - (1 - moe.top_k / moe.num_experts) ** num_tokens
            total += size
    return total / BANDWIDTH * 1e6 / len(model._layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="31B,12B,26B-A4B,E4B,E2B")
    parser.add_argument("--formats", default="bf16,fp8,int4")
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--search", action="store_true", help="try other tiles")
    parser.add_argument("--only", default="", help="try tiles only for products whose name contains this, such as experts")
    parser.add_argument("--head", action="store_true", help="time the head, in these formats, and not the layers")
    parser.add_argument("--device", default="cuda", help="cpu runs the layers once, which checks this script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, results = torch.device(options.device), []
    if device.type == "cuda":
        use_disk_cache()

    def report(kind: str, **facts: Any) -> None:
        results.append({"kind": kind, **facts})
        if kind != "refused":
            shown = "  ".join(f"{value:8.2f} {key}" if isinstance(value, float) else str(value) for key, value in facts.items())
            print(f"{kind:6s} {shown}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))

    for model_name in options.models.split(","):
        for format_name in options.formats.split(","):
            name = random_name(model_name, num_layers=NUM_LAYERS.get(model_name, 6))
            setting = "head_quantization" if options.head else "quantization"
            rounding = {} if format_name == "bf16" else {setting: format_name}
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            model = load_model(open_checkpoint(name), dtype=dtype, device=device, progress=False, **rounding)
            for num_tokens in map(int, options.tokens.split(",")):
                label = f"{model_name} {format_name} {num_tokens}"
                with torch.inference_mode():
                    measured = Head(model, num_tokens) if options.head else Layers(model, num_tokens)
                    measure(measured, num_tokens, label, options.only if options.search else None, report)
            del model, measured


def measure(layers: Layers | Head, num_tokens: int, label: str, only: str | None, report: Callable[..., None]) -> None:
    """Report the time of the layers with the current tiles, and with those that a search finds if `only` names products."""
    timer = Timer(layers, Tiles())
    if layers.model.device.type == "cpu":
        with nullcontext() if only is None else timer.tiles.installed():
            report("ran", label=label, norm=float(timer.layers.run().norm()))
        return
    chosen = {}
    if only is not None:
        compile_all(timer, num_tokens, only)
        chosen = search(timer, num_tokens, only, lambda kind, **facts: report(kind, label=label, **facts))
    graphs = [timer.graph({})[0], timer.graph(chosen)[0]] if chosen else [timer.graph({})[0]]
    turns = [[timer.layer_us(graph) for graph in graphs] for _ in range(5)]  # in turns, so that clocks affect both
    current, *found = (statistics.median(times) for times in zip(*turns, strict=True))
    extra = {"us_with_chosen_tiles": found[0]} if found else {}
    name = "head" if isinstance(layers, Head) else "layer"
    report(name, label=label, us=current, floor=layers.floor_us, **extra)
    for op, choice in chosen.items():
        report("chosen", label=label, op=str(op), choice=str(choice), current=str(timer.tiles.current[op][0]))


if __name__ == "__main__":
    main()
