"""Reductions over torch's symmetric memory: each rank reads the buffers of the others. It needs no NCCL and no C++ build.

Small tensors are added in one shot: every rank reads all buffers and adds them. Larger ones take two: every rank adds one part
of all buffers, and then reads the sums. Tensors larger than the buffer are added piece by piece.

Two ranks may share a GPU if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set. NCCL refuses that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from culet.errors import ConfigError

ONE_SHOT_BYTES = 256 << 10  # the most bytes that are added in one shot
BUFFER_BYTES = 16 << 20
_ALIGNMENT = 16  # the ops of torch need sizes of a multiple of this
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def may_overlap() -> bool:
    """Return whether several ranks may share a GPU, which only tests do."""
    return os.environ.get(_OVERLAPPING, "0") == "1"


@dataclass(frozen=True)
class SymmetricMemory:
    """A buffer on every rank that the others can read."""

    buffer: Tensor  # float32, viewed in the type of each tensor
    handle: Any  # torch's, which has the addresses of all buffers
    group_name: str

    @classmethod
    def open(cls, device: torch.device) -> SymmetricMemory:
        """Allocate the buffers, exchange their addresses, and check that a sum is right. All ranks must call this together.

        Raise a ConfigError that says why if the GPUs cannot read each other's memory.
        """
        try:
            import torch.distributed._symmetric_memory as symm_mem

            group = dist.group.WORLD
            assert group is not None
            buffer = symm_mem.empty(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
            memory = cls(buffer, symm_mem.rendezvous(buffer, group=group.group_name), group.group_name)
            memory.check(device)
        except (ImportError, RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"all-reduce: symmetric memory cannot be used: {reason}", hint="use --all-reduce auto") from error
        return memory

    def check(self, device: torch.device) -> None:
        """Raise if a sum of either kind is wrong."""
        rank, size = dist.get_rank(), dist.get_world_size()
        for count in (8, ONE_SHOT_BYTES):  # in one shot, and in two
            total = self.all_reduce(torch.full((count,), float(rank + 1), device=device))
            assert bool((total == size * (size + 1) / 2).all()), "the sum of the ranks' numbers is wrong"

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors."""
        flat = part.reshape(-1)
        room = BUFFER_BYTES // part.element_size()
        sums = [self._add(piece) for piece in flat.split(room)]
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).view(part.shape)

    def _add(self, flat: Tensor) -> Tensor:
        count, step = flat.shape[0], _ALIGNMENT // flat.element_size()
        shared = self.buffer.view(flat.dtype)[: -(-count // step) * step]
        shared[:count].copy_(flat)
        if shared.nbytes <= ONE_SHOT_BYTES:
            total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self.group_name)
            return total[:count]
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self.group_name)
        return shared[:count].clone()  # the next reduction overwrites the buffer

    def gather(self, part: Tensor, num_ranks: int) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        flat = part.reshape(-1)
        pieces = [self._gather(piece, num_ranks) for piece in flat.split(BUFFER_BYTES // part.element_size())]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).view(num_ranks, *part.shape)

    def _gather(self, flat: Tensor, num_ranks: int) -> Tensor:
        self.buffer.view(flat.dtype)[: flat.shape[0]].copy_(flat)
        self.handle.barrier(channel=0)
        parts = torch.stack([self.handle.get_buffer(rank, flat.shape, flat.dtype) for rank in range(num_ranks)])
        self.handle.barrier(channel=1)  # before a rank writes to its buffer again
        return parts
