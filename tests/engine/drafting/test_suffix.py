"""Suffix drafting, alone and beside MTP: it copies what followed the last tokens before, and never changes a token."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from culet import LLM, SamplingParams
from culet.cache.pool import Pool
from culet.config import DraftChoice, read_draft_choice
from culet.drafters.base import open_drafter
from culet.errors import ConfigError
from culet.kernels.eager.draft_round import copy_suffix
from culet.models.checkpoint import open_checkpoint
from culet.runner.runner import Runner
from culet.scheduler.draft_length import DraftPolicy
from culet.scheduler.sequence import Acceptance
from culet.testing.tiny import write_checkpoint
from tests.engine.drafting.draft_drive import use_fixed_draws
from tests.unit.scheduler.draft_simulation import CPU_MTP, probed_cost

ECHO = [7, 300, 41, 99, 250, 18, 77, 512, 33, 140] * 3
CHOICES = {"alone": {"method": "suffix"}, "beside": {"method": "mtp", "model": "random:", "suffix": True}}
ALWAYS = {"adaptive": False, "probe": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), "31B", dtype=torch.float32))


def make(folder: str, choice: dict[str, Any] | None) -> LLM:
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 160, "max_num_seqs": 4}
    return LLM(folder, **given, **({} if choice is None else {"speculative_config": choice}))


@pytest.fixture(scope="module")
def plain(folder: str) -> LLM:
    return make(folder, None)


def expected_copy(tokens: Sequence[int], least: int, most: int, num_drafts: int) -> list[int] | None:
    """Return the copy by definition: the longest match of the last tokens, the latest of these, and what follows it."""
    last = len(tokens) - 1
    best: tuple[int, int] | None = None
    for end in range(last):
        size = 0
        while size < most and size <= end and tokens[end - size] == tokens[last - size]:
            size += 1
        if size >= least:
            best = max(best or (0, 0), (size, end))
    if best is None:
        return None
    copied = list(tokens)
    for index in range(num_drafts):
        copied.append(copied[best[1] + 1 + index])
    return copied[last + 1 :]


@pytest.mark.parametrize("match_lens", [(1, 1), (1, 4), (2, 2), (3, 8)])
def test_copies_by_definition(match_lens: tuple[int, int]) -> None:
    rng = random.Random(3)
    num_found = 0
    for _ in range(60):
        size, num_drafts = rng.randint(1, 30), rng.randint(1, 9)
        tokens = rng.choices(range(rng.choice((2, 5, 40))), k=size)
        row = torch.tensor([[0] * 40, tokens + [99] * (40 - size)], dtype=torch.int32)
        drafts = torch.full((1, num_drafts), -1)
        copy_suffix(row, torch.tensor([1]), torch.tensor([size - 1]), match_lens, drafts)
        wanted = expected_copy(tokens, *match_lens, num_drafts)
        assert drafts[0].tolist() == ([-1] * num_drafts if wanted is None else wanted), tokens
        num_found += wanted is not None
    assert 5 < num_found < 60


@pytest.mark.parametrize("name", CHOICES)
def test_nothing_changes(folder: str, plain: LLM, name: str) -> None:
    """Greedy and seeded answers are the same token for token, with text that repeats itself and text that does not."""
    llm = make(folder, CHOICES[name] | ALWAYS)
    prompts = [ECHO, ECHO[:5], list(range(120, 160)), ECHO[3:25]]
    for params in (
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.3),
    ):
        wanted = [answer.token_ids for answer in plain.generate(prompts, params)]
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == wanted
    counters = llm.engine.stats().counters
    assert counters.accepted_tokens > 40
    assert counters.rolled_back_tokens > 0


@pytest.mark.parametrize("name", CHOICES)
def test_nothing_changes_in_fixed_shapes(folder: str, plain: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, verifies and draws run as on a GPU, where the drafter cannot abstain."""
    monkeypatch.setattr("culet.engine.start.worker.Pool", lambda *given, has_spare: Pool(*given, has_spare=True))
    llm = make(folder, CHOICES[name] | ALWAYS)
    runner = llm.engine._worker
    assert isinstance(runner, Runner)
    runner.use_fixed_shapes()
    use_fixed_draws(runner)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    wanted = [answer.token_ids for answer in plain.generate([ECHO, ECHO[:7]], params)]
    assert [answer.token_ids for answer in llm.generate([ECHO, ECHO[:7]], params)] == wanted
    assert llm.engine.stats().counters.accepted_tokens > 20


def test_echoed_text_takes_few_steps(folder: str, plain: LLM) -> None:
    """The random model soon repeats itself. Most of its text is then copied, eight tokens at a time."""
    llm = make(folder, {"method": "suffix"})
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    wanted = plain.generate([ECHO], params)[0].token_ids
    before = llm.engine.stats().counters
    assert llm.generate([ECHO], params)[0].token_ids == wanted
    assert llm.engine.stats().counters.since(before).steps < 70


def test_the_benchmark_compares_two_engines(folder: str, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks" / "drafting"))
    echoed_text = importlib.import_module("echoed_text")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engines = [echoed_text.Engine(llm) for llm in (plain, make(folder, CHOICES["alone"]))]
    clock, own = echoed_text.compare(*engines, ([ECHO, ECHO[:9], ECHO[:7]], [params] * 3), 2)
    assert clock > 0
    assert own > 0


def test_new_text_costs_no_verify(folder: str) -> None:
    """Where the last tokens are new, nothing is proposed, so that the step is a plain one."""
    llm = make(folder, {"method": "suffix", "prompt_lookup_min": 15, "prompt_lookup_max": 15})
    bias = dict.fromkeys(range(0, 600, 2), -100.0)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=50, ignore_eos=True, logit_bias=bias)
    llm.generate([list(range(120, 150))], params)
    counters = llm.engine.stats().counters
    assert (counters.verifies, counters.steps) == (0, 50)


def test_a_try_goes_on_while_nothing_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs nothing, and the text may repeat itself soon."""
    policy, state = DraftPolicy(probed_cost(CPU_MTP), (1, 2, 3)), Acceptance()
    monkeypatch.setattr(policy._timed, "next", lambda *_, **__: None)  # no steps that are run only to time them
    for _ in range(6):
        policy.plan([state])
        policy.note(state, 3, 0)
    while not policy.length(state, 1):
        policy.plan([state])
    estimate = state.estimate
    for _ in range(20):
        policy.note(state, 0, 0)
        policy.plan([state])
        assert policy.length(state, 1) > 0
    assert state.estimate == pytest.approx(estimate)


def test_settings() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    choice = read_draft_choice(json.dumps(ngram))
    assert (choice.method, choice.model, choice.num_speculative_tokens, choice.match_lens) == ("suffix", "", 5, (2, 4))
    with pytest.raises(ConfigError, match="prompt_lookup_min"):
        DraftChoice("suffix", prompt_lookup_min=5, prompt_lookup_max=4)
    with pytest.raises(ConfigError, match="model is missing"):
        read_draft_choice('{"method": "mtp"}')


def test_it_has_no_weights_to_load(folder: str) -> None:
    spec = open_checkpoint(folder).spec
    with pytest.raises(ConfigError, match="suffix drafting has no weights"):
        open_drafter(DraftChoice("suffix", "google/some-model"), spec)
    beside = open_drafter(DraftChoice("mtp", "random:", suffix=True), spec)
    assert (beside.method, beside.max_drafts, beside.weight_bytes(4) > 0) == ("mtp", 8, True)
