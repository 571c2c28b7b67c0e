"""Elementwise float32 functions for use inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(x):
    """Return the tanh form of GELU. x * sigmoid(2 u) equals x * (1 + tanh u) / 2 and avoids its cancellation."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def cap_tanh(x, cap: tl.constexpr):
    """Return cap * tanh(x / cap). It uses tanh(z) = 1 - 2 / (exp(2 z) + 1), which is accurate for large and small z."""
    return cap * (1.0 - 2.0 / (tl.exp(x * (2.0 / cap)) + 1.0))
