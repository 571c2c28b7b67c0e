"""Draw several samples for one prompt, with a seed and log-probabilities.

python examples/sample.py google/gemma-4-E2B-it
"""

import sys

from culet import LLM, SamplingParams

params = SamplingParams(n=3, seed=7, temperature=1.0, top_p=0.9, max_tokens=16, logprobs=2, stop=["\n"])

with LLM(sys.argv[1], max_model_len=1024) as llm:
    [result] = llm.generate("A good name for a cat is", params)
    for sample in result.samples:
        total = sum(entry[token_id] for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True))
        print(f"{total:8.2f} {sample.finish_reason:7} {sample.text!r}")
    # The same seed gives the same samples, no matter what else is in the batch.
    first, _ = llm.generate(["A good name for a cat is", "Tell me more:"], params)
    assert [sample.token_ids for sample in first.samples] == [sample.token_ids for sample in result.samples]
