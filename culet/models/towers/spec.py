"""Read the vision and audio parts of a `config.json` into plain facts, and count their weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from culet.media.items import MediaKind
from culet.media.spec import MEL_STRIDE
from culet.models.spec import Section

MEL_BINS = 128
# The most that one pass of a tower computes. More items take several passes, so the memory of a pass is bounded.
MAX_PATCHES = 20_480  # 8 images of 280 soft tokens
MAX_TOKENS = 2240  # of an encoder-free embedder, which is 8 images of 280 soft tokens
MAX_FRAMES = 3000  # after subsampling, which is four clips of 30 s
_CHANNELS = 3
_CLIP_BOUNDS = 4  # scalars stored with each clipped linear: input_min, input_max, output_min, output_max
_SUBSAMPLING = [128, 32]  # channels of the two convolutions over frames
_MOST_PIXELS = 1 << 12  # of a patch's side
_HINT = "no Gemma 4 model has this value, and Culet does not support it"


@dataclass(frozen=True)
class VisionSpec:
    """The encoder of E2B, E4B, 26B-A4B and 31B."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    width: int  # of the MLP
    patch_size: int  # pixels on a side
    pooling: int  # patches on a side of a soft token
    num_positions: int  # on each axis
    rope_theta: float
    rms_eps: float
    is_clipped: bool  # linears clamp their input and output
    is_standardised: bool
    out_size: int  # the decoder's hidden size

    @property
    def token_pixels(self) -> int:
        """Pixels on a side of a soft token."""
        return self.patch_size * self.pooling

    @property
    def max_tokens_on_a_side(self) -> int:
        """The most soft tokens on a side of an image. The tower has no positions for more."""
        return self.num_positions // self.pooling

    @property
    def num_weights(self) -> int:
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        num_linears = 7
        layer = 4 * hidden * heads + 2 * self.head_dim + 3 * hidden * self.width + 4 * hidden
        layer += num_linears * _CLIP_BOUNDS * self.is_clipped
        patch = _CHANNELS * self.patch_size**2
        total = hidden * patch + 2 * self.num_positions * hidden + self.num_layers * layer
        return total + 2 * hidden * self.is_standardised + hidden * self.out_size

    def flops(self, num_tokens: int) -> int:
        """Count the operations of the matrix products for an image of `num_tokens` soft tokens."""
        num_patches, heads = num_tokens * self.pooling**2, self.num_heads * self.head_dim
        layer = 2 * num_patches * self.hidden_size * (4 * heads + 3 * self.width) + 4 * num_patches**2 * heads
        patches = 2 * num_patches * _CHANNELS * self.patch_size**2 * self.hidden_size
        return self.num_layers * layer + patches + 2 * num_tokens * self.hidden_size * self.out_size

    def working_bytes(self, itemsize: int) -> int:
        """Estimate the peak memory of activations in the largest pass."""
        widest = max(3 * self.width, 7 * self.num_heads * self.head_dim)
        return MAX_PATCHES * (4 * self.hidden_size + widest) * itemsize


@dataclass(frozen=True)
class UnifiedVisionSpec:
    """The encoder-free embedder of 12B's images: one dense layer over the pixels of a soft token."""

    hidden_size: int
    token_pixels: int  # on a side of a soft token
    num_positions: int
    rms_eps: float
    out_size: int

    @property
    def max_tokens_on_a_side(self) -> int:
        """The most soft tokens on a side of an image. The tower has no positions for more."""
        return self.num_positions

    @property
    def num_weights(self) -> int:
        hidden, pixels = self.hidden_size, _CHANNELS * self.token_pixels**2
        norms = 2 * pixels + 4 * hidden
        return norms + pixels * hidden + hidden + 2 * self.num_positions * hidden + hidden * self.out_size

    def flops(self, num_tokens: int) -> int:
        """Count the operations of the matrix products for an image of `num_tokens` soft tokens."""
        return 2 * num_tokens * self.hidden_size * (_CHANNELS * self.token_pixels**2 + self.out_size)

    def working_bytes(self, itemsize: int) -> int:
        """Estimate the peak memory of activations in the largest pass. Pixel levels and norms take four bytes a value."""
        return MAX_TOKENS * (2 * _CHANNELS * self.token_pixels**2 + 4 * self.hidden_size) * max(itemsize, 4)


