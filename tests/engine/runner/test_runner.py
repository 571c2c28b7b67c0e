"""The runner on a small random model: draws, samples that share logits, log-probabilities, drafts and their rollback.

Most tests drive it with the real scheduler and compare the output with steps that compute everything from the first token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from culet.attention.torch_cpu import TorchCPUBackend
from culet.cache.pool import Pool
from culet.cache.spec import plan_cache
from culet.config import ScheduleConfig
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from culet.runner import draws as draws_module
from culet.runner.runner import Runner
from culet.sampling.sampler import History, sample
from culet.scheduler.scheduler import Scheduler
from culet.testing.tiny import write_checkpoint
from culet.types import Entry, PageTable, Request, Row, Sampling, StepPlan
from tests import samplings
from tests.engine.runner.real_steps import compute_at_once
from tests.matrix import matrix

MAX_LEN = 160
CPU = torch.device("cpu")
GREEDY = replace(samplings.GREEDY, seed=11)
GEMMA = replace(GREEDY, temperature=1.0, top_k=64, top_p=0.95)
# Penalties that change nearly every draw, so that a history that is off by one is noticed.
PENALISED = replace(GEMMA, repetition_penalty=1.4, presence_penalty=1.5, frequency_penalty=1.0, top_k=0)
SETTINGS = {"greedy": GREEDY, "gemma": GEMMA, "penalised": PENALISED}
SHAPES = ["E2B", "31B"]


@pytest.fixture(scope="module", params=SHAPES)
def model(request, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), request.param, dtype=torch.float32)
    return load_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, progress=False)


@pytest.fixture(scope="module")
def one_model(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), "31B", dtype=torch.float32)
    return load_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, progress=False)


def parts(model, num_slabs: int):
    specs = model.spec.kv_specs(4)
    per_token = [sum(spec.bytes_per_token for spec in specs if spec.kind == kind) for kind in {spec.kind for spec in specs}]
    layout = plan_cache(specs, slab_bytes=16 * max(per_token))  # the smallest possible pages
    backends = [TorchCPUBackend(group, model.spec.layers[0].num_heads) for group in layout.groups]
    return layout, Pool(layout, num_slabs, torch.float32, CPU), backends


def watch(runner, drafter):
    """Give the drafter the slots' tokens and the result of each forward pass."""
    drafter.tokens_SL, forward = runner.tokens_SL, runner._forward

    def watched(*arguments):
        output = forward(*arguments)
        drafter.last_LD = output.hidden.last_LD
        return output

    runner._forward = watched


class Rig:
    """A scheduler and a runner. `run` drives them until every request has ended."""

    def __init__(self, model, *, budget=64, max_num_seqs=8, num_slabs=200, drafter=None, prefix_caching=False):
        layout, pool, backends = parts(model, num_slabs)
        self.scheduler = Scheduler(
            layout,
            num_slabs,
            ScheduleConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            max_model_len=MAX_LEN,
            prefix_caching=prefix_caching,
            max_drafts=drafter.max_drafts if drafter else 0,
        )
        self.runner = Runner(model, pool, backends, max_num_seqs=max_num_seqs, max_model_len=MAX_LEN, drafter=drafter)
        if drafter is not None:
            watch(self.runner, drafter)
        self.results = []

    def run(self, *requests: Request):
        """Run the requests and return (tokens, logprobs, prompt logprobs) by (request id, sample)."""
        for request in requests:
            self.scheduler.add(request)
        out: dict[tuple[str, int], tuple[list, list, list]] = {}
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            assert plan is not None
            result = self.runner.execute(plan)
            self.results.append((plan, result))
            self.scheduler.apply(result)
            for delta in self.scheduler.deltas():
                tokens, logprobs, scores = out.setdefault((delta.request_id, delta.sample), ([], [], []))
                tokens += delta.token_ids
                logprobs += delta.logprobs
                scores += delta.prompt_logprobs
        return out


def make_request(name: str, prompt_len: int, sampling: Sampling, *, num_tokens=20, n=1) -> Request:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + prompt_len)
    prompt = torch.randint(120, 600, (prompt_len,), generator=generator).tolist()
    return Request(name, tuple(prompt), sampling, n, num_tokens, frozenset())


def assert_close(ours, theirs) -> None:
    """Check that log-probabilities of the same tokens are equal up to the order of summation."""
    assert [next(iter(scores)) for scores in ours] == [next(iter(scores)) for scores in theirs]
    for our_scores, their_scores in zip(ours, theirs, strict=True):
        assert dict(our_scores) == pytest.approx(dict(their_scores), abs=1e-4)


