"""The reader, its processes and its queue: bounded, and no medium holds up another."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from culet.config import MediaConfig
from culet.errors import BadRequest, ContextTooLong, QueueFull
from culet.line_process import Stopper
from culet.media.held import HeldBytes
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.messages import Question
from culet.media.pool import DecoderPool
from culet.media.queue import MediaQueue
from culet.media.reader import MediaReader
from culet.media.sources import MediaSource, decode_base64, pixel_source, sample_source
from culet.media.spec import MediaSpec, read_media_spec
from culet.models import embedded
from culet.models.towers.spec import read_towers
from tests.media.conftest import LIMITS, PoolInThisProcess
from tests.media.hostile_files import encoded, png
from tests.media.noise import noise, sound

SMALL = encoded("PNG")


def question(data: bytes) -> Question:
    return Question(kind=MediaKind.IMAGE, num_bytes=len(data), budget=70)


# A program that speaks like a decoding process, without its libraries. A medium `hang` never ends.
FAKE = """
import sys, time
from culet.media.messages import Answer, ItemFacts, pack, read_limits, read_question
source, sink = sys.stdin.buffer, sys.stdout.buffer
read_limits(source)
answer = Answer(), []
while True:
    sink.write(b"".join(pack(*answer)))
    sink.flush()
    asked = read_question(source)
    if asked is None:
        break
    if asked[1] == b"hang":
        time.sleep(1000)
    answer = Answer(items=(ItemFacts(b"key", 3, (len(asked[1]),)),)), [asked[1]]
