"""Count the tokens that prompts with a common beginning compute twice, on the built-in model.

    python benchmarks/prefix_reuse.py            prints a table
    python benchmarks/prefix_reuse.py --check    exits 1 if the third prompt recomputes more than 16 shared tokens

This script produces the table of shared beginnings in docs/log/memory-and-cache.md. Four prompts share their first tokens and
then differ, as token ids and as text. Two chats share their system message and tools. Nothing is timed.
"""

from __future__ import annotations

import argparse
import random
import sys

from culet import LLM, SamplingParams

LENGTHS = (40, 100, 200, 500, 1000, 3500)  # the built-in model has 4096 positions
WORDS = ["the", "fox", "saw", "an", "old", "stone", "by", "a", "wheel", "and", "asked", "who", "could", "cut", "diamonds", "so"]
PARAMS = SamplingParams(temperature=0, max_tokens=1)
TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object", "properties": {}}}}
MAX_RECOMPUTED = 16


def reused(llm: LLM, num_shared: int, *, is_text: bool) -> tuple[int, list[int]]:
    """Return how many tokens four prompts share, and how many of its tokens each finds in the cache."""
    chance = random.Random(num_shared + is_text)
    encode = llm.engine.tokenizer.encode
    shared = [f"{num_shared}{is_text}", *chance.choices(WORDS, k=2 * num_shared)]
    while len(encode(" ".join(shared))) > num_shared:
        shared.pop()
    texts = [" ".join([*shared, *chance.choices(WORDS, k=60)]) for _ in range(4)]
    prompts = [encode(text, add_bos=True) for text in texts]
    counts = []
    for text, prompt in zip(texts, prompts, strict=True):
        [result] = llm.generate([text if is_text else {"prompt_token_ids": prompt}], PARAMS)
        counts.append(result.num_cached_tokens)
    num_equal = min(
        next(place for place, pair in enumerate(zip(prompts[3], prompt, strict=False)) if pair[0] != pair[1])
        for prompt in prompts[:3]
    )
    return num_equal, counts


def chats(llm: LLM, num_words: int) -> list[int]:
    """Return how many tokens each of three chats with the same system message finds in the cache."""
    chance = random.Random(num_words)
    system = {"role": "system", "content": f"{num_words} " + " ".join(chance.choices(WORDS, k=num_words))}
    counts = []
    for number in range(3):
        messages = [system, {"role": "user", "content": f"{number}: " + " ".join(chance.choices(WORDS, k=20))}]
        [result] = llm.chat(messages, PARAMS, tools=[TOOL])
        counts.append(result.num_cached_tokens)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    options, worst = parser.parse_args(), 0
    with LLM(device="cpu", max_model_len=4096, max_num_seqs=2) as llm:
        print("| shared tokens | sent as | found by the 2nd, 3rd, 4th prompt |\n|---|---|---|")
        for num_shared in options.lengths:
            for is_text in (False, True):
                num_equal, counts = reused(llm, num_shared, is_text=is_text)
                print(f"| {num_equal} | {'text' if is_text else 'token ids'} | {', '.join(map(str, counts[1:]))} |", flush=True)
                worst = max(worst, *(num_equal - count for count in counts[2:]))
        for num_words in (60, 250, 1200):
            print(
                f"| system message of {num_words} words | chat | {', '.join(map(str, chats(llm, num_words)[1:]))} |", flush=True
            )
    if options.check and worst > MAX_RECOMPUTED:
        print(f"{worst} shared tokens were computed again, expected at most {MAX_RECOMPUTED}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
