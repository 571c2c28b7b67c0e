"""The norms that read partial sums of several ranks. They have the names and parameters of the ops.

Few tokens are added over symmetric memory in the kernel of the norm itself. Otherwise the sum comes first.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from culet.parallel.reduce.parts import AllReduce, join_parts


class RankNorms:
    """Norms whose deltas are this rank's terms of a sum over all ranks."""

    def __init__(self, ops: ModuleType, all_reduce: AllReduce) -> None:
        self._ops, self._all_reduce = ops, all_reduce

    def residual_norm(
        self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, scalar: Tensor | None, next_weight_D: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        next_weights = () if next_weight_D is None else (next_weight_D,)
        outs = self._fused(x_TD, (delta_TD,), (weight_D,), scalar, next_weights, eps)
        if outs is not None:
            return outs[0], outs[1] if next_weights else None
        delta_TD = join_parts(delta_TD, self._all_reduce)
        x_TD, normed_TD = self._ops.residual_norm(x_TD, delta_TD, weight_D, scalar, next_weight_D, eps)
        return x_TD, normed_TD

    def residual_norm_two(
        self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, next_a_D: Tensor, next_b_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        outs = self._fused(x_TD, (delta_TD,), (weight_D,), None, (next_a_D, next_b_D), eps)
        if outs is None:
            delta_TD = join_parts(delta_TD, self._all_reduce)
            outs = self._ops.residual_norm_two(x_TD, delta_TD, weight_D, next_a_D, next_b_D, eps)
        x_TD, a_TD, b_TD = outs
        return x_TD, a_TD, b_TD

    def residual_norm_joint(
        self,
        x_TD: Tensor,
        a_TD: Tensor,
        b_TD: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        scalar: Tensor | None,
        next_weight_D: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        next_weights = () if next_weight_D is None else (next_weight_D,)
        outs = self._fused(x_TD, (a_TD, b_TD), weights, scalar, next_weights, eps)
        if outs is not None:
            return outs[0], outs[1] if next_weights else None
        a_TD, b_TD = join_parts(a_TD, self._all_reduce), join_parts(b_TD, self._all_reduce)
        x_TD, normed_TD = self._ops.residual_norm_joint(x_TD, a_TD, b_TD, weights, scalar, next_weight_D, eps)
        return x_TD, normed_TD

    def _fused(
        self,
        x_TD: Tensor,
        deltas: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        scalar: Tensor | None,
        next_weights: tuple[Tensor, ...],
        eps: float,
    ) -> tuple[Tensor, ...] | None:
        """Return x' and its next norms, or None if the sum cannot be fused with them."""
        num_tokens, size = x_TD.shape
        peers = self._all_reduce.peers_for(num_tokens, len(deltas) * size)
        if peers is None:
            return None
        outs: tuple[Tensor, ...] = self._ops.residual_norm_of_ranks(x_TD, deltas, weights, scalar, next_weights, eps, peers)
        return outs
