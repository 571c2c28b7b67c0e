"""A quantised matrix as the kernels read it, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from culet.kernels.triton.quantised.unpack import FP8, INT4, INT8, NVFP4, VALUES_PER_WORD
from culet.kernels.types import (
    FP8_BLOCK,
    NVFP4_GROUP,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    QuantisedWeight,
)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights [..., N, K] in words of 32 bits, and their scales. Experts have a leading dimension."""

    format: int
    words: Tensor  # int32 [..., N, K / values per word]
    scale: Tensor  # one per `group` inputs of a row, or of FP8_BLOCK rows with `has_blocks`. Those of nvfp4 are bytes of e4m3.
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
    def of(cls, weight: QuantisedWeight) -> PackedMatrix:
        scale = weight.scale.contiguous()
        match weight:
            case Int4Weight(packed, _, zero):
                return cls(INT4, packed.contiguous(), scale, weight.group, None if zero is None else zero.contiguous())
            case Int8Weight(values, _):
                return cls(INT8, values.contiguous().view(torch.int32), scale, values.shape[-1] // scale.shape[-1])
            case Fp8Weight(values, _):
                has_blocks = scale.shape[-2:] != (values.shape[-2], 1)
                group = FP8_BLOCK if has_blocks else values.shape[-1]
                return cls(FP8, values.contiguous().view(torch.int32), scale, group, has_blocks=has_blocks)
            case Nvfp4Weight(packed, _, global_scale, _):
                words, narrow = packed.contiguous().view(torch.int32), scale.view(torch.uint8)
                return cls(NVFP4, words, narrow, NVFP4_GROUP, global_scale=global_scale.contiguous())
