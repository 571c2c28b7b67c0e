"""The attention plan: what each backend supports on each architecture, choices that raise, and the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from culet import hardware
from culet.attention import plan as plan_module
from culet.attention.picture import draw
from culet.attention.plan import BACKENDS, AttentionNeed, AttentionPlan, Backend, plan_attention
from culet.cache.spec import plan_cache
from culet.errors import ConfigError
from culet.hardware import ARCHS, GPUS, Arch, Gpu, arch_of, find_gpu
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.registry import load

SLIDING = AttentionNeed("sliding", (0, 1), 32, 16, 256, 1024, latent=False, width=256, kv_itemsize=2)
GLOBAL = AttentionNeed("global", (5,), 32, 4, 512, None, latent=True, width=640, kv_itemsize=2)


def plan_for(name: str, gpu: str, choice: str = "auto", **options: Any) -> AttentionPlan:
    spec = read_spec(VARIANTS[name])
    groups = plan_cache(spec.kv_specs(2, latent=options.pop("latent", True))).groups
    readers = {group.name: spec.readers(group.layers) for group in groups}
    return plan_attention(groups, spec.layers[0].num_heads, find_gpu(gpu), choice, readers=readers, **options)


# A backend with typical limits: no large heads, no intervals, not on every GPU.
def limited_refuses(need: AttentionNeed, arch: Arch) -> str | None:
    if not arch.is_gpu:
        return "needs an NVIDIA GPU"
    if need.head_dim > 256:
        return f"stops at head dim 256, these layers have {need.head_dim}"
    return "has no interval of visible keys per token" if need.has_intervals else None


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend `limited`, preferred after triton and before torch_cpu."""
    limited = Backend("culet.attention.limited:LimitedBackend", "small heads only", limited_refuses)
    order = {"triton": BACKENDS["triton"], "limited": limited, "torch_cpu": BACKENDS["torch_cpu"]}
    monkeypatch.setattr(plan_module, "BACKENDS", order)


def test_order_of_preference():
    assert list(BACKENDS) == ["triton", "torch_cpu"]


def test_every_backend_of_the_table_exists():
    for backend in BACKENDS.values():
        assert load(backend.path).__name__ == backend.path.partition(":")[2]


# Capabilities


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("arch", [name for name in ARCHS if name != "cpu"])
@pytest.mark.parametrize("latent", [True, False])
def test_triton_supports_every_gemma_shape_on_every_gpu(name, arch, latent):
    gpu = Gpu("some", ARCHS[arch], 1 << 34)
    spec = read_spec(VARIANTS[name])
    groups = plan_cache(spec.kv_specs(2, latent=latent)).groups
    plan = plan_attention(groups, spec.layers[0].num_heads, gpu)
    assert {group.backend for group in plan.groups} == {"triton"}


@pytest.mark.parametrize("arch", ARCHS)
def test_torch_supports_everything_everywhere(arch):
    for need in (SLIDING, GLOBAL, replace(GLOBAL, has_intervals=True, kv_itemsize=4, head_dim=48, width=60)):
        assert BACKENDS["torch_cpu"].refuses(need, ARCHS[arch]) is None


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
            "192 KiB of shared memory .* sm_89 has only 99 KiB",
        ),
        ("triton", replace(SLIDING, kv_itemsize=1), "sm_86", "before sm_89 cannot convert"),
        ("torch_cpu", replace(SLIDING, kv_itemsize=1), "sm_80", "before sm_89 cannot convert"),
    ],
)
def test_refusals(backend, need, arch, words):
    reason = BACKENDS[backend].refuses(need, ARCHS[arch])
    assert reason is not None
    assert re.search(words, reason), reason


def test_what_they_support():
    assert BACKENDS["triton"].refuses(replace(GLOBAL, has_intervals=True), ARCHS["sm_89"]) is None
    assert BACKENDS["torch_cpu"].refuses(replace(GLOBAL, kv_itemsize=1), ARCHS["cpu"]) is None


# Choices


@pytest.mark.usefixtures("limited")
def test_the_preferred_backend_wins_and_every_other_has_a_reason():
    plan = plan_for("31B", "rtx4090")
    for group in plan.groups:
        assert group.backend == "triton"
        assert group.why == "preferred: Culet's Triton kernels"
        assert group.others["torch_cpu"] == "supported, but triton is preferred"
    assert plan.of("sliding").others["limited"] == "supported, but triton is preferred"
    assert "256" in plan.of("global").others["limited"]
    assert plan.of("sliding").able == ("triton", "limited", "torch_cpu")
    assert plan.of("global").able == ("triton", "torch_cpu")


def test_a_cpu_has_one_backend():
    plan = plan_for("31B", "cpu")
    assert {group.why for group in plan.groups} == {"only `torch_cpu` supports a CPU (plain torch, exact but slow)"}
    assert plan.of("global").others == {"triton": "needs an NVIDIA GPU"}


def test_readers_are_part_of_the_need():
    plan = plan_for("E2B", "h200")
    assert len(plan.of("sliding").need.layers) == 28
    assert len(plan.of("global").need.layers) == 7
    groups = plan_cache(read_spec(VARIANTS["E2B"]).kv_specs(2)).groups
    assert len(plan_attention(groups, 8, GPUS["h200"]).of("sliding").need.layers) == 12


