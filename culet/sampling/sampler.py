"""Draw tokens from logits row by row, so that no row's draw depends on its neighbours.

A row's logits pass through these steps in order: logit bias (suppressed tokens have -inf), repetition penalty over prompt and
output, frequency and presence penalty over the output, a grammar's mask of allowed tokens, temperature, top-k, top-p over the
tokens that top-k kept, and min-p. Then one uniform number u, keyed by (seed, sample, position) (see `philox`), picks the first
token, in order of token ids, whose cumulative probability exceeds u times the total. Temperature 0 picks the largest logit,
and the lowest id among equal ones.

Probabilities and sums are float64, so that every device draws the same token in any order of summation.
Shapes: R rows to draw · V vocabulary · C candidate tokens · H rows with penalties · M tokens of the longest history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from culet.kernels.eager.sampling import add_bias, apply_bitmask
from culet.kernels.host_transfer import on_device
from culet.sampling.philox import uniforms
from culet.sampling.ranking import argmax, top_columns
from culet.types import Sampling

MAX_CANDIDATES = 1024  # up to this top-k, only that many columns are processed instead of the whole vocabulary
FULL_ROWS = 16  # rows whose whole vocabulary is weighed at once, which limits the memory for float64 weights


@dataclass(frozen=True, slots=True)
class History:
    """The earlier tokens, for penalties. Row r draws the token at `positions[r]` of slot `slots[r]`."""

    tokens_SL: Tensor  # the slots' tokens, int32 or int64
    slots: Sequence[int]
    prompt_lens: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that grammars allow in some rows. Other rows draw freely."""

    rows: Sequence[int]
    bits_AW: Tensor  # int32, one line per row, on any device. Bit t % 32 of word t // 32 is 1 if token t is allowed.


class Sampler(Protocol):
    """Draws tokens on a device."""

    def sample(
        self,
        logits_RV: Tensor,
        settings: Sequence[Sampling],
        positions: Sequence[int],
        history: History | None = None,
        positions_R: Tensor | None = None,
        *,
        masks: TokenMasks | None = None,
    ) -> Tensor:
        """Draw as the function `sample` does. `positions_R` are the positions as int32, if they are already on the device."""


class EagerSampler:
    """`sample` as a Sampler."""

    def sample(
        self,
        logits_RV: Tensor,
        settings: Sequence[Sampling],
        positions: Sequence[int],
        history: History | None = None,
        positions_R: Tensor | None = None,
        *,
        masks: TokenMasks | None = None,
    ) -> Tensor:
        return sample(logits_RV, settings, positions, history, masks=masks)


