"""`sample` on a GPU. A few kernels make the same draws without waiting for the host.

The eager sampler draws the rows that the kernels do not serve (top-k above 64, top-p of the whole vocabulary). It runs on the
device too.
Shapes: R rows to draw · V vocabulary · X biased tokens · H rows with penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from culet.kernels.host_transfer import PackedArrays, on_device
from culet.kernels.triton.sampling.draw import MAX_TOP_K
from culet.kernels.triton.sampling.draw import draw as draw_by_kernels
from culet.kernels.triton.sampling.masks import add_bias, apply_bitmask
from culet.kernels.triton.sampling.penalties import penalise
from culet.kernels.types import Penalties, RowSettings
from culet.sampling import sampler
from culet.sampling.sampler import History, TokenMasks
from culet.types import Sampling

PENALISED_ROWS = 16  # rows whose tokens are counted at once, which limits the counts to 16 MiB at Gemma's vocabulary


@dataclass
class _Kept:
    """The settings of the last call's rows, on the device. Most steps draw for the same rows again."""

    settings: list[Sampling]
    columns: RowSettings
    biases: tuple[Tensor, Tensor, Tensor] | None  # rows, tokens, values
    others: list[int]  # rows that the kernels do not serve
    penalised: list[int]
    has_few: bool
    has_open: bool
    needs_copy: bool  # whether log-probabilities need the unchanged logits
    slots: list[int] = field(default_factory=list)  # slots of the penalised rows that `penalties` were sent for
    penalties: Penalties | None = None  # without lengths, which change in every step


