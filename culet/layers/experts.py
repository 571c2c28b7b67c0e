"""Routed experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from culet.kernels.dispatch import for_device
from culet.layers.linear import Layer, Placement, empty_vector, empty_weight


class Experts(Layer):
    """The router's choice of experts for each token, and their weighted sum."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        width: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.top_k, self.eps = top_k, eps
        # float32, with the input scale folded in once loaded: which experts a token gets must not hang on rounding.
        self.router = empty_vector(num_experts, hidden_size, device=device)
        self.router_scale = empty_vector(hidden_size, device=device)
        self.expert_scale = empty_vector(num_experts, device=device)
        self.gate_up = empty_weight(num_experts, 2 * width, hidden_size, dtype=dtype, device=device)
        self.down = empty_weight(num_experts, hidden_size, width, dtype=dtype, device=device)

    def forward(self, residual_TD: Tensor, normed_TD: Tensor) -> Tensor:
        """Experts of `normed_TD`, chosen by the residual stream itself."""
        weights_TK, experts_TK = self.ops.route(residual_TD, self.router, self.expert_scale, self.top_k, self.eps)
        return self.ops.experts(normed_TD, weights_TK, experts_TK, self.gate_up, self.down)

    def placements(self, prefix: str) -> Iterator[tuple[str, Placement]]:
        yield f"{prefix}router.proj.weight", Placement(self.router)
        yield f"{prefix}router.scale", Placement(self.router_scale)
        yield f"{prefix}router.per_expert_scale", Placement(self.expert_scale)
        yield f"{prefix}experts.gate_up_proj", Placement(self.gate_up)
        yield f"{prefix}experts.down_proj", Placement(self.down)

    def finish(self) -> None:
        """After loading: fold the input scale and D ** -0.5 into the router's weights."""
        self.router.mul_(self.router_scale * self.router_scale.shape[0] ** -0.5)
