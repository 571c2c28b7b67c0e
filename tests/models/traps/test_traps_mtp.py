"""The ninth detail that implementers of Gemma 4 get wrong: MTP assistants. Each test makes a mistake and must detect it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from culet.drafters.mtp.drafter import MTPDrafter
from culet.drafters.mtp.model import CentroidHead, MTPModel
from culet.drafters.mtp.spec import CentroidSpec
from culet.kernels.eager import draft_round as eager_draft_round
from culet.layers.attention import Pass
from culet.layers.weight.weights import Weights
from tests.models import tiny_assistants
from tests.models import tiny_checkpoints as tiny
from tests.models.draft_rig import DraftRig

LENGTHS = (5, tiny.WINDOW, 3 * tiny.WINDOW + 5)
NUM_DRAFTS = 3
SEEN = 1e-2  # a mistake causes at least a hundred times the tolerance
KINDS = ("E4B", "26B-A4B", "31B")  # a two-step head, experts, and K = V over the latent


@functools.cache
def wanted(shape: str, length: int) -> Tensor:
    return tiny_assistants.oracle_drafts(shape, tiny.telling_prompt(shape, length), 9, NUM_DRAFTS, "engine")[1]


def errors_of(rig: DraftRig, shape: str) -> list[float]:
    """Return the largest relative difference from transformers' logits for each draft.

    An unscored token that outranks a scored one counts as 1.
    """
    prompts = [tiny.telling_prompt(shape, length) for length in LENGTHS]
    _, got_RKV = rig.drafts(prompts, [9] * len(prompts), NUM_DRAFTS)
    found = []
    for draft in range(NUM_DRAFTS):
        worst = 0.0
        for row, length in enumerate(LENGTHS):
            got, want = got_RKV[row, draft], wanted(shape, length)[draft]
            seen = got.isfinite()
            unseen_best = float(want[~seen].max()) if not bool(seen.all()) else float("-inf")
            worst = max(worst, float((got - want)[seen].abs().max() / want.abs().max()) if bool(seen.any()) else 1.0)
            worst = max(worst, 1.0 if unseen_best > float(want[seen].min()) else 0.0)
        found.append(worst)
    return found


@functools.cache
def clean_errors(shape: str) -> list[float]:
    return errors_of(DraftRig(shape), shape)


@pytest.fixture(autouse=True)
def _untouched_assistants_agree() -> None:
    """The same comparison passes without a mistake, so a failure is due to the mistake."""
    assert all(max(clean_errors(shape)) <= 1e-4 for shape in KINDS)


@pytest.mark.parametrize("shape", KINDS)
def test_the_embedding_comes_before_the_hidden_state(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = eager_draft_round.embed_beside

    def swapped(token: Tensor, hidden: Tensor, table: Tensor, scale: float) -> Tensor:
        return torch.cat(beside(token, hidden, table, scale).chunk(2, -1)[::-1], -1)

    monkeypatch.setattr(eager_draft_round, "embed_beside", swapped)
    assert min(errors_of(DraftRig(shape), shape)) > SEEN


@pytest.mark.parametrize("shape", KINDS)
def test_the_hidden_state_is_the_one_after_the_final_norm(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DraftRig(shape)
    last = len(rig.drafter.target.spec.layers) - 1
    monkeypatch.setattr("tests.models.draft_rig.AFTER_FINAL_NORM", last)
    read = rig.harness.step

    def step(parts: list, taps: tuple[int, ...]) -> list[Tensor]:
        """Run a step, and tap the stream after the last layer for the tokens with logits."""
        logits = read(parts, taps)
        hidden = rig.harness.hidden
        assert hidden is not None
        ends = torch.tensor([size for _, size, _ in parts]).cumsum(0) - 1
        stream = hidden.tapped[last]
        hidden.tapped[last] = stream[ends] if stream.shape[0] > len(parts) else stream
        return logits

    rig.harness.step = step  # type: ignore[method-assign, assignment]
    assert min(errors_of(rig, shape)) > SEEN


@pytest.mark.parametrize("shape", KINDS)
def test_the_embedding_is_the_targets_and_scaled(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DraftRig(shape)
    monkeypatch.setattr(eager_draft_round, "embed", lambda token_ids, table, scale: table[token_ids])
    assert min(errors_of(rig, shape)) > SEEN


@pytest.mark.parametrize("shape", KINDS)
def test_its_own_table_is_no_input(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap uses the drafter's own scaled embedding of the token instead of the projected pair."""
    rig = DraftRig(shape)
    assistant, table = rig.drafter.model, tiny_assistants.assistant_oracle(shape).model.embed_tokens.weight
    size = assistant.spec.decoder.hidden_size

    def embed(token_ids: Tensor, targets: Tensor, scale: float) -> Tensor:
        rows = table.detach()[token_ids] * size**0.5
        return torch.nn.functional.pad(rows, (0, targets.shape[1] - size))

    weight = assistant.pre_projection.tensor
    weight.copy_(torch.eye(*weight.shape))
    monkeypatch.setattr(eager_draft_round, "embed", embed)
    assert min(errors_of(rig, shape)) > SEEN


