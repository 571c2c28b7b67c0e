"""The likeliest token of a head in e4m3: one pass over the table, which leaves the best of each tile, and their best.

Half the bytes of a bfloat16 table, and no logits are written. The table's values are widened to the activations' precision,
multiplied on the tensor cores, and scaled row by row.
Shapes: R rows · V vocabulary · D model · C tiles of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.chain import enter, is_chained, options
from culet.kernels.triton.launch import Launch

TILE_V = 64
BLOCK_R = 16  # the least that the tensor cores take
BLOCK_D = 256


@triton.jit(do_not_specialize=["num_rows", "V"])
def _best_kernel(
    x, table, scale, peaks, ids, num_rows, V, D, num_tiles,
    TILE_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """peaks[r, c], ids[r, c] = the largest logit of tile c, and whose it is; the lowest id of equal ones."""
    tile = tl.program_id(0)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    sums = tl.zeros([TILE_V, BLOCK_R], tl.float32)
    enter(PDL)
    for begin in tl.range(0, D, BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        weights = tl.load(
            table + token.to(tl.int64)[:, None] * D + column[None, :],
            mask=(token < V)[:, None] & (column < D)[None, :],
            other=0.0,
        )
        states = tl.load(
            x + row[None, :] * D + column[:, None], mask=(row < num_rows)[None, :] & (column < D)[:, None], other=0.0
        )
        sums += tl.dot(weights.to(states.dtype), states, out_dtype=tl.float32, input_precision="ieee")
    sums *= tl.load(scale + token, mask=token < V, other=0.0)[:, None]
    sums = tl.where((token < V)[:, None], sums, float("-inf"))
    best = tl.max(sums, 0)
    first = tl.min(tl.where(sums == best[None, :], token[:, None], V - 1), 0)
    place = row * num_tiles + tile
    tl.store(peaks + place, best, mask=row < num_rows)
    tl.store(ids + place, first.to(tl.int64), mask=row < num_rows)


def describe_best(x_RD: Tensor, table_VD: Tensor, scale_V: Tensor, out: tuple[Tensor, Tensor], pdl: bool) -> Launch:
    """`out` is (peaks, ids), both [R, C]."""
    (num_rows, size), num_tokens = x_RD.shape, table_VD.shape[0]
    peaks, ids = out
    arguments: dict[str, Any] = {"x": x_RD, "table": table_VD, "scale": scale_V, "peaks": peaks, "ids": ids}
    arguments |= {"num_rows": num_rows, "V": num_tokens, "D": size, "num_tiles": peaks.shape[1], "PDL": pdl}
    arguments |= {"TILE_V": TILE_V, "BLOCK_R": BLOCK_R, "BLOCK_D": BLOCK_D}
    return Launch(_best_kernel, (peaks.shape[1], triton.cdiv(num_rows, BLOCK_R)), arguments, options(4, pdl))


def best_of_head(x_RD: Tensor, table_VD: Tensor, scale_V: Tensor) -> Tensor:
    """argmax over v of scale[v] * (x @ table[v]), int64 [R]; the table is e4m3."""
    shape, device = (x_RD.shape[0], triton.cdiv(table_VD.shape[0], TILE_V)), x_RD.device
    peaks_RC = torch.empty(shape, dtype=torch.float32, device=device)
    ids_RC = torch.empty(shape, dtype=torch.int64, device=device)
    describe_best(x_RD.contiguous(), table_VD, scale_V, (peaks_RC, ids_RC), is_chained(device)).run()
    return ids_RC.gather(-1, peaks_RC.argmax(dim=-1, keepdim=True)).squeeze(-1)
