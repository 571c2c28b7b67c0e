"""What the training data must not contain: the gate's questions, a fifth of the number pairs, and the gate's tools."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from training.data.chats import Chat
from training.data.kinds.arithmetic import is_held_out, mentions_held_out
from training.data.material.tool_families import TEST_NAMES

QUESTIONS = Path(__file__).parent.parent / "questions"
TEST_TOOL = re.compile(r"\b(?:" + "|".join(name for names in TEST_NAMES.values() for name in names) + r")\b")
_COUNTING = re.compile(r"how many|left|together|remain|altogether|total", re.IGNORECASE)


def normalised(text: str) -> str:
    """Keep only letters and digits, so that punctuation, case and spaces do not hide a phrasing."""
    return re.sub(r"[^a-z0-9+-]+", " ", text.lower()).strip()


@functools.cache
def gate_turns() -> frozenset[str]:
    """Return everything that users say in the gate's files."""
    said: set[str] = set()
    for path in QUESTIONS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            item = json.loads(line)
            said |= {item["question"]} if "question" in item else set()
            said |= set(item.get("turns", ())) | {
                message["content"] for message in item.get("messages", ()) if message["role"] == "user"
            }
    return frozenset(map(normalised, said))


# Short turns that may occur in any chat.
EVERYDAY = frozenset(
    ("what is its capital", "thank you goodbye", "is it a planet", "and what is my name", "is it a fish", "i am sad today")
)


@functools.cache
def _forbidden_turns() -> frozenset[str]:
    return gate_turns() - EVERYDAY


def counts_held_out(turn: str) -> bool:
    """Return whether a word problem with two numbers and a "how many" asks for a held-out sum or difference."""
    numbers = [int(number) for number in re.findall(r"(?<![\d.:])\d{1,2}(?![\d.:])", turn)]
    if len(numbers) != 2 or not _COUNTING.search(turn):
        return False
    a, b = numbers
    return (
        is_held_out(a, b, "+")
        if re.search(r"together|more|total|altogether|and \d+ in|plus", turn, re.IGNORECASE)
        else is_held_out(max(a, b), min(a, b), "-")
    )


def fault(item: Chat | str) -> str | None:
    """Return why this must not be trained on, or None."""
    if isinstance(item, str):
        return "number pair" if mentions_held_out(item) else "tool name" if TEST_TOOL.search(item) else None
    for message in item.messages:
        content = str(message.get("content") or "")
        if message["role"] == "user" and normalised(content) in _forbidden_turns():
            return "phrasing"
        if (
            mentions_held_out(content)
            or mentions_held_out(str(message.get("reasoning", "")))
            or (message["role"] == "user" and counts_held_out(content))
        ):
            return "number pair"
    if TEST_TOOL.search(item.spoken) or any(TEST_TOOL.search(tool["function"]["name"]) for tool in item.tools):
        return "tool name"
    return None


def without_faults(text: str) -> str:
    """Return plain text without the lines that must not be trained on."""
    return "\n".join(line for line in text.split("\n") if not fault(line)).strip()
