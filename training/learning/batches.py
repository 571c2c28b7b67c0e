"""Training text as packed rows: whole documents side by side in rows of equal length, drawn from weighted parts.

A pack is a folder with `train` and `held_out`. In each, a part is `<part>.npy` (token ids, uint16, documents one after the
other), `<part>.ends.npy` (where each document ends) and, if only some tokens are to be learnt, `<part>.loss.npy` (0 or 1).

Documents of a part come in a new random order in each epoch. A seed determines everything, so that training continues after a
stop with the rows that would have come next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAD, BOS = 0, 2


@dataclass(frozen=True)
class Part:
    """Documents of one kind."""

    name: str
    tokens: NDArray[np.uint16]
    ends: NDArray[np.int64]
    learnt: NDArray[np.bool_] | None = None  # per token: whether to learn it

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate((np.zeros(1, np.int64), self.ends[:-1]))

    def documents(self) -> list[list[int]]:
        """Return the token ids of each document."""
        return [piece.astype(int).tolist() for piece in np.split(self.tokens, self.ends[:-1])]


@dataclass(frozen=True)
class Rows:
    """Packed rows. `first` is the index of the first token of each token's document, and `learnt` says whether it is a goal."""

    ids: NDArray[np.uint16]
    first: NDArray[np.int16]
    learnt: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Batch:
        return Batch(
            torch.from_numpy(self.ids.astype(np.int32)).to(device, non_blocking=True),
            torch.from_numpy(self.first.astype(np.int32)).to(device, non_blocking=True),
            torch.from_numpy(self.learnt).to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Batch:
    """Packed rows on a device."""

    ids_BT: Tensor
    first_BT: Tensor
    learnt_BT: Tensor

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(self.ids_BT[rows], self.first_BT[rows], self.learnt_BT[rows])

    @property
    def num_tokens(self) -> int:
        return self.ids_BT.numel()

    @property
    def goals(self) -> Tensor:
        """The token after each token. The last column is a placeholder that is never learnt."""
        return torch.cat((self.ids_BT[:, 1:], self.ids_BT[:, :1]), 1).long()

    @property
    def is_goal(self) -> Tensor:
        """Whether the next token belongs to the same document and is to be learnt."""
        T = self.ids_BT.shape[1]
        follows = self.first_BT[:, 1:] <= torch.arange(T - 1, device=self.ids_BT.device)
        goal = follows & self.learnt_BT[:, 1:]
        return torch.cat((goal, torch.zeros_like(goal[:, :1])), 1)


def load_parts(folder: Path) -> dict[str, Part]:
    """Load the parts of one split."""
    parts = {}
    for path in sorted(folder.glob("*.ends.npy")):
        name = path.name.removesuffix(".ends.npy")
        learnt = folder / f"{name}.loss.npy"
        parts[name] = Part(
            name,
            np.load(folder / f"{name}.npy"),
            np.load(path).astype(np.int64),
            np.load(learnt).astype(bool) if learnt.exists() else None,
        )
    parts = {name: part for name, part in parts.items() if len(part.ends)}
    if not parts:
        raise FileNotFoundError(f"{folder}: no training text; create it with `training/data`")
    return parts


class _Stream:
    """Endless pieces (start in the part, length) of a part's documents, at most a row long, in a new order in each epoch."""

    def __init__(self, part: Part, row_len: int, seed: int) -> None:
        starts, lengths = part.starts, part.ends - part.starts
        pieces = -(-lengths // row_len)
        document = np.repeat(np.arange(len(lengths)), pieces)
        number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = starts[document] + number * row_len
        self._pieces = np.stack((start, np.minimum(row_len, lengths[document] - number * row_len)), 1)
        self._random = np.random.default_rng(seed)
        self._order = np.zeros(0, np.int64)

    def take(self, num_tokens: float) -> NDArray[np.int64]:
        """Return the next pieces, [n, 2], with at least `num_tokens` in total."""
        pieces, sizes = [], 0.0
        while sizes < num_tokens:
            if not len(self._order):
                self._order = self._random.permutation(len(self._pieces))
            ends = np.cumsum(self._pieces[self._order, 1])
            count = int(np.searchsorted(ends, num_tokens - sizes)) + 1
            pieces.append(self._pieces[self._order[:count]])
            sizes += float(ends[min(count, len(ends)) - 1])
            self._order = self._order[count:]
        return np.concatenate(pieces) if pieces else np.zeros((0, 2), np.int64)


class Packer:
    """Builds chunks of packed rows from weighted parts. Pieces that do not fit a chunk come first in the next."""

    def __init__(
        self, parts: Mapping[str, Part], row_len: int, rows_per_chunk: int, seed: int = 0, *, joined: float = 0.0
    ) -> None:
        """`joined` is the share of rows whose documents see the ones before them.

        Short texts alone do not teach long distances.
        """
        self._joined = joined
        self._names = sorted(parts)
        self._parts = [parts[name] for name in self._names]
        self._streams = [_Stream(part, row_len, seed + index) for index, part in enumerate(self._parts)]
        self._row_len, self._rows = row_len, rows_per_chunk
        self._random = np.random.default_rng(seed + len(parts))
        self._owed = np.zeros(len(self._names))  # tokens by which each part is behind its share
        self._left = np.zeros((0, 3), np.int64)  # pieces (part, start, length) that did not fit

    def chunk(self, weights: Mapping[str, float], *, learn_all: bool, build: bool = True) -> Rows | None:
        """Return the next chunk. `build=False` only advances, to resume a run."""
        share = np.array([weights.get(name, 0.0) for name in self._names])
        self._owed += share / share.sum() * max(0, self._rows * self._row_len - int(self._left[:, 2].sum()))
        pieces = [self._left]
        for index, stream in enumerate(self._streams):
            own = stream.take(self._owed[index])
            self._owed[index] -= own[:, 1].sum()
            pieces.append(np.insert(own, 0, index, axis=1))
        drawn = np.concatenate(pieces)
        drawn = drawn[self._random.permutation(len(drawn))]
        place = self._places(drawn[:, 2].tolist())
        self._left = drawn[place < 0]
        order = self._random.permutation(self._rows)
        is_joined = self._random.random(self._rows) < self._joined
        if not build:
            return None
        rows = self._build(np.column_stack((drawn, place))[place >= 0], learn_all)
        rows.first[is_joined[:, None] & (rows.ids != PAD)] = 0
        rows.learnt[rows.ids == BOS] = False
        return Rows(rows.ids[order], rows.first[order], rows.learnt[order])

    def _places(self, lengths: list[int]) -> NDArray[np.int64]:
        """Return where in the chunk each piece begins, or -1 if it does not fit.

        A row gets at most one long piece, then short ones.
        """
        size = self._row_len
        long = [index for index, length in enumerate(lengths) if length > size // 2][::-1]
        short = [index for index, length in enumerate(lengths) if length <= size // 2][::-1]
        place = np.full(len(lengths), -1, np.int64)
        for row in range(self._rows):
            used = 0
            if long:
                index = long.pop()
                place[index], used = row * size, lengths[index]
            while short and used + lengths[short[-1]] <= size:
                index = short.pop()
                place[index], used = row * size + used, used + lengths[index]
        return place

    def _build(self, placed: NDArray[np.int64], learn_all: bool) -> Rows:
        """Build rows from pieces (part, start in the part, length, place in the chunk)."""
        size = self._rows * self._row_len
        ids = np.full(size, PAD, np.uint16)
        first = np.arange(size, dtype=np.int64) % self._row_len
        learnt = np.zeros(size, bool)
        for index, part in enumerate(self._parts):
            mine = placed[placed[:, 0] == index]
            if not len(mine):
                continue
            lengths = mine[:, 2]
            offset = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            source, goal = np.repeat(mine[:, 1], lengths) + offset, np.repeat(mine[:, 3], lengths) + offset
            ids[goal] = part.tokens[source]
            first[goal] = np.repeat(mine[:, 3] % self._row_len, lengths)
            learnt[goal] = True if learn_all or part.learnt is None else part.learnt[source]
        shape = (self._rows, self._row_len)
        return Rows(ids.reshape(shape), first.astype(np.int16).reshape(shape), learnt.reshape(shape))


@dataclass(frozen=True)
class Mixture:
    """The mixture of a training phase: token weights of the parts, and whether prompts are goals too."""

    weights: Mapping[str, float]
    learn_all: bool = True


class Feed:
    """Provides batches on a device, prepared by a thread. `phase` may change while it runs, but prepared chunks keep theirs."""

    def __init__(
        self,
        packer: Packer,
        phases: Sequence[Mixture],
        *,
        rows_per_batch: int,
        device: torch.device,
        state: Mapping[str, Any] | None = None,
        ahead: int = 2,
    ) -> None:
        """`state` is that of an earlier feed, after which this one continues. Chunks already used are skipped."""
        history = [] if state is None else state["history"]
        self.phase = history[-1] if history else 0
        self._skip = 0 if state is None else state["taken"]
        self.num_phases = len(phases)
        self.history = list(history[:-1])  # phases of the chunks already begun
        self.taken = 0  # batches of the last chunk in history
        self._packer, self._phases, self._size, self._device = packer, phases, rows_per_batch, device
        for number in self.history:
            packer.chunk(phases[number].weights, learn_all=phases[number].learn_all, build=False)
        self._queue: Queue[tuple[int, Rows]] = Queue(maxsize=ahead)
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self) -> None:
        while True:
            phase = self.phase
            rows = self._packer.chunk(self._phases[phase].weights, learn_all=self._phases[phase].learn_all)
            assert rows is not None
            self._queue.put((phase, rows))

    def state(self) -> dict[str, Any]:
        """Return what is needed to continue with the batches that come next."""
        return {"history": self.history, "taken": self.taken}

    def batches(self) -> Iterator[Batch]:
        """Yield endless batches."""
        skip = self._skip
        while True:
            phase, rows = self._queue.get()
            self.history.append(phase)
            chunk = rows.to(self._device)
            for number, begin in enumerate(range(0, len(rows) - self._size + 1, self._size), start=1):
                self.taken = number
                if number > skip:
                    yield chunk[begin : begin + self._size]
            skip = 0


def fixed_rows(parts: Mapping[str, Part], row_len: int, num_rows: int, weights: Mapping[str, float] | None = None) -> Rows:
    """Return the same rows every time, for evaluation."""
    weights = weights or {name: float(len(part.tokens)) for name, part in parts.items()}
    rows = Packer(parts, row_len, num_rows, seed=1234).chunk(weights, learn_all=True)
    assert rows is not None
    return rows