@pytest.mark.parametrize("shape", KINDS)
def test_its_own_table_is_the_head(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap applies the target's head to the state projected back to the target's width."""
    rig = DraftRig(shape)
    assistant, target = rig.drafter.model, rig.drafter.target
    monkeypatch.setattr(assistant.head, "logits", lambda z_RD: target.logits(assistant.next_hidden(z_RD)))
    assert min(errors_of(rig, shape)) > SEEN


@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("what", ["position", "keys"])
def test_position_and_keys_stay_along_the_chain(shape: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap moves each draft by one position, in its angle or in its window of keys."""
    begin, forward = MTPDrafter.begin, MTPModel.forward
    moves: list[Callable[[int], Pass]] = []

    def begin_movable(self: MTPDrafter, batch: object, pool: object) -> Pass:
        def moved(by: int) -> Pass:
            length = batch.length_R  # type: ignore[attr-defined]
            if what == "position":
                shared = begin(self, batch, pool)  # type: ignore[arg-type]
                ropes = [self.model.ops.rope(length - 1 + by, inv_freq) for inv_freq in self.model.inv_freqs]
                shared.ropes[:] = ropes  # type: ignore[index]
                return shared
            window = pool.layout.groups[0].window  # type: ignore[attr-defined]
            last = length - 1
            visible = torch.stack(((last - window + 1 + by).clamp(min=0).minimum(last), last)).int()
            shared = begin(self, batch, pool)  # type: ignore[arg-type]
            sliding, *others = shared.batch.groups
            seen = replace(shared.batch, groups=(replace(sliding, visible_2T=visible), *others))
            return replace(shared, batch=seen)

        moves[:] = [moved]
        counts[0] = 0
        return moved(0)

    counts = [0]

    def forward_moved(self: MTPModel, x: Tensor, _: Pass) -> Tensor:
        counts[0] += 1
        return forward(self, x, moves[0](counts[0] - 1))

    monkeypatch.setattr(MTPDrafter, "begin", begin_movable)
    monkeypatch.setattr(MTPModel, "forward", forward_moved)
    first, *others = errors_of(DraftRig(shape), shape)
    assert first <= 1e-4  # the first draft has not moved
    assert min(others) > 10 * 1e-4
    assert max(others) > SEEN / 2


@pytest.mark.parametrize("shape", KINDS)
def test_the_hidden_state_moves_along_the_chain(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap starts every draft from the target's hidden state again."""
    held: list[Tensor] = []
    beside = eager_draft_round.embed_beside

    def beside_held(token: Tensor, hidden: Tensor, table: Tensor, scale: float) -> Tensor:
        held.append(hidden)
        return beside(token, held[0], table, scale)

    monkeypatch.setattr(eager_draft_round, "embed_beside", beside_held)
    first, *others = errors_of(DraftRig(shape), shape)
    assert first <= 1e-4
    assert min(others) > SEEN


@pytest.mark.parametrize("shape", ["E2B", "E4B"])
@pytest.mark.parametrize("trap", ["ignored", "narrow"])
def test_token_ordering(shape: str, trap: str) -> None:
    """The traps use the order of the token ids, or an order in too few bits (here 7 of 8)."""
    rig = DraftRig(shape)
    head = rig.drafter.model.head
    assert isinstance(head, CentroidHead)
    assert head.token_ids_CJ.dtype == torch.int64
    if trap == "ignored":
        head.token_ids_CJ.copy_(torch.arange(tiny.VOCAB).view_as(head.token_ids_CJ))
    else:
        head.token_ids_CJ.remainder_(128)
    assert max(errors_of(rig, shape)) > SEEN


def test_token_ordering_of_a_real_vocabulary() -> None:
    """Ids of more than 16 bits stay intact, so the best token is found wherever the order puts it."""
    vocab, size = 262_144, 8
    head = CentroidHead(CentroidSpec(2048, 32), vocab, size, Weights(torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    places = head.placements()
    table = torch.randn(vocab, size, generator=generator)
    order = torch.randperm(vocab, generator=generator)
    clusters = torch.randn(2048, size, generator=generator)
    places["model.embed_tokens.weight"].fill(table)
    places["masked_embedding.centroids.weight"].fill(clusters)
    places["masked_embedding.token_ordering"].fill(order)
    head.finish()
    state = torch.randn(5, size, generator=generator)
    best = torch.empty(5, dtype=torch.int64)
    head.ops.pick_best(head.candidates(state), best)
    for row, token in enumerate(best.tolist()):
        chosen = (clusters @ state[row]).topk(32).indices
        among = order.view(2048, 128)[chosen].flatten()
        assert token == int(among[(table[among] @ state[row]).argmax()])
    assert int(best.max()) > 65_535


@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("is_global", [False, True])
def test_keys_are_those_of_the_last_owner_of_the_kind(shape: str, is_global: bool) -> None:
    """The trap uses another layer of the same kind, which has the same shape."""
    rig = DraftRig(shape)
    target = rig.drafter.target
    owners = [layer.index for layer in target.spec.layers if layer.owns_kv and layer.is_global == is_global]
    others = [owner for owner in owners if owner != owners[-1]]
    for layer in rig.drafter.model._layers:
        if layer.attention.kv_source == owners[-1]:
            layer.attention.kv_source = others[-1]
    begin = rig.drafter.model.begin

    def begin_elsewhere(*arguments: object) -> Pass:
        shared = begin(*arguments)  # type: ignore[arg-type]
        nothing = next(iter(shared.fresh.values()))
        shared.fresh.update(dict.fromkeys(others, nothing))
        return shared

    rig.drafter.model.begin = begin_elsewhere  # type: ignore[method-assign, assignment]
    assert min(errors_of(rig, shape)) > SEEN


def test_the_latent_needs_the_targets_key_norm_in_the_assistants_queries() -> None:
    rig = DraftRig("31B")
    for layer in rig.drafter.model._layers:
        if layer.attention.heads.latent:
            layer.attention.norm_weight[:] = layer.attention.q_norm
    assert max(errors_of(rig, "31B")) > SEEN