def logits_anew(model, tokens: list[int]) -> torch.Tensor:
    """Return logits [T, V] of all positions, computed in one step without an existing cache."""
    layout, pool, backends = parts(model, 40)
    runner = Runner(model, pool, backends, max_num_seqs=1, max_model_len=MAX_LEN)
    hidden = compute_at_once(model, runner, layout, tokens)
    with torch.inference_mode():
        return model.logits(hidden.last_LD)


def continued_anew(model, request: Request, sampling: Sampling) -> list[int]:
    """Return the request's output, with each token drawn from logits that are computed from the first token on."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        history = History(torch.tensor([tokens]), [0], [len(request.prompt_token_ids)])
        tokens.append(int(sample(logits_anew(model, tokens)[-1:], [sampling], [len(tokens)], history)))
    return tokens[len(request.prompt_token_ids) :]


@matrix({"name": list(SETTINGS), "model": SHAPES}, fixtures=["model"])
def test_continues_as_if_computed_anew(model, name):
    request = make_request(name, 47, SETTINGS[name], num_tokens=12)
    expected = continued_anew(model, request, SETTINGS[name])
    assert len(set(expected)) > 3  # not a constant that a broken cache would also give
    assert Rig(model, budget=17).run(request)[name, 0][0] == expected


def test_neighbours_do_not_matter(model):
    requests = [make_request(f"{name}{length}", length, SETTINGS[name]) for name in SETTINGS for length in (3, 31, 70)]
    together = Rig(model, max_num_seqs=6, budget=40).run(*requests)
    for request in requests:
        assert Rig(model).run(request)[request.request_id, 0] == together[request.request_id, 0]


def test_preemption_changes_nothing(model):
    requests = [make_request(f"r{index}", 40, GEMMA, num_tokens=30) for index in range(4)]
    layout, _, _ = parts(model, 1)
    # Room for two finished requests. More can start, and then they compete for pages.
    tight = Rig(model, num_slabs=2 * sum(group.pages_for(70) for group in layout.groups))
    out = tight.run(*requests)
    assert tight.scheduler.counters.preemptions > 0
    assert out == Rig(model, num_slabs=400).run(*requests)


def test_prefix_hits_change_nothing(model):
    requests = [make_request(f"r{index}", 130, replace(SETTINGS[name], logprobs=0)) for index, name in enumerate(SETTINGS)]
    rig = Rig(model, prefix_caching=True)
    first = rig.run(*requests)
    again = rig.run(*requests)
    assert rig.scheduler.counters.prefix_hits == 3
    for key, (tokens, logprobs, _) in first.items():
        assert again[key][0] == tokens
        assert [list(scores.values()) for scores in again[key][1]] == [
            pytest.approx(list(scores.values()), abs=1e-4) for scores in logprobs
        ]


# Samples that share logits


@matrix({"name": ["gemma", "penalised"], "model": SHAPES}, fixtures=["model"])
def test_samples_share_the_prompt_but_not_the_draws(model, name):
    sampling = replace(SETTINGS[name], logprobs=2)
    request = make_request("n", 37, sampling, n=4)
    rig = Rig(model)
    calls = count_logits(rig)
    out = rig.run(request)
    assert calls[0] == 1  # logits of one position for four draws
    outputs = [tuple(out["n", index][0]) for index in range(4)]
    assert len(set(outputs)) == 4
    for index in range(4):
        alone = replace(request, request_id="alone", sampling=replace(sampling, sample=index), n=1)
        # A request's own sample number is 0, so the settings carry the sample's number here.
        alone_rig = Rig(model)
        alone_rig.scheduler.add(alone)
        sequence = alone_rig.scheduler._alive["alone"][0]
        sequence.sampling = replace(sampling, sample=index)
        tokens, logprobs, _ = alone_rig.run()["alone", 0]
        assert tokens == out["n", index][0]
        assert_close(out["n", index][1], logprobs)


def count_logits(rig: Rig) -> list[int]:
    """Return a list that records the number of rows of every call for logits."""
    calls: list[int] = []

    class Counting:
        def __init__(self, model):
            self._model = model

        def __getattr__(self, name):
            return getattr(self._model, name)

        def logits(self, last_LD):
            calls.append(last_LD.shape[0])
            return self._model.logits(last_LD)

    rig.runner.target.model = Counting(rig.runner.target.model)
    return calls


def test_logits_only_where_needed(one_model):
    rig = Rig(one_model, budget=16)
    calls = count_logits(rig)
    rig.run(make_request("long", 60, GREEDY, num_tokens=3))
    assert calls == [1, 1, 1]  # none in the middle of the prompt


# Log-probabilities


def test_logprobs_are_those_of_the_model(model):
    wanted = {"none": None, "chosen": 0, "five": 5, "two": 2}
    sampling = replace(PENALISED, temperature=1.3)  # none of these affects the log-probabilities
    requests = [make_request(name, 20, replace(sampling, logprobs=count)) for name, count in wanted.items()]
    out = Rig(model).run(*requests)
    assert out["none", 0][1] == []
    for request in requests[1:]:
        tokens, logprobs, _ = out[request.request_id, 0]
        count = wanted[request.request_id]
        expected = logits_anew(model, [*request.prompt_token_ids, *tokens])[19:-1].double().log_softmax(-1)
        assert len(logprobs) == len(tokens)
        for index, (token, scores) in enumerate(zip(tokens, logprobs, strict=True)):
            assert next(iter(scores)) == token
            top = expected[index].topk(count).indices.tolist() if count else []
            assert set(scores) == {token, *top}
            for token_id, value in scores.items():
                assert value == pytest.approx(expected[index, token_id].item(), abs=1e-4)


@matrix({"budget": [7, 100], "model": SHAPES}, fixtures=["model"])
def test_prompt_logprobs(model, monkeypatch, budget):
    monkeypatch.setattr(draws_module, "LOGITS_ROWS", 5)
    request = make_request("scored", 41, replace(GEMMA, prompt_logprobs=3, logprobs=1))
    rig = Rig(model, budget=budget)
    calls = count_logits(rig)
    tokens, logprobs, scores = rig.run(request, make_request("beside", 23, GREEDY))["scored", 0]
    assert max(calls) <= 5
    assert len(tokens) == len(logprobs) == 20
    prompt = request.prompt_token_ids
    expected = logits_anew(model, list(prompt)).double().log_softmax(-1)
    assert len(scores) == len(prompt) - 1
    for index, token_scores in enumerate(scores):
        assert next(iter(token_scores)) == prompt[index + 1]
        assert set(token_scores) == {prompt[index + 1], *expected[index].topk(3).indices.tolist()}
        for token_id, value in token_scores.items():
            assert value == pytest.approx(expected[index, token_id].item(), abs=1e-4)


def test_prompt_logprobs_of_one_token(model):
    request = make_request("short", 1, replace(GREEDY, prompt_logprobs=0), num_tokens=2)
    tokens, _, scores = Rig(model).run(request)["short", 0]
    assert len(tokens) == 2
    assert scores == []


# Drafts


class ListDrafter:
    """Proposes known outputs, with mistakes where `is_wrong` says so."""

    taps = ()
    group = None

    def __init__(self, outputs, prompt_lens, *, max_drafts=4, is_wrong=lambda position: False):
        self.outputs = outputs  # by first prompt token
        self.prompt_lens = prompt_lens
        self.max_drafts = max_drafts
        self.is_wrong = is_wrong
        self.tokens_SL = None  # set to the runner's
        self.seen = []

    def propose(self, batch, pool, num_drafts):
        rows = []
        for row, (slot, length) in enumerate(zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True)):
            if int(batch.groups[0].pages_BP[row, 0]) == pool.spare_page:
                rows.append([0] * num_drafts)  # a padding row
                continue
            first = int(self.tokens_SL[slot, 0])
            said = length + 1 - self.prompt_lens[first]
            assert int(self.tokens_SL[slot, length]) == int(batch.newest_R[row])
            assert int(batch.newest_R[row]) == self.outputs[first][said - 1]  # as it would be without drafts
            source = int((self.last_LD == batch.hidden_RD[row]).all(-1).nonzero()[0])
            self.seen.append((length, source))
            ahead = self.outputs[first][said : said + num_drafts]
            wrong = [token + self.is_wrong(length + 1 + index) for index, token in enumerate(ahead)]
            rows.append(wrong + [0] * (num_drafts - len(ahead)))
        return torch.tensor(rows)


MISTAKES = {
    "always right": lambda position: False,
    "always wrong": lambda position: True,
    "sometimes wrong": lambda position: position % 3 == 0,
    "late": lambda position: position % 7 == 6,
}


@matrix({"mistake": list(MISTAKES), "name": list(SETTINGS), "model": SHAPES}, fixtures=["model"])
def test_drafts_change_nothing_but_the_number_of_steps(model, name, mistake):
    requests = [
        make_request(f"d{length}", length, replace(SETTINGS[name], seed=length, logprobs=1), num_tokens=30)
        for length in (5, 33, 64)
    ]
    plain = Rig(model, max_num_seqs=4)
    expected = plain.run(*requests)
    drafter = ListDrafter(
        {request.prompt_token_ids[0]: expected[request.request_id, 0][0] for request in requests},
        {request.prompt_token_ids[0]: len(request.prompt_token_ids) for request in requests},
        is_wrong=MISTAKES[mistake],
    )
    assert len(drafter.outputs) == 3
    rig = Rig(model, max_num_seqs=4, drafter=drafter)
    out = rig.run(*requests)
    for key, (tokens, logprobs, _) in expected.items():
        assert out[key][0] == tokens
        assert_close(out[key][1], logprobs)
    counters = rig.scheduler.counters
    if mistake == "always right":
        assert counters.rolled_back_tokens == 0
        assert len(rig.results) < len(plain.results) / 3
    else:
        assert counters.rollbacks > 5
    if mistake == "always wrong":
        kept = [len(drawn.token_ids) for _, result in rig.results for drawn in result.drawn]
        assert set(kept) == {1}


def test_accepted_drafts_by_hand(one_model):
    """Check one verify row: what is accepted, where the new token is, and what the drafter gets."""
    request = make_request("hand", 9, GREEDY, num_tokens=8)
    expected = Rig(one_model).run(request)["hand", 0][0]
    first, length = request.prompt_token_ids[0], 9
    drafter = ListDrafter({first: expected}, {first: length}, is_wrong=lambda position: position == length + 3)
    rig = Rig(one_model, drafter=drafter)
    rig.scheduler.add(request)
    rows = []
    for _ in range(2):
        plan = rig.scheduler.schedule()
        result = rig.runner.execute(plan)
        rig.scheduler.apply(result)
        rows.append((plan.rows[0], result.drawn[0]))
    (_, prefill), (verify, drawn) = rows
    assert (prefill.token_ids, prefill.num_proposed) == (tuple(expected[:1]), 4)
    assert (verify.start, verify.num_new, verify.num_drafts, verify.num_logits) == (length, 5, 4, 5)
    # Drafts are at positions 10 to 13, and the one at 12 is wrong. Two are kept, and the third token is the target's own.
    assert drawn.token_ids == tuple(expected[1:4])
    assert rig.runner.tokens_SL[verify.slot, : length + 4].tolist() == [*request.prompt_token_ids, *expected[:4]]
    assert drafter.seen == [(length, 0), (length + 3, 2)]
    assert rig.runner.tokens_SL[verify.slot, length + 4 : length + 8].tolist() == expected[4:8]  # the next proposals


# Running a step


def test_waits_for_the_device_once(one_model, monkeypatch):
    """A step of greedy, sampled and scored sequences copies its results to the host at once."""
    rig = Rig(one_model)
    for name, sampling in {**SETTINGS, "logprobs": replace(GEMMA, logprobs=3)}.items():
        rig.scheduler.add(make_request(name, 10, replace(sampling, top_k=64)))
    rig.scheduler.apply(rig.runner.execute(rig.scheduler.schedule()))
    plan = rig.scheduler.schedule()
    waits = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero"):
        original = getattr(torch.Tensor, name)
        spy = lambda self, *rest, _original=original, _name=name: (waits.append(_name), _original(self, *rest))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, spy)
    # The reference backend plans on the host, so only the runner's own waits are counted.
    monkeypatch.setattr(rig.runner.target.model, "forward", lambda *arguments: forward(*arguments), raising=False)
    before: list[int] = []
    original_forward = type(one_model).forward

    def forward(*arguments):
        hidden = original_forward(one_model, *arguments)
        before.append(len(waits))
        return hidden

    rig.runner.execute(plan)
    assert waits[before[0] :] == ["tolist"]


def test_slots_are_taken_over(one_model):
    """A shorter sequence in a used slot sees nothing of its predecessor, not even with penalties."""
    rig = Rig(one_model, max_num_seqs=1)
    rig.run(make_request("before", 60, PENALISED, num_tokens=30))
    after = make_request("after", 6, PENALISED)
    assert rig.run(after)["after", 0] == Rig(one_model).run(after)["after", 0]


def test_a_step_without_rows(one_model):
    rig = Rig(one_model)
    result = rig.runner.execute(StepPlan(7, (Entry(0, (1, 2, 3), 3, GREEDY),), (), ()))
    assert (result.step_id, result.drawn) == (7, ())


def test_a_slot_without_an_entry_is_refused(one_model):
    rig = Rig(one_model)
    tables = tuple(PageTable(0, (0,)) for _ in rig.runner.pool.layout.groups)
    row = Row(2, 0, 1, 1, tables, (0,) * len(tables), draw_slots=(2,))
    with pytest.raises(AssertionError, match="no sequence has entered"):
        rig.runner.execute(StepPlan(0, (), (), (row,)))
