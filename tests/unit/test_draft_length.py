"""How many drafts a sequence is worth: what is chosen, what it costs when drafts are bad, and costs against measured ones."""

from __future__ import annotations

import pytest
import torch

from culet.cache.spec import plan_cache
from culet.config import DraftChoice
from culet.drafters.base import cache_specs, open_drafter
from culet.engine.drafting import draft_policy
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.scheduler.draft_length import FRESH, IN_A_ROW, KEPT_GAIN, LEAST_TIMED, TIMES_KEPT, DraftPolicy, Pace, StepCost
from culet.scheduler.stats import Counters

MTP = DraftChoice("mtp", "random:", num_speculative_tokens=3)


def cost(**changes: float) -> StepCost:
    values = {
        "dense_bytes": 6e10,
        "expert_bytes": 0.0,
        "num_experts": 0,
        "top_k": 0,
        "flops_per_token": 6e10,
        "draft_bytes": 9e8,
        "drafts_at_once": False,
        "bytes_per_s": 4e12,
        "flops_per_s": 650e12,
        "wait_s": 5e-4,
    }
    return StepCost(**values | changes)  # type: ignore[arg-type]


MOE = {"dense_bytes": 4e9, "expert_bytes": 3.6e8, "num_experts": 128, "top_k": 8, "flops_per_token": 8e9}


def test_how_many_drafts_are_worth_it() -> None:
    dense, moe = DraftPolicy(cost(), (1, 2, 3)), DraftPolicy(cost(**MOE), (1, 2, 3))
    assert [dense._find_best(1, p) for p in (0.0, 0.01, 0.5, 0.9)] == [0, 0, 3, 3]
    assert dense._find_best(1, 0.1) == 0
    assert dense._find_best(1, 0.1, KEPT_GAIN) == 1  # what goes on need not promise as much as what begins
    # More tokens touch more experts, until all are touched anyway: then drafts are cheap again.
    assert [moe._find_best(1, 0.5), moe._find_best(1, 0.9)] == [0, 3] or moe._find_best(1, 0.5) < dense._find_best(1, 0.5)
    assert moe._find_best(64, 0.6) == 3
    # A batch that fills the multipliers already has nothing to spare.
    assert dense._find_best(512, 0.6) == 0
    assert dense._find_best(8, 0.6) == 3


def test_pace_follows_what_is_accepted() -> None:
    policy, pace = DraftPolicy(cost(), (1, 2, 3)), Pace()
    assert policy.wanted(pace, 1) == 3  # not known yet: believed in
    for _ in range(60):
        if count := policy.wanted(pace, 1):
            policy.note(pace, count, 0)
    wanted = [policy.wanted(pace, 1) for _ in range(400)]
    assert 0 < sum(count > 0 for count in wanted) < 40  # now and then it tries
    for _ in range(40):
        policy.note(pace, 3, 3)
    assert policy.wanted(pace, 1) == 3
    other = Pace()  # a new sequence begins with what others accepted
    assert policy.wanted(other, 1) == 3


def test_bad_drafts_cost_at_most_three_percent() -> None:
    """By the cost model, over 512 tokens of which no draft is ever right."""
    for model in (cost(), cost(**MOE), cost(dense_bytes=5e9, flops_per_token=8e9, draft_bytes=1.5e8)):
        policy, pace = DraftPolicy(model, (1, 2, 3)), Pace()
        spent = 0.0
        for _ in range(512):
            count = policy.wanted(pace, 1)
            spent += model.round(1, count)
            if count:
                policy.note(pace, count, 0)
        assert spent <= 1.03 * 512 * model.round(1, 0)


def test_what_the_probe_found_is_believed() -> None:
    policy = DraftPolicy(cost(**MOE), (1, 2, 3))
    assert policy.wanted(Pace(), 1) == 0  # at what is believed without a probe, experts cost more than drafts bring
    counters = Counters()
    for accepted in (3, 3, 2, 3, 3, 3, 1, 3):
        counters.count_verify(3, accepted)
    policy.believe(counters)
    assert policy._of_all.tried == 23
    assert policy._of_all.accepted == 21
    assert policy.wanted(Pace(), 1) == 3


