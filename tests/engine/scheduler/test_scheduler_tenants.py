"""Tenants share the engine: one with a thousand requests does not delay another one's first."""

from __future__ import annotations

import pytest

from culet.scheduler import fairness
from culet.scheduler.budget import share_budget
from culet.scheduler.fairness import share_tokens
from culet.scheduler.sequence import Sequence
from culet.types import StepPlan
from tests.engine.scheduler.drive import Drive, endless, make, make_layout, make_request, prompt


def steps_to_first_token(drive: Drive, request_id: str, limit: int = 500) -> int:
    for count in range(1, limit):
        drive.step()
        if drive.told[request_id, 0].tokens:
            return count
    raise AssertionError(f"no token after {limit} steps")


def flood(drive: Drive, count: int, length: int = 20, max_tokens: int = 60) -> None:
    for number in range(count):
        drive.add(make_request(f"flood{number}", prompt(length, number), max_tokens, stop=False, tenant="busy"))


def num_running(drive: Drive, tenant: str) -> int:
    return sum(seq.tenant == tenant for seq in drive.scheduler._running)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_flood_does_not_delay_another_tenants_first_token(ahead: bool) -> None:
    drive = make(queue=2000, ahead=ahead)
    flood(drive, 1000)
    for _ in range(10):
        drive.step()
    assert num_running(drive, "busy") == 8
    drive.add(make_request("other", prompt(30, 77), 5, stop=False, tenant="quiet"))
    assert steps_to_first_token(drive, "other") <= 2 + ahead
    assert drive.scheduler.counters.preemptions == 1


def test_without_tenants_the_order_is_by_arrival() -> None:
    drive = make(seqs=2)
    for number in range(6):
        drive.add(endless(f"r{number}", 10 + number, 4))
    ended = []
    while drive.scheduler.has_work:
        drive.step()
        ended += [key[0] for key, told in drive.told.items() if told.finish_reason and key[0] not in ended]
    assert ended == [f"r{number}" for number in range(6)]


def test_the_busiest_tenant_gives_up_places_until_both_run_equally_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "SLICE_FACTOR", 10**9)  # otherwise its own sequences also make way for each other
    drive = make(queue=100)
    flood(drive, 20)
    for _ in range(5):
        drive.step()
    for number in range(20):
        drive.add(make_request(f"other{number}", prompt(12, 500 + number), 40, stop=False, tenant="other"))
    for _ in range(20):
        drive.step()
    assert (num_running(drive, "busy"), num_running(drive, "other")) == (4, 4)
    num_preempted = drive.scheduler.counters.preemptions
    assert num_preempted == 4
    drive.run()
    assert drive.scheduler.counters.preemptions == num_preempted  # places move only once
    drive.check_end()


def test_a_sequence_that_made_way_resumes_from_what_it_computed() -> None:
    drive = make(seqs=2)
    flood(drive, 2, length=40, max_tokens=100)
    for _ in range(20):
        drive.step()
    drive.add(make_request("other", prompt(10, 9), 3, stop=False, tenant="quiet"))
    computed: list[StepPlan | None] = []
    while drive.told["other", 0].finish_reason is None:
        computed.append(drive.step())
    plan = drive.step()
    assert plan is not None
    back = next(entry for entry in plan.entries)
    row = next(row for row in plan.rows if row.slot == back.slot)
    assert len(back.token_ids) >= 55
    assert row.num_new <= 2, "it is computed again, although its pages are still there"
    drive.run()
    drive.check_end()


def test_a_flood_of_pages_makes_way_too() -> None:
    """The busy tenant's sequences hold nearly all pages, although slots are free."""
    drive = make(make_layout((None, 4)), num_pages=100, seqs=16)
    flood(drive, 30, length=40, max_tokens=100)
    for _ in range(12):
        drive.step()
    drive.add(make_request("other", prompt(100, 3), 4, stop=False, tenant="quiet"))
    assert steps_to_first_token(drive, "other") <= 4
    drive.run()
    drive.check_end()


