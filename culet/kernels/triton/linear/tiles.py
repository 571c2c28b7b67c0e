"""Choose the kernel and tile of a linear layer for few tokens, as measured on an H200 (docs/log/linear.md).

The measurements ran sequences of the models' layers, where each launch follows the kernel that makes its input. cuBLAS handles
all other shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from culet.kernels.triton.launch import cdiv, next_power_of_2

PLAIN, GATED, GELU_TIMES, SOFTCAP = 0, 1, 2, 3  # epilogues

MAX_TOKENS = 32
MAX_HEAD_TOKENS = 128  # tokens of the head. With cuBLAS, its cap would take another kernel.
MAX_STREAM_TOKENS = 96
ENOUGH_PROGRAMS = 128  # K is split until there are this many. More parts cost more than they gain.
ENOUGH_SHORT = 80  # the same for rows of up to SHORT_K inputs, whose programs finish soon
SHORT_K = 4096
NARROW = 512  # up to this many outputs, tiles are small so that there are enough programs
MAX_BY_ROWS = 50 << 20  # weights of a matrix that is read row by row. 31B.down in tiles: a layer takes 233 instead of 244.
MAX_PARTS = 1 << 22  # float32 elements (16 MB) of the workspace in which the parts of a split K are summed
MAX_ARRIVALS = 1 << 14  # arrival counters in the workspace


@dataclass(frozen=True, slots=True)
class Tile:
    """The division of a shape among programs. `kernel` is "rows", "tiles", "stream" (Hopper) or "cublas" (use torch)."""

    kernel: str
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 1
    split_k: int = 1


def choose_tile(num_tokens: int, num_rows: int, size_k: int, epilogue: int = PLAIN) -> Tile:
    """Return the tile for `num_rows` outputs (half of the weight's rows if GATED) and `size_k` inputs."""
    if epilogue == SOFTCAP and MAX_TOKENS < num_tokens <= MAX_HEAD_TOKENS and size_k % 64 == 0:
        # E4B at 80 tokens takes 410 us. cuBLAS, which rounds to bfloat16, and the cap take 439 us.
        return Tile("tiles", 128, 64, 8, 4)
    if num_tokens > MAX_TOKENS or size_k % 64:
        return Tile("cublas")
    is_gated = epilogue == GATED
    is_small = num_rows <= 8192 and num_rows * size_k <= MAX_BY_ROWS
    by_rows = num_tokens == 1 and (is_gated or is_small or num_rows > 1 << 16)
    if by_rows or (num_tokens == 2 and num_rows <= 2560 and not is_gated):
        # With long rows of a narrow matrix, a program has fewer rows, so that there are enough programs.
        is_narrow = num_tokens == 1 and size_k > 8192 and num_rows <= 4096
        block_k = 512 if is_gated and num_rows > 4096 else 1024
        return Tile("rows", 2 if is_narrow else 4, min(block_k, next_power_of_2(size_k)))
    programs = cdiv(num_rows, 64)
    enough = ENOUGH_SHORT if size_k <= SHORT_K and not is_gated and num_rows > NARROW else ENOUGH_PROGRAMS
    split = _split(programs, enough, size_k // 128)
    if not is_gated:
        return Tile("tiles", 16 if num_rows <= NARROW else 64, 128, 4, 4, split)
    if programs < ENOUGH_PROGRAMS or (num_tokens > 16 and programs < 2 * ENOUGH_PROGRAMS):
        return Tile("tiles", 64, 64, 4, 4, split)  # two programs per multiprocessor, so that all run at once
    return Tile("tiles", 64, 128, 4, 3, split)


def _split(programs: int, wanted: int, steps: int) -> int:
    """Return the number of parts of K, a power of two up to 8. Each part has at least two of `steps` steps."""
    split = 1
    while programs * split < wanted and split < 8 and steps >= 4 * split:
        split *= 2
    return split


def choose_stream(num_tokens: int, num_rows: int, size_k: int, epilogue: int = PLAIN) -> Tile | None:
    """Return the tile of `hopper_stream` if that is faster, or None.

    Numbers in brackets in the comments are microseconds per call compared to the choice of `choose_tile`.
    """
    tile = _choose_stream(num_tokens, num_rows, size_k, epilogue)
    if tile is None or size_k % (tile.block_k * tile.split_k):
        return None
    is_joinable = tile.split_k * num_tokens * num_rows <= MAX_PARTS and 2 * cdiv(num_rows, tile.block_n) <= MAX_ARRIVALS
    return tile if tile.split_k == 1 or is_joinable else None


def _choose_stream(num_tokens: int, num_rows: int, size_k: int, epilogue: int) -> Tile | None:
    few, some = num_tokens <= 16, num_tokens <= MAX_TOKENS
    programs = cdiv(num_rows, 64)
    if epilogue == SOFTCAP:
        # E4B at 80 tokens [411 -> 354]. With fewer tokens, both are limited by memory.
        return Tile("stream", 128, 64, 4, 4) if MAX_TOKENS < num_tokens <= MAX_HEAD_TOKENS else None
    if num_tokens == 1:
        return _choose_for_one_token(programs, size_k, epilogue)
    if num_tokens > MAX_STREAM_TOKENS:
        return None
    if epilogue == GATED:
        # One to two programs per multiprocessor (of 132) should all run at once, so there are few stages.
        if 132 < programs <= 264:  # E4B at 4, 8, 48, 80 [-1.2, -1.0, -4.4, -2.8]. No better at 32.
            if few or not some:
                # Three stages were not measured. With four, only one program fits.
                return Tile("stream", 64, 64, 4, 4 if num_tokens <= 80 else 3)
            return None
        # 31B at 8, 32 [-5.1, -5.4], 26B [-1.1, -3.6]
        return Tile("stream", 64, 64, 4, 8) if some else None
    if num_tokens < 4:
        return None
    if epilogue == GELU_TIMES:  # E4B at 4, 8, 16, 32, 48 [-2.0, -0.2, -1.1, -1.5, -1.8]
        return Tile("stream", 64, 64, 4, 5, 8) if num_tokens == 8 else Tile("stream", 64, 128, 4, 4, 5)
    return _choose_plain_stream(num_tokens, programs, size_k)


def _choose_for_one_token(programs: int, size_k: int, epilogue: int) -> Tile | None:
    """Return the tile for the 12B's products on one GPU. Those of other models are faster by `choose_tile`, or no slower."""
    if size_k < 3840:
        return None
    if epilogue == GATED:  # 12B [-1.3 per layer]
        return Tile("stream", 64, 128, 4, 3) if size_k <= SHORT_K and 132 < programs <= 264 else None
    if epilogue != PLAIN:
        return None
    if size_k > 2 * SHORT_K:  # 12B.down [-1.7]
        return Tile("stream", 64, 64, 4, 5, 8) if programs <= 64 and 64 * programs * size_k > MAX_BY_ROWS else None
    # 12B.qkv [-0.6]
    return Tile("stream", 64, 128, 4, 5, 2) if size_k <= SHORT_K and ENOUGH_PROGRAMS <= programs <= 132 else None


def _choose_plain_stream(num_tokens: int, programs: int, size_k: int) -> Tile | None:
    few, some = num_tokens <= 16, num_tokens <= MAX_TOKENS
    if size_k <= 256:  # E4B's per-layer projection at 8, 16, 32, 80 [-0.8, -2.2, -0.9, -1.7]
        return Tile("stream", 64, 64, 4, 2, 2) if some else Tile("stream", 64, 128, 4, 2)
    if size_k > 2 * SHORT_K:
        if programs > 64:  # no better for 31B.down
            return None
        if some:  # E4B.down at 4, 8, 16, 32 [-2.2, -1.8, -2.5, -1.4]
            return Tile("stream", 64, 128, 4, 5, 5) if few else Tile("stream", 64, 64, 4, 8, 4)
        return Tile("stream", 64, 64, 4, 5, 4) if num_tokens <= 64 else None  # at 48 [-0.7]. At 80 cuBLAS is used.
    if size_k % 128:  # 26B.down, K 2112, at 8, 32, 80 [-0.7, -1.8, -1.1]
        return Tile("stream", 64, 64, 4, 11 if some else 6, 3)
    if programs >= ENOUGH_PROGRAMS:  # 31B.qkv at 8, 32 [-0.7, -0.9], 26B.qkv at 8, 32, 80 [-0.8, -1.4, -1.7]
        return Tile("stream", 64, 128, 4, 4) if some else Tile("stream", 64, 64, 4, 8) if programs <= 132 else None
    if few and size_k >= 2560:  # E4B.qkv at 4, 8, 16 [-0.6, -0.7, -0.7]
        return Tile("stream", 64, 64, 4, 8, 4)
    # E4B.qkv, o and 26B.o at 32 [-0.6, -0.2, -0.4], at 80 [-1.0, -0.9, -1.8]
    return Tile("stream", 64, 128, 4, 5, 2) if some else Tile("stream", 64, 64, 4, 8, 2)
