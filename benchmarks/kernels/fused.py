"""Check every fused kernel except attention against its eager twin in float32, then time it.

    python benchmarks/kernels/fused.py [--only linear,experts,norms,sampling] [--models E4B,31B] [--json PATH]
    TRITON_INTERPRET=1 python benchmarks/kernels/fused.py --device cpu --models tiny      checks the script without a GPU

This script produces the tables of kernels in docs/log/linear.md and docs/log/sampling.md. Kernels are called by their op in the
kernel table, as the engine calls them. Times are medians of CUDA-graph replays in microseconds. Weights rotate, so they are
never in the L2. `floor` is the time to move the bytes at the memory rate. The exit code is 1 if a result is outside the
tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from replays import replay_us
from torch import Tensor

from culet.kernels.dispatch import eager_kernels, triton_kernels
from culet.kernels.replay import replayed
from culet.kernels.triton.sampling import draw as draws
from culet.kernels.types import HeadShape, RowSettings
from culet.sampling.logprobs import compute_logprobs
from culet.sampling.sampler import sample
from culet.types import Sampling

BANDWIDTH = 4.2e12  # bytes/s that an H200 moves; a measured copy reaches 4.3e12
ROTATED_BYTES = 400 << 20  # several times the L2, which is 60 MB
TOLERANCE = 5e-3  # maximum ||a - b|| / ||b|| per row
EPS = 1e-6
PAGE = 32  # tokens per page
FEW_TOKENS, TOKENS, EXPERT_TOKENS = (1, 2, 4, 8, 16, 32), (1, 32, 2048), (1, 2, 4, 8, 16, 32, 64, 256, 1024, 8192)

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Dims:
    """The dimensions of a model's kernels."""

    hidden: int
    heads: int
    sliding_kv: int
    global_kv: int
    k_eq_v: bool
    qkv: int  # projected columns of a sliding layer
    mlp: int
    ple_layers: int = 0
    experts: tuple[int, int, int] | None = None  # number of experts, experts per token, width of an expert
    head_dims: tuple[int, int, int] = (256, 512, 128)  # sliding, global, and rotated dims of a global layer
    vocab: int = 262_144

    def head_shapes(self) -> dict[str, HeadShape]:
        """Return the shapes of sliding and global layers. K=V models have the global one with and without the latent."""
        local, wide, rotated = self.head_dims
        shapes = {"sliding": HeadShape(self.heads, self.sliding_kv, local, local, False, False, EPS)}
        shapes["global"] = HeadShape(self.heads, self.global_kv, wide, rotated, self.k_eq_v, self.k_eq_v, EPS)
        if self.k_eq_v:
            shapes["global, K and V"] = HeadShape(self.heads, self.global_kv, wide, rotated, True, False, EPS)
        return shapes


MODELS = {
    "E2B": Dims(1536, 8, 1, 1, False, 2560, 12288, ple_layers=35),
    "E4B": Dims(2560, 8, 2, 2, False, 3072, 10240, ple_layers=42),
    "12B": Dims(3840, 16, 8, 1, True, 8192, 15360),
    "26B-A4B": Dims(2816, 16, 8, 2, True, 8192, 2112, experts=(128, 8, 704)),
    "31B": Dims(5376, 32, 16, 4, True, 16384, 21504),
    "tiny": Dims(128, 2, 1, 1, True, 256, 192, ple_layers=2, experts=(4, 2, 64), head_dims=(32, 64, 16), vocab=1024),
}


@dataclass(frozen=True)
class Case:
    """A kernel with its inputs: the calls to time, the float32 result expected from the first, and the bytes to move."""

    section: str
    name: str
    tokens: int
    calls: list[Callable[[], Outputs]]
    twin: Callable[[], Outputs]
    num_bytes: int
    baseline: list[Callable[[], Any]] | None = None  # the same calls with cuBLAS
    before: Callable[[], Any] | None = None  # a small kernel to run before each call, as in a layer


