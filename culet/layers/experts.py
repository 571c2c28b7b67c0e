"""Routed experts."""

from __future__ import annotations

from torch import Tensor

from culet.layers.layer import Layer
from culet.layers.weight.weights import Weights
from culet.parallel.reduce.parts import PartialSum


class Experts(Layer):
    """Routed experts: the router chooses experts for each token, and their outputs are summed by weight."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, width: int, *, eps: float, weights: Weights) -> None:
        super().__init__()
        self.top_k, self.eps = top_k, eps
        self.router = weights.router("router.proj", num_experts, hidden_size)
        self.router_scale = weights.vector("router.scale", hidden_size)
        self.expert_scale = weights.vector("router.per_expert_scale", num_experts)
        self.stack = weights.experts("experts", num_experts, hidden_size, width)

    def forward(self, residual_TD: Tensor, normed_TD: Tensor) -> PartialSum:
        """Apply the experts to `normed_TD`. The router reads the residual stream itself."""
        weights_TK, experts_TK = self.router.route(residual_TD, self.expert_scale, self.top_k, self.eps)
        return self.stack.experts(normed_TD, weights_TK, experts_TK)

    def finish(self) -> None:
        """Fold the input scale and D ** -0.5 into the router. Call once, after loading."""
        self.router.fold_in(self.router_scale * self.router_scale.shape[0] ** -0.5)
