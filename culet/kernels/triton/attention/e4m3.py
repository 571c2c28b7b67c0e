"""Read e4m3 pages in the attention kernels."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.types import PagedKV


@triton.jit
def widen(x, dtype: tl.constexpr, BY_HAND: tl.constexpr):
    """Convert keys or values to the queries' dtype.

    BY_HAND converts e4m3 to bfloat16 with bit operations. They move sign, exponent and mantissa into place, then multiply by
    2^120 to correct for the different exponent biases. The compiler cannot look inside this code. It would move a plain cast of
    latent rows, which are both keys and values, behind their two layouts in shared memory and stop prefetching tiles. With the
    31B at 32@8000 on an H200, a plain cast takes 540 us and BY_HAND takes 362 us.
    """
    if BY_HAND:
        x = tl.inline_asm_elementwise(
            """{
            .reg .b32 t<6>;
            mov.b32 t4, 0x7b807b80;
            mov.b32 t5, 0x80008000;
            prmt.b32 t0, $2, 0, 0x1404;
            prmt.b32 t1, $2, 0, 0x3424;
            and.b32 t2, t0, 0x7f007f00;
            and.b32 t3, t1, 0x7f007f00;
            shr.b32 t2, t2, 4;
            shr.b32 t3, t3, 4;
            lop3.b32 t2, t0, t5, t2, 0xea;
            lop3.b32 t3, t1, t5, t3, 0xea;
            fma.rn.bf16x2 $0, t2, t4, t5;
            fma.rn.bf16x2 $1, t3, t4, t5;
            }""",
            "=r,=r,r",
            [x.to(tl.int8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    return x.to(dtype)


def widens_by_hand(q_TNH: Tensor, kv: PagedKV) -> bool:
    """Return whether the pages are e4m3 latents and queries are bfloat16 on a GPU. Separate K and V would gain nothing."""
    is_narrow = kv.is_latent and kv.planes.element_size() == 1
    return is_narrow and q_TNH.dtype == torch.bfloat16 and q_TNH.device.type != "cpu"
