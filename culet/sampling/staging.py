"""Small host lists on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values` as a tensor, without waiting for the device: `torch.tensor(..., device=...)` and indexing by a list would."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
