"""Drafting with an MTP assistant changes only the number of steps, with batches, preemption, prefix hits and cancels."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from culet import LLM, SamplingParams
from culet.config import DraftChoice, build_config, read_draft_choice
from culet.drafters.base import DraftBatch, open_drafter
from culet.drafters.mtp.model import MTPModel
from culet.drafters.mtp.plan import MTPPlan
from culet.drafters.mtp.spec import MTPSpec, make_config
from culet.engine.memory import least_slabs
from culet.errors import ConfigError
from culet.layers.weight.weights import Weights
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.random_checkpoint import RandomDraw
from culet.models.random_weights import fill_randomly
from culet.sampling.sampler import History, TokenMasks, sample
from culet.sampling.verify import count_accepted
from culet.scheduler.draft_length import DraftPolicy, StepCost
from culet.testing.tiny import write_checkpoint
from culet.types import StructuredOutputs
from tests.engine.drafting.draft_drive import (
    DraftDrive,
    assert_same,
    greedy,
    make_request,
    make_target,
    sequences,
    use_fixed_draws,
)
from tests.engine.runner.real_steps import make_prompt
from tests.matrix import matrix

MTP = DraftChoice("mtp", "random:", num_speculative_tokens=3)
GEMMA = replace(greedy(), temperature=1.0, top_k=64, top_p=0.95)
PENALISED = replace(GEMMA, repetition_penalty=1.4, presence_penalty=1.5, frequency_penalty=1.0, top_k=0)
SETTINGS = {"greedy": greedy(), "gemma": GEMMA, "penalised": PENALISED}
SHAPES = ["E4B", "26B-A4B", "31B"]


def often(place: int) -> bool:
    return hash((place, 7)) % 4 > 0


@pytest.fixture(scope="module", params=SHAPES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma4:
    return make_target(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def one_target(tmp_path_factory: pytest.TempPathFactory) -> Gemma4:
    return make_target(tmp_path_factory.mktemp("model"), "31B")


@matrix({"target": SHAPES, "name": list(SETTINGS), "position": ["engine", "hf"]}, fixtures=["target"])
def test_drafts_change_nothing(target: Gemma4, name: str, position: str) -> None:
    """Greedy, sampled and penalised rows match token for token, because draws are keyed by position, whatever is drafted."""
    requests = [make_request(f"r{n}", make_prompt(n), replace(SETTINGS[name], seed=n), 24) for n in (1, 7, 33, 70)]
    want = DraftDrive(target, None).run(*requests)
    known = sequences(requests, want)
    drive = DraftDrive(target, replace(MTP, position=position), known=known, is_told=often, max_num_seqs=3, budget=40)
    got = drive.run(*requests)
    if name == "greedy":
        assert assert_same(target, requests, got, want) == 0
    assert got == want
    counters = drive.scheduler.counters
    assert counters.accepted_tokens > 20
    assert counters.rolled_back_tokens > 5
    assert {len(drawn.token_ids) for result in drive.results for drawn in result.drawn} == {1, 2, 3, 4}
    drive.check_pages()


def test_rounds_of_fixed_shapes(target: Gemma4) -> None:
    """Padded rounds and verifies run as on a GPU but without a capture, and write nothing to the spare page."""
    requests = [make_request(f"r{n}", make_prompt(n), greedy(), 20 + n) for n in (1, 5, 33)]
    want = DraftDrive(target, None).run(*requests)
    known = sequences(requests, want)
    drive = DraftDrive(target, MTP, known=known, is_told=often, max_num_seqs=5, budget=40, is_fixed=True)
    assert drive.run(*requests) == want
    assert drive.runner.fixed is not None
    assert drive.runner.fixed.rounds is not None
    assert drive.drafter is not None
    assert drive.drafter.num_rounds > 5
    assert not drive.pool._slabs[drive.pool.spare_page].any()


@pytest.mark.parametrize("name", ["greedy", "gemma", "penalised", "mixed"])
def test_draws_of_fixed_shapes(one_target: Gemma4, name: str) -> None:
    """Draws, counts and the drafter's inputs run as a GPU captures them, between steps that no graph serves."""
    chosen = [SETTINGS[name]] * 4 if name != "mixed" else [greedy(), GEMMA, PENALISED, replace(GEMMA, logit_bias=((5, 3.0),))]
    requests = [
        make_request(f"r{n}", make_prompt(n), replace(sampling, seed=n), 30 - n)
        for n, sampling in zip((1, 5, 9, 13), chosen, strict=True)
    ]
    want = DraftDrive(one_target, None).run(*requests)
    drive = DraftDrive(one_target, MTP, known=sequences(requests, want), is_told=often, max_num_seqs=5, is_fixed=True)
    runner = drive.runner
    draws = use_fixed_draws(runner)
    seen: list[bool] = []
    serves = draws.serves
    draws.serves = lambda *given: (is_served := serves(*given), seen.append(is_served))[0]  # type: ignore[method-assign]
    assert drive.run(*requests) == want
    assert set(seen) == {"penalised": {False}, "mixed": {False, True}}.get(name, {True})
    assert drive.drafter is not None
    assert drive.drafter.num_rounds > 5
    drive.check_pages()
    assert not drive.pool._slabs[drive.pool.spare_page].any()
    again = DraftDrive(one_target, MTP, known=sequences(requests, want), is_told=often, max_num_seqs=5)
    again.run(*requests)
    assert again.drafter is not None
    # Sequences that begin with token 0 are padding.
    assert again.drafter.first_drafts == {key: draft for key, draft in drive.drafter.first_drafts.items() if key[0]}


