"""GET /metrics: the names that dashboards expect, and numbers that match the requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.running import Running, wait_for

NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    *(
        f"vllm:{name}_{part}"
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "time_per_output_token_seconds",
            "request_max_num_generation_tokens",
            "iteration_tokens_total",
        )
        for part in ("bucket", "count", "sum")
    ),
    "vllm:cache_config_info",
    "culet:kv_group_pages",
    "culet:kv_group_usage_perc",
    "culet:kv_resume_points",
    "culet:kv_resume_point_pages",
    "culet:host_pages",
    "culet:host_free_pages",
    "culet:parked_sequences_total",
    "culet:restored_sequences_total",
    "culet:restored_tokens_total",
    "culet:engine_up",
    "culet:kernels_compiled_total",
)


def read(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return values by name and labels, without the model name."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "gemma"
            values[sample.name, tuple(sorted(labels.items()))] = sample.value
    return values


def test_metrics_have_the_names_that_dashboards_expect(tiny: Running) -> None:
    tiny.chat(max_tokens=3)
    wait_for(tiny.is_at_rest)
    names = {name for name, _ in read(tiny)}
    assert names >= set(NAMES), set(NAMES) - names
    assert not any(name.endswith("_created") for name in names)
    groups = {dict(labels)["group"] for name, labels in read(tiny) if name == "culet:kv_group_pages"}
    assert groups == {"sliding", "global"}


def test_numbers_match_the_requests(tiny: Running) -> None:
    before = read(tiny)
    answers = [tiny.chat(max_tokens=5, n=2, ignore_eos=True).json() for _ in range(3)]
    assert tiny.chat(max_tokens=0).status_code == 400
    wait_for(tiny.is_at_rest)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return read(tiny)[key] - before.get(key, 0.0)

    usage = [answer["usage"] for answer in answers]
    wait_for(lambda: grown("vllm:generation_tokens_total") >= 30, what="the engine's report")
    assert grown("vllm:generation_tokens_total") == sum(entry["completion_tokens"] for entry in usage) == 30
    assert grown("vllm:prompt_tokens_total") == sum(entry["prompt_tokens"] for entry in usage)
    assert grown("vllm:request_success_total", finished_reason="length") == 6
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token", "request_queue_time"):
        assert grown(f"vllm:{name}_seconds_count") == 3, name
    assert 0 < grown("vllm:time_to_first_token_seconds_sum") <= grown("vllm:e2e_request_latency_seconds_sum")
    assert 0 <= grown("vllm:request_queue_time_seconds_sum") <= grown("vllm:time_to_first_token_seconds_sum")
    assert grown("vllm:inter_token_latency_seconds_count") == 3 * 2 * 4
    assert grown("vllm:time_per_output_token_seconds_count") == 3 * 2 * 4
    for name in ("request_prefill_time", "request_decode_time", "request_inference_time"):
        assert grown(f"vllm:{name}_seconds_count") == 3, name
    assert 0 < grown("vllm:request_decode_time_seconds_sum") < grown("vllm:e2e_request_latency_seconds_sum")
    parts = grown("vllm:request_prefill_time_seconds_sum") + grown("vllm:request_decode_time_seconds_sum")
    assert grown("vllm:request_inference_time_seconds_sum") == pytest.approx(parts)
    assert grown("vllm:request_max_num_generation_tokens_sum") == 3 * 5
    num_steps = grown("vllm:iteration_tokens_total_count")
    assert num_steps == grown("culet:steps_total") >= 3 * 5
    num_computed = sum(entry["prompt_tokens"] - entry["prompt_tokens_details"]["cached_tokens"] for entry in usage)
    assert grown("vllm:iteration_tokens_total_sum") == num_computed + 3 * 2 * 4  # the last token of a sample is not computed
    assert grown("vllm:iteration_tokens_total_bucket", le="+Inf") == num_steps
    assert grown("vllm:prefix_cache_queries_total") > 0
    assert read(tiny)["vllm:num_requests_running", ()] == 0
    assert read(tiny)["vllm:kv_cache_usage_perc", ()] == pytest.approx(0)


def test_running_requests_are_visible(scripted: Callable[..., Running]) -> None:
    with scripted("a " * 200 + "<turn|>", step_s=0.02) as server:
        with server.http.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello"}], "stream": True, "n": 2},
        ):
            wait_for(lambda: read(server).get(("vllm:num_requests_running", ())) == 2, what="two running samples")
            assert read(server)["vllm:kv_cache_usage_perc", ()] > 0
        wait_for(lambda: read(server)["vllm:num_requests_running", ()] == 0, what="the end of them")
        aborted = ("vllm:request_success_total", (("finished_reason", "abort"),))
        wait_for(lambda: read(server)[aborted] == 2, what="the cancelled ones")


def test_traces_go_to_the_configured_collector(folder: Path, encode: Callable[[str], list[int]]) -> None:
    """A request becomes a span at the collector. Skipped if the optional packages are missing."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{collector.server_address[1]}"
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        script = {"answers": [encode("Hello.<turn|>")]}
        with Running(folder, script=script, environment=environment) as server:
            assert server.chat(max_tokens=5).status_code == 200
            wait_for(lambda: received, what="a span")
        collector.shutdown()
    path, body = received[0]
    assert path == "/v1/traces"
    for word in (b"POST /v1/chat/completions", b"gen_ai.usage.output_tokens", b"gen_ai.latency.time_to_first_token", b"culet"):
        assert word in body


