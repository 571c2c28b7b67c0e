"""Buffers of several ranks in one process, for tests of reductions without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from culet.kernels.types import PeerBuffers


def make_peers(data: list[Tensor], arrived: list[Tensor], turns: list[Tensor], *, is_pushed: bool) -> list[PeerBuffers]:
    """Return the buffers as each rank sees them."""
    addresses = torch.tensor([tensor.data_ptr() for tensor in (*data, *arrived)])
    return [PeerBuffers(rank, tuple(data), tuple(arrived), turn, addresses, is_pushed) for rank, turn in enumerate(turns)]


def new_peers(num_ranks: int, num_rows: int, num_columns: int, *, is_pushed: bool) -> list[PeerBuffers]:
    data = [torch.full((2, num_rows, num_ranks, num_columns), torch.nan) for _ in range(num_ranks)]
    arrived = [torch.zeros(2, num_rows, num_ranks, dtype=torch.int32) for _ in range(num_ranks)]
    turns = [torch.zeros(num_rows, dtype=torch.int32) for _ in range(num_ranks)]
    return make_peers(data, arrived, turns, is_pushed=is_pushed)


def copy_of(peers: list[PeerBuffers]) -> list[PeerBuffers]:
    data, arrived = ([tensor.clone() for tensor in tensors] for tensors in (peers[0].data, peers[0].arrived))
    return make_peers(data, arrived, [peer.turn.clone() for peer in peers], is_pushed=peers[0].is_pushed)


def write_terms(peers: PeerBuffers, terms_TX: Tensor) -> None:
    """Write the terms of one rank, as its kernel does before it waits."""
    num_tokens, size = terms_TX.shape
    turn_T, row = peers.turn[:num_tokens] + 1, torch.arange(num_tokens)
    place = (turn_T & 1).long()
    for rank, (data, arrived) in enumerate(zip(peers.data, peers.arrived, strict=True)):
        if peers.is_pushed or rank == peers.rank:
            data[place, row, peers.rank, :size] = terms_TX
        arrived[place, row, peers.rank] = turn_T
    peers.turn[:num_tokens] = turn_T
