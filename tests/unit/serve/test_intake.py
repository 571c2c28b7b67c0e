"""When bodies outgrow their budget, the one that has held most for longest is refused. How connections read and write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from culet.errors import ConfigError
from culet.limits import Limits, read_limits
from culet.serve.http import intake
from culet.serve.http.connection import _PacedFlow, _ReplyTransport
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


def test_bodies_are_read_at_a_bounded_rate(clock: list[float]) -> None:
    clock[0] = 100.0
    held = Intake(1 << 30)
    burst = int(intake._BURST_S * intake._BODY_BYTES_S)
    assert held.read_pause_s(burst) == pytest.approx(0.0)
    assert held.read_pause_s(intake._BODY_BYTES_S) == pytest.approx(1.0)
    assert held.read_pause_s(intake._BODY_BYTES_S) == pytest.approx(2.0), "all connections share the rate"
    clock[0] += 10.0
    assert held.read_pause_s(burst) == pytest.approx(0.0), "what was not used is saved up to the burst only"
    assert held.read_pause_s(intake._BODY_BYTES_S) == pytest.approx(1.0)


class Recorder:
    """A transport that only knows whether it reads."""

    is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return False


def test_a_rest_outlasts_a_reader_that_wants_more() -> None:
    transport = Recorder()
    flow = _PacedFlow(transport)  # type: ignore[arg-type]
    flow.rest()
    flow.pause_reading()
    flow.resume_reading()  # uvicorn does this whenever the application waits for the body
    assert not transport.is_reading
    flow.end_rest()
    assert transport.is_reading
    flow.rest()
    flow.pause_reading()
    flow.end_rest()
    assert not transport.is_reading, "nobody reads the body"
    flow.resume_reading()
    assert transport.is_reading


def test_a_held_head_is_written_with_the_bytes_after_it() -> None:
    written: list[bytes] = []
    transport = _ReplyTransport(SimpleNamespace(transport=SimpleNamespace(write=written.append)))  # type: ignore[arg-type]
    for _ in range(2):  # two responses on one connection
        transport.write(b"100 Continue, ")
        transport.hold_head()
        transport.write(b"head, ")
        assert written == [b"100 Continue, "], "the head waits"
        transport.write(b"first event, ")
        transport.write(b"second event")
        assert written == [b"100 Continue, ", b"head, first event, ", b"second event"]
        written.clear()
