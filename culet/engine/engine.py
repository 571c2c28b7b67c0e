"""The engine: builds all parts from a Config, and turns requests into deltas of tokens and text, step by step.

One step is schedule -> launch -> result -> apply -> deltas; on a GPU the next one is scheduled and launched before the
result of this one is awaited. The engine knows no transport and no waiting: whoever drives it calls `step` while `has_work`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from culet.attention.base import AttentionBackend
from culet.attention.plan import plan_attention
from culet.cache.pool import Pool
from culet.cache.spec import CacheLayout, plan_cache, stored_as
from culet.config import Config, DraftChoice, ScheduleConfig
from culet.drafters.base import Drafter, DrafterSpec, cache_specs, open_drafter, plan_drafter, target_groups
from culet.engine import memory
from culet.engine.drafting import PROBE_PROMPT, draft_policy, run_probe
from culet.engine.rehearsal import Trial
from culet.engine.requests import RESULT_TOKEN, TURN_TOKEN, RequestRules, resolve_sampling
from culet.engine.start_times import StartTimes
from culet.errors import ConfigError
from culet.kernels.compiling import expect_compiling, use_disk_cache
from culet.log import chose, logger
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.spec import ModelSpec
from culet.models.weights import load_model
from culet.registry import load
from culet.runner.captures import Captures
from culet.runner.runner import Pending, Runner
from culet.scheduler.draft_length import DraftPolicy
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.stats import SchedulerStats
from culet.structured.compiler import GrammarQueue
from culet.text.text import ChatTemplate, IncrementalDecoder, NumberTokenizer, StopMatcher, Tokenizer
from culet.types import FinishReason, Logprobs, ModelDefaults, Request, SamplingParams, TokenDelta

COMPILE_WAIT_S = 0.02  # at a time, so that cancels and new requests are heeded
CPU_MAX_NUM_SEQS = 32
CPU_MAX_NUM_BATCHED_TOKENS = 1024
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Delta(NamedTuple):
    """What one sample of a request brought since its last delta: tokens, and the text that is certain by now."""

    request_id: str
    sample: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str = ""
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


class _SampleText:
    """Text of one sample: tokens in, text out, until a stop string is met."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)

    def push(self, delta: TokenDelta) -> tuple[str, bool]:
        """(text that is certain now, whether a stop string was met). A stop token leaves no text."""
        if delta.finish_reason is None:
            return self._matcher.push(self._decoder.push(delta.token_ids))
        token_ids = delta.token_ids[:-1] if delta.stop_token_id is not None else delta.token_ids
        certain, is_hit = self._matcher.push(self._decoder.push(token_ids) + self._decoder.flush())
        return (certain, True) if is_hit else (certain + self._matcher.flush(), False)