"""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoderPool]:
    """A pool with one fake process."""
    monkeypatch.setattr("culet.line_process.python_command", lambda module: [sys.executable, "-c", FAKE])
    pool = DecoderPool(MediaLimits(num_processes=1, time_limit_s=60.0))
    yield pool
    pool.close()


def test_too_much_memory():
    large = png(6000, 6000, bytes(18001 * 6000))  # takes 100 MB and most of a second
    pool = DecoderPool(replace(LIMITS, max_memory_bytes=64 << 20))
    with pytest.raises(BadRequest, match="image: decoding the image takes too much memory"):
        pool.decode("image", question(large), large)
    assert pool.decode("image", question(SMALL), SMALL).num_tokens == 64
    assert pool.num_replaced == 0
    pool.close()


def test_a_process_that_is_killed_or_stopped_is_replaced(pool: DecoderPool):
    data = bytes(5 << 20)  # more than a pipe holds
    expected = pool.decode("image", question(data), data)
    assert expected.items[0].data == data
    for index, sent in enumerate((signal.SIGSTOP, signal.SIGKILL)):
        os.kill(pool._idle[0].process_id, sent)
        assert pool.decode("image", question(data), data) == expected
        assert pool.num_replaced == index + 1


def test_a_client_that_leaves_frees_the_process(pool: DecoderPool):
    """The process is killed while it works, and the next medium gets a new one."""
    stopper = Stopper()
    threading.Timer(0.5, stopper.stop).start()
    with pytest.raises(BadRequest, match="cancelled"):
        pool.decode("image", question(b"hang"), b"hang", stopper)
    assert not pool._idle
    assert pool.decode("image", question(SMALL), SMALL).num_tokens == 3


def test_a_decoder_that_takes_too_long_is_killed(pool: DecoderPool):
    pool.warm_up()
    process_id = pool._idle[0].process_id
    pool._limits = replace(pool._limits, time_limit_s=0.5)
    with pytest.raises(BadRequest, match=r"image: decoding was stopped after 0.5 s"):
        pool.decode("image", question(b"hang"), b"hang")
    assert pool.num_replaced == 1
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_media_of_a_request_come_in_order(reader: MediaReader, served: MediaReader):
    pictures = [noise(40 + 48 * index, 60, 3) for index in range(4)]
    sources = [pixel_source(picture, name="image", max_soft_tokens=70) for picture in pictures]
    media = asyncio.run(served.read(sources))
    assert media == reader.read_now(sources)
    assert len({medium.items[0].key for medium in media}) == 4


def test_media_are_bounded_by_the_context_and_by_the_memory(served: MediaReader, monkeypatch: pytest.MonkeyPatch):
    sources = [pixel_source(noise(40, 60, 3), name=f"image {index}", max_soft_tokens=70) for index in range(4)]
    (medium,) = asyncio.run(served.read(sources[:1], max_tokens=60))
    assert medium.num_tokens == 60
    with pytest.raises(ContextTooLong, match=r"image \d: the media so far have 120 tokens, but the context holds 119"):
        asyncio.run(served.read(sources[:2], max_tokens=119))
    recording = sample_source(sound(16_000), 16_000, name="clip")
    with pytest.raises(ContextTooLong, match="clip: the media so far have 25 tokens") as raised:
        asyncio.run(served.read([recording], max_tokens=24))
    assert raised.value.hint == "send shorter recordings"
    size = len(medium.items[0].data)
    monkeypatch.setattr(served, "held", HeldBytes(3 * size))
    media = asyncio.run(served.read(sources[:3]))
    assert served.held.num_bytes == 3 * size
    with pytest.raises(QueueFull, match="media: those of all requests"):
        asyncio.run(served.read(sources[:1]))
    del media[0]  # a request ends
    assert served.held.num_bytes == 2 * size
    assert len(asyncio.run(served.read(sources[:1]))) == 1
    assert served.held.num_bytes == 2 * size  # nobody kept it


def test_data_urls(reader: MediaReader):
    text = base64.b64encode(SMALL).decode()
    urls = [f"data:image/png;base64,{text}", f"DATA:;BASE64,{text}"]
    sources = [MediaSource(MediaKind.IMAGE, "image", url=url) for url in urls]
    sources.append(MediaSource(MediaKind.IMAGE, "image", data=SMALL))
    assert len(set(reader.read_now(sources))) == 1
    assert decode_base64("image", MediaKind.IMAGE, text, MediaLimits()) == SMALL


def test_base64_with_line_breaks(reader: MediaReader):
    """As `base64 FILE` and MIME write it. They do not count against the limit."""
    for text in (base64.encodebytes(SMALL).decode(), base64.encodebytes(SMALL).decode().replace("\n", "\r\n")):
        sources = [
            MediaSource(MediaKind.IMAGE, "image", base64=text),
            MediaSource(MediaKind.IMAGE, "image", url=f"data:image/png;base64,{text}"),
        ]
        assert reader.read_now(sources) == reader.read_now([MediaSource(MediaKind.IMAGE, "image", data=SMALL)]) * 2
    full = MediaLimits(max_image_bytes=3000)
    assert len(decode_base64("image", MediaKind.IMAGE, base64.encodebytes(bytes(3000)).decode(), full)) == 3000
    with pytest.raises(BadRequest, match="not valid base64"):
        decode_base64("image", MediaKind.IMAGE, "QU JD", MediaLimits())


def test_base64_is_measured_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(BadRequest, match="expected an image of at most 20 MB"):
        decode_base64("image", MediaKind.IMAGE, "A" * (29 << 20), MediaLimits())


def test_base64_in_steps():
    data = bytes(range(256)) * 13_000  # several steps, and an end that is padded
    text = base64.b64encode(data + b"!").decode()
    assert decode_base64("image", MediaKind.IMAGE, text, MediaLimits()) == data + b"!"
    for wrong in (text[: (1 << 20) - 1] + "=" + text[1 << 20 :], text[:-1], text + "A", "\n" + text[1:], "é" + text[1:]):
        with pytest.raises(BadRequest, match="not valid base64"):
            decode_base64("image", MediaKind.IMAGE, wrong, MediaLimits())


def test_one_bad_medium_fails_the_request(reader: MediaReader):
    sources = [MediaSource(MediaKind.IMAGE, f"content[{index}]", data=data) for index, data in enumerate((SMALL, b"x", SMALL))]
    with pytest.raises(BadRequest, match=r"content\[1\]: this is not an image"):
        asyncio.run(reader.read(sources))


def test_kinds_and_budgets_are_checked_before_anything_runs():
    reader = MediaReader(MediaSpec(frozenset({MediaKind.IMAGE})))
    for source, problem in (
        (MediaSource(MediaKind.AUDIO, "clip", data=b"x"), "clip: got audio, but this model reads image"),
        (MediaSource(MediaKind.IMAGE, "image", data=SMALL, max_soft_tokens=100), "max_soft_tokens"),
        (MediaSource(MediaKind.IMAGE, "image", data=SMALL, detail="ultra"), "detail"),
        (MediaSource(MediaKind.IMAGE, "image", url="file:///etc/passwd"), "got a file: URL"),
    ):
        with pytest.raises(BadRequest, match=problem):
            asyncio.run(reader.read([source]))
    assert not reader.pool._idle
    reader.close()


def test_an_image_that_is_too_narrow_for_the_model_is_refused_before_it_reaches_the_engine():
    reader = MediaReader(MediaSpec(frozenset({MediaKind.IMAGE}), max_side=85), LIMITS)
    reader.pool = PoolInThisProcess(LIMITS)
    narrow = pixel_source(np.zeros((10_000, 1, 3), np.uint8), name="image")
    assert reader.read_now([replace(narrow, max_soft_tokens=70)])[0].num_tokens == 70
    with pytest.raises(BadRequest, match="image: it is 140 soft tokens long, but the model has positions for 85"):
        reader.read_now([replace(narrow, max_soft_tokens=140)])
    reader.close()


def test_the_built_in_model_bounds_its_images():
    config = json.loads((embedded.FOLDER / "target" / "config.json").read_text())
    spec = read_media_spec(config)
    vision = read_towers(config).vision
    assert vision is not None
    assert spec.max_side == vision.max_tokens_on_a_side
    assert spec.budget(MediaKind.IMAGE, detail="high") == 280
    with pytest.raises(BadRequest, match="expected one of 70, 140, 280"):
        spec.budget(MediaKind.IMAGE, max_soft_tokens=560)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (MediaConfig(language_model_only=True), "--language-model-only"),
        (MediaConfig(limit_mm_per_prompt='{"image": 0, "video": 0, "audio": 0}'), "--limit-mm-per-prompt"),
        (MediaConfig(limit_mm_per_prompt='{"image": 0}'), "--limit-mm-per-prompt"),
    ],
)
def test_an_error_names_the_setting_that_turned_media_off(settings: MediaConfig, name: str):
    config = {"model_type": "gemma4", "vision_config": {}}
    reader = MediaReader.of_checkpoint(config, None, settings)
    with pytest.raises(BadRequest, match=f"got an image, but this kind of media is turned off by {name}"):
        reader.check([MediaSource(MediaKind.IMAGE, "image", data=SMALL)])
    with pytest.raises(BadRequest, match="got audio, but this model reads"):
        reader.check([MediaSource(MediaKind.AUDIO, "audio", data=b"x")])
    reader.close()


def test_arrays_of_another_form():
    for wrong, hint in (
        (np.zeros(4, np.uint8), None),
        (np.zeros((4, 4, 2), np.uint8), "pixels[..., 0]"),
        (np.zeros((1, 2, 4, 4, 3), np.uint8), "pixels[0]"),
        (np.zeros((4, 4, 3), np.int64), "pixels.astype('uint8')"),
        (np.zeros((4, 4, 3), np.int8), "pixels.astype('uint8')"),
        (np.zeros((4, 4, 3), ">u2"), "pixels >> 8"),
        (np.zeros((4, 4, 3), ">f4"), "if 1.0 is white"),
        (np.zeros((4, 4, 3), np.uint16), "(pixels >> 8).astype('uint8') if 65535 is white"),
        (np.zeros((4, 4), bool), "255 * pixels.astype('uint8')"),
        ([[[0, 0, 0]]], "numpy.asarray(pixels, dtype='uint8')"),
        ([np.zeros((4, 4, 3), np.uint8)], "give each image on its own"),
        (io.BufferedReader(io.BytesIO(b"x")), "file.read()"),
        (np.zeros((0, 4, 3), np.uint8), None),
        ("text", None),
        (np.zeros((4, 4, 3)), "if 1.0 is white"),
        (np.zeros((3, 4, 5), np.uint8), "put the channels last"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), ".numpy()"),
    ):
        with pytest.raises(BadRequest, match="image: got") as raised:
            pixel_source(wrong, name="image")
        assert hint in raised.value.hint if hint else not raised.value.hint


# The queue


def small_queue(num_threads: int = 1) -> MediaQueue:
    return MediaQueue(num_threads, max_waiting=2, max_waiting_mb=1, purpose="decoded")


class Gate:
    """Work that waits until the gate opens."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.order: list[str] = []
        self.stoppers: list[Stopper] = []

    def work(self, name: str) -> Callable[[Stopper], str]:
        def run(stopper: Stopper) -> str:
            self.order.append(name)
            self.stoppers.append(stopper)
            assert self.event.wait(60)
            return name

        return run


