"""Passes of a vision tower as CUDA graphs.

A pass over one image has hundreds of short kernels. Launching them takes longer than running them, and the engine launches no
step meanwhile. A graph is launched at once. It depends on the numbers of patches only, so images of many shapes share one.

Shapes: T patches of all images · V values of a patch · M soft tokens of all images · D decoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from culet.models.towers.packing import PackedImages

MAX_PATCHES = 4096  # of a pass that is captured. Larger ones run for longer than their launches take.
MAX_GRAPHS = 32
MAX_SEEN = 1024  # sizes that are remembered

Key = tuple[int, ...]  # the number of patches of each image
Pass = Callable[[PackedImages], Tensor]  # returns rows [M, D]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: PackedImages
    rows_MD: Tensor  # written by every replay


class PassGraphs:
    """Captures a pass when its size comes for the second time, and then replays it. Passes run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._memory: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # for captures only. Libraries keep a workspace for each stream.
        self._inputs: PackedImages | None = None
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._graphs: OrderedDict[Key, _Captured] = OrderedDict()

    def run(self, packed: PackedImages, run_pass: Pass) -> Tensor:
        """Return `run_pass(packed)`."""
        key = tuple(packed.lengths)
        if sum(key) > MAX_PATCHES or not self._has_seen(key):
            return run_pass(packed)
        captured = self._graphs.get(key) or self._capture(key, packed, run_pass)
        self._graphs.move_to_end(key)
        _copy(packed, captured.inputs)
        captured.graph.replay()
        return captured.rows_MD.clone()  # the next replay of any graph may overwrite it

    def _has_seen(self, key: Key) -> bool:
        """Remember a size. Return whether it came before, so that its kernels are compiled and loaded."""
        is_known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return is_known

    def _capture(self, key: Key, packed: PackedImages, run_pass: Pass) -> _Captured:
        if len(self._graphs) == MAX_GRAPHS:
            self._graphs.popitem(last=False)
        inputs = self._input_rows(packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                rows_MD = run_pass(inputs)
            finally:
                graph.capture_end()
        self._graphs[key] = _Captured(graph, inputs, rows_MD)
        return self._graphs[key]

    def _input_rows(self, packed: PackedImages) -> PackedImages:
        """Return the place from which graphs read patches like these."""
        if self._inputs is None:
            levels = packed.levels_TV.new_empty(MAX_PATCHES, packed.levels_TV.shape[1])
            self._inputs = PackedImages(levels, packed.x_T.new_empty(MAX_PATCHES), packed.y_T.new_empty(MAX_PATCHES), [])
        length, whole = sum(packed.lengths), self._inputs
        return PackedImages(whole.levels_TV[:length], whole.x_T[:length], whole.y_T[:length], packed.lengths)


def _copy(source: PackedImages, target: PackedImages) -> None:
    target.levels_TV.copy_(source.levels_TV)
    target.x_T.copy_(source.x_T)
    target.y_T.copy_(source.y_T)
