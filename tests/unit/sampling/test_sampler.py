"""Sampling compared with a slow, obvious implementation in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from culet.kernels.host_transfer import HostCopy, RepeatedCopy
from culet.sampling import sampler
from culet.sampling.logprobs import as_mappings, compute_logprobs
from culet.sampling.philox import uniforms
from culet.sampling.ranking import CHUNK, MIN_CHUNKS, argmax, top_columns
from culet.sampling.sampler import History, TokenMasks, adjust, sample
from culet.types import Sampling
from tests.matrix import matrix
from tests.samplings import GREEDY, PLAIN

WIDE = CHUNK * MIN_CHUNKS * 2  # wide enough for the chunked ranking


def survivors(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Return the probability of each remaining token id after temperature and filters, by definition."""
    best = max(logits)
    weights = {token: math.exp((value - best) / sampling.temperature) for token, value in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-logits[token], token))
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    total = sum(weights[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if sampling.top_p < 1 and mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= sampling.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in sorted(kept)}


def expected_token(logits: list[float], sampling: Sampling, position: int) -> int:
    probabilities = survivors(logits, sampling)
    u = float(uniforms([sampling.seed], [sampling.sample], [position])[0])
    running = 0.0
    for token, probability in probabilities.items():
        running += probability
        if running > u:
            return token
    return max(probabilities)


FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 7},
    "gemma": {"top_k": 64, "top_p": 0.95},
    "top_p": {"top_p": 0.9},
    "narrow top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.3},
    "min_p of 1": {"min_p": 1.0},
    "all": {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    "wide top_k": {"top_k": 1500, "top_p": 0.99},
    "top_k of all": {"top_k": 10**9},
    "top_k 1": {"top_k": 1},
    "cold": {"temperature": 1e-300},
    "hot": {"temperature": 100.0, "top_p": 0.999},
}


