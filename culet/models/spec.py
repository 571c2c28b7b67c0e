"""Read the `config.json` of a Gemma 4 checkpoint into plain facts, with one LayerSpec per decoder layer. No torch.

`read_spec` reads both forms of the file. In the published form, `head_dim` and `num_key_value_heads` apply to the sliding
layers, and `global_head_dim` and `num_global_key_value_heads` to the global ones. The other form lists the layers that differ
in `per_layer_config`. An absent key has the default of its model family. A value that Culet cannot serve, or that contradicts
another key, raises a CheckpointError that names the key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from culet.cache.spec import KVSpec
from culet.errors import CheckpointError
from culet.layers.weight.quantised.scheme import MOBILE
from culet.log import logger
from culet.models.quantised.config import Quantisation, read_quantisation


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding of one kind of layer.

    The pairs are (i, i + head_dim / 2) with frequency theta ** (-2 i / head_dim) / factor for i < rotated_dims / 2. The other
    dims are not rotated ("proportional" rope).
    """

    theta: float
    rotated_dims: int
    factor: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """Everything that differs between decoder layers."""

    index: int
    window: int | None  # number of keys that a query sees, including itself; None for a global layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    k_eq_v: bool  # K and V come from one projection
    kv_source: int  # the layer whose KV it reads, which is itself if it owns KV
    mlp_width: int

    @property
    def is_global(self) -> bool:
        return self.window is None

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index


@dataclass(frozen=True)
class MoESpec:
    """The routed experts next to the dense MLP. They have the same shape in every layer."""

    num_experts: int
    top_k: int
    width: int


@dataclass(frozen=True)
class ModelSpec:
    """A Gemma 4 text decoder."""

    architecture: str  # the name in config.json
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    rms_eps: float
    final_softcap: float | None
    moe: MoESpec | None
    ple_dim: int  # width of the per-layer embeddings; 0 if there are none
    ple_vocab_size: int
    image_attention: str  # the layers that see a whole image: "causal" for none (E2B, E4B), "sliding" (26B, 31B), "all" (12B)
    eos_token_ids: tuple[int, ...]
    placeholder_ids: tuple[int, ...]  # tokens that stand for images, video and audio. They are embedded as token 0.
    has_towers: bool  # the checkpoint wraps vision or audio parts around the text decoder
    has_head: bool = False  # the head is not the embedding table, as in Google's QAT for phones, which stores both

    @property
    def num_kv_shared(self) -> int:
        """The number of trailing layers that read another layer's KV."""
        return sum(not layer.owns_kv for layer in self.layers)

    def kv_specs(self, itemsize: int, *, latent: bool = True) -> list[KVSpec]:
        """Return what each KV-owning layer stores. With `latent`, K=V layers store K and V once."""
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

    def readers(self, owners: Collection[int]) -> tuple[int, ...]:
        """Return the layers that attend over the KV of `owners`: the owners, and the layers that share their KV."""
        return tuple(layer.index for layer in self.layers if layer.kv_source in owners)


@dataclass(frozen=True)
class _Family:
    """The defaults of a `model_type` for keys that its config may omit."""

    name: str
    wraps_text: bool  # the decoder's keys are in `text_config`
    text_type: str  # model_type of the decoder's own config
    architecture: str
    window: int
    max_position: int
    ple_dim: int
    bidirectional: str | None
    image_attention: str  # applies if use_bidirectional_attention is "vision"
    has_moe: bool


def _family(name: str, wraps_text: bool) -> _Family:
    is_unified = name.startswith("gemma4_unified")
    prefix = "Gemma4Unified" if is_unified else "Gemma4"
    return _Family(
        name=name,
        wraps_text=wraps_text,
        text_type="gemma4_unified_text" if is_unified else "gemma4_text",
        architecture=f"{prefix}ForConditionalGeneration" if wraps_text else f"{prefix}ForCausalLM",
        window=1024 if is_unified else 512,
        max_position=262_144 if is_unified else 131_072,
        ple_dim=0 if is_unified else 256,
        bidirectional="vision" if is_unified else None,
        image_attention="all" if is_unified else "sliding",
        has_moe=not is_unified,
    )


