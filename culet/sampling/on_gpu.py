"""`sample` on a GPU: the same draws by two or three kernels, without a wait for the host.

Rows that the kernels do not serve (top-k above 64, top-p of the whole vocabulary) are drawn by the eager sampler.
Shapes: R rows to draw · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from culet.kernels.staging import Staged, on_device
from culet.kernels.triton.sampling import MAX_TOP_K, RowSettings
from culet.kernels.triton.sampling import draw as draw_by_kernels
from culet.sampling import sampler
from culet.sampling.sampler import History
from culet.types import Sampling


class GpuSampler:
    """Keeps the settings of the rows it last drew for on the device: most steps draw for the same ones again."""

    def __init__(self) -> None:
        self._settings: list[Sampling] = []
        self._columns: RowSettings | None = None
        self._others: list[int] = []  # rows that the kernels do not serve
        self._has_few = self._has_open = False

    def sample(
        self,
        logits_RV: Tensor,
        settings: Sequence[Sampling],
        positions: Sequence[int],
        history: History | None = None,
        positions_R: Tensor | None = None,
    ) -> Tensor:
        """As `sampler.sample`; `positions_R` are the positions once more, int32, where they are on the device already."""
        logits_RV = sampler.adjust(logits_RV, settings, positions, history)
        self._keep(settings, logits_RV.device)
        assert self._columns is not None
        if len(self._others) == len(settings):
            return sampler.draw(logits_RV, settings, positions)
        if positions_R is None:
            positions_R = on_device(positions, logits_RV.device, torch.int32)
        tokens_R = draw_by_kernels(logits_RV, self._columns, positions_R, has_few=self._has_few, has_open=self._has_open)
        if self._others:
            index = on_device(self._others, logits_RV.device)
            others, places = [settings[row] for row in self._others], [positions[row] for row in self._others]
            tokens_R[index] = sampler.draw(logits_RV[index], others, places)
        return tokens_R

    def _keep(self, settings: Sequence[Sampling], device: torch.device) -> None:
        """Bring the settings to the device, unless they are those of the last call."""
        if len(settings) == len(self._settings) and all(map(lambda a, b: a is b, settings, self._settings)):
            return
        self._settings = list(settings)
        self._others = [row for row, one in enumerate(settings) if not is_served(one)]
        others = set(self._others)
        # A row that is drawn elsewhere stands as a greedy one, the cheapest.
        heat = [0.0 if row in others else one.temperature for row, one in enumerate(settings)]
        drawn = [one for one, temperature in zip(settings, heat, strict=True) if temperature > 0]
        self._has_few = any(one.top_k > 0 for one in drawn)
        self._has_open = any(one.top_k <= 0 for one in drawn)
        staged = Staged()
        staged.add("temperature", np.array(heat, dtype=np.float64))
        staged.add("top_k", np.array([min(one.top_k, MAX_TOP_K) for one in settings], dtype=np.int32))
        staged.add("top_p", np.array([one.top_p for one in settings], dtype=np.float64))
        staged.add("min_p", np.array([one.min_p for one in settings], dtype=np.float64))
        staged.add("seed", np.array([one.seed for one in settings], dtype=np.uint64).view(np.int64))
        staged.add("sample", np.array([one.sample for one in settings], dtype=np.int32))
        sent = staged.send(device)
        self._columns = RowSettings(
            *(sent[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "sample")),
        )


def is_served(one: Sampling) -> bool:
    """Whether the kernels draw for a row with these settings."""
    return one.temperature == 0 or 0 < one.top_k <= MAX_TOP_K or (one.top_k <= 0 and one.top_p >= 1)
