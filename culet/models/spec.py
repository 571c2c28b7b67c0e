"""A Gemma 4 checkpoint's `config.json` as plain facts, one LayerSpec per decoder layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from culet.cache.spec import KVSpec


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one layer kind.

    Pairs are (i, i + head_dim / 2) with frequency theta ** (-2 i / head_dim) / factor for i < rotated_dims / 2; the
    other dims are left as they are ("proportional" rope).
    """

    theta: float
    rotated_dims: int
    factor: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """Everything that differs between decoder layers."""

    index: int
    window: int | None  # keys a query sees, itself included; None: a global layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    k_eq_v: bool  # K and V come from one projection
    kv_source: int  # layer whose KV is read; itself where it owns KV
    mlp_width: int

    @property
    def is_global(self) -> bool:
        return self.window is None

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index


@dataclass(frozen=True)
class MoESpec:
    """Routed experts beside the dense MLP, the same in every layer."""

    num_experts: int
    top_k: int
    width: int


@dataclass(frozen=True)
class ModelSpec:
    """A Gemma 4 text decoder, complete."""

    architecture: str  # as config.json names it
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    rms_eps: float
    final_softcap: float | None
    moe: MoESpec | None
    ple_dim: int  # width of the per-layer embeddings; 0: none
    ple_vocab_size: int
    image_attention: str  # "causal" (E2B, E4B), "sliding" (26B, 31B) or "all" (12B): which layers see a whole image
    eos_token_ids: tuple[int, ...]
    has_towers: bool  # the checkpoint wraps vision or audio parts around the text decoder

    @property
    def num_kv_shared(self) -> int:
        """Trailing layers that read another layer's KV."""
        return sum(not layer.owns_kv for layer in self.layers)

    def kv_specs(self, itemsize: int, *, latent: bool = True) -> list[KVSpec]:
        """What each KV-owning layer stores; `latent` keeps K and V of K=V layers once."""
        return [
            KVSpec(
                layer=layer.index,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                rotated_dims=layer.rope.rotated_dims,
                window=layer.window,
                latent=latent and layer.k_eq_v,
                itemsize=itemsize,
            )
            for layer in self.layers
            if layer.owns_kv
        ]
