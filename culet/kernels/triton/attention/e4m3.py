"""How the attention kernels read e4m3 pages."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.types import PagedKV


@triton.jit
def widen(x, dtype: tl.constexpr, BY_HAND: tl.constexpr):
    """Convert keys or values to the queries' dtype. BY_HAND converts e4m3 to bfloat16 with bit operations: move sign, exponent
    and mantissa to their places, then multiply by 2^120 for the difference of the exponents' biases.

    The compiler cannot look inside. It would move a plain cast of latent rows, which are keys and values, behind their two
    layouts in shared memory and stop prefetching tiles (31B 32@8000 on an H200: 540 us, by hand 362).
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
    """Whether the pages are e4m3 latents and queries bfloat16, outside the interpreter. Separate K and V gain nothing."""
    is_narrow = kv.is_latent and kv.planes.element_size() == 1
    return is_narrow and q_TNH.dtype == torch.bfloat16 and q_TNH.device.type != "cpu"