_FAMILIES = {
    family.name: family
    for family in (
        _family("gemma4", True),
        _family("gemma4_text", False),
        _family("gemma4_unified", True),
        _family("gemma4_unified_text", False),
    )
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# The largest sizes that are read, far above any real model. A typo or a hostile file must not fill the memory.
MOST: Mapping[str, int] = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "num_global_key_value_heads": 4096,
    "head_dim": 8192,
    "global_head_dim": 8192,
    "num_experts": 1 << 14,
    "moe_intermediate_size": 1 << 20,
    "hidden_size_per_layer_input": 1 << 16,
    "backbone_hidden_size": 1 << 17,
}
_MOST_OTHERS = 1 << 24  # vocabulary, positions, windows
_DEFAULT_PATTERN = 6  # without layer_types, every sixth layer is global
_DEFAULT_ROPE: Mapping[str, object] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
_DEFAULT_GLOBAL_HEAD_DIM = 512
_DEFAULT_PLE_VOCAB_SIZE = 262_144
_PER_LAYER_KEYS = ("head_dim", "num_key_value_heads")
# (key, its value in Gemma 4) for keys that would change the decoder's computation.
_FIXED: tuple[tuple[str, object], ...] = (
    ("hidden_activation", "gelu_pytorch_tanh"),
    ("attention_bias", False),
    ("attn_logit_softcapping", None),
    ("rope_scaling", None),
)