@matrix({"target": SHAPES, "prefix_caching": [False, True]}, fixtures=["target"])
def test_preemption(target: Gemma4, prefix_caching: bool) -> None:
    requests = [make_request(f"r{index}", make_prompt(8 + index), greedy(), 40) for index in range(4)]
    want = DraftDrive(target, None).run(*requests)
    num_slabs = least_slabs(DraftDrive(target, None).layout, 60) + 2
    tight = {"known": sequences(requests, want), "is_told": often, "num_slabs": num_slabs, "prefix_caching": prefix_caching}
    drive = DraftDrive(target, MTP, **tight)
    assert drive.run(*requests) == want
    assert drive.scheduler.counters.preemptions > 0
    drive.check_pages()


def test_prefix_hits_draft_as_well(one_target: Gemma4) -> None:
    """After a hit the assistant finds the same keys, so it drafts the same tokens as before."""
    requests = [make_request(f"r{index}", make_prompt(130, index), greedy(), 20) for index in range(3)]
    drive = DraftDrive(one_target, MTP, prefix_caching=True)
    assert drive.drafter is not None
    first, before = drive.run(*requests), drive.drafter.first_drafts
    drive.drafter.first_drafts = {}
    again = drive.run(*requests)
    assert drive.scheduler.counters.prefix_hits == 3
    assert again == first == DraftDrive(one_target, None).run(*requests)
    assert len(before) == 54
    assert drive.drafter.first_drafts == before


def test_cancels(one_target: Gemma4) -> None:
    requests = [make_request(f"r{index}", make_prompt(20 + 9 * index), greedy(), 30) for index in range(4)]
    want = DraftDrive(one_target, None).run(*requests)
    drive = DraftDrive(one_target, MTP, known=sequences(requests, want), is_told=often)
    got = drive.run(*requests, cancel_at={2: "r1", 5: "r3"})
    assert got["r0", 0] == want["r0", 0]
    assert got["r2", 0] == want["r2", 0]
    for name in ("r1", "r3"):
        assert 0 < len(got[name, 0]) < 30
        assert got[name, 0] == want[name, 0][: len(got[name, 0])]
    drive.check_pages()


def test_samples_of_one_prompt(one_target: Gemma4) -> None:
    request = make_request("n", make_prompt(37), replace(GEMMA, seed=5), 16, n=4)
    want = DraftDrive(one_target, None).run(request)
    drive = DraftDrive(one_target, MTP)
    assert drive.run(request) == want
    assert len({tuple(tokens) for tokens in want.values()}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["E4B", "31B"])
