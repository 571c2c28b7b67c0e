"""The `config.json` of an MTP drafter (a Gemma 4 assistant) as plain facts, checked against its target. No torch.

An assistant is a decoder of a few narrow layers that store no KV. Each layer reads the pages of the target's last KV-owning
layer of its kind. The decoder's input is the target's embedding of a token, concatenated with a hidden state of the target's
width. Its output goes to a head over the same vocabulary, and is projected back to that width as the hidden state of the next
draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from culet.errors import CheckpointError
from culet.models.quantised.config import read_quantisation
from culet.models.spec import LayerSpec, ModelSpec, Section, read_spec

# model_type of an assistant -> that of its decoder
MODEL_TYPES = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
_DEFAULT_CENTROIDS, _DEFAULT_TOP_CENTROIDS = 2048, 32
_WRONG_PAIR = "an assistant drafts only for the model that it was trained with; use the one with the target's name"


@dataclass(frozen=True)
class CentroidSpec:
    """A head in two steps, which finds the best clusters of tokens first and then scores the tokens in them."""

    count: int  # number of clusters, which have equal size
    top_k: int  # number of clusters whose tokens are scored


@dataclass(frozen=True)
class MTPSpec:
    """An MTP drafter for one target."""

    decoder: ModelSpec  # its layers are numbered after the target's, and `kv_source` is a layer of the target
    backbone_size: int  # hidden size of the target
    centroids: CentroidSpec | None  # None for an ordinary head

    def tensor_sizes(self) -> dict[str, int]:
        """Return the number of weights by part."""
        decoder, size = self.decoder, self.decoder.hidden_size
        attention = sum(2 * layer.num_heads * layer.head_dim * size + layer.head_dim for layer in decoder.layers)
        mlp = sum(3 * layer.mlp_width * size for layer in decoder.layers)
        head = decoder.vocab_size * size
        return {
            "head": head + (self.centroids.count * size if self.centroids else 0),
            "projections": 3 * self.backbone_size * size,
            "attention": attention,
            "mlp": mlp,
            "norms": (4 * len(decoder.layers) + 1) * size + len(decoder.layers),
        }


def read_mtp(config: Mapping[str, object], target: ModelSpec) -> MTPSpec:
    """Read an assistant's `config.json`. Raise if it was not made for `target`. The error gives the reason."""
    root = Section(config)
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        hint = "pass an assistant, such as google/gemma-4-E4B-it-assistant"
        raise root.error("model_type", f"got {model_type!r}, expected one of: {', '.join(MODEL_TYPES)}", hint)
    read_quantisation(root.values)
    text = root.section("text_config")
    for key in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if text.values.get(key):
            raise text.error(key, f"got {text.values[key]!r}, but no assistant has this")
    num_layers = text.whole("num_hidden_layers")
    if text.whole("num_kv_shared_layers", num_layers, least=0) not in (0, num_layers):
        problem = f"got {text.values['num_kv_shared_layers']}, but all {num_layers} layers of an assistant read the target's KV"
        raise text.error("num_kv_shared_layers", problem)
    # Read it as a decoder whose layers all own KV. `_read_from_target` then sets which target layers they read instead.
    plain = {"model_type": MODEL_TYPES[str(model_type)], "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    decoder = read_spec({key: value for key, value in text.values.items() if key != "architectures"} | plain)
    spec = MTPSpec(
        decoder=replace(decoder, layers=tuple(_read_from_target(layer, target) for layer in decoder.layers)),
        backbone_size=root.whole("backbone_hidden_size"),
        centroids=_read_centroids(root, decoder.vocab_size),
    )
    if spec.backbone_size != target.hidden_size:
        problem = f"got {spec.backbone_size}, but the target's hidden size is {target.hidden_size}"
        raise root.error("backbone_hidden_size", problem, _WRONG_PAIR)
    if decoder.vocab_size != target.vocab_size:
        raise text.error("vocab_size", f"got {decoder.vocab_size}, but the target has {target.vocab_size}", _WRONG_PAIR)
    return spec


def _read_centroids(root: Section, vocab_size: int) -> CentroidSpec | None:
    if not root.flag("use_ordered_embeddings"):
        return None
    count = root.whole("num_centroids", _DEFAULT_CENTROIDS)
    top_k = root.whole("centroid_intermediate_top_k", _DEFAULT_TOP_CENTROIDS)
    if vocab_size % count:
        raise root.error("num_centroids", f"got {count}, which does not divide the vocabulary of {vocab_size}")
    if top_k > count:
        raise root.error("centroid_intermediate_top_k", f"got {top_k}, which is more than num_centroids {count}")
    return CentroidSpec(count, top_k)


def _read_from_target(layer: LayerSpec, target: ModelSpec) -> LayerSpec:
    """Return `layer` as a reader of the target's last KV-owning layer of its kind. Raise if their shapes differ."""
    kind = "global" if layer.is_global else "sliding"
    owners = [owner for owner in target.layers if owner.owns_kv and owner.is_global == layer.is_global]
    if not owners:
        raise CheckpointError(f"the assistant has {kind} layers, but the target has none", hint=_WRONG_PAIR)
    source = owners[-1]
    for name in ("head_dim", "num_kv_heads", "window", "rope"):
        ours, theirs = getattr(layer, name), getattr(source, name)
        if ours != theirs:
            problem = f"the assistant's {kind} layers have {name} {ours}, but the target's have {theirs}"
            raise CheckpointError(problem, hint=_WRONG_PAIR)
    if layer.num_heads % layer.num_kv_heads:
        problem = f"{layer.num_heads} query heads cannot share {layer.num_kv_heads} KV heads"
        raise CheckpointError(f"the assistant's {kind} layers: {problem}")
    # Whether K = V is a property of the pages, so the source decides. Layer numbers continue after those of the target.
    return replace(layer, index=len(target.layers) + layer.index, kv_source=source.index, k_eq_v=source.k_eq_v)


def make_config(target: ModelSpec) -> dict[str, object]:
    """Return the `config.json` of an assistant for `target` with the published proportions, for random weights."""
    is_small = target.ple_dim > 0  # the assistants of E2B and E4B are narrow and have a head in two steps
    by_kind = {layer.is_global: layer for layer in target.layers}
    sliding, full = by_kind[False], by_kind[True]
    size = min(256 if is_small else 1024, target.hidden_size)
    cluster = 128 if target.vocab_size % 128 == 0 else 1
    text = {
        "model_type": "gemma4_text",
        "vocab_size": target.vocab_size,
        "hidden_size": size,
        "intermediate_size": 8 * size,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": max(full.num_kv_heads, sliding.num_kv_heads, sliding.num_heads // (2 if is_small else 1)),
        "num_key_value_heads": sliding.num_kv_heads,
        "head_dim": sliding.head_dim,
        "per_layer_config": {"3": {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}},
        "sliding_window": sliding.window,
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": target.rms_eps,
        "rope_parameters": {
            kind: {
                "rope_type": "proportional",
                "rope_theta": layer.rope.theta,
                "partial_rotary_factor": layer.rope.rotated_dims / layer.head_dim,
                "factor": layer.rope.factor,
            }
            for kind, layer in (("sliding_attention", sliding), ("full_attention", full))
        },
    }
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": is_small,
        "num_centroids": target.vocab_size // cluster,
        "centroid_intermediate_top_k": min(_DEFAULT_TOP_CENTROIDS, target.vocab_size // cluster),
        "text_config": text,
    }
