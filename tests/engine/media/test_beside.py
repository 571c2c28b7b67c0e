"""Towers run beside steps. Decoding goes on until features are ready: on a CPU with late events, on a GPU with a late tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.images_beside_decode import image_request
from culet.config import build_config
from culet.engine.engine import Engine
from culet.kernels.beside_steps import is_beside_steps
from culet.media.items import MediaItem, MediaKind
from culet.models.checkpoint import open_checkpoint
from culet.models.towers.towers import load_towers
from culet.runner.media.features import FeatureStore, _Encoding
from culet.types import Request, SamplingParams
from tests.engine.media.media_rig import Prompt, Told, ask, clip, image, make, note, run, text
from tests.models.towers import tiny_towers

LATE = 6  # reports until features are ready


class LateEvent:
    """An event that is recorded after it was asked for a few times."""

    def __init__(self) -> None:
        self.num_left = LATE
        self.num_waits = 0

    def query(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0

    def synchronize(self) -> None:
        self.num_left = 0
        self.num_waits += 1


class LateStore(FeatureStore):
    """Features that are ready late, as on a GPU."""

    def __init__(self, store: FeatureStore) -> None:
        super().__init__(store._encoder, torch.device("cpu"))
        self.events: dict[bytes, LateEvent] = {}

    def change(self, drops: Sequence[bytes], encodes: Sequence[MediaItem]) -> None:  # type: ignore[override]
        super().change(drops, encodes)
        if encodes:
            event = LateEvent()
            self._unreported[-1] = _Encoding(self._unreported[-1].keys, event)  # type: ignore[arg-type]
            self.events |= {item.key: event for item in encodes}

    def rows(self, key: bytes) -> Tensor:
        assert self.events[key].num_left <= 0, "a step reads features that are not ready"
        return super().rows(key)


def late_engine(**settings: Any) -> tuple[Engine, LateStore]:
    engine = make("31B", **settings)
    media = engine._worker.media  # type: ignore[attr-defined]
    media.store = LateStore(media.store)
    return engine, media.store


CHAT = Prompt.of("31B", text(12))
SEEN = Prompt.of("31B", text(3), image(2, 5, 1), text(4, 1))


def run_beside(engine: Engine, chat: Request, seen: Request) -> tuple[list[int], list[Told]]:
    """Start a chat, then ask about an image.

    Return how many tokens the chat got in each step until the other's first token, and what both were told.
    """
    told = {request.request_id: Told({}, {}, [], {}) for request in (chat, seen)}
    engine.add(chat)
    while not told[chat.request_id].tokens:
        for delta in engine.step():
            note(told[delta.request_id], delta)
    engine.add(seen)
    per_step: list[int] = []
    while engine.has_work:
        deltas = engine.step()
        if not told[seen.request_id].tokens:
            per_step.append(sum(len(delta.token_ids) for delta in deltas if delta.request_id == chat.request_id))
        for delta in deltas:
            note(told[delta.request_id], delta)
    return per_step, list(told.values())


@pytest.mark.parametrize("has_look_ahead", [False, True])
def test_decode_goes_on_until_features_are_ready(has_look_ahead: bool) -> None:
    settings = {"async_scheduling": has_look_ahead, "max_num_batched_tokens": 64}
    plain = make("31B", **settings)
    _, want = run_beside(plain, ask(plain, "chat", CHAT, 30), ask(plain, "seen", SEEN, 4))
    engine, store = late_engine(**settings)
    per_step, told = run_beside(engine, ask(engine, "chat", CHAT, 30), ask(engine, "seen", SEEN, 4))
    assert [each.tokens for each in told] == [each.tokens for each in want]
    assert len(per_step) > LATE
    assert set(per_step[has_look_ahead:]) == {1}  # the chat got a token in every step
    assert [event.num_waits for event in store.events.values()] == [0]


def test_an_idle_engine_waits_for_features() -> None:
    """If nothing decodes, a plan without rows waits for the tower instead of asking again and again."""
    engine, store = late_engine()
    (told,) = run(engine, ask(engine, "seen", SEEN, 4))
    plain = make("31B")
    assert told.tokens == run(plain, ask(plain, "seen", SEEN, 4))[0].tokens
    assert [event.num_waits for event in store.events.values()] == [1]


@pytest.mark.parametrize("shape", ["E4B", "12B"])
def test_towers_say_that_they_run_beside_steps(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    towers = tiny_towers.towers(shape)
    said = []
    for name in ("vision", "audio"):
        tower = getattr(towers, name)
        monkeypatch.setattr(tower, "encode", lambda items: said.append(is_beside_steps()) or [torch.zeros(1)] * len(items))
    towers.encode([image(2, 3), clip(8) if shape == "E4B" else tiny_towers.waveform(3)])
    assert said == [True, True]
    assert not is_beside_steps()


# On a GPU


class LateTower:
    """Encodes after the GPU has been busy on the tower's stream for about a second."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        torch.cuda._sleep(2_000_000_000)  # cycles
        return self._encoder.encode(items)  # type: ignore[no-any-return]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_decode_goes_on_beside_a_late_tower() -> None:
    settings = {"model": "random:E4B,layers=12,draw=calm", "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 30}
    engine = Engine(build_config(settings), progress=False)
    params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
    chat, seen = engine.rules.make_request("chat", text(12), params), image_request(engine, 280, "late")
    warm_up = image_request(engine, 280, "warm-up")
    run(engine, warm_up)
    store = engine._worker.media.store  # type: ignore[attr-defined]
    tower, store._encoder = store._encoder, LateTower(store._encoder)
    per_step, told = run_beside(engine, chat, seen)
    assert len(per_step) > 50
    assert min(per_step[1:-1]) == 1
    assert len(told[1].tokens[0]) == seen.max_tokens
    assert torch.equal(store.rows(seen.items[0].key), tower.encode(seen.items)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_short_clips_beside_kernels_for_few_tokens() -> None:
    """Both at once give the bits that each gives alone."""
    from culet.kernels.compiling import use_disk_cache
    from culet.kernels.triton.linear import few_tokens

    use_disk_cache()  # from here on, no engine serves
    device = torch.device("cuda")
    checkpoint = open_checkpoint("random:E4B,draw=calm")
    kinds = frozenset({MediaKind.AUDIO})
    towers = load_towers(checkpoint, dtype=torch.bfloat16, device=device, kinds=kinds, progress=False)
    assert towers is not None
    short, beside = clip(70), torch.cuda.Stream(device)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(8, 10240, generator=generator, device=device).bfloat16()
    weight = torch.randn(2560, 10240, generator=generator, device=device).bfloat16()
    assert few_tokens.choose_tile(8, 2560, 10240).split_k > 1
    (features,), product = towers.encode([short]), few_tokens.linear(x, weight)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(beside):
            (rows,) = towers.encode([short])
        products = [few_tokens.linear(x, weight) for _ in range(200)]
        torch.cuda.synchronize()
        assert torch.equal(rows, features)
        assert all(torch.equal(each, product) for each in products)
