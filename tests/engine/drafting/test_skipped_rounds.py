"""The runner makes no proposals after a verify that accepted fewer drafts than the plan asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from culet.config import DraftChoice
from culet.models.gemma4 import Gemma4
from culet.scheduler.sequence import Acceptance
from tests.engine.drafting.draft_drive import DraftDrive, greedy, make_request, make_target, sequences
from tests.engine.runner.real_steps import make_prompt
from tests.engine.scheduler.fixed_lengths import FixedLengths

MTP = DraftChoice("mtp", "random:", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def one_target(tmp_path_factory: pytest.TempPathFactory) -> Gemma4:
    return make_target(tmp_path_factory.mktemp("model"), "31B")


class _Careful(FixedLengths):
    """Wants three drafts, and another round only if at least one of them was accepted."""

    def plan(self, batch: Sequence[Acceptance]) -> None:
        for state in batch:
            state.min_accepted = 1


@pytest.mark.parametrize("is_told", [False, True])
def test_a_round_after_a_failed_verify_is_skipped(one_target: Gemma4, is_told: bool) -> None:
    """Without it, drafts that are never right are verified in every second step at most. Drafts that are right go on."""
    requests = [make_request(f"r{n}", make_prompt(n), greedy(), 30) for n in (20, 21)]
    want = DraftDrive(one_target, None).run(*requests)
    policy = _Careful(3)
    drive = DraftDrive(one_target, MTP, known=sequences(requests, want), is_told=lambda place: is_told, policy=policy)
    assert drive.run(*requests) == want
    num_verifies, num_steps = drive.scheduler.counters.verifies, len(drive.results)
    assert num_verifies > num_steps if is_told else 20 < num_verifies <= num_steps + 2
