"""Build everything an engine needs: the model, its drafter, the KV cache, the runner and the scheduler.

`build_parts` builds all of it for an `Engine`. By default, its worker is a Runner in this process. With `make_worker`, the
worker is elsewhere and no weights are loaded here. `build_worker` builds only the runner. It takes plain values, so another
process can call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from culet.cache.pool import Pool
from culet.config import Config, build_config
from culet.drafters.base import Drafter
from culet.engine import memory
from culet.engine.drafting import PROBE_PROMPT, ReadBytes, draft_policy, run_probe
from culet.engine.rehearsal import Rehearsal, has_finite_logits
from culet.engine.requests import ChatMarks, RequestRules, resolve_sampling
from culet.engine.resolve import Setup, resolve
from culet.engine.start_times import StartTimes
from culet.errors import ConfigError
from culet.kernels.compiling import CompileCount, expect_compiling, use_disk_cache
from culet.log import chose
from culet.media.items import MediaKind
from culet.models.gemma4 import Gemma4
from culet.models.quantised.part_bytes import part_bytes
from culet.models.towers.spec import read_towers
from culet.models.towers.towers import Towers, load_towers
from culet.models.weights import explain_not_finite, load_model
from culet.runner.captures import Captures
from culet.runner.media.step_media import ImageMask, image_mask, placeholder_ids
from culet.runner.runner import Runner
from culet.runner.worker import Worker
from culet.scheduler.draft_length import DraftPolicy
from culet.scheduler.media.features import FeatureLedger
from culet.scheduler.scheduler import Scheduler
from culet.structured.compiler import GrammarCompiler
from culet.structured.queue import GrammarQueue
from culet.text.template import ChatTemplate
from culet.text.tokenizer import Tokenizer, make_tokenizer
from culet.types import Request, Sampling, SamplingParams

# Makes a worker for a KV cache of the first number of slabs, and for sequences of up to the second number of tokens.
MakeWorker = Callable[[int, int], Worker]


@dataclass(frozen=True)
class EngineParts:
    """The parts of an Engine, and the Setup they were built from."""

    setup: Setup
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    rules: RequestRules
    scheduler: Scheduler
    worker: Worker
    grammars: GrammarQueue
    times: StartTimes
    compile_count: CompileCount | None  # kernels that this start compiled; None on a CPU

    @property
    def num_compiled(self) -> int:
        return 0 if self.compile_count is None else self.compile_count.compiled


def build_parts(config: Config, *, progress: bool = True, make_worker: MakeWorker | None = None) -> EngineParts:
    """Load the model, size the KV cache, and make the scheduler and the runner, or the worker that `make_worker` makes."""
    times = StartTimes()
    setup = resolve(config)
    tokenizer = _make_tokenizer(setup)
    # Models without per-layer embeddings were trained to start with an empty thought if they answer without thinking.
    control_tokens = () if config.model.allow_control_tokens else tokenizer.control_tokens
    chat_template = ChatTemplate.of_checkpoint(
        setup.checkpoint.folder,
        config.model.chat_template,
        empty_thought=setup.spec.ple_dim == 0,
        control_tokens=control_tokens,
    )
    compiler = _make_compiler(setup, tokenizer)
    if make_worker is None:
        built = _build_here(setup, compiler, times, progress=progress)
    else:
        built = _build_elsewhere(setup, make_worker, times)
    return EngineParts(
        setup=setup,
        tokenizer=tokenizer,
        chat_template=chat_template,
        rules=_make_rules(setup, tokenizer, built.max_model_len),
        scheduler=_make_scheduler(setup, built),
        worker=built.worker,
        grammars=GrammarQueue(compiler, tokenizer),
        times=times,
        compile_count=built.compile_count,
    )


@dataclass(frozen=True)
class _Built:
    """A worker, and what the scheduler must know about it."""

    worker: Worker
    num_slabs: int
    max_model_len: int
    read: ReadBytes | None  # None without a drafter
    compile_count: CompileCount | None


def _build_here(setup: Setup, compiler: GrammarCompiler, times: StartTimes, *, progress: bool) -> _Built:
    device = _prepare_device(setup)
    model, drafter = _load(setup, times, progress=progress)
    towers = _load_towers(setup, times, progress=progress)
    num_slabs = _size_cache(setup, model, drafter, towers, device.free_bytes, times)
    max_model_len = _resolve_max_model_len(setup, num_slabs)
    runner = _make_runner(setup, model, drafter, num_slabs, max_model_len, times)
    runner.use_grammars(compiler)
    _use_media(setup, runner, towers)
    read = None if drafter is None else ReadBytes.of_models(model, drafter)
    return _Built(runner, num_slabs, max_model_len, read, device.compile_count)


def _build_elsewhere(setup: Setup, make_worker: MakeWorker, times: StartTimes) -> _Built:
    num_slabs = _planned_slabs(setup)
    if num_slabs is None:
        problem = "the size of the KV cache can only be measured in the process that loads the model"
        raise ConfigError(problem, hint="set --kv-cache-memory-bytes")
    max_model_len = _resolve_max_model_len(setup, num_slabs)
    with times.part("worker"):
        worker = make_worker(num_slabs, max_model_len)
    plan = setup.draft_plan
    read = None
    if plan is not None:
        itemsize = setup.dtype.itemsize
        sizes = part_bytes(setup.spec, setup.checkpoint.config, itemsize, setup.config.model.quantization)
        read = ReadBytes.of_specs(setup.spec, plan, itemsize, sizes)
    return _Built(worker, num_slabs, max_model_len, read, None)


def build_worker(settings: Mapping[str, Any], num_slabs: int, max_model_len: int) -> Runner:
    """Build a runner that is ready for StepPlans from the names and values of settings.

    The caller schedules, so it decides how many slabs the cache has and how long a sequence may get.
    """
    setup = resolve(build_config(settings))
    _prepare_device(setup)
    times = StartTimes()
    model, drafter = _load(setup, times, progress=False)
    runner = _make_runner(setup, model, drafter, num_slabs, max_model_len, times)
    runner.use_grammars(_make_compiler(setup, _make_tokenizer(setup)))
    _use_media(setup, runner, _load_towers(setup, times, progress=False))
    return runner


def _make_tokenizer(setup: Setup) -> Tokenizer:
    checkpoint, is_skipped = setup.checkpoint, setup.config.model.skip_tokenizer_init
    is_random = checkpoint.random is not None
    return make_tokenizer(checkpoint.folder, setup.spec.vocab_size, is_random=is_random, is_skipped=is_skipped)


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


def _load(setup: Setup, times: StartTimes, *, progress: bool) -> tuple[Gemma4, Drafter | None]:
    latent = setup.config.cache.latent
    with times.part("weights"):
        model = load_model(
            setup.checkpoint,
            dtype=setup.dtype,
            device=setup.device,
            latent=latent,
            quantization=setup.config.model.quantization,
            progress=progress,
        )
        model.scale_keys([layer for group in setup.layout.groups if group.spec.is_fp8 for layer in group.layers])
    if setup.draft_plan is None:
        return model, None
    with times.part("drafter"):
        return model, setup.draft_plan.build(model, setup.draft_backends, progress=progress)


def _load_towers(setup: Setup, times: StartTimes, *, progress: bool) -> Towers | None:
    kinds = _tower_kinds(setup)
    if not kinds:
        return None
    with times.part("towers"):
        return load_towers(setup.checkpoint, dtype=setup.dtype, device=setup.device, kinds=kinds, progress=progress)


def _tower_kinds(setup: Setup) -> frozenset[MediaKind]:
    """Return the kinds of media that are wanted and that the checkpoint has towers for."""
    return frozenset(map(MediaKind, setup.config.media.kinds)) & read_towers(setup.checkpoint.config).kinds


# The KV cache


def _size_cache(
    setup: Setup, model: Gemma4, drafter: Drafter | None, towers: Towers | None, free_bytes: int, times: StartTimes
) -> int:
    """Return the number of slabs in the KV cache: as given, or as many as fit. On a GPU, this also compiles kernels."""
    config, layout, given = setup.config, setup.layout, _planned_slabs(setup)
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
    )
    with times.part("kernels"):
        rehearsal.compile_kernels()
    if given is not None:
        return given
    with times.part("memory rehearsal"):
        needs = rehearsal.measure()
        if towers is not None:
            activations = memory.measure_peak(setup.device, partial(towers.encode, memory.heaviest_images(towers.kinds)))
            needs = replace(needs, media=setup.config.media.media_cache_memory_bytes + activations)
    utilization = config.cache.gpu_memory_utilization
    return memory.slabs_for_gpu(layout, setup.device, utilization=utilization, free_before=free_bytes, needs=needs)


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


# The runner and the scheduler


def _make_runner(
    setup: Setup, model: Gemma4, drafter: Drafter | None, num_slabs: int, max_model_len: int, times: StartTimes
) -> Runner:
    if setup.checkpoint.random is None and not has_finite_logits(model, setup.layout, setup.backends, _sampling(setup)):
        raise explain_not_finite(setup.checkpoint.folder)
    with times.part("KV cache"):
        pool = Pool(setup.layout, num_slabs, setup.dtype, setup.device, has_spare=setup.is_gpu)
    max_num_seqs = setup.config.schedule.max_num_seqs
    runner = Runner(model, pool, setup.backends, max_num_seqs=max_num_seqs, max_model_len=max_model_len, drafter=drafter)
    if setup.has_graphs:
        with times.part("graphs"):
            _capture_graphs(setup, runner)
    return runner


def _capture_graphs(setup: Setup, runner: Runner) -> None:
    fixed = runner.use_fixed_shapes()
    num_captured = runner.capture(Captures(setup.device))
    torch.cuda.synchronize(setup.device)
    sizes = ", ".join(map(str, sorted({bucket.num_rows for bucket in fixed.steps.buckets})))
    kinds = "decode steps" if setup.draft_plan is None else "decode steps, verify steps and draft rounds"
    chose("CUDA graphs", num_captured, f"{kinds} of up to {sizes} sequences")


def _use_media(setup: Setup, runner: Runner, towers: Towers | None) -> None:
    runner.use_media(towers, placeholder_ids(setup.checkpoint.config, setup.spec.vocab_size), _image_mask(setup))


def _image_mask(setup: Setup) -> ImageMask:
    return image_mask(setup.spec.image_attention, setup.config.media.image_mask)


def _make_features(setup: Setup) -> FeatureLedger | None:
    """Return the account of the runner's features, or None if it has no towers."""
    kinds = _tower_kinds(setup)
    if not kinds:
        return None
    media = setup.config.media
    return FeatureLedger(
        kinds=kinds,
        token_bytes=setup.spec.hidden_size * setup.dtype.itemsize,
        max_bytes=media.media_cache_memory_bytes,
        max_step_tokens=media.max_encoder_tokens,
        max_item_bytes=media.max_media_bytes,
    )