def test_drafts_are_counted_and_structured_output_holds(folder: Path) -> None:
    """Draft rounds are counted, in total and by position, and structured output still holds."""
    config = {
        "device": "cpu",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "speculative_config": '{"method": "mtp", "model": "random:", "num_speculative_tokens": 3, "adaptive": false}',
    }
    with Running(folder, config=config) as server:
        answer = server.chat(max_tokens=60, structured_outputs={"regex": "[0-9]{20,30}"}).json()
        assert re.fullmatch("[0-9]{20,30}", answer["choices"][0]["message"]["content"])
        # The usage has the same counts, except for the few drafts of the server's own first request.
        details = answer["usage"]["completion_tokens_details"]
        num_drafts = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        wait_for(lambda: read(server)["vllm:spec_decode_num_draft_tokens_total", ()] >= num_drafts, what="the engine's report")
        values = read(server)
        drafted = values["vllm:spec_decode_num_draft_tokens_total", ()]
        accepted = values["vllm:spec_decode_num_accepted_tokens_total", ()]
        assert drafted > 20
        assert drafted == sum(value for (name, _), value in values.items() if name == "culet:drafts_per_pos_total")
        positions = {
            labels: value for (name, labels), value in values.items() if name.endswith("accepted_tokens_per_pos_total")
        }
        assert set(positions) == {(("position", str(place)),) for place in range(3)}
        assert sum(positions.values()) == accepted
        assert values["culet:acceptance_length", (("drafter", "mtp"),)] >= 1.0
        assert num_drafts > 20
        assert 0 <= accepted - details["accepted_prediction_tokens"] <= drafted - num_drafts < 10
        lines = server.chat(max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}).text.split("\n")
        last = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
        assert last["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


DASHBOARD = Path(__file__).parents[2] / "docs/dashboards/culet.json"
NAME = re.compile(r"\b(?:vllm:|culet:|process_)[a-z0-9_]+")


def test_every_query_of_the_dashboard_names_a_metric(scripted: Callable[..., Running]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 40
    with scripted(settings={"api_key": "secret"}) as server:
        assert server.chat().status_code == 200
        wait_for(lambda: any(name == "vllm:num_requests_running" for name, _ in read(server)), what="the engine's report")
        # A metric that counts something that has not happened yet has a name but no samples.
        families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    known = {sample.name for family in families for sample in family.samples}
    known |= {f"{family.name}_total" for family in families if family.type == "counter"}
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        assert known.issuperset(names), query
        assert query.count("(") == query.count(")"), query
