"""Torch's symmetric memory: buffers on every GPU that all ranks can read and write. It needs no NCCL and no C++ build.

`peers` are the buffers of sums that are fused with a norm. Other tensors go through `buffer`, with torch's own reductions.

Two ranks may share a GPU if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set. NCCL refuses that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from culet.kernels.types import PeerBuffers
from culet.parallel.rank import Rank
from culet.parallel.reduce.choice import ONE_SHOT_BYTES, PUSH, Method

BUFFER_BYTES = 16 << 20
_ALIGNMENT = 16  # torch's reductions need sizes of a multiple of this
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def may_overlap() -> bool:
    """Return whether several ranks may share a GPU. Only tests allow this."""
    return os.environ.get(_OVERLAPPING, "0") == "1"


@dataclass(frozen=True)
class SymmetricMemory:
    """The buffers of a rank, and its view of those of the others."""

    buffer: Tensor  # float32, viewed in the type of each tensor
    handle: Any  # torch's, which has the addresses of all buffers
    group_name: str
    peers: PeerBuffers
    owners: tuple[Any, ...]  # They keep the memory of `peers`, whose tensors do not.

    @classmethod
    def open(
        cls, rank: Rank, device: torch.device, num_columns: int, dtype: torch.dtype, num_rows: int | None = None
    ) -> SymmetricMemory:
        """Allocate the buffers and exchange their addresses. All ranks must call this together.

        `num_columns` is the width of the widest row of a fused sum, and `num_rows` the most rows, by default as many as are
        added in one shot. Raise RuntimeError or ImportError if it is not possible.
        """
        import torch.distributed._symmetric_memory as symm_mem

        group = dist.group.WORLD
        assert group is not None
        buffer = symm_mem.empty(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
        handle = symm_mem.rendezvous(buffer, group=group.group_name)

        num_rows = num_rows or max(1, ONE_SHOT_BYTES // (num_columns * dtype.itemsize))
        places = 2, num_rows, rank.size
        data_bytes = -(-2 * num_rows * rank.size * num_columns * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        rows = symm_mem.empty(data_bytes // 4 + 2 * num_rows * rank.size, dtype=torch.int32, device=device)
        rows_handle = symm_mem.rendezvous(rows, group=group.group_name)
        data = [rows_handle.get_buffer(peer, (*places, num_columns), dtype) for peer in range(rank.size)]
        arrived = [rows_handle.get_buffer(peer, places, torch.int32, data_bytes // 4) for peer in range(rank.size)]
        arrived[rank.index].zero_()
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1))  # on the host: every rank's flags are 0 from here on
        addresses = torch.tensor([tensor.data_ptr() for tensor in (*data, *arrived)], dtype=torch.int64, device=device)
        turn = torch.zeros(num_rows, dtype=torch.int32, device=device)
        peers = PeerBuffers(rank.index, tuple(data), tuple(arrived), turn, addresses, is_pushed=False)
        return cls(buffer, handle, group.group_name, peers, (rows, rows_handle))

    def in_direction(self, direction: str) -> SymmetricMemory:
        """Return the same memory, with fused sums whose terms are moved by their writers (PUSH) or by their readers."""
        return replace(self, peers=self.peers._replace(is_pushed=direction == PUSH))

    def all_reduce(self, part: Tensor, method: Method) -> Tensor:
        """Return the sum of the ranks' tensors. Those larger than the buffer are added piece by piece."""
        flat = part.reshape(-1)
        room = BUFFER_BYTES // part.element_size()
        sums = [self._add(piece, method) for piece in flat.split(room)]
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).view(part.shape)

    def _add(self, flat: Tensor, method: Method) -> Tensor:
        count, step = flat.shape[0], _ALIGNMENT // flat.element_size()
        shared = self.buffer.view(flat.dtype)[: -(-count // step) * step]
        shared[:count].copy_(flat)
        if method is Method.ONE_SHOT:
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
