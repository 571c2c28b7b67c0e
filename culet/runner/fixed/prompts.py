"""Run steps with short prompts, up to 2,048 tokens, mostly as CUDA graphs.

A short prompt has hundreds of kernels, and the host needs longer to launch them than the device to run them. So a step is
padded to the smallest size that holds its tokens, and the pieces of the forward pass (`models/pieces.py`) are replayed as
graphs of that size. Attention is launched between them as in any other step, so a step may mix prompts with other rows. Padding
tokens store no KV, and no row reads them.

A long prompt keeps the device busy while the host launches, so it needs neither padding nor graphs.

Shapes: T tokens of a step · U tokens of a size, including padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from culet import hardware
from culet.attention.batch import INPUT_ROW_TOKEN, ForwardBatch
from culet.hardware import Arch
from culet.kernels.captures import Captures, borrowed
from culet.kernels.replay import replayed
from culet.layers.weight.base import Weight
from culet.models.gemma4 import Gemma4
from culet.models.pieces import DIRECT, Pieces, TailInputs, TailLayers, TokenInputs
from culet.models.sizes import weights_per_token
from culet.models.spec import ModelSpec
from culet.runner.fill import fill
from culet.runner.fixed.page_tables import DeviceTables
from culet.runner.fixed.steps import bucket_sizes
from culet.runner.fixed.tails import FixedTails
from culet.runner.target import Target

P = ParamSpec("P")
R = TypeVar("R")

SIZES = (64, 128, 192, 256, 304, 336, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048)
LAYER_SECONDS = 6e-4  # time that the host needs to launch a layer, measured beside an H200
EXPERTS_SECONDS = 2e-4  # additional time for a layer's router and experts
MIN_TAIL_LAYERS = 4  # a tail with fewer layers is launched quickly enough


def prompt_sizes(spec: ModelSpec, expert_bytes: int, limit: int, arch: Arch) -> tuple[int, ...]:
    """Return the sizes of up to `limit` tokens at which the host needs longer to launch a layer than the GPU to run it.

    `expert_bytes` are those of all routed experts. Even a short prompt reads each of them, for few tokens each.
    """
    layer_seconds = LAYER_SECONDS + (0 if spec.moe is None else EXPERTS_SECONDS)
    spare = len(spec.layers) * layer_seconds - expert_bytes / arch.rates.bytes_per_s
    longest = spare * arch.rates.flops_per_s / (2 * weights_per_token(spec))
    return tuple(size for size in SIZES if size <= min(limit, longest))


def _suits(model: Gemma4) -> bool:
    """Return whether a model's pieces can be graphs.

    Ranks exchange sums within a piece. Weights that are widened for many tokens would keep the memory of their copies.
    """
    return model.rank.size == 1 and not any(isinstance(module, Weight) and module.is_widened for module in model.modules())


class FixedPrompts:
    """The pieces of a target in all sizes. A step has the same result with and without graphs."""

    def __init__(self, target: Target, tokens_SL: Tensor, tables: DeviceTables, limit: int) -> None:
        """Make sizes of up to `limit` tokens. Models that cannot use them have none."""
        self.target, self._tokens_SL = target, tokens_SL
        capability = hardware.capability_of(target.device) if target.device.type == "cuda" else hardware.ASSUMED_CAPABILITY
        arch = hardware.arch_of(capability)
        _, expert_bytes = target.model.step_bytes()
        self.sizes = prompt_sizes(target.model.spec, expert_bytes, limit, arch) if _suits(target.model) else ()
        buffers = _Buffers.allocate(max(self.sizes, default=0), len(target.pool.layout.groups), target.device)
        num_tail_layers = len(target.model.spec.layers) - target.model.num_whole_layers(target.taps)
        self.tails: FixedTails | None = None
        if self.sizes and num_tail_layers >= MIN_TAIL_LAYERS:
            self.tails = FixedTails(target, tables, bucket_sizes(tokens_SL.shape[0] - 1))
        self._pieces = {size: PaddedPieces(size, buffers, self.tails) for size in self.sizes}

    def pieces_for(self, batch: ForwardBatch) -> Pieces:
        """Return the smallest pieces that hold the tokens of a step with prompts."""
        return DIRECT if batch.tail is None else self.smallest(batch.num_tokens)  # without a tail, it is decode or verify

    def smallest(self, num_tokens: int) -> Pieces:
        """Return the smallest pieces that hold so many tokens."""
        return next((self._pieces[size] for size in self.sizes if size >= num_tokens), DIRECT)

    @torch.inference_mode()
    def rehearse(self, size: int) -> None:
        """Run all pieces of a size without rows, so that their kernels are compiled."""
        self._run_without_rows(self._pieces[size])

    @torch.inference_mode()
    def capture(self, captures: Captures, sizes: Sequence[int] | None = None) -> None:
        """Capture the pieces of `sizes` (default: all), the largest first."""
        for size in sorted(sizes or self.sizes, reverse=True):
            self.rehearse(size)
            torch.cuda.synchronize(self.target.device)
            with self._pieces[size].capturing(captures):
                self._run_without_rows(self._pieces[size])

    @property
    def num_captured(self) -> int:
        return sum(pieces.num_captured for pieces in self._pieces.values())

    def _run_without_rows(self, pieces: PaddedPieces) -> None:
        target = self.target
        batch = fill((), target.pool.layout, self._tokens_SL, target.placeholder_P)
        batch = replace(batch, tail=batch)
        target.plan(batch)
        num_layers = target.model.num_whole_layers(target.taps)
        target.model.forward_whole(batch, target.pool, target.backends, target.taps, num_layers, pieces)


@dataclass(frozen=True)
class _Buffers:
    """The inputs of pieces, shared by all sizes. A step fills the first tokens. The others are padding."""

    token_ids_U: Tensor
    positions_U: Tensor
    kv_address_GU: Tensor
    heads: dict[int, Tensor]  # the outputs of attention [U, X], by X

    @classmethod
    def allocate(cls, size: int, num_groups: int, device: torch.device) -> _Buffers:
        zeros_U = torch.zeros(size, dtype=torch.int64, device=device)
        return cls(zeros_U, zeros_U.clone(), zeros_U.new_full((num_groups, size), -1), {})


class PaddedPieces(Pieces):
    """Runs the pieces of one size at fixed addresses. Once they are captured, it replays them."""

    def __init__(self, size: int, buffers: _Buffers, tails: FixedTails | None) -> None:
        self.size, self._buffers, self._tails = size, buffers, tails
        self._captures: Captures | None = None  # set while the pieces are captured
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Any]] = []  # with their results, in the order of the pieces
        self._next = self._num_tokens = 0

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @contextmanager
    def capturing(self, captures: Captures) -> Iterator[None]:
        """Capture every piece that runs inside this block. Its result lies in memory that later captures may use again."""
        self._captures, self._graphs = captures, []
        try:
            yield
        finally:
            self._captures = None

    def inputs(self, batch: ForwardBatch) -> TokenInputs:
        buffers, count = self._buffers, batch.num_tokens
        self._next, self._num_tokens = 0, count
        buffers.token_ids_U[:count].copy_(batch.token_ids_T)
        if batch.input_rows is not None:
            buffers.token_ids_U.index_fill_(0, batch.input_rows.index_M, INPUT_ROW_TOKEN)
        buffers.positions_U[:count].copy_(batch.positions_T)
        buffers.kv_address_GU[:, count : self.size].fill_(-1)
        for group, address_U in zip(batch.groups, buffers.kv_address_GU, strict=True):
            if group.kv_address_T.shape[0] == count:  # a group that the step does not use has none
                address_U[:count].copy_(group.kv_address_T)
        addresses = tuple([address_U[: self.size] for address_U in buffers.kv_address_GU])
        return TokenInputs(buffers.token_ids_U[: self.size], buffers.positions_U[: self.size], addresses)

    def run(self, piece: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._captures is None and not self._graphs:
            with replayed():
                return piece(*args, **kwargs)
        if self._captures is not None:
            with replayed():
                graph, result = self._captures.capture_warm(partial(piece, *args, **kwargs))
            self._graphs.append((graph, borrowed(result)))
            return result
        graph, result = self._graphs[self._next]
        self._next += 1
        graph.replay()
        return result

    def skip(self, num_pieces: int, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        count = self._num_tokens
        if self._graphs:
            self._next += num_pieces
            padded = self._graphs[self._next - 1][1]  # the memory that the next piece reads
        else:
            padded = tuple([tensor.new_empty(self.size, *tensor.shape[1:]) for tensor in results])
        for tensor_U, tensor_T in zip(padded, results, strict=True):
            tensor_U[:count].copy_(tensor_T)
            tensor_U[count:].zero_()  # not what other pieces have left there, which may be NaN
        return padded

    def pad(self, tensor_T: Tensor) -> Tensor:
        whole = self._buffers.heads.get(tensor_T.shape[1])
        if whole is None:
            whole = tensor_T.new_zeros(self._buffers.token_ids_U.shape[0], tensor_T.shape[1])
            self._buffers.heads[tensor_T.shape[1]] = whole
        whole[: self._num_tokens].copy_(tensor_T)
        return whole[: self.size]

    def cut(self, tensor_U: Tensor) -> Tensor:
        return tensor_U[: self._num_tokens]

    def keep(self, tensor_U: Tensor) -> Tensor:
        return self.cut(tensor_U).clone()

    def run_tail(self, layers: TailLayers, inputs: TailInputs, tail: ForwardBatch) -> Tensor:
        size = None if self._tails is None else self._tails.find(tail)
        return layers(inputs, tail) if self._tails is None or size is None else self._tails.run(size, inputs, tail)