@pytest.mark.parametrize(("accepted", "wanted"), [(0, 0), (1, 3)])
def test_only_worthless_drafts_are_believed_to_be_bad(accepted: int, wanted: int) -> None:
    """What one text accepted a little of may be right for the next."""
    policy, counters = DraftPolicy(cost(wait_s=5e-3), (1, 2, 3)), Counters()
    for _ in range(30):
        counters.count_verify(3, accepted)
    policy.believe(counters)
    assert policy.wanted(Pace(), 1) == wanted


def test_what_steps_take_is_learnt() -> None:
    """Times of real steps stand above the model's; a batch of another size is first seen without drafts."""
    policy = DraftPolicy(cost(), (1, 2, 3))
    assert policy.wanted(Pace(), 8) == 3
    for _ in range(TIMES_KEPT):
        policy.took(8, 3, 0.1)
    assert policy.wanted(Pace(), 8) == 0  # what it takes without drafts is not known yet
    for _ in range(TIMES_KEPT):
        policy.took(7, 0, 0.02)  # of about the same size
    for _ in range(LEAST_TIMED):
        policy.took(8, 3, 0.1)
    assert policy._ratio(8, 3) == pytest.approx(5.0, rel=0.01)
    assert policy._find_best(8, 0.9) < 3
    for _ in range(8 * IN_A_ROW):
        policy.wanted(Pace(), 8)  # the look at steps without drafts ends
    assert policy.wanted(Pace(), 1) == 3  # alone it is another matter
    for _ in range(TIMES_KEPT):
        policy.took(8, 3, 0.022)
    assert policy._find_best(8, 0.9) == 3


def test_a_late_step_does_not_count_for_much() -> None:
    policy = DraftPolicy(cost(), (1, 2, 3))
    for number in range(TIMES_KEPT):
        policy.took(4, 0, 0.5 if number % 10 == 9 else 0.01)
        policy.took(4, 3, 0.02)
    assert 1.0 < policy._ratio(4, 3) < 2.1


def test_times_of_other_days_are_not_compared() -> None:
    """A machine that became twice as fast meanwhile has not made rounds cheaper than steps."""
    policy = DraftPolicy(cost(), (1, 2, 3))
    for _ in range(LEAST_TIMED):
        policy.took(1, 0, 0.02)
    for _ in range(2 * FRESH):
        policy.took(1, 3, 0.01)
    before = policy._ratio(1, 3)
    policy.took(1, 0, 0.006)
    assert policy._ratio(1, 3) == before  # one step is not enough to go by
    for _ in range(LEAST_TIMED):
        policy.took(1, 0, 0.006)
    assert policy._ratio(1, 3) == pytest.approx(0.01 / 0.006, rel=0.05)


def run_policy(
    policy: DraftPolicy, paces: list[Pace], num_steps: int, times: dict[int, float], accepts: int
) -> tuple[float, int]:
    """Seconds and tokens of so many steps; `times` by number of drafts, of which `accepts` are accepted at most."""
    seconds, num_tokens, before = 0.0, 0, -1
    for _ in range(num_steps):
        counts = [policy.wanted(pace, len(paces)) for pace in paces]
        most = max(counts)
        seconds += times[most] + (times[0] if most and most != before else 0.0)  # nothing was planned ahead
        if most == before:
            policy.took(len(paces), most, times[most])
        for pace, count in zip(paces, counts, strict=True):
            num_tokens += 1 + min(count, accepts)
            if count:
                policy.note(pace, count, min(count, accepts))
        before = most
    return seconds, num_tokens


