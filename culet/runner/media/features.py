"""The features of media by content key, and the encoder that computes them beside steps.

On a GPU, towers run on a stream of their own, with a lower priority than steps, and an event marks when their features are
ready. Steps go on meanwhile, because the scheduler lets a row read features only after a result has reported them. On a CPU,
features are ready at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from culet.kernels.captures import TOWER_PRIORITY
from culet.media.items import MediaItem


class Encoder(Protocol):
    """Turns media into rows that replace embeddings. `Towers` is one."""

    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the rows [num_tokens, D] of each item, in the decoder's precision."""


@dataclass(frozen=True, slots=True)
class _Features:
    rows_ND: Tensor
    ready: torch.cuda.Event | None  # None on a CPU


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Items that were encoded together."""

    keys: tuple[bytes, ...]
    ready: torch.cuda.Event | None


class FeatureStore:
    """Features by content key. The scheduler decides what comes and goes."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        self._encoder = encoder
        self._stream = torch.cuda.Stream(device, priority=TOWER_PRIORITY) if device.type == "cuda" else None
        self._features: dict[bytes, _Features] = {}
        self._unreported: deque[_Encoding] = deque()  # oldest first

    def change(self, drops: Iterable[bytes], encodes: Sequence[MediaItem]) -> None:
        """Drop features, then start to encode items. On a GPU, return at once."""
        for key in drops:
            self._features.pop(key, None)  # after a failed step, it may not exist
        if not encodes:
            return
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            rows = self._encoder.encode(encodes)
            # Rows of several items may share memory, which would stay as long as any of them.
            rows = [own.clone() if own.untyped_storage().nbytes() > own.nbytes else own for own in rows]
            ready = None if self._stream is None else torch.cuda.Event()
            if ready is not None:
                ready.record()
        for item, own in zip(encodes, rows, strict=True):
            self._features[item.key] = _Features(own, ready)
        self._unreported.append(_Encoding(tuple([item.key for item in encodes]), ready))

    def rows(self, key: bytes) -> Tensor:
        """Return the features of an item, [N, D], for kernels that are launched from now on."""
        features = self._features[key]
        if features.ready is not None:
            stream = torch.cuda.current_stream(features.rows_ND.device)
            stream.wait_event(features.ready)
            features.rows_ND.record_stream(stream)  # its memory is reused only after the kernels that read it
        return features.rows_ND

    def take_ready(self, *, wait: bool) -> tuple[bytes, ...]:
        """Return the keys of features that have become ready since the last call. With `wait`, wait for all of them."""
        keys: list[bytes] = []
        while self._unreported:
            ready = self._unreported[0].ready
            if ready is not None and wait:
                ready.synchronize()
            elif ready is not None and not ready.query():
                break
            keys += self._unreported.popleft().keys
        return tuple(keys)

    @property
    def num_bytes(self) -> int:
        return sum(features.rows_ND.nbytes for features in self._features.values())

    @property
    def keys(self) -> frozenset[bytes]:
        return frozenset(self._features)