def _make_compiler(setup: Setup, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler.for_tokenizer(tokenizer, setup.spec.vocab_size, setup.checkpoint.defaults.eos_token_ids)


def _make_scheduler(setup: Setup, built: _Built) -> Scheduler:
    max_drafts = 0 if setup.draft_plan is None else setup.draft_plan.max_drafts
    return Scheduler(
        setup.layout,
        built.num_slabs,
        setup.config.schedule,
        max_model_len=built.max_model_len,
        prefix_caching=setup.config.cache.enable_prefix_caching,
        max_drafts=max_drafts,
        policy=_make_draft_policy(setup, built.read),
        # Captured steps determine on the device where their rows begin.
        plans_open=setup.has_graphs and max_drafts > 0,
        features=_make_features(setup),
    )


def _make_draft_policy(setup: Setup, read: ReadBytes | None) -> DraftPolicy | None:
    choice = setup.config.draft.choice
    if setup.draft_plan is None or choice is None or read is None:
        return None
    plans_open = setup.has_graphs
    return draft_policy(setup.spec, setup.draft_plan, choice, setup.layout, setup.device, read, plans_open=plans_open)


def _make_rules(setup: Setup, tokenizer: Tokenizer, max_model_len: int) -> RequestRules:
    return RequestRules(
        vocab_size=setup.spec.vocab_size,
        defaults=setup.checkpoint.defaults,
        max_position=setup.spec.max_position,
        max_model_len=max_model_len,
        max_num_seqs=setup.config.schedule.max_num_seqs,
        marks=ChatMarks.of(tokenizer),
        has_text=tokenizer.has_text,
    )


# The end of the startup


def finish_start(parts: EngineParts, add: Callable[[Request], None], step: Callable[[], object]) -> None:
    """Probe the drafter through the engine's loop (`add`, `step`), then log how long each part of the startup took."""
    choice = parts.setup.config.draft.choice
    if choice is not None and choice.probe and choice.method != "suffix":  # the probe's text hardly repeats itself
        with parts.times.part("draft probe"):
            _probe_drafts(parts, add, step)
    count = parts.compile_count
    if count is not None:
        parts.times.note("kernels", f"{count.compiled} compiled, {count.found} found on disk")
        count.begin_serving()
    parts.times.finish()


def _probe_drafts(parts: EngineParts, add: Callable[[Request], None], step: Callable[[], object]) -> None:
    """Measure what draft rounds cost, and warn if hardly any draft is accepted, because nothing else would show it."""
    choice, rules = parts.setup.config.draft.choice, parts.rules
    assert choice is not None
    is_random = bool(parts.setup.checkpoint.random) or choice.model.startswith("random:")
    if is_random or not parts.tokenizer.has_text:
        prompt = list(range(1, 33))
    else:
        prompt = parts.tokenizer.encode(parts.chat_template.render([{"role": "user", "content": PROBE_PROMPT}]))
    prompt = prompt[: rules.max_model_len // 2]

    def add_probe(num_tokens: int) -> None:
        max_tokens = min(num_tokens, rules.max_model_len - len(prompt))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        add(rules.make_request("draft-probe", prompt, params))

    probe = run_probe(parts.scheduler, add_probe, step)
    if not is_random:
        probe.log(choice)
