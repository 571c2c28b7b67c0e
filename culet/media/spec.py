"""Read how a checkpoint wants its media: budgets, sizes, token ids. No torch.

The values come from `config.json` and `processor_config.json`, or from the older `preprocessor_config.json` and
`video_preprocessor_config.json`. An absent key has the model's default. A value that Culet does not compute with raises a
CheckpointError that names the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from culet.errors import BadRequest, CheckpointError
from culet.media.items import MediaKind, Medium

BUDGETS = (70, 140, 280, 560, 1120)
MAX_VIDEO_BUDGET = 280  # per frame. 32 frames of 280 tokens are 60 MB of pixels.
PATCH_SIZE, POOLING = 16, 3
TOKEN_SIDE = PATCH_SIZE * POOLING  # one soft token stands for 48 x 48 pixels
SAMPLE_RATE = 16_000
MAX_MEL_SAMPLES = 30 * SAMPLE_RATE  # what the audio tower of E2B and E4B reads at once
MIN_MEL_SAMPLES = 161  # fewer samples give no mel frame
MEL_STRIDE = 4  # mel frames of a soft token. The convolutions shrink the mel bins by as much.
SAMPLES_PER_TOKEN = 640  # of 12B
MAX_CHANNELS = 8  # of a recording, which are averaged
DETAILS = ("low", "auto", "high", "original")  # an image always fills its budget, so its original size changes nothing

# Settings that Culet's arithmetic is written for. A file may repeat them but not change them.
_VISION_FIXED: dict[str, Any] = {
    "patch_size": PATCH_SIZE,
    "pooling_kernel_size": POOLING,
    "do_resize": True,
    "do_rescale": True,
    "do_convert_rgb": True,
    "resample": 3,  # bicubic
    "rescale_factor": 1 / 255,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
}
_MEL_FIXED: dict[str, Any] = {
    "feature_size": 128,
    "sampling_rate": SAMPLE_RATE,
    "padding_value": 0.0,
    "frame_length_ms": 20.0,
    "frame_length": 320,
    "hop_length_ms": 10.0,
    "hop_length": 160,
    "fft_length": 512,
    "min_frequency": 0.0,
    "max_frequency": 8000.0,
    "preemphasis": 0.0,
    "fft_overdrive": False,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 1e-3,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
_SAMPLES_FIXED: dict[str, Any] = {
    "feature_size": SAMPLES_PER_TOKEN,
    "sampling_rate": SAMPLE_RATE,
    "padding_value": 0.0,
    "audio_samples_per_token": SAMPLES_PER_TOKEN,
}


@dataclass(frozen=True)
class MediaTokens:
    """The ids of the placeholders, and of the marks before and after them."""

    image: int = 258880
    video: int = 258884
    audio: int = 258881
    image_begin: int = 255999
    image_end: int = 258882
    audio_begin: int = 256000
    audio_end: int = 258883

    @property
    def all_ids(self) -> frozenset[int]:
        return frozenset(astuple(self))

    def placeholder(self, kind: MediaKind) -> int:
        return {MediaKind.IMAGE: self.image, MediaKind.VIDEO: self.video, MediaKind.AUDIO: self.audio}[kind]

    def marks(self, kind: MediaKind) -> tuple[int, int]:
        """Return the ids before and after the placeholders of an item. Video frames have those of images."""
        return (self.audio_begin, self.audio_end) if kind == MediaKind.AUDIO else (self.image_begin, self.image_end)


@dataclass(frozen=True)
class MediaSpec:
    """What a model can see and hear, and how its media are prepared."""

    kinds: frozenset[MediaKind] = frozenset()
    image_budget: int = 280  # soft tokens of an image, unless the request says otherwise
    video_budget: int = 70  # of each frame
    num_frames: int = 32  # that are taken from a video
    has_mel: bool = True  # audio becomes mel features (E2B, E4B), or stays samples (12B)
    is_whole: bool = False  # the tokens of an image see each other (12B, 26B, 31B)
    max_side: int = 1120  # soft tokens on a side of an image, for which the model has positions
    max_budget: int = BUDGETS[-1]  # that a request may ask for
    tokens: MediaTokens = MediaTokens()

    def budget(self, kind: MediaKind, max_soft_tokens: int | None = None, detail: str | None = None) -> int:
        """Return the most soft tokens of an image or a frame that a request asks for. `max_soft_tokens` outranks `detail`."""
        is_video = kind == MediaKind.VIDEO
        budgets = self.budgets(kind)
        if max_soft_tokens is not None:
            if isinstance(max_soft_tokens, bool) or max_soft_tokens not in budgets:
                known = f"one of {', '.join(map(str, budgets))}{' for each frame' if is_video else ''}"
                raise BadRequest(f"max_soft_tokens: got {max_soft_tokens!r}, expected {known}")
            return int(max_soft_tokens)
        if detail is not None and detail not in DETAILS:
            raise BadRequest(f"detail: got {detail!r}, expected one of {', '.join(DETAILS)}")
        default = self.video_budget if is_video else self.image_budget
        return {"low": budgets[0], "high": budgets[-1], "original": budgets[-1]}.get(detail or "auto", default)

    def budgets(self, kind: MediaKind) -> list[int]:
        """Return the budgets that a request may ask for, for an image or for each frame of a video."""
        most = min(self.max_budget, MAX_VIDEO_BUDGET) if kind == MediaKind.VIDEO else self.max_budget
        return [budget for budget in BUDGETS if budget <= most]

    def check_kind(self, name: str, kind: MediaKind) -> None:
        """Raise if the model has no input of this kind. `name` says in the error which medium it is."""
        if kind not in self.kinds:
            known = ", ".join(sorted(self.kinds)) or "only text"
            raise BadRequest(f"{name}: got {kind.with_article}, but this model reads {known}")

    def check_sides(self, name: str, medium: Medium) -> None:
        """Raise if an image or a frame is longer than the model has positions. `name` says in the error which medium it is."""
        for item in medium.items:
            side = max(item.shape[:2]) // TOKEN_SIDE if item.kind != MediaKind.AUDIO else 0
            if side > self.max_side:
                problem = f"{name}: it is {side} soft tokens long, but the model has positions for {self.max_side}"
                raise BadRequest(problem, hint="send an image that is less narrow, or lower max_soft_tokens")


def target_size(height: int, width: int, budget: int) -> tuple[int, int]:
    """Return the (height, width) to which an image is resized: the largest that fits the budget and keeps the aspect ratio.

    Both are multiples of 48. The order of the operations is that of transformers, because another one rounds differently.
    """
    factor = math.sqrt(budget * POOLING**2 * PATCH_SIZE**2 / (height * width))
    new_height = math.floor(factor * height / TOKEN_SIDE) * TOKEN_SIDE
    new_width = math.floor(factor * width / TOKEN_SIDE) * TOKEN_SIDE
    if new_height == 0:  # the aspect ratio is above the budget
        return TOKEN_SIDE, min(width // height, budget) * TOKEN_SIDE
    if new_width == 0:
        return min(height // width, budget) * TOKEN_SIDE, TOKEN_SIDE
    return new_height, new_width


def num_image_tokens(height: int, width: int) -> int:
    """Return the number of soft tokens of an image of this size, which is one that `target_size` returned."""
    return (height // TOKEN_SIDE) * (width // TOKEN_SIDE)


def num_mel_frames(num_samples: int) -> int:
    """Return the number of valid mel frames: those whose 321st sample is real. 160 zeros come before the samples."""
    return max(0, (num_samples + 160 - 321) // 160 + 1)


def num_mel_tokens(num_frames: int) -> int:
    """Return the number of soft tokens of mel frames. Two convolutions of stride 2 each keep every other frame."""
    return -(-num_frames // MEL_STRIDE)


def sampled_indices(num_total: int, num_frames: int) -> list[int]:
    """Return the indices of the frames that are taken from a video. A video with fewer gives all of them."""
    if num_total <= num_frames:
        return list(range(num_total))
    return [index * num_total // num_frames for index in range(num_frames)]


def read_kinds(config: Mapping[str, Any]) -> frozenset[MediaKind]:
    """Return the kinds of media for which a checkpoint has towers."""
    kinds: set[MediaKind] = set()
    if config.get("vision_config") is not None:
        kinds |= {MediaKind.IMAGE, MediaKind.VIDEO}
    if config.get("audio_config") is not None:
        kinds.add(MediaKind.AUDIO)
    return frozenset(kinds)


def read_media_spec(config: Mapping[str, Any], folder: str | Path | None = None) -> MediaSpec:
    """Read the spec of a checkpoint from its `config.json` and the processor's files in `folder`."""
    is_unified = str(config.get("model_type", "")).startswith("gemma4_unified")
    image, video, audio = _read_sections(Path(folder)) if folder is not None else ({}, {}, {})
    _check_fixed("image_processor", image, {**_VISION_FIXED, "do_normalize": False})
    _check_fixed("video_processor", video, {**_VISION_FIXED, "do_normalize": True, "do_sample_frames": True})
    _check_fixed("feature_extractor", audio, _SAMPLES_FIXED if is_unified else _MEL_FIXED)
    text = config.get("text_config") or {}
    attention = text.get("use_bidirectional_attention", "vision" if is_unified else None)
    return MediaSpec(
        kinds=read_kinds(config),
        image_budget=_read_budget("image_processor", image, 280),
        video_budget=_read_budget("video_processor", video, 70),
        num_frames=_read_count("video_processor.num_frames", video.get("num_frames", 32)),
        has_mel=not is_unified,
        is_whole=attention == "vision",
        max_budget=_read_budget("vision_config", config.get("vision_config") or {}, BUDGETS[-1]),
        max_side=_read_max_side(config.get("vision_config") or {}, is_unified=is_unified),
        tokens=_read_tokens(config),
    )


