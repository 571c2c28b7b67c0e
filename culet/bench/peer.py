"""The results of the strongest peer on one H200, for the rows of `culet bench`. No torch.

The peer is vLLM 0.24.0 (torch 2.11, triton 3.6; torch.compile, full and piecewise CUDA graphs, prefix cache off, bf16,
gpu_memory_utilization 0.92, max_num_seqs 128, max_num_batched_tokens 8192, max_model_len 34000) with its own FlashAttention-4
fork for every layer. It runs only the text decoder, with random weights at the real dimensions. docs/guides/benchmarks.md
describes how it was timed.
"""

from __future__ import annotations

from dataclasses import dataclass

from culet.bench.workloads import STANDARD, START, TPOT, TTFT, Workload

PEER = "vLLM 0.24"
GPU = "H200"  # these numbers are comparable only with this GPU


@dataclass(frozen=True)
class Anchor:
    """The peer's number for a row, and Culet's goal."""

    peer: float | None  # None if not measured or not comparable
    goal: float
    note: str = ""


_SHARED_EXPERTS = "the peer's {} was measured with weights for which all tokens share their experts, so it is not comparable"


def _anchors(
    tpot: tuple[float, ...],
    ttft: tuple[float, ...],
    throughput: tuple[float, float],
    start: float,
    goals: tuple[float, ...],
    notes: dict[Workload, float] | None = None,
) -> dict[Workload, Anchor]:
    """Return the anchors by row. `goals` are in the order tpot, ttft, chat, summarise, start."""
    rows = [*STANDARD[TPOT], *STANDARD[TTFT], *STANDARD["chat"], *STANDARD["summarise"], *STANDARD[START]]
    numbers = (*tpot, *ttft, *throughput, start)
    anchors = {row: Anchor(number, goal) for row, number, goal in zip(rows, numbers, goals, strict=True)}
    for row, number in (notes or {}).items():
        anchors[row] = Anchor(None, anchors[row].goal, _SHARED_EXPERTS.format(number))
    return anchors


# TPOT at 1, 8 and 32 sequences and at 32,000 tokens. TTFT at 1k, 8k and 32k. Chat and summarise. Start (cold).
SERVING: dict[str, dict[Workload, Anchor]] = {
    "31B": _anchors(
        (18.1, 19.8, 28.7, 18.8),
        (87, 734, 3788),
        (1184, 588),
        141,
        goals=(16.2, 17.8, 24.0, 16.6, 85, 700, 3400, 1600, 720, 20),
    ),
    "26B-A4B": _anchors(
        (4.34, 8.63, 15.6, 4.62),
        (41, 140, 714),
        (3524, 2147),
        237,
        goals=(2.3, 6.6, 13.4, 2.5, 25, 110, 500, 4100, 2800, 20),
        notes={STANDARD[TPOT][3]: 4.62, STANDARD[TTFT][2]: 714},
    ),
    "E4B": _anchors(
        (4.78, 5.00, 6.06, 5.06),
        (27, 114, 596),
        (8904, 3480),
        152,
        goals=(2.7, 2.8, 3.3, 3.0, 10, 62, 300, 16000, 6500, 15),
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
