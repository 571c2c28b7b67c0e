"""Check the attention kernels on this GPU against float32, at the shapes of all models.

    python benchmarks/kernels/attention.py --check . [--only 31B.global] [--json PATH]

This script produces the number of checks and the worst error in docs/results.md. `culet bench kernels` times the kernels. Each
kernel that serves a case is called directly and through the backend. Decode is also called in a CUDA graph that is replayed at
other lengths. The exit code is 1 if an error is outside the tolerance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.attention.triton import TritonBackend
from culet.bench.attention_cases import SHAPES, AttentionCase, AttentionShape, make_case
from culet.cache.spec import KVGroup, KVSpec
from culet.kernels.eager import attention as eager_attention
from culet.kernels.triton.attention import decode as decode_module
from culet.kernels.triton.attention import hopper_decode, hopper_prefill, prefill, splits
from culet.kernels.triton.attention.tiles import decode_tile, prefill_tile
from culet.kernels.triton.launch import Launch

TOLERANCE = 5e-3
GRAPH_ROWS = (3, 20)  # with and without a second kernel that joins the splits


def decode_calls(case: AttentionCase) -> list[Launch]:
    group, device = case.shape.group, case.q_TNH.device
    tile = decode_tile(case.q_TNH, case.kv, case.max_queries, len(case.spans))
    rows = splits.scratch_rows(tile, case.shape.num_kv_heads, group, case.max_queries)
    scratch = splits.Scratch.allocate(rows, case.shape.head_dim, device)
    return decode_module.decode_launches(
        case.q_TNH,
        case.kv,
        case.rows,
        max_queries=case.max_queries,
        out_TNH=torch.full_like(case.q_TNH, float("nan")),
        tile=tile,
        scratch=scratch,
    )


def prefill_calls(case: AttentionCase, with_fresh: bool) -> list[Launch]:
    tile = prefill_tile(case.q_TNH, case.kv)
    tiles = torch.from_numpy(prefill.query_tiles(case.tile_rows, tile.rows // case.shape.group, case.shape.window))
    return [
        prefill.prefill_launch(
            case.q_TNH,
            case.kv,
            case.rows,
            tiles.to(case.q_TNH.device),
            fresh=case.fresh if with_fresh else None,
            out_TNH=torch.full_like(case.q_TNH, float("nan")),
            tile=tile,
        )
    ]


def hopper_calls(case: AttentionCase, with_fresh: bool) -> list[Launch]:
    per_tile = hopper_prefill.hopper_prefill_rows(case.shape.head_dim) // case.shape.group
    tiles = torch.from_numpy(prefill.query_tiles(case.tile_rows, per_tile, case.shape.window))
    return [
        hopper_prefill.hopper_prefill_launch(
            case.q_TNH,
            case.kv,
            tiles.to(case.q_TNH.device),
            fresh=case.fresh if with_fresh else None,
            out_TNH=torch.full_like(case.q_TNH, float("nan")),
        )
    ]


def hopper_decode_calls(case: AttentionCase) -> list[Launch]:
    tile = hopper_decode.hopper_decode_tile(132)
    rows = splits.scratch_rows(tile, case.shape.num_kv_heads, case.shape.group, case.max_queries)
    return hopper_decode.hopper_decode_launches(
        case.q_TNH,
        case.kv,
        case.rows,
        max_queries=case.max_queries,
        out_TNH=torch.full_like(case.q_TNH, float("nan")),
        tile=tile,
        scratch=splits.Scratch.allocate(rows, case.shape.head_dim, case.q_TNH.device),
    )


class BackendCall:
    """A backend call with the interface of a Launch."""

    def __init__(self, case: AttentionCase, is_stored: bool) -> None:
        shape = case.shape
        rotated = shape.width - shape.head_dim
        spec = KVSpec(0, shape.num_kv_heads, shape.head_dim, rotated, shape.window, shape.latent, 2)
        tokens = torch.zeros(case.q_TNH.shape[0], dtype=torch.long, device=case.q_TNH.device)
        group = GroupBatch(case.kv.pages_BP, case.kv.first_B, tokens, case.rows.visible_2T)
        facts = tuple(RowFacts(start, queries, (is_stored,)) for start, queries in case.spans)
        rows = case.rows
        self.batch = ForwardBatch(tokens, tokens, rows.row_begin_B1, rows.context_B, tokens, facts, (group,), None)
        self.pool: Any = SimpleNamespace(planes=lambda layer: case.kv.planes)
        self.backend = TritonBackend(KVGroup("checked", 0, (spec,), shape.page_tokens), shape.num_heads)
        self.case = case
        self.arguments: dict[str, Any] = {}

    def run(self) -> None:
        self.backend.plan(self.batch, self.pool)
        self.arguments["OUT"] = self.backend.run(0, self.batch, self.pool, self.case.q_TNH, *self.case.fresh)


def worst_error(calls: Sequence[Launch], expected: torch.Tensor) -> float:
    """Return the largest ||a - b|| / ||b|| of a token's head, or NaN if anything is NaN."""
    for call in calls:
        call.run()
    torch.cuda.synchronize()
    got = calls[-1].arguments["OUT"].float()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def check_spans(shape: AttentionShape) -> dict[str, tuple[str, list[tuple[int, int]], dict[str, Any]]]:
    """Return a map of name -> (kernel, rows, further arguments of make_case)."""
    window = shape.window or 1024
    ragged = [0, 1, 15, 16, 63, 64, window - 1, window, window + 1, 3001, 8000, 12345]
    return {
        "decode ragged": ("decode", [(context, 1) for context in ragged], {}),
        "decode one": ("decode", [(9000, 1)], {}),
        "decode many": ("decode", [(37 * row % 2500, 1) for row in range(100)], {}),
        "verify ragged": ("decode", [(context, 1 + index % 8) for index, context in enumerate(ragged)], {}),
        "verify 16": ("decode", [(5000, 16), (3, 16), (window - 8, 16)], {}),
        "verify image": ("decode", [(2000, 16), (40, 3)], {"images": [(0, 2003, 9)]}),
        "prefill ragged": ("prefill", [(0, 1000), (1500, 777), (5, 33), (window, 17), (4097, 513)], {}),
        "prefill first": ("prefill", [(0, 2500), (0, 1), (0, 65), (0, 1023)], {}),
        "prefill chunk": ("prefill", [(700, 3000), (3333, 2049)], {"stored_tail": window}),
        "mixed": ("mixed", [(1000, 1), (0, 300), (2000, 4), (900, 1700), (5, 1), (window, 16), (300, 17)], {}),
        "prefill images": ("prefill", [(100, 2500), (900, 600)], {"images": [(0, 300, 256), (0, 900, 1400), (1, 1001, 280)]}),
    }


