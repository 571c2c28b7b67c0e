"""Ranks in gloo processes compute the logits of one process, whatever they share: heads, tokens, widths or the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.parallel import jobs
from tests.parallel.ranks import Ranks

RanksOf = Callable[[int], Ranks]
ModelOf = Callable[[str], str]
EVERY = [pytest.param(shape, size, marks=pytest.mark.slow) for shape in jobs.SHAPES for size in (2, 4)]
# 12B with two ranks shares tokens, 26B-A4B with two ranks shares heads and experts. Both with four ranks do all of it.
FEW = [("12B", 2), ("26B-A4B", 2), ("26B-A4B", 4)]
SOME = FEW + [case for case in EVERY if tuple(case.values) not in FEW]


def check(found: list[Tensor], want: Tensor) -> None:
    """Check that all ranks have the same bits, close to those of one process."""
    for logits in found:
        assert torch.equal(logits, found[0])
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("shape", "size"), SOME)
def test_every_position(ranks_of: RanksOf, model_of: ModelOf, shape: str, size: int) -> None:
    """Chunks end inside runs, on their edges, and after several of them. A rank may have no token at all at first."""
    chunks = (17, 46, 1, 1, 63, 2, 100, 30)
    want = jobs.every_logit(None, model_of(shape), chunks)
    assert want.shape[0] == sum(chunks)
    check(ranks_of(size).run(jobs.every_logit, model_of(shape), chunks), want)


@pytest.mark.parametrize(("shape", "size"), [("12B", 2), *(case for case in EVERY if case.values != ("12B", 2))])
def test_ragged_batches(ranks_of: RanksOf, model_of: ModelOf, shape: str, size: int) -> None:
    want = jobs.ragged_logits(None, model_of(shape))
    found = ranks_of(size).run(jobs.ragged_logits, model_of(shape))
    for index, logits in enumerate(want):
        check([of_rank[index] for of_rank in found], logits)


@pytest.mark.parametrize(("shape", "size"), FEW)
def test_a_rank_holds_its_part_of_the_weights(ranks_of: RanksOf, model_of: ModelOf, shape: str, size: int) -> None:
    whole = jobs.held_bytes(None, model_of(shape))
    for held in ranks_of(size).run(jobs.held_bytes, model_of(shape)):
        for part in {"embedding", "mlp", "experts"} & whole.keys():
            assert held[part] * size == whole[part], part
        assert held["all"] < 1.2 * whole["all"] / size + (0 if size <= jobs.SHAPES[shape] else whole["global"])
