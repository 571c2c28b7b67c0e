"""Sums and differences in many phrasings.

A fifth of the pairs within 20 is never trained (`is_held_out`). Sums up to 100 teach how to add digits, so that the model
can work out the held-out pairs.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator

from training.data.chats import Chat, talk
from training.data.material.table import Table

_TABLE = Table("arithmetic")

LIMIT = 20
WORDS = _TABLE["words"]


def is_held_out(a: int, b: int, operation: str) -> bool:
    """Return whether a + b or a - b is kept for the gate. 3 + 8 is held out if and only if 8 + 3 is."""
    if operation == "+":
        a, b = min(a, b), max(a, b)
        if a + b > LIMIT:
            return False
    elif a > LIMIT or b > a:
        return False
    digest = hashlib.sha256(f"{a}{operation}{b}".encode()).digest()
    return a > 0 and b > 0 and digest[0] < 52  # 52 / 256 is a fifth


_VALUES = {word: value for value, word in enumerate(WORDS)} | {str(value): value for value in range(100)}
_NUMBER = r"(\d{1,2}|" + "|".join(sorted(WORDS, key=len, reverse=True)) + ")"
_PATTERN = re.compile(
    rf"(?<![\w.]){_NUMBER}\s*(\+|-|\bplus\b|\bminus\b|\band\b|\badded to\b|\btake away\b|\bfrom\b)\s*{_NUMBER}(?![\w]|\.\d)",
    re.IGNORECASE,
)


def mentions_held_out(text: str) -> bool:
    """Return whether `text` contains a held-out sum or difference, in digits or in words."""
    position = 0
    while match := _PATTERN.search(text, position):
        a, b, sign = (
            _VALUES[match[1].lower().lstrip("0") or "0"],
            _VALUES[match[3].lower().lstrip("0") or "0"],
            match[2].lower(),
        )
        if sign == "from":  # 3 from 8 is 8 - 3
            a, b = b, a
        operation = "-" if sign in ("-", "minus", "take away", "from") else "+"
        if is_held_out(a, b, operation):
            return True
        position = match.start(3)
    return False


_ADD = _TABLE["add"]
_SUBTRACT = _TABLE["subtract"]
_ADD_ANSWERS = _TABLE["add_answers"]
_SUBTRACT_ANSWERS = _TABLE["subtract_answers"]
_NAMES = _TABLE["names"]
_ITEMS = _TABLE["items"]
_ADD_STORIES = _TABLE["add_stories"]
_SUBTRACT_STORIES = _TABLE["subtract_stories"]


def _pair(rng: random.Random, operation: str) -> tuple[int, int]:
    """Return a pair that is not held out, mostly within 20, otherwise within 100."""
    while True:
        if rng.random() < 0.6:
            a = rng.randint(0, LIMIT)
            b = rng.randint(0, LIMIT - a) if operation == "+" else rng.randint(0, a)
        else:
            a = rng.randint(0, 99)
            b = rng.randint(0, 99 - a) if operation == "+" else rng.randint(0, a)
        if not is_held_out(a, b, operation):
            return a, b


def _working(a: int, b: int, c: int, operation: str) -> str:
    """Return a thought that works out the digits."""
    if operation == "+":
        ones = a % 10 + b % 10
        if a < 10 and b < 10:
            steps = ", ".join(str(a + step) for step in range(1, b + 1)) or "nothing"
            return f"I start at {a} and count {b} up: {steps}. So it is {c}."
        return f"The ones: {a % 10} and {b % 10} make {ones}. The tens: {a // 10} and {b // 10}. Together it is {c}."
    steps = ", ".join(str(a - step) for step in range(1, b + 1)) or "nothing"
    return (
        f"I start at {a} and count {b} down: {steps}. So it is {c}."
        if b < 10
        else f"I look for what must be added to {b} to get {a}. That is {c}."
    )


def _question(rng: random.Random) -> tuple[str, str, tuple[int, int, int, str]]:
    operation = rng.choice("++-")
    a, b = _pair(rng, operation)
    c = a + b if operation == "+" else a - b
    numbers: dict[str, object] = {"a": a, "b": b}
    asks, answers = (_ADD, _ADD_ANSWERS) if operation == "+" else (_SUBTRACT, _SUBTRACT_ANSWERS)
    if max(a, b) <= LIMIT and rng.random() < 0.25:
        item, name = rng.choice(_ITEMS), rng.choice(_NAMES)
        story = rng.choice(_ADD_STORIES if operation == "+" else _SUBTRACT_STORIES)
        return story.format(**numbers, n=name, i=item), rng.choice(answers).format(a=a, b=b, c=c), (a, b, c, operation)
    if max(a, b, c) <= LIMIT and rng.random() < 0.15:
        ask = rng.choice([text for text in asks if "+" not in text and " - " not in text])
        text = ask.format(a=WORDS[a], b=WORDS[b])
        answer = rng.choice(answers[1:3] + answers[4:]).format(a=WORDS[a], b=WORDS[b], c=WORDS[c])
        return text[0].upper() + text[1:], answer[0].upper() + answer[1:], (a, b, c, operation)
    return rng.choice(asks).format(**numbers), rng.choice(answers).format(a=a, b=b, c=c), (a, b, c, operation)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield single questions, series of questions, and some with thinking on."""
    while count > 0:
        question, answer, (a, b, c, operation) = _question(rng)
        chance = rng.random()
        if chance < 0.1 and not (a > LIMIT or b > LIMIT):
            thought = _working(a, b, c, operation)
            if mentions_held_out(thought):
                continue
            yield talk("arithmetic", question, answer, thought=thought)
        elif chance < 0.25:
            others = [_question(rng)[:2] for _ in range(rng.choice((1, 1, 2)))]
            yield talk("arithmetic", question, answer, *(turn for pair in others for turn in pair))
        elif chance < 0.4:
            yield _counting(rng)
        else:
            yield talk("arithmetic", question, answer)
        count -= 1


def _counting(rng: random.Random) -> Chat:
    """Make a chat about counting, comparing, multiplying, or the numbers before and after."""
    n, m = rng.randint(0, 98), rng.randint(0, 99)
    kind = rng.randrange(6)
    if kind == 0:
        ask, answer = (rng.choice(_TABLE["what_number_comes_after"]).format(n), f"{n + 1} comes after {n}.")
    elif kind == 1:
        ask, answer = (rng.choice(_TABLE["what_number_comes_before"]).format(n + 1), f"{n} comes before {n + 1}.")
    elif kind == 2 and n != m:
        ask = rng.choice(_TABLE["which_is_bigger_or"]).format(n, m)
        answer = f"{max(n, m)} is {'bigger' if 'bigger' in ask else 'larger'} than {min(n, m)}."
    elif kind == 3:
        start, steps = rng.randint(0, 40), rng.randint(3, 9)
        ask = rng.choice(_TABLE["count_from_to"]).format(start, start + steps)
        answer = ", ".join(str(value) for value in range(start, start + steps + 1)) + "."
    elif kind == 4:
        ask, answer = f"Is {n} even or odd?", f"{n} is {'even' if n % 2 == 0 else 'odd'}."
    else:
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        ask = rng.choice(_TABLE["what_is_times"]).format(a, b)
        answer = rng.choice(_TABLE["times_is"]).format(a=a, b=b, c=a * b)
    return talk("arithmetic", ask, answer)
