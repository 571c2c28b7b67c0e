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


@pytest.mark.parametrize("lengths", [[2520], [630, 630, 9], [129, 64, 128, 257]], ids=str)
def test_patch_attention(lengths):
    from culet.kernels.triton.attention import hopper_patches

    pitch = hopper_patches.head_pitch(torch.empty(0, device=GPU, dtype=torch.bfloat16), 72)
    qkv = torch.zeros(3, sum(lengths), 16, pitch, device=GPU, dtype=torch.bfloat16)
    qkv[..., :72] = torch.randn(3, sum(lengths), 16, 72, device=GPU)
    qkv[:2] *= 0.5
    q, k, v = qkv[..., :72].unbind(0)
    got = hopper_patches.patch_attention(q, k, v, lengths)
    want = eager.patch_attention(q.float(), k.float(), v.float(), lengths)
    error = (got.float() - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(error.max()) < 5e-3
    assert got.is_contiguous()


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
