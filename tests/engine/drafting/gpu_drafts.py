"""Settings shared by tests of drafters on a GPU: small targets and few sequences."""

from __future__ import annotations

from typing import Any

from culet import SamplingParams

TARGET = {"head_dim": 32, "global_head_dim": 64}  # head dims that tensor cores support
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
# For three sequences at a time, so that the largest bucket is padded.
GIVEN: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 64 << 20,
}
