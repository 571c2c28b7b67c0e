"""Turn packed weights into bfloat16 values with bit operations. Triton and Gluon kernels share these functions.

Values of a word stay in order, so that tokens need no reordering. Only `int4_subnormals` returns them in pairs. The
instructions exist from sm_80 on.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

INT4, INT8, FP8, NVFP4 = 0, 1, 2, 3  # formats
VALUES_PER_WORD = {INT4: 8, INT8: 4, FP8: 4, NVFP4: 8}  # a word is an int32
# Unpacked nvfp4 weights are smaller by this factor, so that their scales need only one product.
NVFP4_SHIFT = 2.0**8


@triton.jit
def int4_values(words, scale, middle):
    """Return the eight values (u - zero) * scale of each word. `middle` is -(128 + zero), and 0x4300 | u is 128 + u."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, m, t<8>;
        mov.b32 s, {$9, $9};
        mov.b32 m, {$10, $10};
        shr.u32 t0, $8, 4;
        prmt.b32 t1, $8, t0, 0x0400;
        prmt.b32 t2, $8, t0, 0x0501;
        prmt.b32 t3, $8, t0, 0x0602;
        prmt.b32 t4, $8, t0, 0x0703;
        lop3.b32 t1, t1, 0x000F000F, 0x43004300, 0xea;
        lop3.b32 t2, t2, 0x000F000F, 0x43004300, 0xea;
        lop3.b32 t3, t3, 0x000F000F, 0x43004300, 0xea;
        lop3.b32 t4, t4, 0x000F000F, 0x43004300, 0xea;
        mov.b32 t5, 0x3F803F80;
        mov.b32 t6, 0x80008000;
        fma.rn.bf16x2 t1, t1, t5, m;
        fma.rn.bf16x2 t2, t2, t5, m;
        fma.rn.bf16x2 t3, t3, t5, m;
        fma.rn.bf16x2 t4, t4, t5, m;
        fma.rn.bf16x2 t1, t1, s, t6;
        fma.rn.bf16x2 t2, t2, s, t6;
        fma.rn.bf16x2 t3, t3, s, t6;
        fma.rn.bf16x2 t4, t4, s, t6;
        mov.b32 {$0, $1}, t1;
        mov.b32 {$2, $3}, t2;
        mov.b32 {$4, $5}, t3;
        mov.b32 {$6, $7}, t4;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h",
        [words, scale, middle],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def nvfp4_values(words, scale):
    """Return the eight values e2m1 * scale of each word, divided by NVFP4_SHIFT. `scale` is the group's times 2^118.

    The bits of e2m1 are the lowest of a bfloat16's exponent and the highest of its mantissa. That is the value * 2^-126.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, t<12>;
        mov.b32 s, {$9, $9};
        mov.b32 t9, 0x80008000;
        shr.u32 t0, $8, 4;
        prmt.b32 t1, $8, t0, 0x0400;
        prmt.b32 t2, $8, t0, 0x0501;
        prmt.b32 t3, $8, t0, 0x0602;
        prmt.b32 t4, $8, t0, 0x0703;
        shl.b32 t5, t1, 6;
        shl.b32 t6, t2, 6;
        shl.b32 t7, t3, 6;
        shl.b32 t8, t4, 6;
        and.b32 t5, t5, 0x01C001C0;
        and.b32 t6, t6, 0x01C001C0;
        and.b32 t7, t7, 0x01C001C0;
        and.b32 t8, t8, 0x01C001C0;
        shl.b32 t1, t1, 12;
        shl.b32 t2, t2, 12;
        shl.b32 t3, t3, 12;
        shl.b32 t4, t4, 12;
        lop3.b32 t1, t1, t9, t5, 0xea;
        lop3.b32 t2, t2, t9, t6, 0xea;
        lop3.b32 t3, t3, t9, t7, 0xea;
        lop3.b32 t4, t4, t9, t8, 0xea;
        fma.rn.bf16x2 t1, t1, s, t9;
        fma.rn.bf16x2 t2, t2, s, t9;
        fma.rn.bf16x2 t3, t3, s, t9;
        fma.rn.bf16x2 t4, t4, s, t9;
        mov.b32 {$0, $1}, t1;
        mov.b32 {$2, $3}, t2;
        mov.b32 {$4, $5}, t3;
        mov.b32 {$6, $7}, t4;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h",
        [words, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def fp8_values(words):
    """Return the four e4m3 values of each word. See `attention.e4m3.widen`."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t<6>;
        mov.b32 t4, 0x7b807b80;
        mov.b32 t5, 0x80008000;
        prmt.b32 t0, $4, 0, 0x1404;
        prmt.b32 t1, $4, 0, 0x3424;
        and.b32 t2, t0, 0x7f007f00;
        and.b32 t3, t1, 0x7f007f00;
        shr.b32 t2, t2, 4;
        shr.b32 t3, t3, 4;
        lop3.b32 t2, t0, t5, t2, 0xea;
        lop3.b32 t3, t1, t5, t3, 0xea;
        fma.rn.bf16x2 t0, t2, t4, t5;
        fma.rn.bf16x2 t1, t3, t4, t5;
        mov.b32 {$0, $1}, t0;
        mov.b32 {$2, $3}, t1;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def int8_values(words):
    """Return the four int8 values of each word. A byte u = v + 128 in the float32 0x4B0000uu is 2^23 + u."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u, t<4>;
        .reg .f32 f<4>;
        xor.b32 u, $4, 0x80808080;
        prmt.b32 t0, u, 0x4B000000, 0x7440;
        prmt.b32 t1, u, 0x4B000000, 0x7441;
        prmt.b32 t2, u, 0x4B000000, 0x7442;
        prmt.b32 t3, u, 0x4B000000, 0x7443;
        mov.b32 f0, t0;
        mov.b32 f1, t1;
        mov.b32 f2, t2;
        mov.b32 f3, t3;
        sub.f32 f0, f0, 0f4B000080;
        sub.f32 f1, f1, 0f4B000080;
        sub.f32 f2, f2, 0f4B000080;
        sub.f32 f3, f3, 0f4B000080;
        cvt.rn.bf16x2.f32 t0, f1, f0;
        cvt.rn.bf16x2.f32 t1, f3, f2;
        mov.b32 {$0, $1}, t0;
        mov.b32 {$2, $3}, t1;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def eight_in_order(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return [ROWS, COLUMNS] from eight tensors. Tensor i holds columns i, 8 + i, 16 + i and so on."""
    v0, v1, v2, v3, v4, v5, v6, v7 = values
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), [ROWS, COLUMNS])


