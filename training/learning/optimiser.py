"""Muon for matrices, AdamW for the rest, and the learning-rate schedule.

Muon replaces a matrix's momentum with the nearest orthogonal matrix (five steps of a Newton-Schulz iteration), so that every
direction of the matrix learns at the same rate. It needs fewer tokens than AdamW for the same loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Coefficients of the quintic that pushes singular values towards 1 fastest. Where exactly they end (0.7 to 1.2) matters little.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalised(updates_GMN: Tensor, steps: int = 5) -> Tensor:
    """Return the matrices with their singular values pushed to about 1, on a GPU in bfloat16."""
    a, b, c = _QUINTIC
    x = updates_GMN.bfloat16() if updates_GMN.is_cuda else updates_GMN.float()  # many CPUs are very slow in bfloat16
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


class Muon:
    """Orthogonalised momentum. Matrices of one shape are updated together."""

    def __init__(self, matrices: Iterable[nn.Parameter], *, momentum: float = 0.95, weight_decay: float = 0.03) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in matrices:
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        self._groups = list(by_shape.values())
        self._buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self._groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self._groups, self._buffers, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])  # type: ignore[misc]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalised(gradient.lerp_(buffer, self.momentum))
            rows, columns = group[0].shape
            size = rate * max(1.0, rows / columns) ** 0.5
            weights: list[Tensor] = list(group)
            torch._foreach_mul_(weights, 1 - rate * self.weight_decay)
            torch._foreach_add_(weights, list(update.to(buffer.dtype).unbind()), alpha=-size)

    def state(self) -> list[Tensor]:
        return self._buffers

    def load_state(self, state: list[Tensor]) -> None:
        for mine, theirs in zip(self._buffers, state, strict=True):
            mine.copy_(theirs)


class Optimiser:
    """Both optimisers over a module: Muon for the layers' matrices, AdamW for embedding tables and vectors."""

    def __init__(
        self,
        module: nn.Module,
        *,
        rate: float = 1.0,
        matrix_rate: float = 0.02,
        table_rate: float = 0.003,
        gain_rate: float = 0.004,
    ) -> None:
        """`rate` multiplies the peak rates."""
        matrices: list[nn.Parameter] = []
        tables: list[nn.Parameter] = []
        gains: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            kind = gains if parameter.dim() < 2 else tables if name.endswith("embedding") else matrices
            kind.append(parameter)
        self._matrix_rate = rate * matrix_rate
        self._muon = Muon(matrices)
        groups: list[dict[str, Any]] = [{"params": gains, "peak": rate * gain_rate, "weight_decay": 0.0}]
        if tables:
            groups.append({"params": tables, "peak": rate * table_rate, "weight_decay": 0.01})
        fused = next(module.parameters()).is_cuda
        self._adam = torch.optim.AdamW(groups, lr=gain_rate, betas=(0.9, 0.95), eps=1e-10, fused=fused)
        self._parameters = [*matrices, *tables, *gains]

    def step(self, factor: float) -> None:
        """Update at `factor` times the peak rates, then clear the gradients."""
        self._muon.step(self._matrix_rate * factor)
        for group in self._adam.param_groups:
            group["lr"] = group["peak"] * factor
        self._adam.step()
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._muon.load_state(state["muon"])
        self._adam.load_state_dict(state["adam"])


class Optimisers:
    """Several optimisers that step together."""

    def __init__(self, *optimisers: Optimiser) -> None:
        self._all = optimisers

    def step(self, factor: float) -> None:
        for optimiser in self._all:
            optimiser.step(factor)

    def state_dict(self) -> dict[str, Any]:
        return {str(index): optimiser.state_dict() for index, optimiser in enumerate(self._all)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, optimiser in enumerate(self._all):
            optimiser.load_state_dict(state[str(index)])


def rate_factor(progress: float, step: int, *, warmup_steps: int = 50, decay_from: float = 0.5) -> float:
    """Return the rate factor, which warms up, holds, then decays linearly to nearly zero at progress 1."""
    warm = min(1.0, (step + 1) / warmup_steps)
    cool = 1.0 if progress < decay_from else max(0.0, 1.0 - progress) / (1.0 - decay_from)
    return warm * max(cool, 0.01)
