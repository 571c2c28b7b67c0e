"""The processes that share a model: how they find each other, and how they add tensors.

On CPUs, tensors are added by gloo. On GPUs, they are added over symmetric memory or by NCCL (`reduce/choice.py`), and gloo
exchanges facts on the host. All processes run on one machine. They meet through a file (`torch.distributed.FileStore`) and talk
over the loopback interface.
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
from culet.kernels.types import PeerBuffers
from culet.parallel.rank import Rank
from culet.parallel.reduce.choice import LIBRARY_ALONE, Method, Reductions
from culet.parallel.reduce.symmetric import SymmetricMemory

# How long a rank waits for the others, at the start and in a reduction. The engine notices much earlier that a rank is dead,
# stopped, or hangs, and then ends all of them.
_PATIENCE = timedelta(hours=1)
# Its name until torch 2.12.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass
class RankGroup:
    """The ranks of a model, seen from one of them. It is also their `AllReduce`."""

    rank: Rank
    reductions: Reductions = LIBRARY_ALONE
    symmetric: SymmetricMemory | None = None
    _is_alone: bool = False

    @classmethod
    def join(cls, rank: Rank, meeting_file: Path | str, device: torch.device) -> RankGroup:
        """Join the other ranks at `meeting_file`. Block until all of them have arrived. A process can join only one group."""
        os.environ.setdefault(_GLOO_INTERFACE, "lo")
        store = dist.FileStore(str(meeting_file), rank.size)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.size, timeout=_PATIENCE)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return cls(rank)

    def use(self, reductions: Reductions, device: torch.device, num_columns: int, dtype: torch.dtype) -> None:
        """Add tensors as `reductions` says. `num_columns` is the width of the widest row of a sum that is fused with a norm."""
        self.reductions = reductions
        if reductions.is_symmetric:
            memory = SymmetricMemory.open(self.rank, device, num_columns, dtype)
            self.symmetric = memory.in_direction(reductions.direction)

    def __call__(self, part: Tensor, /) -> Tensor:
        """Add `part` over all ranks, in place if its memory allows it."""
        part = part.contiguous()
        if self._is_alone:
            return part
        method = self.reductions.method(part.nbytes)
        if self.symmetric is not None and method is not Method.LIBRARY:
            return self.symmetric.all_reduce(part, method)
        dist.all_reduce(part)
        return part

    def peers_for(self, num_tokens: int, num_columns: int) -> PeerBuffers | None:
        """Return the buffers for a sum that is fused with its reader. None if it is too large, or if that is not possible."""
        if self.symmetric is None or not self.reductions.direction or (self._is_alone and not _is_only_warming()):
            return None
        peers = self.symmetric.peers
        _, most_tokens, _, most_columns = peers.data[self.rank.index].shape
        return peers if num_tokens <= most_tokens and num_columns <= most_columns else None

    def gather(self, part: Tensor, /) -> Tensor:
        """Return the tensors of all ranks, stacked in rank order."""
        if self._is_alone:
            return part.expand(self.rank.size, *part.shape)
        if self.symmetric is not None and self.reductions.method(part.nbytes) is not Method.LIBRARY:
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


def _is_only_warming() -> bool:
    """Return whether kernels are only compiled, which needs no other rank."""
    from culet.kernels.triton.launch import is_only_warming  # triton is only there with a GPU

    return is_only_warming()