def test_a_flood_of_long_prompts_leaves_tokens_for_others() -> None:
    drive = make(num_pages=2000, seqs=8, budget=64, queue=100)
    flood(drive, 30, length=900, max_tokens=20)
    for _ in range(3):
        drive.step()
    drive.add(make_request("other", prompt(30, 5), 4, stop=False, tenant="quiet"))
    assert steps_to_first_token(drive, "other") <= 2


def test_a_lone_prompt_is_not_computed_together_with_a_flood_of_prompts() -> None:
    drive = make(num_pages=2000, seqs=16, budget=1000, queue=100)
    drive.add(endless("first", 10, 50, tenant="busy"))
    drive.step()
    flood(drive, 30, length=60, max_tokens=20)
    drive.add(make_request("other", prompt(30, 5), 4, stop=False, tenant="quiet"))
    plan = drive.step()
    assert plan is not None
    # The prompt, the running sequence, and at most one more prompt of the busy tenant.
    assert plan.num_tokens <= 30 + 1 + 60


def test_priority_comes_before_fairness() -> None:
    drive = make(seqs=4)
    for number in range(8):
        drive.add(make_request(f"flood{number}", prompt(10, number), 30, stop=False, priority=-1, tenant="busy"))
    drive.step()
    drive.add(make_request("other", prompt(10, 99), 5, stop=False, tenant="quiet"))
    for _ in range(10):
        drive.step()
    assert num_running(drive, "busy") == 4
    assert not drive.told["other", 0].tokens
    assert drive.scheduler.counters.preemptions == 0


def test_a_tenant_gains_nothing_by_having_been_away() -> None:
    drive = make(seqs=1)
    for number in range(12):
        drive.add(make_request(f"stays{number}", prompt(10, number), 5, stop=False, tenant="stays"))
    while drive.told["stays5", 0].finish_reason is None:
        drive.step()
    for number in range(12):
        drive.add(make_request(f"returns{number}", prompt(10, 50 + number), 5, stop=False, tenant="returns"))
    while drive.told["stays9", 0].finish_reason is None:
        drive.step()
    num_ended = sum(drive.told[f"returns{number}", 0].finish_reason is not None for number in range(12))
    assert 3 <= num_ended <= 5


def test_many_tenants_take_turns_in_few_places() -> None:
    """Each tenant has a flood, and there are more tenants than places."""
    drive = make(seqs=2, queue=200)
    for tenant in range(6):
        for number in range(10):
            request = make_request(f"t{tenant}-{number}", prompt(8, 10 * tenant + number), 6, stop=False, tenant=str(tenant))
            drive.add(request)
    ended: list[str] = []
    while len(ended) < 30:
        drive.step()
        ended += [key[0] for key, told in drive.told.items() if told.finish_reason and key[0] not in ended]
    counts = [sum(name.startswith(f"t{tenant}-") for name in ended) for tenant in range(6)]
    assert max(counts) - min(counts) <= 2, counts


def test_tokens_are_shared_by_wishes() -> None:
    assert share_tokens({"a": 1000}, 64) == {"a": 64}
    assert share_tokens({"a": 1000, "b": 10}, 64) == {"a": 54, "b": 10}
    assert share_tokens({"a": 1000, "b": 1000, "c": 4}, 64) == {"a": 30, "b": 30, "c": 4}
    assert share_tokens({}, 64) == {}


def test_a_tenants_prompts_together_get_one_part_of_a_step() -> None:
    layout = make_layout((None, 4))
    tenants = ["busy", "busy", "busy", "quiet"]
    prompts = [
        Sequence(endless(str(number), 100, tenant=tenant), 0, number, layout, is_cached=False)
        for number, tenant in enumerate(tenants)
    ]
    assert [(grant.sequence.tenant, grant.num_new) for grant in share_budget(prompts, 64)] == [("busy", 32), ("quiet", 32)]
