"""Which way of adding is chosen, by size and by what a probe finds, and the layers that leave their sums to the norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from culet.kernels.dispatch import eager_kernels
from culet.kernels.eager.ranks import residual_norm_of_ranks
from culet.kernels.types import PeerBuffers
from culet.layers.weight.weights import Weights
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import _match_names, load_weights
from culet.parallel.rank import Rank
from culet.parallel.reduce.choice import PULL, PUSH, TORCH_OPS, Method, Reductions, choose_reductions
from culet.parallel.reduce.norms import RankNorms
from culet.parallel.reduce.probe import probe
from tests.models import tiny_checkpoints as tiny
from tests.models.harness import Harness
from tests.parallel.peers import new_peers, write_terms
from tests.unit.layers.test_weight import Meeting, Reduction

KIB, MIB = 1 << 10, 1 << 20
FAKE = "tests.parallel.fake_probe"


@pytest.mark.parametrize(
    ("reductions", "want"),
    [
        (Reductions(), [Method.LIBRARY] * 3),
        (Reductions(direction=PULL), [Method.LIBRARY] * 3),
        (Reductions(has_torch_ops=True), [Method.ONE_SHOT, Method.TWO_SHOT, Method.LIBRARY]),
        (Reductions(has_torch_ops=True, has_nccl=False), [Method.ONE_SHOT, Method.TWO_SHOT, Method.TWO_SHOT]),
    ],
)
def test_methods_by_size(reductions: Reductions, want: list[Method]) -> None:
    assert [reductions.method(size) for size in (256 * KIB, 257 * KIB, 16 * MIB)] == want


def report(stage: str, seconds: float = 0.0, problem: str = "") -> dict[str, Any]:
    return {"stage": stage, "seconds": seconds, "problem": problem}


def test_what_a_probe_leads_to() -> None:
    found = [report("symmetric memory"), report(PUSH, 1e-5), report(PULL, 2e-5), report(TORCH_OPS)]
    chosen = choose_reductions(found, "", has_nccl=True)
    assert (chosen.direction, chosen.has_torch_ops, chosen.is_symmetric) == (PUSH, True, True)
    assert chosen.reason == "pull took 20 us; push took 10 us"
    assert chosen.names == "fused with norms (push), one-shot, two-shot, NCCL"
    none = choose_reductions([report("symmetric memory", problem="no peer access")], "", has_nccl=True)
    assert not none.is_symmetric
    assert (none.names, none.reason) == ("NCCL", "symmetric memory: no peer access")


@pytest.mark.parametrize(
    ("how", "want", "reason"),
    [
        ("ends", Reductions(PULL, True), "pull took 20 us; push took 30 us"),
        ("wrong", Reductions(PULL, False), f"{TORCH_OPS}: the two-shot sum was wrong"),
        ("hangs", Reductions(PUSH, False), "the next stage was ended, because the probe took longer than 3 s"),
        ("fails", Reductions(PULL, True), "rank 1 of the probe failed: RuntimeError: no peer access"),
    ],
)
def test_a_probe_that(how: str, want: Reductions, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that were right before a probe hung or failed are used."""
    monkeypatch.setenv("FAKE_PROBE", how)
    got = probe(2, has_nccl=True, module=FAKE, limit_s=3.0 if how == "hangs" else 120.0)
    assert (got.direction, got.has_torch_ops) == (want.direction, want.has_torch_ops)
    assert reason in got.reason


class FusedReduction(Reduction):
    """A rank whose sums are fused with norms, in a thread. It has the buffers of all ranks."""

    def __init__(self, meeting: Meeting, index: int, peers: PeerBuffers) -> None:
        super().__init__(meeting, index)
        self.peers, self.num_fused = peers, 0

    def peers_for(self, num_tokens: int, num_columns: int) -> PeerBuffers | None:
        _, most_tokens, _, most_columns = self.peers.data[0].shape
        return self.peers if num_tokens <= most_tokens and num_columns <= most_columns else None

    def residual_norm_of_ranks(self, x_TD: Tensor, deltas: tuple[Tensor, ...], *norms: Any) -> tuple[Tensor, ...]:
        """Write, wait for the other rank as the kernel does, and then run the twin, which writes the same again."""
        write_terms(self.peers, torch.cat(deltas, dim=1))
        self.gather(x_TD)
        self.peers.turn[: x_TD.shape[0]] -= 1
        self.num_fused += 1
        return residual_norm_of_ranks(x_TD, deltas, *norms)


@pytest.mark.parametrize(("shape", "is_pushed"), [("26B-A4B", True), ("31B", False)])
def test_a_model_whose_norms_add_the_ranks(shape: str, is_pushed: bool) -> None:
    """Steps of few tokens are fused, larger ones are not, and both give the logits of one rank."""
    folder = tiny.checkpoint_folder(shape)
    spec = open_checkpoint(str(folder)).spec

    def load(weights: Weights) -> Gemma4:
        return load_weights(
            folder, lambda weights: Gemma4(spec, weights), lambda names: _match_names(names, spec), weights, progress=False
        )

    meeting, chunks = Meeting(2), (25, 3, 1, 1, 2)
    reductions = [
        FusedReduction(meeting, peers.rank, peers) for peers in new_peers(2, 4, 2 * spec.hidden_size, is_pushed=is_pushed)
    ]
    models = [load(Weights(torch.float32, torch.device("cpu"), Rank(i, 2), reductions[i])) for i in range(2)]
    for model, reduction in zip(models, reductions, strict=True):
        for layer in model._layers:
            assert isinstance(layer.rank_norms, RankNorms)
            layer.rank_norms._ops = Ops(reduction)
    tokens = tiny.prompt(sum(chunks))
    want = Harness(load(Weights(torch.float32, torch.device("cpu"))), num_slots=1).all_logits(tokens, chunks)
    ranks = [Harness(model, num_slots=1) for model in models]
    for logits in meeting.run(lambda index: ranks[index].all_logits(tokens, chunks)):
        torch.testing.assert_close(logits, want, rtol=3e-4, atol=3e-4)
    assert {reduction.num_fused for reduction in reductions} == {4 * 2 * len(spec.layers)}


class Ops:
    """The ops of a rank whose fused norm waits for the other one."""

    def __init__(self, reduction: FusedReduction) -> None:
        vars(self).update(vars(eager_kernels()))
        self.residual_norm_of_ranks = reduction.residual_norm_of_ranks