def sample(
    logits_RV: Tensor,
    settings: Sequence[Sampling],
    positions: Sequence[int],
    history: History | None = None,
    *,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Draw one token per row, int64 [R] on the logits' device. `positions[r]` is the token's position in its sequence."""
    return draw(adjust(logits_RV, settings, positions, history, masks=masks), settings, positions)


def draw(logits_RV: Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Draw like `sample`, from logits that already include bias, penalties and masks."""
    if all(sampling.temperature == 0 for sampling in settings):
        return argmax(logits_RV)
    # Each row is drawn by its own settings, so that its result does not depend on its neighbours' settings.
    methods: dict[Callable[[_Part], Tensor], list[int]] = {}
    for row, sampling in enumerate(settings):
        methods.setdefault(_method(sampling), []).append(row)
    uniform = uniforms([sampling.seed for sampling in settings], [sampling.sample for sampling in settings], positions)
    tokens_R = torch.empty(len(settings), dtype=torch.int64, device=logits_RV.device)
    for method, rows in methods.items():
        step = len(rows) if method in (_draw_best, _draw_few) else FULL_ROWS
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            part = _Part.of(logits_RV, some, settings, [uniform[row] for row in some])
            if len(some) == len(settings):
                return method(part)
            tokens_R[on_device(some, tokens_R.device)] = method(part)
    return tokens_R


def biases_of(settings: Sequence[Sampling], width: int) -> list[tuple[int, int, float]]:
    """Return (row, token, bias) for every bias of all rows."""
    return [(row, token, bias) for row, sampling in enumerate(settings) for token, bias in sampling.logit_bias if token < width]


def adjust(
    logits_RV: Tensor,
    settings: Sequence[Sampling],
    positions: Sequence[int],
    history: History | None = None,
    *,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Return the logits after bias, penalties and masks. The input is not changed, but returned if there is nothing to do."""
    biases = biases_of(settings, logits_RV.shape[-1])
    penalised = [row for row, sampling in enumerate(settings) if sampling.needs_history]
    if not biases and not penalised and masks is None:
        return logits_RV
    logits_RV = logits_RV.clone()
    if biases:
        add_bias(logits_RV, *(on_device(column, logits_RV.device) for column in zip(*biases, strict=True)))
    if penalised:
        assert history is not None, "penalties need the earlier tokens"
        index = on_device(penalised, logits_RV.device)
        logits_RV[index] = _penalise(
            logits_RV[index],
            [settings[row] for row in penalised],
            [positions[row] for row in penalised],
            History(
                history.tokens_SL, [history.slots[row] for row in penalised], [history.prompt_lens[row] for row in penalised]
            ),
        )
    if masks is not None:
        apply_bitmask(logits_RV, masks.bits_AW.to(logits_RV.device), on_device(masks.rows, logits_RV.device))
    return logits_RV


def _penalise(logits_HV: Tensor, settings: Sequence[Sampling], lengths: Sequence[int], history: History) -> Tensor:
    """Apply the three penalties in place to rows with a history of `lengths` tokens. Only those tokens' logits are read."""
    device = logits_HV.device
    column_M = torch.arange(max(lengths), device=device)
    is_seen_HM = column_M < on_device(lengths, device)[:, None]
    is_output_HM = is_seen_HM & (column_M >= on_device(history.prompt_lens, device)[:, None])
    tokens_HM = history.tokens_SL[:, : max(lengths)][on_device(history.slots, device)].long()
    # Columns past the end repeat the first token. Equal tokens get equal logits, so the order of writing does not matter.
    tokens_HM = torch.where(is_seen_HM, tokens_HM, tokens_HM[:, :1])

    def setting(values: list[float]) -> Tensor:
        return on_device(values, device, logits_HV.dtype)[:, None]

    repetition = setting([sampling.repetition_penalty for sampling in settings])
    frequency = setting([sampling.frequency_penalty for sampling in settings])
    presence = setting([sampling.presence_penalty for sampling in settings])
    counts_HV = torch.zeros_like(logits_HV).scatter_add_(1, tokens_HM, is_output_HM.to(logits_HV.dtype))
    counts_HM = counts_HV.gather(1, tokens_HM)
    before_HM = logits_HV.gather(1, tokens_HM)
    after_HM = torch.where(before_HM > 0, before_HM / repetition, before_HM * repetition)
    return logits_HV.scatter_(1, tokens_HM, after_HM - frequency * counts_HM - presence * (counts_HM > 0))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are drawn the same way, with their settings as columns."""

    logits_RV: Tensor
    max_k: int  # the largest top-k
    temperature_R1: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor
    min_p_R1: Tensor
    uniform_R1: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, rows: list[int], settings: Sequence[Sampling], uniform: list[float]) -> _Part:
        width = logits_RV.shape[-1]
        chosen = [settings[row] for row in rows]
        top_k = [min(sampling.top_k, width) if sampling.top_k > 0 else width for sampling in chosen]
        numbers = [
            [sampling.temperature for sampling in chosen],
            [float(k) for k in top_k],
            [sampling.top_p for sampling in chosen],
            [sampling.min_p for sampling in chosen],
            uniform,
        ]
        columns = on_device(numbers, logits_RV.device, torch.float64)[..., None]
        if len(rows) < logits_RV.shape[0]:
            logits_RV = logits_RV[on_device(rows, logits_RV.device)]
        return cls(logits_RV, max(top_k), *columns)

    def only(self, is_in_R: Tensor) -> _Part:
        """Return the rows that `is_in_R` marks."""
        columns = (self.temperature_R1, self.top_k_R1, self.top_p_R1, self.min_p_R1, self.uniform_R1)
        return _Part(self.logits_RV[is_in_R], self.max_k, *(column[is_in_R] for column in columns))

    def weigh(self, logits_RC: Tensor, best_R1: Tensor) -> Tensor:
        """Return unnormalised probabilities, 1 for the best token. The difference comes first, so nothing overflows."""
        return ((logits_RC.double() - best_R1.double()) / self.temperature_R1).exp()

    def keep(self, ranked_RC: Tensor, total_R1: Tensor | None = None) -> Tensor:
        """Zero the weights that top-k, top-p and min-p exclude. `ranked_RC` is in descending order.

        `total_R1` is the sum that top-p is a share of. It is needed if `ranked_RC` is only the head of the row.
        """
        column_C = torch.arange(ranked_RC.shape[-1], device=ranked_RC.device)
        ranked_RC = ranked_RC * (column_C < self.top_k_R1)
        sums_RC = ranked_RC.cumsum(dim=-1)
        before_RC = torch.nn.functional.pad(sums_RC[:, :-1], (1, 0))
        total_R1 = sums_RC[:, -1:] if total_R1 is None else total_R1
        # A token stays if those before it sum to less than top_p. If top_p is 1, all stay, even those that rounding would lose.
        kept_RC = (before_RC < self.top_p_R1 * total_R1) | (self.top_p_R1 >= 1)
        return ranked_RC * (kept_RC & (ranked_RC >= self.min_p_R1 * ranked_RC[:, :1]))

    def pick(self, weights_RC: Tensor) -> Tensor:
        """Return the column of the first weight at which the running sum exceeds u times the total, int64 [R, 1]."""
        sums_RC = weights_RC.cumsum(dim=-1)
        index_R1 = torch.searchsorted(sums_RC, self.uniform_R1 * sums_RC[:, -1:], right=True)
        return index_R1.clamp_(max=weights_RC.shape[-1] - 1)  # only NaN gets there, and it must not become a wild index


def _method(sampling: Sampling) -> Callable[[_Part], Tensor]:
    """Return the function that draws a row with these settings."""
    if sampling.temperature == 0:
        return _draw_best
    if 0 < sampling.top_k <= MAX_CANDIDATES:
        return _draw_few
    return _draw_open if sampling.top_k <= 0 and sampling.top_p >= 1 else _draw_ranked


def _draw_best(part: _Part) -> Tensor:
    """Pick the largest logit."""
    return argmax(part.logits_RV)


def _draw_few(part: _Part) -> Tensor:
    """Draw when top-k is small. Only the top k tokens are ranked."""
    values_RC, ids_RC = top_columns(part.logits_RV, part.max_k)
    return _pick_ranked(part, part.keep(part.weigh(values_RC, values_RC[:, :1])), ids_RC)


def _draw_open(part: _Part) -> Tensor:
    """Draw from the whole vocabulary when only min-p may exclude tokens. No ranking is needed."""
    weights_RV = part.weigh(part.logits_RV, part.logits_RV.amax(dim=-1, keepdim=True))
    return part.pick(weights_RV * (weights_RV >= part.min_p_R1)).flatten()


def _draw_ranked(part: _Part) -> Tensor:
    """Draw by top-p of the whole vocabulary, or by a wide top-k.

    On a CPU, sorting a row of 262,144 tokens takes 30 ms. The most likely tokens nearly always sum to top_p, and then the
    others need not be sorted. A GPU always sorts, because the host would have to wait to know whether they do. A wide top-k
    also needs the sort, for the sum that top-p is a share of.
    """
    width = part.logits_RV.shape[-1]
    if part.logits_RV.device.type != "cpu":
        return _draw_sorted(part)
    values_RC, ids_RC = top_columns(part.logits_RV, MAX_CANDIDATES)
    total_R1 = part.weigh(part.logits_RV, values_RC[:, :1]).sum(dim=-1, keepdim=True)
    head_RC = part.weigh(values_RC, values_RC[:, :1])
    fits_R = ((head_RC.sum(dim=-1, keepdim=True) >= part.top_p_R1 * total_R1) & (part.top_k_R1 >= width)).flatten()
    tokens_R = _pick_ranked(part, part.keep(head_RC, total_R1), ids_RC)
    if not bool(fits_R.all()):
        tokens_R[~fits_R] = _draw_sorted(part.only(~fits_R))
    return tokens_R


def _draw_sorted(part: _Part) -> Tensor:
    """Draw with any filters, from the whole sorted vocabulary."""
    values_RV, ids_RV = part.logits_RV.sort(dim=-1, descending=True, stable=True)
    return _pick_ranked(part, part.keep(part.weigh(values_RV, values_RV[:, :1])), ids_RV)


def _pick_ranked(part: _Part, weights_RC: Tensor, ids_RC: Tensor) -> Tensor:
    """Pick among tokens that are not sorted by id."""
    ids_RC, order_RC = ids_RC.sort(dim=-1)
    return ids_RC.gather(-1, part.pick(weights_RC.gather(-1, order_RC))).flatten()
