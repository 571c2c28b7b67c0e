"""The `config.json` of a DFlash drafter as plain facts, in the form of the published checkpoints. No torch.

Such a drafter is a small decoder that uses the target's embedding and head. It reads the residual stream at the output of a
few target layers (**taps**), and guesses a block of masked tokens in one pass. docs/guides/dflash.md lists the keys and the
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from culet.models.quantised.config import read_quantisation
from culet.models.spec import ModelSpec, Section

ARCHITECTURE = "DFlashDraftModel"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MAX_LAYERS = 100
# Keys whose value would change the maths, as (key, value in the published drafters).
_FIXED: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("rope_scaling", None),
)


@dataclass(frozen=True)
class DFlashMask:
    """The keys that a token of the block sees in a layer. Layers differ in nothing else."""

    window: int | None  # number of keys that it sees, including its own, or None for the whole context
    is_causal: bool  # whether later tokens of the block are hidden from it


@dataclass(frozen=True)
class DFlashSpec:
    """A DFlash drafter for one target."""

    hidden_size: int
    vocab_size: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    final_softcap: float | None
    layers: tuple[DFlashMask, ...]
    taps: tuple[int, ...]  # target layers, in the order in which `fc` reads them
    block_size: int  # number of tokens in a block, which are the newest one and masks
    mask_token_id: int

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of all tensors of a checkpoint."""
        D, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "fc.weight", (D, len(self.taps) * D)
        yield "hidden_norm.weight", (D,)
        yield "norm.weight", (D,)
        for index in range(len(self.layers)):
            layer = f"layers.{index}."
            yield f"{layer}input_layernorm.weight", (D,)
            yield f"{layer}post_attention_layernorm.weight", (D,)
            yield f"{layer}self_attn.q_proj.weight", (queries, D)
            yield f"{layer}self_attn.k_proj.weight", (keys, D)
            yield f"{layer}self_attn.v_proj.weight", (keys, D)
            yield f"{layer}self_attn.o_proj.weight", (D, queries)
            yield f"{layer}self_attn.q_norm.weight", (self.head_dim,)
            yield f"{layer}self_attn.k_norm.weight", (self.head_dim,)
            yield f"{layer}mlp.gate_proj.weight", (self.mlp_width, D)
            yield f"{layer}mlp.up_proj.weight", (self.mlp_width, D)
            yield f"{layer}mlp.down_proj.weight", (D, self.mlp_width)


def read_dflash(config: Mapping[str, object], target: ModelSpec) -> DFlashSpec:
    """Read a drafter's `config.json`. Raise if it was not made for `target`. The error names the key at fault."""
    root = Section(config)
    for key in ("speculators_model_type", "speculators_config"):
        if key in config:
            hint = f"use the drafter in its own format, whose architectures are {[ARCHITECTURE]!r}"
            raise root.error(key, "the drafter is in the format of the speculators package, which is not supported", hint)
    if config.get("architectures") != [ARCHITECTURE]:
        hint = 'use an assistant with "method": "mtp"' if "assistant" in str(config.get("model_type")) else ""
        raise root.error("architectures", f"got {config.get('architectures')!r}, expected {[ARCHITECTURE]!r}", hint)
    for key, expected in _FIXED:
        value = config.get(key)
        if value is not None and value != expected:
            wanted = "no value" if expected is None else repr(expected)
            raise root.error(key, f"got {value!r}, expected {wanted}", "no published DFlash drafter has this value")
    read_quantisation(root.values)
    own = root.section("dflash_config", {})
    _check_pairing(root, own, target)
    num_heads, num_kv_heads = root.whole("num_attention_heads"), root.whole("num_key_value_heads")
    head_dim, block_size = root.whole("head_dim"), (own if "block_size" in own.values else root).whole("block_size", least=2)
    if num_heads % num_kv_heads:
        problem = f"got {num_kv_heads}, which does not divide num_attention_heads {num_heads}"
        raise root.error("num_key_value_heads", problem)
    if head_dim % 2:
        raise root.error("head_dim", f"got {head_dim}, expected an even number, because rope rotates pairs")
    softcap = config.get("final_logit_softcapping", target.final_softcap)
    return DFlashSpec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        mlp_width=root.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=_read_theta(root),
        rms_eps=root.number("rms_norm_eps", 1e-6),
        final_softcap=None if softcap is None else root.number("final_logit_softcapping", target.final_softcap),
        layers=_read_layers(root, own, block_size),
        taps=_read_taps(root, own, target),
        block_size=block_size,
        mask_token_id=_read_mask(root, own, target),
    )