def test_path_is_that_of_the_chosen_backend():
    spec = read_spec(VARIANTS["31B"])
    groups = plan_cache(spec.kv_specs(2)).groups
    plan = plan_attention(groups, 32, GPUS["rtx4090"], "global=torch_cpu")
    assert [plan.path(group) for group in groups] == [
        "culet.attention.triton:TritonBackend",
        "culet.attention.torch_cpu:TorchCPUBackend",
    ]


@pytest.mark.usefixtures("limited")
def test_explicit_choice():
    plan = plan_for("E4B", "h200", "sliding=limited,global=triton")
    assert [group.backend for group in plan.groups] == ["limited", "triton"]
    assert plan.of("sliding").why == "requested: small heads only"
    assert plan.of("sliding").others["triton"] == "supported, but limited was requested"
    plan = plan_for("E4B", "h200", " global = torch_cpu ")
    assert [group.backend for group in plan.groups] == ["triton", "torch_cpu"]
    plan = plan_for("31B", "h200", "torch_cpu")
    assert {group.backend for group in plan.groups} == {"torch_cpu"}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    ("name", "gpu", "choice", "words"),
    [
        ("31B", "h200", "limited", ["'limited'", "layer 5", "global", "head dim 512", "on sm_90", "stops at head dim 256"]),
        ("E2B", "h200", "sliding=triton,global=limited", ["layer 4", "head dim 512"]),
        ("31B", "cpu", "global=triton", ["layer 5", "head dim 512", "NVIDIA"]),
    ],
)
def test_a_refused_choice_names_layer_head_dim_and_reason(name, gpu, choice, words):
    with pytest.raises(ConfigError) as caught:
        plan_for(name, gpu, choice)
    for word in words:
        assert word in caught.value.message
    assert "torch_cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("fast", "auto, torch_cpu, triton"),
        ("reference", "auto, torch_cpu, triton"),
        ("", "auto, torch_cpu"),
        ("sliding=fast", "auto, torch_cpu, triton"),
        ("local=triton", "global, sliding"),
        ("sliding=triton,", "global, sliding"),
        ("sliding=", "auto, torch_cpu"),
    ],
)
def test_unknown_names_list_the_known_ones(choice, words):
    with pytest.raises(ConfigError) as caught:
        plan_for("31B", "h200", choice)
    assert words in caught.value.hint


@pytest.mark.usefixtures("limited")
def test_intervals_are_a_need_of_a_group():
    plan = plan_for("E4B", "h200", interval_groups=("sliding",))
    assert "interval" in plan.of("sliding").others["limited"]
    with pytest.raises(ConfigError, match="has no interval"):
        plan_for("E4B", "h200", "sliding=limited", interval_groups=("sliding",))
    assert plan_for("E4B", "h200", "sliding=limited").of("sliding").backend == "limited"


# Devices


def test_an_unknown_architecture_is_left_to_torch():
    turing = Gpu("t4", arch_of(75), 1 << 34)
    groups = plan_cache(read_spec(VARIANTS["E2B"]).kv_specs(2)).groups
    plan = plan_attention(groups, 8, turing)
    assert {group.backend for group in plan.groups} == {"torch_cpu"}
    assert "sm_75" in plan.of("global").others["triton"]
    assert plan.of("global").why == "only `torch_cpu` supports these layers on sm_75 (plain torch, exact but slow)"


def test_the_name_of_a_torch_device_is_looked_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "detect", lambda device: Gpu(device, ARCHS["sm_90"], 1 << 34))
    groups = plan_cache(read_spec(VARIANTS["E2B"]).kv_specs(2)).groups
    assert plan_attention(groups, 8, "cuda:0").gpu.name == "cuda:0"


# The picture


@pytest.mark.parametrize("name", VARIANTS)
def test_picture_shows_each_layer_at_each_backend(name):
    plan = plan_for(name, "h200")
    spec = read_spec(VARIANTS[name])
    owners = [layer.index for layer in spec.layers if layer.owns_kv]
    root = ElementTree.fromstring(draw(plan, owners, "<model> & co"))
    space = "{http://www.w3.org/2000/svg}"
    cells = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    assert len(cells) == len(spec.layers) * len(BACKENDS)
    styles = [cell.get("class") for cell in cells]
    num_global = sum(layer.is_global for layer in spec.layers)
    assert styles.count("chosen0") == len(spec.layers) - num_global
    assert styles.count("chosen1") == num_global
    assert styles.count("able") == len(spec.layers)
    assert len(list(root.iter(f"{space}circle"))) == spec.num_kv_shared
    assert root.find(f"{space}title").text == "<model> & co"
    tips = [cell.find(f"{space}title").text for cell in cells]
    assert any("head dim 512: torch_cpu: supported, but triton is preferred" in tip for tip in tips)
    width = float(root.get("width"))
    assert all(float(cell.get("x")) + 15 <= width for cell in cells)
    assert "http" not in draw(plan, owners, "x").replace("http://www.w3.org/2000/svg", "")


def test_picture_greys_out_what_is_not_supported():
    picture = draw(plan_for("31B", "cpu"), range(60), "31B")
    assert picture.count('<rect class="cannot" x=') == 60 + 1  # and one in the legend
    assert "triton: needs an NVIDIA GPU" in picture
