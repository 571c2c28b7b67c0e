"""Our own histograms are those of the Prometheus client.

Times between tokens are counted, not kept, so the end of a long answer costs no more than that of a short one.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from culet.serve.metrics import _GapReport, _Histogram
from culet.serve.service import GAP_BOUNDS, TokenGaps


def samples(registry: CollectorRegistry | SimpleNamespace) -> dict[str, float]:
    found: list[Sample] = [sample for family in registry.collect() for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in found}


NAME = "vllm:inter_token_latency_seconds"


def check_same(collector: Collector, theirs: CollectorRegistry) -> None:
    ours = samples(SimpleNamespace(collect=collector.collect))
    expected = {key: value for key, value in samples(theirs).items() if "_created" not in key}
    assert len(expected) == len(GAP_BOUNDS) + 3
    for key, value in expected.items():
        assert abs(ours[key] - value) < 1e-6, key


def test_the_histogram_of_gaps_is_that_of_the_prometheus_client() -> None:
    registry = CollectorRegistry()
    expected = Histogram(NAME, "", ("model_name",), buckets=GAP_BOUNDS, registry=registry).labels("m")
    total, rng = TokenGaps(), random.Random(1)
    for _ in range(20):
        gaps = TokenGaps()
        for seconds in (*GAP_BOUNDS, *(rng.expovariate(10) for _ in range(100))):
            gaps.add(seconds)
            expected.observe(seconds)
        total.merge(gaps)
    check_same(_GapReport(total, "m"), registry)
    assert len(total.counts) == len(GAP_BOUNDS) + 1


def test_a_histogram_of_requests_is_that_of_the_prometheus_client() -> None:
    registry = CollectorRegistry()
    expected = Histogram(NAME, "", ("model_name",), buckets=GAP_BOUNDS, registry=registry).labels("m")
    histogram, rng = _Histogram(NAME, "", GAP_BOUNDS, "m"), random.Random(2)
    for seconds in (0.0, *GAP_BOUNDS, 1e6, *(rng.expovariate(10) for _ in range(100))):
        histogram.observe(seconds)
        expected.observe(seconds)
    check_same(histogram, registry)
