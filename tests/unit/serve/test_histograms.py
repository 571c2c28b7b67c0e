"""Times between tokens are counted, not kept, so the end of a long answer costs no more than that of a short one."""

from __future__ import annotations

import random
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.samples import Sample

from culet.serve.metrics import _GapReport
from culet.serve.service import GAP_BOUNDS, TokenGaps


def samples(registry: CollectorRegistry | SimpleNamespace) -> dict[str, float]:
    found: list[Sample] = [sample for family in registry.collect() for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in found}


def test_the_histogram_is_that_of_the_prometheus_client() -> None:
    registry = CollectorRegistry()
    name = "vllm:inter_token_latency_seconds"
    expected = Histogram(name, "", ("model_name",), buckets=GAP_BOUNDS, registry=registry).labels("m")
    total, rng = TokenGaps(), random.Random(1)
    for _ in range(20):
        gaps = TokenGaps()
        for seconds in (*GAP_BOUNDS, *(rng.expovariate(10) for _ in range(100))):
            gaps.add(seconds)
            expected.observe(seconds)
        total.merge(gaps)
    ours = samples(SimpleNamespace(collect=_GapReport(total, "m").collect))
    theirs = {key: value for key, value in samples(registry).items() if "_created" not in key}
    assert len(theirs) == len(GAP_BOUNDS) + 3
    for key, value in theirs.items():
        assert abs(ours[key] - value) < 1e-6, key
    assert len(total.counts) == len(GAP_BOUNDS) + 1
