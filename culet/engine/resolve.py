"""Turn a Config into a Setup by making every choice that does not need loaded weights.

Each derived choice is logged with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from culet.attention.base import AttentionBackend
from culet.attention.plan import AttentionPlan, heads_of_rank, plan_attention
from culet.cache.spec import CacheLayout, plan_cache, share_among, stored_as
from culet.config import NCCL, Config, MediaConfig, ScheduleConfig, config_fields
from culet.drafters.base import DrafterPlan, cache_specs, open_drafter, plan_drafter_attention, target_groups
from culet.engine.memory import cpu_has_bfloat16
from culet.errors import ConfigError
from culet.log import chose, logger
from culet.models.checkpoint import Checkpoint, open_checkpoint
from culet.models.quantised.head import check_head
from culet.models.quantised.part_bytes import check_shares
from culet.models.spec import ModelSpec
from culet.parallel.rank import ONLY_RANK, Rank
from culet.parallel.reduce.symmetric import may_overlap
from culet.registry import load

CPU_MAX_NUM_SEQS = 32
CPU_MAX_NUM_BATCHED_TOKENS = 1024
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Setup:
    """What a Config means for one checkpoint on one device."""

    config: Config  # with the schedule resolved
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype  # used for activations
    draft_plan: DrafterPlan | None
    layout: CacheLayout
    plan: AttentionPlan
    backends: Sequence[AttentionBackend]  # the target's, in the order of its KV groups
    draft_backends: Mapping[int, AttentionBackend]  # the drafter's, by the index of the KV group they read
    has_graphs: bool  # decode steps, verify steps and draft rounds are captured as CUDA graphs
    rank: Rank = ONLY_RANK  # of this process, or the first rank in an engine whose workers are elsewhere
    num_engines: int = 1  # that share this machine's memory

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def max_in_flight(self) -> int:
        """How many steps may be launched but not yet applied. A CPU looks ahead only on request, as it gains nothing there."""
        config = self.config
        return 1 + (config.schedule.async_scheduling and (self.is_gpu or "async_scheduling" in config.given))


def given_settings(config: Config) -> dict[str, Any]:
    """Return the settings that were given, as input for `build_config`."""
    return {name: getattr(getattr(config, part), name) for name, (part, _) in config_fields().items() if name in config.given}


def resolve(config: Config, rank_index: int = 0) -> Setup:
    """Open the checkpoint and make every choice that depends only on it, the config, the device and the rank."""
    checkpoint = open_checkpoint(config.model.model, config.model.revision)
    spec = checkpoint.spec
    rank = Rank(rank_index, config.parallel.tensor_parallel_size)
    check_shares(spec, checkpoint.config, config.model.quantization, rank.size)
    check_head(spec, checkpoint.config, config.model.head_quantization, config.model.model)
    device = resolve_device(config.model.device, rank)
    _check_all_reduce(config.parallel.all_reduce, device, rank)
    dtype = resolve_dtype(config.model.dtype, device)
    _check_max_model_len(config.model.max_model_len, spec.max_position)
    choice = config.draft.choice
    draft_plan = None if choice is None else open_drafter(choice, spec)
    kv_specs = cache_specs(spec, draft_plan, dtype.itemsize, latent=config.cache.latent)
    layout = plan_cache(share_among(stored_as(kv_specs, config.cache.kv_cache_dtype), rank.size))
    plan, backends = _plan_backends(spec, layout, device, config.model.attention_backend)
    draft_backends: dict[int, AttentionBackend] = {}
    if choice is not None and draft_plan is not None:
        draft_backends = _plan_draft_backends(draft_plan, layout, device, choice.attention_backend)
    return Setup(
        config=replace(config, schedule=_resolve_schedule(config, device), media=_resolve_media(config, device)),
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        draft_plan=draft_plan,
        layout=layout,
        plan=plan,
        backends=backends,
        draft_backends=draft_backends,
        has_graphs=_can_capture(config, device, [*backends, *draft_backends.values()]),
        rank=rank,
    )


def resolve_device(name: str, rank: Rank = ONLY_RANK) -> torch.device:
    """Return the device called `name`. `auto` is the rank's GPU, or the CPU if there is no GPU. Each rank has its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        found = "the first GPU" if rank.size == 1 else f"the first {rank.size} GPUs"
        chose("device", name, "no CUDA GPU was found" if name == "cpu" else found)
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdigit())):
        raise ConfigError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank.size > 1:
        return _resolve_rank_device(name, rank, count)
    if int(index or 0) >= count:
        problem = f"device: got {name!r}, but {_describe_found(count)}"
        raise ConfigError(problem, hint="use --device cpu, or run `culet doctor`")
    return torch.device("cuda", int(index or 0))


def _resolve_rank_device(name: str, rank: Rank, num_gpus: int) -> torch.device:
    if name != "cuda":
        problem = f"device: got {name!r}, but {rank.size} ranks use the first {rank.size} GPUs"
        raise ConfigError(problem, hint="use --device cuda, and choose GPUs with CUDA_VISIBLE_DEVICES")
    if rank.size > num_gpus and not (num_gpus and may_overlap()):
        problem = f"tensor-parallel-size: got {rank.size}, but {_describe_found(num_gpus)}"
        raise ConfigError(problem, hint="use fewer ranks, or --device cpu")
    return torch.device("cuda", rank.index % num_gpus)


