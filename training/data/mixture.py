"""The parts of the training data: where each comes from, how much is generated, and how often it is shown."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from training.data import filters
from training.data.chats import Chat, document, is_plain, talk
from training.data.corpus import CORPUS
from training.data.kinds import (
    arithmetic,
    compositions,
    conversations,
    definitions,
    dialogues,
    everyday,
    facts,
    handwritten,
    json_answers,
    requests,
    smalltalk,
    thinking,
    tools,
    writing,
)
from training.data.sources import OUT

DISTILLED = OUT / "distilled"


@dataclass(frozen=True)
class Part:
    """Texts of one kind. The boosts are the relative weights of its tokens in the main and the last phase."""

    name: str
    make: Callable[[random.Random, float], Iterator[Chat | str]]  # yields chats or plain texts; the number scales how many
    boost_main: float
    boost_last: float
    is_made: bool = True  # made by code, so its share does not grow with `scale`


def _scaled(
    make: Callable[[random.Random, int], Iterator[Chat]], count: int
) -> Callable[[random.Random, float], Iterator[Chat | str]]:
    return lambda rng, scale: iter(make(rng, max(1, round(count * scale))))


def _prose(rng: random.Random, scale: float) -> Iterator[str]:
    for name in ("sotu", "factbook", "moby-dick", "kjv", "python-doc", "rust-doc", "postgresql-doc", "apache-doc", "jargon"):
        documents = _lines(name)
        share = scale
        for document_ in rng.sample(documents, round(len(documents) * min(1.0, share))):
            yield document_["text"]


def _dictionary(rng: random.Random, scale: float) -> Iterator[str]:
    documents = _lines("wordnet")
    for document_ in rng.sample(documents, round(len(documents) * min(1.0, scale) * 0.6)):
        yield document_["text"]


def _chitchat(rng: random.Random, scale: float) -> Iterator[Chat]:
    documents = [*_lines("chitchat"), *_lines("chatterbot")]
    for document_ in rng.sample(documents, round(len(documents) * min(1.0, scale) * 0.8)):
        yield talk("chitchat", *document_["turns"])


def _distilled(rng: random.Random, scale: float) -> Iterator[Chat]:
    """Yield the teacher's chats, if any, some of them with a plain system prompt."""
    for path in sorted(DISTILLED.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            chat = json.loads(line)
            turns = chat["turns"][: len(chat["turns"]) // 2 * 2]
            answers = turns[1::2]
            if (
                turns
                and rng.random() < scale
                and all(filters.good_answer(ask, answer, chat["kind"]) for ask, answer in zip(turns[::2], answers, strict=True))
            ):
                plain = [filters.plain_answer(turn) if index % 2 else turn for index, turn in enumerate(turns)]
                yield talk("distilled", *plain, system=rng.choice(smalltalk.PLAIN_SYSTEMS) if rng.random() < 0.1 else None)


def _facts(rng: random.Random, scale: float) -> Iterator[Chat]:
    yield from facts.make(rng, max(1, round(28 * scale)))
    yield from facts.make_series(rng, round(9000 * scale))


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CORPUS / f"{name}.jsonl").read_text().splitlines()]


PARTS = (
    Part("prose", _prose, 0.9, 0.1, is_made=False),
    Part("dictionary", _dictionary, 0.6, 0.1, is_made=False),
    Part("chitchat", _chitchat, 0.5, 0.0, is_made=False),  # only for its vocabulary, since people talk past each other
    Part("distilled", _distilled, 2.0, 2.0, is_made=False),
    Part("world", _scaled(handwritten.make, 12_000), 1.5, 2.0),
    Part("compositions", _scaled(compositions.make, 12_000), 1.4, 1.8),
    Part("facts", _facts, 1.4, 1.8),
    Part("arithmetic", _scaled(arithmetic.make, 40_000), 1.2, 1.4),
    Part("definitions", _scaled(definitions.make, 45), 1.4, 1.8),
    Part("smalltalk", _scaled(smalltalk.make, 16_000), 1.2, 1.8),
    Part("threads", _scaled(conversations.make, 18_000), 1.2, 1.6),
    Part("dialogues", _scaled(dialogues.make, 26_000), 1.4, 2.2),
    Part("everyday", _scaled(everyday.make, 14_000), 1.2, 2.2),
    Part("requests", _scaled(requests.make, 22_000), 1.4, 2.2),
    Part("writing", _scaled(writing.make, 18_000), 1.0, 1.0),
    Part("stories", _scaled(writing.make_stories, 5_000), 0.7, 0.5),
    Part("tools", _scaled(tools.make, 20_000), 0.8, 2.6),
    Part("series", _scaled(tools.make_series, 4_400), 0.8, 3.2),
    Part("json", _scaled(json_answers.make, 12_000), 1.5, 1.5),
    Part("thinking", _scaled(thinking.make, 5_000), 0.8, 0.8),
)
# What code alone makes, without any source. Some definitions need WordNet, the everyday ones do not.
MADE_PARTS = (
    *(part for part in PARTS if part.is_made and part.name != "definitions"),
    Part("definitions", _scaled(definitions.make_simple, 45), 1.4, 1.8),
)


def cut(chat: Chat, rng: random.Random) -> Chat:
    """Return the chat up to one of its answers. Half of all long chats end early.

    Serving puts an empty thought only before the answer that is due, so each turn must sometimes be the last.
    """
    ends = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(ends) < 2 or not is_plain(chat) or rng.random() < 0.5:
        return chat
    return replace(chat, messages=chat.messages[: rng.choice(ends) + 1])


def texts(part: Part, *, seed: int, scale: float) -> Iterator[tuple[Chat | str, str]]:
    """Yield every item of a part with its text: a chat as served, or plain text between <bos> and <eos>."""
    rng = random.Random(f"{seed} {part.name}")
    cuts = random.Random(f"{seed} {part.name} cuts")
    for item in part.make(rng, scale):
        if isinstance(item, Chat):
            item = cut(item, cuts)
        yield item, document(item) if isinstance(item, Chat) else f"<bos>{item}<eos>"
