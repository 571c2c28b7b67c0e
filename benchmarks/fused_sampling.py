"""Drawing tokens and log-probabilities on the GPU against the eager sampler."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from fused_timing import BANDWIDTH, graph_us, random, report
from torch import Tensor

from culet.kernels.triton.norms import pointwise
from culet.kernels.triton.sampling import draw as sampling
from culet.kernels.types import RowSettings
from culet.sampling import sampler
from culet.sampling.logprobs import compute_logprobs
from culet.types import Sampling

VOCAB = 262144
WAYS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "top-k 64, top-p": (1.0, 64, 0.95, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "min-p": (1.2, 0, 1.0, 0.05),
}


def sampling_inputs(way: str, rows: int) -> tuple[list[Sampling], list[int], RowSettings, Tensor]:
    temperature, top_k, top_p, min_p = WAYS[way]
    seeds = torch.randint(0, 2**62, (rows,)).tolist()
    settings = [
        Sampling(temperature, top_k, top_p, min_p, 1.0, 0.0, 0.0, (), seeds[row], row % 3, None, None) for row in range(rows)
    ]
    positions = torch.randint(0, 100000, (rows,)).tolist()

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda")

    tensors = RowSettings(
        column([temperature] * rows, torch.float64),
        column([top_k] * rows, torch.int32),
        column([top_p] * rows, torch.float64),
        column([min_p] * rows, torch.float64),
        column(seeds, torch.int64),
        column([one.sample for one in settings], torch.int32),
    )
    return settings, positions, tensors, column(positions, torch.int32)


def bench_sampling(is_timed: bool = True) -> None:
    for rows in (1, 8, 32, 128) if is_timed else (1,):
        # As a head gives them: rounded to bfloat16, so that equal logits are common, and capped.
        logits = pointwise.softcap(random(rows, VOCAB, scale=6.0), 30.0)
        for way, (temperature, top_k, _, _) in WAYS.items():
            settings, positions, tensors, at = sampling_inputs(way, rows)
            ways = {"has_few": top_k > 0, "has_open": temperature > 0 and top_k == 0}
            got = sampling.draw(logits, tensors, at, **ways)
            if not is_timed:
                continue
            same = int((got == sampler.sample(logits, settings, positions)).sum())
            ours = graph_us([partial(sampling.draw, logits, tensors, at, **ways)] * 4)
            begin = time.time()
            for _ in range(5):
                sampler.sample(logits, settings, positions)
            torch.cuda.synchronize()
            floor = logits.numel() * 4 / BANDWIDTH * 1e6
            report(
                "sampling", way, rows, "", us=ours, eager=(time.time() - begin) / 5 * 1e6, floor=floor, same=f"{same}/{rows}"
            )
        chosen = torch.randint(0, VOCAB, (rows,), device="cuda")
        mine = sampling.logprobs(logits, chosen, 20)
        if is_timed:
            theirs = compute_logprobs(logits, chosen, 20)
            error = float((mine.chosen_L - theirs.chosen_L).abs().max().maximum((mine.top_LK - theirs.top_LK).abs().max()))
            is_same = bool((mine.top_ids_LK == theirs.top_ids_LK).all())
            ours = graph_us([partial(sampling.logprobs, logits, chosen, 20)] * 4)
            report("sampling", "logprobs 20", rows, "", us=ours, absolute=error, same=str(is_same))
