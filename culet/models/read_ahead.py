"""Read regions of stored tensors ahead of their use, several at a time, and fill the model with them in order.

Threads read bytes from the files into a ring of host memory. On a GPU machine the ring is pinned, so that copies to the GPU run
beside the reads. A region that is not one run of bytes in its file is read by itself, into memory of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from culet.errors import CheckpointError
from culet.layers.weight.byte_sizes import stored_bytes
from culet.layers.weight.placement import TORCH_DTYPES, Piece, Placement
from culet.layers.weight.quantised.block_types import BLOCK_SIZES
from culet.models.weight_files import StoredTensor

_NUM_THREADS = 8
_READ_BYTES = 16 << 20  # of one read, where a tensor can be split
_GPU_RING_BYTES, _CPU_RING_BYTES = 512 << 20, 32 << 20
_ALIGNMENT = 512


@dataclass(frozen=True)
class _Run:
    """Bytes of a file that are a tensor."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, room: Tensor) -> Tensor:
        """Read the bytes into the buffer `room` and return them as a tensor of the right type and shape."""
        rest, offset = memoryview(room.numpy().data)[: self.num_bytes], self.offset
        try:
            with self.file.open("rb", buffering=0) as opened:
                while rest:
                    count = os.preadv(opened.fileno(), [rest], offset)
                    if count == 0:
                        raise EOFError("the file ends too early")
                    rest, offset = rest[count:], offset + count
        except (OSError, EOFError) as error:
            hint = "the file is damaged or incomplete: download it again"
            raise CheckpointError(f"{self.file}: cannot be read: {error}", hint=hint) from error
        return room[: self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Read:
    """A region to read, and the piece that it fills."""

    piece: Piece
    source: StoredTensor
    run: _Run | None  # None if the region is not one run of bytes
    num_bytes: int

    def read(self, room: Tensor | None) -> Tensor:
        if self.run is not None and room is not None:
            return self.run.read(room)
        if self.run is not None:
            return self.run.read(torch.empty(self.num_bytes, dtype=torch.uint8))
        return self.source.read_region(self.piece.region)


def _find_run(tensor: StoredTensor, region: tuple[Any, ...]) -> _Run | None:
    """Return the bytes of a region, if they lie together: whole rows of a tensor, or of one matrix of a stack.

    Blocks of a GGUF file are read as bytes.
    """
    shape, dtype = tensor.shape, TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        if tensor.dtype not in BLOCK_SIZES:
            return None
        dtype, (values, size) = torch.uint8, BLOCK_SIZES[tensor.dtype]
        shape = (*shape[:-1], shape[-1] // values * size)
    if region == (...,) or not shape:
        return _Run(tensor.file, tensor.offset, dtype, shape)
    cuts = [part.indices(size) for part, size in zip(region, tensor.shape, strict=True)]
    cut_dims = [dim for dim, (cut, size) in enumerate(zip(cuts, tensor.shape, strict=True)) if cut != (0, size, 1)]
    last = cut_dims[-1] if cut_dims else 0
    if any(step != 1 for *_, step in cuts) or any(stop - start != 1 for start, stop, _ in cuts[:last]):
        return None
    if last == len(shape) - 1 and cut_dims and dtype is torch.uint8 and tensor.dtype in BLOCK_SIZES:
        return None
    begin = sum(cuts[dim][0] * prod(shape[dim + 1 :]) for dim in range(last + 1)) * dtype.itemsize
    found = (*(stop - start for start, stop, _ in cuts[: last + 1]), *shape[last + 1 :])
    return _Run(tensor.file, tensor.offset + begin, dtype, found)


def plan_reads(tensor: StoredTensor, placement: Placement) -> Iterator[Read]:
    """Yield the reads that fill a placement."""
    num_rows = max(1, _READ_BYTES * (tensor.shape or (1,))[0] // max(1, tensor.num_bytes))
    for piece in placement.pieces:
        for part in piece.split(num_rows):
            run = _find_run(tensor, part.region)
            yield Read(part, tensor, run, _region_bytes(tensor, part.region) if run is None else run.num_bytes)


def _region_bytes(tensor: StoredTensor, region: tuple[Any, ...]) -> int:
    if region == (...,):
        return tensor.num_bytes
    sizes = (len(range(*part.indices(size))) for part, size in zip(region, tensor.shape, strict=True))
    return stored_bytes(tensor.dtype, sizes)


class _Ring:
    """Host memory whose parts are taken and given back in the same order."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._taken: deque[tuple[int, int]] = deque()  # begin and end of each part

    @property
    def max_bytes(self) -> int:
        """The largest part that can be taken. Two of them fit, so that one is read while the other is copied."""
        return len(self._memory) // 2

    def take(self, num_bytes: int) -> Tensor | None:
        """Return memory for some bytes, or None if there is no room now."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        begin = self._find(size)
        if begin is None:
            return None
        self._taken.append((begin, begin + size))
        return self._memory[begin : begin + size]

    def _find(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= len(self._memory) else None
        oldest, end = self._taken[0][0], self._taken[-1][1]
        if end > oldest:  # free: from the end of the newest part to the end of the memory, and before the oldest part
            if end + size <= len(self._memory):
                return end
            return 0 if size <= oldest else None
        return end if end + size <= oldest else None

    def give_back_oldest(self) -> None:
        self._taken.popleft()


@contextmanager
def _open_ring(device: torch.device) -> Iterator[_Ring]:
    """Allocate the ring. For a GPU it is pinned, and unpinned at the end, when all copies are done."""
    memory = torch.empty(_GPU_RING_BYTES if device.type == "cuda" else _CPU_RING_BYTES, dtype=torch.uint8)
    if device.type != "cuda":
        yield _Ring(memory)
        return
    runtime = torch.cuda.cudart()
    is_pinned = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0  # without it, copies are slower
    try:
        yield _Ring(memory)
    finally:
        torch.cuda.synchronize(device)
        if is_pinned:
            runtime.cudaHostUnregister(memory.data_ptr())


class _Pipeline:
    """The reads and the copies to the device that are under way, both in order."""

    def __init__(self, ring: _Ring, threads: ThreadPoolExecutor, device: torch.device) -> None:
        self._ring, self._threads, self._is_gpu = ring, threads, device.type == "cuda"
        self._reading: deque[tuple[Read, Future[Tensor], bool]] = deque()
        self._copying: deque[torch.cuda.Event | None] = deque()  # one for each part of the ring that has been read
        self._own_bytes = 0  # of reads outside the ring

    def add(self, read: Read) -> Iterator[Read]:
        """Begin a read. Yield the reads that have finished meanwhile, or that had to finish to make room."""
        room = None
        if read.run is not None and read.num_bytes <= self._ring.max_bytes:
            while (room := self._ring.take(read.num_bytes)) is None:
                if self._copying:
                    self._finish_copy()
                else:
                    yield self._fill_oldest()
        else:
            while self._reading and self._own_bytes + read.num_bytes > self._ring.max_bytes:
                yield self._fill_oldest()
            self._own_bytes += read.num_bytes
        self._reading.append((read, self._threads.submit(read.read, room), room is not None))
        while self._reading and self._reading[0][1].done():
            yield self._fill_oldest()

    def finish(self) -> Iterator[Read]:
        while self._reading:
            yield self._fill_oldest()

    def _fill_oldest(self) -> Read:
        read, future, is_in_ring = self._reading.popleft()
        read.piece.fill(future.result())
        if is_in_ring:
            self._copying.append(torch.cuda.current_stream().record_event() if self._is_gpu else None)
        else:
            self._own_bytes -= read.num_bytes
        return read

    def _finish_copy(self) -> None:
        event = self._copying.popleft()
        if event is not None:
            event.synchronize()
        self._ring.give_back_oldest()


def run_reads(reads: Iterable[Read], device: torch.device) -> Iterator[Read]:
    """Run all reads and fill their pieces, in order. Yield each read afterwards."""
    with ExitStack() as stack:
        ring = stack.enter_context(_open_ring(device))
        threads = ThreadPoolExecutor(min(_NUM_THREADS, os.cpu_count() or 1), thread_name_prefix="read-weights")
        stack.callback(threads.shutdown, cancel_futures=True)
        pipeline = _Pipeline(ring, threads, device)
        for read in reads:
            yield from pipeline.add(read)
        yield from pipeline.finish()
