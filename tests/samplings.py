"""Sampling settings that tests start from; `dataclasses.replace` gives the others."""

from dataclasses import replace

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