def test_two_thousand_tokens(shape: str, tmp_path: Path) -> None:
    """A model with 32k positions runs one long sequence beside short ones that come and go, with few pages and prefix hits."""
    target = make_target(tmp_path, shape, overrides={"max_position_embeddings": 32768})
    requests = [make_request("long", make_prompt(90), greedy(), 2000)]
    requests += [make_request(f"s{index}", make_prompt(30 + index), greedy(), 60) for index in range(6)]
    room = {"max_len": 2200, "num_slabs": 700, "max_num_seqs": 3}
    want = DraftDrive(target, None, **room).run(*requests)
    known = sequences(requests, want)
    tight = room | {"num_slabs": 200, "prefix_caching": True}
    drive = DraftDrive(target, MTP, known=known, is_told=often, **tight)
    got = drive.run(*requests)
    assert assert_same(target, requests, got, want) <= 1
    assert len(got["long", 0]) == 2000
    assert drive.scheduler.counters.accepted_tokens > 800


# The distribution of sampled tokens


def chi_squared(counts: Counter[int], probabilities: torch.Tensor, total: int) -> tuple[float, int]:
    """Return (statistic, degrees of freedom) of counts compared with probabilities. Rare tokens are pooled."""
    statistic, freedom, rest, rest_count = 0.0, -1, 0.0, 0
    for token, probability in enumerate(probabilities.tolist()):
        if total * probability < 10:
            rest, rest_count = rest + probability, rest_count + counts[token]
            continue
        statistic += (counts[token] - total * probability) ** 2 / (total * probability)
        freedom += 1
    if total * rest >= 5:
        statistic += (rest_count - total * rest) ** 2 / (total * rest)
        freedom += 1
    else:
        assert rest_count <= 5 * (1 + total * rest)
    return statistic, freedom


def allowed_after(token: int, vocab: int, is_masked: bool) -> torch.Tensor:
    """Return flags for which tokens may follow, as in a simple grammar."""
    return torch.tensor([not is_masked or (token + following) % 3 > 0 for following in range(vocab)])


def packed(allowed_RV: torch.Tensor) -> torch.Tensor:
    """Pack flags into words of 32 tokens, lowest bit first."""
    padded = torch.nn.functional.pad(allowed_RV, (0, -allowed_RV.shape[1] % 32)).view(allowed_RV.shape[0], -1, 32).long()
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def distribution(logits_V: torch.Tensor, allowed: torch.Tensor, history: list[int], prompt_len: int, sampling) -> torch.Tensor:
    """Return the probabilities defined by the settings, in float64."""
    logits = torch.where(allowed, logits_V.double(), float("-inf"))
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in set(history):
        logits[token] = (
            logits[token] / sampling.repetition_penalty if logits[token] > 0 else logits[token] * sampling.repetition_penalty
        )
    for token, count in Counter(history[prompt_len:]).items():
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    weights = torch.softmax(logits / sampling.temperature, -1)
    order = weights.argsort(descending=True, stable=True)
    kept = torch.zeros_like(weights)
    mass, chosen = 0.0, order[: sampling.top_k or len(order)]
    share = float(weights[chosen].sum())
    for token in chosen.tolist():
        if mass >= sampling.top_p * share and sampling.top_p < 1:
            break
        kept[token] = weights[token]
        mass += float(weights[token])
    return kept / kept.sum()


