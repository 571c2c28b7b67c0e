"""The scheduler forgets the deadlines of requests that have ended."""

from __future__ import annotations

from tests.engine.scheduler.drive import endless, make


def test_deadlines_do_not_pile_up() -> None:
    drive = make()
    scheduler = drive.scheduler
    scheduler.add(endless("long", 5, 50, deadline=50.0))
    for number in range(2000):
        scheduler.add(endless(f"short-{number}", 5, 50, deadline=1000.0))
        scheduler.cancel(f"short-{number}")
        assert len(scheduler._deadlines) <= 200
    drive.now = 60.0
    scheduler.schedule()
    assert not scheduler.has_work, "the deadline of the long request was kept"
