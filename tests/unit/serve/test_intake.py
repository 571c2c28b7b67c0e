"""When bodies outgrow their budget, the one that has held most for longest is refused."""

from __future__ import annotations

import pytest

from culet.config import Limits, read_limits
from culet.errors import ConfigError
from culet.serve.http import intake
from culet.serve.http.intake import IncomingBody, Intake

KILOBYTE = 1 << 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(intake.time, "monotonic", lambda: now[0])
    return now


def begin(held: Intake, num_bytes: int) -> IncomingBody:
    body = IncomingBody(held, lambda: None)
    body.add(num_bytes)
    return body


def test_the_slowest_sender_is_refused(clock: list[float]) -> None:
    held = Intake(200 * KILOBYTE)
    slow = begin(held, 60 * KILOBYTE)
    clock[0] = 10.0
    quick = begin(held, 120 * KILOBYTE)
    clock[0] = 10.1
    newest = begin(held, 100 * KILOBYTE)
    assert slow.error is not None
    assert slow.error.status == 503
    assert quick.error is not None, "one was not enough"
    assert newest.error is None
    assert held.num_bytes == newest.num_bytes == 100 * KILOBYTE
    assert held.refusals == {"bodies_full": 2}


def test_complete_bodies_stay(clock: list[float]) -> None:
    held = Intake(200 * KILOBYTE)
    complete = begin(held, 190 * KILOBYTE)
    complete.is_complete = True
    clock[0] = 10.0
    assert begin(held, 100 * KILOBYTE).error is not None
    assert complete.error is None


def test_short_bodies_always_get_in(clock: list[float]) -> None:
    held = Intake(200 * KILOBYTE)
    complete = begin(held, 200 * KILOBYTE)
    complete.is_complete = True
    assert begin(held, 10 * KILOBYTE).error is None


def test_bytes_come_back_once(clock: list[float]) -> None:
    held = Intake(200 * KILOBYTE)
    body = begin(held, 100 * KILOBYTE)
    body.release()
    body.release()
    assert held.num_bytes == 0
    assert begin(held, 150 * KILOBYTE).error is None


def test_the_budget_holds_one_body() -> None:
    assert Limits().bodies_mb >= Limits().body_mb
    with pytest.raises(ConfigError, match="bodies_mb: got 128, expected at least body_mb, which is 200"):
        read_limits("body_mb=200")
