"""The attention plan: what each backend takes on each architecture, choices that are refused, and the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from culet.attention import plan as plan_module
from culet.attention.picture import draw
from culet.attention.plan import (
    ARCHS,
    BACKENDS,
    GPUS,
    NOT_BUILT,
    AttentionNeed,
    AttentionPlan,
    Gpu,
    arch_of,
    find_gpu,
    plan_attention,
)
from culet.cache.spec import plan_cache
from culet.errors import ConfigError
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS

ALL = tuple(BACKENDS)
SLIDING = AttentionNeed("sliding", (0, 1), 32, 16, 256, 1024, latent=False, width=256, kv_itemsize=2)
GLOBAL = AttentionNeed("global", (5,), 32, 4, 512, None, latent=True, width=640, kv_itemsize=2)


def plan_for(name: str, gpu: str, choice: str = "auto", **options: Any) -> AttentionPlan:
    spec = read_spec(VARIANTS[name])
    groups = plan_cache(spec.kv_specs(2, latent=options.pop("latent", True))).groups
    readers = {group.name: spec.readers(group.layers) for group in groups}
    return plan_attention(groups, spec.layers[0].num_heads, find_gpu(gpu), choice, readers=readers, **options)


def test_table_covers_the_architectures():
    assert list(ARCHS) == ["cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert list(BACKENDS) == ["triton", "flash", "reference"]
    assert {ARCHS[name].shared_bytes // 1024 for name in ("sm_86", "sm_89", "sm_120")} == {99}


# Capabilities


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("arch", [name for name in ARCHS if name != "cpu"])
@pytest.mark.parametrize("latent", [True, False])
def test_triton_takes_every_gemma_shape_on_every_gpu(name, arch, latent):
    gpu = Gpu("some", ARCHS[arch], 1 << 34)
    spec = read_spec(VARIANTS[name])
    groups = plan_cache(spec.kv_specs(2, latent=latent)).groups
    plan = plan_attention(groups, spec.layers[0].num_heads, gpu, built=("triton", "reference"))
    assert {group.backend for group in plan.groups} == {"triton"}


@pytest.mark.parametrize("arch", ARCHS)
def test_reference_takes_everything_everywhere(arch):
    for need in (SLIDING, GLOBAL, replace(GLOBAL, image_mask=True, kv_itemsize=4, head_dim=48, width=60)):
        assert BACKENDS["reference"].refuses(need, ARCHS[arch]) is None


@pytest.mark.parametrize(
    ("backend", "need", "arch", "words"),
    [
        ("triton", SLIDING, "cpu", "needs an NVIDIA GPU"),
        ("triton", replace(SLIDING, head_dim=96, width=96), "sm_90", "head dim 96 is not a power of two"),
        ("triton", replace(SLIDING, head_dim=8, width=8), "sm_90", "head dim 8"),
        (
            "triton",
            replace(SLIDING, head_dim=1024, width=1024, kv_itemsize=4),
            "sm_89",
            "192 KiB of shared memory .* sm_89 has 99 KiB",
        ),
        ("flash", GLOBAL, "sm_90", "stop at head dim 256 on sm_90, these layers have 512"),
        ("flash", replace(GLOBAL, latent=False, width=512), "sm_80", "stop at head dim 256"),
        ("flash", replace(SLIDING, latent=True, width=320), "sm_90", "latent"),
        ("flash", replace(SLIDING, image_mask=True), "sm_90", "image"),
        ("flash", replace(SLIDING, kv_itemsize=4), "sm_90", "16-bit"),
        ("flash", SLIDING, "sm_120", "do not exist for sm_120"),
        ("flash", SLIDING, "cpu", "needs an NVIDIA GPU"),
    ],
)
def test_refusals(backend, need, arch, words):
    reason = BACKENDS[backend].refuses(need, ARCHS[arch])
    assert reason is not None
    assert re.search(words, reason), reason


def test_what_they_take():
    assert BACKENDS["flash"].refuses(SLIDING, ARCHS["sm_90"]) is None
    assert BACKENDS["triton"].refuses(replace(GLOBAL, image_mask=True), ARCHS["sm_89"]) is None


# Choices


def test_first_in_order_of_preference_wins_and_every_other_has_a_reason():
    plan = plan_for("31B", "rtx4090", built=ALL)
    for group in plan.groups:
        assert group.backend == "triton"
        assert set(group.others) == {"flash", "reference"}
        assert "preference" in group.others["reference"]
    assert "preference" in plan.of("sliding").others["flash"]
    assert "256" in plan.of("global").others["flash"]
    assert plan.of("sliding").able == ("triton", "flash", "reference")


def test_what_is_not_built_is_never_taken():
    plan = plan_for("31B", "h200", built=("reference",))
    for group in plan.groups:
        assert group.backend == "reference"
        assert group.others["triton"] == NOT_BUILT
    with pytest.raises(ConfigError, match="not in this version"):
        plan_for("31B", "h200", "triton", built=("reference",))


def test_built_is_a_fact_of_the_module_file(monkeypatch: pytest.MonkeyPatch):
    assert BACKENDS["reference"].is_built()
    missing = replace(BACKENDS["flash"], path="culet.attention.not_there:Backend")
    assert not missing.is_built()
    monkeypatch.setitem(plan_module.BACKENDS, "triton", replace(BACKENDS["triton"], path="culet.attention.batch:ForwardBatch"))
    assert plan_for("31B", "rtx4090").of("global").backend == "triton"
    monkeypatch.setitem(plan_module.BACKENDS, "triton", missing)
    assert plan_for("31B", "rtx4090", built=None).of("global").backend == "reference"


def test_readers_are_part_of_the_need():
    plan = plan_for("E2B", "h200", built=ALL)
    assert len(plan.of("sliding").need.layers) == 28
    assert len(plan.of("global").need.layers) == 7
    groups = plan_cache(read_spec(VARIANTS["E2B"]).kv_specs(2)).groups
    assert len(plan_attention(groups, 8, GPUS["h200"], built=ALL).of("sliding").need.layers) == 12


def test_path_is_that_of_the_chosen_backend():
    spec = read_spec(VARIANTS["31B"])
    groups = plan_cache(spec.kv_specs(2)).groups
    plan = plan_attention(groups, 32, GPUS["rtx4090"], "global=reference", built=ALL)
    assert [plan.path(group) for group in groups] == [
        "culet.attention.triton:TritonBackend",
        "culet.attention.torch_cpu:ReferenceBackend",
    ]


def test_explicit_choice():
    plan = plan_for("E4B", "h200", "sliding=flash,global=triton", built=ALL)
    assert [group.backend for group in plan.groups] == ["flash", "triton"]
    assert plan.of("sliding").why.startswith("asked for")
    assert plan.of("sliding").others["triton"] == "could, but flash was asked for"
    plan = plan_for("E4B", "h200", " global = reference ", built=ALL)
    assert [group.backend for group in plan.groups] == ["triton", "reference"]
    plan = plan_for("31B", "h200", "reference", built=ALL)
    assert {group.backend for group in plan.groups} == {"reference"}


@pytest.mark.parametrize(
    ("name", "gpu", "choice", "words"),
    [
        ("31B", "h200", "flash", ["'flash'", "layer 5", "global", "head dim 512", "stop at head dim 256"]),
        ("E2B", "h200", "sliding=triton,global=flash", ["layer 4", "head dim 512"]),
        ("31B", "rtx5090", "sliding=flash", ["layer 0", "sliding", "head dim 256", "do not exist for sm_120"]),
        ("31B", "cpu", "global=triton", ["layer 5", "head dim 512", "NVIDIA"]),
    ],
)
def test_choice_that_cannot_serve_names_layer_head_dim_and_reason(name, gpu, choice, words):
    with pytest.raises(ConfigError) as caught:
        plan_for(name, gpu, choice, built=ALL)
    for word in words:
        assert word in caught.value.message
    assert "reference" in caught.value.hint


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("fast", "flash, reference, triton"),
        ("", "auto, flash"),
        ("sliding=fast", "auto, flash, reference, triton"),
        ("local=triton", "global, sliding"),
        ("sliding=triton,", "global, sliding"),
        ("sliding=", "auto, flash"),
    ],
)
def test_unknown_names_list_the_known_ones(choice, words):
    with pytest.raises(ConfigError) as caught:
        plan_for("31B", "h200", choice, built=ALL)
    assert words in caught.value.hint


def test_image_masks_are_asked_for_by_group():
    plan = plan_for("E4B", "h200", "auto", built=("flash", "reference"), image_groups=("sliding",))
    assert plan.of("sliding").backend == "reference"
    assert "image" in plan.of("sliding").others["flash"]


# Devices


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("h200", "sm_90"),
        ("H100", "sm_90"),
        ("RTX 4090", "sm_89"),
        ("rtx-3090", "sm_86"),
        ("a100", "sm_80"),
        ("A100-40GB", "sm_80"),
        ("b200", "sm_100"),
        ("rtx5090", "sm_120"),
        ("RTX_PRO_6000", "sm_120"),
        ("l40s", "sm_89"),
        ("cpu", "cpu"),
    ],
)
def test_gpus_by_name(name, arch):
    gpu = find_gpu(name)
    assert gpu.arch.name == arch
    assert gpu.memory_bytes > 1 << 30


def test_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'h300'") as caught:
        find_gpu("h300")
    assert "h200" in caught.value.hint
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_arch_of_capability(capability, name):
    assert arch_of(capability).name == name


def test_arch_that_is_not_in_the_table_is_left_to_the_reference():
    turing = Gpu("t4", arch_of((7, 5)), 1 << 34)
    assert (turing.arch.name, turing.arch.has_bfloat16) == ("sm_75", False)
    groups = plan_cache(read_spec(VARIANTS["E2B"]).kv_specs(2)).groups
    plan = plan_attention(groups, 8, turing, built=ALL)
    assert {group.backend for group in plan.groups} == {"reference"}
    assert "sm_75" in plan.of("global").others["triton"]


def test_detect_asks_torch(monkeypatch: pytest.MonkeyPatch):
    import torch

    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 150 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert find_gpu("auto") == Gpu("NVIDIA H200", ARCHS["sm_90"], 150 << 30)
    groups = plan_cache(read_spec(VARIANTS["E2B"]).kv_specs(2)).groups
    assert plan_attention(groups, 8, "cuda:0").gpu.name == "NVIDIA H200"
    assert plan_attention(groups, 8, "cpu").gpu.name == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_gpu("auto").name == "cpu"


# The picture


@pytest.mark.parametrize("name", VARIANTS)
def test_picture_shows_each_layer_at_each_backend(name):
    plan = plan_for(name, "h200", built=("triton", "reference"))
    spec = read_spec(VARIANTS[name])
    owners = [layer.index for layer in spec.layers if layer.owns_kv]
    root = ElementTree.fromstring(draw(plan, owners, "<model> & co"))
    space = "{http://www.w3.org/2000/svg}"
    cells = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    assert len(cells) == len(spec.layers) * len(BACKENDS)
    styles = [cell.get("class") for cell in cells]
    num_global = sum(layer.is_global for layer in spec.layers)
    assert styles.count("taken0") == len(spec.layers) - num_global
    assert styles.count("taken1") == num_global
    assert styles.count("later") == len(spec.layers) - num_global  # flash where it could
    assert styles.count("cannot") == num_global  # flash at head dim 512
    assert len(list(root.iter(f"{space}circle"))) == spec.num_kv_shared
    assert root.find(f"{space}title").text == "<model> & co"
    tips = [cell.find(f"{space}title").text for cell in cells]
    assert any("head dim 512: flash: the FlashAttention packages stop" in tip for tip in tips)
    width = float(root.get("width"))
    assert all(float(cell.get("x")) + 15 <= width for cell in cells)
    assert "http" not in draw(plan, owners, "x").replace("http://www.w3.org/2000/svg", "")