@triton.jit
def four_in_order(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return [ROWS, COLUMNS] from four tensors. Tensor i holds columns i, 4 + i, 8 + i and so on."""
    v0, v1, v2, v3 = values
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [ROWS, COLUMNS])


@triton.jit
def e4m3_to_float(byte):
    """Return the float32 of an e4m3 number in the lowest byte of an integer. The factor is 2^120.

    Bit operations work on GPUs that have no e4m3.
    """
    byte = byte.to(tl.int32)
    return (((byte & 127) << 20) | ((byte & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def int4_subnormals(words):
    """Return the eight values of each word, still unsigned, as very small numbers. That takes five instructions.

    A nibble u in the lowest bits of a bfloat16 is u * 2^-133, and one in the bits above it u * 2^-129. That holds for every u:
    the exponent's lowest bit continues the mantissa. Tensor cores do not flush such numbers. Values come in pairs: i and i + 4
    share a register, and odd ones are larger by 2^4.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, t<4>;
        and.b32 t0, $8, 0x000F000F;
        and.b32 t1, $8, 0x00F000F0;
        shr.u32 s, $8, 8;
        and.b32 t2, s, 0x000F000F;
        and.b32 t3, s, 0x00F000F0;
        mov.b32 {$0, $4}, t0;
        mov.b32 {$1, $5}, t1;
        mov.b32 {$2, $6}, t2;
        mov.b32 {$3, $7}, t3;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def int4_tokens(x):
    """Return x * 2^64 in even and x * 2^60 in odd columns, the counterpart of `int4_subnormals`. Both are exact."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t<2>;
        mov.b32 t0, 0x5D805F80;
        mov.b32 t1, 0x80008000;
        fma.rn.bf16x2 $0, $1, t0, t1;
        }""",
        "=r,r",
        [x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def eight_in_pairs(values):
    """Return [..., 4, 2] from the eight tensors of `int4_subnormals`. Value i is at [i % 4, i / 4]."""
    v0, v1, v2, v3, v4, v5, v6, v7 = values
    low = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    high = tl.join(tl.join(v4, v6), tl.join(v5, v7))
    return tl.join(low, high)
