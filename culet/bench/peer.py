"""The results of the strongest peer on one H200, for the rows of `culet bench`. No torch.

The peer is vLLM 0.24.0 (torch 2.11, triton 3.6; torch.compile, full and piecewise CUDA graphs, prefix cache off, bf16,
gpu_memory_utilization 0.92, max_num_seqs 128, max_num_batched_tokens 8192, max_model_len 34000) with its own FlashAttention-4
fork for every layer. It runs only the text decoder, with random weights at the real dimensions. docs/guides/benchmarks.md
describes how it was timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from culet.bench.workloads import STANDARD, START, TPOT, TTFT, Workload

PEER = "vLLM 0.24"
GPU = "H200"  # these numbers are comparable only with this GPU


# The peer's numbers are shown only for runs with these settings.
EQUAL_SETTINGS: dict[str, Any] = {
    "quantization": "auto",
    "head_quantization": "auto",
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.92,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "speculative_config": None,
    "tensor_parallel_size": 1,
}


@dataclass(frozen=True)
class Anchor:
    """The peer's number for a row, and Culet's goal."""

    peer: float | None  # None if not measured or not comparable
    goal: float
    note: str = ""


_SHARED_EXPERTS = "the peer's {} was measured with weights for which all tokens share their experts, so it is not comparable"
_NARROW = "the peer's {} was measured with weights within 1e-3, with which long prompts are faster, so it is not comparable"


def _anchors(
    tpot: tuple[float | None, ...],
    ttft: tuple[float | None, ...],
    throughput: tuple[float | None, float | None],
    start: float,
    goals: tuple[float, ...],
    notes: dict[Workload, str],
) -> dict[Workload, Anchor]:
    """Return the anchors by row. `goals` are in the order tpot, ttft, chat, summarise, start."""
    rows = [*STANDARD[TPOT], *STANDARD[TTFT], *STANDARD["chat"], *STANDARD["summarise"], *STANDARD[START]]
    numbers = (*tpot, *ttft, *throughput, start)
    return {row: Anchor(number, goal, notes.get(row, "")) for row, number, goal in zip(rows, numbers, goals, strict=True)}


# TPOT at 1, 8 and 32 sequences and at 32,000 tokens. TTFT at 1k, 8k and 32k. Chat and summarise. Start (cold).
SERVING: dict[str, dict[Workload, Anchor]] = {
    "31B": _anchors(
        (17.85, 19.54, 28.77, None),
        (95.1, 835, 4227),
        (1148, None),
        251,
        goals=(15.8, 17.0, 23.5, 16.6, 85, 700, 3200, 1800, 740, 10),
        notes={STANDARD[TPOT][3]: _NARROW.format(18.8), STANDARD["summarise"][0]: _NARROW.format(588)},
    ),
    "26B-A4B": _anchors(
        (4.34, 8.63, 15.6, None),
        (41, 140, None),
        (3524, 2147),
        237,
        goals=(2.2, 6.5, 13.0, 2.5, 19, 92, 460, 4450, 2950, 10),
        notes={STANDARD[TPOT][3]: _SHARED_EXPERTS.format(4.62), STANDARD[TTFT][2]: _SHARED_EXPERTS.format(714)},
    ),
    "E4B": _anchors(
        (4.80, 5.03, 6.18, None),
        (25.4, 124, None),
        (8776, 3283),
        151,
        goals=(2.6, 2.75, 3.3, 3.0, 10, 58, 270, 16000, 6300, 10),
        notes={STANDARD[TPOT][3]: _NARROW.format(5.06), STANDARD[TTFT][2]: _NARROW.format(596)},
    ),
}

# Microseconds of one call over paged bf16 KV in 16-token pages. Each is the median of CUDA-graph replays.
# "verify 32x4@8000" is 32 sequences with 4 query tokens each and 8000 keys before them.
KERNEL_CASES = (
    "prefill 1x8192",
    "prefill 4x1000",
    "verify 32x4@8000",
    "verify 32x4@1000",
    "decode 1@8000",
    "decode 32@8000",
    "decode 128@1000",
    "decode 1@100000",
)
FA4: dict[str, tuple[int, ...]] = {
    "31B.sliding": (514, 170, 170, 164, 20, 162, 657, 20),
    "31B.global": (7164, 520, 635, 92, 41, 632, 324, 244),
    "26B.sliding": (272, 91, 92, 89, 18, 89, 331, 18),
    "26B.global": (3560, 265, 341, 81, 30, 325, 171, 136),
    "E4B.sliding": (95, 51, 32, 32, 15, 27, 62, 15),
    "E4B.global": (1802, 139, 330, 68, 30, 321, 171, 135),
}
UNIFIED_TRITON: dict[str, tuple[int, ...]] = {
    "31B.sliding": (5536, 1499, 214, 210, 49, 208, 791, 87),
    "31B.global": (26442, 1770, 838, 122, 82, 679, 269, 774),
    "26B.sliding": (2797, 780, 113, 110, 47, 110, 402, 82),
    "26B.global": (13382, 912, 842, 117, 79, 350, 143, 775),
    "E4B.sliding": (776, 318, 54, 54, 43, 58, 66, 63),
    "E4B.global": (6947, 498, 672, 100, 79, 348, 143, 766),
}


def kernel_anchor(table: dict[str, tuple[int, ...]], shape: str, case: str) -> int | None:
    """Return the microseconds of a measured case, or None for any other case."""
    return table[shape][KERNEL_CASES.index(case)] if shape in table and case in KERNEL_CASES else None
