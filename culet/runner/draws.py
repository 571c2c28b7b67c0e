"""The draws of steps of fixed shapes, as CUDA graphs: head, draw, drafts counted; and apart what a drafter begins with.

Behind the graph of a step comes that of its draws; where drafts are wanted, then that of their beginning and a round's. So a
round of drafts is four launches, and the host does little in it that the device would have to wait for; a step after which
nobody drafts pays nothing for the drafter. Draws that need more than these graphs hold (penalties, grammars, log-probabilities,
filters that no kernel serves) are made kernel by kernel.

Shapes: T tokens of a bucket, one draw from each · R rows of it · X = T + R · V vocabulary · D model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays, RepeatedCopy
from culet.kernels.replay import replayed
from culet.kernels.types import RowSettings
from culet.runner.draft_round import FixedDrafts
from culet.runner.fixed_steps import Bucket, Captures, FixedSteps
from culet.sampling.on_gpu import is_served, stage_settings
from culet.sampling.sampler import biases_of
from culet.types import Sampling

MAX_TOKENS = 128  # of a bucket whose draws get a graph: in a larger step the host has time
MAX_BIASES = 256
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0, None, None)  # what padding draws by
NOT_FORCED = -1

# (logits [T, V], settings, positions [T]) -> tokens [T]
Draw = Callable[[Tensor, RowSettings, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step's draws leave on the device, until the same bucket draws again."""

    bucket: Bucket
    out_X: Tensor  # int64; the draws of all tokens, then how many drafts each row keeps
    accepted_R: Tensor  # the latter
    copy: RepeatedCopy  # of both

    @property
    def num_rows(self) -> int:
        return self.bucket.num_rows


@dataclass
class _Draws:
    """One bucket: what draws are made by, what they leave, and once captured the graph."""

    bucket: Bucket
    buffer: Tensor  # uint8; `columns` and `biases`, sent in one copy
    columns: RowSettings
    biases: tuple[Tensor, Tensor, Tensor]  # rows, tokens, values
    settled: Settled
    graph: torch.cuda.CUDAGraph | None = None
    begin: torch.cuda.CUDAGraph | None = None  # of a round behind these draws
    settings: Sequence[Sampling] = ()  # those that `columns` hold, or that no graph serves
    is_served: bool = False


