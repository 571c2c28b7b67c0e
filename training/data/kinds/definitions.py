"""Definitions of everyday words, and of further common words from WordNet. The gate's phrasings are not used here."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from training.data.chats import Chat, talk
from training.data.kinds.facts import LEADS
from training.data.material.simple_definitions import ADJECTIVES, GLOSSES, MASS, THE, VERBS
from training.data.material.table import Table
from training.data.sources import OUT, fetch, source
from training.data.wordnet import read_senses

_TABLE = Table("definitions")

# WordNet topics whose nouns one can point at: animals, things, food, places, nature, people, plants, substances.
_NOUN_TOPICS = {5, 6, 13, 15, 17, 18, 20, 27}
_ODD = re.compile(
    r"[();:\"]|\b(?:genus|sexual\w*|lover|esp|usu|etc|informal|archaic|slang|offensive|drug|kill\w*|breasts?|buttocks|vulgar\w*|deranged|baseball)\b",
    re.IGNORECASE,
)
_ASKS_NOUN = _TABLE["asks_noun"]
_ASKS_OTHER = _TABLE["asks_other"]
_RIDDLES = _TABLE["riddles"]


@dataclass(frozen=True)
class Word:
    """A word to teach. `kind` is n, v or a."""

    word: str
    kind: str
    gloss: str

    @property
    def named(self) -> str:
        """The word with its article."""
        if self.kind != "n" or self.word in MASS or self.word == "data":
            return self.word
        return (
            f"the {self.word}"
            if self.word in THE
            else f"{'an' if self.word[0] in 'aeio' or self.word in ('umbrella', 'uncle') else 'a'} {self.word}"
        )


def simple_words() -> list[Word]:
    """Return the everyday words."""
    nouns = [Word(word, "a" if word in ADJECTIVES else "n", gloss) for word, gloss in GLOSSES.items()]
    return nouns + [Word(word, "v", gloss) for word, gloss in VERBS.items()]


def further_words(count: int = 400) -> list[Word]:
    """Return common WordNet nouns with a short gloss that are not everyday words."""
    spoken = _spoken_words()
    candidates: dict[str, tuple[int, Word]] = {}
    for sense in read_senses(fetch(source("wordnet"))):
        word = sense.words[0]
        is_new = word.isalpha() and word.islower() and len(word) >= 4 and word not in GLOSSES and word not in VERBS
        is_thing = (
            sense.kind == "n" and sense.topic in _NOUN_TOPICS and sense.is_first and sense.count >= 3 and spoken[word] >= 5
        )
        begins = re.match(r"(?:an?|the|any|someone) ", sense.gloss)
        is_clear = begins and not _ODD.search(sense.gloss) and word not in re.findall(r"\w+", sense.gloss)
        if is_new and is_thing and is_clear and 3 <= len(sense.gloss.split()) <= 12:
            candidates.setdefault(word, (sense.count, Word(word, "n", sense.gloss)))
    return [word for _, word in sorted(candidates.values(), key=lambda item: (-item[0], item[1].word))[:count]]


def _spoken_words() -> Counter[str]:
    """Return how often each word occurs in people's conversations."""
    lines = (OUT / "corpus" / "chitchat.jsonl").read_text().splitlines()
    return Counter(word for line in lines for turn in json.loads(line)["turns"] for word in re.findall(r"[a-z]+", turn.lower()))


def answer(word: Word, rng: random.Random) -> str:
    """Return the gloss as a sentence."""
    forms = {"n": _TABLE["noun_answers"], "v": _TABLE["verb_answers"], "a": _TABLE["adjective_answers"]}[word.kind]
    named = word.named
    return rng.choice(forms).format(w=word.word, W=word.word.capitalize(), A=named[0].upper() + named[1:], g=word.gloss)


def definition_chat(word: Word, rng: random.Random) -> Chat:
    """Make a question about a word, with its answer."""
    if word.kind == "n" and rng.random() < 0.1:
        return talk(
            "definitions", rng.choice(_RIDDLES).format(g=word.gloss), rng.choice(_TABLE["riddle_answers"]).format(word.named)
        )
    asks = _ASKS_NOUN if word.kind == "n" else _ASKS_OTHER if word.kind == "a" else _ASKS_OTHER[:-1]
    question = rng.choice(asks).format(w=word.word, a=word.named)
    if rng.random() < 0.12:
        question = question.lower().rstrip("?.")
    else:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.25:
        question = rng.choice(LEADS) + question
    return talk("definitions", question, answer(word, rng))


def make_simple(rng: random.Random, repeats: int) -> Iterator[Chat]:
    """Yield chats about every everyday word, `repeats` times each."""
    for word in simple_words():
        for _ in range(repeats):
            yield definition_chat(word, rng)


def make(rng: random.Random, repeats: int) -> Iterator[Chat]:
    """Yield chats about every everyday word, `repeats` times each, and about further words a third as often."""
    yield from make_simple(rng, repeats)
    for word in further_words():
        for _ in range(max(1, repeats // 3)):
            yield definition_chat(word, rng)