@dataclass(frozen=True)
class Section:
    """One JSON object of the config, with typed reads. Errors contain the full name of the key."""

    values: Mapping[str, object]
    prefix: str = ""

    def error(self, key: str, problem: str, hint: str = "") -> CheckpointError:
        return CheckpointError(f"config.json: {self.prefix}{key}: {problem}", hint=hint)

    def _get(self, key: str, default: object, expected: str) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, f"{'got null' if key in self.values else 'the key is missing'}, expected {expected}")
        return default

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Read a whole number. Return `default` if the key is absent or null, and raise if there is no default."""
        value = self._get(key, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"got {value!r}, expected a whole number of at least {least}")
        if value > (most := MOST.get(key, _MOST_OTHERS)):
            raise self.error(key, f"got {value}, expected at most {most}", "no model is this large: the file is damaged")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite number above 0."""
        value = self._get(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"got {value!r}, expected a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Read true or false. An absent key is false."""
        value = self._get(key, False, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"got {value!r}, expected true or false")
        return value

    def section(self, key: str, default: Mapping[str, object] | None = None) -> Section:
        value = self._get(key, default, "an object")
        if not isinstance(value, Mapping):
            raise self.error(key, f"got {type(value).__name__}, expected an object")
        return Section(value, f"{self.prefix}{key}.")


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Gemma 4 `config.json`, multimodal or text-only, in either form."""
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: got {type(config).__name__}, expected an object")
    root = Section(config)
    family = _read_family(root)
    text = root.section("text_config") if family.wraps_text else root
    if family.wraps_text and text.values.get("model_type", family.text_type) != family.text_type:
        raise text.error("model_type", f"got {text.values['model_type']!r}, expected {family.text_type!r}")
    for section in (root, text):
        _check_fixed(section)
    quantisation = read_quantisation(config)  # raises if it is a format that Culet does not read
    has_head = _read_head(root, quantisation) or (text is not root and _read_head(text, quantisation))
    vocab_size = text.whole("vocab_size")
    ple_dim = text.whole("hidden_size_per_layer_input", family.ple_dim, least=0)
    ple_vocab_size = text.whole("vocab_size_per_layer_input", _DEFAULT_PLE_VOCAB_SIZE) if ple_dim else 0
    if ple_dim and family.ple_dim == 0:
        raise text.error("hidden_size_per_layer_input", f"got {ple_dim}, but {family.name} has no per-layer embeddings")
    if ple_dim and ple_vocab_size < vocab_size:
        problem = f"got {ple_vocab_size}, which is less than vocab_size {vocab_size}"
        raise text.error("vocab_size_per_layer_input", problem)
    return ModelSpec(
        architecture=_read_architecture(root, family),
        hidden_size=text.whole("hidden_size"),
        vocab_size=vocab_size,
        layers=_read_layers(text, family),
        max_position=text.whole("max_position_embeddings", family.max_position),
        rms_eps=text.number("rms_norm_eps", 1e-6),
        final_softcap=None if text.values.get("final_logit_softcapping") is None else text.number("final_logit_softcapping"),
        moe=_read_moe(text, family),
        ple_dim=ple_dim,
        ple_vocab_size=ple_vocab_size,
        image_attention=_read_image_attention(text, family),
        eos_token_ids=_read_eos(root) or _read_eos(text) or (1,),
        placeholder_ids=_read_placeholders(root, vocab_size),
        has_head=has_head,
        has_towers=family.wraps_text and any(config.get(tower) is not None for tower in ("vision_config", "audio_config")),
    )


def _read_family(root: Section) -> _Family:
    model_type = root.values.get("model_type")
    if isinstance(model_type, str) and model_type in _FAMILIES:
        return _FAMILIES[model_type]
    if isinstance(model_type, str) and model_type.startswith("gemma4") and model_type.endswith("assistant"):
        hint = "this is a drafter; pass its target model"
    else:
        hint = "Culet serves only Gemma 4: google/gemma-4-E2B-it, -E4B-it, -12B-it, -26B-A4B-it, -31B-it"
    got = "the key is missing" if model_type is None else f"got {model_type!r}"
    raise root.error("model_type", f"{got}, expected one of: {', '.join(_FAMILIES)}", hint)


def _read_architecture(root: Section, family: _Family) -> str:
    value = root.values.get("architectures")
    if value is not None and value != [family.architecture]:
        hint = "the checkpoint was saved from only part of the model, or from another model"
        raise root.error("architectures", f"got {value!r}, expected {[family.architecture]!r}", hint)
    return family.architecture


def _check_fixed(section: Section) -> None:
    for key, expected in _FIXED:
        value = section.values.get(key, expected)
        if value is not None and value != expected:
            got = f"got {value!r}" if isinstance(value, str | int | float) else f"got a {type(value).__name__}"
            wanted = "no value" if expected is None else repr(expected)
            hint = "no Gemma 4 model has this value, and Culet does not support it"
            raise section.error(key, f"{got}, expected {wanted}", hint)


def _read_head(section: Section, quantisation: Quantisation | None) -> bool:
    """Read whether the head has its own weights."""
    value = section.values.get("tie_word_embeddings")
    if value is False and quantisation is not None and quantisation.method == MOBILE:
        return True
    if value not in (None, True):
        hint = "no Gemma 4 model has this value, and Culet does not support it"
        got = f"got {value!r}" if isinstance(value, str | int | float) else f"got a {type(value).__name__}"
        raise section.error("tie_word_embeddings", f"{got}, expected True", hint)
    return False


def _read_eos(section: Section) -> tuple[int, ...]:
    """Read `eos_token_id`, which may be one id or several. Return () if it is absent."""
    value = section.values.get("eos_token_id")
    ids: list[int] = []
    for token_id in value if isinstance(value, list | tuple) else [] if value is None else [value]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise section.error("eos_token_id", f"got {token_id!r}, expected a token id or a list of token ids")
        ids.append(token_id)
    return tuple(ids)


def _read_placeholders(root: Section, vocab_size: int) -> tuple[int, ...]:
    ids = (root.values.get(name) for name in ("image_token_id", "video_token_id", "audio_token_id"))
    return tuple(token_id for token_id in ids if isinstance(token_id, int) and 0 <= token_id < vocab_size)


def _read_image_attention(text: Section, family: _Family) -> str:
    """Read which layers let image tokens see a whole image."""
    value = text.values.get("use_bidirectional_attention", family.bidirectional)
    if value not in (None, "vision"):
        hint = "a model with bidirectional attention cannot write text token by token"
        raise text.error("use_bidirectional_attention", f"got {value!r}, expected null or 'vision'", hint)
    return "causal" if value is None else family.image_attention


def _read_moe(text: Section, family: _Family) -> MoESpec | None:
    if not text.flag("enable_moe_block"):
        return None
    if not family.has_moe:
        raise text.error("enable_moe_block", f"got true, but {family.name} has no routed experts")
    moe = MoESpec(text.whole("num_experts"), text.whole("top_k_experts"), text.whole("moe_intermediate_size"))
    if moe.top_k > moe.num_experts:
        raise text.error("top_k_experts", f"got {moe.top_k}, which is more than num_experts {moe.num_experts}")
    return moe


def _read_layers(text: Section, family: _Family) -> tuple[LayerSpec, ...]:
    types = _read_layer_types(text)
    num_layers = len(types)
    num_heads = text.whole("num_attention_heads")
    k_eq_v = text.flag("attention_k_eq_v")
    window = text.whole("sliding_window", family.window)
    mlp_width = text.whole("intermediate_size")
    first_shared = num_layers - text.whole("num_kv_shared_layers", 0, least=0)
    doubles = text.flag("use_double_wide_mlp")
    shapes = _read_shapes(text, types, k_eq_v)
    ropes = {kind: _read_rope(text, kind, shapes[types.index(kind)][0]) for kind in dict.fromkeys(types)}
    layers = []
    for index, kind in enumerate(types):
        head_dim, num_kv_heads = shapes[index]
        if num_heads % num_kv_heads:
            problem = f"layer {index} has {num_kv_heads}, which does not divide num_attention_heads {num_heads}"
            raise text.error("num_key_value_heads", problem)
        is_shared = index >= first_shared
        layers.append(
            LayerSpec(
                index=index,
                window=window if kind == _SLIDING else None,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope=ropes[kind],
                k_eq_v=k_eq_v and kind == _FULL,
                kv_source=_kv_source(text, types, index, first_shared) if is_shared else index,
                mlp_width=mlp_width * 2 if doubles and is_shared else mlp_width,
            )
        )
    return tuple(layers)


def _kv_source(text: Section, types: list[str], index: int, first_shared: int) -> int:
    """Return the last layer of the same kind before the shared ones."""
    for source in range(first_shared - 1, -1, -1):
        if types[source] == types[index]:
            return source
    problem = (
        f"got {len(types) - first_shared}, so layer {index} ({types[index]}) has no earlier layer of its kind to read from"
    )
    raise text.error("num_kv_shared_layers", problem)


def _read_layer_types(text: Section) -> list[str]:
    num_layers = text.whole("num_hidden_layers")
    value = text.values.get("layer_types")
    if value is None:
        types = [_SLIDING if (index + 1) % _DEFAULT_PATTERN else _FULL for index in range(num_layers)]
        return [*types[:-1], _FULL]
    if not isinstance(value, list | tuple):
        raise text.error("layer_types", f"got {type(value).__name__}, expected a list of {num_layers} layer types")
    if len(value) != num_layers:
        raise text.error("layer_types", f"got {len(value)} entries, but num_hidden_layers is {num_layers}")
    for index, kind in enumerate(value):
        if kind not in (_SLIDING, _FULL):
            raise text.error(f"layer_types[{index}]", f"got {kind!r}, expected {_SLIDING!r} or {_FULL!r}")
    if value[-1] != _FULL:
        # The last layer is always global, whatever the file says. The reference implementation does the same.
        logger.warning("config.json: %slayer_types: the last layer is treated as %s", text.prefix, _FULL)
    return [*map(str, value[:-1]), _FULL]


def _read_shapes(text: Section, types: list[str], k_eq_v: bool) -> list[tuple[int, int]]:
    """Read (head_dim, num_kv_heads) for each layer, from `per_layer_config` or from the keys for global layers."""
    sliding = (text.whole("head_dim"), text.whole("num_key_value_heads"))
    shapes = [sliding] * len(types)
    if "per_layer_config" in text.values:
        overrides = text.section("per_layer_config", {})
        for key in overrides.values:
            index = _layer_index(overrides, key, len(types))
            override = overrides.section(key)
            for unknown in set(override.values) - set(_PER_LAYER_KEYS):
                known = " and ".join(_PER_LAYER_KEYS)
                raise override.error(unknown, f"this key cannot differ between layers, only {known} can")
            shapes[index] = (override.whole("head_dim", sliding[0]), override.whole("num_key_value_heads", sliding[1]))
        _check_legacy_keys(text, types, shapes, k_eq_v)
    else:
        num_kv_heads = text.whole("num_global_key_value_heads", sliding[1]) if k_eq_v else sliding[1]
        shape = (text.whole("global_head_dim", _DEFAULT_GLOBAL_HEAD_DIM), num_kv_heads)
        shapes = [shape if kind == _FULL else sliding for kind in types]
    for index, kind in enumerate(types):
        first = types.index(kind)
        if shapes[index] != shapes[first]:
            got = f"layer {index} differs from layer {first}, although both are {kind}"
            raise text.error("per_layer_config", got, "layers of one kind share pages and rope, so they need the same shape")
        if shapes[index][0] % 2:
            raise text.error("head_dim", f"layer {index} has {shapes[index][0]}, expected an even number")
    return shapes


def _layer_index(overrides: Section, key: str, num_layers: int) -> int:
    if not isinstance(key, str) or not key.isdecimal() or len(key) > 6 or int(key) >= num_layers:
        raise overrides.error(str(key), f"this is not a layer, expected an index from 0 to {num_layers - 1}")
    return int(key)


def _check_legacy_keys(text: Section, types: list[str], shapes: list[tuple[int, int]], k_eq_v: bool) -> None:
    """Raise if a file has both forms and they disagree."""
    head_dim, num_kv_heads = shapes[types.index(_FULL)]
    if text.whole("global_head_dim", head_dim) != head_dim:
        raise text.error("global_head_dim", f"got {text.values['global_head_dim']}, but per_layer_config says {head_dim}")
    if k_eq_v and text.whole("num_global_key_value_heads", num_kv_heads) != num_kv_heads:
        problem = f"got {text.values['num_global_key_value_heads']}, but per_layer_config says {num_kv_heads}"
        raise text.error("num_global_key_value_heads", problem)


def _read_rope(text: Section, kind: str, head_dim: int) -> RopeSpec:
    """Read the rope of one kind of layer."""
    if text.values.get("rope_parameters") is None:
        for key in ("rope_theta", "rope_local_base_freq"):
            if text.values.get(key) is not None:
                raise text.error(
                    key,
                    "got a value, but rope_parameters is missing",
                    "Gemma 4 sets rope for each kind of layer, in rope_parameters",
                )
    rope = text.section("rope_parameters", _DEFAULT_ROPE).section(kind)
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope_type not in ("default", "proportional"):
        raise rope.error("rope_type", f"got {rope_type!r}, expected 'default' or 'proportional'")
    share, factor = rope.number("partial_rotary_factor", 1.0), rope.number("factor", 1.0)
    if share > 1:
        raise rope.error("partial_rotary_factor", f"got {share:g}, expected at most 1")
    if rope_type == "default" and (share, factor) != (1.0, 1.0):
        key = "partial_rotary_factor" if share != 1.0 else "factor"
        raise rope.error(key, f"got {rope.values[key]!r}, but rope_type 'default' rotates every dim without scaling")
    rotated_dims = 2 * int(share * head_dim // 2)
    if rotated_dims == 0:
        raise rope.error("partial_rotary_factor", f"got {share:g}, which rotates none of the {head_dim} dims")
    return RopeSpec(theta=rope.number("rope_theta"), rotated_dims=rotated_dims, factor=factor)
