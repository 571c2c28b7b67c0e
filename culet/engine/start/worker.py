"""Build a worker: the model, its drafter, its towers, the KV cache and the runner.

By default, the worker is a Runner in this process (`build_here`). `build_worker` builds a runner for an engine elsewhere, and
`build_rank` that of one of several ranks. They take plain values, so another process can call them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

import torch

from culet.cache.pool import HostPool, Pool
from culet.config import NCCL, build_config
from culet.drafters.base import Drafter
from culet.engine import memory
from culet.engine.drafting import ReadBytes
from culet.engine.requests import resolve_sampling
from culet.engine.resolve import Setup, given_settings, resolve
from culet.engine.start.rehearsal import Rehearsal, has_finite_logits
from culet.engine.start.times import StartTimes
from culet.errors import ConfigError
from culet.kernels.captures import Captures
from culet.kernels.compiling import CompileCount, expect_compiling, use_disk_cache
from culet.layers.weight.weights import Weights
from culet.log import chose
from culet.media.items import MediaKind
from culet.models.gemma4 import Gemma4
from culet.models.quantised.part_bytes import part_bytes
from culet.models.towers.spec import read_towers
from culet.models.towers.towers import Towers, load_towers
from culet.models.weight_files import weight_files
from culet.models.weights import explain_not_finite, load_model
from culet.parallel.group import RankGroup
from culet.parallel.progress import begin
from culet.parallel.rank import ONLY_RANK
from culet.parallel.reduce.choice import LIBRARY_ALONE, Reductions
from culet.parallel.reduce.probe import probe
from culet.parallel.reduce.symmetric import may_overlap
from culet.runner.media.step_media import ImageMask, image_mask
from culet.runner.runner import Runner
from culet.runner.worker import BUILD_LIMIT_S, ProcessWorker, Worker
from culet.structured.compiler import GrammarCompiler
from culet.text.tokenizer import Tokenizer, make_tokenizer
from culet.types import Sampling, SamplingParams
from culet.version import __version__

# Makes a worker for a KV cache of the first number of slabs, and for sequences of up to the second number of tokens.
MakeWorker = Callable[[int, int], Worker]


@dataclass(frozen=True)
class BuiltWorker:
    """A worker, and what the scheduler must know about it."""

    worker: Worker
    num_slabs: int
    max_model_len: int
    read: ReadBytes | None  # None without a drafter


def build_here(setup: Setup, compiler: GrammarCompiler, times: StartTimes, *, progress: bool) -> BuiltWorker:
    device = _prepare_device(setup)
    towers = _load_towers(setup, times, progress=progress)
    model, drafter = _load(setup, times, progress=progress)
    num_slabs = _size_cache(setup, model, drafter, towers, device, _planned_slabs(setup), times)
    max_model_len = _resolve_max_model_len(setup, num_slabs)
    runner = _make_runner(setup, model, drafter, num_slabs, max_model_len, device, times)
    runner.use_grammars(compiler)
    _use_media(setup, runner, towers)
    read = None if drafter is None else ReadBytes.of_models(model, drafter)
    return BuiltWorker(runner, num_slabs, max_model_len, read)


def build_elsewhere(setup: Setup, make_worker: MakeWorker, times: StartTimes) -> BuiltWorker:
    num_slabs = _planned_slabs(setup)
    if num_slabs is None:
        problem = "the size of the KV cache can only be measured in the process that loads the model"
        raise ConfigError(problem, hint="set --kv-cache-memory-bytes")
    max_model_len = _resolve_max_model_len(setup, num_slabs)
    with times.part("worker"):
        worker = make_worker(num_slabs, max_model_len)
    return BuiltWorker(worker, num_slabs, max_model_len, _read_elsewhere(setup))


def build_ranks(setup: Setup, times: StartTimes, limit_s: float) -> BuiltWorker:
    """Start a process for each rank. On a GPU, the ranks measure how much KV cache fits, and the smallest counts.

    A rank that sends nothing for `limit_s` counts as dead. Ranks that make no progress have at least `BUILD_LIMIT_S`.
    """
    with times.part("ranks"):
        given = {"settings": given_settings(setup.config), "num_slabs": _planned_slabs(setup)}
        reductions = asdict(_choose_reductions(setup))
        worker = ProcessWorker(
            "culet.engine.start.worker:build_rank",
            num_ranks=setup.rank.size,
            limit_s=limit_s,
            build_limit_s=max(limit_s, BUILD_LIMIT_S),
            reductions=reductions,
            **given,
        )
    max_model_len = _resolve_max_model_len(setup, worker.num_slabs)
    return BuiltWorker(worker, worker.num_slabs, max_model_len, _read_elsewhere(setup))


def _choose_reductions(setup: Setup) -> Reductions:
    """Return how the ranks add their terms. The GPUs are probed unless NCCL is requested."""
    if not setup.is_gpu:
        chose("reductions", "gloo", "the ranks are processes on a CPU")
        return LIBRARY_ALONE
    if setup.config.parallel.all_reduce == NCCL:
        chose("reductions", "NCCL", "requested")
        return LIBRARY_ALONE
    reductions = probe(setup.rank.size, has_nccl=not may_overlap())
    if not (reductions.has_nccl or reductions.has_torch_ops):
        raise ConfigError(f"ranks that share a GPU need symmetric memory: {reductions.reason}", hint="use more GPUs")
    chose("reductions", reductions.names, f"{reductions.reason} (Culet has not been measured on several GPUs yet)")
    return reductions


def _read_elsewhere(setup: Setup) -> ReadBytes | None:
    """Estimate how many bytes a rank reads. Its weights are in another process, so they cannot be counted here."""
    if setup.draft_plan is None:
        return None
    itemsize = setup.dtype.itemsize
    chosen = setup.config.model
    sizes = part_bytes(
        setup.spec, setup.checkpoint.config, itemsize, chosen.quantization, head_precision=chosen.head_quantization
    )
    return ReadBytes.of_specs(setup.spec, setup.draft_plan, itemsize, sizes).shared_by(setup.rank.size)


def build_worker(settings: Mapping[str, Any], num_slabs: int, max_model_len: int) -> Runner:
    """Build a runner that is ready for StepPlans from the names and values of settings.

    The caller schedules, so it decides how many slabs the cache has and how long a sequence may get.
    """
    setup = resolve(build_config(settings))
    device, times = _prepare_device(setup), StartTimes()
    towers = _load_towers(setup, times, progress=False)
    model, drafter = _load(setup, times, progress=False)
    runner = _make_runner(setup, model, drafter, num_slabs, max_model_len, device, times)
    runner.use_grammars(make_compiler(setup, open_tokenizer(setup)))
    _use_media(setup, runner, towers)
    return runner


def build_rank(
    settings: Mapping[str, Any],
    num_slabs: int | None,
    reductions: Mapping[str, Any],
    rank_index: int,
    meeting_file: str,
) -> Runner:
    """Build the runner of one rank. If `num_slabs` is None, measure how many fit on every rank."""
    setup = resolve(build_config(settings), rank_index)
    if not setup.is_gpu:
        torch.set_num_threads(max(1, torch.get_num_threads() // setup.rank.size))
    begin("the meeting of the ranks")
    group = RankGroup.join(setup.rank, meeting_file, setup.device)
    group.check_same(_facts_of_rank(setup, settings))
    num_columns = setup.spec.hidden_size * (1 if setup.spec.moe is None else 2)  # an MLP's row, and the experts' beside it
    group.use(Reductions(**reductions), setup.device, num_columns, setup.dtype)
    return build_in_group(setup, group, num_slabs)


def build_in_group(setup: Setup, group: RankGroup, num_slabs: int | None) -> Runner:
    """Build the runner of a rank that has joined its group. All ranks must call this together."""
    device, times = _prepare_device(setup), StartTimes()
    towers = _load_towers(setup, times, progress=False)
    model, drafter = _load(setup, times, progress=False, group=group)
    num_slabs = group.least(_size_cache(setup, model, drafter, towers, device, num_slabs, times))
    max_model_len = _resolve_max_model_len(setup, num_slabs)
    runner = _make_runner(setup, model, drafter, num_slabs, max_model_len, device, times)
    runner.use_grammars(make_compiler(setup, open_tokenizer(setup)))
    _use_media(setup, runner, towers)
    return runner


def _facts_of_rank(setup: Setup, settings: Mapping[str, Any]) -> dict[str, object]:
    """Return what must be the same on all ranks: versions, model and settings."""
    checkpoint = setup.checkpoint
    files = [] if checkpoint.random else [(path.name, path.stat().st_size) for path in weight_files(checkpoint.folder)]
    return {
        "the version of culet": __version__,
        "the version of torch": torch.__version__,
        "the model's config.json": sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest()[:12],
        "the list of the model's files": files,
        "the precision of activations": str(setup.dtype),
        **{f"--{name.replace('_', '-')}": value for name, value in settings.items()},
    }


def open_tokenizer(setup: Setup) -> Tokenizer:
    checkpoint, is_skipped = setup.checkpoint, setup.config.model.skip_tokenizer_init
    is_random = checkpoint.random is not None
    return make_tokenizer(checkpoint.tokenizer_folder, setup.spec.vocab_size, is_random=is_random, is_skipped=is_skipped)


def make_compiler(setup: Setup, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler.for_tokenizer(tokenizer, setup.spec.vocab_size, setup.checkpoint.defaults.eos_token_ids)


# The device


@dataclass(frozen=True)
class _PreparedDevice:
    free_bytes: int  # before anything is loaded; 0 on a CPU
    compile_count: CompileCount | None


def _prepare_device(setup: Setup) -> _PreparedDevice:
    if not setup.is_gpu:
        return _PreparedDevice(0, None)
    torch.cuda.set_device(setup.device)  # Triton launches on the current device
    compile_count = use_disk_cache()
    expect_compiling()
    return _PreparedDevice(torch.cuda.mem_get_info(setup.device)[0], compile_count)


# The model


def _load(setup: Setup, times: StartTimes, *, progress: bool, group: RankGroup | None = None) -> tuple[Gemma4, Drafter | None]:
    """Load the model, and then its drafter, which needs the model. A bad drafter is found before the model fills the device."""
    latent = setup.config.cache.latent
    if setup.draft_plan is not None:
        with times.part("drafter"):
            rank = ONLY_RANK if group is None else group.rank
            setup.draft_plan.check(Weights(setup.dtype, setup.device, rank, group), latent=latent)
    with times.part("weights"):
        model = load_model(
            setup.checkpoint,
            dtype=setup.dtype,
            device=setup.device,
            latent=latent,
            quantization=setup.config.model.quantization,
            head_quantization=setup.config.model.head_quantization,
            progress=progress,
            group=group,
        )
        model.scale_keys([layer for group in setup.layout.groups if group.spec.is_fp8 for layer in group.layers])
    if setup.draft_plan is None:
        return model, None
    with times.part("drafter"):
        return model, setup.draft_plan.build(model, setup.draft_backends, progress=progress)


def _load_towers(setup: Setup, times: StartTimes, *, progress: bool) -> Towers | None:
    """Load the towers. They are small, so they come first, and a bad one is found before the model fills the device."""
    kinds = tower_kinds(setup)
    if not kinds:
        return None
    with times.part("towers"):
        return load_towers(setup.checkpoint, dtype=setup.dtype, device=setup.device, kinds=kinds, progress=progress)


def tower_kinds(setup: Setup) -> frozenset[MediaKind]:
    """Return the kinds of media that are wanted and that the checkpoint has towers for."""
    return frozenset(map(MediaKind, setup.config.media.kinds)) & read_towers(setup.checkpoint.config).kinds


# The KV cache


def _size_cache(
    setup: Setup,
    model: Gemma4,
    drafter: Drafter | None,
    towers: Towers | None,
    device: _PreparedDevice,
    given: int | None,
    times: StartTimes,
) -> int:
    """Return the number of slabs in the KV cache: as given, or as many as fit. On a GPU, this also compiles kernels."""
    config, layout = setup.config, setup.layout
    if given is not None and not setup.is_gpu:
        return given
    rehearsal = Rehearsal(
        model,
        layout,
        setup.backends,
        config.schedule,
        _sampling(setup),
        max_model_len=config.model.max_model_len or setup.spec.max_position,
        has_graphs=setup.has_graphs,
        drafter=drafter,
        image_mask=ImageMask.CAUSAL if towers is None else _image_mask(setup),
        towers=towers,
    )
    with times.part("kernels"):
        rehearsal.compile_kernels()
    if given is not None:
        return given
    with times.part("memory rehearsal"):
        needs = rehearsal.measure()
    if towers is not None:
        needs = replace(needs, media=needs.media + config.media.media_cache_memory_bytes)
    utilization = config.cache.gpu_memory_utilization
    return memory.slabs_for_gpu(layout, setup.device, utilization=utilization, free_before=device.free_bytes, needs=needs)


def _sampling(setup: Setup) -> Sampling:
    """Return the model's own sampling settings."""
    return resolve_sampling(SamplingParams(seed=0), setup.checkpoint.defaults, setup.spec.vocab_size)