def test_a_model_that_overrates_rounds_is_corrected() -> None:
    """Drafts that the model holds to be too dear for a batch are tried, timed and taken."""
    policy, paces = DraftPolicy(cost(wait_per_seq_s=1e-2), (1, 2, 3)), [Pace() for _ in range(8)]
    assert policy._find_best(8, 0.9) == 0
    run_policy(policy, paces, 200, {0: 0.015, 1: 0.0155, 2: 0.016, 3: 0.0165}, accepts=3)
    assert all(policy.wanted(pace, 8) == 3 for pace in paces)


def test_a_slow_moment_does_not_make_drafts_cheap_for_ever() -> None:
    """Steps without drafts that were timed while the machine was slow are not compared with rounds of later."""
    policy, pace = DraftPolicy(cost(), (1, 2, 3)), [Pace()]
    slow = {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1}
    run_policy(policy, pace, 100, slow, accepts=3)
    times = {0: 0.01, 1: 0.016, 2: 0.018, 3: 0.02}
    run_policy(policy, pace, 100, times, accepts=0)  # learns that drafts are bad
    seconds, num_tokens = run_policy(policy, pace, 2000, times, accepts=0)
    assert num_tokens == 2000
    assert seconds <= 1.03 * 2000 * times[0]


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("ratio", [1.1, 1.6, 2.4])
def test_bad_drafts_cost_little_by_the_clock(num_seqs: int, ratio: float) -> None:
    """The same bound as by the model, with times that the model does not know, and with all that trials cost."""
    times = {0: 0.01, 1: 0.01 * (1 + (ratio - 1) / 2), 2: 0.01 * (1 + 0.75 * (ratio - 1)), 3: 0.01 * ratio}
    policy, paces = DraftPolicy(cost(), (1, 2, 3)), [Pace() for _ in range(num_seqs)]
    run_policy(policy, paces, 150, times, accepts=0)
    seconds, _ = run_policy(policy, [Pace() for _ in range(num_seqs)], 1500, times, accepts=0)
    assert seconds <= 1.03 * 1500 * times[0]
    # Where nothing was accepted for long, short answers of new sequences cost next to nothing either.
    for _ in range(20):
        run_policy(policy, [Pace() for _ in range(num_seqs)], 250, times, accepts=0)
    seconds = sum(run_policy(policy, [Pace() for _ in range(num_seqs)], 250, times, accepts=0)[0] for _ in range(20))
    assert seconds <= 1.005 * 20 * 250 * times[0]
    # And it ends with the first drafts that are accepted.
    paces = [Pace() for _ in range(num_seqs)]
    run_policy(policy, paces, 6000, times, accepts=3)
    assert all(policy.wanted(pace, num_seqs) for pace in paces)


def test_a_batch_drafts_together() -> None:
    """One good text among bad ones is no reason to make all wait for its rounds; many good ones are."""
    times = {0: 0.01, 1: 0.014, 2: 0.016, 3: 0.018}
    for num_good, is_worth_it in ((1, False), (2, False), (6, True), (8, True)):
        policy, paces = DraftPolicy(cost(), (1, 2, 3)), [Pace() for _ in range(8)]
        seconds = num_tokens = num_drafted = 0.0
        for step in range(600):
            policy.see(paces)
            counts = [policy.wanted(pace, len(paces)) for pace in paces]
            policy.took(len(paces), max(counts), times[max(counts)])
            if step >= 100:
                seconds += times[max(counts)]
                num_tokens += 8
                num_drafted += max(counts) > 0
            for index, (pace, count) in enumerate(zip(paces, counts, strict=True)):
                accepted = count if index < num_good else 0
                num_tokens += accepted if step >= 100 else 0
                if count:
                    policy.note(pace, count, accepted)
        speed = num_tokens / seconds * times[0] / 8
        assert (num_drafted > 400) == is_worth_it
        assert speed > (1.2 if is_worth_it else 0.97)


