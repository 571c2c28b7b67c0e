"""Which of the teacher's answers to keep: short, plain and complete ones, without another model's identity."""

from __future__ import annotations

import re

_IDENTITY = re.compile(
    r"\b(?:qwen|alibaba|tongyi|openai|chatgpt|gpt|anthropic|claude|gemini|deepmind|language model|ai assistant|"
    r"ai model|as an ai|i'?m an ai|i am an ai|artificial intelligence (?:assistant|language|model)|my training data|"
    r"knowledge cutoff|trained by)\b",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"```|\*\*|^#|^\s*[-*•]\s|^\s*\d+[.)]\s|https?://|[{}<>|\\_`]|\$|::", re.MULTILINE)
_REFUSAL = re.compile(
    r"\b(?:i'm sorry, but|i cannot assist|i can't assist|i'm unable|as a (?:text|machine|computer))\b", re.IGNORECASE
)
_LONGEST = {"story": 90, "poem": 60}  # words
# Quotation marks, dashes, the ellipsis and the hard space, as ASCII.
PLAIN_MARKS = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": " - ", "\u2026": "...", "\u00a0": " "}
)


def repeats(text: str) -> bool:
    """Return whether four words in a row occur twice, or a word three times in a row."""
    words = re.findall(r"\w+", text.lower())
    fours = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(fours)) < len(fours) or any(len(set(words[i : i + 3])) == 1 for i in range(len(words) - 2))


def good_answer(question: str, answer: str, kind: str) -> bool:
    """Return whether an answer may be kept."""
    words = answer.split()
    plain = answer.translate(PLAIN_MARKS)
    return (
        1 <= len(words) <= _LONGEST.get(kind, 48)
        and plain.isascii()
        and (kind == "poem" or ("\n" not in answer and answer[-1] in ".!?\"'"))
        and not _IDENTITY.search(answer)
        and not _MARKUP.search(answer)
        and not _REFUSAL.search(answer)
        and not repeats(answer)
        and answer.strip().lower() != question.strip().lower()
    )


def plain_answer(answer: str) -> str:
    """Replace typographic marks with ASCII and collapse white space within lines."""
    return "\n".join(re.sub(r"[ \t]+", " ", line).strip() for line in answer.translate(PLAIN_MARKS).strip().splitlines())