def graph_error(case: AttentionCase, make: Callable[[AttentionCase], list[Launch]]) -> float:
    """Capture a graph at these lengths, replay it at others, and return the worst error."""
    launches = make(case)
    for launch in launches:
        launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.run()
    worst = 0.0
    longest = case.spans[0][0]
    # A sliding page table begins at the longest row's window, so rows must not be shorter than that.
    shortest = 0 if case.shape.window is None else int(case.kv.first_B[0]) + case.shape.window - 1
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(shortest, longest + 1, (len(case.spans),), generator=generator, dtype=torch.int32)
        case.rows.context_B.copy_(lengths)
        launches[-1].arguments["OUT"].fill_(float("nan"))
        graph.replay()
        expected = eager_attention.decode_attention(case.q_TNH.float(), case.kv, case.rows, max_queries=case.max_queries)
        got = launches[-1].arguments["OUT"].float()
        error = float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        worst = error if error != error else max(worst, error)
    return worst


def run_graph_checks(names: Sequence[str], device: str, with_hopper: bool, results: list[dict[str, Any]]) -> bool:
    good = True
    for shape_name in names:
        for queries, num_rows in itertools.product((1, 4), GRAPH_ROWS):
            case = make_case(SHAPES[shape_name], [(5000, queries)] * num_rows, device=device, seed=11, whole_pages=True)
            makers = {"decode": decode_calls}
            if with_hopper and hopper_decode.hopper_decode_supports(case.kv):
                makers["hopper"] = hopper_decode_calls
            for variant, make in makers.items():
                error = graph_error(case, make)
                entry = {"shape": shape_name, "check": f"graph {num_rows}x{queries}", "variant": variant, "error": error}
                entry["ok"] = error <= TOLERANCE
                good &= entry["ok"]
                results.append(entry)
                if not entry["ok"]:
                    print("CHECK", entry, flush=True)
    return good


def variants_of(
    case: AttentionCase, kind: str, extra: dict[str, Any], with_hopper: bool
) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """Yield the kernels that serve a case, with their names."""
    is_text, is_stored = case.rows.visible_2T is None, "stored_tail" not in extra
    if kind == "decode":
        yield "decode", lambda: decode_calls(case)
        if with_hopper and is_text and hopper_decode.hopper_decode_supports(case.kv):
            yield "hopper", lambda: hopper_decode_calls(case)
    else:
        is_first = all(context == 0 for context, _ in case.spans)
        if kind == "prefill":
            yield "fresh", lambda: prefill_calls(case, True)
        if is_stored:
            yield "paged", lambda: prefill_calls(case, False)
        for fresh, is_possible in ((True, is_first), (False, is_stored)):
            serves = hopper_prefill.hopper_prefill_supports(case.kv, case.shape.group, fresh=fresh)
            if with_hopper and is_text and is_possible and serves:
                yield f"hopper {'fresh' if fresh else 'paged'}", lambda fresh=fresh: hopper_calls(case, fresh)  # type: ignore[misc]
    yield "backend", lambda: [BackendCall(case, is_stored)]