def test_a_batch_that_fills_up_is_no_reason_to_try() -> None:
    """What rounds take in a batch of a size that passes at once need not be known."""
    times = {0: 0.01, 1: 0.014, 2: 0.016, 3: 0.018}
    policy, paces = DraftPolicy(cost(), (1, 2, 3)), [Pace() for _ in range(8)]
    run_policy(policy, paces, 150, times, accepts=0)
    for _ in range(8):  # it is known that the first accepts nothing
        policy.note(paces[0], 3, 0)
    policy._in_vain = 0  # as if one had been accepted
    assert policy._is_unknown(2)
    assert not any(policy.wanted(paces[0], num_seqs) for num_seqs in range(2, 9))


@pytest.mark.parametrize("num_seqs", [1, 8])
def test_good_drafts_are_nearly_always_taken(num_seqs: int) -> None:
    times = {0: 0.01, 1: 0.013, 2: 0.014, 3: 0.015}
    policy, paces = DraftPolicy(cost(), (1, 2, 3)), [Pace() for _ in range(num_seqs)]
    run_policy(policy, paces, 100, times, accepts=3)
    seconds, num_tokens = run_policy(policy, paces, 2000, times, accepts=3)
    best = max((1 + count) / times[count] for count in times)
    assert num_tokens / num_seqs / seconds >= 0.97 * best


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("measured", [{0: 2e-2, 1: 2.6e-2, 3: 3.2e-2}, {0: 2e-4, 1: 9e-4, 3: 9.5e-4}, {0: 1e-2, 1: 1.5e-2}])
def test_costs_follow_what_was_measured(measured: dict[int, float], at_once: bool) -> None:
    """Rounds of one sequence cost what they took at start; more drafts and more sequences cost more."""
    fitted = cost(drafts_at_once=at_once).fitted(measured)
    for num_drafts, seconds in measured.items():
        assert fitted.round(1, num_drafts) == pytest.approx(seconds)
    for num_seqs in (1, 8, 64):
        rounds = [fitted.round(num_seqs, num_drafts) for num_drafts in range(4)]
        assert rounds == sorted(rounds)
    assert fitted.round(64, 3) > fitted.round(1, 3)


def test_noise_makes_no_round_cheaper_than_a_step() -> None:
    fitted = cost().fitted({0: 2e-2, 1: 1.9e-2, 3: 1.8e-2})
    assert fitted.round(1, 3) == pytest.approx(2e-2)
    assert fitted.round(1, 1) == pytest.approx(2e-2)


# Measured on an H200 with random weights (docs/log/drafting.md): a round of three drafts against a plain step, at 1, 8 and
# 32 sequences, with a wait for what was accepted after each.
MEASURED = {"31B": (1.11, 1.14, 1.35), "E4B": (1.46, 1.58, 1.81), "26B-A4B": (2.43, 2.01, 1.44)}


@pytest.mark.parametrize("name", MEASURED)
def test_costs_are_those_that_were_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    target = read_spec(VARIANTS[name])
    drafter = open_drafter(MTP, target)
    layout = plan_cache(cache_specs(target, drafter, 2, latent=True))
    policy = draft_policy(target, drafter, MTP, layout, torch.device("cuda"), 2, plans_open=False)
    assert policy is not None
    for num_seqs, measured in zip((1, 8, 32), MEASURED[name], strict=True):
        assert policy.cost.round(num_seqs, 3) / policy.cost.round(num_seqs, 0) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("num_seqs", [1, 8])
def test_a_start_that_timed_rounds_wrongly_is_corrected(num_seqs: int) -> None:
    """Whatever else the machine did at the start may have made rounds look dear: they are tried soon, and then taken."""
    wrong = cost().fitted({0: 0.01, 1: 0.03, 3: 0.06})
    policy, paces = DraftPolicy(wrong, (1, 2, 3)), [Pace() for _ in range(num_seqs)]
    assert policy._find_best(num_seqs, 0.9) == 0
    times = {0: 0.01, 1: 0.012, 2: 0.013, 3: 0.014}
    run_policy(policy, paces, 60, times, accepts=3)
    assert all(policy.wanted(pace, num_seqs) == 3 for pace in paces)
