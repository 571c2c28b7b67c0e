"""Would a latent of 512 lanes, without the rotated keys, make decode faster? A trial with kernels of its own.

Culet stores a global layer's K and V as rows of 640 lanes: v_rot (128), nope (384) and k_rot (128). The k_rot lanes follow
from v_rot: they are its product with the norm's weights, rotated by the position. This script times a decode kernel that reads
640 lanes, one that reads 512 and rebuilds k_rot, and one that reads 512 and uses v_rot as it is. The last is wrong. It shows
how much time the bytes alone could save. The angles of a key are those of the first key of its tile plus those of its place in
the tile, so only 1 KB of cosines and sines is read per tile.

Results are compared with float32 attention over keys that were rotated in float64. Run on a GPU:

    python benchmarks/kernels/latent_512.py
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROT, NOPE, THETA = 128, 384, 1e6
GROUP, M = 8, 16  # query heads of a KV head, and rows of a tile
CASES = {  # name: sequences, KV heads, keys
    "31B 32@8000": (32, 4, 8000),
    "31B 1@100000": (1, 4, 100_000),
    "26B-A4B 32@8000": (32, 2, 8000),
    "26B-A4B 1@100000": (1, 2, 100_000),
}
STORED, REBUILT, SKIPPED = 0, 1, 2  # what the kernel does for k_rot


@triton.jit
def _decode(
    Q, ROWS, WEIGHT, BASE, PLACES, OUT, LSE, num_keys, keys_per_split,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Attend the GROUP queries of one sequence and KV head to the keys of one split."""
    head, split = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, 128)
    row = tl.arange(0, M)
    query = Q + (head * GROUP + row % GROUP)[:, None] * 512 + column[None, :]
    q_0, q_1, q_2, q_rot = tl.load(query), tl.load(query + 128), tl.load(query + 256), tl.load(query + 384)
    o_0 = tl.zeros([M, 128], tl.float32)
    o_1, o_2, o_3 = o_0, o_0, o_0
    top = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    place = tl.arange(0, BN)
    rows = ROWS + head.to(tl.int64) * num_keys * WIDTH
    if KIND == 1:
        table = PLACES + place[:, None] * 256 + column[None, :]
        place_cos, place_sin = tl.load(table), tl.load(table + 128)
        weight, swapped_weight = tl.load(WEIGHT + column), tl.load(WEIGHT + (column ^ 64))
        swapped_weight = tl.where(column < 64, -swapped_weight, swapped_weight)
    for first in range(split * keys_per_split, tl.minimum((split + 1) * keys_per_split, num_keys), BN):
        key = first + place
        cell = rows + tl.minimum(key, num_keys - 1)[:, None] * WIDTH + column[None, :]
        v_rot, n_0, n_1, n_2 = tl.load(cell), tl.load(cell + 128), tl.load(cell + 256), tl.load(cell + 384)
        if KIND == 0:
            k_rot = tl.load(cell + 512)
        elif KIND == 1:
            swapped = tl.load(rows + tl.minimum(key, num_keys - 1)[:, None] * WIDTH + (column ^ 64)[None, :])
            base = BASE + (first // BN) * 256 + column
            base_cos, base_sin = tl.load(base)[None, :], tl.load(base + 128)[None, :]
            cos = base_cos * place_cos - base_sin * place_sin
            sin = base_sin * place_cos + base_cos * place_sin
            turned = v_rot * weight[None, :] * cos + swapped * swapped_weight[None, :] * sin
            k_rot = turned.to(v_rot.dtype)
        else:
            k_rot = v_rot
        score = tl.dot(q_0, tl.trans(n_0)) + tl.dot(q_1, tl.trans(n_1))
        score += tl.dot(q_2, tl.trans(n_2)) + tl.dot(q_rot, tl.trans(k_rot))
        score = tl.where((key < num_keys)[None, :], score * 1.4426950408889634, -1e30)
        new_top = tl.maximum(top, tl.max(score, 1))
        weights = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
        p = weights.to(v_rot.dtype)
        o_0 = tl.dot(p, v_rot, o_0 * shrink[:, None])
        o_1 = tl.dot(p, n_0, o_1 * shrink[:, None])
        o_2 = tl.dot(p, n_1, o_2 * shrink[:, None])
        o_3 = tl.dot(p, n_2, o_3 * shrink[:, None])
    place_of = (head * tl.num_programs(1) + split) * GROUP + row
    out = OUT + place_of[:, None] * 512 + column[None, :]
    is_valid = (row < GROUP)[:, None]
    tl.store(out, o_0 / total[:, None], is_valid)
    tl.store(out + 128, o_1 / total[:, None], is_valid)
    tl.store(out + 256, o_2 / total[:, None], is_valid)
    tl.store(out + 384, o_3 / total[:, None], is_valid)
    tl.store(LSE + place_of, top + tl.log2(total), row < GROUP)


def angles(positions: Tensor) -> Tensor:
    """Return cosines and sines of the 128 rotated lanes at each position, in float32."""
    frequencies = THETA ** (-torch.arange(64, dtype=torch.float64, device=positions.device) * 2 / 512)
    turns = (positions.double()[:, None] * frequencies).repeat(1, 2)
    return torch.cat([turns.cos(), turns.sin()], 1).float()


def rotated(v_rot: Tensor, weight: Tensor) -> Tensor:
    """Return k_rot in float64 from v_rot (one row per position)."""
    table = angles(torch.arange(v_rot.shape[-2], device=v_rot.device)).double()
    scaled = v_rot.double() * weight.double()
    swapped = torch.cat([-scaled[..., 64:], scaled[..., :64]], -1)
    return scaled * table[:, :128] + swapped * table[:, 128:]


def attend_f32(q: Tensor, rows: Tensor, k_rot: Tensor) -> Tensor:
    """Return the float32 attention of each KV head's queries."""
    keys = torch.cat([rows[..., 128:512].float(), k_rot.float()], -1)
    weights = torch.softmax(q.float() @ keys.transpose(-1, -2), -1)
    return weights @ rows[..., :512].float()


class Trial:
    """The inputs of one case."""

    def __init__(self, num_seqs: int, num_heads: int, num_keys: int) -> None:
        self.count, self.num_keys = num_seqs * num_heads, num_keys
        generator = torch.Generator("cuda").manual_seed(1)
        normal: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.weight = 1 + 0.1 * torch.randn(128, device="cuda", generator=generator)
        self.rows = torch.empty(self.count, num_keys, 640, device="cuda", dtype=torch.bfloat16)
        self.q = torch.randn(self.count, GROUP, 512, **normal) * 0.06
        for rows in self.rows:  # one at a time, because float64 takes four times the memory
            rows[:, :512] = torch.randn(num_keys, 512, **normal)
            rows[:, 512:] = rotated(rows[:, :128], self.weight).bfloat16()
        self.narrow = self.rows[..., :512].contiguous()

    def launch(self, kind: int, keys: int, num_warps: int, num_stages: int, num_splits: int) -> tuple[Tensor, Tensor, Any]:
        """Return the partial outputs, their log-sums and the function that computes them with tiles of `keys`."""
        rows = self.rows if kind == STORED else self.narrow
        per_split = triton.cdiv(triton.cdiv(self.num_keys, num_splits), keys) * keys
        num_splits = triton.cdiv(self.num_keys, per_split)
        base = angles(torch.arange(0, self.num_keys, keys, device="cuda"))
        places = angles(torch.arange(keys, device="cuda"))
        o = torch.empty(self.count, num_splits, GROUP, 512, device="cuda")
        lse = torch.empty(self.count, num_splits, GROUP, device="cuda")

        def run() -> None:
            _decode[(self.count, num_splits)](
                self.q, rows, self.weight, base, places, o, lse, self.num_keys, per_split,
                KIND=kind, WIDTH=rows.shape[-1], BN=keys, M=M, GROUP=GROUP, num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip

        return o, lse, run

    def error(self, o: Tensor, lse: Tensor) -> float:
        """Return the largest relative error of a row, against float32 over the exact keys."""
        joined = (o * torch.softmax(lse * 0.6931471805599453, 1)[..., None]).sum(1)
        worst = 0.0
        for head in range(0, self.count, max(1, self.count // 4)):
            exact = attend_f32(self.q[head], self.rows[head], rotated(self.rows[head, :, :128], self.weight))
            worst = max(worst, ((joined[head] - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item())
        return worst


def main() -> None:
    """Print the best time of each kernel in each case, with its error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all results to this file")
    arguments = parser.parse_args()
    results = []
    for name, (num_seqs, num_heads, num_keys) in CASES.items():
        trial = Trial(num_seqs, num_heads, num_keys)
        for kind, label in ((STORED, "640 lanes"), (REBUILT, "512, k_rot rebuilt"), (SKIPPED, "512, k_rot wrong")):
            best: dict[str, Any] = {"us": float("inf")}
            for keys, num_warps, num_stages in itertools.product((32, 64), (4, 8), (2, 3)):
                for waves in (1, 2, 4):
                    num_splits = max(1, waves * torch.cuda.get_device_properties(0).multi_processor_count // trial.count)
                    o, lse, run = trial.launch(kind, keys, num_warps, num_stages, num_splits)
                    try:
                        run()
                        us = 1e3 * triton.testing.do_bench_cudagraph(run, rep=8)
                    except triton.runtime.errors.OutOfResources:
                        continue
                    if us < best["us"]:
                        shape = {"keys": keys, "num_warps": num_warps, "num_stages": num_stages, "num_splits": o.shape[1]}
                        best = {"case": name, "kernel": label, "us": us, "error": trial.error(o, lse), **shape}
            width = 640 if kind == STORED else 512
            rate = trial.count * num_keys * width * 2 / best["us"] / 1e6
            print(f"{name:18} {label:20} {best['us']:8.1f} us {rate:5.2f} TB/s error {best['error']:.1e} {best}", flush=True)
            results.append({**best, "tb_per_s": rate})
        del trial
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