@matrix({"name": list(FILTERS), "width": [97, WIDE]})
def test_draws_follow_the_definition(name, width):
    generator = torch.Generator().manual_seed(3)
    # Whole numbers make ties everywhere, including at the edges of top-k and top-p.
    logits = (torch.randn(24, width, generator=generator) * 2).round()
    rows = [replace(PLAIN, seed=row, sample=row % 3, **FILTERS[name]) for row in range(24)]
    drawn = sample(logits, rows, list(range(24)))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [expected_token(logits[row].tolist(), rows[row], row) for row in range(24)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_draws_follow_the_definition_anywhere(data):
    width = data.draw(st.integers(2, 40))
    logits = data.draw(st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=width, max_size=width))
    sampling = replace(
        PLAIN,
        temperature=data.draw(st.sampled_from([0.1, 0.7, 1.0, 2.0])),
        top_k=data.draw(st.integers(0, width + 1)),
        top_p=data.draw(st.sampled_from([0.1, 0.5, 0.77, 0.95, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.07, 0.33, 1.0])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
    )
    position = data.draw(st.integers(0, 262143))
    assert sample(torch.tensor([logits]), [sampling], [position]).item() == expected_token(logits, sampling, position)


@pytest.mark.parametrize("name", ["plain", "gemma", "top_p", "min_p", "all"])
def test_distribution(name):
    """Test chi-squared over 6,000 positions of one sequence."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 1.5
    sampling = replace(PLAIN, seed=99, **FILTERS[name])
    count = 6000
    drawn = sample(logits.expand(count, -1), [sampling] * count, list(range(count))).tolist()
    probabilities = survivors(logits.tolist(), sampling)
    assert set(drawn) <= set(probabilities)
    observed = np.bincount(drawn, minlength=30)
    chi_squared = sum((observed[token] - count * p) ** 2 / (count * p) for token, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi_squared < freedom + 4.5 * math.sqrt(2 * freedom) + 3


def test_neighbours_do_not_matter():
    """Every row draws the same alone as among rows with other settings."""
    generator = torch.Generator().manual_seed(5)
    kinds = [*FILTERS.values(), {"temperature": 0.0}, {"repetition_penalty": 1.3}, {"logit_bias": ((3, 5.0),)}]
    rows = [replace(PLAIN, seed=1000 + index, **kind) for index, kind in enumerate(kinds * 3)]
    logits = torch.randn(len(rows), WIDE, generator=generator) * 3
    buffer = torch.randint(0, WIDE, (len(rows), 64), generator=generator)
    positions = [20 + index % 30 for index in range(len(rows))]
    history = History(buffer, list(range(len(rows))), [5] * len(rows))
    together = sample(logits, rows, positions, history).tolist()
    for row in range(len(rows)):
        alone = History(buffer, [row], [5])
        assert sample(logits[row : row + 1], [rows[row]], [positions[row]], alone).item() == together[row]
    backwards = list(range(len(rows)))[::-1]
    history = History(buffer, backwards, [5] * len(rows))
    turned = sample(logits[backwards], [rows[r] for r in backwards], [positions[r] for r in backwards], history).tolist()
    assert turned == together[::-1]


def test_seed_sample_and_position_key_the_draw():
    logits = torch.zeros(1, 4096)
    base = replace(PLAIN, seed=17)

    def draw(sampling: Sampling, position: int) -> int:
        return sample(logits, [sampling], [position]).item()

    assert draw(base, 5) == draw(base, 5)
    different = [draw(replace(base, seed=18), 5), draw(replace(base, sample=1), 5), draw(base, 6)]
    assert draw(base, 5) not in different
    samples = [[draw(replace(base, sample=s), position) for position in range(8)] for s in range(4)]
    assert len({tuple(tokens) for tokens in samples}) == 4


def test_greedy_takes_the_lowest_of_equal_ids():
    for width in (50, WIDE):
        logits = torch.zeros(3, width)
        logits[0, [7, 9, width - 1]] = 2.0
        logits[1] = -1.0
        logits[2, width - 1] = 1.0
        assert sample(logits, [GREEDY] * 3, [0] * 3).tolist() == [7, 0, width - 1]


def test_temperature_zero_beside_others():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [GREEDY, replace(PLAIN, top_k=5)], [1, 1])[0] == logits[0].argmax()


def test_nan_logits_give_a_token_of_the_vocabulary():
    logits = torch.full((2, 64), math.nan)
    for kind in FILTERS.values():
        drawn = sample(logits, [replace(PLAIN, **kind), GREEDY], [0, 0])
        assert all(0 <= token < 64 for token in drawn.tolist())


def test_bias_and_suppression():
    logits = torch.zeros(2, 10)
    rows = [
        replace(GREEDY, logit_bias=((4, 2.0), (5, 3.0), (5, -math.inf), (99, 1.0))),
        replace(PLAIN, logit_bias=tuple((token, -math.inf) for token in range(10) if token != 6)),
    ]
    assert sample(logits, rows, [0, 0]).tolist() == [4, 6]
    assert torch.equal(logits, torch.zeros(2, 10))  # the caller's logits are unchanged


def test_masks_rule_tokens_out():
    logits = torch.randn(3, 40)
    allowed = {0: [3, 33], 2: [39]}  # the row between them is unconstrained
    bits = torch.zeros(2, 2, dtype=torch.int32)
    for line, tokens in enumerate(allowed.values()):
        for token in tokens:
            bits[line, token // 32] |= 1 << token % 32
    warm = [replace(PLAIN, temperature=5.0, seed=seed) for seed in range(3)]
    before, seen = logits.clone(), {row: set() for row in range(3)}
    for position in range(200):
        for row, token in enumerate(sample(logits, warm, [position] * 3, masks=TokenMasks([0, 2], bits)).tolist()):
            seen[row].add(token)
    assert seen[0] == {3, 33}
    assert seen[2] == {39}
    assert len(seen[1]) > 20
    assert torch.equal(logits, before)
    greedy = [replace(PLAIN, temperature=0.0)] * 3
    assert sample(logits, greedy, [0] * 3, masks=TokenMasks([2], bits[1:])).tolist()[2] == 39


def test_penalties_follow_the_definition():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 20, generator=generator)
    tokens = torch.randint(0, 20, (4, 30), generator=generator)
    rows = [
        replace(PLAIN, repetition_penalty=1.5),
        replace(PLAIN, presence_penalty=0.7, frequency_penalty=0.3),
        replace(PLAIN, repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=1.1, logit_bias=((2, 1.5),)),
    ]
    slots, prompt_lens, lengths = [3, 0, 2], [4, 9, 6], [12, 25, 6]
    adjusted = adjust(logits, rows, lengths, History(tokens, slots, prompt_lens))
    for index, sampling in enumerate(rows):
        sequence = tokens[slots[index], : lengths[index]].tolist()
        output = sequence[prompt_lens[index] :]
        for token in range(20):
            value = logits[index, token].item() + dict(sampling.logit_bias).get(token, 0.0)
            if token in sequence:
                value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
            value -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty * (token in output)
            assert adjusted[index, token].item() == pytest.approx(value, abs=1e-6)


def test_penalties_match_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 50, generator=generator)
    tokens = torch.randint(0, 50, (2, 12), generator=generator)
    rows = [replace(PLAIN, repetition_penalty=1.7)] * 2
    ours = adjust(logits, rows, [12, 12], History(tokens, [0, 1], [6, 6]))
    assert torch.allclose(ours, RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits.clone()))


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 12, "top_p": 0.7, "temperature": 0.4}])
def test_filters_match_transformers(filters):
    """Without ties, the remaining tokens and their probabilities are those of transformers' warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 80, generator=torch.Generator().manual_seed(6)) * 2
    scores = TemperatureLogitsWarper(filters.get("temperature", 1.0))(None, logits.clone())
    if "top_k" in filters:
        scores = TopKLogitsWarper(filters["top_k"])(None, scores)
    if "top_p" in filters:
        scores = TopPLogitsWarper(filters["top_p"])(None, scores)
    theirs = scores.softmax(-1)[0]
    ours = torch.zeros(80)
    for token, probability in survivors(logits[0].tolist(), replace(PLAIN, **filters)).items():
        ours[token] = probability
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 64, 300])
@pytest.mark.parametrize("width", [500, WIDE, WIDE + 1, 262144])
def test_top_columns_is_exact(k, width):
    generator = torch.Generator().manual_seed(8)
    values = (torch.randn(3, width, generator=generator) * 2).round()  # a few dozen distinct values make ties everywhere
    values[1] = -0.0
    values[1, ::2] = 0.0  # equal to -0.0
    values[2, width // 2 :] = -math.inf
    top, columns = top_columns(values, k)
    expected = torch.sort(values, dim=-1, descending=True, stable=True)
    assert torch.equal(columns, expected.indices[:, :k])
    assert torch.equal(top, expected.values[:, :k])
    assert argmax(values).tolist() == expected.indices[:, 0].tolist()


def test_ranked_draw_sorts_only_where_the_head_is_too_small(monkeypatch):
    """Both ways of a top-p draw agree with the definition. A flat row needs the sort, a peaked one does not."""
    peaked = torch.randn(1, WIDE, generator=torch.Generator().manual_seed(9)) * 8
    flat = torch.zeros(1, WIDE)
    rows = [replace(PLAIN, seed=seed, top_p=0.9) for seed in range(20)]
    sorts = 0
    original = torch.Tensor.sort

    def counting(self, *arguments, **options):
        nonlocal sorts
        sorts += self.shape[-1] == WIDE
        return original(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counting)
    for logits, needs_sort in ((peaked, False), (flat, True)):
        sorts = 0
        drawn = sample(logits.expand(20, -1), rows, range(20)).tolist()
        assert (sorts > 0) == (needs_sort and sampler.MAX_CANDIDATES < WIDE)
        assert drawn == [expected_token(logits[0].tolist(), sampling, index) for index, sampling in enumerate(rows)]


def test_top_p_is_a_share_of_what_a_wide_top_k_leaves():
    """Top-p applies to the tokens that remain after top-k.

    The row has ten likely tokens and a flat tail of the same total weight, and most of the tail is beyond top-k. Half of what
    remains after top-k is six of the ten. Half of the whole vocabulary would be all ten.
    """
    logits = torch.full((WIDE,), math.log(10 / (WIDE - 10)))
    logits[:10] = 0.0
    sampling = replace(PLAIN, top_k=1500, top_p=0.5)
    assert sampler.MAX_CANDIDATES < sampling.top_k < WIDE
    assert list(survivors(logits.tolist(), sampling)) == list(range(6))
    drawn = sample(logits.expand(200, -1), [replace(sampling, seed=seed) for seed in range(200)], range(200))
    assert set(drawn.tolist()) == set(range(6))


@pytest.mark.parametrize("width", [4, WIDE])
@pytest.mark.parametrize("top_k", [0, 4, 10**9])
def test_a_token_that_top_p_does_not_need_is_out(width, top_k):
    """Two of four equal tokens make up exactly half, so the third is not drawn."""
    logits = torch.full((width,), -math.inf)
    logits[:4] = 1.0
    sampling = replace(PLAIN, top_k=top_k, top_p=0.5)
    drawn = sample(logits.expand(64, -1), [replace(sampling, seed=seed) for seed in range(64)], range(64))
    assert set(drawn.tolist()) == {0, 1}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (0.5, 5), (1.0 - 2.0**-53, 5)])
