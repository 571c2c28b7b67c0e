"""What the quality gate counts as a right answer."""

from __future__ import annotations

import pytest

from training.scoring import is_right, is_valid_call, is_valid_json, mentions, number_in_words

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The capital of France is Paris.", "paris", True),
        ("The Parisian streets", "Paris", False),
        ("It is the United  States.", "United States", True),
        ("It has 12 legs", "12", True),
        ("It has 112 legs", "12", False),
        ("It is 12.5 high", "12", False),
        ("It is 12.", "12", True),
        ("It is 1,012 high", "12", False),
    ],
)
def test_mentions(text: str, answer: str, expected: bool) -> None:
    assert mentions(text, answer) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7 + 5 = 12", True), ("12", True), ("It is twelve.", True), ("7 + 5 = 13", False), ("12 or 13", False), ("", False)],
)
def test_sums(text: str, expected: bool) -> None:
    assert is_right("arithmetic", text, ["12"]) is expected


def test_numbers_in_words() -> None:
    assert [number_in_words(number) for number in (0, 13, 20, 21, 40, 99, 100)] == [
        "zero",
        "thirteen",
        "twenty",
        "twenty-one",
        "forty",
        "ninety-nine",
        None,
    ]
    assert is_right("arithmetic", "The answer is twenty-one", ["21"])
    assert not is_right("arithmetic", "The answer is twenty", ["21"])


def test_json() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert is_valid_json('{"age": 3}', schema)
    for text in ('{"age": "3"}', "{}", 'Here: {"age": 3}', '{"age": 3', ""):
        assert not is_valid_json(text, schema)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("get_weather", {"city": "Rome"}, True),
        ("get_weather", {"city": "Rome", "days": 3}, True),
        ("get_weather", {"days": 3}, False),
        ("get_weather", {"city": 3}, False),
        ("get_weather", {"city": "Rome", "when": "now"}, False),
        ("get_time", {"city": "Rome"}, False),
    ],
)
def test_calls(name: str, arguments: dict, expected: bool) -> None:
    assert is_valid_call(name, arguments, [TOOL]) is expected
