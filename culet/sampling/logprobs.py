"""Log-probabilities of the model's distribution, before bias, penalties, temperature and filters.

Shapes: L positions · V vocabulary · K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from culet.sampling.ranking import top_columns
from culet.types import Logprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities on the device, for the chosen tokens and for the K most likely tokens in descending order."""

    chosen_L: Tensor  # float32
    top_LK: Tensor  # float32
    top_ids_LK: Tensor  # int64


def compute_logprobs(logits_LV: Tensor, chosen_L: Tensor, num_top: int) -> LogprobTensors:
    """Compute log_softmax at the chosen tokens and at the `num_top` most likely. Among equals, the lowest id comes first."""
    if logits_LV.is_cuda:
        from culet.kernels.triton.sampling import draw  # needs Triton

        if num_top <= draw.MAX_TOP_K:
            return LogprobTensors(*draw.logprobs(logits_LV, chosen_L, num_top))
    scale_L1 = logits_LV.logsumexp(dim=-1, keepdim=True)
    chosen = logits_LV.gather(-1, chosen_L[:, None]) - scale_L1
    if num_top == 0:
        empty = logits_LV.new_empty(logits_LV.shape[0], 0)
        return LogprobTensors(chosen.flatten(), empty, empty.long())
    values_LK, ids_LK = top_columns(logits_LV, min(num_top, logits_LV.shape[-1]))
    return LogprobTensors(chosen.flatten(), values_LK - scale_L1, ids_LK)


def as_mappings(
    chosen_ids: Sequence[int], chosen: Sequence[float], top: Sequence[float], top_ids: Sequence[float], counts: Sequence[int]
) -> Iterator[Logprobs]:
    """Yield one mapping per position, with the chosen token first and then the `counts[i]` most likely tokens.

    `top` and `top_ids` hold all rows, flattened.
    """
    width = len(top) // max(len(chosen_ids), 1)
    for index, (token_id, count) in enumerate(zip(chosen_ids, counts, strict=True)):
        row = slice(index * width, index * width + count)
        ranked = {int(top_id): value for top_id, value in zip(top_ids[row], top[row], strict=True)}
        yield {token_id: chosen[index]} | {top_id: value for top_id, value in ranked.items() if top_id != token_id}