def _check_pairing(root: Section, own: Section, target: ModelSpec) -> None:
    """Raise if width, vocabulary or depth differ from those of the target."""
    hint = "a DFlash drafter drafts only for the model that it was trained with"
    for key, found, expected in (
        ("hidden_size", root.whole("hidden_size"), target.hidden_size),
        ("vocab_size", root.whole("vocab_size", target.vocab_size), target.vocab_size),
        ("num_target_layers", root.whole("num_target_layers", len(target.layers)), len(target.layers)),
    ):
        if found != expected:
            raise root.error(key, f"got {found}, but the target has {expected}", hint)


def _read_theta(root: Section) -> float:
    """Read theta of the rope that all layers share. It may be under either of two keys."""
    if root.values.get("rope_parameters") is None:
        return root.number("rope_theta", 1e6)
    rope = root.section("rope_parameters")
    if rope.values.get("rope_type", "default") != "default":
        raise rope.error("rope_type", f"got {rope.values['rope_type']!r}, expected 'default'")
    return rope.number("rope_theta")


def _read_layers(root: Section, own: Section, block_size: int) -> tuple[DFlashMask, ...]:
    num_layers = root.whole("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise root.error("num_hidden_layers", f"got {num_layers}, expected at most {_MAX_LAYERS}")
    kinds = root.values.get("layer_types")
    kinds = [_FULL] * num_layers if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise root.error(
            "layer_types", f"got {kinds!r}, expected a list of {num_layers} entries, each {_SLIDING!r} or {_FULL!r}"
        )
    window = root.whole("sliding_window") if _SLIDING in kinds else 0
    if window and window < block_size:
        raise root.error("sliding_window", f"got {window}, which is less than the {block_size} tokens of a block")
    stated = own.values.get("is_causal")
    if stated is not None and not isinstance(stated, bool):
        raise own.error("is_causal", f"got {stated!r}, expected true or false")
    return tuple(
        DFlashMask(window if kind == _SLIDING else None, kind == _SLIDING if stated is None else stated) for kind in kinds
    )


def _read_taps(root: Section, own: Section, target: ModelSpec) -> tuple[int, ...]:
    section = own if "target_layer_ids" in own.values else root
    taps = section.values.get("target_layer_ids")
    num_layers = len(target.layers)
    if not isinstance(taps, list) or not taps:
        raise section.error("target_layer_ids", f"got {taps!r}, expected a list of layers of the target")
    for tap in taps:
        if isinstance(tap, bool) or not isinstance(tap, int) or not 0 <= tap < num_layers:
            raise section.error("target_layer_ids", f"got {tap!r}, but the target's layers are 0 to {num_layers - 1}")
    if len(set(taps)) < len(taps):
        raise section.error("target_layer_ids", f"got {taps}, which lists a layer twice")
    return tuple(taps)


def _read_mask(root: Section, own: Section, target: ModelSpec) -> int:
    section = own if "mask_token_id" in own.values else root
    mask = section.whole("mask_token_id", least=0)
    if mask >= target.vocab_size:
        raise section.error("mask_token_id", f"got {mask}, but the target's tokens are 0 to {target.vocab_size - 1}")
    return mask


def make_config(target: ModelSpec, **overrides: Any) -> dict[str, Any]:
    """Return the `config.json` of a drafter for `target` with the published proportions. `overrides` replace keys."""
    size, num_layers = target.hidden_size, overrides.get("num_hidden_layers", 5)
    head_dim = overrides.get("head_dim", 128 if size >= 1024 else 32)
    num_heads = 1 << (max(1, size // head_dim) - 1).bit_length()
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": size,
        "vocab_size": target.vocab_size,
        "intermediate_size": 2 * size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": min(8, num_heads),
        "head_dim": head_dim,
        "layer_types": [*[_SLIDING] * (num_layers - 1), _FULL],
        "sliding_window": 2048,
        "max_position_embeddings": target.max_position,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "final_logit_softcapping": target.final_softcap,
        "block_size": 16,
        "num_target_layers": len(target.layers),
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": spread_taps(len(target.layers))},
    }
    return config | overrides


def spread_taps(num_layers: int, count: int = 6) -> list[int]:
    """Return evenly spread target layers, from the second to the third last, like the taps of the published drafters."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    return sorted({round(first + index * (last - first) / (count - 1)) for index in range(count)})
