"""Requests and plans with media between processes, and the steps that rehearse images."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from culet.attention.torch_cpu import TorchCPUBackend
from culet.cache.spec import plan_cache
from culet.config import ScheduleConfig, build_config
from culet.engine.engine import Engine
from culet.engine.start.rehearsal import Rehearsal
from culet.frames import FrameReader
from culet.media.items import MediaItem, MediaKind
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from culet.runner.media.step_media import ImageMask, SlotMedia, StepMedia, image_mask
from culet.runner.worker import ProcessWorker, RunStep, StepDone
from culet.runner.worker import command_decoder as worker_commands
from culet.runner.worker import report_decoder as worker_reports
from culet.serve.process.wire import Item, Submit, command_decoder, submit_frames
from culet.types import Entry, MediaSpan, Row, StepPlan, StepResult
from tests.engine.media.media_rig import VOCAB, Prompt, ask, folder_of, image, make, run, text
from tests.engine.media.tower_runner import ask as ask_scheduler
from tests.engine.media.tower_runner import item
from tests.engine.scheduler.drive import make_layout
from tests.samplings import PLAIN


def test_media_cross_to_the_engine_process() -> None:
    """An image of the largest budget and a video of 32 frames, which are not copied, and whose bytes arrive in pieces."""
    data = hashlib.shake_128(b"pixels").digest(1584 * 1584 * 3)
    large = MediaItem(MediaKind.IMAGE, b"k" * 32, 1089, (1584, 1584, 3), data)
    frames = [MediaItem(MediaKind.VIDEO, bytes([n]) * 32, 66, (288, 528, 3), data[: 288 * 528 * 3]) for n in range(32)]
    request = ask_scheduler("a", [[5, 6], large, [7], *frames, [8]])
    parts = list(submit_frames(request))
    assert all(any(part is item.data for part in parts) for item in request.items)
    assert sum(len(part) for part in parts if not any(part is item.data for item in request.items)) < 10_000
    message = b"".join(parts)
    reader = FrameReader(command_decoder)
    received = [found for begin in range(0, len(message), 1 << 20) for found in reader.push(message[begin : begin + (1 << 20)])]
    assert received == [*map(Item, request.items), Submit(replace(request, items=()))]
    assert request.num_item_bytes == len(data) + 32 * 288 * 528 * 3


def test_plans_and_results_cross_to_a_worker() -> None:
    plan = StepPlan(3, (), (), (), (b"\x00\xff",), (item(1, 4),))
    encode = msgspec.msgpack.encode
    assert worker_commands.decode(encode(RunStep(plan))) == RunStep(plan)
    done = StepDone(StepResult(3, (), {}, (b"\x00\xff",)), {})
    assert worker_reports.decode(encode(done)) == done


@pytest.mark.slow
def test_towers_in_another_process() -> None:
    """An engine whose worker is a process gives the same answers, and its features are reported across."""
    prompts = [Prompt.of("31B", text(9, seed), image(2, 5, seed), text(7, seed)) for seed in range(3)]
    here = make("31B")
    expected = run(here, *(ask(here, str(i), p, 6, logprobs=VOCAB) for i, p in enumerate(prompts)))
    settings: dict[str, Any] = {
        "model": str(folder_of("31B")),
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": here.layout.slab_bytes * 64,
    }

    def make_worker(num_slabs: int, max_model_len: int) -> ProcessWorker:
        arguments = {"settings": settings, "num_slabs": num_slabs, "max_model_len": max_model_len}
        return ProcessWorker("culet.engine.start.worker:build_worker", **arguments)

    engine = Engine(build_config(settings), progress=False, make_worker=make_worker)
    found = run(engine, *(ask(engine, str(i), p, 6, logprobs=VOCAB) for i, p in enumerate(prompts)))
    assert [told.tokens for told in found] == [told.tokens for told in expected]
    assert engine.stats().counters.encoded_items == 3
    engine.close()


# Masks


W = 16
LAYOUT = make_layout((W, 8), (None, 8))


class Store:
    def rows(self, key: bytes) -> torch.Tensor:
        return torch.zeros(100, 4)


def step_media(mask: ImageMask, start: int, num_new: int, spans: list[MediaSpan]) -> StepMedia | None:
    slots = SlotMedia(mask, Store())  # type: ignore[arg-type]
    slots.enter([Entry(0, (1,) * 200, 200, PLAIN, media=tuple(spans))])
    return slots.find([Row(0, start, num_new, 1, (), ())])


def intervals(mask: ImageMask) -> list[list[list[int]] | None]:
    """Return the keys that tokens 20 to 59 see, by group. Tokens 25 to 48 are an image of 24 tokens, longer than the window."""
    import numpy as np

    found = step_media(mask, 20, 40, [MediaSpan(25, 24, b"k")])
    assert found is not None
    seen = [found.visible(group, np.arange(20, 60)) for group in LAYOUT.groups]
    return [None if one is None else one.T.tolist() for one in seen]


def causal(position: int) -> list[int]:
    return [max(0, position - W + 1), position]


def test_clipped_masks() -> None:
    """Traps 1 and 3: the first token sees the last, the last does not see the first, and global layers are causal."""
    sliding, full = intervals(ImageMask.CLIPPED)
    assert full is None
    assert sliding == [[p - W + 1, 48] if 25 <= p <= 48 else causal(p) for p in range(20, 60)]


def test_whole_masks() -> None:
    """Trap 1: as transformers computes 12B."""
    sliding, full = intervals(ImageMask.WHOLE)
    assert full == [[0, 48] if 25 <= p <= 48 else [0, p] for p in range(20, 60)]
    assert sliding == [[min(25, p - W + 1), 48] if 25 <= p <= 48 else causal(p) for p in range(20, 60)]


def test_causal_masks() -> None:
    """Trap 2."""
    assert intervals(ImageMask.CAUSAL) == [None, None]
    found = step_media(ImageMask.CLIPPED, 20, 40, [MediaSpan(25, 24, b"k", is_whole=False)])
    assert found is not None
    assert found.first_T is None


def test_which_mask() -> None:
    rules = {
        (attention, setting): image_mask(attention, setting)
        for attention in ("causal", "sliding", "all")
        for setting in ("trained", "transformers")
    }
    assert [mask for (attention, _), mask in rules.items() if attention == "causal"] == [ImageMask.CAUSAL] * 2
    assert [mask for (attention, _), mask in rules.items() if attention == "sliding"] == [ImageMask.CLIPPED] * 2
    assert rules["all", "trained"] is ImageMask.CLIPPED
    assert rules["all", "transformers"] is ImageMask.WHOLE


def test_a_slot_forgets_its_media_once_they_are_computed() -> None:
    """After that, a step does not look for media at all."""
    slots = SlotMedia(ImageMask.CAUSAL, Store())  # type: ignore[arg-type]
    slots.enter([Entry(0, (1, 9, 1), 3, PLAIN, media=(MediaSpan(1, 1, b"k"),)), Entry(1, (1, 1), 2, PLAIN)])
    found = slots.find([Row(1, 0, 2, 1, (), ()), Row(0, 0, 2, 1, (), ())])
    assert found is not None
    assert found.index_M.tolist() == [3]
    assert slots.find([Row(0, 2, 1, 1, (), ())]) is None
    assert not slots._slots


def test_images_are_rehearsed_where_their_tokens_see_each_other() -> None:
    checkpoint = open_checkpoint(str(folder_of("31B")))
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    layout = plan_cache(model.spec.kv_specs(4, latent=True))
    backends = [TorchCPUBackend(group, model.spec.layers[0].num_heads) for group in layout.groups]
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=300)
    masked = []
    for mask in (ImageMask.CAUSAL, ImageMask.CLIPPED):
        options = {"max_model_len": 400, "has_graphs": False, "image_mask": mask}
        rehearsal = Rehearsal(model, layout, backends, schedule, PLAIN, **options)  # type: ignore[arg-type]
        runner = rehearsal._runner()
        plans = list(rehearsal._image_steps())
        assert len(plans) == (0 if mask is ImageMask.CAUSAL else 4)
        for plan in plans:
            runner.launch(plan).result()
            media = None if not plan.rows else runner.media.find(plan.rows)
            masked.append(media is not None and media.first_T is not None)
    assert masked == [False, True, True, True]