SAMPLED = {
    "top-k": {"top_k": 12, "top_p": 1.0},
    "top-p": {"top_k": 40, "top_p": 0.8},
    "grammar": {"top_k": 12, "top_p": 0.95},
    "penalties": {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "bias": {"top_k": 8, "top_p": 1.0, "logit_bias": ((5, 2.0), (6, float("-inf")))},
}


@pytest.mark.parametrize("total", [20_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_distribution_is_the_targets(name: str, total: int) -> None:
    """Many verifies of two drafts over a vocabulary of 40 give the distribution that the settings define.

    The second token's distribution and penalties depend on the first. Drafts are tokens that are drawn often, seldom and never.
    """
    vocab, batch = 40, 2500
    generator = torch.Generator().manual_seed(3)
    table_VV = torch.randn(vocab, vocab, generator=generator) * 1.5  # logits after each token
    prompt = [7, 9, 9]
    base = replace(GEMMA, temperature=0.9, **SAMPLED[name])
    is_masked = name == "grammar"
    allowed_VV = torch.stack([allowed_after(token, vocab, is_masked) for token in range(vocab)])
    first_p = distribution(table_VV[prompt[-1]], allowed_VV[prompt[-1]], prompt, len(prompt), base)
    best = int(first_p.argmax())
    second_p = distribution(table_VV[best], allowed_VV[best], [*prompt, best], len(prompt), base)
    drafts = (best, int(second_p.argmax()))
    firsts: Counter[int] = Counter()
    seconds: dict[int, Counter[int]] = {}
    for begin in range(0, total, batch):
        rows = range(begin, begin + batch)
        settings = [replace(base, seed=row) for row in rows]
        tokens_SL = torch.tensor([[*prompt, *drafts, 0]] * batch, dtype=torch.int32)
        slots = list(range(batch))
        draws = []
        for place in range(3):  # like the runner, draw each as if the drafts before it were accepted
            before = tokens_SL[:, len(prompt) - 1 + place].long()
            history = History(tokens_SL, slots, [len(prompt)] * batch)
            masks = TokenMasks(slots, packed(allowed_VV[before])) if is_masked else None
            draws.append(sample(table_VV[before], settings, [len(prompt) + place] * batch, history, masks=masks))
        drawn_GK = torch.stack(draws, 1)
        drafts_GK = tokens_SL[:, len(prompt) :].long()
        kept = count_accepted(drawn_GK, drafts_GK, torch.full((batch,), 2))
        for count, drawn in zip(kept.tolist(), drawn_GK.tolist(), strict=True):
            out = drawn[: count + 1]
            firsts[out[0]] += 1
            if len(out) > 1:
                seconds.setdefault(out[0], Counter())[out[1]] += 1
    statistic, freedom = chi_squared(firsts, first_p, total)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, f"first token: chi2 {statistic:.1f} at {freedom} degrees"
    counts = seconds[drafts[0]]
    statistic, freedom = chi_squared(counts, second_p, counts.total())
    assert counts.total() > total // 25
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, f"second token: chi2 {statistic:.1f} at {freedom} degrees"


# Adaptive length; its decisions are tested in tests/unit/scheduler/test_draft_length.py


def test_policy_in_the_scheduler(one_target: Gemma4) -> None:
    """Drafts that are never right stop. The sequence then runs ahead of its results again."""
    requests = [make_request("bad", make_prompt(20), greedy(), 120)]
    want = DraftDrive(one_target, None).run(*requests)
    # A GPU that reads 60 GB of weights in 15 ms.
    cost = StepCost(6e10, 0.0, 0, 0, 6e10, 9e8, False, 4e12, 650e12, 5e-4)
    policy = DraftPolicy(cost, (1, 2, 3))
    drive = DraftDrive(one_target, MTP, known={}, policy=policy)
    assert drive.run(*requests) == want
    counters = drive.scheduler.counters
    assert counters.drafted_tokens < 80
    assert len(drive.results) >= 119
    policy = DraftPolicy(cost, (1, 2, 3))
    told = DraftDrive(one_target, MTP, known=sequences(requests, want), is_told=lambda place: True, policy=policy)
    assert told.run(*requests) == want
    assert told.scheduler.counters.acceptance_at[0] > 0.9


# Settings, reports, and the hook for measurements


def test_reports(one_target: Gemma4) -> None:
    requests = [make_request("r", make_prompt(20), greedy(), 60)]
    want = DraftDrive(one_target, None).run(*requests)
    drive = DraftDrive(one_target, MTP, known=sequences(requests, want), is_told=lambda place: place % 4 != 0)
    drive.run(*requests)
    counters = drive.scheduler.stats().counters
    assert counters.drafted_tokens == sum(counters.drafted_at)
    assert counters.accepted_tokens == sum(counters.accepted_at)
    assert counters.drafted_at[0] == counters.verifies
    assert list(counters.acceptance_at) == sorted(counters.acceptance_at, reverse=True)
    assert counters.tokens_per_verify == pytest.approx(1 + counters.accepted_tokens / counters.verifies)


def test_forced_acceptance(one_target: Gemma4) -> None:
    """Forced acceptance replaces only the decision. Rows, drafts and draws are made as usual."""
    drive = DraftDrive(one_target, MTP)
    drive.runner.force_accepted(2)
    out = drive.run(make_request("r", make_prompt(20), greedy(), 31))
    assert len(out["r", 0]) == 31
    counters = drive.scheduler.counters
    assert counters.acceptance_at[:2] == (1.0, 1.0)
    assert counters.accepted_at[2] == 0
    assert counters.verifies == 10


@pytest.mark.parametrize("shape", ["E2B", "31B"])
def test_llm_with_drafts(shape: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shape)
    settings = {"device": "cpu", "max_num_seqs": 3, "max_model_len": 200}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["hello there", "a b c d e f g", "x"]
    with LLM(str(folder), **settings) as llm:
        want = [result.token_ids for result in llm.generate(prompts, params)]
    with LLM(
        str(folder), speculative_config={"method": "mtp", "model": "random:", "adaptive": False, "probe": False}, **settings
    ) as llm:
        assert [result.token_ids for result in llm.generate(prompts, params)] == want
        counters = llm.engine.stats().counters
        assert counters.verifies > 20
        assert len(counters.drafted_at) == 3


def test_grammars_go_along_the_drafts(tmp_path: Path) -> None:
    """A regular expression holds for every token of a verify, and the output is the same as without drafts."""
    folder = write_checkpoint(tmp_path, "31B")
    settings = {"device": "cpu", "max_num_seqs": 3, "max_model_len": 200}
    outputs = StructuredOutputs(regex="(ab|cd|xyz){4,12}")
    prompts = ["hello there", "a b c d e f g", "x"]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs=outputs) for seed in range(3)]
    with LLM(str(folder), **settings) as llm:
        want = llm.generate(prompts, params)
    truth = {tuple(result.prompt_token_ids): list(result.token_ids) for result in want}
    with LLM(
        str(folder), speculative_config={"method": "mtp", "model": "random:", "adaptive": False, "probe": False}, **settings
    ) as llm:
        runner = llm.engine._worker
        drafter: Any = runner.drafter
        propose = drafter.propose

        def told(batch: DraftBatch, pool: Any, num_drafts: int) -> torch.Tensor:
            """Replace two of three drafts with the true tokens."""
            proposals = propose(batch, pool, num_drafts)
            for row, (slot, length) in enumerate(zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True)):
                said = runner.tokens_SL[slot, : length + 1].tolist()
                for prompt, answer in truth.items():
                    if tuple(said[: len(prompt)]) == prompt:
                        begin = length + 1 - len(prompt)
                        for index, token in enumerate(answer[begin : begin + num_drafts]):
                            proposals[row, index] = token if (length + index) % 3 else proposals[row, index]
            return proposals

        drafter.propose = told
        got = llm.generate(prompts, params)
        assert llm.engine.stats().counters.accepted_tokens > 5
    assert [result.token_ids for result in got] == [result.token_ids for result in want]
    for result in got:
        assert re.fullmatch("(ab|cd|xyz){4,12}", result.text) or result.finish_reason == "length"