@dataclass(frozen=True)
class AudioSpec:
    """The conformer of E2B and E4B."""

    hidden_size: int
    num_layers: int
    num_heads: int
    channels: tuple[int, int]  # of the two convolutions over frames
    conv_width: int  # frames that the depthwise convolution sees
    window: int  # keys that a frame sees, including its own
    logit_cap: float
    residual_weight: float  # of the feed-forward parts
    rms_eps: float
    is_clipped: bool
    tower_size: int  # width of the tower's output
    out_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_weights(self) -> int:
        hidden, (first, second) = self.hidden_size, self.channels
        num_linears = 10
        subsample = 9 * first + first + 9 * first * second + second + (MEL_BINS // MEL_STRIDE) * second * hidden
        feed_forward = 8 * hidden * hidden + 2 * hidden
        attention = 5 * hidden * hidden + self.head_dim
        convolution = 3 * hidden * hidden + hidden * self.conv_width + 2 * hidden
        layer = 2 * feed_forward + attention + convolution + 3 * hidden
        layer += num_linears * _CLIP_BOUNDS * self.is_clipped
        out = self.tower_size
        return subsample + self.num_layers * layer + hidden * out + out + out * self.out_size

    def working_bytes(self, itemsize: int) -> int:
        """Estimate the peak memory of activations in the largest pass. Attention gathers keys and values in float32."""
        return MAX_FRAMES * self.hidden_size * (8 * self.window + 16 * itemsize)


@dataclass(frozen=True)
class UnifiedAudioSpec:
    """The encoder-free embedder of 12B's audio: one projection of the samples of a soft token."""

    num_samples: int
    rms_eps: float
    out_size: int

    @property
    def num_weights(self) -> int:
        return self.num_samples * self.out_size

    def working_bytes(self, itemsize: int) -> int:
        """Estimate the peak memory of activations in the largest pass."""
        return MAX_TOKENS * (2 * self.num_samples + self.out_size) * max(itemsize, 4)


@dataclass(frozen=True)
class TowerSpecs:
    """The towers that a checkpoint has."""

    vision: VisionSpec | UnifiedVisionSpec | None = None
    audio: AudioSpec | UnifiedAudioSpec | None = None

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """The kinds of media that the checkpoint can read."""
        seen = {MediaKind.IMAGE, MediaKind.VIDEO} if self.vision is not None else set()
        return frozenset(seen | ({MediaKind.AUDIO} if self.audio is not None else set()))

    def only(self, kinds: frozenset[MediaKind]) -> TowerSpecs:
        """Return the towers that `kinds` need."""
        sees = bool(kinds & {MediaKind.IMAGE, MediaKind.VIDEO})
        return TowerSpecs(self.vision if sees else None, self.audio if MediaKind.AUDIO in kinds else None)

    @property
    def num_weights(self) -> dict[str, int]:
        """The number of weights of each tower, by its name."""
        named = {"vision": self.vision, "audio": self.audio}
        return {name: spec.num_weights for name, spec in named.items() if spec is not None}

    def working_bytes(self, itemsize: int) -> int:
        """Estimate the peak memory of activations. Towers run one after the other."""
        return max((spec.working_bytes(itemsize) for spec in (self.vision, self.audio) if spec is not None), default=0)


def read_towers(config: Mapping[str, object]) -> TowerSpecs:
    """Read the towers of a `config.json`. A text-only one has none."""
    root = Section(config)
    if root.values.get("text_config") is None:
        return TowerSpecs()
    out_size = root.section("text_config").whole("hidden_size")
    is_unified = str(root.values.get("model_type")).startswith("gemma4_unified")
    vision = root.section("vision_config") if root.values.get("vision_config") is not None else None
    audio = root.section("audio_config") if root.values.get("audio_config") is not None else None
    if is_unified:
        return TowerSpecs(
            None if vision is None else _read_unified_vision(vision, out_size),
            None if audio is None else _read_unified_audio(audio, out_size),
        )
    return TowerSpecs(
        None if vision is None else _read_vision(vision, out_size), None if audio is None else _read_audio(audio, out_size)
    )


def _read_vision(section: Section, out_size: int) -> VisionSpec:
    _check_fixed(section, {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False})
    num_heads, head_dim = section.whole("num_attention_heads", 12), section.whole("head_dim", 64)
    if section.whole("num_key_value_heads", num_heads) != num_heads:
        problem = f"got {section.values['num_key_value_heads']}, expected num_attention_heads, which is {num_heads}"
        raise section.error("num_key_value_heads", problem)
    if head_dim % 4:
        raise section.error("head_dim", f"got {head_dim}, expected a multiple of 4: rope turns pairs on two axes")
    rope = section.section("rope_parameters", {})
    if rope.values.get("rope_type", "axial") not in ("axial", "default"):
        raise rope.error("rope_type", f"got {rope.values['rope_type']!r}, expected 'axial' or 'default'")
    return VisionSpec(
        hidden_size=section.whole("hidden_size", 768),
        num_layers=section.whole("num_hidden_layers", 16),
        num_heads=num_heads,
        head_dim=head_dim,
        width=section.whole("intermediate_size", 3072),
        patch_size=_read_pixels(section, "patch_size", 16),
        pooling=_read_pixels(section, "pooling_kernel_size", 3),
        num_positions=section.whole("position_embedding_size", 10240),
        rope_theta=rope.number("rope_theta", 100.0),
        rms_eps=section.number("rms_norm_eps", 1e-6),
        is_clipped=section.flag("use_clipped_linears"),
        is_standardised=section.flag("standardize"),
        out_size=out_size,
    )


def _read_unified_vision(section: Section, out_size: int) -> UnifiedVisionSpec:
    hidden_size = section.whole("mm_embed_dim", 3840)
    if section.whole("output_proj_dims", hidden_size) != hidden_size:
        raise section.error("output_proj_dims", f"got {section.values['output_proj_dims']}, expected {hidden_size}")
    return UnifiedVisionSpec(
        hidden_size=hidden_size,
        token_pixels=_read_pixels(section, "patch_size", 16) * _read_pixels(section, "pooling_kernel_size", 3),
        num_positions=section.whole("mm_posemb_size", 1120),
        rms_eps=section.number("rms_norm_eps", 1e-6),
        out_size=out_size,
    )


def _read_audio(section: Section, out_size: int) -> AudioSpec:
    _check_fixed(section, {"hidden_act": "silu", "attention_context_right": 0})
    hidden_size, num_heads = section.whole("hidden_size", 1024), section.whole("num_attention_heads", 8)
    if hidden_size % num_heads:
        raise section.error("num_attention_heads", f"got {num_heads}, which does not divide hidden_size {hidden_size}")
    channels = section.values.get("subsampling_conv_channels", _SUBSAMPLING)
    if not isinstance(channels, list | tuple) or len(channels) != 2 or not all(_is_count(each) for each in channels):
        raise section.error("subsampling_conv_channels", f"got {channels!r}, expected two whole numbers")
    return AudioSpec(
        hidden_size=hidden_size,
        num_layers=section.whole("num_hidden_layers", 12),
        num_heads=num_heads,
        channels=(channels[0], channels[1]),
        conv_width=section.whole("conv_kernel_size", 5),
        # The key counts the frame itself twice: with 13, a frame sees itself and 11 frames before it.
        window=section.whole("attention_context_left", 13, least=2) - 1,
        logit_cap=section.number("attention_logit_cap", 50.0),
        residual_weight=section.number("residual_weight", 0.5),
        rms_eps=section.number("rms_norm_eps", 1e-6),
        is_clipped=section.values.get("use_clipped_linears") is None or section.flag("use_clipped_linears"),
        tower_size=section.whole("output_proj_dims", 1536),
        out_size=out_size,
    )


def _read_unified_audio(section: Section, out_size: int) -> UnifiedAudioSpec:
    return UnifiedAudioSpec(section.whole("audio_embed_dim", 640), section.number("rms_norm_eps", 1e-6), out_size)


def _check_fixed(section: Section, fixed: Mapping[str, object]) -> None:
    for key, expected in fixed.items():
        value = section.values.get(key)
        if value is not None and value != expected:
            raise section.error(key, f"got {value!r}, expected {expected!r}", _HINT)


def _read_pixels(section: Section, key: str, default: int) -> int:
    value = section.whole(key, default)
    if value > _MOST_PIXELS:
        raise section.error(key, f"got {value}, expected at most {_MOST_PIXELS}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1 << 16
