"""Check and time the attention kernels on this GPU: every variant's shapes, against float32 and FlashAttention-4's times.

    python benchmarks/kernels_attention.py --check --time --json out.json
    python benchmarks/kernels_attention.py --sweep --only 31B.global --json sweep.json

Times are medians of CUDA-graph replays of one call, the L2 cache flushed before each, as in `triton.testing.do_bench`.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.attention.triton import TritonBackend
from culet.bench.anchors import FA4, KERNEL_CASES, kernel_anchor
from culet.bench.attention_cases import SHAPES, AttentionCase, AttentionShape, make_case
from culet.bench.timing import flush_buffer, replay_times
from culet.cache.spec import KVGroup, KVSpec
from culet.kernels.eager import attention as eager_attention
from culet.kernels.triton.attention import decode as decode_module
from culet.kernels.triton.attention import hopper_decode, hopper_prefill, prefill, splits
from culet.kernels.triton.attention.tiles import DecodeTile, PrefillTile, decode_tile, prefill_tile
from culet.kernels.triton.launch import Launch

DECODE_CASES = {  # name -> (rows, query tokens, keys before them)
    "verify 32x4@8000": (32, 4, 8000),
    "verify 32x4@1000": (32, 4, 1000),
    "decode 1@8000": (1, 1, 8000),
    "decode 32@8000": (32, 1, 8000),
    "decode 128@1000": (128, 1, 1000),
    "decode 1@100000": (1, 1, 100000),
}
PREFILL_CASES = {"prefill 1x8192": (1, 8192), "prefill 4x1000": (4, 1000)}
TOLERANCE = 5e-3
GRAPH_ROWS = (3, 20)  # a second kernel joins the splits, and the programs themselves do


def decode_calls(case: AttentionCase, tile: DecodeTile | None) -> list[Launch]:
    group, device = case.shape.group, case.q_TNH.device
    tile = tile or decode_tile(case.q_TNH, case.kv, case.max_queries, len(case.spans))
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


def prefill_calls(case: AttentionCase, tile: PrefillTile | None, with_fresh: bool) -> list[Launch]:
    tile = tile or prefill_tile(case.q_TNH, case.kv)
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


def hopper_decode_calls(case: AttentionCase, programs: int = 132) -> list[Launch]:
    tile = hopper_decode.hopper_decode_tile(programs)
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
    """A call of the backend itself, as a Launch is called."""

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
    """Largest ||a - b|| / ||b|| of a token's head; nan where anything is."""
    for call in calls:
        call.run()
    torch.cuda.synchronize()
    got = calls[-1].arguments["OUT"].float()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def timed_case(shape: AttentionShape, name: str, device: str) -> AttentionCase:
    if name in PREFILL_CASES:
        rows, tokens = PREFILL_CASES[name]
        return make_case(shape, [(0, tokens)] * rows, device=device, num_layers=1)
    rows, queries, keys = DECODE_CASES[name]
    return make_case(shape, [(keys, queries)] * rows, device=device)


def decode_candidates(shape: AttentionShape, max_queries: int, num_rows: int) -> list[DecodeTile]:
    packed = max(16, 1 << (shape.group * max_queries - 1).bit_length())
    if shape.latent:
        grid = [(32, 4, 5), (64, 4, 3)] if packed == 16 else [(32, 4, 3)]
    elif shape.head_dim == 512:
        grid = [(32, 4, 5)]
    else:
        grid = [(32, 4, 5), (64, 4, 5), (16, 4, 5)]
    tiles = [DecodeTile(packed, *entry) for entry in grid]
    programs = (132, 264, 528) if shape.head_dim == 256 and num_rows > 1 else (132, 264)
    programs = programs if num_rows * shape.num_kv_heads < 264 else (132,)
    return [replace(tile, programs=count) for tile in tiles for count in programs]


def check_spans(shape: AttentionShape) -> dict[str, tuple[str, list[tuple[int, int]], dict[str, Any]]]:
    """name -> (kernel, rows, what make_case takes besides)."""
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
    """Capture at these lengths, replay at others: the worst error over all of them."""
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
    # A sliding table begins where the longest row's window does: shorter rows would see keys before it.
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
            makers = {"decode": lambda case: decode_calls(case, None)}
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


