"""Tiny random checkpoints with towers, saved with transformers, in which no weight has a value that hides mistakes.

Norms are drawn from 0.5 to 1.5, clip bounds differ between projections and are narrow enough to clamp, and features are
standardised with random values. The decoders are as small as possible, because no test here runs them.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAudioConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
)

from culet.media.items import MediaItem, MediaKind
from culet.models.checkpoint import open_checkpoint
from culet.models.towers import Towers, load_towers

SHAPES = ("E4B", "12B", "26B-A4B", "31B")
HIDDEN = 80
TOKEN_PIXELS = 48
_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 24,  # neither a power of two nor hidden_size / num_heads
    "position_embedding_size": 256,
}
# Bounds of linears whose input or output is small in a tiny model, so that wider ones would never clamp, or hide others.
_BOUNDS = {(name, f"output_{side}"): 0.3 for name in ("down_proj", "ffw_layer_2", "linear_end") for side in ("min", "max")}
_BOUNDS |= {
    ("down_proj", "input_min"): 0.3,
    ("ffw_layer_2", "input_min"): 0.2,
    ("ffw_layer_2", "input_max"): 2.0,
    ("linear_end", "input_min"): 0.2,
}
_IDS = {"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62}


@functools.cache
def _root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="culet-towers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def build(shape: str) -> Any:
    """Build an unsaved transformers model of a shape."""
    torch.manual_seed(10 + SHAPES.index(shape))
    if shape == "12B":
        text = Gemma4UnifiedTextConfig(**{key: value for key, value in _TEXT.items() if "per_layer" not in key})
        vision = Gemma4UnifiedVisionConfig(mm_embed_dim=64, mm_posemb_size=64, output_proj_dims=64)
        config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=Gemma4UnifiedAudioConfig(), **_IDS)
        model = Gemma4UnifiedForConditionalGeneration(config)
    else:
        is_small = shape == "E4B"
        vision = Gemma4VisionConfig(**_VISION, use_clipped_linears=is_small, standardize=not is_small)
        audio = Gemma4AudioConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, output_proj_dims=48)
        config = Gemma4Config(
            text_config=Gemma4TextConfig(**_TEXT), vision_config=vision, audio_config=audio if is_small else None, **_IDS
        )
        model = Gemma4ForConditionalGeneration(config)
    randomise(model)
    return model.eval()


@torch.no_grad()
def randomise(model: Any) -> None:
    """Draw every weight of the towers so that no mistake stays hidden."""
    for name, weight in [*model.model.named_parameters(), *model.model.named_buffers()]:
        if name.startswith("language_model") or name.endswith(("inv_freq", "inv_timescales", "softcap")):
            continue
        ending = name.rpartition(".")[2]
        if ending.endswith(("_min", "_max")):
            bound = _BOUNDS.get((name.split(".")[-2], ending), 1.0)
            weight.copy_(torch.empty(()).uniform_(0.7, 1.1) * (-bound if ending.endswith("_min") else bound))
        elif "norm" in name or "_ln" in name or ending == "std_scale":
            weight.uniform_(0.5, 1.5)
        elif ending in ("std_bias", "bias", "per_dim_scale"):
            weight.normal_(0, 0.5)
        elif ending in ("position_embedding_table", "pos_embedding"):
            weight.normal_(0, 1)
        else:
            weight.normal_(0, weight[0].numel() ** -0.5 if weight.dim() > 1 else 1.0)


@functools.cache
def checkpoint_folder(shape: str, dtype: str = "float32") -> Path:
    """Return the folder of a shape's saved checkpoint."""
    folder = _root() / f"{shape}-{dtype}"
    build(shape).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@functools.cache
def oracle(shape: str, dtype: str = "float32", run_dtype: str = "float32") -> Any:
    """Return transformers' model of a saved checkpoint.

    Its attention is not eager, because its audio tower takes the float mask of eager attention for the opposite of its own.
    """
    kind = Gemma4UnifiedForConditionalGeneration if shape == "12B" else Gemma4ForConditionalGeneration
    folder = checkpoint_folder(shape, dtype)
    return kind.from_pretrained(folder, dtype=getattr(torch, run_dtype)).eval()


ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "progress": False}


