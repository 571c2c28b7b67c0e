"""Time the linear layers and experts of every model with quantised weights, next to bfloat16, in steps of few tokens.

    python benchmarks/kernels/quantised.py [--models 31B,E4B] [--formats int4,fp8] [--tokens 1,8,32] [--json PATH]

Each launch follows the norm that makes its input, as in a model, and the time includes that norm. Times are medians of
CUDA-graph replays in microseconds. Weights rotate through several times the L2. `floor` is the time to read the weights at
4.2 TB/s. The sum is over all layers of a step, without the head (`layers.py --head` times it). The results are checked by
tests/kernels/quantised/test_quantised_gpu.py.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from replays import replay_us
from torch import Tensor

from culet.kernels.compiling import compile_ahead, use_disk_cache
from culet.kernels.replay import replayed
from culet.kernels.triton.experts import expert_mlp
from culet.kernels.triton.linear import few_tokens
from culet.kernels.triton.norms.residual import rms_norm
from culet.kernels.triton.quantised import experts, linear
from culet.kernels.types import Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight, QuantisedWeight
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS

BANDWIDTH = 4.2e12  # bytes/s that an H200 moves
ROTATED_BYTES = 260 << 20  # several times the L2, which is 60 MB
DEVICE = "cuda"
Weight = Tensor | QuantisedWeight
Matrix = tuple[str, int, int, bool]  # name, outputs, inputs, whether it is a gate and up


def matrices_of(model: str) -> Counter[Matrix]:
    """Return how many layers have each matrix."""
    spec = read_spec(VARIANTS[model])
    found: Counter[Matrix] = Counter()
    for layer in spec.layers:
        keys = layer.num_kv_heads * (1 if layer.k_eq_v else 2) if layer.owns_kv else 0
        width = layer.num_heads * layer.head_dim
        found["qkv", (layer.num_heads + keys) * layer.head_dim, spec.hidden_size, False] += 1
        found["o", spec.hidden_size, width, False] += 1
        found["gate_up", layer.mlp_width, spec.hidden_size, True] += 1
        found["down", spec.hidden_size, layer.mlp_width, False] += 1
    return found


def label_of(matrix: Matrix) -> str:
    name, num_rows, size, _ = matrix
    return f"{name} {num_rows}x{size}"


def draw(name: str, *shape: int) -> Weight:
    """Return a random weight [..., out, in]."""
    *lead, size = shape
    if name == "bf16":
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * size**-0.5
    if name == "int4":
        words = torch.randint(-(2**31), 2**31 - 1, (*lead, size // 8), dtype=torch.int32, device=DEVICE)
        return Int4Weight(words, torch.rand(*lead, size // 32, device=DEVICE).to(torch.bfloat16) * 0.01, None)
    if name == "nvfp4":
        packed = torch.randint(0, 256, (*lead, size // 2), dtype=torch.uint8, device=DEVICE)
        scale = torch.rand(*lead, size // 16, device=DEVICE).to(torch.float8_e4m3fn)
        return Nvfp4Weight(packed, scale, torch.rand(*lead, 1, device=DEVICE) * 0.01)
    values = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
    if name == "int8":
        return Int8Weight(values, torch.rand(*lead, 1, device=DEVICE).to(torch.bfloat16) * 1e-3)
    narrow = (values.to(torch.bfloat16) / 32).to(torch.float8_e4m3fn)
    return Fp8Weight(narrow, torch.rand(*lead, 1, device=DEVICE) * 0.01)


def num_bytes(weight: Weight) -> int:
    tensors = [weight] if isinstance(weight, Tensor) else [tensor for tensor in weight if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def copies_of(weight: Weight) -> list[Weight]:
    """Return enough copies that none is in the L2 when its turn comes."""
    count = max(2, min(40, -(-ROTATED_BYTES // num_bytes(weight))))
    return [weight, *(deepcopy(weight) for _ in range(count - 1))]


def op_of(name: str, is_gated: bool) -> Callable[..., Tensor]:
    op = "gated_linear" if is_gated else "linear_parts"
    found: Callable[..., Tensor] = getattr(few_tokens if name == "bf16" else linear, op)
    return found


def graph_us(launch: Callable[[int], Any], count: int) -> float:
    """Return the median microseconds of one of `count` launches in a graph."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index)
    return replay_us(graph, count)


