"""Check and time the GPU kernels besides attention: `python benchmarks/kernels_fused.py [--only linear,moe,...] [--json PATH]`.

Every variant is checked against its eager twin in float32 on fresh random inputs, then timed as the median of CUDA-graph
replays over rotating weights, so that none of them sit in the L2. A short table comes last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fused_experts import bench_moe, moe_on_meta, moe_parts
from fused_layer import bench_chain, chain_parts
from fused_linear import bench_linear, linear_on_meta, linear_parts
from fused_sampling import bench_sampling
from fused_small import MODELS, bench_small
from fused_timing import TOLERANCE, results


def compile_part(part: tuple[str, Any]) -> str:
    """In a worker: compile one part's kernels into the disk cache."""
    kind, what = part
    try:
        if kind == "linear":
            linear_on_meta(*what).warm()
        elif kind == "moe":
            tokens, index = what
            list(moe_on_meta(tokens))[index].warm()
        elif kind == "small":
            bench_small(what, is_timed=False)
        else:
            bench_sampling(is_timed=False)
    except Exception as failure:
        return f"{kind} {what}: {type(failure).__name__} {str(failure).splitlines()[0][:120]}"
    return ""


def compile_all(parts: list[tuple[str, Any]], workers: int) -> None:
    """Fill Triton's disk cache from many processes: one after the other it would take most of the time."""
    begin = time.time()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for problem in pool.map(compile_part, parts):
            if problem:
                print(problem, flush=True)
    print(f"compiled {len(parts)} parts in {time.time() - begin:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="linear,chain,moe,small,sampling", help="sections, separated by commas")
    parser.add_argument("--shape", default="", help="only linear shapes whose name holds this")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    sections = set(options.only.split(","))
    parts: list[tuple[str, Any]] = moe_parts() if "moe" in sections else []
    parts += [("small", model) for model in MODELS] if "small" in sections else []
    parts += [("sampling", None)] if "sampling" in sections else []
    parts += linear_parts(options.shape) if "linear" in sections else []
    parts += chain_parts() if "chain" in sections else []
    compile_all(parts, options.workers)
    torch.manual_seed(time.time_ns() % 2**31)
    begin = time.time()
    stages: dict[str, Callable[[], Any]] = {
        "moe": bench_moe,
        "linear": lambda: bench_linear(options.shape),
        "chain": lambda: bench_chain(),
        "small": lambda: [bench_small(model) for model in MODELS],
        "sampling": bench_sampling,
    }
    for name, stage in stages.items():
        if name not in sections:
            continue
        try:
            stage()
        except Exception:  # the other stages' numbers are worth having
            traceback.print_exc()
        print(f"{name} done after {time.time() - begin:.1f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))
    wrong = [row for row in results if float(row.get("err", 0)) > TOLERANCE or "wrong" in row]
    print(f"{len(results)} results, {len(wrong)} outside {TOLERANCE}: {[(row['name'], row['variant']) for row in wrong][:10]}")


if __name__ == "__main__":
    main()
