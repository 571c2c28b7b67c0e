"""Make small transfers between host and device without waiting for the device.

Copies to a GPU start from pinned memory and are ordered with the kernels launched after them. The pinned memory comes from
torch's cache, which reuses a block only after the copies from it are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `values` as a tensor on `device`.

    `torch.tensor(..., device=...)` and indexing by a list would wait for the device.
    """
    host = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def send_into(target: Tensor, values: Sequence[Any]) -> None:
    """Overwrite `target` on a device with a few values from the host."""
    host = torch.empty(len(values), dtype=target.dtype, pin_memory=target.is_cuda)
    host.numpy()[:] = values
    target.copy_(host, non_blocking=True)


class PackedArrays:
    """Named arrays that are sent to the device in one copy."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.generic]] = {}

    def add(self, name: str, array: NDArray[np.generic]) -> None:
        self._arrays[name] = np.ascontiguousarray(array)

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """Send the arrays and return them as tensors on `device`."""
        if torch.device(device).type == "cpu":
            return {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        return self.unpack(self._packed().to(device, non_blocking=True))

    def send_into(self, buffer: Tensor) -> None:
        """Overwrite the start of `buffer` (uint8, on a device) with the arrays. `unpack` returns views of them."""
        packed = self._packed() if buffer.is_cuda else torch.from_numpy(self._bytes())
        buffer[: packed.shape[0]].copy_(packed, non_blocking=True)

    @property
    def num_bytes(self) -> int:
        return sum(map(_room, self._arrays.values()))

    def _packed(self) -> Tensor:
        host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        self.pack(host.numpy())
        return host

    def _bytes(self) -> NDArray[np.uint8]:
        host = np.empty(self.num_bytes, dtype=np.uint8)
        self.pack(host)
        return host

    def pack(self, buffer: NDArray[np.uint8]) -> None:
        """Write the arrays one after another. Padding bytes up to the next multiple of 16 are not written."""
        begin = 0
        for array in self._arrays.values():
            buffer[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
            begin += _room(array)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the arrays as views of a packed buffer on any device."""
        views, begin = {}, 0
        for name, array in self._arrays.items():
            views[name] = packed[begin : begin + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            begin += _room(array)
        return views


def _room(array: NDArray[np.generic]) -> int:
    """Return the array's size in bytes, rounded up to 16.

    Every array can then be read as any type, and kernels always get aligned pointers.
    """
    return -(-array.nbytes // 16) * 16


class HostCopy:
    """Tensors that are being copied to the host in one transfer. Integers below 2**53 arrive exactly."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._host: Tensor | None = None
        self._done: torch.cuda.Event | None = None
        if not tensors:
            return
        dtype = torch.float64 if any(tensor.is_floating_point() for tensor in tensors) else torch.int64
        parts = [tensor.flatten().to(dtype) for tensor in tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if joined.is_cuda:
            self._host = torch.empty(joined.shape, dtype=dtype, pin_memory=True)
            self._host.copy_(joined, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._host = joined

    def lists(self) -> list[list[Any]]:
        """Return a flat list per tensor. Wait only for the copy, not for work launched after it."""
        if self._host is None:
            return []
        if self._done is not None:
            self._done.synchronize()
        joined = self._host.tolist()
        lists, begin = [], 0
        for size in self._sizes:
            lists.append(joined[begin : begin + size])
            begin += size
        return lists


class _ReusedCopy(HostCopy):
    """A HostCopy that reuses its host memory."""

    def __init__(self, like: Tensor, sizes: Sequence[int]) -> None:
        """Allocate memory for GPU tensors shaped like `like`, which come back in parts of `sizes`."""
        self._sizes = list(sizes)
        self._room, self._arrived = torch.empty(like.shape, dtype=like.dtype, pin_memory=True), torch.cuda.Event()
        self._host, self._done = self._room, self._arrived

    def start(self, tensor: Tensor) -> None:
        self._room.copy_(tensor, non_blocking=True)
        self._arrived.record()


class RepeatedCopy:
    """Repeated copies of one tensor to the host. Up to `DEPTH` copies may be in flight or being read at a time."""

    DEPTH = 4

    def __init__(self, tensor: Tensor, sizes: Sequence[int]) -> None:
        """Prepare copies of `tensor`, which comes back in parts of `sizes`."""
        self._tensor, self._sizes = tensor, list(sizes)
        self._copies = cycle([_ReusedCopy(tensor, sizes) for _ in range(self.DEPTH)]) if tensor.is_cuda else None

    def send(self) -> HostCopy:
        """Start another copy."""
        if self._copies is None:
            return HostCopy(self._tensor.clone().split(self._sizes))
        copy = next(self._copies)
        copy.start(self._tensor)
        return copy
