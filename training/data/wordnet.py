"""WordNet's senses, read from the files of Debian's wordnet-base."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = "usr/share/wordnet"
_FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}


@dataclass(frozen=True)
class Sense:
    """A meaning: its words, most common first, its gloss, and how often the first word has this sense."""

    kind: str  # n, v, a, s (satellite adjective) or r
    topic: int  # number of the lexicographer's file: 5 is animals, 6 artefacts, 13 food, 20 plants, ...
    words: tuple[str, ...]
    gloss: str
    examples: tuple[str, ...]
    parent: str | None  # the word for what it is a kind of
    count: int
    is_first: bool  # whether this is the first sense of the first word, the most common one


def read_senses(folder: Path) -> Iterator[Sense]:
    """Yield all senses in file order."""
    counts = _read_counts(folder)
    for letter, stem in _FILES.items():
        lines = [line for line in (folder / DATA / f"data.{stem}").read_text().splitlines() if not line.startswith(" ")]
        firsts = _read_firsts(folder / DATA / f"index.{stem}")
        names = {line[:8]: line.split()[4].replace("_", " ") for line in lines}
        for line in lines:
            head, _, tail = line.partition(" | ")
            fields = head.split()
            num_words = int(fields[3], 16)
            words = tuple(re.sub(r"\(.*\)$", "", fields[4 + 2 * i]).replace("_", " ") for i in range(num_words))
            pointers = fields[4 + 2 * num_words + 1 :]
            parent = next(
                (names.get(pointers[i + 1]) for i in range(0, len(pointers) - 3, 4) if pointers[i] in ("@", "@i")), None
            )
            gloss, *examples = re.split(r';\s*(?=")', tail.strip())
            key = (words[0].lower().replace(" ", "_"), letter)
            yield Sense(
                kind=fields[2],
                topic=int(fields[1]),
                words=words,
                gloss=gloss.strip().rstrip(";"),
                examples=tuple(re.sub(r'^"|"$', "", example.strip()) for example in examples),
                parent=parent,
                count=counts.get(key, 0),
                is_first=firsts.get(key[0]) == fields[0],
            )


def _read_counts(folder: Path) -> dict[tuple[str, str], int]:
    letters = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}
    counts: dict[tuple[str, str], int] = {}
    for line in (folder / DATA / "cntlist.rev").read_text().splitlines():
        sense_key, _, count = line.split()
        word, _, rest = sense_key.partition("%")
        key = (word, letters[rest[0]])
        counts[key] = counts.get(key, 0) + int(count)
    return counts


def _read_firsts(path: Path) -> dict[str, str]:
    """Return the offset of each word's first sense."""
    firsts = {}
    for line in path.read_text().splitlines():
        if not line.startswith(" "):
            fields = line.split()
            firsts[fields[0]] = fields[-int(fields[2])]
    return firsts
