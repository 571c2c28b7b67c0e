"""Measure suffix drafting on text that repeats the prompt or itself, and on other text, relative to no drafter.

    python benchmarks/drafting/echoed_text.py                        # the built-in model, suffix drafting alone
    python benchmarks/drafting/echoed_text.py --choice '{"method": "mtp", "model": "random:", "suffix": true}'

Chats that ask to repeat a sentence give echoed text. They continue past the end of the answer (`ignore_eos`). Questions that
are answered at temperature 1 with fixed seeds give other text. Both engines take turns, a few steps each, so that other load on
the machine affects both. The answers are compared. `own` counts only the time that this process ran.
"""

from __future__ import annotations

import argparse
import json
import operator
from statistics import median
from typing import Any

from mixed_drafts import Engine, Speed, answer_in_turns, read_chats
from refused_drafts import engine_settings, share_weights

from culet import LLM, SamplingParams
from culet.models import embedded

Text = tuple[list[list[int]], list[SamplingParams]]  # prompts, and the parameters to continue each of them
SENTENCES = (
    "The red fox ran over the hill and saw a small house near the river.",
    "My sister keeps three grey cats and one very old dog in her garden.",
    "On Monday the baker sells bread, on Tuesday cake, and on Friday pies.",
    "Water boils at one hundred degrees and freezes at zero degrees.",
)


def echoed_prompts(llm: LLM) -> list[list[int]]:
    """Return chats that ask to repeat each sentence."""
    encode, render = llm.engine.tokenizer.encode, llm.engine.chat_template.render
    return [encode(render([{"role": "user", "content": f"Repeat this text: {text}"}])) for text in SENTENCES]


def compare(plain: Engine, drafting: Engine, texts: Text, size: int) -> tuple[float, float]:
    """Return the speed of the drafting engine relative to the plain one, by the clock and by the time this process ran."""
    prompts, params = texts
    pair = [(plain, Speed()), (drafting, Speed())]
    for index in range(0, len(prompts), size):
        order = pair if index // size % 2 else pair[::-1]
        answer_in_turns(order, prompts[index : index + size], params[index])
    return pair[1][1].over(pair[0][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(embedded.FOLDER / "target"))
    parser.add_argument("--choice", default='{"method": "suffix"}', help="the speculative config to measure")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=100)
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="additional settings for both engines")
    options = parser.parse_args()
    settings = engine_settings(options)
    plain = LLM(options.model, **settings)
    drafting = LLM(options.model, **settings, speculative_config=json.loads(options.choice))
    share_weights(drafting, plain)
    count = len(SENTENCES)
    asked, _ = read_chats(plain, count, 1)
    length: dict[str, Any] = {"max_tokens": options.num_tokens, "ignore_eos": True}
    texts = {
        "echoed": (echoed_prompts(plain), [SamplingParams(temperature=0, **length)] * count),
        "other": ([list(prompt) for prompt in asked.prompts], [SamplingParams(seed=n, **length) for n in range(count)]),
    }
    for name, (prompts, params) in texts.items():
        answers = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in (plain, drafting)]
        num_equal = sum(map(operator.eq, *answers))
        print({"text": name, "equal answers": num_equal, "of": count}, flush=True)
        # On a GPU, products of several tokens round differently, which decides between tokens that are equally likely.
        assert num_equal == count or plain.engine.device.type == "cuda", "drafting has changed an answer"
    engines = Engine(plain), Engine(drafting)
    for size in options.num_seqs:
        for name, text in texts.items():
            before = drafting.engine.stats().counters
            ratios = [compare(*engines, text, size) for _ in range(options.runs)]
            counters = drafting.engine.stats().counters.since(before)
            clock, own = (round(median(values), 3) for values in zip(*ratios, strict=True))
            result = {"num_seqs": size, "text": name, "ratio": clock, "own": own}
            result |= {"steps": counters.steps, "verifies": counters.verifies, "accepted": counters.accepted_tokens}
            print(result | {"drafted": counters.drafted_tokens}, flush=True)


if __name__ == "__main__":
    main()
