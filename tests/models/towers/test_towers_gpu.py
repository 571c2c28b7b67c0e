"""Vision towers on a GPU at their real size: kernels against their twins, precision against transformers, and time."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import towers as bench
from culet.kernels.eager import towers as eager
from culet.kernels.eager.ops import rope
from culet.models.towers import Towers, load_towers
from culet.models.towers.packing import pack_images
from culet.models.towers.spec import VisionSpec
from tests.models.towers import tiny_towers as tiny

HAS_GPU = torch.cuda.is_available()
IS_H200 = HAS_GPU and "H200" in torch.cuda.get_device_name()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
GPU = torch.device("cuda")


def load(model: str) -> tuple[Towers, VisionSpec]:
    loaded = load_towers(
        bench.random_checkpoint(model, None), dtype=torch.bfloat16, device=GPU, kinds=bench.SEEN, progress=False
    )
    assert loaded is not None
    assert isinstance(loaded.specs.vision, VisionSpec)
    return loaded, loaded.specs.vision


@pytest.mark.parametrize(("heads", "size", "is_bounded"), [(16, 72, False), (12, 64, True)])
def test_patch_qkv(heads, size, is_bounded):
    from culet.kernels.triton.norms import patches

    projected = torch.randn(630, 3 * heads * size, device=GPU, dtype=torch.bfloat16)
    weights, bounds = torch.rand(2, size, device=GPU) + 0.5, torch.tensor([[-1.0, 2.0], [-2.0, 1.0], [0.0, 1.5]], device=GPU)
    turned = rope(torch.arange(630, device=GPU), torch.rand(size // 2, device=GPU))
    arguments = projected, weights, turned, heads, 1e-6, bounds if is_bounded else None
    for got, wanted in zip(patches.patch_qkv(*arguments), eager.patch_qkv(*arguments), strict=True):
        assert torch.allclose(got.float(), wanted.float(), atol=2e-2, rtol=1e-2)


def padded_heads(num_patches: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries, keys and values with 16 heads of 72, and the padding that `patch_qkv` writes."""
    from culet.kernels.triton.attention.hopper_patches import head_pitch

    qkv = torch.zeros(3, num_patches, 16, head_pitch(torch.empty(0, device=GPU, dtype=torch.bfloat16), 72), device=GPU)
    qkv[..., :72] = torch.randn(3, num_patches, 16, 72, device=GPU)
    qkv[:2] *= 0.5
    qkv[2, ..., 72:73] = 1
    q, k, v = qkv.to(torch.bfloat16)[..., :72].unbind(0)
    return q, k, v


def attention_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> float:
    """Return the error of the worst row, relative to its norm."""
    from culet.kernels.triton.attention.hopper_patches import patch_attention

    got = patch_attention(q, k, v, lengths)
    assert got.is_contiguous()
    want = eager.patch_attention(q.float(), k.float(), v.float(), lengths)
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max())


LENGTHS = [[2520], [630, 630, 9], [129, 64, 128, 257]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_patch_attention(lengths):
    assert attention_error(*padded_heads(sum(lengths)), lengths) < 5e-3


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shift", [-400.0, -95.0, 60.0, 95.0, 400.0])
def test_scores_beyond_float32(lengths, shift):
    """The weights of some rows are too large or too small for float32. Only these are computed again."""
    q, k, v = padded_heads(sum(lengths))
    k[..., 0] = 1
    q[..., 0] = 0
    q[::7, 3, 0] = shift  # added to every score of these rows, which changes no weight
    q[5, 9] *= 40  # scores between -300 and 300
    assert attention_error(q, k, v, lengths) < 6e-3  # the worst of up to 40,000 rows


def test_clipped_gelu_mul():
    from culet.kernels.triton.norms import patches

    gate_up = torch.randn(630, 6144, device=GPU, dtype=torch.bfloat16)
    bounds = torch.tensor([[-0.5, 1.0], [-0.7, 0.8], [-0.1, 0.6]], device=GPU)
    got, wanted = patches.clipped_gelu_mul(gate_up, bounds), eager.clipped_gelu_mul(gate_up, bounds)
    assert torch.allclose(got.float(), wanted.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_tiny_towers_on_the_gpu(shape):
    """Images of several sizes, packed, and audio, as on a CPU."""
    on_gpu = tiny.load(shape, device=GPU)
    assert on_gpu is not None
    items = [tiny.image(2, 3), tiny.image(1, 1, 1), tiny.image(2, 3, 2)]
    items += {"E4B": [tiny.clip(70), tiny.clip(9, 1)], "12B": [tiny.waveform(3)]}.get(shape, [])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for got, wanted in zip(on_gpu.encode(items), tiny.towers(shape).encode(items), strict=True):
        assert torch.allclose(got.cpu(), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("model", ["E4B", "31B"])
def test_replayed_passes(model):
    """The second image of a size is captured, and others of the same number of patches replay it, in any order."""
    loaded, spec = load(model)
    tower = loaded.vision
    side = spec.patch_size * spec.pooling
    images = [bench.make_image(tokens, side, seed) for seed in range(3) for tokens in (280, 252, 70)] * 2
    for image in images:
        (got,) = loaded.encode([image])
        packed = pack_images([image], spec.patch_size, spec.pooling, spec.num_positions, GPU)
        with torch.inference_mode():
            wanted = tower.run_pass(packed)
        assert torch.equal(got, wanted)
    assert len(tower._graphs._graphs) == 3


@pytest.mark.parametrize("model", ["E4B", "31B"])
def test_rows_are_as_exact_as_transformers(model):
    loaded, spec = load(model)
    options = argparse.Namespace(tokens=280, dtype="bfloat16")
    found = bench.measure_precision(bench.random_checkpoint(model, None), loaded, spec, options, GPU)
    assert found["mine"] <= 1.2 * found["theirs"], found


@pytest.mark.skipif(not IS_H200, reason="the limits are for an H200")
@pytest.mark.parametrize(("model", "num_images", "most_ms"), [("E4B", 1, 4), ("31B", 1, 9), ("31B", 16, 115)])
def test_time(model, num_images, most_ms):
    loaded, spec = load(model)
    options = argparse.Namespace(tokens=280, images=[num_images], repeats=20)
    (result,) = bench.measure_time(loaded, spec, options, GPU)
    assert result["ms"] <= most_ms, result
