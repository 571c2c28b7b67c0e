"""A head in e4m3 with a scale per row, made from a plain table after loading. It takes half the bytes of bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from culet import hardware
from culet.errors import ConfigError
from culet.kernels.dispatch import E4M3, for_device
from culet.kernels.types import Candidates
from culet.layers.weight.base import Table, join_candidates
from culet.layers.weight.placement import Placement
from culet.layers.weight.plain import PlainTable
from culet.parallel.reduce.parts import join_columns

_ROWS_AT_ONCE = 16384
_MIN_SCALE = 1e-12  # used for a row of zeros


class E4M3Table(Table):
    """A table that can only serve as a head. It has no lookups. Its device must pass `check_device`."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        if not isinstance(table, PlainTable):
            raise ConfigError("got fp8, but the checkpoint's table is already quantised")
        wide_VD = table.tensor
        self.rows, self.num_rows, self.all_reduce = table.rows, table.layout.num_rows, table.all_reduce
        self.scale, self.ops = table.scale, for_device(wide_VD.device, E4M3)
        scale_V1 = (wide_VD.abs().amax(dim=1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max).clamp(
            min=_MIN_SCALE
        )
        narrow_VD = torch.empty(wide_VD.shape, dtype=torch.float8_e4m3fn, device=wide_VD.device)
        for begin in range(0, wide_VD.shape[0], _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            narrow_VD[rows] = (wide_VD[rows].float() / scale_V1[rows]).to(narrow_VD.dtype)
        self.tensor = nn.Parameter(narrow_VD, requires_grad=False)
        self.scale_V: Tensor
        self.register_buffer("scale_V", scale_V1.flatten(), persistent=False)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        """Yield nothing, because no checkpoint stores this table."""
        return iter(())

    def head(self, x_LD: Tensor) -> Tensor:
        logits_LV = x_LD.float() @ self.tensor.float().t() * self.scale_V
        return join_columns(logits_LV, self.rows, self.num_rows, self.all_reduce)

    def head_candidates(self, x_RD: Tensor, cap: float | None) -> Candidates:
        found = self.ops.head_candidates(x_RD, self.tensor, self.scale_V, cap)
        return join_candidates(found, self.rows.start, self.all_reduce)


def check_device(device: torch.device) -> None:
    """Raise if the device is a GPU without e4m3."""
    if device.type == "cuda" and not hardware.has_e4m3(capability := hardware.capability_of(device)):
        raise ConfigError(f"fp8 weights need sm_{hardware.ADA} or later, but this GPU is sm_{capability}")
