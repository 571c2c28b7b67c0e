"""Passes of a vision tower as CUDA graphs.

A pass over one image has hundreds of short kernels. Launching them takes longer than running them, and the engine launches no
step meanwhile. A graph needs one launch. It depends only on the numbers of patches, so images of many shapes share one.

Shapes: T patches of all images · V values of a patch · M soft tokens of all images · D decoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from culet.kernels.captures import TOWER_PRIORITY, Captures
from culet.models.towers.packing import PackedImages

MAX_CAPTURED_PATCHES = 4096  # Larger passes run for longer than their launches take.
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
        self._captures = Captures(device, TOWER_PRIORITY)
        self._inputs: PackedImages | None = None
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._graphs: OrderedDict[Key, _Captured] = OrderedDict()

    def run(self, packed: PackedImages, run_pass: Pass) -> Tensor:
        """Return `run_pass(packed)`."""
        key = tuple(packed.lengths)
        if sum(key) > MAX_CAPTURED_PATCHES or not self._has_seen(key):
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
        graph, rows_MD = self._captures.capture_warm(partial(run_pass, inputs))
        self._graphs[key] = _Captured(graph, inputs, rows_MD)
        return self._graphs[key]

    def _input_rows(self, packed: PackedImages) -> PackedImages:
        """Return the place from which graphs read patches like these."""
        if self._inputs is None:
            size = MAX_CAPTURED_PATCHES
            levels_TV = packed.levels_TV.new_empty(size, packed.levels_TV.shape[1])
            self._inputs = PackedImages(levels_TV, packed.x_T.new_empty(size), packed.y_T.new_empty(size), [])
        length, whole = sum(packed.lengths), self._inputs
        return PackedImages(whole.levels_TV[:length], whole.x_T[:length], whole.y_T[:length], packed.lengths)


def _copy(source: PackedImages, target: PackedImages) -> None:
    target.levels_TV.copy_(source.levels_TV)
    target.x_T.copy_(source.x_T)
    target.y_T.copy_(source.y_T)
