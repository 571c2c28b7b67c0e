"""Find tensors with values that are NaN or infinite. Tensors are read in parts, so that the host needs little memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from culet.layers.weight.quantised.block_types import BLOCK_SIZES, SCALE_OFFSETS
from culet.models.weight_files import StoredTensor

_NUM_THREADS = 8
_PART_BYTES = 16 << 20
_BLOCKS_AT_ONCE = 1 << 20
_EXPONENT = 0x7C  # in the second byte of a float16; all of them are set in NaN and infinity


def find_not_finite(tensors: Iterable[StoredTensor], divisors: frozenset[str] = frozenset()) -> list[str]:
    """Return the names of tensors with such values. Those of `divisors` must also have a finite reciprocal."""

    def is_bad(tensor: StoredTensor) -> bool:
        return not _is_finite(tensor, tensor.name in divisors)

    each = list(tensors)
    with ThreadPoolExecutor(min(_NUM_THREADS, os.cpu_count() or 1), thread_name_prefix="check-weights") as threads:
        return [tensor.name for tensor, bad in zip(each, threads.map(is_bad, each), strict=True) if bad]


def _is_finite(tensor: StoredTensor, is_divisor: bool) -> bool:
    if tensor.dtype in SCALE_OFFSETS:
        return _has_finite_scales(tensor)
    for region in _parts(tensor):
        value = tensor.read_region(region)
        if not value.is_floating_point():
            continue
        value = value.float()
        if not bool(torch.isfinite(value).all()) or (is_divisor and not bool(torch.isfinite(value.reciprocal()).all())):
            return False
    return True


def _has_finite_scales(tensor: StoredTensor) -> bool:
    """Return whether the float16 scales of GGUF blocks are finite. The bits of the exponent, in the second byte, tell."""
    size = BLOCK_SIZES[tensor.dtype][1]
    shape = tensor.num_bytes // size, size
    blocks = np.memmap(tensor.file, dtype=np.uint8, mode="r", offset=tensor.offset, shape=shape)
    second = blocks[:, SCALE_OFFSETS[tensor.dtype] + 1]
    parts = (second[start : start + _BLOCKS_AT_ONCE] for start in range(0, len(second), _BLOCKS_AT_ONCE))
    return not any(bool(((part & _EXPONENT) == _EXPONENT).any()) for part in parts)


def _parts(tensor: StoredTensor) -> Iterator[tuple[slice, ...]]:
    """Yield regions that together cover the tensor. Each has a few of its rows."""
    if not tensor.shape:
        yield (...,)  # type: ignore[misc]  # the region that covers a scalar
        return
    num_rows = max(1, _PART_BYTES * tensor.shape[0] // max(1, tensor.num_bytes))
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    for start in range(0, tensor.shape[0], num_rows):
        yield slice(start, min(start + num_rows, tensor.shape[0])), *rest
