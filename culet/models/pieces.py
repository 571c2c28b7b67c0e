"""A forward pass in pieces. A piece is everything that is launched between one layer's attention and the next.

A piece depends only on the number of tokens, while attention also depends on the rows of a step. So `runner/fixed/prompts.py`
can pad the tokens and replay each piece as a CUDA graph, with attention between them. The layers that run only for the tail of
a step are one piece, because the attention of single tokens also depends only on their number.

Shapes: T tokens of the step · U the same, padded · L tokens of its tail · D model · N heads · H head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from culet.attention.batch import INPUT_ROW_TOKEN, ForwardBatch

P = ParamSpec("P")
R = TypeVar("R")


class TokenInputs(NamedTuple):
    """The part of a batch that pieces read."""

    token_ids_U: Tensor
    positions_U: Tensor
    kv_addresses: tuple[Tensor, ...]  # by KV group, [U]; padding is not stored


@dataclass(frozen=True, slots=True)
class TailInputs:
    """The input of the layers that run only for the tail."""

    x_LD: Tensor  # the residual stream
    embedded_LD: Tensor
    first_LX: Tensor  # for the first layer: its queries [L, N, H] if it owns KV, otherwise its normed input [L, D]


# Takes the tail as a batch and returns the stream after the final norm.
TailLayers = Callable[[TailInputs, ForwardBatch], Tensor]


class Pieces:
    """Runs every piece at once, without padding."""

    def inputs(self, batch: ForwardBatch) -> TokenInputs:
        """Begin a forward pass of `batch` and return what its pieces read."""
        token_ids_T, rows = batch.token_ids_T, batch.input_rows
        if rows is not None:
            token_ids_T = token_ids_T.index_fill(0, rows.index_M, INPUT_ROW_TOKEN)
        return TokenInputs(token_ids_T, batch.positions_T, tuple([group.kv_address_T for group in batch.groups]))

    def run(self, piece: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a piece. A replay returns only the tensors in it, and None for everything else."""
        return piece(*args, **kwargs)

    def skip(self, num_pieces: int, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Skip the next pieces. Return `results`, [T, ...], in place of the last one's, as the piece after it reads them."""
        return results

    def pad(self, tensor_T: Tensor) -> Tensor:
        """Return a result of attention as the next piece reads it, [U, ...]."""
        return tensor_T

    def cut(self, tensor_U: Tensor) -> Tensor:
        """Return a piece's result without padding, [T, ...]."""
        return tensor_U

    def keep(self, tensor_U: Tensor) -> Tensor:
        """Do the same for a result that is needed after the pass. Graphs share memory, so a replay returns a copy."""
        return tensor_U

    def run_tail(self, layers: TailLayers, inputs: TailInputs, tail: ForwardBatch) -> Tensor:
        """Return the result of the layers that run only for the tail, [L, D]."""
        return layers(inputs, tail)


DIRECT = Pieces()