async def settle(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_the_queue_is_bounded():
    async def run() -> None:
        queue, gate = small_queue(), Gate()
        tasks = [asyncio.create_task(queue.run(gate.work(str(index)), 10)) for index in range(3)]
        await settle(lambda: queue.num_waiting == 2)
        with pytest.raises(QueueFull, match="too many media are waiting to be decoded"):
            await queue.run(gate.work("late"), 10)
        assert queue.num_refused == 1
        gate.event.set()
        assert await asyncio.gather(*tasks) == ["0", "1", "2"]
        assert gate.order == ["0", "1", "2"]
        queue.close()

    asyncio.run(run())


def test_the_queue_counts_bytes():
    async def run() -> None:
        queue, gate = small_queue(), Gate()
        first = asyncio.create_task(queue.run(gate.work("a"), 10))
        await settle(lambda: bool(gate.order))
        second = asyncio.create_task(queue.run(gate.work("b"), 900_000))
        await settle(lambda: queue.num_waiting == 1)
        with pytest.raises(QueueFull):
            await queue.run(gate.work("c"), 200_000)
        gate.event.set()
        await asyncio.gather(first, second)
        queue.close()

    asyncio.run(run())


def test_clients_that_left_cost_nothing():
    async def run() -> None:
        queue, gate = small_queue(), Gate()
        running = asyncio.create_task(queue.run(gate.work("running"), 10))
        await settle(lambda: bool(gate.order))
        waiting = asyncio.create_task(queue.run(gate.work("waiting"), 10))
        await settle(lambda: queue.num_waiting == 1)
        waiting.cancel()
        running.cancel()
        await asyncio.gather(waiting, running, return_exceptions=True)
        assert queue.num_waiting == 0
        assert queue.num_dropped == 2
        await settle(lambda: gate.stoppers[0].is_stopped)
        gate.event.set()
        assert await queue.run(gate.work("next"), 10) == "next"
        assert gate.order == ["running", "next"]
        queue.close()

    asyncio.run(run())


def test_short_work_ends_by_itself():
    """Its client has left, but a new process would cost more than the rest of the work."""

    async def run() -> None:
        queue = MediaQueue(1, max_waiting=2, max_waiting_mb=1, purpose="decoded", patience_s=1.0)
        gate = Gate()
        running = asyncio.create_task(queue.run(gate.work("running"), 10))
        await settle(lambda: bool(gate.order))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not gate.stoppers[0].is_stopped
        await settle(lambda: gate.stoppers[0].is_stopped)
        gate.event.set()
        queue.close()

    asyncio.run(run())


def test_videos_leave_a_thread_to_images():
    async def run() -> None:
        queue, gate = small_queue(2), Gate()
        videos = [asyncio.create_task(queue.run(gate.work(f"video {index}"), 10, is_long=True)) for index in range(2)]
        await settle(lambda: queue.num_waiting == 1)
        image = asyncio.create_task(queue.run(gate.work("image"), 10))
        await settle(lambda: len(gate.order) == 2)
        assert gate.order == ["video 0", "image"]
        gate.event.set()
        await asyncio.gather(*videos, image)
        queue.close()

    asyncio.run(run())
