"""Trace requests with OpenTelemetry. Every request becomes a span with its token counts and times.

Tracing is on if OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) is set and the packages of
`pip install 'culet[traces]'` are installed. OpenTelemetry's other environment variables configure the export. If tracing is
off, no package is loaded.
"""

from __future__ import annotations

import time
from typing import Any

from culet import env
from culet.log import chose, logger
from culet.serve.service import FinishedRequest, Service

_NANO = 1_000_000_000


class Tracing:
    """Creates a span for each finished request."""

    def __init__(self, service: Service, tracer: Any) -> None:
        self._model, self._tracer = service.names[0], tracer
        service.observers.append(self.observe)

    def observe(self, finished: FinishedRequest) -> None:
        """Create the span of a request that has ended. It starts when the request was submitted."""
        end = time.time_ns()
        begin = end - int(finished.total_s * _NANO)
        attributes: dict[str, Any] = {
            "gen_ai.system": "culet",
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": finished.request_id,
            "gen_ai.request.n": finished.n,
            "gen_ai.request.max_tokens": finished.max_tokens,
            "gen_ai.response.finish_reasons": list(finished.finish_reasons),
            "gen_ai.usage.input_tokens": finished.num_prompt_tokens,
            "gen_ai.usage.output_tokens": finished.num_generated_tokens,
            "gen_ai.usage.cached_tokens": finished.num_cached_tokens,
            "gen_ai.usage.reasoning_tokens": finished.num_reasoning_tokens,
            "gen_ai.latency.time_in_queue": finished.queue_s,
            "gen_ai.latency.e2e": finished.total_s,
        }
        if finished.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = finished.first_token_s
        span = self._tracer.start_span(f"POST {finished.endpoint}", start_time=begin, attributes=attributes)
        if finished.error:
            span.set_attribute("error.type", finished.error)
        span.end(end_time=end)


def attach(service: Service) -> Tracing | None:
    """Start tracing if the environment asks for it and the packages are installed. Return None otherwise."""
    if not (env.OTEL_ENDPOINT.get() or env.OTEL_TRACES_ENDPOINT.get()):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning(
            "tracing is off: OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s is not installed (pip install 'culet[traces]')",
            error.name,
        )
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "culet"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    chose("traces", "on", "OTEL_EXPORTER_OTLP_ENDPOINT is set")
    return Tracing(service, provider.get_tracer("culet"))
