"""Stream the answer in a conversation: thoughts to stderr, the answer to stdout.

python examples/chat.py google/gemma-4-E2B-it "Why is the sky blue?"
"""

import sys

from culet import LLM, SamplingParams

messages = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": sys.argv[2] if len(sys.argv) > 2 else "Why is the sky blue?"},
]

with LLM(sys.argv[1], max_model_len=1024) as llm:
    for delta in llm.stream(messages, SamplingParams(max_tokens=256), enable_thinking=True):
        print(delta.reasoning, end="", flush=True, file=sys.stderr)
        print(delta.text, end="", flush=True)
    print()