@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "wide top_k"])
def test_a_token_without_probability_is_never_drawn(name, uniform, token, monkeypatch):
    """Not even by the smallest and largest random numbers, or by one between two tokens."""
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, *_: [uniform] * len(seeds))
    logits = torch.full((1, 8), -math.inf)
    logits[0, [2, 5]] = 1.0
    assert sample(logits, [replace(PLAIN, **FILTERS[name])], [0]).item() == token


def test_logprobs():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(7))
    chosen = torch.tensor([4, 17, int(logits[2].argmax())])
    tensors = compute_logprobs(logits, chosen, 5)
    expected = logits.double().log_softmax(-1)
    lists = HostCopy([tensors.chosen_L, tensors.top_LK, tensors.top_ids_LK]).lists()
    rows = list(as_mappings(chosen.tolist(), *lists, counts=[5, 0, 3]))
    assert [next(iter(row)) for row in rows] == chosen.tolist()
    for index, (row, count) in enumerate(zip(rows, (5, 0, 3), strict=True)):
        top = expected[index].sort(descending=True).indices[:count].tolist()
        assert set(row) == {*top, chosen[index].item()}
        for token, value in row.items():
            assert value == pytest.approx(expected[index, token].item(), abs=1e-5)
    assert len(rows[2]) == 3  # the chosen token is among the most likely and is listed once
    assert list(rows[0])[1:] == [token for token in expected[0].sort(descending=True).indices[:5].tolist() if token != 4]


def test_logprobs_of_the_chosen_alone():
    logits = torch.randn(2, 9)
    tensors = compute_logprobs(logits, torch.tensor([1, 2]), 0)
    lists = HostCopy([tensors.chosen_L, tensors.top_LK, tensors.top_ids_LK]).lists()
    assert [list(row) for row in as_mappings([1, 2], *lists, counts=[0, 0])] == [[1], [2]]


def test_to_host_keeps_token_ids_exact():
    ids = torch.tensor([[0, 262143], [2**31 - 1, 2**40 + 1]])
    assert HostCopy([ids, torch.tensor([0.5])]).lists() == [[0.0, 262143.0, float(2**31 - 1), float(2**40 + 1)], [0.5]]
    assert HostCopy([ids]).lists() == [ids.flatten().tolist()]


def test_repeated_copies_keep_what_they_were_sent() -> None:
    source = torch.tensor([1, 2, 3])
    copies = RepeatedCopy(source, (2, 1))
    first = copies.send()
    source += 10
    second = copies.send()
    assert (first.lists(), second.lists()) == ([[1, 2], [3]], [[11, 12], [13]])
    assert HostCopy([]).lists() == []