def _read_sections(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the settings of images, video and audio. The newer file wins."""
    joined = _read_json(folder / "processor_config.json")
    image = joined.get("image_processor") or _read_json(folder / "preprocessor_config.json")
    video = joined.get("video_processor") or _read_json(folder / "video_preprocessor_config.json")
    # The older file has the settings of images and audio together, and only their names tell them apart.
    return image, video, joined.get("feature_extractor") or {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot read the file", hint="download the file again from the model's page") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: got {type(content).__name__}, expected an object")
    return content


def _check_fixed(section: str, values: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for key, expected in fixed.items():
        value = values.get(key, expected)
        if value is None or value == expected:
            continue
        if isinstance(expected, float) and isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-6):
            continue
        hint = "this checkpoint's media cannot be served; use --language-model-only"
        raise CheckpointError(f"{section}.{key}: got {value!r}, expected {expected!r}", hint=hint)


def _read_budget(section: str, values: Mapping[str, Any], default: int) -> int:
    budget = values.get("max_soft_tokens", default)
    if budget not in BUDGETS:
        raise CheckpointError(f"{section}.max_soft_tokens: got {budget!r}, expected one of {', '.join(map(str, BUDGETS))}")
    return int(budget)


def _read_max_side(vision: Mapping[str, Any], *, is_unified: bool) -> int:
    if is_unified:
        return _read_positions("mm_posemb_size", vision.get("mm_posemb_size", 1120))
    return _read_positions("position_embedding_size", vision.get("position_embedding_size", 10240)) // POOLING


def _read_positions(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < POOLING:
        raise CheckpointError(f"vision_config.{name}: got {value!r}, expected a whole number of at least {POOLING}")
    return value


def _read_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
        raise CheckpointError(f"{name}: got {value!r}, expected a whole number from 1 to 1024")
    return value


def _read_tokens(config: Mapping[str, Any]) -> MediaTokens:
    keys = {
        "image": ("image_token_id",),
        "video": ("video_token_id",),
        "audio": ("audio_token_id",),
        "image_begin": ("boi_token_id",),
        "image_end": ("eoi_token_id",),
        "audio_begin": ("boa_token_id",),
        "audio_end": ("eoa_token_id", "eoa_token_index"),
    }
    found = {
        field: value
        for field, names in keys.items()
        for value in [next((config[name] for name in names if config.get(name) is not None), None)]
        if value is not None
    }
    for field, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"config.json: {keys[field][0]}: got {value!r}, expected a token id")
    return MediaTokens(**found)