def run_checks(names: Sequence[str], chosen: str, device: str, with_hopper: bool, results: list[dict[str, Any]]) -> bool:
    good = True
    for shape_name in names:
        shape = SHAPES[shape_name]
        for seed, (check, (kind, spans, extra)) in enumerate(check_spans(shape).items()):
            if not re.search(chosen, check):
                continue
            case = make_case(shape, spans, device=device, seed=seed, **extra)
            variants: dict[str, Callable[[], list[Launch]]] = {}
            if kind == "decode":
                expected = eager_attention.decode_attention(
                    case.q_TNH.float(), case.kv, case.rows, max_queries=case.max_queries
                )
                variants["decode"] = lambda case=case: decode_calls(case, None)
                if with_hopper and case.rows.visible_2T is None and hopper_decode.hopper_decode_supports(case.kv):
                    variants["hopper"] = lambda case=case: hopper_decode_calls(case)
            else:
                tiles = torch.tensor([[row, 0] for row in range(len(spans))])
                expected = eager_attention.prefill_attention(case.q_TNH.float(), case.kv, case.rows, tiles, fresh=case.fresh)
                if kind == "prefill":
                    variants["fresh"] = lambda case=case: prefill_calls(case, None, True)
                if "stored_tail" not in extra:
                    variants["paged"] = lambda case=case: prefill_calls(case, None, False)
                text = case.rows.visible_2T is None
                if (
                    with_hopper
                    and text
                    and all(context == 0 for context, _ in spans)
                    and hopper_prefill.hopper_prefill_supports(case.kv, shape.group, fresh=True)
                ):
                    variants["hopper fresh"] = lambda case=case: hopper_calls(case, True)
                if (
                    with_hopper
                    and text
                    and "stored_tail" not in extra
                    and hopper_prefill.hopper_prefill_supports(case.kv, shape.group, fresh=False)
                ):
                    variants["hopper paged"] = lambda case=case: hopper_calls(case, False)
            variants["backend"] = lambda case=case, extra=extra: [BackendCall(case, "stored_tail" not in extra)]
            for variant, calls in variants.items():
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


def timed_variants(
    shape: AttentionShape, name: str, case: AttentionCase, sweep: bool, with_hopper: bool
) -> dict[str, Callable[[], list[Launch]]]:
    variants: dict[str, Callable[[], list[Launch]]] = {}
    if name in DECODE_CASES:
        rows, queries, _ = DECODE_CASES[name]
        variants["table"] = lambda: decode_calls(case, None)
        for tile in decode_candidates(shape, queries, rows) if sweep else ():
            label = f"{tile.rows}x{tile.keys} w{tile.warps} s{tile.stages} p{tile.programs}"
            variants[label] = lambda tile=tile: decode_calls(case, tile)
        if with_hopper and hopper_decode.hopper_decode_supports(case.kv):
            for programs in (132, 264) if sweep else (132,):
                variants[f"hopper p{programs}"] = lambda programs=programs: hopper_decode_calls(case, programs)
        return variants
    for with_fresh in (True, False):
        suffix = "fresh" if with_fresh else "paged"
        variants[f"triton {suffix}"] = lambda with_fresh=with_fresh: prefill_calls(case, None, with_fresh)
        if with_hopper and hopper_prefill.hopper_prefill_supports(case.kv, shape.group, fresh=with_fresh):
            variants[f"hopper {suffix}"] = lambda with_fresh=with_fresh: hopper_calls(case, with_fresh)
    return variants


def run_times(
    names: Sequence[str], device: str, sweep: bool, with_hopper: bool, only_case: str, results: list[dict[str, Any]]
) -> None:
    flush = flush_buffer()
    for shape_name in names:
        shape = SHAPES[shape_name]
        for name in KERNEL_CASES:
            if not re.search(only_case, name):
                continue
            case = timed_case(shape, name, device)
            for variant, calls in timed_variants(shape, name, case, sweep, with_hopper).items():
                entry: dict[str, Any] = {"shape": shape_name, "case": name, "variant": variant}
                try:
                    launches = calls()

                    def run(launches: list[Launch] = launches) -> None:
                        for launch in launches:
                            launch.run()

                    entry["us"] = round(median(replay_times(run, 15 if name in PREFILL_CASES else 25, flush)), 1)
                    entry["nan"] = bool(launches[-1].arguments["OUT"].isnan().any())
                except Exception as error:
                    entry["failure"] = repr(error)[:200]
                results.append(entry)
            del case


