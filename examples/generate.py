"""Continue several prompts in one batch.

python examples/generate.py google/gemma-4-E2B-it
"""

import sys

from culet import LLM, SamplingParams

prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]

with LLM(sys.argv[1], max_model_len=1024) as llm:
    for prompt, result in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)), strict=True):
        print(f"{prompt!r} -> {result.text!r} ({result.finish_reason}, {len(result.token_ids)} tokens)")
