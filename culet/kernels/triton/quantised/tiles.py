"""Choose the kernel and tile of a linear layer over quantised weights, as measured on an H200 (docs/log/quantised.md)."""

from __future__ import annotations

from dataclasses import dataclass

from culet.kernels.triton.launch import cdiv
from culet.kernels.triton.linear.tiles import GATED, MAX_ARRIVALS, MAX_PARTS, PLAIN, Tile
from culet.kernels.triton.quantised.packed import BLOCK, PackedMatrix
from culet.kernels.triton.quantised.unpack import FP8, INT4, INT8, NVFP4

MAX_STREAM_TOKENS = 32
MAX_WARP_TOKENS = 16
MAX_TILE_TOKENS = 256  # With more, cuBLAS and a dequantised copy are faster.
STREAM_PROGRAMS = 200  # K is split until there are this many.
STREAM_BYTES = 30e6  # Smaller matrices of 4-bit weights are faster by `warps`.
STREAM_GROUP = 32  # inputs per scale of int4. A row of a tile's scales must be 16 bytes.
NUM_WARPS = {4: 1200, 8: 2400}  # that should run at once, by the bits of a weight
MAX_SPLIT = 16


@dataclass(frozen=True, slots=True)
class Product:
    """What the choice depends on."""

    num_tokens: int
    num_rows: int  # half of the weight's rows if GATED
    epilogue: int = PLAIN

    def split_fits(self, split: int) -> bool:
        """Return whether the parts of K fit into the workspace."""
        planes = split * (2 if self.epilogue == GATED else 1)
        return split <= MAX_SPLIT and planes * self.num_tokens * self.num_rows <= MAX_PARTS

    def split(self, steps: int, programs: int, wanted: int) -> int:
        """Return the fewest equal parts of `steps` that make `wanted` programs, or the most that fit."""
        fitting = [1]
        for parts in range(2, min(steps, MAX_SPLIT) + 1):
            if steps % parts == 0 and self.split_fits(parts) and programs <= MAX_ARRIVALS:
                fitting.append(parts)
        return next((parts for parts in fitting if programs * parts >= wanted), fitting[-1])


def choose_stream(product: Product, matrix: PackedMatrix) -> Tile | None:
    """Return the tile of `hopper_stream`, or None if that does not support the matrix or is slower."""
    is_wide = matrix.format in (INT8, FP8)
    block_k = 128 if is_wide else 256
    if product.num_tokens > MAX_STREAM_TOKENS or matrix.num_columns % block_k or not _can_stream(product, matrix):
        return None
    is_gated, few = product.epilogue == GATED, product.num_tokens <= 8
    if few and not is_wide and matrix.words.numel() * 4 < STREAM_BYTES:
        return None
    steps = matrix.num_columns // block_k
    if is_gated or is_wide or few:
        programs = cdiv(product.num_rows, 64)
        stages = 3 if is_gated else 5 if is_wide else 4
        return Tile("stream", 64, block_k, 4, stages, product.split(steps, programs, STREAM_PROGRAMS))
    programs = cdiv(product.num_rows, 128)
    num_warps = 4 if programs > 100 else 8
    return Tile("stream", 128, block_k, num_warps, 8, product.split(steps, programs, STREAM_PROGRAMS // 2))


def _can_stream(product: Product, matrix: PackedMatrix) -> bool:
    if matrix.format == INT4:
        return matrix.group == STREAM_GROUP and matrix.zero is None and matrix.scale.element_size() == 2
    if matrix.format == INT8:
        return matrix.group == matrix.num_columns
    return matrix.format == NVFP4 or not matrix.has_blocks or product.num_rows % BLOCK == 0


def choose_warps(product: Product, matrix: PackedMatrix) -> Tile | None:
    """Return the tile of `warps`, or None if that does not support the matrix or is slower."""
    size_k, is_wide = matrix.num_columns, matrix.format in (INT8, FP8)
    block_k = next((size for size in (256, 128, 64) if size_k % size == 0 and _divides(size, matrix)), 0)
    if product.num_tokens > MAX_WARP_TOKENS or not block_k:
        return None
    programs = cdiv(product.num_rows, 64)
    wanted = NUM_WARPS[8 if is_wide else 4] // 4
    return Tile("warps", 64, block_k, 4, 1, product.split(size_k // block_k, programs, wanted))


def _divides(block_k: int, matrix: PackedMatrix) -> bool:
    """Return whether a step of `block_k` inputs has whole groups, or is within one."""
    return block_k % matrix.group == 0 or matrix.group % block_k == 0


def choose_tile(product: Product, matrix: PackedMatrix) -> Tile | None:
    """Return the tile of the kernel that supports every matrix and GPU, or None if there are too many tokens for it."""
    if product.num_tokens > MAX_TILE_TOKENS:
        return None
    block_n, num_warps = (64, 4) if product.num_tokens <= 32 or product.epilogue == GATED else (128, 8)
    steps = cdiv(matrix.num_columns, 128)
    programs = cdiv(product.num_rows, block_n)
    split = 1
    while programs * split < 128 and steps >= 4 * split and product.split_fits(2 * split):
        split *= 2
    return Tile("tiles", block_n, 128, num_warps, 3, split)
