"""Capture work once as CUDA graphs, which are replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")
_SAME_SIZE = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # types that every library knows, by their bytes
# If several have a kernel that could start, the one with the lowest number starts.
URGENT_PRIORITY, STEP_PRIORITY, TOWER_PRIORITY = -2, -1, 0


def step_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream for steps."""
    return torch.cuda.Stream(device, priority=STEP_PRIORITY)


@cache
def _second_stream(device: torch.device, *, is_urgent: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=URGENT_PRIORITY if is_urgent else STEP_PRIORITY)


def side_by_side(
    first: Callable[[], T], second: Callable[[], U], device: torch.device, *, is_long: bool = False, is_urgent: bool = False
) -> tuple[T, U]:
    """Return the results of two independent calls, which run at the same time in a captured graph or if `is_long`.

    Otherwise they run one after the other, because the host needs 15 us to run them side by side. If `is_urgent`, the second
    one need not wait until the first leaves room. Their launches must not share a workspace.
    """
    if device.type != "cuda" or not (is_long or torch.cuda.is_current_stream_capturing()):
        return first(), second()
    stream, second_stream = torch.cuda.current_stream(device), _second_stream(device, is_urgent=is_urgent)
    second_stream.wait_stream(stream)
    with torch.cuda.stream(second_stream):
        # Memory allocated here is used again only on this stream, which by then has waited for every reader.
        second_result = second()
    try:
        first_result = first()
    finally:  # even after an error, nobody may use memory again that the second call still writes to
        stream.wait_stream(second_stream)
    return first_result, second_result


class Captures:
    """Captures graphs on one device. They run one after another and share memory, so capture the largest first."""

    def __init__(self, device: torch.device, priority: int = STEP_PRIORITY) -> None:
        """The kernels of a graph have the priority of the stream that captured it."""
        self.device = device
        self._memory: Any = torch.cuda.graph_pool_handle()
        # All captures use one stream, because libraries keep a workspace for each stream.
        self._stream = torch.cuda.Stream(device, priority=priority)

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Return the graph of one call, and the call's result, which every replay writes to the same place."""
        # Run once outside a capture, to compile and load kernels and to allocate buffers that are made at first use.
        run()
        torch.cuda.synchronize(self.device)
        return self.capture_warm(run)

    def capture_warm(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Do the same for a call that has run before. This does not wait for the device."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph, result


class _Address:
    """A tensor's memory, without its owner."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": _SAME_SIZE[tensor.itemsize],
            "version": 3,
        }


def borrowed(result: Any) -> Any:
    """Return the tensors of a captured call's result without owning their memory, so that later captures can use it again.

    `result` is a tensor or a tuple. Anything in it that is not a tensor becomes None.
    """
    if isinstance(result, torch.Tensor):
        return torch.as_tensor(_Address(result), device=result.device).view(result.dtype)
    return tuple(map(borrowed, result)) if isinstance(result, tuple) else None
