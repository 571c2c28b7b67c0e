"""Tiny checkpoints with towers, prompts with media for them, and what transformers computes in one prefill.

Towers and decoder are random, and no weight has a value that hides mistakes. The oracle's features come from transformers'
own towers. Each prompt is computed in one pass without a cache, because transformers is wrong in chunks.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedAudioConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
)

from culet.config import build_config
from culet.engine.engine import Engine
from culet.media.items import MediaItem, MediaKind
from culet.types import FinishReason, MediaSpan, Request, SamplingParams, TokenDelta
from tests.models import tiny_checkpoints as tiny
from tests.models.towers import tiny_towers
from tests.models.towers.tiny_towers import clip, image, waveform

__all__ = ["IMAGE", "SHAPES", "VOCAB", "WINDOW", "Prompt", "Told", "clip", "image", "make", "waveform"]

SHAPES = ("E4B", "12B", "26B-A4B", "31B")
VOCAB, WINDOW = tiny.VOCAB, tiny.WINDOW
BOI, EOI, IMAGE, VIDEO, BOA, EOA, AUDIO = range(150, 157)
IDS = {
    "boi_token_id": BOI,
    "eoi_token_id": EOI,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "boa_token_id": BOA,
    "eoa_token_index": EOA,
    "audio_token_id": AUDIO,
}
# Factor on q_norm in decoder and towers. Peaked attention makes a rounding error of a feature a hundred times as large in the
# decoder, and each layer of the vision tower makes one of a patch three to four times as large.
CALM = 0.25
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
_CHANGES: dict[str, dict[str, Any]] = {
    "E4B": {"layer_types": _SLIDING * 3, "num_kv_shared_layers": 3},
    "12B": {"layer_types": _SLIDING * 2},
    "26B-A4B": {"layer_types": _SLIDING * 2},
    "31B": {"layer_types": _SLIDING * 2},
}


@functools.cache
def _root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="culet-media-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def oracle(shape: str) -> Any:
    """Return transformers' model, with random weights."""
    torch.manual_seed(40 + SHAPES.index(shape))
    text = tiny.text_config(shape, **_CHANGES[shape])
    if shape == "12B":
        vision = Gemma4UnifiedVisionConfig(mm_embed_dim=64, mm_posemb_size=64, output_proj_dims=64)
        config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=Gemma4UnifiedAudioConfig(), **IDS)
        model = Gemma4UnifiedForConditionalGeneration(config)
    else:
        is_small = shape == "E4B"
        vision = Gemma4VisionConfig(**tiny_towers._VISION, use_clipped_linears=is_small, standardize=not is_small)
        audio = Gemma4AudioConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, output_proj_dims=48)
        config = Gemma4Config(text_config=text, vision_config=vision, audio_config=audio if is_small else None, **IDS)
        model = Gemma4ForConditionalGeneration(config)
    tiny.randomise(model)
    tiny_towers.randomise(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.mul_(CALM)
            if name.endswith("language_model.embed_tokens.weight"):
                weight[BOI:] *= 0.01  # small logits, so that answers have no placeholders
    return model.eval()


@functools.cache
def folder_of(shape: str) -> Path:
    folder = _root() / shape
    oracle(shape).save_pretrained(folder)
    return folder


# Prompts


@dataclass(frozen=True)
class Prompt:
    """Token ids with media among them."""

    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...]
    items: tuple[MediaItem, ...]  # one per span

    @classmethod
    def of(cls, shape: str, *parts: Sequence[int] | MediaItem) -> Prompt:
        """Join texts and media. Media are between their own opening and closing tokens."""
        token_ids: list[int] = []
        media, items = [], []
        for part in parts:
            if not isinstance(part, MediaItem):
                token_ids += part
                continue
            is_audio = part.kind is MediaKind.AUDIO
            soft = {MediaKind.IMAGE: IMAGE, MediaKind.VIDEO: VIDEO, MediaKind.AUDIO: AUDIO}[part.kind]
            span = MediaSpan(len(token_ids) + 1, part.num_tokens, part.key, shape != "E4B" and not is_audio)
            token_ids += [BOA if is_audio else BOI, *[soft] * part.num_tokens, EOA if is_audio else EOI]
            media.append(span)
            items.append(part)
        return cls(tuple(token_ids), tuple(media), tuple(items))

    def then(self, *tokens: int) -> Prompt:
        return replace(self, token_ids=(*self.token_ids, *tokens))

    @property
    def num_soft(self) -> int:
        return sum(span.length for span in self.media)


def text(count: int, seed: int = 0) -> list[int]:
    """Return ordinary tokens."""
    return [5 + token_id % 140 for token_id in tiny.prompt(count, seed)]


# What transformers computes


@functools.cache
def _rows(shape: str, item: MediaItem) -> Tensor:
    return tiny_towers.oracle_rows(oracle(shape), item)


