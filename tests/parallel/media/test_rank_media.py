"""Ranks with media compute what one process computes. Every rank has the whole towers and encodes every item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from culet.config import build_config
from culet.engine.engine import Engine
from culet.media.items import MediaItem, MediaKind
from culet.runner.worker import ProcessWorker
from tests.parallel import jobs
from tests.parallel.media import media_jobs
from tests.parallel.media.media_jobs import Seen, Told, image, sound
from tests.parallel.ranks import Ranks

SMALL = {"max_num_batched_tokens": 72, "max_num_seqs": 4}
LONG = image(5, 8, 3)  # 40 tokens, more than the window
BEFORE = 41  # tokens before the image, so that it lies on both sides of the edge of a run
SEVERAL = (7, image(2, 3, 1), 1, image(1, 7, 4), 70, image(2, 2, 5, MediaKind.VIDEO), 9)
# The first round has an image, a text beside it and several images. The second continues it in the middle of pages.
FIRST = [Seen((BEFORE, LONG, 30), has_scores=True), Seen((67,), 1, has_scores=True), Seen(SEVERAL, 2, has_scores=True)]
CONTINUED = [
    Seen((BEFORE, LONG, 30)),
    Seen((BEFORE, LONG, 49, image(2, 3, 6), 5)),
    Seen((BEFORE, image(5, 8, 7), 30)),
    Seen((81,), 1),
]
NUM_ITEMS, SHARED_LEN = (
    6,
    BEFORE + LONG.num_tokens,
)  # different items, and the tokens that later prompts share with earlier ones
IMAGE_MASKS = {"12B": ("trained", "transformers"), "26B-A4B": ("trained",), "31B": ("trained",)}
OFTEN = [("12B", 2, "transformers"), ("31B", 2, "trained")]
EVERY = [(shape, size, mask) for shape in jobs.SHAPES for size in (2, 4) for mask in IMAGE_MASKS[shape]]
CASES = OFTEN + [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in OFTEN]


def rounds_of(shape: str) -> list[list[Seen]]:
    """Return the rounds of a model. Only 12B hears."""
    heard: tuple[int | MediaItem, ...] = (5, sound(9), 3) if shape == "12B" else (5,)
    return [[*FIRST, Seen(heard, 3, has_scores=True)], CONTINUED]


def check(found: Told, want: Told) -> None:
    assert found.tokens == want.tokens
    assert len(want.logprobs_TV) == media_jobs.ANSWER_LEN
    torch.testing.assert_close(found.logprobs_TV, want.logprobs_TV, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.scores_TV, want.scores_TV, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("shape", "size", "image_mask"), CASES)
def test_the_same_scores(
    ranks_of: Callable[[int], Ranks], model_of: Callable[[str], str], shape: str, size: int, image_mask: str
) -> None:
    settings: dict[str, Any] = {"model": model_of(shape), "image_mask": image_mask, **SMALL}
    rounds = rounds_of(shape)
    want, counters, tower_bytes = media_jobs.ask(None, settings, rounds)
    for told, own_counters, own_bytes in ranks_of(size).run(media_jobs.ask, settings | {"tensor_parallel_size": size}, rounds):
        for found, wanted in zip(told, want, strict=True):
            check(found, wanted)
        assert own_bytes == tower_bytes
        assert own_counters.encoded_items == counters.encoded_items == NUM_ITEMS + (shape == "12B")
        assert own_counters.prefix_hit_tokens == counters.prefix_hit_tokens >= 2 * SHARED_LEN


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["12B", "31B"])
def test_one_scheduler_for_two_ranks(model_of: Callable[[str], str], shape: str) -> None:
    """The engine sends every item to both processes."""
    settings = {"model": model_of(shape), "device": "cpu", "max_model_len": 512, "dtype": "float32", "async_scheduling": True}
    want = media_jobs.run(Engine(build_config(settings | SMALL), progress=False), rounds_of(shape))
    engine = Engine(build_config(settings | SMALL | {"tensor_parallel_size": 2}), progress=False)
    try:
        assert isinstance(engine._worker, ProcessWorker)
        for found, wanted in zip(media_jobs.run(engine, rounds_of(shape)), want, strict=True):
            check(found, wanted)
        assert engine.stats().counters.encoded_items == NUM_ITEMS + (shape == "12B")
    finally:
        engine.close()
