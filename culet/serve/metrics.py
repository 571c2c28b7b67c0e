"""GET /metrics: Prometheus metrics. Metrics that vLLM also has use its names, because dashboards and gateways expect them.

The engine's counts come from its latest report, which is read at each scrape. Measurements per request are kept here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    ProcessCollector,
    Summary,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from culet import __version__, log
from culet.scheduler.stats import STEP_TOKENS, Counters
from culet.serve.api.endpoint import Endpoint
from culet.serve.engines.supervised import SupervisedEngine
from culet.serve.process.client import State
from culet.serve.process.wire import Ready, Stats
from culet.serve.service import GAP_BOUNDS, FinishedRequest, Service, TokenGaps

_SHORT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_WHOLE = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
_REASONS = {"tool_calls": "stop", "timeout": "abort"}  # vLLM's finish reasons
_LABEL = ("model_name",)
_DROPPED_LINES = "Lines of the log that were dropped, because nobody read it."
_KEY_LABELS = (*_LABEL, "key")  # only names of configured keys, so there are never more than these


class Metrics:
    """All metrics of one service."""

    def __init__(self, service: Service) -> None:
        disable_created_metrics()  # they add lines to each histogram that nobody reads
        self._model = service.names[0]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_ServerReport(service, self._model))
        ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, bounds: Sequence[float], prefix: str = "vllm") -> _Histogram:
            added = _Histogram(f"{prefix}:{name}", text, bounds, self._model)
            self.registry.register(added)
            return added

        self._first = histogram("time_to_first_token_seconds", "Time from a request to its first token.", _SHORT)
        self._queue = histogram("request_queue_time_seconds", "Time that a request spent in the queue.", _SHORT)
        self._gaps = TokenGaps()
        self.registry.register(_GapReport(self._gaps, self._model))
        self._prefill = histogram("request_prefill_time_seconds", "Time from the queue to a request's first token.", _WHOLE)
        self._decode = histogram("request_decode_time_seconds", "Time from a request's first token to its last.", _WHOLE)
        self._inference = histogram("request_inference_time_seconds", "Time from the queue to a request's last token.", _WHOLE)
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of a request, not counting the first token.",
            GAP_BOUNDS,
        )
        self._whole = histogram("e2e_request_latency_seconds", "Time from a request to its last token.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per request.", _COUNTS)
        self._generated = histogram("request_generation_tokens", "Generated tokens per request.", _COUNTS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest sample of a request.", _COUNTS
        )
        self._n = histogram("request_params_n", "Samples per request (n).", (1.0, 2.0, 5.0, 10.0, 20.0))
        self._max_tokens = histogram("request_params_max_tokens", "Maximum number of tokens per sample.", _COUNTS)
        labels = (*_LABEL, "finished_reason")
        self._ended = Counter("vllm:request_success", "Finished samples by finish reason.", labels, registry=self.registry)
        self._failed = Counter("culet:request_errors", "Failed requests.", (*_LABEL, "error"), registry=self.registry)
        reasoning = Counter("culet:reasoning_tokens", "Tokens generated in thoughts.", _LABEL, registry=self.registry)
        self._reasoning = reasoning.labels(self._model)
        self._of_key = [
            Counter(f"culet:key_{name}", text, _KEY_LABELS, registry=self.registry)
            for name, text in (
                ("requests", "Finished requests of an API key."),
                ("prompt_tokens", "Prompt tokens of an API key."),
                ("generation_tokens", "Tokens generated for an API key."),
            )
        ]
        self._first_of_key = Summary(
            "culet:key_time_to_first_token_seconds",
            "Time from a request of an API key to its first token.",
            _KEY_LABELS,
            registry=self.registry,
        )
        lag = histogram(
            "loop_lag_seconds",
            "How late a timer of the web process's event loop fired, measured ten times a second.",
            _LAG,
            prefix="culet",
        )
        service.lag_observers.append(lag.observe)
        for reason in ("stop", "length", "abort"):
            self._ended.labels(self._model, reason)
        service.observers.append(self.observe)

    def observe(self, finished: FinishedRequest) -> None:
        """Record a request that has ended."""
        model = self._model
        if finished.key:
            counts = (1, finished.num_prompt_tokens, finished.num_generated_tokens)
            for counter, count in zip(self._of_key, counts, strict=True):
                counter.labels(model, finished.key).inc(count)
            if finished.first_token_s is not None:
                self._first_of_key.labels(model, finished.key).observe(finished.first_token_s)
        if finished.error:
            self._failed.labels(model, finished.error).inc()
        for reason in finished.finish_reasons:
            self._ended.labels(model, _REASONS.get(reason, reason)).inc()
        self._prompt.observe(finished.num_prompt_tokens)
        self._generated.observe(finished.num_generated_tokens)
        self._longest.observe(finished.max_generated_tokens)
        self._n.observe(finished.n)
        self._max_tokens.observe(finished.max_tokens)
        self._reasoning.inc(finished.num_reasoning_tokens)
        if finished.first_token_s is None:
            return
        self._first.observe(finished.first_token_s)
        self._whole.observe(finished.total_s)
        self._queue.observe(finished.queue_s)
        prefill_s = max(0.0, finished.first_token_s - finished.queue_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(finished.decode_s)
        self._inference.observe(prefill_s + finished.decode_s)
        self._gaps.merge(finished.gaps)
        num_later = finished.num_generated_tokens / finished.n - 1
        if num_later > 0:
            self._per_token.observe((finished.total_s - finished.first_token_s) / num_later)


def _histogram(
    name: str, text: str, labels: Mapping[str, str], bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """Return a histogram. `counts` has one more entry than `bounds`, for the values above all of them."""
    buckets = list(zip([*(str(float(bound)) for bound in bounds), "+Inf"], accumulate(counts), strict=True))
    family = HistogramMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(list(labels.values()), buckets, total)
    return family


class _Histogram(Collector):
    """A histogram of one model. The library's own takes locks and compares each value with one bound after the other."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model: str) -> None:
        self._name, self._text, self._labels = name, text, {"model_name": model}
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def collect(self) -> Iterator[Metric]:
        yield _histogram(self._name, self._text, self._labels, self._bounds, self._counts, self._total)


