"""Who serves which KV group, and why: the capability table of attention backends by GPU architecture. No torch.

A group of like layers gets the first backend of `BACKENDS`, which is in order of preference, that can serve it on this
GPU. An explicit choice is honoured or refused with the layer, its head dim and the reason; nothing falls back in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from culet.cache.spec import KVGroup
from culet.errors import ConfigError, UnsupportedError
from culet.registry import lookup

GIB = 1 << 30
KIB = 1 << 10


@dataclass(frozen=True)
class Arch:
    """What a backend may count on, for one GPU architecture; `cpu` is one of them."""

    name: str
    capability: tuple[int, int] | None  # CUDA compute capability; None: no GPU
    shared_bytes: int = 0  # shared memory that one block can have
    has_bfloat16: bool = True  # bfloat16 products in hardware
    has_tma: bool = False  # bulk copies by descriptor
    tensor_cores: str = ""  # the widest matrix instruction: mma, wgmma or tcgen05

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("cpu", None, has_bfloat16=False),
        Arch("sm_80", (8, 0), shared_bytes=163 * KIB, tensor_cores="mma"),
        Arch("sm_86", (8, 6), shared_bytes=99 * KIB, tensor_cores="mma"),
        Arch("sm_89", (8, 9), shared_bytes=99 * KIB, tensor_cores="mma"),
        Arch("sm_90", (9, 0), shared_bytes=227 * KIB, has_tma=True, tensor_cores="wgmma"),
        Arch("sm_100", (10, 0), shared_bytes=227 * KIB, has_tma=True, tensor_cores="tcgen05"),
        Arch("sm_120", (12, 0), shared_bytes=99 * KIB, has_tma=True, tensor_cores="mma"),
    )
}


@dataclass(frozen=True)
class Gpu:
    """A device to plan for."""

    name: str
    arch: Arch
    memory_bytes: int


def _gpu(name: str, arch: str, gib: float) -> Gpu:
    return Gpu(name, ARCHS[arch], int(gib * GIB))


# Memory as CUDA reports it, which is less than the name on the box; rounded down.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", "sm_80", 79.1),
        _gpu("a100-40gb", "sm_80", 39.3),
        _gpu("a40", "sm_86", 44.3),
        _gpu("rtx3090", "sm_86", 23.6),
        _gpu("l4", "sm_89", 22.0),
        _gpu("l40s", "sm_89", 44.3),
        _gpu("rtx4090", "sm_89", 23.5),
        _gpu("h100", "sm_90", 79.1),
        _gpu("h200", "sm_90", 139.7),
        _gpu("b200", "sm_100", 178.3),
        _gpu("rtx5090", "sm_120", 31.3),
        _gpu("rtxpro6000", "sm_120", 94.9),
    )
}


def find_gpu(name: str) -> Gpu:
    """The device that `name` means: one of `GPUS`, `cpu` (this machine's), or `auto` (what is here, asked through torch)."""
    key = _plain(name)
    if key == "auto":
        return detect()
    if key == "cpu":
        return Gpu("cpu", _cpu_arch(), _cpu_memory())
    for known in GPUS.values():
        if _plain(known.name) == key:
            return known
    raise ConfigError(f"unknown GPU: {name!r}", hint=f"known: auto, cpu, {', '.join(GPUS)}")


def _plain(name: str) -> str:
    """RTX 4090, rtx-4090 and rtx4090 are one."""
    return name.lower().translate(str.maketrans("", "", " _-"))


def detect(device: str = "cuda") -> Gpu:
    """The GPU behind `device`, or the CPU where torch sees none. The only place here that imports torch, when called."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return find_gpu("cpu")
    facts = torch.cuda.get_device_properties(device)
    return Gpu(facts.name, arch_of((facts.major, facts.minor)), facts.total_memory)


def arch_of(capability: tuple[int, int]) -> Arch:
    """The architecture of a CUDA compute capability: the newest known one of the same major version that is not newer."""
    known = [arch for arch in ARCHS.values() if arch.capability is not None]
    same = [
        arch
        for arch in known
        if arch.capability is not None and arch.capability[0] == capability[0] and arch.capability <= capability
    ]
    if same:
        return max(same, key=lambda arch: arch.capability or (0, 0))
    return Arch(f"sm_{capability[0]}{capability[1]}", capability, shared_bytes=48 * KIB, has_bfloat16=capability >= (8, 0))


def _cpu_arch() -> Arch:
    """This machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return Arch("cpu", None, has_bfloat16={"avx512bw", "avx512vl", "avx512dq"} <= words or "bf16" in words)


def _cpu_memory() -> int:
    """Bytes of this machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * GIB  # a system that does not tell; only `plan --gpu cpu` there is the worse for it


@dataclass(frozen=True)
class AttentionNeed:
    """What one KV group asks of a backend."""

    group: str
    layers: tuple[int, ...]  # all that attend over the group's pages, those that share another layer's KV included
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    latent: bool  # pages hold K and V once, in overlapping columns
    width: int  # elements of a page's row: the head dim, or more for a latent
    kv_itemsize: int
    image_mask: bool = False  # prefill rows may carry an interval of visible keys per token


Capability = Callable[[AttentionNeed, Arch], str | None]


@dataclass(frozen=True)
class Backend:
    """One line of the table: where a backend is, and what it refuses."""

    path: str  # "module:Class"
    about: str
    refuses: Capability  # None where it can serve the need on that architecture, else the reason it cannot

    def is_built(self) -> bool:
        """Whether this version has it; found without importing it."""
        return find_spec(self.path.partition(":")[0]) is not None


NO_E4M3 = "GPUs before sm_89 cannot convert to an fp8 (e4m3) cache: leave --kv-cache-dtype at auto"


def _has_e4m3(need: AttentionNeed, arch: Arch) -> bool:
    """Whether the pages' precision is one that this GPU, or a CPU, converts to."""
    return need.kv_itemsize > 1 or arch.capability is None or arch.capability >= (8, 9)


def _triton_refuses(need: AttentionNeed, arch: Arch) -> str | None:
    if not arch.is_gpu:
        return "needs an NVIDIA GPU"
    if arch.name not in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
        return f"serves sm_80 to sm_120, this is {arch.name}"
    if not _has_e4m3(need, arch):
        return NO_E4M3
    if need.head_dim < 16 or need.head_dim & (need.head_dim - 1):
        return f"head dim {need.head_dim} is not a power of two of at least 16"
    # The smallest tile: 16 query rows and 16 keys with their values, or 16 latent rows.
    tile = 16 * (need.head_dim + (need.width if need.latent else 2 * need.width)) * need.kv_itemsize
    if tile > arch.shared_bytes:
        have = f"{arch.name} has {arch.shared_bytes // KIB} KiB"
        return f"head dim {need.head_dim} needs {tile // KIB} KiB of shared memory for its smallest tile, {have}"
    return None


def _flash_refuses(need: AttentionNeed, arch: Arch) -> str | None:
    if not arch.is_gpu:
        return "needs an NVIDIA GPU"
    if arch.name == "sm_120" or arch.name not in ARCHS:
        return f"FlashAttention 3 and 4 do not exist for {arch.name}"
    if need.head_dim > 256:
        return f"the FlashAttention packages stop at head dim 256 on {arch.name}, these layers have {need.head_dim}"
    if need.latent:
        return "cannot read the latent cache: it takes K and V from separate planes"
    if need.image_mask:
        return "has no interval of visible keys per token, which image tokens need"
    if need.kv_itemsize != 2:
        return "serves a 16-bit cache only"
    return None


def _reference_refuses(need: AttentionNeed, arch: Arch) -> str | None:
    return None if _has_e4m3(need, arch) else NO_E4M3  # the kernel that writes the pages cannot convert either


# In order of preference. A new backend is one file and one line here.
BACKENDS: dict[str, Backend] = {
    "triton": Backend("culet.attention.triton:TritonBackend", "ours, every Gemma 4 shape, sm_80 to sm_120", _triton_refuses),
    "flash": Backend("culet.attention.flash:FlashBackend", "the FlashAttention packages, where installed", _flash_refuses),
    "reference": Backend(
        "culet.attention.torch_cpu:ReferenceBackend", "torch on any device: exact, not fast", _reference_refuses
    ),
}
NOT_BUILT = "takes layers like these, but is not in this version of Culet"


@dataclass(frozen=True)
class GroupPlan:
    """The backend of one KV group, and why not another."""

    need: AttentionNeed
    backend: str
    why: str
    others: Mapping[str, str]  # every other backend -> why it was not taken
    able: tuple[str, ...]  # all that could serve the group, in order of preference


@dataclass(frozen=True)
class AttentionPlan:
    """One GroupPlan per KV group, in the layout's order."""

    gpu: Gpu
    groups: tuple[GroupPlan, ...]

    def of(self, group: str) -> GroupPlan:
        return next(plan for plan in self.groups if plan.need.group == group)

    def path(self, group: KVGroup) -> str:
        """ "module:Class" of the backend that serves `group`, for `registry.load`."""
        return BACKENDS[self.of(group.name).backend].path


def need_of(group: KVGroup, num_heads: int, layers: Sequence[int] = (), *, image_mask: bool = False) -> AttentionNeed:
    """What `group` asks; `layers` are all that read its pages, where they are more than those that own them."""
    spec = group.spec
    return AttentionNeed(
        group=group.name,
        layers=tuple(layers) or group.layers,
        num_heads=num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.window,
        latent=spec.latent,
        width=spec.width,
        kv_itemsize=spec.itemsize,
        image_mask=image_mask,
    )


def plan_attention(
    groups: Sequence[KVGroup],
    num_heads: int,
    gpu: Gpu | str,
    choice: str = "auto",
    *,
    readers: Mapping[str, Sequence[int]] | None = None,
    image_groups: Collection[str] = (),
    built: Collection[str] | None = None,
) -> AttentionPlan:
    """Choose a backend for each group: the first that can serve it, or the one `choice` names, or a ConfigError.

    `gpu` is a Gpu, or the name of the torch device to ask. `choice` is "auto", a backend for all groups, or
    "sliding=NAME,global=NAME". `readers` lists, by group name, all layers that attend over the group's pages;
    `image_groups` names those whose prefill meets image masks. `built` overrides which backends this version has.
    """
    gpu = gpu if isinstance(gpu, Gpu) else detect(str(gpu))
    available = {name for name, backend in BACKENDS.items() if backend.is_built()} if built is None else set(built)
    chosen = _parse_choice(choice, [group.name for group in groups])
    plans = []
    for group in groups:
        layers = (readers or {}).get(group.name, ())
        need = need_of(group, num_heads, layers, image_mask=group.name in image_groups)
        plans.append(_plan_group(need, gpu, chosen[group.name], available))
    return AttentionPlan(gpu, tuple(plans))


def _plan_group(need: AttentionNeed, gpu: Gpu, choice: str, available: Collection[str]) -> GroupPlan:
    refusals = {}
    for name, backend in BACKENDS.items():
        reason = backend.refuses(need, gpu.arch) or (None if name in available else NOT_BUILT)
        if reason is not None:
            refusals[name] = reason
    able = tuple(name for name in BACKENDS if name not in refusals)
    if choice in refusals:
        raise ConfigError(
            f"attention-backend: {choice!r} cannot serve layer {need.layers[0]} ({need.group}, head dim {need.head_dim})"
            f" on {gpu.arch.name}: {refusals[choice]}",
            hint=f"for {need.group} layers take auto or one of: {', '.join(able)}",
        )
    if not able:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise UnsupportedError(f"no attention backend serves layer {need.layers[0]} ({need.group}): {reasons}")
    taken = able[0] if choice == "auto" else choice
    why = "asked for" if choice != "auto" else "first in preference that can" if len(able) > 1 else "the only one that can"
    passed_over = (
        f"could, but {taken} was asked for" if choice != "auto" else f"could, but {taken} comes first in order of preference"
    )
    others = {name: refusals.get(name, passed_over) for name in BACKENDS if name != taken}
    return GroupPlan(need, taken, f"{why}: {BACKENDS[taken].about}", others, able)


def _parse_choice(choice: str, groups: Sequence[str]) -> dict[str, str]:
    """The backend (or auto) asked for, by group name."""
    known = {"auto": None, **dict.fromkeys(BACKENDS)}
    if "=" not in choice:
        name = choice.strip()
        lookup("attention backend", name, known)
        return dict.fromkeys(groups, name)
    chosen = dict.fromkeys(groups, "auto")
    for part in choice.split(","):
        group, _, name = (word.strip() for word in part.partition("="))
        lookup("group of layers", group, dict.fromkeys(groups))
        lookup("attention backend", name, known)
        chosen[group] = name
    return chosen
