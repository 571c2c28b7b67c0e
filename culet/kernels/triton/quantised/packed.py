"""A quantised matrix as the kernels read it, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from culet.kernels.triton.quantised.unpack import FP8, INT4, INT8, NVFP4, VALUES_PER_WORD

BLOCK = 128  # rows and columns of an fp8 block
NVFP4_GROUP = 16


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights [..., N, K] in words of 32 bits, and their scales. Experts have a leading dimension."""

    format: int
    words: Tensor  # int32 [..., N, K / values per word]
    scale: Tensor  # one per `group` inputs of a row, or of BLOCK rows with `has_blocks`. Those of nvfp4 are bytes of e4m3.
    group: int  # inputs that share a scale
    zero: Tensor | None = None  # zero points of int4, with the shape of the scale
    global_scale: Tensor | None = None  # of nvfp4, [..., N, 1] or a scalar
    has_blocks: bool = False

    @property
    def num_rows(self) -> int:
        return self.words.shape[-2]

    @property
    def num_columns(self) -> int:
        return self.words.shape[-1] * VALUES_PER_WORD[self.format]

    @classmethod
    def int4(cls, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> PackedMatrix:
        return cls(INT4, packed.contiguous(), scale.contiguous(), group, None if zero is None else zero.contiguous())

    @classmethod
    def int8(cls, weight: Tensor, scale: Tensor) -> PackedMatrix:
        return cls(INT8, weight.contiguous().view(torch.int32), scale.contiguous(), weight.shape[-1] // scale.shape[-1])

    @classmethod
    def fp8(cls, weight: Tensor, scale: Tensor) -> PackedMatrix:
        has_blocks = scale.shape[-2:] != (weight.shape[-2], 1)
        group = BLOCK if has_blocks else weight.shape[-1]
        return cls(FP8, weight.contiguous().view(torch.int32), scale.contiguous(), group, has_blocks=has_blocks)

    @classmethod
    def nvfp4(cls, packed: Tensor, scale: Tensor, global_scale: Tensor) -> PackedMatrix:
        words, narrow = packed.contiguous().view(torch.int32), scale.contiguous().view(torch.uint8)
        return cls(NVFP4, words, narrow, NVFP4_GROUP, global_scale=global_scale.contiguous())