def _planned_slabs(setup: Setup) -> int | None:
    """Return the number of slabs as given, or the default of a CPU. On a GPU without a given size, return None."""
    num_bytes = setup.config.cache.kv_cache_memory_bytes
    if num_bytes is not None:
        return num_bytes // setup.layout.slab_bytes
    return None if setup.is_gpu else _cpu_slabs(setup)


def _cpu_slabs(setup: Setup) -> int:
    schedule = setup.config.schedule
    return memory.slabs_for_cpu(
        setup.layout,
        max_num_seqs=schedule.max_num_seqs,
        chunk=schedule.max_num_batched_tokens,
        max_position=setup.spec.max_position,
        wanted_len=setup.config.model.max_model_len,
        num_caches=setup.rank.size * setup.num_engines,
    )


def _resolve_max_model_len(setup: Setup, num_slabs: int) -> int:
    """Return the given length, or the longest that the cache can hold. Raise if the given length does not fit."""
    wanted, limit, layout = setup.config.model.max_model_len, setup.spec.max_position, setup.layout
    longest = memory.longest_sequence(layout, num_slabs, wanted or limit)
    if longest < 2 or (wanted is not None and longest < wanted):
        need = memory.least_slabs(layout, wanted or 2)
        raise ConfigError(
            f"one sequence of {wanted or 2} tokens needs {need} slabs of {layout.slab_bytes} bytes, "
            f"but the KV cache has only {num_slabs}",
            hint=f"set --kv-cache-memory-bytes to at least {need * layout.slab_bytes}"
            + (f", or --max-model-len to at most {longest}" if longest >= 2 else ""),
        )
    if wanted is None:
        fits = f"the most that fits into the KV cache, although the model allows {limit}"
        reason = "the model's limit" if longest == limit else fits
        chose("max-model-len", longest, reason)
    return longest


