"""Compute the shortest time that a GPU's memory and arithmetic allow, from the bytes and operations of a step. No torch.

Each part of a step takes the longer of two times: its bytes at the GPU's bandwidth, and its operations at the GPU's rate. Parts
run one after another, nothing is reused between layers, and launches cost nothing. So no engine can be faster, and none can be
as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from culet.hardware import Peaks
from culet.layers.weight.byte_sizes import bytes_per_value
from culet.models.spec import LayerSpec, ModelSpec


@dataclass(frozen=True)
class Floor:
    """The floors of a model on a GPU. With `latent`, cache rows of K=V layers count once, as Culet stores them by default."""

    spec: ModelSpec
    peaks: Peaks
    latent: bool = True
    itemsize: int = 2  # of activations and the KV cache
    quantization: str = "auto"  # precision of the matrices
    head_quantization: str = "auto"  # precision of the head

    def decode_step(self, num_seqs: int, context: int, num_queries: int = 1) -> float:
        """Return the seconds of a step with `num_queries` new tokens for each of `num_seqs` sequences of `context` tokens."""
        num_tokens = num_seqs * num_queries
        dense = self._dense_weights(self.spec.layers) + self._head_weights
        seconds = self.peaks.seconds(self._read_bytes, 2 * dense * num_tokens) + self._experts(num_tokens)
        for layer in self.spec.layers:
            keys = context if layer.window is None else min(context, layer.window)
            flops = 4 * num_tokens * layer.num_heads * layer.head_dim * keys
            seconds += self.peaks.seconds(num_seqs * keys * self._bytes_per_key(layer), flops)
        return seconds

    def prefill(self, num_seqs: int, prompt_len: int) -> float:
        """Return the seconds to compute `num_seqs` prompts in one step, up to the first token of each.

        Layers that read other layers' KV run only on the last token, whose operations are negligible.
        """
        owners = [layer for layer in self.spec.layers if layer.owns_kv]
        num_tokens = num_seqs * prompt_len
        flops = 2 * self._dense_weights(owners) * num_tokens + 2 * self._head_weights * num_seqs
        seconds = self.peaks.seconds(self._read_bytes, flops) + self._experts(num_tokens)
        for layer in owners:
            keys = prompt_len if layer.window is None else min(prompt_len, layer.window)
            pairs = keys * (keys + 1) / 2 + (prompt_len - keys) * keys
            seconds += num_seqs * 4 * layer.num_heads * layer.head_dim * pairs / self.peaks.flops_per_s
        return seconds

    def tokens_per_s(self, num_seqs: int, prompt_len: int, output_len: int) -> float:
        """Return the output tokens per second of `num_seqs` requests submitted together, including their prompts."""
        # A step's floor grows almost linearly with the context, so the middle step represents all of them.
        decode = (output_len - 1) * self.decode_step(num_seqs, prompt_len + output_len // 2)
        return num_seqs * output_len / (self.prefill(num_seqs, prompt_len) + decode)

    @property
    def _bytes_per_weight(self) -> float:
        return bytes_per_value(self.itemsize, self.quantization)

    @property
    def _read_bytes(self) -> float:
        """The bytes of the dense weights and of the head."""
        head = bytes_per_value(self.itemsize, self.head_quantization) * self._head_weights
        return self._bytes_per_weight * self._dense_weights(self.spec.layers) + head

    @property
    def _head_weights(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size

    def _dense_weights(self, layers: tuple[LayerSpec, ...] | list[LayerSpec]) -> int:
        """Count the weights that every step reads: attention, MLP, router and per-layer projections of `layers`."""
        spec = self.spec
        total = len(spec.layers) * spec.ple_dim * spec.hidden_size
        for layer in layers:
            total += 2 * spec.hidden_size * layer.num_heads * layer.head_dim
            if layer.owns_kv:
                total += (1 if layer.k_eq_v else 2) * spec.hidden_size * layer.num_kv_heads * layer.head_dim
            total += 3 * spec.hidden_size * layer.mlp_width + 2 * spec.hidden_size * spec.ple_dim
            if spec.moe is not None:
                total += spec.hidden_size * spec.moe.num_experts
        return total

    def _experts(self, num_tokens: int) -> float:
        """Return the seconds in routed experts of all layers, if tokens choose experts independently and uniformly."""
        moe = self.spec.moe
        if moe is None:
            return 0.0
        expert = 3 * self.spec.hidden_size * moe.width
        num_used = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** num_tokens)
        read, flops = num_used * expert * self._bytes_per_weight, 2 * num_tokens * moe.top_k * expert
        return self.peaks.seconds(len(self.spec.layers) * read, len(self.spec.layers) * flops)

    def _bytes_per_key(self, layer: LayerSpec) -> int:
        """Return the cache bytes of one key and its value in a layer. Layers that share another layer's KV read it again."""
        latent = self.latent and layer.k_eq_v
        width = layer.head_dim + layer.rope.rotated_dims if latent else 2 * layer.head_dim
        return layer.num_kv_heads * width * self.itemsize