class Engine:
    """A loaded model that answers requests. Not thread-safe: one caller drives it."""

    def __init__(self, config: Config, *, progress: bool = True) -> None:
        times = StartTimes()
        checkpoint = open_checkpoint(config.model.model, config.model.revision)
        self.spec: ModelSpec = checkpoint.spec
        self.defaults: ModelDefaults = checkpoint.defaults
        self.tokenizer = NumberTokenizer(self.spec.vocab_size) if checkpoint.random else Tokenizer(checkpoint.folder)
        # The models without per-layer embeddings were trained to begin an answer without thinking with an empty thought.
        self.chat_template = ChatTemplate.of_checkpoint(checkpoint.folder, empty_thought=self.spec.ple_dim == 0)
        self.device = resolve_device(config.model.device)
        self.dtype = resolve_dtype(config.model.dtype, self.device)
        self.config = replace(config, schedule=_resolve_schedule(config, self.device))
        schedule = self.config.schedule

        self._check_max_model_len()
        choice = config.draft.choice
        self.draft_spec: DrafterSpec | None = None if choice is None else open_drafter(choice, self.spec)
        specs = cache_specs(self.spec, self.draft_spec, self.dtype.itemsize, latent=config.cache.latent)
        layout = plan_cache(stored_as(specs, config.cache.kv_cache_dtype))
        backends = self._plan_backends(layout)
        draft_backends = self._plan_draft_backends(layout)
        self._has_graphs = _captures(config, self.device, [*backends, *draft_backends.values()])
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(self.device)  # Triton launches on the current device
        compiles = use_disk_cache() if is_gpu else None
        if is_gpu:
            expect_compiling()
        free_before = torch.cuda.mem_get_info(self.device)[0] if is_gpu else 0
        with times.part("weights"):
            model = load_model(checkpoint, dtype=self.dtype, device=self.device, latent=config.cache.latent, progress=progress)
            model.scale_keys([layer for group in layout.groups if group.spec.is_fp8 for layer in group.layers])
        drafter = None
        if self.draft_spec is not None:
            with times.part("drafter"):
                drafter = self.draft_spec.build(model, draft_backends, progress=progress)
        num_slabs = self._size_cache(model, layout, backends, drafter, free_before, times)
        self.max_model_len = self._resolve_max_model_len(layout, num_slabs)
        with times.part("KV cache"):
            pool = Pool(layout, num_slabs, self.dtype, self.device, has_spare=is_gpu)
        self._scheduler = Scheduler(
            layout,
            num_slabs,
            schedule,
            max_model_len=self.max_model_len,
            prefix_caching=config.cache.enable_prefix_caching,
            max_drafts=0 if drafter is None else drafter.max_drafts,
            policy=self._draft_policy(layout),
            # Captured steps work out by themselves where their rows begin.
            plans_open=self._has_graphs and drafter is not None,
        )
        limits = {"max_num_seqs": schedule.max_num_seqs, "max_model_len": self.max_model_len}
        self._runner = Runner(model, pool, backends, **limits, drafter=drafter)
        if self._has_graphs:
            self._capture_graphs(times)
        self._grammars = GrammarQueue(self.tokenizer, self.spec.vocab_size, self.defaults)
        self._texts: dict[str, dict[int, _SampleText]] = {}  # by request and sample, while they run
        self._in_flight: deque[Pending] = deque()  # steps that were launched and not yet applied, oldest first
        self._max_in_flight = 1 + _looks_ahead(config, self.device)
        if choice is not None and choice.probe:
            with times.part("draft probe"):
                self._probe_drafts(choice, is_random=bool(checkpoint.random) or choice.model.startswith("random:"))
        if compiles is not None:
            times.note("kernels", f"{compiles.compiled} compiled, {compiles.found} found on disk")
            compiles.begin_serving()
        self.kernels_compiled = 0 if compiles is None else compiles.compiled
        self.start_times = times
        times.finish()

    # Building

    def _plan_backends(self, layout: CacheLayout) -> list[AttentionBackend]:
        num_heads, groups = self.spec.layers[0].num_heads, target_groups(layout)
        readers = {group.name: self.spec.readers(group.layers) for group in groups}
        choice = self.config.model.attention_backend
        self.plan = plan = plan_attention(groups, num_heads, str(self.device), choice, readers=readers)
        for taken in plan.groups:
            chose(f"attention of {taken.need.group} layers", taken.backend, taken.why)
        return [load(plan.path(group))(group, num_heads) for group in groups]

    def _plan_draft_backends(self, layout: CacheLayout) -> dict[int, AttentionBackend]:
        """The drafter's own backends, by the KV group that they read."""
        drafter, choice = self.draft_spec, self.config.draft.choice
        if drafter is None or choice is None:
            return {}
        plan = plan_drafter(drafter, layout, str(self.device), choice.attention_backend)
        for taken in plan.groups:
            chose(f"the drafter's attention over {taken.need.group} pages", taken.backend, taken.why)
        groups = [group for group in layout.groups if group.name in drafter.readers(layout)]
        return {group.index: load(plan.path(group))(group, drafter.num_heads) for group in groups}

    def _draft_policy(self, layout: CacheLayout) -> DraftPolicy | None:
        drafter, choice = self.draft_spec, self.config.draft.choice
        if drafter is None or choice is None:
            return None
        size, plans_open = self.dtype.itemsize, self._has_graphs
        return draft_policy(self.spec, drafter, choice, layout, self.device, size, plans_open=plans_open)

    def _probe_drafts(self, choice: DraftChoice, *, is_random: bool) -> None:
        """See by a short run whether drafts are accepted, and warn if not: nothing else would show it; and what rounds take."""
        if is_random:
            prompt = list(range(1, 33))
        else:
            prompt = self.tokenizer.encode(self.chat_template.render([{"role": "user", "content": PROBE_PROMPT}]))
        prompt = prompt[: self.max_model_len // 2]

        def add(num_tokens: int) -> None:
            count = min(num_tokens, self.max_model_len - len(prompt))
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            self.add(self.rules.make_request("draft-probe", prompt, params))

        probe = run_probe(self._scheduler, add, self.step)
        if not is_random:
            probe.tell(choice)

    def _size_cache(
        self,
        model: Gemma4,
        layout: CacheLayout,
        backends: Sequence[AttentionBackend],
        drafter: Drafter | None,
        free_before: int,
        times: StartTimes,
    ) -> int:
        """Slabs of the arena: as asked for, or what the device leaves."""
        config, schedule = self.config.cache, self.config.schedule
        asked = None if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes // layout.slab_bytes
        if self.device.type == "cpu" and asked is not None:
            return asked
        if self.device.type == "cpu":
            return memory.slabs_for_cpu(
                layout,
                max_num_seqs=schedule.max_num_seqs,
                chunk=schedule.max_num_batched_tokens,
                max_position=self.spec.max_position,
                asked_len=self.config.model.max_model_len,
            )
        trial = Trial(
            model,
            layout,
            backends,
            schedule,
            resolve_sampling(SamplingParams(seed=0), self.defaults, self.spec.vocab_size),
            max_model_len=self.config.model.max_model_len or self.spec.max_position,
            has_graphs=self._has_graphs,
            drafter=drafter,
        )
        with times.part("kernels"):
            trial.compile_kernels()
        if asked is not None:
            return asked
        with times.part("memory trial"):
            needs = trial.measure()
        return memory.slabs_for_gpu(
            layout, self.device, utilization=config.gpu_memory_utilization, free_before=free_before, needs=needs
        )

    def _capture_graphs(self, times: StartTimes) -> None:
        with times.part("graphs"):
            fixed = self._runner.use_fixed_shapes()
            num_captured = self._runner.capture(Captures(self.device))
            torch.cuda.synchronize(self.device)
        sizes = ", ".join(map(str, sorted({bucket.num_rows for bucket in fixed.steps.buckets})))
        kinds = "decode steps" if self.draft_spec is None else "decode and verify steps and drafting rounds"
        chose("CUDA graphs", num_captured, f"{kinds} of up to {sizes} sequences")

    def _check_max_model_len(self) -> None:
        """Before anything is sized by it: buffers of a trial would be refused by the GPU instead."""
        wanted, limit = self.config.model.max_model_len, self.spec.max_position
        if wanted is not None and wanted > limit:
            raise ConfigError(f"max-model-len: got {wanted}, the model's positions end at {limit}", hint=f"at most {limit}")
        if wanted is not None and wanted < 2:
            raise ConfigError(f"max-model-len: got {wanted}, a prompt and its output have at least 2 tokens")

    def _resolve_max_model_len(self, layout: CacheLayout, num_slabs: int) -> int:
        """As asked for, if the cache can hold it; else the most that it can."""
        wanted, limit = self.config.model.max_model_len, self.spec.max_position
        fits = memory.longest_sequence(layout, num_slabs, wanted or limit)
        if fits < 2 or (wanted is not None and fits < wanted):
            need = memory.least_slabs(layout, wanted or 2)
            raise ConfigError(
                f"one sequence of {wanted or 2} tokens needs {need} slabs of {layout.slab_bytes} bytes, "
                f"the KV cache has {num_slabs}",
                hint=f"give --kv-cache-memory-bytes at least {need * layout.slab_bytes}"
                + (f", or --max-model-len at most {fits}" if fits >= 2 else ""),
            )
        if wanted is None:
            reason = "the model's own limit" if fits == limit else f"what the KV cache holds; the model allows {limit}"
            chose("max-model-len", fits, reason)
        return fits

    # Requests

    @property
    def layout(self) -> CacheLayout:
        """How the KV cache is cut into pages."""
        return self._scheduler.layout

    @property
    def rules(self) -> RequestRules:
        """What requests are checked against and completed with."""
        return RequestRules(
            vocab_size=self.spec.vocab_size,
            defaults=self.defaults,
            max_position=self.spec.max_position,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.schedule.max_num_seqs,
            turn_id=self.tokenizer.token_id(TURN_TOKEN),
            result_id=self.tokenizer.token_id(RESULT_TOKEN),
        )

    def add(self, request: Request, stop: Sequence[str] = ()) -> None:
        """Queue a request for `step`; a sample ends before the first of the `stop` strings that it writes."""
        self.add_silent(request)
        self._texts[request.request_id] = {sample: _SampleText(self.tokenizer, stop) for sample in range(request.n)}

    def add_silent(self, request: Request) -> None:
        """Queue a request for `advance`: its caller makes text of the tokens.

        One with a grammar starts when that is compiled. See that it can be (`check_grammar`) before.
        """
        if request.grammar is None:
            self._scheduler.add(request)
            return
        self._runner.use_grammars(self._grammars.grammars)
        self._scheduler.add(request, held=True)
        if self._grammars.submit(request):
            self._scheduler.release(request.request_id)

    def check_grammar(self, request: Request) -> None:
        """Refuse a request whose grammar cannot be compiled within the limits; waits for the answer."""
        if request.grammar is not None:
            self._grammars.check(request.grammar)

    def prepare_grammars(self) -> None:
        """Be ready for grammars: the first one would stop the engine for some 3 s, to index the vocabulary."""
        self._grammars.grammars.prepare()

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End a request, or one sample of it. Unknown ids are fine: it may have ended by itself.

        Of a whole request that is ended so, `step` tells nothing more; `advance` tells that it ended, and why.
        """
        if sample is None:
            self._texts.pop(request_id, None)
        self._scheduler.cancel(request_id, sample, reason)

    # The loop

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> SchedulerStats:
        """Counts of the scheduler, since the start."""
        seconds = self._runner.device_seconds()
        return replace(self._scheduler.stats(), verify_seconds=seconds["verify"], draft_seconds=seconds["draft"])

    def step(self) -> list[Delta]:
        """`advance`, with the text of what it brought; for requests that came by `add`."""
        spoken = (self._speak(delta) for delta in self.advance())
        return [delta for delta in spoken if delta is not None]

    def advance(self) -> list[TokenDelta]:
        """Run one step and return what it brought; requests that ended for other reasons are in there too.

        With look-ahead the next step is launched before this one's result is awaited, so the device has always work.
        """
        for request_id, error in self._grammars.done():
            if error:
                self._scheduler.cancel(request_id, reason=FinishReason.ERROR, error=error)
            self._scheduler.release(request_id)
        try:
            while len(self._in_flight) < self._max_in_flight and (plan := self._scheduler.schedule()) is not None:
                self._in_flight.append(self._runner.launch(plan))
            result = self._in_flight.popleft().result() if self._in_flight else None
        except BaseException as error:
            # What pages hold is unknown now: every request ends, and the engine is ready for new ones.
            self._in_flight.clear()
            self._scheduler.fail(f"{type(error).__name__}: {error}")
            self._scheduler.deltas()
            self._texts.clear()
            self._grammars.forget()
            raise
        if result is not None:
            self._scheduler.apply(result)
        else:
            self._grammars.wait(COMPILE_WAIT_S)  # nothing else is to be done
        return self._scheduler.deltas()

    def _speak(self, delta: TokenDelta) -> Delta | None:
        """The delta with its text; None for samples that were ended before."""
        texts = self._texts.get(delta.request_id)
        if texts is None or delta.sample not in texts:
            return None
        text, is_hit = texts[delta.sample].push(delta)
        finish_reason = delta.finish_reason
        if is_hit:
            if finish_reason is None:
                self._scheduler.cancel(delta.request_id, delta.sample, FinishReason.STOP)
            finish_reason = FinishReason.STOP
        if finish_reason is not None:
            del texts[delta.sample]
            if not texts:
                del self._texts[delta.request_id]
        # By position: it is made for every token.
        return Delta(
            delta.request_id,
            delta.sample,
            text,
            delta.token_ids,
            delta.logprobs,
            delta.prompt_logprobs,
            finish_reason,
            delta.num_cached_tokens,
            delta.error,
            delta.num_accepted_drafts,
            delta.num_rejected_drafts,
        )


def resolve_device(name: str) -> torch.device:
    """The device that `name` asks for; auto is the first GPU, or the CPU where there is none."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
        chose("device", name, "a GPU is there" if name != "cpu" else "no CUDA GPU was found")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdigit())):
        raise ConfigError(f"device: got {name!r}", hint="expected auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(
            f"device: got {name!r}, but {count} CUDA GPUs were found", hint="use --device cpu, or see `culet doctor`"
        )
    return torch.device("cuda", int(index or 0))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs; on a CPU float32, unless bfloat16 is asked for and the CPU has units for it."""
    if device.type == "cuda":
        if name == "auto":
            chose("dtype", "bfloat16", "the GPU's fast precision, and that of the published weights")
        return _DTYPES["bfloat16" if name == "auto" else name]
    if name == "bfloat16" and not memory.cpu_has_bfloat16():
        logger.warning("dtype: float32 (bfloat16 was asked for, but this CPU has no units for it and would be far slower)")
        return torch.float32
    if name == "auto":
        chose("dtype", "float32", "the device is a CPU")
    return _DTYPES["float32" if name == "auto" else name]


def _captures(config: Config, device: torch.device, backends: Sequence[AttentionBackend]) -> bool:
    """Whether steps and drafting rounds are captured as CUDA graphs: where every backend's launches can be replayed."""
    if device.type != "cuda" or config.model.enforce_eager:
        return False
    planner = next((backend for backend in backends if not backend.is_capturable), None)
    if planner is not None:
        reason = f"{type(planner).__name__} plans {planner.group.name} layers anew on the host in every step"
        chose("CUDA graphs", "none", reason)
    return planner is None


def _looks_ahead(config: Config, device: torch.device) -> bool:
    """Whether a step is launched before the last one's result is there; a CPU has nothing to gain by it."""
    return config.schedule.async_scheduling and (device.type != "cpu" or "async_scheduling" in config.given)


def _resolve_schedule(config: Config, device: torch.device) -> ScheduleConfig:
    """The schedule as given; on a CPU smaller defaults, since steps there gain little from more tokens."""
    schedule = config.schedule
    if device.type != "cpu":
        return schedule
    for name, value in (("max_num_seqs", CPU_MAX_NUM_SEQS), ("max_num_batched_tokens", CPU_MAX_NUM_BATCHED_TOKENS)):
        if name not in config.given and getattr(schedule, name) > value:
            changed: dict[str, Any] = {name: value}
            schedule = replace(schedule, **changed)
            chose(name.replace("_", "-"), value, "the device is a CPU")
    return schedule
