"""Choose an attention backend for each KV group, and say why. Capabilities depend on the GPU architecture. No torch.

Each KV group gets the first backend in `BACKENDS` (in order of preference) that supports it on this GPU. If the user names a
backend that does not support it, planning raises an error with the layer, its head dim and the reason. There is no silent
fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from culet import hardware
from culet.cache.spec import KVGroup
from culet.errors import ConfigError, UnsupportedError
from culet.hardware import KIB, Arch, Gpu
from culet.registry import lookup


@dataclass(frozen=True)
class AttentionNeed:
    """What one KV group needs from a backend."""

    group: str
    layers: tuple[int, ...]  # all layers that read the group's pages, including those that share another layer's KV
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    latent: bool  # pages hold K and V once, in overlapping columns
    width: int  # elements in a row of a page, which is the head dim, or more for a latent
    kv_itemsize: int
    has_intervals: bool = False  # rows may have an interval of visible keys per token, as for images or blocks of drafts


Capability = Callable[[AttentionNeed, Arch], str | None]


@dataclass(frozen=True)
class Backend:
    """One entry of `BACKENDS`."""

    path: str  # "module:Class"
    about: str
    refuses: Capability  # returns why it cannot serve a need on an architecture, or None if it can


NO_E4M3 = f"GPUs before sm_{hardware.ADA} cannot convert to an fp8 (e4m3) cache: use --kv-cache-dtype auto"


def _lacks_e4m3(need: AttentionNeed, arch: Arch) -> bool:
    return need.kv_itemsize == 1 and not arch.has_e4m3


def _triton_refuses(need: AttentionNeed, arch: Arch) -> str | None:
    if not arch.is_gpu:
        return "needs an NVIDIA GPU"
    if arch.capability not in hardware.CAPABILITIES:
        return f"supports sm_{hardware.CAPABILITIES[0]} to sm_{hardware.CAPABILITIES[-1]}, but this GPU is {arch.name}"
    if _lacks_e4m3(need, arch):
        return NO_E4M3
    if need.head_dim < 16 or need.head_dim & (need.head_dim - 1):
        return f"head dim {need.head_dim} is not a power of two of at least 16"
    # The smallest tile has 16 query rows, and 16 keys with their values or 16 latent rows.
    tile = 16 * (need.head_dim + (need.width if need.latent else 2 * need.width)) * need.kv_itemsize
    if tile > arch.shared_bytes:
        have = f"but {arch.name} has only {arch.shared_bytes // KIB} KiB"
        return f"head dim {need.head_dim} needs {tile // KIB} KiB of shared memory for its smallest tile, {have}"
    return None


def _torch_cpu_refuses(need: AttentionNeed, arch: Arch) -> str | None:
    return NO_E4M3 if _lacks_e4m3(need, arch) else None  # the kernel that writes the pages cannot convert either


# In order of preference. To add a backend, write its file and add an entry here.
BACKENDS: dict[str, Backend] = {
    "triton": Backend("culet.attention.triton:TritonBackend", "Culet's Triton kernels", _triton_refuses),
    "torch_cpu": Backend("culet.attention.torch_cpu:TorchCPUBackend", "plain torch, exact but slow", _torch_cpu_refuses),
}


@dataclass(frozen=True)
class GroupPlan:
    """The backend of one KV group, and why it was chosen."""

    need: AttentionNeed
    backend: str
    why: str
    others: Mapping[str, str]  # every other backend -> why it was not chosen
    able: tuple[str, ...]  # all backends that support the group, in order of preference


@dataclass(frozen=True)
class AttentionPlan:
    """One GroupPlan per KV group, in the layout's order."""

    gpu: Gpu
    groups: tuple[GroupPlan, ...]

    def of(self, group: str) -> GroupPlan:
        return next(plan for plan in self.groups if plan.need.group == group)

    def path(self, group: KVGroup) -> str:
        """Return the "module:Class" path of the backend that serves `group`, for `registry.load`."""
        return BACKENDS[self.of(group.name).backend].path


def need_of(group: KVGroup, num_heads: int, layers: Sequence[int] = (), *, has_intervals: bool = False) -> AttentionNeed:
    """Return what `group` needs. `layers` are all layers that read its pages (default: the layers that own them)."""
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
        has_intervals=has_intervals,
    )


def heads_of_rank(group: KVGroup, num_heads: int) -> int:
    """Return how many of a layer's query heads one rank computes over the pages of `group`."""
    return num_heads // group.spec.head_shares


def plan_attention(
    groups: Sequence[KVGroup],
    num_heads: int,
    gpu: Gpu | str,
    choice: str = "auto",
    *,
    readers: Mapping[str, Sequence[int]] | None = None,
    interval_groups: Collection[str] = (),
) -> AttentionPlan:
    """Choose a backend for each group, either the one that `choice` names or the first that supports the group.

    `num_heads` are the query heads of a layer, of all ranks. `gpu` is a Gpu or the name of a torch device. `choice` is "auto",
    a backend for all groups, or "sliding=NAME,global=NAME". `readers` maps each group's name to all layers that read its
    pages. `interval_groups` names the groups whose rows may have an interval of visible keys per token.
    """
    gpu = gpu if isinstance(gpu, Gpu) else hardware.detect(str(gpu))
    chosen = _parse_choice(choice, [group.name for group in groups])
    plans = []
    for group in groups:
        layers = (readers or {}).get(group.name, ())
        need = need_of(group, heads_of_rank(group, num_heads), layers, has_intervals=group.name in interval_groups)
        plans.append(_plan_group(need, gpu, chosen[group.name]))
    return AttentionPlan(gpu, tuple(plans))


def _plan_group(need: AttentionNeed, gpu: Gpu, choice: str) -> GroupPlan:
    reasons = {name: backend.refuses(need, gpu.arch) for name, backend in BACKENDS.items()}
    refusals = {name: reason for name, reason in reasons.items() if reason is not None}
    able = tuple(name for name in BACKENDS if name not in refusals)
    if choice in refusals:
        raise ConfigError(
            f"attention-backend: {choice!r} does not support layer {need.layers[0]} ({need.group}, head dim {need.head_dim})"
            f" on {gpu.arch.name}: {refusals[choice]}",
            hint=f"for {need.group} layers, use auto or one of: {', '.join(able)}",
        )
    if not able:
        listed = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise UnsupportedError(f"no attention backend supports layer {need.layers[0]} ({need.group}): {listed}")
    name = able[0] if choice == "auto" else choice
    others = {other: refusals.get(other, f"supported, but {_preference(name, choice)}") for other in BACKENDS if other != name}
    return GroupPlan(need, name, _why(name, choice, able, gpu.arch), others, able)


def _why(name: str, choice: str, able: Sequence[str], arch: Arch) -> str:
    about = BACKENDS[name].about
    if choice != "auto":
        return f"requested: {about}"
    if len(able) > 1:
        return f"preferred: {about}"
    return f"only `{name}` supports {f'these layers on {arch.name}' if arch.is_gpu else 'a CPU'} ({about})"


def _preference(name: str, choice: str) -> str:
    return f"{name} is preferred" if choice == "auto" else f"{name} was requested"


def _parse_choice(choice: str, groups: Sequence[str]) -> dict[str, str]:
    """Return the requested backend, or "auto", by group name."""
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