class FixedDraws:
    """All buckets with few enough tokens. `run` answers where it serves a step's settings; captured or not, alike."""

    def __init__(self, steps: FixedSteps, rounds: FixedDrafts | None, draw: Draw) -> None:
        self.steps, self.rounds, self.draw = steps, rounds, draw
        self.ops = for_device(steps.model.device)
        # How many drafts every row keeps whatever was drawn; for measurements.
        self.forced_1 = torch.full((1,), NOT_FORCED, dtype=torch.int32, device=steps.model.device)
        self.buckets = [bucket for bucket in steps.buckets if bucket.num_tokens <= MAX_TOKENS]
        self._draws = {bucket: self._make(bucket) for bucket in self.buckets}

    def _make(self, bucket: Bucket) -> _Draws:
        device, staged = self.steps.model.device, _stage((), bucket, self.steps.model.spec.vocab_size)
        buffer = torch.zeros(staged.num_bytes, dtype=torch.uint8, device=device)
        staged.send_into(buffer)
        sent = staged.unpack(buffer)
        biases = (sent.pop("bias_row"), sent.pop("bias_token"), sent.pop("bias"))
        out_X = torch.zeros(bucket.num_tokens + bucket.num_rows, dtype=torch.int64, device=device)
        sizes = (bucket.num_tokens, bucket.num_rows)
        settled = Settled(bucket, out_X, out_X[bucket.num_tokens :], RepeatedCopy(out_X, sizes))
        return _Draws(bucket, buffer, RowSettings(*sent.values()), biases, settled)

    def run(self, bucket: Bucket, settings: Sequence[Sampling]) -> Settled | None:
        """Draw for the step that has just run in `bucket`, by the settings of its tokens; None where no graph serves them."""
        taken = self._take(bucket, settings)
        if taken is None:
            return None
        if taken.graph is None:
            self._run(taken)
        else:
            taken.graph.replay()
        return taken.settled

    def serves(self, bucket: Bucket, settings: Sequence[Sampling]) -> bool:
        """Whether `run` will draw by these settings."""
        return self._take(bucket, settings) is not None

    def _take(self, bucket: Bucket, settings: Sequence[Sampling]) -> _Draws | None:
        """A bucket's draws, set to these settings; None where no graph serves them."""
        taken = self._draws.get(bucket)
        if taken is None:
            return None
        if settings is taken.settings:
            return taken if taken.is_served else None
        if len(settings) != len(taken.settings) or any(map(lambda a, b: a is not b, settings, taken.settings)):
            taken.is_served = all(map(_is_plain, settings))
            taken.is_served &= sum(len(one.logit_bias) for one in settings) <= MAX_BIASES
            if taken.is_served:
                _stage(settings, bucket, self.steps.model.spec.vocab_size).send_into(taken.buffer)
        taken.settings = settings
        return taken if taken.is_served else None

    def _run(self, taken: _Draws) -> None:
        """What is captured: it only launches."""
        step, out_X = self.steps.step_of(taken.bucket), taken.settled.out_X
        assert step.hidden is not None, "no step has run in this bucket"
        last_TD, placed, begin_B1 = step.hidden.last_LD, step.following, step.batch.row_begin_B1
        tokens_SL = self.steps.tokens_SL
        with replayed():
            logits_TV = self.steps.model.logits(last_TD)
        self.ops.add_bias(logits_TV, *taken.biases)
        drawn_T = self.draw(logits_TV, taken.columns, placed.positions_R)
        ids_T, accepted_S = step.batch.token_ids_T, self.steps.accepted_S
        self.ops.accept_drafts(drawn_T, ids_T, begin_B1, placed.places_R, tokens_SL, self.forced_1, out_X, accepted_S)

    def begin_round(self, bucket: Bucket) -> None:
        """Fill the buffers of a round for all sequences of the step whose draws have just run in `bucket`."""
        taken = self._draws[bucket]
        if taken.begin is None:
            self._begin(taken)
        else:
            taken.begin.replay()

    def _begin(self, taken: _Draws) -> None:
        """What is captured: it only launches."""
        assert self.rounds is not None, "nobody drafts"
        step, num_rows = self.steps.step_of(taken.bucket), taken.bucket.num_rows
        assert step.hidden is not None, "no step has run in this bucket"
        placed, begin_B1, width = step.following, step.batch.row_begin_B1, self.steps.tokens_SL.shape[1]
        into = (self.rounds.facts[num_rows], self.rounds.hidden_SD[:num_rows])
        self.ops.begin_round(
            taken.settled.out_X, begin_B1, placed.places_R, placed.positions_R, width, step.hidden.last_LD, into
        )
        for own, first in zip(step.batch.groups, self.rounds.firsts, strict=True):
            first[:num_rows].copy_(own.first_B[:num_rows])

    @torch.inference_mode()
    def rehearse(self, bucket: Bucket) -> None:
        """Run one bucket's draws after its step, so that their kernels are compiled."""
        self._run(self._draws[bucket])
        if self.rounds is not None:
            self._begin(self._draws[bucket])

    @torch.inference_mode()
    def capture(self, captures: Captures, buckets: Sequence[Bucket] | None = None) -> None:
        """Capture `buckets` (default: all) whose steps have been captured, the largest first."""
        chosen = [bucket for bucket in buckets or self.buckets if bucket in self._draws]
        for bucket in sorted(chosen, key=lambda one: -one.num_tokens):
            taken = self._draws[bucket]
            taken.graph, _ = captures.capture(partial(self._run, taken))
            if self.rounds is not None:
                taken.begin, _ = captures.capture(partial(self._begin, taken))

    @property
    def num_captured(self) -> int:
        return sum((one.graph is not None) + (one.begin is not None) for one in self._draws.values())


def _is_plain(one: Sampling) -> bool:
    """Whether a draw by these settings needs nothing but its logits, and nothing of them afterwards."""
    return is_served(one) and not one.needs_history and one.logprobs is None


def _stage(settings: Sequence[Sampling], bucket: Bucket, vocab_size: int) -> PackedArrays:
    """Settings of all tokens of a bucket, then biases: what pads them adds nothing, each to another logit."""
    staged = stage_settings([*settings, *[GREEDY] * (bucket.num_tokens - len(settings))])
    columns = np.zeros(MAX_BIASES, np.int32), np.arange(MAX_BIASES, dtype=np.int32), np.zeros(MAX_BIASES, np.float32)
    columns[1][:] %= vocab_size
    if biases := biases_of(settings, vocab_size):
        for column, values in zip(columns, zip(*biases, strict=True), strict=True):
            column[: len(biases)] = values
    for name, column in zip(("bias_row", "bias_token", "bias"), columns, strict=True):
        staged.add(name, column)
    return staged