def test_a_useless_drafter_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The probe at start warns loudly about an assistant whose drafts are never right, and names the possible causes."""
    folder = write_checkpoint(tmp_path / "target", "31B")
    plan = open_drafter(MTP, open_checkpoint(str(folder)).spec)
    assert isinstance(plan, MTPPlan)
    drafter = write_assistant(tmp_path / "assistant", plan.spec, make_config(open_checkpoint(str(folder)).spec))
    given = {"method": "mtp", "model": str(drafter)}
    with LLM(str(folder), device="cpu", max_num_seqs=2, max_model_len=120, speculative_config=given) as llm:
        assert llm.engine.stats().counters.verifies == 0  # the probe leaves no counts
        assert llm.engine._scheduler.policy.cost.model.batch.num_seqs == 2  # sequences that were timed together
        assert not llm.engine._scheduler.deltas()
    warned = [record.getMessage() for record in caplog.records if "DRAFTS ARE NOT ACCEPTED" in record.getMessage()]
    assert len(warned) == 1
    assert all(cause in warned[0] for cause in ("wrong pairing", "wrong template", "wrong layer", str(drafter)))


def write_assistant(folder: Path, spec: MTPSpec, config: dict) -> Path:
    """Write a random assistant as a checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    places = MTPModel(spec, Weights(torch.float32, torch.device("cpu")), latent=True).placements()
    fill_randomly(places, RandomDraw(), torch.device("cpu"))
    # The weights are in Culet's layout instead of a checkpoint's, which does not matter for random weights.
    save_file({name: place.target.clone().contiguous() for name, place in places.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"method": "mtp"}', "model is missing"),
        ('{"method": "mtp", "model": ""}', "model: got ''"),
        ('{"method": "mtp", "model": "x", "tokens": 3}', "unknown key 'tokens'"),
        ('{"method": "mtp", "model": "x", "num_speculative_tokens": 0}', "from 1 to 15"),
        ('{"method": "mtp", "model": "x", "position": "end"}', "expected engine or hf"),
        ('{"method": "mtp", "model": "x", "adaptive": 1}', "adaptive"),
    ],
)
def test_bad_settings(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="speculative-config: .*" + words):
        build_config({"speculative_config": text})