class GpuSampler:
    """A Sampler for GPUs. It keeps the settings of the last rows it drew for on the device."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._counts_HV: Tensor | None = None

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
        """Draw as `Sampler.sample` does. Overwrite the logits, unless a row needs log-probabilities."""
        kept = self._keep(list(settings), logits_RV)
        if positions_R is None:
            positions_R = on_device(positions, logits_RV.device, torch.int32)
        logits_RV = self._adjust(kept, logits_RV, positions, positions_R, history, masks)
        if len(kept.others) == len(settings):
            return sampler.draw(logits_RV, settings, positions)
        tokens_R = draw_by_kernels(logits_RV, kept.columns, positions_R, has_few=kept.has_few, has_open=kept.has_open)
        if kept.others:
            index = on_device(kept.others, logits_RV.device)
            other_settings, other_positions = [settings[row] for row in kept.others], [positions[row] for row in kept.others]
            tokens_R[index] = sampler.draw(logits_RV[index], other_settings, other_positions)
        return tokens_R

    def _adjust(
        self,
        kept: _Kept,
        logits_RV: Tensor,
        positions: Sequence[int],
        positions_R: Tensor,
        history: History | None,
        masks: TokenMasks | None,
    ) -> Tensor:
        """Return the logits after bias, penalties and masks."""
        if kept.biases is None and not kept.penalised and masks is None:
            return logits_RV
        device = logits_RV.device
        if kept.needs_copy:
            logits_RV = logits_RV.clone()
        if kept.biases is not None:
            add_bias(logits_RV, *kept.biases)
        if kept.penalised:
            assert history is not None, "penalties need the earlier tokens"
            self._penalise(kept, logits_RV, positions, positions_R, history)
        if masks is not None:
            bits_AW = masks.bits_AW.to(device, non_blocking=True)
            apply_bitmask(logits_RV, bits_AW, on_device(masks.rows, device, torch.int32))
        return logits_RV

    def _penalise(
        self, kept: _Kept, logits_RV: Tensor, positions: Sequence[int], positions_R: Tensor, history: History
    ) -> None:
        slots = [history.slots[row] for row in kept.penalised]
        if kept.penalties is None or kept.slots != slots:
            kept.slots = slots
            kept.penalties = _send_penalties(kept, history, logits_RV.device)
        width, penalties = logits_RV.shape[1], kept.penalties
        if self._counts_HV is None or self._counts_HV.shape[1] != width:
            self._counts_HV = torch.zeros(PENALISED_ROWS, width, dtype=torch.int32, device=logits_RV.device)
        lengths_H = positions_R[penalties.rows_H]
        for begin in range(0, len(slots), PENALISED_ROWS):
            part = slice(begin, begin + PENALISED_ROWS)
            some = Penalties(*(column[part] for column in penalties._replace(lengths_H=lengths_H)))
            max_len = max(positions[row] for row in kept.penalised[part])
            penalise(logits_RV, history.tokens_SL, some, max_len, self._counts_HV)

    def _keep(self, settings: list[Sampling], logits_RV: Tensor) -> _Kept:
        """Send the settings to the device, unless they equal those of the last call."""
        kept = self._kept
        if kept is not None and settings == kept.settings:
            return kept
        device = logits_RV.device
        others = [row for row, sampling in enumerate(settings) if not is_served(sampling)]
        drawn = [sampling for sampling in settings if sampling.temperature > 0 and is_served(sampling)]
        columns = RowSettings(*stage_settings(settings).send(device).values())
        self._kept = _Kept(
            settings=settings,
            columns=columns,
            biases=_send_biases(settings, logits_RV),
            others=others,
            penalised=[row for row, sampling in enumerate(settings) if sampling.needs_history],
            has_few=any(sampling.top_k > 0 for sampling in drawn),
            has_open=any(sampling.top_k <= 0 for sampling in drawn),
            needs_copy=any(sampling.logprobs is not None for sampling in settings),
        )
        return self._kept


def stage_settings(settings: Sequence[Sampling]) -> PackedArrays:
    """Stage the columns of RowSettings in order. Rows that the kernels do not serve count as greedy, which is cheapest."""
    temperature = [sampling.temperature if is_served(sampling) else 0.0 for sampling in settings]
    staged = PackedArrays()
    staged.add("temperature", np.array(temperature, dtype=np.float64))
    staged.add("top_k", np.array([min(sampling.top_k, MAX_TOP_K) for sampling in settings], dtype=np.int32))
    staged.add("top_p", np.array([sampling.top_p for sampling in settings], dtype=np.float64))
    staged.add("min_p", np.array([sampling.min_p for sampling in settings], dtype=np.float64))
    staged.add("seed", np.array([sampling.seed for sampling in settings], dtype=np.uint64).view(np.int64))
    staged.add("sample", np.array([sampling.sample for sampling in settings], dtype=np.int32))
    return staged


def _send_biases(settings: Sequence[Sampling], logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    biases = sampler.biases_of(settings, logits_RV.shape[-1])
    if not biases:
        return None
    rows, tokens, values = zip(*biases, strict=True)
    staged = PackedArrays()
    staged.add("row", np.array(rows, dtype=np.int32))
    staged.add("token", np.array(tokens, dtype=np.int32))
    staged.add("value", np.array(values, dtype=np.float32))
    sent = staged.send(logits_RV.device)
    return sent["row"], sent["token"], sent["value"]


def _send_penalties(kept: _Kept, history: History, device: torch.device) -> Penalties:
    """Send the penalised rows' settings, with lengths of 0."""
    some = [kept.settings[row] for row in kept.penalised]
    staged = PackedArrays()
    staged.add("rows", np.array(kept.penalised, dtype=np.int32))
    staged.add("slots", np.array(kept.slots, dtype=np.int32))
    staged.add("lengths", np.zeros(len(some), dtype=np.int32))
    staged.add("prompt_lens", np.array([history.prompt_lens[row] for row in kept.penalised], dtype=np.int32))
    staged.add("repetition", np.array([sampling.repetition_penalty for sampling in some], dtype=np.float32))
    staged.add("frequency", np.array([sampling.frequency_penalty for sampling in some], dtype=np.float32))
    staged.add("presence", np.array([sampling.presence_penalty for sampling in some], dtype=np.float32))
    return Penalties(*staged.send(device).values())


def is_served(sampling: Sampling) -> bool:
    """Return whether the kernels draw for a row with these settings."""
    return sampling.temperature == 0 or 0 < sampling.top_k <= MAX_TOP_K or (sampling.top_k <= 0 and sampling.top_p >= 1)
