"""Whether an answer is right, by pure functions over text and parsed tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

_WORDS: tuple[str, ...] = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS += ("eleven", "twelve")
_WORDS += tuple(f"{stem}teen" for stem in ("thir", "four", "fif", "six", "seven", "eigh", "nine"))
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_in_words(number: int) -> str | None:
    """Return 0 to 99 in words."""
    if 0 <= number < 20:
        return _WORDS[number]
    if 20 <= number < 100:
        tens, ones = _TENS[number // 10 - 2], number % 10
        return tens if ones == 0 else f"{tens}-{_WORDS[ones]}"
    return None


def mentions(text: str, answer: str) -> bool:
    """Return whether `answer` occurs in `text` as whole words or as a whole number, ignoring case."""
    pattern = r"\s+".join(map(re.escape, answer.split()))
    # A number must not continue with decimals or another group of digits. A full stop after it is fine.
    before, after = r"(?<![\w.,-])(?<!\d\s)", r"(?![\w-])(?![.,]\d)"
    if not re.fullmatch(r"-?\d+", answer):
        before, after = r"(?<!\w)", r"(?!\w)"
    return re.search(before + pattern + after, text, re.IGNORECASE) is not None


def is_right(kind: str, text: str, answers: Sequence[str]) -> bool:
    """Return whether the text gives one of the answers. In arithmetic, the last number in the text counts."""
    if kind == "arithmetic":
        numbers = re.findall(r"-?\d+", text)
        if numbers:
            return numbers[-1] in answers
        words = [number_in_words(int(answer)) for answer in answers if re.fullmatch(r"-?\d+", answer)]
        return any(word is not None and mentions(text.replace("-", " "), word.replace("-", " ")) for word in words)
    return any(mentions(text, answer) for answer in answers)


def is_valid_json(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether the whole text is a JSON document that fits the schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError, RecursionError):
        return False
    return True


def is_valid_call(name: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether this calls a declared tool with arguments that fit its parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if function["name"] == name:
            schema = {"additionalProperties": False, **(function.get("parameters") or {})}
            try:
                jsonschema.validate(dict(arguments), schema)
            except jsonschema.ValidationError:
                return False
            return True
    return False