def warm(names: Sequence[str], args: argparse.Namespace) -> None:
    """Compile everything in forked processes, before this one touches the GPU."""
    jobs: list[tuple[Any, ...]] = []
    for shape_name in names:
        if args.check:
            jobs += [("graph", shape_name, f"{rows}x{queries}") for queries in (1, 4) for rows in GRAPH_ROWS]
            jobs += [("check", shape_name, check) for check in check_spans(SHAPES[shape_name]) if re.search(args.check, check)]
        if args.time or args.sweep:
            jobs += [("time", shape_name, name) for name in KERNEL_CASES if re.search(args.case, name)]
    workers = min(len(jobs), max(1, (os.cpu_count() or 2) - 1))
    children = []
    for worker in range(workers):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            for job in itertools.islice(jobs, worker, None, workers):
                _warm_one(job, args)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def _chained(calls: Callable[[], list[Launch]]) -> list[Launch]:
    """The launches of a call on CPU tensors, with the options that the GPU's have."""
    launches = []
    for launch in calls():
        arguments, options = dict(launch.arguments), launch.options
        if "PDL" in arguments:
            arguments, options = arguments | {"PDL": True}, options | {"launch_pdl": True}
        if "BY_HAND" in arguments:
            arguments["BY_HAND"] = arguments["ROT"] > 0 and arguments["K"].element_size() == 1
        launches.append(replace(launch, arguments=arguments, options=options))
    return launches


def _warm_one(job: tuple[Any, ...], args: argparse.Namespace) -> None:
    kind, shape_name, name = job
    shape = SHAPES[shape_name]
    if kind == "graph":
        rows, queries = map(int, name.split("x"))
        spans, extra = [(0, queries)] * rows, {}
    elif kind == "time":
        rows, queries = (DECODE_CASES[name][0], DECODE_CASES[name][1]) if name in DECODE_CASES else (4, 100)
        spans, extra = [(0, queries)] * rows, {}
    else:
        _, long_spans, extra = check_spans(shape)[name]
        spans = [(0, min(queries, 20)) for _, queries in long_spans]
        extra = {"images": [(0, 1, 5)]} if extra.get("images") else {}
    small = make_case(shape, spans, device="cpu", **extra)
    calls: list[Callable[[], list[Launch]]] = []
    if kind == "time":
        calls = list(timed_variants(shape, name, small, args.sweep, not args.no_hopper).values())
    elif kind == "graph" or check_spans(shape)[name][0] == "decode":
        calls = [lambda: decode_calls(small, None)]
        if not args.no_hopper and hopper_decode.hopper_decode_supports(small.kv) and small.rows.visible_2T is None:
            calls.append(lambda: hopper_decode_calls(small))
    else:
        calls = [lambda fresh=fresh: prefill_calls(small, None, fresh) for fresh in (True, False)]
        for fresh in (True, False):
            serves = hopper_prefill.hopper_prefill_supports(small.kv, shape.group, fresh=fresh)
            if not args.no_hopper and small.rows.visible_2T is None and serves:
                calls.append(lambda fresh=fresh: hopper_calls(small, fresh))
    for call in calls:
        try:
            for launch in _chained(call):
                launch.warm()
        except Exception as error:
            print("WARM", shape_name, name, repr(error)[:200], flush=True)


def report(checks: list[dict[str, Any]], times: list[dict[str, Any]]) -> None:
    if checks:
        failed = [entry for entry in checks if not entry["ok"]]
        worst = max((entry.get("error", float("nan")) for entry in checks), default=0.0)
        print(f"checks: {len(checks) - len(failed)} of {len(checks)} within {TOLERANCE}, worst {worst:.2e}")
    for shape_name in SHAPES:
        for name in KERNEL_CASES:
            here = [entry for entry in times if entry["shape"] == shape_name and entry["case"] == name]
            if not here:
                continue
            best = sorted((entry for entry in here if "us" in entry), key=lambda entry: entry["us"])
            anchor = kernel_anchor(FA4, shape_name, name) or float("nan")
            line = " | ".join(f"{entry['variant']} {entry['us']}{' NAN' if entry['nan'] else ''}" for entry in best[:4])
            ratio = anchor / best[0]["us"] if best else float("nan")
            broken = sum("failure" in entry for entry in here)
            print(f"{shape_name:12} {name:17} FA4 {anchor:6} x{ratio:4.2f}  {line}{f'  ({broken} failed)' if broken else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", default="", help="regular expression over the checks to make, . for all")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="time every candidate tile, not only the table's")
    parser.add_argument("--only", default="", help="regular expression over shape names")
    parser.add_argument("--case", default="", help="regular expression over case names")
    parser.add_argument("--no-hopper", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [name for name in SHAPES if re.search(args.only, name)]
    timed = [name for name in names if name in FA4]
    begin = time.time()
    warm(names, args)
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    checks: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    good = True
    if args.check:
        good = run_checks(names, args.check, "cuda", not args.no_hopper, checks)
        good &= run_graph_checks(names, "cuda", not args.no_hopper, checks)
        print(f"checked after {time.time() - begin:.0f} s", flush=True)
    if args.time or args.sweep:
        run_times(timed, "cuda", args.sweep, not args.no_hopper, args.case, times)
    report(checks, times)
    print(f"{torch.cuda.get_device_name()}: {time.time() - begin:.0f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "checks": checks, "times": times}, indent=1))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
