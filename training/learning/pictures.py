"""Batches of pictures, drawn by worker processes, and batches of text beside them.

A batch is drawn from the seed and its number alone, so a stopped run continues with the batches that would have come next.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.data.pictures.chats import BUDGET, SOFT_SIDE, draw_batch
from training.learning.batches import Batch, Feed
from training.learning.loop import SourceOf

AHEAD = 2  # batches that a worker draws before they are needed
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class SeeBatch:
    """Pictures, packed rows of chats about them, and rows of text without pictures."""

    pictures_PCHW: Tensor
    labels_PMK: Tensor  # what each soft token shows
    soft_BT: Tensor  # index of each soft token among those of all pictures, or -1
    rows: Batch
    text: Batch | None = None

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens


@dataclass(frozen=True)
class Drawing:
    """What a batch of pictures has, and who draws it."""

    tokenizer_file: Path
    num_pictures: int = 128
    num_rows: int = 80
    row_len: int = 512
    seed: int = 0
    num_workers: int = 0  # 0 draws in this process

    def with_workers(self, wanted: int) -> Drawing:
        """Return this with as many workers as wanted, or as many as the shared memory has room for. They pass batches in it."""
        if SHARED_MEMORY.exists():
            batch = self.num_pictures * BUDGET * 3 * SOFT_SIDE**2
            wanted = min(wanted, shutil.disk_usage(SHARED_MEMORY).free // (batch * (AHEAD + 2)))
        return replace(self, num_workers=wanted)


class _Numbered(Dataset[tuple[Tensor, ...]]):
    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        each = self._drawing
        drawn = draw_batch(each.tokenizer_file, f"{each.seed} {number}", each.num_pictures, each.num_rows, each.row_len)
        arrays = (drawn.pictures, drawn.labels, drawn.ids, drawn.first, drawn.learnt, drawn.soft)
        return tuple(torch.from_numpy(array) for array in arrays)


def _use_one_thread(_: int) -> None:
    torch.set_num_threads(1)


class PictureFeed:
    """Provides batches on a device. `waited` is the time for which training waited for pictures."""

    phase, num_phases = 0, 1

    def __init__(self, drawing: Drawing, device: torch.device, number: int = 0, text: Feed | None = None) -> None:
        self._drawing, self._device, self._text = drawing, device, text
        self.number = number  # of the next batch
        self.waited = 0.0

    def state(self) -> dict[str, Any]:
        return {"number": self.number, "text": None if self._text is None else self._text.state()}

    def batches(self) -> Iterator[SeeBatch]:
        workers = self._drawing.num_workers
        options: dict[str, Any] = {"multiprocessing_context": "spawn", "prefetch_factor": AHEAD} if workers else {}
        loader: DataLoader[Any] = DataLoader(
            _Numbered(self._drawing),
            batch_size=None,
            sampler=itertools.count(self.number),
            num_workers=workers,
            worker_init_fn=_use_one_thread,
            pin_memory=self._device.type == "cuda",
            **options,
        )
        texts = itertools.repeat(None) if self._text is None else self._text.batches()
        drawn = iter(loader)
        for text in texts:
            began = time.perf_counter()
            pictures, labels, ids, first, learnt, soft = (part.to(self._device, non_blocking=True) for part in next(drawn))
            self.waited += time.perf_counter() - began
            self.number += 1
            yield SeeBatch(pictures, labels, soft, Batch(ids, first, learnt), text)


def picture_source(drawing: Drawing, device: torch.device, text_source_of: SourceOf | None = None) -> SourceOf:
    """Return the source of pictures, with text beside them if there is a source of text."""

    def open_feed(state: Mapping[str, Any] | None) -> PictureFeed:
        text = None if text_source_of is None else text_source_of(None if state is None else state["text"])
        assert text is None or isinstance(text, Feed)
        return PictureFeed(drawing, device, 0 if state is None else state["number"], text)

    return open_feed
