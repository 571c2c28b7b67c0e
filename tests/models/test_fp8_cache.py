"""An fp8 (e4m3) KV cache at toy size: how far logits move, and that nothing else about a sequence changes.

Random weights at toy size amplify every rounding, including bfloat16's, so distances are compared with bfloat16's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import load_model
from culet.testing.tiny import write_checkpoint
from tests.models.bfloat16 import QuickBFloat16
from tests.models.harness import Harness
from tests.models.tiny_checkpoints import SHAPES

TOKENS = torch.randint(10, 200, (120,), generator=torch.Generator().manual_seed(1)).tolist()
# Median distance of an fp8 cache's logits from float32's, as a share of the logits' size and of a bfloat16 model's distance.
# e4m3 keeps 4 significant bits where bfloat16 keeps 8, but only for keys and values. Observed: 0.05 to 0.09, and 4 to 6.
BOUND, TIMES_BFLOAT16 = 0.12, 10.0
EXACT = 1e-4  # float32 tolerance between ways of computing the same thing
# A key on the edge between two e4m3 numbers may be rounded either way, depending on the last bit of float32. This is rare, and
# moves later results by a small part of what fp8 itself moves them.
EDGE = 0.03

Make = Callable[..., Harness]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folders: dict[str, Path] = {}

    def build(
        shape: str,
        kv_cache_dtype: str = "auto",
        *,
        latent: bool = True,
        key_factor: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> Harness:
        """Build a model with keys `key_factor` times as large and queries as much smaller, so that attention is the same."""
        if shape not in folders:
            folders[shape] = write_checkpoint(tmp_path_factory.mktemp(shape), shape)
        checkpoint = open_checkpoint(str(folders[shape]))
        model = load_model(checkpoint, dtype=dtype, device=torch.device("cpu"), latent=latent, progress=False)
        change_keys(model, key_factor)
        harness = Harness(model, kv_cache_dtype=kv_cache_dtype)
        model.scale_keys([layer for group in harness.layout.groups if group.spec.is_fp8 for layer in group.layers])
        return harness

    return build


def change_keys(model: Gemma4, factor: float) -> None:
    for layer in model._layers:
        layer.attention.q_norm.data *= 0.3 / factor  # scores of about one, since sharper attention is more sensitive
        if layer.attention.k_norm is not None:
            layer.attention.k_norm.data *= factor
    model.finish()


def distances(got: Tensor, wanted: Tensor) -> Tensor:
    """Return the error of each position's logits, relative to their size."""
    return (got.float() - wanted).norm(dim=-1) / (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)


def assert_same(got: Tensor, wanted: Tensor) -> None:
    distance = distances(got, wanted)
    assert float(distance.median()) < EXACT
    assert float(distance.max()) < EDGE


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_stay_close(make: Make, shape: str) -> None:
    wanted = make(shape).all_logits(TOKENS)
    with QuickBFloat16():
        half = float(distances(make(shape, dtype=torch.bfloat16).all_logits(TOKENS), wanted).median())
    found = {choice: make(shape, choice).all_logits(TOKENS) for choice in ("fp8", "sliding=fp8", "global=fp8_e4m3")}
    for logits in found.values():
        distance = float(distances(logits, wanted).median())
        assert 0 < distance < min(BOUND, TIMES_BFLOAT16 * half)
    assert len({float(logits.sum()) for logits in found.values()}) == 3


@pytest.mark.parametrize("shape", ["E4B", "12B", "26B-A4B"])
def test_chunks_and_recomputation_change_nothing(make: Make, shape: str) -> None:
    """Keys are rounded before they are read, so it does not matter which of them came from pages."""
    wanted = make(shape, "fp8").all_logits(TOKENS)
    harness = make(shape, "fp8")
    assert_same(harness.all_logits(TOKENS, [1, 33, 17, 5, 64]), wanted)
    track = harness.add(TOKENS)
    harness.step([(track, 50, 1)])
    harness.drop(track)  # as a preemption does
    assert_same(harness.step([(track, len(TOKENS), len(TOKENS))])[0], wanted)


def test_a_rejected_draft_leaves_no_trace(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = make("31B", "fp8").all_logits(TOKENS[:40], [30, 10])
    harness = make("31B", "fp8")
    track = harness.add([*TOKENS[:30], 3, 4, 5])
    harness.step([(track, 30, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(harness, "_free_behind", lambda track: None)  # no draft is accepted yet
        harness.step([(track, 3, 3)])
    track.start, track.tokens = 30, TOKENS[:40]
    assert_same(harness.step([(track, 10, 10)])[0], wanted[30:])


@pytest.mark.parametrize("factor", [2.0**-14, 2.0**12])
@pytest.mark.parametrize(("shape", "latent"), [("E4B", True), ("31B", True), ("31B", False)])
def test_the_size_of_the_keys_does_not_matter(make: Make, shape: str, latent: bool, factor: float) -> None:
    """Some weights would push keys out of e4m3's range, or below its smallest numbers."""
    wanted = make(shape, "fp8", latent=latent).all_logits(TOKENS[:40])
    got = make(shape, "fp8", latent=latent, key_factor=factor).all_logits(TOKENS[:40])
    assert not got.isnan().any()
    assert_same(got, wanted)


def test_no_key_leaves_the_range(make: Make) -> None:
    """A projection along one column gives the largest possible key."""
    attention = make("31B", "fp8", key_factor=100.0).model._layers[0].attention
    keys = attention.norm_weight[attention.heads.num_heads :].abs() * attention.heads.head_dim**0.5
    assert 448 / 4 < float(keys.max()) <= 448
    assert float(keys.min()) > 448 / 16  # toy weights differ by at most a factor of three, and pairs of columns share a scale