@contextmanager
def _given_features(shape: str, prompt: Prompt) -> Iterator[dict[str, Any]]:
    """Make the oracle's towers return the features of `prompt`, and yield the arguments that make it ask for them.

    Version 5.17 of transformers has no argument for features, and 5.22 needs it for videos.
    """
    model, dummy = oracle(shape).model, torch.zeros(1)
    by_kind = {kind: [_rows(shape, item) for item in prompt.items if item.kind is kind] for kind in MediaKind}
    arguments: dict[str, Any] = {}
    model.get_image_features = lambda *a, **k: SimpleNamespace(pooler_output=tuple(by_kind[MediaKind.IMAGE]))
    model.get_video_features = lambda *a, **k: SimpleNamespace(pooler_output=tuple(by_kind[MediaKind.VIDEO]))
    if by_kind[MediaKind.IMAGE]:
        arguments |= {"pixel_values": dummy, "image_position_ids": dummy}
    if by_kind[MediaKind.VIDEO]:
        arguments |= {"pixel_values_videos": dummy, "video_position_ids": dummy}
    if by_kind[MediaKind.AUDIO]:
        rows = torch.cat(by_kind[MediaKind.AUDIO])[None]
        found = SimpleNamespace(pooler_output=rows, attention_mask=torch.ones(rows.shape[:2], dtype=torch.bool))
        model.get_audio_features = lambda *a, **k: found
        arguments |= {"input_features": dummy, "input_features_mask": dummy}
    try:
        yield arguments
    finally:
        for name in ("get_image_features", "get_video_features", "get_audio_features"):
            model.__dict__.pop(name, None)


def types_of(prompt: Prompt) -> Tensor:
    """Return mm_token_type_ids: 1 for images, 2 for video, 3 for audio."""
    types = {IMAGE: 1, VIDEO: 2, AUDIO: 3}
    covered = {position for span in prompt.media for position in range(span.start, span.end)}
    ids = [types.get(token_id, 0) if place in covered else 0 for place, token_id in enumerate(prompt.token_ids)]
    return torch.tensor([ids])


@functools.cache
@torch.inference_mode()
def oracle_logprobs(shape: str, prompt: Prompt, *, with_types: bool = True) -> Tensor:
    """Return log-probabilities [T, V] after each token, from one prefill without a cache."""
    with _given_features(shape, prompt) as arguments:
        arguments |= {"mm_token_type_ids": types_of(prompt)} if with_types else {}
        logits = oracle(shape)(input_ids=torch.tensor([prompt.token_ids]), use_cache=False, **arguments).logits
    return logits[0].float().log_softmax(-1)


# The engine


def make(shape: str, **settings: Any) -> Engine:
    """Build an engine without a tokenizer. Its 12B follows transformers' mask, unless told otherwise."""
    defaults: dict[str, Any] = {
        "model": str(folder_of(shape)),
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "image_mask": "transformers",
    }
    return Engine(build_config(defaults | settings), progress=False)


@dataclass
class Told:
    """What an engine said about a request, by sample."""

    tokens: dict[int, list[int]]
    logprobs: dict[int, list[Any]]
    scores: list[Any]
    reasons: dict[int, FinishReason]
    num_cached: int = 0
    error: str = ""


def ask(engine: Engine, name: str, prompt: Prompt, num_tokens: int = 4, **settings: Any) -> Request:
    """Return a request for `prompt` that is greedy, unless told otherwise."""
    priority = settings.pop("priority", 0)
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "seed": 0} | settings))
    items = tuple({item.key: item for item in prompt.items}.values())
    return engine.rules.make_request(name, prompt.token_ids, params, media=prompt.media, items=items, priority=priority)


def run(engine: Engine, *requests: Request) -> list[Told]:
    """Run requests to their ends."""
    told = {request.request_id: Told({}, {}, [], {}) for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(5000):
        if not engine.has_work:
            break
        for delta in engine.step():
            note(told[delta.request_id], delta)
    assert not engine.has_work, "the engine does not come to an end"
    return list(told.values())


def note(told: Told, delta: TokenDelta) -> None:
    told.tokens.setdefault(delta.sample, []).extend(delta.token_ids)
    told.logprobs.setdefault(delta.sample, []).extend(delta.logprobs)
    told.scores += delta.prompt_logprobs
    told.num_cached = max(told.num_cached, delta.num_cached_tokens)
    told.error = told.error or delta.error
    if delta.finish_reason is not None:
        told.reasons[delta.sample] = delta.finish_reason


def table(scores: Sequence[Any]) -> Tensor:
    """Return log-probabilities of all tokens as [T, V]."""
    return torch.tensor([[row[token_id] for token_id in range(VOCAB)] for row in scores])


def check_scores(shape: str, prompt: Prompt, told: Told, **options: bool) -> None:
    """Compare the log-probabilities after every prompt token but the last with the oracle's."""
    expected = oracle_logprobs(shape, prompt, **options)[: len(prompt.token_ids) - 1]
    torch.testing.assert_close(table(told.scores), expected, rtol=0, atol=1e-4)


def check_answer(shape: str, prompt: Prompt, told: Told, **options: bool) -> None:
    """Compare a greedy answer, and the log-probabilities behind each of its tokens if there are any, with the oracle's."""
    for sample, tokens in told.tokens.items():
        expected = oracle_logprobs(shape, prompt.then(*tokens), **options)[len(prompt.token_ids) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()
        if told.logprobs[sample]:
            torch.testing.assert_close(table(told.logprobs[sample]), expected, rtol=0, atol=1e-4)
