"""Make the draws of fixed-shape steps with CUDA graphs that compute logits, draws and accepted drafts.

The graph of a step is followed by the graph of its draws, so the device waits for the host as little as possible. `Draws` makes
the draws that need more than these graphs do (penalties, grammars, log-probabilities, filters that no kernel serves).

Shapes: T tokens of a bucket, one draw from each · R rows of a bucket · X = T + R · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from culet.kernels.captures import Captures
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays, RepeatedCopy
from culet.kernels.replay import replayed
from culet.kernels.types import RowSettings
from culet.runner.draws import FixedDrawn
from culet.runner.fixed.steps import Bucket, FixedStep
from culet.runner.target import Target
from culet.sampling.gpu_sampler import is_served, stage_settings
from culet.sampling.sampler import biases_of
from culet.types import Sampling

MAX_TOKENS = 128  # most tokens of a bucket whose draws get a graph. In a larger step, the host has time.
MAX_BIASES = 256
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0, None, None)  # settings of padding
NOT_FORCED = -1

# (logits [T, V], settings, positions [T]) -> tokens [T]
DrawKernel = Callable[[Tensor, RowSettings, Tensor], Tensor]


@dataclass
class _Buffers:
    """The buffers of one bucket, with its settings and draws on the device, and the graph once it is captured."""

    buffer: Tensor  # uint8, holds `columns` and `biases`, which are sent in one copy
    columns: RowSettings
    biases: tuple[Tensor, Tensor, Tensor]  # rows, tokens, values
    drawn: FixedDrawn
    graph: torch.cuda.CUDAGraph | None = None
    settings: Sequence[Sampling] = ()  # the last settings that were asked for
    is_served: bool = False  # whether the kernels can draw by these settings
    is_sent: bool = False  # whether `columns` and `biases` hold these settings


class FixedDraws:
    """Draws after steps of buckets that have few enough tokens. The result is the same with and without a graph."""

    def __init__(
        self, target: Target, buckets: Sequence[Bucket], tokens_SL: Tensor, accepted_S: Tensor, draw: DrawKernel
    ) -> None:
        self.target, self.tokens_SL, self.accepted_S, self.draw = target, tokens_SL, accepted_S, draw
        self._ops = for_device(target.device)
        # How many drafts every row keeps, regardless of its draws. Used for measurements.
        self.forced_1 = torch.full((1,), NOT_FORCED, dtype=torch.int32, device=target.device)
        self.buckets = [bucket for bucket in buckets if bucket.num_tokens <= MAX_TOKENS]
        self._buffers = {bucket: self._make_buffers(bucket) for bucket in self.buckets}

    def serves(self, bucket: Bucket, settings: Sequence[Sampling]) -> bool:
        """Return whether the tokens of a step can be drawn here. `settings` has one item per token."""
        buffers = self._buffers.get(bucket)
        if buffers is None:
            return False
        # Most steps draw for the same sequences as the previous step.
        if settings != buffers.settings:
            num_biases = sum(len(sampling.logit_bias) for sampling in settings)
            buffers.is_served = all(map(_is_plain, settings)) and num_biases <= MAX_BIASES
            buffers.settings, buffers.is_sent = settings, False
        return buffers.is_served

    def run(self, step: FixedStep, settings: Sequence[Sampling]) -> FixedDrawn:
        """Draw after a step that has just run. `serves` must hold for `settings`."""
        assert self.serves(step.bucket, settings), "no graph can draw with these settings"
        buffers = self._buffers[step.bucket]
        if not buffers.is_sent:
            _stage(settings, step.bucket, self.target.model.spec.vocab_size).send_into(buffers.buffer)
            buffers.is_sent = True
        if buffers.graph is None:
            self._launch(step, buffers)
        else:
            buffers.graph.replay()
        return buffers.drawn

    def drawn_in(self, bucket: Bucket) -> FixedDrawn:
        """Return the tensors that take the draws of a bucket's steps."""
        return self._buffers[bucket].drawn

    @torch.inference_mode()
    def rehearse(self, step: FixedStep) -> None:
        """Draw after a step, so that the kernels are compiled."""
        self._launch(step, self._buffers[step.bucket])

    @torch.inference_mode()
    def capture(self, captures: Captures, steps: Sequence[FixedStep]) -> None:
        """Capture the draws of steps that are already captured, the largest first."""
        for step in sorted(steps, key=lambda step: -step.bucket.num_tokens):
            buffers = self._buffers[step.bucket]
            buffers.graph, _ = captures.capture(partial(self._launch, step, buffers))

    @property
    def num_captured(self) -> int:
        return sum(buffers.graph is not None for buffers in self._buffers.values())

    def _launch(self, step: FixedStep, buffers: _Buffers) -> None:
        """Draw after `step`. This is captured, so it only launches kernels."""
        assert step.hidden is not None, "no step has run in this bucket"
        next_tokens, begin_B1 = step.next_tokens, step.batch.row_begin_B1
        with replayed():
            logits_TV = self.target.logits(step.hidden.last_LD)
        self._ops.add_bias(logits_TV, *buffers.biases)
        drawn_T = self.draw(logits_TV, buffers.columns, next_tokens.positions_R)
        self._ops.accept_drafts(
            drawn_T,
            step.layout.token_ids_T,
            begin_B1,
            next_tokens.places_R,
            self.tokens_SL,
            self.forced_1,
            buffers.drawn.out_X,
            self.accepted_S,
        )

    def _make_buffers(self, bucket: Bucket) -> _Buffers:
        device, staged = self.target.device, _stage((), bucket, self.target.model.spec.vocab_size)
        buffer = torch.zeros(staged.num_bytes, dtype=torch.uint8, device=device)
        staged.send_into(buffer)
        sent = staged.unpack(buffer)
        biases = (sent.pop("bias_row"), sent.pop("bias_token"), sent.pop("bias"))
        out_X = torch.zeros(bucket.num_tokens + bucket.num_rows, dtype=torch.int64, device=device)
        copy = RepeatedCopy(out_X, (bucket.num_tokens, bucket.num_rows))
        return _Buffers(buffer, RowSettings(*sent.values()), biases, FixedDrawn(out_X, copy))


def _is_plain(sampling: Sampling) -> bool:
    """Return whether a draw by these settings needs only its logits, and nothing needs the logits afterwards."""
    return is_served(sampling) and not sampling.needs_history and sampling.logprobs is None


def _stage(settings: Sequence[Sampling], bucket: Bucket, vocab_size: int) -> PackedArrays:
    """Stage the settings of all tokens of a bucket, then biases. Biases that are padding add 0 to different logits."""
    staged = stage_settings([*settings, *[GREEDY] * (bucket.num_tokens - len(settings))])
    columns = np.zeros(MAX_BIASES, np.int32), np.arange(MAX_BIASES, dtype=np.int32), np.zeros(MAX_BIASES, np.float32)
    columns[1][:] %= vocab_size
    if biases := biases_of(settings, vocab_size):
        for column, values in zip(columns, zip(*biases, strict=True), strict=True):
            column[: len(biases)] = values
    for name, column in zip(("bias_row", "bias_token", "bias"), columns, strict=True):
        staged.add(name, column)
    return staged