def _describe_found(num_gpus: int) -> str:
    """Say how many GPUs were found, and among which. An engine of several looks only at the GPUs that it was given."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"{num_gpus} CUDA GPUs were found" + ("" if named is None else f" (CUDA_VISIBLE_DEVICES={named})")


def _check_all_reduce(wanted: str, device: torch.device, rank: Rank) -> None:
    if wanted == NCCL and device.type == "cpu" and rank.size > 1:
        hint = "omit --all-reduce, because ranks on a CPU always add by gloo, or use --device cuda"
        raise ConfigError(f"all-reduce: got {wanted}, which needs GPUs, but the device is a CPU", hint=hint)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`. `auto` is bfloat16 on a GPU and float32 on a CPU.

    A CPU without hardware support for bfloat16 always uses float32.
    """
    if device.type == "cuda":
        if name == "auto":
            chose("dtype", "bfloat16", "fast on GPUs, and the precision of the published weights")
        return _DTYPES["bfloat16" if name == "auto" else name]
    if name == "bfloat16" and not cpu_has_bfloat16():
        logger.warning("dtype: float32 (bfloat16 was requested, but this CPU does not support it in hardware)")
        return torch.float32
    if name == "auto":
        chose("dtype", "float32", "the device is a CPU")
    return _DTYPES["float32" if name == "auto" else name]


def _check_max_model_len(wanted: int | None, limit: int) -> None:
    """Raise early if the length is invalid. Later it would size buffers that do not fit on the GPU."""
    if wanted is not None and wanted > limit:
        raise ConfigError(f"max-model-len: got {wanted}, but the model supports at most {limit} tokens")
    if wanted is not None and wanted < 2:
        raise ConfigError(f"max-model-len: got {wanted}, expected at least 2 (a prompt token and an output token)")


def _resolve_schedule(config: Config, device: torch.device) -> ScheduleConfig:
    """Return the given schedule, with smaller defaults on a small GPU, and on a CPU because large batches gain little there."""
    schedule = config.schedule
    if device.type != "cpu":
        num_tokens = config.tokens_per_step(torch.cuda.mem_get_info(device)[1])
        if num_tokens < schedule.max_num_batched_tokens:
            chose("max-num-batched-tokens", num_tokens, "the GPU has less than 40 GiB")
        return replace(schedule, max_num_batched_tokens=num_tokens)
    for name, value in (("max_num_seqs", CPU_MAX_NUM_SEQS), ("max_num_batched_tokens", CPU_MAX_NUM_BATCHED_TOKENS)):
        if name not in config.given and getattr(schedule, name) > value:
            changed: dict[str, Any] = {name: value}
            schedule = replace(schedule, **changed)
            chose(name.replace("_", "-"), value, "the device is a CPU")
    return schedule


def _resolve_media(config: Config, device: torch.device) -> MediaConfig:
    """Return the given settings, with a smaller cache of features on a small GPU."""
    if device.type == "cpu":
        return config.media
    num_bytes = config.media_cache_bytes(torch.cuda.mem_get_info(device)[1])
    if num_bytes < config.media.media_cache_memory_bytes and config.media.kinds:
        chose("media-cache-memory-bytes", num_bytes, "the GPU has less than 40 GiB")
    return replace(config.media, media_cache_memory_bytes=num_bytes)


def _plan_backends(
    spec: ModelSpec, layout: CacheLayout, device: torch.device, choice: str
) -> tuple[AttentionPlan, list[AttentionBackend]]:
    num_heads, groups = spec.layers[0].num_heads, target_groups(layout)
    readers = {group.name: spec.readers(group.layers) for group in groups}
    plan = plan_attention(groups, num_heads, str(device), choice, readers=readers)
    for group_plan in plan.groups:
        chose(f"attention of {group_plan.need.group} layers", group_plan.backend, group_plan.why)
    return plan, [load(plan.path(group))(group, heads_of_rank(group, num_heads)) for group in groups]


def _plan_draft_backends(
    drafter: DrafterPlan, layout: CacheLayout, device: torch.device, choice: str
) -> dict[int, AttentionBackend]:
    plan = plan_drafter_attention(drafter, layout, str(device), choice)
    for group_plan in plan.groups:
        chose(f"the drafter's attention over {group_plan.need.group} pages", group_plan.backend, group_plan.why)
    groups = [group for group in layout.groups if group.name in drafter.readers(layout)]
    return {group.index: load(plan.path(group))(group, heads_of_rank(group, drafter.num_heads)) for group in groups}


def _can_capture(config: Config, device: torch.device, backends: Sequence[AttentionBackend]) -> bool:
    """Return whether CUDA graphs can be captured. They cannot if a backend plans its launches on the host in every step."""
    if device.type != "cuda" or config.model.enforce_eager:
        return False
    planner = next((backend for backend in backends if not backend.is_capturable), None)
    if planner is not None:
        reason = f"{type(planner).__name__} plans {planner.group.name} layers on the host in every step"
        chose("CUDA graphs", "none", reason)
    return planner is None
