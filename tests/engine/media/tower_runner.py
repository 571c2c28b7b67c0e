"""A fake runner with towers, which are slow as on a GPU, and a ledger for a scheduler that drives it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from culet.media.items import MediaItem, MediaKind
from culet.scheduler.media.features import FeatureLedger
from culet.types import MediaSpan, Request, StepPlan, StepResult
from tests.engine.scheduler.drive import Drive, make, make_request
from tests.engine.scheduler.fake_runner import FakeRunner

TOKEN_BYTES = 10


def item(number: int, num_tokens: int, kind: MediaKind = MediaKind.IMAGE) -> MediaItem:
    key = f"{kind} {number} {num_tokens}".encode()
    return MediaItem(kind, key, num_tokens, (num_tokens,), bytes(100 * num_tokens))


def ledger(max_tokens: int = 40, max_step_tokens: int = 12, max_item_bytes: int = 1 << 20) -> FeatureLedger:
    return FeatureLedger(frozenset(MediaKind), TOKEN_BYTES, max_tokens * TOKEN_BYTES, max_step_tokens, max_item_bytes)


class TowerRunner(FakeRunner):
    """Raises AssertionError if a row reads features that were not reported, or if something is encoded without need."""

    slowness = 0  # most steps that an item takes
    chance = random.Random(0)

    def start(self, features: FeatureLedger, slowness: int, seed: int) -> None:
        self.ledger, self.slowness, self.chance = features, slowness, random.Random(seed)
        self.held: dict[bytes, int] = {}  # key -> steps until it is ready
        self.reported: set[bytes] = set()
        self.encoded: Counter[bytes] = Counter()
        self.num_empty = 0

    def execute(self, plan: StepPlan) -> StepResult:
        media = {slot: entry.entry.media for slot, entry in self.slots.items()} | {e.slot: e.media for e in plan.entries}
        for key in plan.drops:
            self.held.pop(key)
            self.reported.discard(key)
        for row in plan.rows:
            for span in media[row.slot] if row.leg.is_first else ():
                if span.start < row.start + row.num_new and span.end > row.start:
                    assert span.key in self.reported, "a row reads features that are not ready"
        entered = {entry.slot for entry in plan.entries}
        # A chunk of one token may have logits, too, for log-probabilities of the prompt, but it draws nothing.
        is_decoding = any(row.draw_slots and row.num_new == 1 and row.slot not in entered for row in plan.rows)
        num_tokens = sum(one.num_tokens for one in plan.encodes)
        assert len(plan.encodes) <= 1 or not is_decoding or num_tokens <= self.ledger.max_step_tokens
        for one in plan.encodes:
            assert one.key not in self.held, "an item is encoded although its features exist"
            self.held[one.key] = self.chance.randint(0, self.slowness)
            self.encoded[one.key] += 1
        assert sum(int(key.split()[-1]) for key in self.held) * TOKEN_BYTES == self.ledger.num_bytes <= self.ledger.max_bytes
        if plan.rows:
            result = super().execute(plan)
        else:
            assert not plan.entries
            assert not plan.copies
            self._move(plan)
            self._last_step += 1
            self.num_empty += 1
            result = StepResult(plan.step_id, ())
        for key in self.held:
            self.held[key] = 0 if not plan.rows else self.held[key] - 1
        ready = tuple(key for key, left in self.held.items() if left <= 0 and key not in self.reported)
        self.reported.update(ready)
        return replace(result, encoded=ready)


def drive_towers(features: FeatureLedger, *, slowness: int = 0, seed: int = 0, **settings: object) -> Drive:
    """Make a scheduler with towers that is audited after every move."""
    drive = make(**settings)  # type: ignore[arg-type]
    drive.scheduler.features = features
    drive.runner.__class__ = TowerRunner
    drive.runner.start(features, slowness, seed)  # type: ignore[attr-defined]
    return drive


def ask(name: str, parts: list[list[int] | MediaItem], max_tokens: int = 3, **settings: object) -> Request:
    """Return a request whose prompt has media among its tokens. Audio may be split."""
    tokens: list[int] = []
    spans, items = [], {}
    for part in parts:
        if isinstance(part, MediaItem):
            spans.append(MediaSpan(len(tokens), part.num_tokens, part.key, part.kind is not MediaKind.AUDIO))
            items[part.key] = part
            tokens += [7] * part.num_tokens
        else:
            tokens += part
    request = make_request(name, tokens, max_tokens, media=tuple(spans), **settings)  # type: ignore[arg-type]
    return replace(request, items=tuple(items.values()))


def check_end(drive: Drive) -> None:
    """Check that nothing is left but features and resume points."""
    drive.check_end()
    features = drive.scheduler.features
    assert features is not None
    assert features.num_requests == features.num_item_bytes == 0
    assert drive.scheduler.counters.encoded_items == drive.runner.encoded.total()  # type: ignore[attr-defined]
