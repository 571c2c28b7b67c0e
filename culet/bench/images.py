"""Time requests with images, for the `image` rows of `culet bench offline`.

The tower is timed first, alone. Then the engine answers: one request whose images it has never seen, the same request again,
and all requests of the row together, each with images of its own. Images are 4:3 and resized already, and nothing but features
is reused between requests.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from culet.bench.workloads import IMAGE_TEXT_TOKENS, Workload, make_tokens
from culet.config import Config
from culet.engine.engine import Engine
from culet.engine.resolve import resolve_device, resolve_dtype
from culet.errors import ConfigError, InternalError
from culet.media.items import MediaItem, MediaKind, Medium
from culet.media.prompt import expand_prompt
from culet.models.checkpoint import open_checkpoint
from culet.models.towers.towers import load_towers
from culet.types import FinishReason, Request, SamplingParams

_IMAGES = frozenset({MediaKind.IMAGE})


def make_image(row: Workload, seed: object) -> MediaItem:
    """Make a random image of the row's budget. Equal seeds give equal images."""
    height, width = row.image_size
    name = f"{seed} {height} {width}"
    data = random.Random(name).randbytes(height * width * 3)
    return MediaItem(MediaKind.IMAGE, hashlib.sha256(name.encode()).digest(), row.image_tokens, (height, width, 3), data)


def time_tower(config: Config, row: Workload, best_of: int) -> float:
    """Return the seconds that the tower takes for each image, if it encodes those of one request together."""
    device = resolve_device(config.model.device)
    checkpoint = open_checkpoint(config.model.model, config.model.revision)
    dtype = resolve_dtype(config.model.dtype, device)
    towers = load_towers(checkpoint, dtype=dtype, device=device, kinds=_IMAGES, progress=False)
    if towers is None:
        raise ConfigError(f"rows: {row.label} needs a model that sees images", hint="choose another model or other rows")
    images = [make_image(row, number) for number in range(row.num_images)]
    seconds = []
    for _ in range(best_of + 1):  # the first one warms up
        began = time.perf_counter()
        towers.encode(images)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]) / row.num_images


def measure_requests(engine: Engine, row: Workload, best_of: int) -> dict[str, Any]:
    """Return the time to the first token with features cold and cached, and how many requests are answered per second."""
    if MediaKind.IMAGE not in engine.media.spec.kinds:
        raise ConfigError(f"rows: {row.label} needs images, which are turned off", hint="change --limit-mm-per-prompt")
    _answer(engine, [_make_request(engine, row, "warm-up")])
    times: dict[str, list[float]] = {"cold": [], "cached": []}
    encoded = Counter({"cold": 0, "cached": 0})  # images that the tower has seen
    for number in range(best_of):
        for name, seconds in times.items():
            before = engine.stats().counters.encoded_items
            seconds += _answer(engine, [_make_request(engine, row, f"alone {number}")])[0]
            encoded[name] += engine.stats().counters.encoded_items - before
    _, total_s = _answer(engine, [_make_request(engine, row, f"together {number}") for number in range(row.num_seqs)])
    return {
        "ttft_cold_ms": 1e3 * min(times["cold"]),
        "ttft_cached_ms": 1e3 * min(times["cached"]),
        "requests_per_s": row.num_seqs / total_s,
        "encoded_images": dict(encoded),
    }


def _make_request(engine: Engine, row: Workload, seed: str) -> Request:
    spec = engine.media.spec
    text = make_tokens(IMAGE_TEXT_TOKENS, engine.spec.vocab_size, random.Random(seed), without=spec.tokens.all_ids)
    token_ids = [*[spec.tokens.image] * row.num_images, *text]
    media = [Medium(MediaKind.IMAGE, (make_image(row, f"{seed} {number}"),)) for number in range(row.num_images)]
    prompt = expand_prompt(token_ids, media, spec, lambda text: ())
    params = SamplingParams(temperature=0, max_tokens=row.output_len, ignore_eos=True)
    return engine.rules.make_request(seed, prompt.token_ids, params, media=prompt.spans, items=prompt.items)


def _answer(engine: Engine, requests: Sequence[Request]) -> tuple[list[float], float]:
    """Return the seconds to the first token of each request, and to the end of all."""
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    first: dict[str, float] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.token_ids:
                first.setdefault(delta.request_id, time.perf_counter() - began)
            if delta.finish_reason is FinishReason.ERROR:
                raise InternalError(f"a request with images failed: {delta.error}")
    return list(first.values()), time.perf_counter() - began
