"""The processes that share a model: how they find each other, and how they add tensors.

On CPUs, tensors are added by gloo. On GPUs, NCCL adds them, or on request symmetric memory, and gloo exchanges facts on the
host. All processes run on one machine. They meet through a file (`torch.distributed.FileStore`) and talk over the loopback
interface.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from culet.errors import ConfigError
from culet.parallel.rank import Rank
from culet.parallel.symmetric import SymmetricMemory

# How long a rank waits for the others, at the start and in a reduction. The engine notices much earlier that a rank is dead or
# hangs, and then ends all of them.
_PATIENCE = timedelta(hours=1)
# Its name until torch 2.12.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass
class RankGroup:
    """The ranks of a model, seen from one of them. It is also their `AllReduce`."""

    rank: Rank
    symmetric: SymmetricMemory | None = None
    _is_alone: bool = False

    @classmethod
    def join(cls, rank: Rank, meeting_file: Path | str, device: torch.device, *, is_symmetric: bool = False) -> RankGroup:
        """Meet the other ranks at `meeting_file`. Blocks until all have come. A process can join one group.

        With `is_symmetric`, GPUs add tensors over symmetric memory.
        """
        os.environ.setdefault(_GLOO_INTERFACE, "lo")
        store = dist.FileStore(str(meeting_file), rank.size)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.size, timeout=_PATIENCE)
        if device.type == "cpu" or not is_symmetric:
            return cls(rank)
        torch.cuda.set_device(device)
        return cls(rank, SymmetricMemory.open(device))

    def __call__(self, part: Tensor, /) -> Tensor:
        """Add `part` over all ranks, in place if its memory allows it."""
        part = part.contiguous()
        if self._is_alone:
            return part
        if self.symmetric is not None:
            return self.symmetric.all_reduce(part)
        dist.all_reduce(part)
        return part

    def gather(self, part: Tensor, /) -> Tensor:
        """Return the tensors of all ranks, stacked in the order of their ranks."""
        if self._is_alone:
            return part.expand(self.rank.size, *part.shape)
        if self.symmetric is not None:
            return self.symmetric.gather(part, self.rank.size)
        parts = part.new_empty(self.rank.size, *part.shape)
        _all_gather(parts.view(-1, *part.shape[1:]), part.contiguous())
        return parts

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make sums and gathers return at once, with meaningless values, because the other ranks may not take part."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Raise a ConfigError on all ranks if `facts` differ between them. It names the fact and both values."""
        everything: list[Mapping[str, object]] = [{} for _ in range(self.rank.size)]
        dist.all_gather_object(everything, dict(facts))
        first = everything[0]
        for index, other in enumerate(everything):
            for name in sorted({*first, *other}):
                if first.get(name) != other.get(name):
                    raise ConfigError(
                        f"{name} differs between ranks: rank 0 has {first.get(name)}, but rank {index} has {other.get(name)}",
                        hint="start all ranks with the same version, model and settings",
                    )

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        values = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values)