def load_folder(folder: Path, **settings: Any) -> Towers | None:
    return load_towers(open_checkpoint(str(folder)), **(ON_CPU | settings))


def load(shape: str, stored_dtype: str = "float32", **settings: Any) -> Towers | None:
    return load_folder(checkpoint_folder(shape, stored_dtype), **settings)


@functools.cache
def towers(shape: str, dtype: str = "float32", run_dtype: str = "float32") -> Towers:
    """Return Culet's towers of a saved checkpoint."""
    loaded = load(shape, dtype, dtype=getattr(torch, run_dtype))
    assert loaded is not None
    return loaded


# Media


def image(rows: int, columns: int, seed: int = 0, kind: MediaKind = MediaKind.IMAGE) -> MediaItem:
    """Return a random image of `rows` x `columns` soft tokens."""
    shape = rows * TOKEN_PIXELS, columns * TOKEN_PIXELS, 3
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return image_of(pixels, kind)


def image_of(pixels: np.ndarray, kind: MediaKind = MediaKind.IMAGE) -> MediaItem:
    height, width, _ = pixels.shape
    data = np.ascontiguousarray(pixels).tobytes()
    num_tokens = height // TOKEN_PIXELS * (width // TOKEN_PIXELS)
    return MediaItem(kind, hashlib.sha256(data).digest(), num_tokens, pixels.shape, data)


def clip(num_frames: int, seed: int = 0) -> MediaItem:
    """Return random mel features of valid frames, for the conformer."""
    return rows_of(np.random.default_rng(seed).normal(-3, 2, (num_frames, 128)), -(-num_frames // 4))


def waveform(num_tokens: int, seed: int = 0) -> MediaItem:
    """Return random samples for 12B."""
    return rows_of(np.random.default_rng(seed).uniform(-1, 1, (num_tokens, 640)), num_tokens)


def rows_of(values: np.ndarray, num_tokens: int) -> MediaItem:
    data = values.astype(np.float32).tobytes()
    return MediaItem(MediaKind.AUDIO, hashlib.sha256(data).digest(), num_tokens, values.shape, data)


# What transformers makes of them


def processed(item: MediaItem, patch: int) -> tuple[Tensor, Tensor]:
    """Return what transformers' processors make of a resized image: patches [1, T, V] and positions [1, T, 2].

    Patches are in rows over the image. Its image processor multiplies by 1 / 255, and its video processor divides by 255.
    """
    height, width, _ = item.shape
    pixels = torch.from_numpy(np.frombuffer(item.data, dtype=np.uint8).reshape(item.shape).copy())
    values = pixels / 255.0 if item.kind is MediaKind.VIDEO else pixels * (1 / 255)
    rows, columns = height // patch, width // patch
    patches = values.view(rows, patch, columns, patch, 3).transpose(1, 2).reshape(1, rows * columns, -1)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return patches, torch.stack((x, y), -1).view(1, -1, 2)


@torch.no_grad()
def oracle_rows(model: Any, item: MediaItem) -> Tensor:
    """Return transformers' rows [num_tokens, D] of an item."""
    is_unified = isinstance(model, Gemma4UnifiedForConditionalGeneration)
    if item.kind is not MediaKind.AUDIO:
        found = model.model.get_image_features(*processed(item, TOKEN_PIXELS if is_unified else 16), return_dict=True)
        return torch.cat(list(found.pooler_output)) if isinstance(found.pooler_output, tuple) else found.pooler_output
    values = torch.from_numpy(np.frombuffer(item.data, dtype=np.float32).reshape(1, *item.shape).copy())
    found = model.model.get_audio_features(values, torch.ones(values.shape[:2], dtype=torch.bool), return_dict=True)
    return found.pooler_output[0]
