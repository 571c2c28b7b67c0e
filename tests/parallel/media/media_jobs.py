"""Prompts with media, and what engines say about them. `ask` runs on every rank, or with None in the process of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from culet.config import build_config
from culet.engine.engine import Engine
from culet.engine.resolve import resolve
from culet.engine.start.worker import build_in_group
from culet.media.items import MediaItem, MediaKind, Medium
from culet.media.prompt import expand_prompt
from culet.media.spec import SAMPLES_PER_TOKEN, TOKEN_SIDE
from culet.parallel.group import RankGroup
from culet.scheduler.stats import Counters
from culet.types import FinishReason, Logprobs, Request, SamplingParams
from tests.parallel.jobs import prompt

FIRST_WORD = 120  # smaller ids are special tokens
ANSWER_LEN = 6


@dataclass(frozen=True)
class Seen:
    """A request with media, which come in the order of `parts` among texts. A number stands for a text of that length."""

    parts: tuple[int | MediaItem, ...]
    seed: int = 0
    has_scores: bool = False  # whether the prompt's log-probabilities are wanted, which rules out a prefix hit


def image(rows: int, columns: int, seed: int = 0, kind: MediaKind = MediaKind.IMAGE) -> MediaItem:
    """Return a random image of `rows` x `columns` soft tokens."""
    shape = rows * TOKEN_SIDE, columns * TOKEN_SIDE, 3
    data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).tobytes()
    return MediaItem(kind, f"{kind} {seed} {shape}".encode(), rows * columns, shape, data)


def sound(num_tokens: int, seed: int = 0) -> MediaItem:
    """Return random samples for 12B."""
    shape = num_tokens, SAMPLES_PER_TOKEN
    data = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32).tobytes()
    return MediaItem(MediaKind.AUDIO, f"sound {seed} {shape}".encode(), num_tokens, shape, data)


@dataclass(frozen=True)
class Told:
    """What an engine said about a request."""

    tokens: list[int]
    logprobs_TV: Tensor  # behind each token of the answer
    scores_TV: Tensor  # after each token of the prompt but the last, if wanted


def run(engine: Engine, rounds: Sequence[Sequence[Seen]]) -> list[Told]:
    """Return what the engine says about each request. The requests of a round run together, one round after another."""
    found: dict[str, tuple[list[int], list[Logprobs], list[Logprobs]]] = {}
    for number, requests in enumerate(rounds):
        for index, seen in enumerate(requests):
            request = _request(engine, f"{number}.{index}", seen)
            found[request.request_id] = [], [], []
            engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                assert delta.finish_reason is not FinishReason.ERROR, delta
                tokens, logprobs, scores = found[delta.request_id]
                tokens += delta.token_ids
                logprobs += delta.logprobs
                scores += delta.prompt_logprobs
    size = engine.spec.vocab_size
    return [Told(tokens, _table(logprobs, size), _table(scores, size)) for tokens, logprobs, scores in found.values()]


def ask(
    group: RankGroup | None, settings: Mapping[str, Any], rounds: Sequence[Sequence[Seen]]
) -> tuple[list[Told], Counters, int]:
    """Return what the engine said, its counters, and the bytes of its towers. Each rank schedules for itself."""
    config = build_config({"device": "cpu", "max_model_len": 512, "max_step_ms": 0, "dtype": "float32", **settings})
    if group is None:
        engine = Engine(config, progress=False)
    else:
        setup = resolve(config, group.rank.index)
        engine = Engine(config, progress=False, make_worker=lambda num_slabs, _: build_in_group(setup, group, num_slabs))
    store = engine._worker.media.store  # type: ignore[attr-defined]
    return run(engine, rounds), engine.stats().counters, store._encoder.num_bytes


def _request(engine: Engine, request_id: str, seen: Seen) -> Request:
    tokens, spec = engine.media.spec.tokens, engine.media.spec
    token_ids: list[int] = []
    media = []
    for part in seen.parts:
        if isinstance(part, MediaItem):
            token_ids.append(tokens.placeholder(part.kind))
            media.append(Medium(part.kind, (part,), (0.0,) if part.kind is MediaKind.VIDEO else ()))
        else:
            begin = len(token_ids)
            token_ids += [FIRST_WORD + each % 300 for each in prompt(begin + part, seen.seed)[begin:]]
    expanded = expand_prompt(token_ids, media, spec, lambda text: (FIRST_WORD, FIRST_WORD + 1))
    every = engine.spec.vocab_size
    params = SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER_LEN,
        ignore_eos=True,
        logprobs=every,
        prompt_logprobs=every if seen.has_scores else None,
    )
    return engine.rules.make_request(request_id, expanded.token_ids, params, media=expanded.spans, items=expanded.items)


def _table(scores: Sequence[Logprobs], vocab_size: int) -> Tensor:
    return torch.tensor([[row[token_id] for token_id in range(vocab_size)] for row in scores])
