"""Compute sizes from `config.json`: the weights of each part, the KV pages of a sequence, and what fits. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from culet.cache.spec import REPLICAS_HINT, CacheLayout, KVGroup
from culet.errors import CheckpointError, ConfigError
from culet.models.spec import LayerSpec, ModelSpec
from culet.models.towers.spec import read_towers

MAX_WEIGHTS = 10**12
GRAPH_TOKENS = 2048  # of the longest steps with prompts that run as CUDA graphs
GRAPH_BYTES = 250_000_000  # of graphs that decode, and of the buffers of steps


def text_weights(spec: ModelSpec) -> dict[str, int]:
    """Count the weights of the text decoder by part. Parts that a variant does not have are absent."""
    hidden, num_layers = spec.hidden_size, len(spec.layers)
    parts = {"token embedding": spec.vocab_size * hidden}
    if spec.has_head:
        parts["head"] = spec.vocab_size * hidden
    if spec.ple_dim:
        packed = num_layers * spec.ple_dim
        parts["per-layer embeddings"] = spec.ple_vocab_size * packed
        per_layer = 2 * spec.ple_dim * hidden + hidden
        parts["per-layer projections"] = packed * hidden + spec.ple_dim + num_layers * per_layer
    parts["attention"] = sum(attention_weights(layer, hidden) for layer in spec.layers)
    parts["dense MLP"] = sum(3 * hidden * layer.mlp_width for layer in spec.layers)
    num_norms = 4
    if spec.moe is not None:
        parts["routed experts"] = num_layers * spec.moe.num_experts * 3 * hidden * spec.moe.width
        parts["router"] = num_layers * (spec.moe.num_experts * hidden + hidden + spec.moe.num_experts)
        num_norms += 3
    parts["norms"] = (num_layers * num_norms + 1) * hidden
    parts["layer scalars"] = num_layers
    return parts


def weights_per_token(spec: ModelSpec) -> int:
    """Count the weights of all layers that a token is multiplied by: of the routed experts, only those of its own."""
    weights = text_weights(spec)
    used = weights["attention"] + weights["dense MLP"]
    return used if spec.moe is None else used + weights["routed experts"] * spec.moe.top_k // spec.moe.num_experts


def check_size(spec: ModelSpec) -> None:
    """Raise if the sizes in `config.json` together make a model that no machine can hold."""
    parts = text_weights(spec)
    total = sum(parts.values())
    if total > MAX_WEIGHTS:
        largest = max(parts, key=lambda name: parts[name])
        problem = f"its sizes make a model of {total:.3g} weights, expected at most {MAX_WEIGHTS:.3g} (most of them: {largest})"
        raise CheckpointError(f"config.json: {problem}", hint="no model is this large: the file is damaged")


def check_ranks(spec: ModelSpec, num_ranks: int) -> None:
    """Raise if the model is never divided among ranks. `share_among` raises if its heads do not allow this many."""
    if num_ranks > 1 and spec.ple_dim:
        raise ConfigError(
            f"tensor-parallel-size: got {num_ranks}, but E2B and E4B are too small to be divided among GPUs",
            hint=REPLICAS_HINT,
        )
    sizes = [("vocabulary", spec.vocab_size), *(("MLP's width", layer.mlp_width) for layer in spec.layers)]
    sizes += [] if spec.moe is None else [("experts' width", spec.moe.width)]
    for name, size in sizes:
        if size % num_ranks:
            problem = f"got {num_ranks}, which does not divide the {name} of {size}"
            raise ConfigError(f"tensor-parallel-size: {problem}", hint="use a power of two")


def attention_weights(layer: LayerSpec, hidden: int) -> int:
    """Count q, o and q_norm. A layer that owns its KV adds k, k_norm, and v unless K and V share a projection."""
    total = 2 * hidden * layer.num_heads * layer.head_dim + layer.head_dim
    if layer.owns_kv:
        num_projections = 1 if layer.k_eq_v else 2
        total += num_projections * hidden * layer.num_kv_heads * layer.head_dim + layer.head_dim
    return total


def tower_weights(config: Mapping[str, Any]) -> dict[str, int]:
    """Count the weights of the vision and audio parts of a wrapped config. Return {} if it has none."""
    return read_towers(config).num_weights


def working_bytes(spec: ModelSpec, itemsize: int, *, num_tokens: int, num_seqs: int, is_widened: bool = False) -> int:
    """Estimate the peak memory of activations in a step of `num_tokens`: the widest layer, PLE, and the logits.

    `is_widened` means that the weights are quantised and a step unpacks them. Then the largest unpacked matrix counts too.
    """
    logits = 2 * num_seqs * spec.vocab_size * 4  # float32, and one copy while sampling
    widest = max(max(2 * layer.mlp_width, layer.num_heads * layer.head_dim) for layer in spec.layers)
    copy = spec.hidden_size * widest * itemsize if is_widened else 0
    return num_tokens * _values_per_token(spec) * itemsize + logits + copy


def graph_bytes(spec: ModelSpec, itemsize: int, *, num_tokens: int) -> int:
    """Estimate the memory of CUDA graphs and buffers if steps have up to `num_tokens` tokens.

    On an H200, the 31B has 0.6 GB less for its cache than without this estimate, with 8192 tokens per step and with 2048. Other
    models were not measured.
    """
    return GRAPH_BYTES + min(num_tokens, GRAPH_TOKENS) * _values_per_token(spec) * itemsize


def _values_per_token(spec: ModelSpec) -> int:
    """Return how many values a layer needs for a token: the residual, its norm and a branch's output, and inside a branch.

    Inside are gate, up and their product, or queries, keys, values and output.
    """
    hidden, widest = spec.hidden_size, max(layer.mlp_width for layer in spec.layers)
    queries = max(layer.num_heads * layer.head_dim for layer in spec.layers)
    num_values = 4 * hidden + max(3 * widest, 4 * queries) + 2 * len(spec.layers) * spec.ple_dim
    if spec.moe is not None:
        num_values += spec.moe.top_k * (3 * spec.moe.width + hidden)
    return num_values


def pages_of_sequence(group: KVGroup, num_tokens: int) -> int:
    """Return the most pages that a sequence of `num_tokens` tokens holds in `group`. A window may start inside a page."""
    pages = group.pages_for(num_tokens + group.ahead)
    if group.window is None:
        return pages
    return min(pages, -(-(group.window - 1) // group.page_tokens) + 1)


def slabs_of_sequence(layout: CacheLayout, num_tokens: int) -> int:
    """Return the most slabs that a sequence of `num_tokens` tokens holds once its prompt is computed."""
    return sum(pages_of_sequence(group, num_tokens) for group in layout.groups)


@dataclass(frozen=True)
class Room:
    """The cache that fits next to the weights, and what it can hold."""

    layout: CacheLayout
    cache_bytes: int  # negative if the weights do not fit

    @property
    def num_slabs(self) -> int:
        return max(0, self.cache_bytes // self.layout.slab_bytes)

    def sequences(self, num_tokens: int) -> int:
        """Return how many sequences of `num_tokens` tokens fit."""
        return self.num_slabs // slabs_of_sequence(self.layout, num_tokens)

    def longest(self, limit: int) -> int:
        """Return the length of the longest single sequence that fits, up to `limit`."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if slabs_of_sequence(self.layout, middle) <= self.num_slabs:
                low = middle
            else:
                high = middle - 1
        return low
