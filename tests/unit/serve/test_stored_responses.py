"""Stored responses: who sees them, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest

from culet.limits import Limits
from culet.serve.answers.stored import StoredResponse, StoredResponses
from culet.serve.http_errors import HttpError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(text: str = "Hello", previous: str | None = None) -> StoredResponse:
    return StoredResponse(b"{}", [{"role": "user", "content": text}], previous)


def store(clock: Any = None, **limits: int) -> StoredResponses:
    return StoredResponses(Limits(**limits), enabled=True, clock=clock or Clock())


def is_stored(stored: StoredResponses, key: str, response_id: str) -> bool:
    try:
        stored.find(key, response_id)
    except HttpError:
        return False
    return True


def test_each_key_sees_its_own() -> None:
    stored = store()
    assert stored.add("alice", "resp_1", response())
    assert is_stored(stored, "alice", "resp_1")
    assert not is_stored(stored, "bob", "resp_1")
    with pytest.raises(HttpError):
        stored.history("bob", "resp_1")
    with pytest.raises(HttpError):
        stored.delete("bob", "resp_1")
    stored.delete("alice", "resp_1")
    assert not is_stored(stored, "alice", "resp_1")
    assert (stored.num_responses, stored.num_bytes) == (0, 0)


def test_a_conversation_is_the_whole_chain() -> None:
    stored = store()
    for number, previous in enumerate((None, "0", "1")):
        stored.add("", str(number), response(f"message {number}", previous))
    assert [message["content"] for message in stored.history("", "2")] == ["message 0", "message 1", "message 2"]
    assert stored.history("", None) == []
    stored.delete("", "1")
    with pytest.raises(HttpError, match="'1' is not stored"):
        stored.history("", "2")


def test_the_count_is_bounded_and_use_matters() -> None:
    stored = store(stored=3)
    for name in "abc":
        stored.add("", name, response())
    stored.find("", "a")
    stored.add("", "d", response())
    assert [is_stored(stored, "", name) for name in "abcd"] == [True, False, True, True]


def test_the_size_is_bounded() -> None:
    stored = store(stored_mb=1)
    text = "é" * (300 << 10)
    for name in "abcd":
        assert stored.add("", name, response(text))
        assert stored.num_bytes <= 1 << 20
    assert [is_stored(stored, "", name) for name in "abcd"] == [False, True, True, True]
    assert not stored.add("", "e", response("é" * (2 << 20)))  # it alone is too large, and the others stay
    assert is_stored(stored, "", "d")
    assert not stored.add("", "f", StoredResponse(b"{}", [{"role": "user", "content": "1"}] * 2000, None))


def test_a_greedy_key_loses_only_its_own() -> None:
    stored = store(stored=10)
    stored.add("alice", "first", response())
    for number in range(100):
        stored.add("bob", str(number), response())
    assert stored.num_responses == 10
    assert is_stored(stored, "alice", "first")


def test_the_age_is_bounded() -> None:
    clock = Clock()
    stored = store(clock, stored_s=60)
    stored.add("", "a", response())
    clock.now = 50
    assert is_stored(stored, "", "a")
    clock.now = 100
    assert is_stored(stored, "", "a")  # used 50 s ago
    clock.now = 161
    assert not is_stored(stored, "", "a")
    assert stored.num_bytes == 0


def test_nothing_is_stored_by_default() -> None:
    stored = StoredResponses(Limits(), enabled=False)
    assert not stored.add("", "a", response())
    with pytest.raises(HttpError) as error:
        stored.find("", "a")
    assert "--store-responses" in error.value.hint