# The runner


def _make_runner(
    setup: Setup,
    model: Gemma4,
    drafter: Drafter | None,
    num_slabs: int,
    max_model_len: int,
    device: _PreparedDevice,
    times: StartTimes,
) -> Runner:
    if setup.checkpoint.random is None and not has_finite_logits(model, setup.layout, setup.backends, _sampling(setup)):
        raise explain_not_finite(setup.checkpoint.folder)
    with times.part("KV cache"):
        pool = Pool(setup.layout, num_slabs, setup.dtype, setup.device, has_spare=setup.is_gpu)
    num_caches = setup.rank.size, setup.num_engines
    num_host_pages = memory.num_host_pages(setup.layout, num_slabs, setup.config.cache.swap_space, *num_caches)
    max_num_seqs = setup.config.schedule.max_num_seqs
    runner = Runner(
        model,
        pool,
        setup.backends,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        drafter=drafter,
        compile_count=device.compile_count,
        host_pool=HostPool(setup.layout.slab_bytes, num_host_pages, setup.device),
    )
    if setup.has_graphs:
        with times.part("graphs"):
            _capture_graphs(setup, runner)
    return runner


def _capture_graphs(setup: Setup, runner: Runner) -> None:
    fixed = runner.use_fixed_shapes(setup.config.schedule.max_num_batched_tokens)
    num_captured = runner.capture(Captures(setup.device))
    torch.cuda.synchronize(setup.device)
    sizes = ", ".join(map(str, sorted({bucket.num_rows for bucket in fixed.steps.buckets})))
    kinds = "decode steps" if setup.draft_plan is None else "decode steps, verify steps and draft rounds"
    prompts = f", prompts of up to {fixed.prompts.sizes[-1]} tokens" if fixed.prompts.sizes else ""
    chose("CUDA graphs", num_captured, f"{kinds} of up to {sizes} sequences{prompts}")


def _use_media(setup: Setup, runner: Runner, towers: Towers | None) -> None:
    if towers is None:
        return
    runner.use_media(towers, _image_mask(setup))
    if setup.is_gpu:
        runner.prioritise_steps()


def _image_mask(setup: Setup) -> ImageMask:
    return image_mask(setup.spec.image_attention, setup.config.media.image_mask)