class _GapReport(Collector):
    """Histograms of the time between tokens. Each request has counted its own."""

    def __init__(self, gaps: TokenGaps, model: str) -> None:
        self._gaps, self._model = gaps, model

    def collect(self) -> Iterator[Metric]:
        for name, text in (
            ("inter_token_latency_seconds", "Time between consecutive steps that add tokens to a sample."),
            ("time_per_output_token_seconds", "The same as inter_token_latency_seconds, under its older name."),
        ):
            labels = {"model_name": self._model}
            yield _histogram(f"vllm:{name}", text, labels, GAP_BOUNDS, self._gaps.counts, self._gaps.total_s)


class _Families:
    """Makes metrics with one value and the labels of one model, or of one engine."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = tuple(labels), list(labels.values())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._names, label))
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        return family

    def _gauge_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*self._names, label))
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        return family


class _ServerReport(_Families, Collector):
    """Gauges and counters of the web server, and those of its engines. With several engines, theirs have an engine label."""

    def __init__(self, service: Service, model: str) -> None:
        super().__init__({"model_name": model})
        self._service, self._model = service, model

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield self._gauge("culet:requests_in_flight", "Samples that the web server is waiting for.", service.num_samples)
        texts = service.texts
        yield self._gauge("culet:prompts_waiting", "Prompts that wait to be rendered and tokenized.", texts.num_waiting)
        yield self._counter("culet:refused_prompts", "Prompts refused because too many were waiting.", texts.num_refused)
        yield self._counter("culet:dropped_prompts", "Prompts dropped because the client had left.", texts.num_dropped)
        yield self._counter(
            "culet:template_process_restarts",
            "Template processes replaced after they were lost.",
            service.template.num_replaced,
        )
        yield from self._of_keys()
        yield self._gauge("culet:http_body_bytes", "Request bodies that are being read or prepared.", service.intake.num_bytes)
        yield self._counter_by(
            "culet:http_refusals", "Requests refused before an endpoint saw them.", "code", service.intake.refusals
        )
        yield from self._of_engines()

    def _of_engines(self) -> Iterator[Metric]:
        """Yield the metrics of all engines. Those of the same name become one family."""
        families: dict[str, Metric] = {}
        web_lines = {"web": log.num_dropped_lines()}
        own = self._counter_by("culet:log_lines_dropped", _DROPPED_LINES, "process", web_lines)
        parts = self._service.engines.parts
        for rank, part in enumerate(parts):
            labels = {"model_name": self._model, **({"engine": str(rank)} if len(parts) > 1 else {})}
            for metric in _EngineReport(labels, part, self._service).collect():
                if metric.name in families:
                    families[metric.name].samples += metric.samples
                else:
                    families[metric.name] = metric
        if own.name in families:
            own.samples += families.pop(own.name).samples
        yield own
        yield from families.values()

    def _of_keys(self) -> Iterator[Metric]:
        """Yield what each API key uses now, and how often it was refused because of a limit."""
        running = GaugeMetricFamily("culet:key_samples_in_flight", "Samples in flight, by API key.", labels=_KEY_LABELS)
        refused = CounterMetricFamily(
            "culet:key_refused", "Requests over a limit of their API key.", labels=(*_KEY_LABELS, "limit")
        )
        for name, usage in self._service.keys.usage().items():
            running.add_metric([self._model, name], usage.num_samples)
            for limit, count in usage.refused.items():
                refused.add_metric([self._model, name, limit], count)
        yield running
        yield refused


class _EngineReport(_Families):
    """Gauges and counters from the latest report of an engine. Most are missing while it loads and after it dies."""

    def __init__(self, labels: Mapping[str, str], engine: SupervisedEngine, service: Service) -> None:
        super().__init__(labels)
        self._engine, self._service = engine, service

    def collect(self) -> Iterator[Metric]:
        engine, service = self._engine, self._service
        is_up = service.is_ready and engine.is_ready
        yield self._gauge("culet:engine_up", "Whether the engine accepts requests.", float(is_up))
        yield self._counter("culet:engine_restarts", "Restarts of the engine after it died.", engine.num_restarts)
        if engine.stats is not None:
            num_lines = engine.stats.num_dropped_lines
            yield self._counter_by("culet:log_lines_dropped", _DROPPED_LINES, "process", {"engine": num_lines})
        if engine.facts is None or engine.state is State.DEAD:
            return
        yield self._info(engine.facts)
        yield self._cache_config(engine.facts)
        if engine.stats is not None:
            yield from self._of_stats(engine.stats, engine.facts)

    def _info(self, facts: Ready) -> Metric:
        family = InfoMetricFamily("culet:engine", "Version, device and data type of the engine.", labels=self._names)
        values = {"version": __version__, "device": facts.device, "dtype": facts.dtype}
        family.add_metric(self._values, {**values, "max_model_len": str(facts.max_model_len)})
        return family

    def _cache_config(self, facts: Ready) -> Metric:
        """Return vLLM's description of the cache. It has one block size, which here is the page size of the global layers.

        Gateways take the product for the tokens that the cache holds, so pages of sliding layers are not counted as blocks.
        """
        cache = self._service.config.cache
        values = {
            "block_size": str(facts.block_tokens),
            "num_gpu_blocks": str(facts.num_blocks),
            "cache_dtype": cache.kv_cache_dtype,
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
        }
        family = InfoMetricFamily("vllm:cache_config", "Settings of the KV cache.", labels=self._names)
        family.add_metric(self._values, values)
        return family

    def _of_stats(self, stats: Stats, facts: Ready) -> Iterator[Metric]:
        now, counts = stats.scheduler, stats.scheduler.counters
        used = 1 - (now.num_free_pages + now.num_resume_point_pages) / max(1, now.num_pages)
        yield self._gauge("vllm:num_requests_running", "Running sequences.", now.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting sequences.", now.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV pages in use (0 to 1), excluding pages held only by resume points.",
            used,
        )
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of all requests.", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", stats.num_generated_tokens)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.prefix_query_tokens
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", counts.prefix_hit_tokens)
        yield self._counter("vllm:num_preemptions", "Sequences that were preempted.", counts.preemptions)
        text = "Preempted sequences whose KV was saved in host memory."
        yield self._counter("culet:parked_sequences", text, counts.parked)
        yield self._counter("culet:restored_sequences", "Sequences that went on with KV from host memory.", counts.restored)
        text = "Tokens of these sequences that were not computed again."
        yield self._counter("culet:restored_tokens", text, counts.restored_tokens)
        yield self._counter("vllm:spec_decode_num_drafts", "Verify steps.", counts.verifies)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.", counts.drafted_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", counts.accepted_tokens)
        yield from self._of_drafts(counts)
        yield self._step_sizes(counts)
        yield self._counter("culet:steps", "Engine steps.", counts.steps)
        yield self._counter("culet:dropped_tokens", "Tokens drawn for sequences that had already ended.", counts.dropped_tokens)
        text = "Kernels compiled since startup. Each held up a step, and the rehearsal at startup should have covered it."
        yield self._counter("culet:kernels_compiled", text, now.kernels_compiled)
        yield self._counter("culet:encoded_items", "Images, video frames and clips of audio encoded.", counts.encoded_items)
        yield self._counter("culet:encoded_tokens", "Soft tokens of these items.", counts.encoded_tokens)
        yield self._counter("culet:feature_hits", "Media in prompts whose features were cached.", counts.feature_hits)
        yield self._gauge("culet:feature_bytes", "Size of the cached features.", now.feature_bytes)
        yield self._gauge("culet:engine_memory_bytes", "Resident memory of the engine process.", stats.memory_bytes)
        yield self._gauge("culet:kv_pages", "Pages in the KV cache, over all groups.", now.num_pages)
        yield self._gauge("culet:kv_free_pages", "Free pages in the KV cache.", now.num_free_pages)
        yield self._gauge("culet:host_pages", "Pages in host memory, for preempted sequences.", now.num_host_pages)
        yield self._gauge("culet:host_free_pages", "Free pages in host memory.", now.num_free_host_pages)
        yield self._gauge("culet:kv_resume_point_pages", "Pages held only by resume points.", now.num_resume_point_pages)
        yield self._gauge("culet:kv_resume_points", "Resume points in the prefix cache.", now.num_resume_points)
        yield self._gauge_by(
            "culet:kv_group_pages", "Pages held by running sequences, per KV group.", "group", now.num_held_pages
        )
        tokens = {group.name: now.num_held_pages.get(group.name, 0) * group.page_tokens for group in facts.groups}
        yield self._gauge_by(
            "culet:kv_group_tokens", "Tokens that fit into the pages held by running sequences, per KV group.", "group", tokens
        )
        shares = {name: count / max(1, now.num_pages) for name, count in now.num_held_pages.items()}
        yield self._gauge_by(
            "culet:kv_group_usage_perc", "Share of all pages held by running sequences, per KV group.", "group", shares
        )

    def _of_drafts(self, counts: Counters) -> Iterator[Metric]:
        """Yield accepted drafts per position, as in vLLM, and the mean acceptance length."""
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            labels=(*self._names, "position"),
        )
        drafted = CounterMetricFamily(
            "culet:drafts_per_pos", "Verified draft tokens by position.", labels=(*self._names, "position")
        )
        for position, counted in enumerate(zip(counts.drafted_at, counts.accepted_at, strict=True)):
            num_drafted, num_accepted = counted
            accepted.add_metric([*self._values, str(position)], num_accepted)
            drafted.add_metric([*self._values, str(position)], num_drafted)
        yield accepted
        yield drafted
        choice = self._service.config.draft.choice
        if choice is not None:
            family = GaugeMetricFamily(
                "culet:acceptance_length", "Mean tokens per verify step since startup.", labels=(*self._names, "drafter")
            )
            family.add_metric([*self._values, choice.method], counts.tokens_per_verify)
            yield family

    def _step_sizes(self, counts: Counters) -> Metric:
        """Return the histogram of new tokens per step, under vLLM's name."""
        labels = dict(zip(self._names, self._values, strict=True))
        name, text = "vllm:iteration_tokens_total", "New tokens of an engine step."
        return _histogram(name, text, labels, STEP_TOKENS, counts.steps_at, counts.step_tokens)


async def metrics(service: Service, request: Request) -> Response:
    """Return Prometheus metrics in text format."""
    assert service.metrics_registry is not None
    text = generate_latest(service.metrics_registry)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def attach(service: Service) -> None:
    """Create the service's metrics, if it has none."""
    if service.metrics_registry is None:
        service.metrics_registry = Metrics(service).registry


ENDPOINTS = (Endpoint("GET", "/metrics", metrics),)