class Bench:
    """The cases of a model on a device."""

    def __init__(self, model: str, device: str) -> None:
        self.model, self.dims, self.device = model, MODELS[model], device
        self.ours, self.twins = triton_kernels(), eager_kernels()
        self.is_tiny = model == "tiny"
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter has no bfloat16 products

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(dtype or self.dtype)

    def gains(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device) + 0.5

    def case(self, section: str, name: str, num_bytes: int, op: str, *arguments: Any) -> Case:
        """Make a case of one op. Its twin gets the same arguments, with bfloat16 tensors converted to float32."""
        wide = [value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value for value in arguments]
        ours, twin = partial(getattr(self.ours, op), *arguments), partial(getattr(self.twins, op), *wide)
        return Case(section, name, arguments[0].shape[0], [lambda: _outputs(ours())] * 20, lambda: _outputs(twin()), num_bytes)

    def norms(self) -> Iterator[Case]:
        """Yield cases for norms, q/k/v preparation and the other small kernels."""
        for tokens in (3,) if self.is_tiny else TOKENS:
            size, row = self.dims.hidden, tokens * self.dims.hidden * 2
            x, a, b = (self.random(tokens, size) for _ in range(3))
            w, scalar = [self.gains(size) for _ in range(4)], self.gains(1)
            yield self.case("norms", "rms_norm", 2 * row, "rms_norm", x, w[0], EPS)
            yield self.case("norms", "residual_norm", 4 * row, "residual_norm", x, a, w[0], scalar, w[1], EPS)
            if self.dims.experts:
                joint = (w[0], w[1], w[2])
                yield self.case("norms", "residual_norm_two", 5 * row, "residual_norm_two", x, a, w[0], w[1], w[2], EPS)
                yield self.case("norms", "residual_joint", 5 * row, "residual_norm_joint", x, a, b, joint, scalar, w[3], EPS)
                yield self.case("norms", "sum_norms", 3 * row, "sum_norms", a, b, w[0], w[1], EPS)
            for name, heads in self.dims.head_shapes().items():
                yield from self.qkv(tokens, name, heads)
            gate_up = self.random(tokens, 8 * size)
            logits = self.random(min(tokens, 32), self.dims.vocab, scale=20.0)
            table, ids = self.random(8192, size), torch.randint(0, 8192, (tokens,), device=self.device)
            yield self.case("norms", "gelu_mul", gate_up.numel() * 3, "gelu_mul", gate_up)
            yield self.case("norms", "embed", tokens * size * 4, "embed", ids, table, 50.5)
            yield self.case("norms", "softcap", logits.numel() * 6, "softcap", logits, 30.0)
            if self.dims.ple_layers:
                context, embedded = (self.random(tokens, self.dims.ple_layers * 256) for _ in range(2))
                gate, value = self.random(tokens, 256), embedded.view(tokens, -1, 256)[:, 1]
                combine = (context, embedded, self.gains(256), size**-0.5, EPS)
                yield self.case("norms", "ple_combine", context.numel() * 6, "ple_combine", *combine)
                yield self.case("norms", "gelu_gate", gate.numel() * 6, "gelu_gate", gate, value)

    def qkv(self, tokens: int, name: str, heads: HeadShape) -> Iterator[Case]:
        """Yield cases for rope, for queries alone, and for queries, keys and values with their write to pages."""
        size, num_kv = heads.head_dim, heads.num_kv_heads
        x = self.random(tokens, (heads.num_heads + num_kv * (1 if heads.k_eq_v else 2)) * size)
        weight, positions = self.gains(heads.num_heads + num_kv, size), torch.randint(0, 131072, (tokens,), device=self.device)
        theta = 1e4 if heads.rotated_dims == size else 1e6
        frequencies = theta ** (-torch.arange(0, heads.rotated_dims, 2, device=self.device, dtype=torch.float32) / size)
        width, planes = (size + heads.rotated_dims, 1) if heads.latent else (size, 2)
        num_pages = -(-tokens // PAGE) + 3
        # The pages are in slabs that also hold other layers, and some tokens are not stored.
        slab = torch.zeros(num_pages, 3 * planes * num_kv * PAGE * width, dtype=self.dtype, device=self.device)
        shape = (planes, num_pages, num_kv, PAGE, width)
        stride = (num_kv * PAGE * width, slab.stride(0), PAGE * width, width, 1)
        address = torch.randperm(num_pages * PAGE, device=self.device)[:tokens]
        address[1::7] = -1
        rope, twin_rope = self.ours.rope(positions, frequencies), self.twins.rope(positions, frequencies)
        buffers = slab.clone(), slab.to(torch.float32, copy=True)
        mine, theirs = (buffer.as_strided(shape, stride, planes * num_kv * PAGE * width) for buffer in buffers)

        def ours() -> Outputs:
            return *self.ours.prepare_qkv(x, weight, rope, mine, self.ours.stores(address, PAGE), heads), buffers[0]

        def twin() -> Outputs:
            where = self.twins.stores(address, PAGE)
            return *self.twins.prepare_qkv(x.float(), weight, twin_rope, theirs, where, heads), buffers[1]

        written = (heads.num_heads * size + 2 * num_kv * width * planes) * tokens * 2
        yield Case("norms", f"qkv {name}", tokens, [ours] * 20, twin, x.numel() * 2 + written)
        yield self.case("norms", f"rope {name}", tokens * heads.rotated_dims * 8, "rope", positions, frequencies)
        queries = HeadShape(heads.num_heads, 0, size, heads.rotated_dims, heads.k_eq_v, heads.latent, EPS)
        own = x[:, : heads.num_heads * size]

        def ours_q() -> Outputs:
            return (self.ours.prepare_q(own, weight, rope, queries),)

        def twin_q() -> Outputs:
            return (self.twins.prepare_q(own.float(), weight[: heads.num_heads], twin_rope, queries),)

        yield Case("norms", f"q {name}", tokens, [ours_q] * 20, twin_q, own.numel() * 4)

    def linear(self) -> Iterator[Case]:
        """Yield linear layers with few tokens to compare with cuBLAS, each after a small kernel that makes its input."""
        size, mlp, q_columns = self.dims.hidden, self.dims.mlp, self.dims.heads * self.dims.head_dims[0]
        shapes = {"qkv": ("linear", self.dims.qkv, size), "o": ("linear", size, q_columns)}
        shapes |= {"gate_up": ("gated_linear", 2 * mlp, size), "down": ("linear", size, mlp)}
        if self.dims.ple_layers:
            shapes |= {"ple_gate": ("linear_gelu_times", 256, size), "ple_proj": ("linear", size, 256)}
        shapes["head"] = ("capped_head", self.dims.vocab, size)
        for name, (op, rows, columns) in shapes.items():
            num_bytes = rows * columns * 2
            copies = 1 if self.is_tiny else max(2, min(64, ROTATED_BYTES // num_bytes))
            weights = [self.random(rows, columns, scale=columns**-0.5) for _ in range(copies)]
            for tokens in (3,) if self.is_tiny else FEW_TOKENS:
                if name == "head" and tokens in (2, 4, 16):
                    continue
                yield self._linear_case(name, op, weights, tokens)

    def _linear_case(self, name: str, op: str, weights: list[Tensor], tokens: int) -> Case:
        rows, columns = weights[0].shape
        x, source, factor = (self.random(tokens, size) for size in (columns, columns, rows))
        extra = {"linear_gelu_times": (factor,), "capped_head": (30.0,)}.get(op, ())

        def twin() -> Outputs:
            # Multiply in slices, so that a head's weight need not fit twice.
            sums = torch.cat([F.linear(x.float(), part.float()) for part in weights[0].split(32768)], -1)
            return (_epilogue(self.twins, op, sums, factor.float()),)

        calls = [partial(getattr(self.ours, op), x, weight, *extra) for weight in weights]
        cublas = [lambda w=weight: _epilogue(self.ours, op, F.linear(x, w), factor) for weight in weights]
        before = partial(self.ours.gelu_gate, source, source)
        wrapped = [lambda call=call: _outputs(call()) for call in calls]
        return Case("linear", name, tokens, wrapped, twin, weights[0].numel() * 2, cublas, before)

    def experts(self) -> Iterator[Case]:
        """Yield cases for the router and the experts."""
        if self.dims.experts is None:
            return
        (num_experts, top_k, width), size = self.dims.experts, self.dims.hidden
        gate_up = [self.random(num_experts, 2 * width, size, scale=size**-0.5) for _ in range(2)]
        down = [self.random(num_experts, size, width, scale=width**-0.5) for _ in range(2)]
        router, scale = self.random(num_experts, size, scale=size**-0.5, dtype=torch.float32), self.gains(num_experts)
        for tokens in (3,) if self.is_tiny else EXPERT_TOKENS:
            inputs = [self.random(tokens, size) for _ in range(8 if tokens <= 256 else 2)]
            routed = [self.ours.route(x, router, scale, top_k, EPS) for x in inputs]
            yield self._route_case(inputs, router, scale, top_k)
            num_used = sum(ids.unique().numel() for _, ids in routed) / len(inputs)
            calls = [
                lambda x=x, choice=choice, layer=index % 2: (self.ours.experts(x, *choice, gate_up[layer], down[layer]),)
                for index, (x, choice) in enumerate(zip(inputs, routed, strict=True))
            ]

            def twin(x: Tensor = inputs[0], choice: Outputs = routed[0]) -> Outputs:
                return (_experts_twin(x, *choice, gate_up[0], down[0]),)

            yield Case("experts", "experts", tokens, calls, twin, round(num_used * 3 * width * size * 2))

    def _route_case(self, inputs: list[Tensor], router: Tensor, scale: Tensor, top_k: int) -> Case:
        """Make a case that compares dense weights of all experts.

        This way, ids in another order are equal, and near-ties differ little.
        """

        def dense(weights: Tensor, ids: Tensor) -> Outputs:
            return (torch.zeros(len(ids), len(router), device=self.device).scatter_(1, ids.long(), weights.float()),)

        def twin() -> Outputs:
            return dense(*self.twins.route(inputs[0].float(), router, scale, top_k, EPS))

        calls = [lambda x=x: dense(*self.ours.route(x, router, scale, top_k, EPS)) for x in inputs]
        return Case("experts", "route", len(inputs[0]), calls, twin, router.numel() * 4)


def _outputs(result: Any) -> Outputs:
    return tuple(value for value in result if value is not None) if isinstance(result, tuple) else (result,)


def _epilogue(kernels: Any, op: str, sums: Tensor, factor: Tensor) -> Tensor:
    """Apply the part of a fused linear op that follows the product."""
    if op == "gated_linear":
        return kernels.gelu_mul(sums)
    if op == "linear_gelu_times":
        return kernels.gelu_gate(sums, factor)
    return kernels.softcap(sums, 30.0) if op == "capped_head" else sums


def _experts_twin(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the experts in float32, converting one expert's weights at a time."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            hidden = eager_kernels().gelu_mul(F.linear(x[token].float(), gate_up[expert].float()))
            out.index_add_(0, token, F.linear(hidden, down[expert].float()) * weights[token, place, None])
    return out


WAYS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "top-k 64, top-p": (1.0, 64, 0.95, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "min-p": (1.2, 0, 1.0, 0.05),
}


def check_sampling(bench: Bench, report: Callable[..., None]) -> None:
    """Check that drawn tokens and log-probabilities equal those of the eager sampler."""
    for rows in (2,) if bench.is_tiny else (1, 8, 32, 128):
        # Round the logits to bfloat16, so that equal ones are common, and cap them as a head does.
        logits = bench.ours.softcap(bench.random(rows, bench.dims.vocab, scale=6.0), 30.0)
        for way, (temperature, top_k, top_p, min_p) in WAYS.items():
            seeds, positions = (torch.randint(0, limit, (rows,)).tolist() for limit in (2**62, 100_000))
            fixed = (temperature, top_k, top_p, min_p, 1.0, 0.0, 0.0, ())
            settings = [Sampling(*fixed, seeds[row], row % 3, None, None) for row in range(rows)]
            values = (
                ([temperature] * rows, torch.float64),
                ([top_k] * rows, torch.int32),
                ([top_p] * rows, torch.float64),
                ([min_p] * rows, torch.float64),
                (seeds, torch.int64),
                ([row % 3 for row in range(rows)], torch.int32),
            )
            on_device = RowSettings(*(torch.tensor(row, dtype=dtype, device=bench.device) for row, dtype in values))
            at = torch.tensor(positions, dtype=torch.int32, device=bench.device)
            call = partial(draws.draw, logits, on_device, at, has_few=top_k > 0, has_open=temperature > 0 and top_k == 0)
            num_equal = int((call() == sample(logits, settings, positions)).sum())
            floor = logits.numel() * 4 / BANDWIDTH * 1e6
            report("sampling", way, rows, wrong=rows - num_equal, us=_graph_us([call] * 4, bench.device), floor=floor)
        chosen = torch.randint(0, bench.dims.vocab, (rows,), device=bench.device)
        mine, theirs = draws.logprobs(logits, chosen, 20), compute_logprobs(logits, chosen, 20)
        error = float((mine.chosen_L - theirs.chosen_L).abs().max().maximum((mine.top_LK - theirs.top_LK).abs().max()))
        wrong = int((mine.top_ids_LK != theirs.top_ids_LK).sum())
        us = _graph_us([partial(draws.logprobs, logits, chosen, 20)] * 4, bench.device)
        report("sampling", "logprobs 20", rows, err=error, wrong=wrong, us=us)


def _worst_row(got: Tensor, want: Tensor) -> float:
    """Return the largest ||a - b|| / ||b|| of any row, or infinity if something was not written or is NaN."""
    got, want = got.float().flatten(1), want.float().flatten(1)
    error = (got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-20)
    return float(error.nan_to_num(math.inf, math.inf).max())


def _graph_us(launches: list[Callable[[], Any]], device: str) -> float:
    """Return the microseconds per launch, as the median of replays of one graph with all launches. NaN without a GPU."""
    if device == "cpu":
        return math.nan
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with replayed():
        with torch.cuda.stream(stream):
            for launch in launches[:2]:
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
    return replay_us(graph, len(launches))


def _run_case(case: Case, device: str) -> dict[str, float]:
    with replayed():
        got = case.calls[0]()
    error = max(_worst_row(mine, theirs) for mine, theirs in zip(got, case.twin(), strict=True))
    row = {"err": error, "floor": case.num_bytes / BANDWIDTH * 1e6}
    for name, calls in (("us", case.calls), ("cublas", case.baseline)):
        if calls is not None and case.before is not None:
            row[name] = 2 * _graph_us([step for call in calls for step in (case.before, call)], device)
        elif calls is not None:
            row[name] = _graph_us(calls, device)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="linear,experts,norms,sampling", help="sections to run, separated by commas")
    parser.add_argument(
        "--models", default="E4B,26B-A4B,31B,E2B,12B", help=f"models to run, separated by commas, out of {', '.join(MODELS)}"
    )
    parser.add_argument("--device", default="cuda", help="device to run on: cuda, or cpu with TRITON_INTERPRET=1")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    sections = options.only.split(",")
    results: list[dict[str, Any]] = []

    def report(section: str, name: str, tokens: int, **numbers: float) -> None:
        results.append({"section": section, "model": bench.model, "name": name, "tokens": tokens, **numbers})
        shown = "  ".join(f"{key} {value:.4g}" for key, value in numbers.items())
        print(f"{section:8} {bench.model:8} {name:18} M={tokens:<5} {shown}", flush=True)

    for model in options.models.split(","):
        bench = Bench(model, options.device)
        try:
            for section in ("linear", "experts", "norms"):
                for case in getattr(bench, section)() if section in sections else ():
                    report(case.section, case.name, case.tokens, **_run_case(case, options.device))
            if "sampling" in sections and model == options.models.split(",")[0]:
                check_sampling(bench, report)
        except Exception:  # keep the other models' numbers
            traceback.print_exc()
            results.append({"section": "failed", "model": model, "name": "", "tokens": 0, "err": math.inf})
        if options.json:
            gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
            options.json.write_text(json.dumps({"gpu": gpu, "results": results}, indent=1))
    wrong = [row for row in results if row.get("err", 0) > TOLERANCE or row.get("wrong")]
    print(f"{len(results)} results, {len(wrong)} outside the tolerance of {TOLERANCE}: {wrong[:10]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
