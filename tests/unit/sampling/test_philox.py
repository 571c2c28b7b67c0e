"""Random numbers: Philox compared with published vectors and with Triton's, and the meaning of key and counter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from culet.sampling.philox import philox, uniforms

# Known answers published with the Random123 library (philox4x32, 10 rounds): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox(key, counter) == expected
    assert tuple(int(word[0]) for word in philox(words(*key), words(*counter))) == expected


def test_few_and_many_draws_agree():
    seeds, samples, positions = [7, 2**64 - 1, 2**32] * 40, list(range(120)), [index * 2000 for index in range(120)]
    one_by_one = [uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, samples, positions, strict=True)]
    assert uniforms(seeds, samples, positions) == one_by_one


def test_uniform_is_built_from_the_first_two_words():
    seed, sample, position = 0x0123456789ABCDEF, 3, 4711
    x0, x1, _, _ = (int(word[0]) for word in philox(words(0x89ABCDEF, 0x01234567), words(position, sample, 0, 0)))
    expected = ((x0 >> 5) * 2**26 + (x1 >> 6)) / 2**53
    assert uniforms([seed], [sample], [position])[0] == expected


def test_every_part_of_the_key_matters():
    base = (7, 0, 10)
    others = [(8, 0, 10), (7 + 2**32, 0, 10), (7, 1, 10), (7, 0, 11), (2**64 - 1, 0, 10)]
    draws = uniforms(*zip(base, *others, strict=True))
    assert len(set(draws)) == len(draws)
    assert draws[0] == uniforms(*zip(base, strict=True))[0]


def test_uniforms_are_uniform():
    count = 20_000
    draws = np.array(uniforms([5] * count, [0] * count, range(count)))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    observed = np.histogram(draws, bins=50, range=(0, 1))[0]
    chi_squared = ((observed - count / 50) ** 2 / (count / 50)).sum()
    assert chi_squared < 95  # 49 degrees of freedom; chance exceeds this once in 10,000
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


TRITON_PROGRAM = """
import json, sys
import torch, triton
import triton.language as tl

@triton.jit
def kernel(out, seeds, samples, positions, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    seed, sample, position = tl.load(seeds + index), tl.load(samples + index), tl.load(positions + index)
    x0, x1, x2, x3 = tl.philox(seed, position, sample, sample * 0, sample * 0)
    tl.store(out + index, x0.to(tl.int64))
    tl.store(out + SIZE + index, x1.to(tl.int64))
    tl.store(out + 2 * SIZE + index, x2.to(tl.int64))
    tl.store(out + 3 * SIZE + index, x3.to(tl.int64))

seeds, samples, positions = json.loads(sys.argv[1])
device = sys.argv[2]
out = torch.zeros(4, len(seeds), dtype=torch.int64, device=device)
narrow = [torch.tensor(values, dtype=torch.int32, device=device) for values in (samples, positions)]
kernel[(1,)](out, torch.tensor(seeds, device=device), *narrow, SIZE=len(seeds))
print(json.dumps((out & 0xFFFFFFFF).tolist()))
"""


def test_matches_triton(tmp_path):
    """`tl.philox` gives the same words, on the GPU or in Triton's interpreter."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    program = tmp_path / "program.py"
    program.write_text(TRITON_PROGRAM)
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 17, 2**63 - 1, 123456789012345]
    samples, positions = list(range(8)), [0, 5, 1000, 262143, 17, 2**31 - 1, 3, 9]
    # Triton decides at import whether to interpret, so this runs in a separate process.
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    command = [sys.executable, str(program), json.dumps([seeds, samples, positions]), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seed, zero = np.array(seeds, np.uint64), np.zeros(8, np.uint64)
    key = (seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32))
    expected = philox(key, (np.array(positions, np.uint64), np.array(samples, np.uint64), zero, zero))
    assert json.loads(done.stdout) == [word.tolist() for word in expected]
