"""Common sampling settings for tests. Derive others with `dataclasses.replace`."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from culet.sampling import sampler
from culet.types import Sampling

PLAIN = Sampling(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=(),
    seed=0,
    sample=0,
    logprobs=None,
    prompt_logprobs=None,
)
GREEDY = replace(PLAIN, temperature=0.0)


def draw_by_columns(logits_RV: Tensor, columns: Any, positions_R: Tensor) -> Tensor:
    """Draw what the GPU's kernels would draw from the settings on the device, with the eager sampler."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample")
    rows = [dict(zip(names, row, strict=True)) for row in zip(*(column.tolist() for column in columns), strict=True)]
    settings = [replace(PLAIN, **(row | {"seed": row["seed"] % 2**64})) for row in rows]
    return sampler.draw(logits_RV, settings, positions_R.tolist())