class Bench:
    """The launches of one format. In a dry run they only compile."""

    def __init__(self, results: list[dict[str, Any]], is_dry: bool) -> None:
        self.results, self.is_dry = results, is_dry

    def linear(self, model: str, matrix: Matrix, name: str, tokens: list[int]) -> None:
        label, (_, num_rows, size, is_gated) = label_of(matrix), matrix
        weight = draw(name, num_rows * (2 if is_gated else 1), size)
        copies = [weight] if self.is_dry else copies_of(weight)
        op, norm = op_of(name, is_gated), torch.ones(size, device=DEVICE)
        for num_tokens in tokens:
            x = torch.randn(num_tokens, size, dtype=torch.bfloat16, device=DEVICE)

            def launch(index: int, x: Tensor = x) -> Tensor:
                return op(rms_norm(x, norm, 1e-6), copies[index])

            self._add(launch, len(copies), model, label, name, num_tokens, num_bytes(weight))

    def experts(self, name: str, tokens: list[int]) -> None:
        """Time the experts of the 26B."""
        both = [draw(name, *shape) for shape in ((128, 1408, 2816), (128, 2816, 704))]
        for num_tokens in tokens:
            x = torch.randn(num_tokens, 2816, dtype=torch.bfloat16, device=DEVICE)
            ids = torch.rand(num_tokens, 128, device=DEVICE).topk(8).indices.to(torch.int32)
            weights = torch.rand(num_tokens, 8, device=DEVICE)
            used = sum(map(num_bytes, both)) / 128 * int(ids.unique().numel())
            run = expert_mlp.experts if name == "bf16" else experts.experts
            # Each launch has different experts, so that weights come from memory.
            routes = [(ids + 8 * shift) % 128 for shift in range(16)]

            given = partial(run, x, weights)

            def launch(index: int, given: Any = given, routes: list[Tensor] = routes) -> Tensor:
                out: Tensor = given(routes[index], *both)
                return out

            self._add(launch, len(routes), "26B-A4B", "experts", name, num_tokens, int(used))

    def _add(self, launch: Callable[[int], Any], count: int, *facts: Any) -> None:
        if self.is_dry:
            launch(0)
            return
        model, label, name, num_tokens, size = facts
        us = graph_us(launch, count)
        row = {"model": model, "matrix": label, "format": name, "tokens": num_tokens, "us": us, "bytes": size}
        self.results.append(row)
        floor = size / BANDWIDTH * 1e6
        speed = f"{us:8.1f} us {size / us / 1e3:6.0f} GB/s  floor {floor:6.1f}"
        print(f"{model:8s} {label:20s} {name:6s} {num_tokens:4d} {speed}", flush=True)


def print_sums(results: list[dict[str, Any]]) -> None:
    """Print the milliseconds of all layers' matrices in a step."""
    found = {(row["model"], row["matrix"], row["format"], row["tokens"]): row for row in results}
    for model, name, num_tokens in dict.fromkeys((row["model"], row["format"], row["tokens"]) for row in results):
        counts = {label_of(matrix): count for matrix, count in matrices_of(model).items()}
        if model == "26B-A4B":
            counts["experts"] = len(read_spec(VARIANTS[model]).layers)
        rows = [(found.get((model, label, name, num_tokens)), count) for label, count in counts.items()]
        if all(row is not None for row, _ in rows):
            us = sum(row["us"] * count for row, count in rows if row is not None)
            floor = sum(row["bytes"] / BANDWIDTH * 1e6 * count for row, count in rows if row is not None)
            print(f"SUM {model:8s} {name:6s} {num_tokens:4d} tokens: {us / 1e3:6.2f} ms, floor {floor / 1e3:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="31B,12B,26B-A4B,E4B")
    parser.add_argument("--formats", default="bf16,fp8,int4")
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokens = [int(count) for count in args.tokens.split(",")]
    results: list[dict[str, Any]] = []
    use_disk_cache()
    with torch.inference_mode(), replayed():
        for is_dry in (True, False):
            bench = Bench(results, is_dry)
            with compile_ahead() if is_dry else torch.inference_mode():
                for model in args.models.split(","):
                    for name in args.formats.split(","):
                        for matrix in matrices_of(model):
                            bench.linear(model, matrix, name, tokens)
                        if model == "26B-A4B":
                            bench.experts(name, tokens)
    print_sums(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
