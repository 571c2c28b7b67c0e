"""Which kernel and tile a linear layer of few tokens uses, as measured on an H200 (docs/log/linear.md).

Measured in sequences of the models' layers, each launch after the kernel that makes its input. cuBLAS does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from culet.kernels.triton.launch import cdiv, next_power_of_2

PLAIN, GATED, GELU_TIMES, SOFTCAP = 0, 1, 2, 3  # epilogues

MAX_TOKENS = 32
MAX_HEAD_TOKENS = 128  # of the head: with cuBLAS its cap would take another kernel
MAX_STREAM_TOKENS = 96
ENOUGH_PROGRAMS = 128  # K is split until there are this many; more parts cost more than they gain
ENOUGH_SHORT = 80  # the same for rows of up to SHORT_K, whose programs finish soon
SHORT_K = 4096
NARROW = 512  # up to this many outputs, tiles are small, so that there are enough programs
MAX_PARTS = 1 << 22  # float32 elements of the workspace in which the parts of a split K are summed: 16 MB
MAX_ARRIVALS = 1 << 14  # arrival counters of the workspace


@dataclass(frozen=True, slots=True)
class Tile:
    """How a shape is divided among programs. `kernel` is "rows", "tiles", "stream" (Hopper) or "cublas" (use torch)."""

    kernel: str
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 1
    split_k: int = 1


def choose_tile(num_tokens: int, num_rows: int, size_k: int, epilogue: int = PLAIN) -> Tile:
    """The tile for a shape: `num_rows` outputs (of GATED: half the weight's rows), `size_k` inputs."""
    if epilogue == SOFTCAP and MAX_TOKENS < num_tokens <= MAX_HEAD_TOKENS and size_k % 64 == 0:
        return Tile("tiles", 128, 64, 8, 4)  # E4B at 80: 410 us; cuBLAS, which rounds to bfloat16, and the cap 439
    if num_tokens > MAX_TOKENS or size_k % 64:
        return Tile("cublas")
    is_gated = epilogue == GATED
    by_rows = num_tokens == 1 and (num_rows <= (4096 if is_gated else 8192) or num_rows > 1 << 16)
    if by_rows or (num_tokens == 2 and num_rows <= 2560 and not is_gated):
        # Long rows of a narrow matrix: fewer rows per program, so that there are enough programs.
        is_narrow = num_tokens == 1 and size_k > 8192 and num_rows <= 4096
        return Tile("rows", 2 if is_narrow else 4, min(1024, next_power_of_2(size_k)))
    programs = cdiv(num_rows, 64)
    enough = ENOUGH_SHORT if size_k <= SHORT_K and not is_gated and num_rows > NARROW else ENOUGH_PROGRAMS
    split = _split(programs, enough, size_k // 128)
    if not is_gated:
        return Tile("tiles", 16 if num_rows <= NARROW else 64, 128, 4, 4, split)
    if programs < ENOUGH_PROGRAMS or (num_tokens > 16 and programs < 2 * ENOUGH_PROGRAMS):
        return Tile("tiles", 64, 64, 4, 4, split)  # two programs per multiprocessor, so that all run at once
    return Tile("tiles", 64, 128, 4, 3, split)


def _split(programs: int, wanted: int, steps: int) -> int:
    """Parts of K, a power of two up to 8, each of at least two of `steps` steps."""
    split = 1
    while programs * split < wanted and split < 8 and steps >= 4 * split:
        split *= 2
    return split


def choose_stream(num_tokens: int, num_rows: int, size_k: int, epilogue: int = PLAIN) -> Tile | None:
    """The tile of `hopper_stream` where that is faster. In brackets: microseconds per call against `choose_tile`'s choice."""
    tile = _choose_stream(num_tokens, num_rows, size_k, epilogue)
    if tile is None or size_k % (tile.block_k * tile.split_k):
        return None
    is_joinable = tile.split_k * num_tokens * num_rows <= MAX_PARTS and 2 * cdiv(num_rows, tile.block_n) <= MAX_ARRIVALS
    return tile if tile.split_k == 1 or is_joinable else None


def _choose_stream(num_tokens: int, num_rows: int, size_k: int, epilogue: int) -> Tile | None:
    few, some = num_tokens <= 16, num_tokens <= MAX_TOKENS
    programs = cdiv(num_rows, 64)
    if epilogue == SOFTCAP:
        # E4B at 80 tokens [411 -> 354]; with fewer tokens, both are limited by memory.
        return Tile("stream", 128, 64, 4, 4) if MAX_TOKENS < num_tokens <= MAX_HEAD_TOKENS else None
    if num_tokens > MAX_STREAM_TOKENS:
        return None
    if epilogue == GATED:
        # One to two programs per multiprocessor (of 132) should all run at once: few stages.
        if 132 < programs <= 264:  # E4B at 1, 4, 8, 48, 80 [-0.4, -1.2, -1.0, -4.4, -2.8]; at 32 no better
            if few or not some:
                return Tile("stream", 64, 64, 4, 4 if num_tokens <= 80 else 3)  # three: not measured; with four only one fits
            return None
        # 31B at 8, 32 [-5.1, -5.4], 26B [-1.1, -3.6]
        return Tile("stream", 64, 64, 4, 8) if some and num_tokens > 1 else None
    if num_tokens < 4:
        return None
    if epilogue == GELU_TIMES:  # E4B at 4, 8, 16, 32, 48 [-2.0, -0.2, -1.1, -1.5, -1.8]
        return Tile("stream", 64, 64, 4, 5, 8) if num_tokens == 8 else Tile("stream", 64, 128, 4, 4, 5)
    return _choose_plain_stream(num_tokens, programs, size_k)


def _choose_plain_stream(num_tokens: int, programs: int, size_k: int) -> Tile | None:
    few, some = num_tokens <= 16, num_tokens <= MAX_TOKENS
    if size_k <= 256:  # E4B's per-layer projection at 8, 16, 32, 80 [-0.8, -2.2, -0.9, -1.7]
        return Tile("stream", 64, 64, 4, 2, 2) if some else Tile("stream", 64, 128, 4, 2)
    if size_k > 2 * SHORT_K:
        if programs > 64:  # 31B.down: no better
            return None
        if some:  # E4B.down at 4, 8, 16, 32 [-2.2, -1.8, -2.5, -1.4]
            return Tile("stream", 64, 128, 4, 5, 5) if few else Tile("stream", 64, 64, 4, 8, 4)
        return Tile("stream", 64, 64, 4, 5, 4) if num_tokens <= 64 else None  # at 48 [-0.7]; at 80 cuBLAS
    if size_k % 128:  # 26B.down, K 2112, at 8, 32, 80 [-0.7, -1.8, -1.1]
        return Tile("stream", 64, 64, 4, 11 if some else 6, 3)
    if programs >= ENOUGH_PROGRAMS:  # 31B.qkv at 8, 32 [-0.7, -0.9]; 26B.qkv at 8, 32, 80 [-0.8, -1.4, -1.7]
        return Tile("stream", 64, 128, 4, 4) if some else Tile("stream", 64, 64, 4, 8) if programs <= 132 else None
    if few and size_k >= 2560:  # E4B.qkv at 4, 8, 16 [-0.6, -0.7, -0.7]
        return Tile("stream", 64, 64, 4, 8, 4)
    # E4B.qkv, o and 26B.o at 32 [-0.6, -0.2, -0.4], at 80 [-1.0, -0.9, -1.8]
    return Tile("stream", 64, 128, 4, 5, 2) if some else Tile("stream", 64, 64, 4, 8, 2)