def test_settings() -> None:
    given = {"method": "mtp", "model": "m", "num_speculative_tokens": 4, "attention_backend": "torch_cpu"}
    assert build_config({"speculative_config": given}).draft.choice == read_draft_choice(json.dumps(given))
    assert build_config({}).draft.choice is None


def test_an_explicit_backend_is_the_drafters_or_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "31B")
    base = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 64}
    with pytest.raises(ConfigError, match="speculative-config: attention-backend: 'triton' does not support layer 6"):
        LLM(str(folder), speculative_config={"method": "mtp", "model": "random:", "attention_backend": "triton"}, **base)


def test_a_head_in_fp8(tmp_path: Path) -> None:
    """An fp8 head may draft differently but the output is the same. Heads that it cannot serve raise, with the reason."""
    folder = str(write_checkpoint(tmp_path, "31B", dtype=torch.float32))
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 200, "max_num_seqs": 3}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [make_prompt(length) for length in (3, 40)]
    want = [result.token_ids for result in LLM(folder, **settings).generate(prompts, params)]
    draft = {"method": "mtp", "model": "random:", "adaptive": False, "head_dtype": "fp8"}
    llm = LLM(folder, speculative_config=draft, **settings)
    assert [result.token_ids for result in llm.generate(prompts, params)] == want
    drafter = llm.engine._worker.drafter
    assert drafter is not None
    head = drafter.model.head  # type: ignore[attr-defined]
    assert head.table.tensor.dtype == torch.float8_e4m3fn
    z = torch.randn(5, head.table.tensor.shape[1])
    best = torch.empty(5, dtype=torch.int64)
    drafter.model.ops.pick_best(head.candidates(z), best)  # type: ignore[attr-defined]
    assert torch.equal(best, head.logits(z).argmax(-1))
    plain = LLM(folder, speculative_config=draft | {"head_dtype": "auto"}, **settings).engine._worker.drafter
    whole = plain.model.head.logits(z)  # type: ignore[union-attr]
    assert float((head.logits(z) - whole).abs().max()) < 0.05 * float(whole.abs().max())


@pytest.mark.parametrize(
    ("shape", "choice", "words"),
    [
        ("E4B", {"method": "mtp"}, "scores clusters"),
        ("31B", {"method": "dflash"}, "the target's head"),
        ("31B", {"method": "mtp", "head_dtype": "int8"}, "expected auto or fp8"),
    ],
)
def test_heads_that_cannot_be_fp8(tmp_path: Path, shape: str, choice: dict[str, str], words: str) -> None:
    write_checkpoint(tmp_path, shape)
    with pytest.raises(ConfigError, match=words):
        LLM(str(tmp_path), device="cpu", speculative_config={"model": "random:", "head_dtype": "fp8"} | choice)
