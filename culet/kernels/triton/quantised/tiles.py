"""Choose the kernel and tile of a linear layer over quantised weights, as measured on an H200 (docs/log/quantised.md)."""

from __future__ import annotations

from dataclasses import dataclass

from culet.kernels.triton.launch import cdiv
from culet.kernels.triton.linear.tiles import GATED, MAX_ARRIVALS, MAX_PARTS, PLAIN, SOFTCAP, Tile
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.unpack import FP8, INT4, INT8, NVFP4
from culet.kernels.types import FP8_BLOCK

MAX_BITS_TOKENS = 8  # at 12 and 16, `hopper_stream` is 17 to 28 % faster
MAX_STREAM_TOKENS = 32
MAX_WARP_TOKENS = 16
MAX_TILE_TOKENS = 128  # With more, cuBLAS and a dequantised copy are faster. A copy of the head would take gigabytes.
STREAM_PROGRAMS = 200  # K is split until there are this many, with up to 8 tokens.
RESIDENT_PROGRAMS = 264  # two on each of 132 multiprocessors. With more tokens, more programs would run in a second wave.
STREAM_BYTES = 2.5e6  # Smaller matrices of 4-bit weights are faster by `warps`.
BITS_BYTES = 26e6, 20e6  # Smaller matrices are faster by `hopper_stream` than by `hopper_bits`: up to 4 tokens, and more.
STREAM_GROUP = 32  # inputs per scale of int4. A row of a tile's scales must be 16 bytes.
NUM_WARPS = {4: 1200, 8: 2400}  # that should run at once, by the bits of a weight
MAX_SPLIT = 16
MOST_PARTS = 8  # With more parts of K, `hopper_bits` does not split it if there are ENOUGH_PROGRAMS.
ENOUGH_PROGRAMS = 120


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

    def _splits(self, steps: int, programs: int) -> list[int]:
        """Return the numbers of equal parts into which `steps` can be split."""
        most = min(steps, MAX_SPLIT) if programs <= MAX_ARRIVALS else 1
        return [1, *(parts for parts in range(2, most + 1) if steps % parts == 0 and self.split_fits(parts))]

    def split(self, steps: int, programs: int, wanted: int) -> int:
        """Return the fewest equal parts of `steps` that make `wanted` programs, or the most that fit."""
        splits = self._splits(steps, programs)
        return next((parts for parts in splits if programs * parts >= wanted), splits[-1])

    def most_resident(self, steps: int, programs: int) -> int:
        """Return the most equal parts of `steps` whose programs all run at once."""
        return max((parts for parts in self._splits(steps, programs) if programs * parts <= RESIDENT_PROGRAMS), default=1)


def choose_hopper(product: Product, matrix: PackedMatrix) -> Tile | None:
    """Return the tile of the faster Hopper kernel, or None if neither supports the matrix or both are slower."""
    return choose_bits(product, matrix) or choose_stream(product, matrix)


def choose_bits(product: Product, matrix: PackedMatrix) -> Tile | None:
    """Return the tile for `hopper_bits`, or None if that kernel cannot multiply this matrix or would be slower."""
    if product.num_tokens > MAX_BITS_TOKENS or matrix.num_columns % 256 or not has_stream_groups(matrix):
        return None
    few, steps = product.num_tokens <= 4, matrix.num_columns // 256
    is_small = matrix.words.numel() * 4 < BITS_BYTES[0 if few else 1]
    programs = cdiv(product.num_rows, 64)
    split = product.split(steps, programs, STREAM_PROGRAMS)
    if product.epilogue == GATED:
        if is_small or (split == 1 and programs <= RESIDENT_PROGRAMS):  # 12B: 58.2 by `hopper_stream` instead of 59.3
            return None
        if split == 1:
            return Tile("bits", 64, 256, 4, 2)
        # With half the rows, a split, which writes gate and up as parts, is rare.
        return Tile("bits", 32, 256, 4, 3, product.split(steps, cdiv(product.num_rows, 32), STREAM_PROGRAMS))
    if split > MOST_PARTS and programs >= ENOUGH_PROGRAMS:
        split = 1  # q/k/v of the 26B, with 11 steps
    elif is_small:
        return None
    # Programs of the next kernel slow this one down. Six stages leave them no shared memory.
    is_crowded = programs * split <= RESIDENT_PROGRAMS and (split > 1 or not few)
    return Tile("bits", 64, 256, 4, 6 if is_crowded else 4, split)


def has_stream_groups(matrix: PackedMatrix) -> bool:
    """Return whether the Hopper kernels can fetch the scales of an int4 matrix with its weights."""
    has_groups = matrix.format == INT4 and matrix.group == STREAM_GROUP
    return has_groups and matrix.zero is None and matrix.scale.element_size() == 2


def choose_stream(product: Product, matrix: PackedMatrix) -> Tile | None:
    """Return the tile of `hopper_stream`, or None if that does not support the matrix or is slower."""
    is_wide = matrix.format in (INT8, FP8)
    block_k = 128 if is_wide else 256
    if product.num_tokens > MAX_STREAM_TOKENS or matrix.num_columns % block_k or not _can_stream(product, matrix):
        return None
    few, steps = product.num_tokens <= 8, matrix.num_columns // block_k
    if few and not is_wide and matrix.words.numel() * 4 < STREAM_BYTES:
        return None
    programs = cdiv(product.num_rows, 64)
    if product.epilogue == GATED:
        split = product.split(steps, programs, STREAM_PROGRAMS)
        has_room = not is_wide or (few and programs * split <= RESIDENT_PROGRAMS)
        return Tile("stream", 64, block_k, 4, 3 if has_room else 2, split)
    if few:
        return Tile("stream", 64, block_k, 4, 5 if is_wide else 3, product.split(steps, programs, STREAM_PROGRAMS))
    if is_wide and programs <= RESIDENT_PROGRAMS:
        return Tile("stream", 64, block_k, 4, 5, product.most_resident(steps, programs))
    programs = cdiv(product.num_rows, 128)
    if is_wide or 100 < programs <= 132:
        return Tile("stream", 128, block_k, 4, 4 if is_wide else 8)
    split = product.most_resident(steps, programs)
    return Tile("stream", 128, block_k, 4, 3, 3 if split == 1 and steps % 3 == 0 and product.split_fits(3) else split)


def _can_stream(product: Product, matrix: PackedMatrix) -> bool:
    if matrix.format == INT4:
        return has_stream_groups(matrix)
    if matrix.format == INT8:
        return matrix.group == matrix.num_columns
    return matrix.format == NVFP4 or not matrix.has_blocks or product.num_rows % FP8_BLOCK == 0


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
    if product.num_tokens > MAX_TILE_TOKENS and product.epilogue != SOFTCAP:
        return None
    block_n, num_warps = (64, 4) if product.num_tokens <= 32 or product.epilogue == GATED else (128, 8)
    steps = cdiv(matrix.num_columns, 128)
    programs = cdiv(product.num_rows, block_n)
    split = 1
    while programs * split < 128 and steps >= 4 * split and product.split_fits(2 * split):
        split *= 2
    return Tile("tiles", block_n, 128, num_warps, 3, split)
