"""Build everything an engine needs: the model, its drafter, the KV cache, the runner and the scheduler.

`build_parts` builds all of it for an `Engine`. With `make_worker`, the worker is elsewhere and no weights are loaded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from culet import hardware
from culet.config import Config
from culet.engine.drafting import PROBE_PROMPT, TIMED_SEQS, ReadBytes, draft_policy, run_probe
from culet.engine.requests import ChatMarks, RequestRules
from culet.engine.resolve import Setup, resolve
from culet.engine.start.times import StartTimes
from culet.engine.start.worker import (
    BuiltWorker,
    MakeWorker,
    build_elsewhere,
    build_here,
    build_ranks,
    make_compiler,
    open_tokenizer,
    tower_kinds,
)
from culet.limits import Limits
from culet.log import chose
from culet.media.reader import MediaReader
from culet.models.quantised.config import read_quantisation
from culet.models.sizes import weights_per_token
from culet.runner.worker import Worker
from culet.scheduler.draft_length import DraftPolicy
from culet.scheduler.media.features import FeatureLedger
from culet.scheduler.media.legs import MAX_LEGS
from culet.scheduler.scheduler import Scheduler
from culet.structured.queue import GrammarQueue
from culet.text.template import ChatTemplate
from culet.text.tokenizer import Tokenizer
from culet.types import Request, SamplingParams

CPU_MAX_NEW_GRAMMARS = 8
LEG_S = 0.012  # a step that is longer than others by this makes running answers wait noticeably


@dataclass(frozen=True)
class EngineParts:
    """The parts of an Engine, and the Setup they were built from."""

    setup: Setup
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    media: MediaReader
    rules: RequestRules
    scheduler: Scheduler
    worker: Worker
    grammars: GrammarQueue
    times: StartTimes


def build_parts(
    config: Config,
    *,
    progress: bool = True,
    make_worker: MakeWorker | None = None,
    rank_limit_s: float = Limits.step_s,
    num_engines: int = 1,
) -> EngineParts:
    """Load the model, size the KV cache, and make the scheduler and the runner, or the worker that `make_worker` makes."""
    times = StartTimes()
    setup = replace(resolve(config), num_engines=num_engines)
    tokenizer = open_tokenizer(setup)
    # Models without per-layer embeddings were trained to start with an empty thought if they answer without thinking.
    control_tokens = () if config.model.allow_control_tokens else tokenizer.control_tokens
    chat_template = ChatTemplate.of_checkpoint(
        setup.checkpoint.folder,
        config.model.chat_template,
        empty_thought=setup.spec.ple_dim == 0,
        control_tokens=control_tokens,
    )
    compiler = make_compiler(setup, tokenizer)
    if make_worker is not None:
        built = build_elsewhere(setup, make_worker, times)
    elif setup.rank.size > 1:
        built = build_ranks(setup, times, rank_limit_s)
    else:
        built = build_here(setup, compiler, times, progress=progress)
    return EngineParts(
        setup=setup,
        tokenizer=tokenizer,
        chat_template=chat_template,
        media=_make_media(setup),
        rules=_make_rules(setup, tokenizer, built.max_model_len),
        scheduler=_make_scheduler(setup, built),
        worker=built.worker,
        grammars=GrammarQueue(compiler, tokenizer, max_new=_max_new_grammars(setup)),
        times=times,
    )


def _max_new_grammars(setup: Setup) -> float:
    """Return how many samples with new grammars each tenant may start within `NEW_S` seconds.

    On a CPU, every row makes a step slower, and the masks of a new grammar are slow to compute. LLM has no limit, because there
    no other client waits for tokens.
    """
    return math.inf if setup.is_gpu or not setup.config.schedule.max_step_ms else CPU_MAX_NEW_GRAMMARS


def _make_media(setup: Setup) -> MediaReader:
    checkpoint = setup.checkpoint
    folder = None if checkpoint.random is not None else checkpoint.folder
    return MediaReader.of_checkpoint(checkpoint.config, folder, setup.config.media)


def _make_features(setup: Setup) -> FeatureLedger | None:
    """Return the account of the runner's features, or None if it has no towers."""
    kinds = tower_kinds(setup)
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


def _make_scheduler(setup: Setup, built: BuiltWorker) -> Scheduler:
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
        on_cpu=not setup.is_gpu,
        features=_make_features(setup),
        leg_tokens=leg_tokens(setup),
    )


def leg_tokens(setup: Setup) -> int:
    """Return the most tokens of a chunk with an image that runs in one step, or 0 if all do.

    Their products alone take `LEG_S`. With shared KV, per-layer embeddings or a drafter, later layers need more than the stream
    that earlier ones leave. Quantised weights may have no graphs for prompts, and then the host takes long for each leg.
    Several ranks and CPUs were not measured.
    """
    spec, config = setup.spec, setup.config
    is_simple = setup.draft_plan is None and not spec.ple_dim and all(layer.owns_kv for layer in spec.layers)
    is_plain = config.model.quantization == "auto" and read_quantisation(setup.checkpoint.config) is None
    has_images = spec.image_attention != "causal" and tower_kinds(setup)
    is_one_gpu = setup.is_gpu and setup.rank.size == 1
    if not (
        is_simple and is_plain and has_images and is_one_gpu and config.schedule.max_step_ms and len(spec.layers) >= MAX_LEGS
    ):
        return 0
    rates = hardware.arch_of(hardware.capability_of(setup.device)).rates
    most = max(1, int(LEG_S * rates.flops_per_s / (2 * weights_per_token(spec))))
    chose("chunks with images", f"in several steps above {most} tokens", f"whose products take {1e3 * LEG_S:g} ms")
    return most


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
    count = parts.worker.compile_count
    if count is not None:
        part = "kernels" if "kernels" in parts.times.parts else "ranks"
        parts.times.note(part, f"{count.compiled} kernels compiled, {count.found} found on disk")
    parts.worker.begin_serving()
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

    def add_probe(name: str, prompt_len: int, num_tokens: int) -> None:
        max_tokens = min(num_tokens, rules.max_model_len - len(prompt))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        add(rules.make_request(name, prompt[:prompt_len], params))

    # On a GPU, further sequences cost little until their tokens are many, which the model of sizes knows.
    is_cpu, max_num_seqs = parts.setup.device.type == "cpu", parts.setup.config.schedule.max_num_seqs
    probe = run_probe(parts.scheduler, add_probe, step, num_several=min(TIMED_SEQS, max_num_seqs) if is_cpu else 1)
    if not is_random:
        probe.log(choice)
