"""Measure suffix drafting on text that repeats the prompt or itself, and on other text, relative to no drafter.

    python benchmarks/drafting/echoed_text.py                        # the built-in model, suffix drafting alone
    python benchmarks/drafting/echoed_text.py --choice '{"method": "mtp", "model": "random:", "suffix": true}'
    python benchmarks/drafting/echoed_text.py random:E4B --accept 2  # on a GPU, at real sizes

Chats that ask to repeat a sentence give echoed text. They continue past the end of the answer (`ignore_eos`). Questions that
are answered at temperature 1 with fixed seeds give other text. Both engines take turns, a few steps each, so that other load on
the machine affects both. The answers are compared. `own` counts only the time that this process ran.

Random weights do not repeat a text. With `--accept`, they are changed so that the model repeats its last token, which takes as
long as any other text, and every verify accepts that many drafts, right or wrong. Answers are not compared then.
"""

from __future__ import annotations

import argparse
import json
import operator
from statistics import median
from typing import Any

import torch
from mixed_drafts import Engine, Speed, answer_in_turns, read_chats
from refused_drafts import engine_settings, share_weights

from culet import LLM, SamplingParams
from culet.models import embedded
from culet.models.gemma4 import Gemma4

Text = tuple[list[list[int]], list[SamplingParams]]  # prompts, and the parameters to continue each of them
SENTENCES = (
    "The red fox ran over the hill and saw a small house near the river.",
    "My sister keeps three grey cats and one very old dog in her garden.",
    "On Monday the baker sells bread, on Tuesday cake, and on Friday pies.",
    "Water boils at one hundred degrees and freezes at zero degrees.",
)


def echoed_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Return chats that ask to repeat each sentence in turn."""
    encode, render = llm.engine.tokenizer.encode, llm.engine.chat_template.render
    sentences = [SENTENCES[index % len(SENTENCES)] for index in range(count)]
    return [encode(render([{"role": "user", "content": f"Repeat this text: {text}"}])) for text in sentences]


@torch.inference_mode()
def repeat_last_token(model: Gemma4) -> None:
    """Let no layer change the residual stream. The head is the table of embeddings, so the last token is the likeliest."""
    for layer in model.layers:
        for name, weight in layer.named_parameters():
            if name.startswith("post_"):
                weight.zero_()


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
    parser.add_argument("--accept", type=int, help="repeat the last token, and accept this many drafts in every verify")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="additional settings for both engines")
    options = parser.parse_args()
    settings = engine_settings(options)
    plain = LLM(options.model, **settings)
    drafting = LLM(options.model, **settings, speculative_config=json.loads(options.choice))
    share_weights(drafting, plain)
    count = max(len(SENTENCES), *options.num_seqs)
    length: dict[str, Any] = {"max_tokens": options.num_tokens, "ignore_eos": True}
    texts = {"echoed": (echoed_prompts(plain, count), [SamplingParams(temperature=0, **length)] * count)}
    if options.accept is None:
        asked, _ = read_chats(plain, count, 1)
        texts["other"] = [list(prompt) for prompt in asked.prompts], [SamplingParams(seed=n, **length) for n in range(count)]
    else:
        for llm in (plain, drafting):
            repeat_last_token(llm.engine._worker.target.model)
        drafting.engine._worker.force_accepted(options.accept)
    for name, (prompts, params) in texts.items():
        answers = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in (plain, drafting)]
        if options.accept is not None:
            continue
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