def run_checks(names: Sequence[str], chosen: str, device: str, with_hopper: bool, results: list[dict[str, Any]]) -> bool:
    good = True
    for shape_name in names:
        shape = SHAPES[shape_name]
        for seed, (check, (kind, spans, extra)) in enumerate(check_spans(shape).items()):
            if not re.search(chosen, check):
                continue
            case = make_case(shape, spans, device=device, seed=seed, **extra)
            wide = case.q_TNH.float()
            if kind == "decode":
                expected = eager_attention.decode_attention(wide, case.kv, case.rows, max_queries=case.max_queries)
            else:
                tiles = torch.tensor([[row, 0] for row in range(len(spans))])
                expected = eager_attention.prefill_attention(wide, case.kv, case.rows, tiles, fresh=case.fresh)
            for variant, calls in variants_of(case, kind, extra, with_hopper):
                entry: dict[str, Any] = {"shape": shape_name, "check": check, "variant": variant}
                try:
                    entry["error"] = worst_error(calls(), expected)
                    entry["ok"] = entry["error"] <= TOLERANCE
                except Exception as error:
                    entry["ok"], entry["failure"] = False, repr(error)[:300]
                good &= entry["ok"]
                results.append(entry)
                if not entry["ok"]:
                    print("CHECK", entry, flush=True)
            del case, expected
    return good


def warm(names: Sequence[str], args: argparse.Namespace) -> None:
    """Compile everything in forked processes before this one touches the GPU."""
    jobs: list[tuple[str, str, str]] = []
    for shape_name in names:
        jobs += [("graph", shape_name, f"{rows}x{queries}") for queries in (1, 4) for rows in GRAPH_ROWS]
        jobs += [("check", shape_name, check) for check in check_spans(SHAPES[shape_name]) if re.search(args.check, check)]
    workers = min(len(jobs), max(1, (os.cpu_count() or 2) - 1))
    children = []
    for worker in range(workers):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            for job in itertools.islice(jobs, worker, None, workers):
                _warm_one(job, not args.no_hopper)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def _chained(calls: Callable[[], list[Launch]]) -> list[Launch]:
    """Return the launches of a call on CPU tensors, with the options that they have on a GPU."""
    launches = []
    for launch in calls():
        arguments, options = dict(launch.arguments), launch.options
        if "PDL" in arguments:
            arguments, options = arguments | {"PDL": True}, options | {"launch_pdl": True}
        if "BY_HAND" in arguments:
            arguments["BY_HAND"] = arguments["ROT"] > 0 and arguments["K"].element_size() == 1
        launches.append(replace(launch, arguments=arguments, options=options))
    return launches


def _warm_one(job: tuple[str, str, str], with_hopper: bool) -> None:
    kind, shape_name, name = job
    shape = SHAPES[shape_name]
    if kind == "graph":
        rows, queries = map(int, name.split("x"))
        kernel, spans, extra = "decode", [(0, queries)] * rows, {}
    else:
        kernel, long_spans, extra = check_spans(shape)[name]
        spans = [(0, min(queries, 20)) for _, queries in long_spans]
        extra = {"images": [(0, 1, 5)]} if extra.get("images") else {}
    small = make_case(shape, spans, device="cpu", **extra)
    for variant, calls in variants_of(small, "decode" if kernel == "decode" else "prefill", extra, with_hopper):
        try:
            for launch in _chained(calls) if variant != "backend" else ():
                launch.warm()
        except Exception as error:
            print("WARM", shape_name, name, repr(error)[:200], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", default=".", help="regular expression for the names of the checks to run (default: all)")
    parser.add_argument("--only", default="", help="regular expression for the names of the shapes to run (default: all)")
    parser.add_argument("--no-hopper", action="store_true", help="skip the kernels for Hopper")
    parser.add_argument("--json", type=Path, help="write all errors to this file")
    args = parser.parse_args()
    names = [name for name in SHAPES if re.search(args.only, name)]
    begin = time.time()
    warm(names, args)
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    checks: list[dict[str, Any]] = []
    good = run_checks(names, args.check, "cuda", not args.no_hopper, checks)
    good &= run_graph_checks(names, "cuda", not args.no_hopper, checks)
    num_failed = sum(not entry["ok"] for entry in checks)
    worst = max((entry.get("error", float("nan")) for entry in checks), default=0.0)
    print(f"checks: {len(checks) - num_failed} of {len(checks)} within {TOLERANCE}, worst {worst:.2e}")
    print(f"{torch.cuda.get_device_name()}: {time.time() - begin:.0f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "checks": checks}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
