"""What follows the sums of a linear layer in its kernel: the parts of a split K are joined, and the epilogue is applied.

Gluon kernels call these functions too.

Shapes: M tokens · N outputs.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from culet.kernels.triton.maths import cap_tanh, gelu


@triton.jit
def finish(y, up, factor, pointers_factor, mask, softcap: tl.constexpr, EPILOGUE: tl.constexpr):
    """Apply the epilogue to float32 sums."""
    if EPILOGUE == 1:
        y = gelu(y) * up
    if EPILOGUE == 2:
        y = gelu(y) * tl.load(factor + pointers_factor, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE == 3:
        y = cap_tanh(y, softcap)
    return y


@triton.jit
def store_sums(
    total, up, rows, tokens, y, factor, parts, arrived, M, N, y_stride, factor_stride, softcap: tl.constexpr,
    SPLIT_K: tl.constexpr, KEEP_PARTS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Store sums [rows, tokens] as outputs, or as parts that the last program to arrive sums into outputs.

    `arrived` counts the programs that share these outputs. It is 0 again when they have finished.
    """
    # Gate rows past N are read because they are up rows, but their outputs are not written.
    mask = (rows < N) & (tokens < M)
    if KEEP_PARTS:
        part = y + tl.program_id(1).to(tl.int64) * M * N
        tl.store(part + tokens * y_stride + rows, total.to(y.dtype.element_ty), mask=mask)
    else:
        is_last = True
        if SPLIT_K > 1:
            place = tokens * N + rows
            width = M * N
            tl.store(parts + tl.program_id(1) * width + place, total, mask=mask)
            if EPILOGUE == 1:
                tl.store(parts + (SPLIT_K + tl.program_id(1)) * width + place, up, mask=mask)
            # Every thread has written its part before one thread counts this program, so the last to count sees all parts.
            tl.debug_barrier()
            is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLIT_K - 1
            if is_last:
                total = tl.load(parts + place, mask=mask, other=0.0, cache_modifier=".cg")
                for part in tl.static_range(1, SPLIT_K):
                    total += tl.load(parts + part * width + place, mask=mask, other=0.0, cache_modifier=".cg")
                if EPILOGUE == 1:
                    up = tl.load(parts + SPLIT_K * width + place, mask=mask, other=0.0, cache_modifier=".cg")
                    for part in tl.static_range(1, SPLIT_K):
                        up += tl.load(parts + (SPLIT_K + part) * width + place, mask=mask, other=0.0, cache_modifier=".cg")
                tl.store(arrived, 0)
        if is_last:
            out = finish(total, up, factor, tokens * factor_stride + rows, mask, softcap, EPILOGUE)
            tl.store(y + tokens * y_stride + rows, out.to(y.dtype.element_ty), mask=mask)
