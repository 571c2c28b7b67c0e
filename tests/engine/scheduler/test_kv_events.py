"""KV events: a consumer that knows only the format agrees with the engine about what can be resumed."""

from __future__ import annotations

import random
from array import array
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from culet.cache.changes import PointRemoved, PointStored
from culet.cache.content import PrefixContent
from culet.cache.point_tree import MIN_SHARED
from culet.cache.prefix import PrefixCache
from culet.errors import ConfigError
from culet.serve.process.kv_events import (
    EventMaker,
    KVEventPublisher,
    KVEventsConfig,
    block_hash,
    block_keys,
    of_rank,
    read_kv_events,
)
from culet.types import Drawn, StepResult
from tests.engine.scheduler.drive import make, make_request, try_add

BLOCK = 8  # tokens


class Router:
    """Follows batches as a router does that knows groups. Written from the description of the format."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, dict[str, Any]]] = {}  # group -> hash -> what was stored
        self.windows: dict[int, int | None] = {}
        self.next_number = 0

    def receive(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next_number
        self.next_number += 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            group = self.blocks.setdefault(event["group_idx"], {})
            if event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del group[block]
                continue
            size, parent = event["block_size"], event["parent_block_hash"]
            kind = event["kv_cache_spec_kind"]
            self.windows[event["group_idx"]] = event["kv_cache_spec_sliding_window"] if kind == "sliding_window" else None
            for index, block in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][index * size : (index + 1) * size]
                assert len(tokens) == size
                assert block not in group
                group[block] = {"parent": parent, "tokens": tokens, "size": size, "extra": event["extra_keys"][index]}
                parent = block

    def run_of(self, block: int) -> list[int] | None:
        """Return the blocks of a run in the group that needs them all, or None if one is missing."""
        whole = self.blocks.get(0, {})
        run: list[int] = []
        current: int | None = block
        while current is not None:
            if current not in whole:
                return None
            run.append(current)
            current = whole[current]["parent"]
        return run[::-1]

    def resumable(self) -> set[int]:
        """Return the last blocks of the prefixes that can be resumed: the run is complete, and each window's blocks exist."""
        found = set()
        for block in self.blocks.get(0, {}):
            run = self.run_of(block)
            needed = {
                group: -(-(window - 1) // self.blocks[0][block]["size"])
                for group, window in self.windows.items()
                if window is not None
            }
            if run and all(set(run[-count:]) <= set(self.blocks.get(group, {})) for group, count in needed.items()):
                found.add(block)
        return found

    def tokens_of(self, block: int) -> list[int]:
        run = self.run_of(block)
        assert run is not None
        return [token for each in run for token in self.blocks[0][each]["tokens"]]


def resumable_blocks(cache: PrefixCache) -> set[int]:
    """Return the blocks after which the engine can resume a prompt that has them, from its points alone."""
    found = set()
    for point in cache.resume_points():
        keys = block_keys(cache._tree.content_of(point.point_id), point.salt, BLOCK)
        for number in range(1, len(keys)):
            if number == len(keys) - 1 or max(point.earliest, MIN_SHARED) <= number * BLOCK:
                found.add(block_hash(keys[number]))
    return found


@pytest.mark.parametrize("num_steps", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_consumer_agrees_with_the_engine_after_random_steps(num_steps: int) -> None:
    rng = random.Random(5)
    drive = make(num_pages=60, seqs=6, budget=48)
    scheduler = drive.scheduler
    cache = scheduler.page_allocator.prefix
    assert cache is not None
    cache.record_changes()
    maker, router = EventMaker(BLOCK), Router()
    stems = [[rng.randrange(1, 40) for _ in range(50)] for _ in range(6)]
    num_added = num_removed = num_compared = 0
    for step in range(num_steps):
        if rng.random() < 0.4:
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, 50)] + [rng.randrange(1, 40) for _ in range(rng.randrange(1, 8))]
            salt = "tenant" if rng.random() < 0.1 else ""
            request = make_request(str(num_added), prompt, rng.randrange(1, 12), cache_salt=salt)
            num_added += try_add(drive, request) is None
        if rng.random() < 0.02 and num_added:
            scheduler.cancel(str(rng.randrange(num_added)))
        plan = scheduler.schedule()
        if plan is not None:
            slots = [slot for row in plan.rows if row.num_logits for slot in row.draw_slots]
            scheduler.apply(StepResult(plan.step_id, tuple(Drawn(slot, (rng.randrange(1, 40),)) for slot in slots)))
        scheduler.deltas()
        events = maker.events(cache.drain_changes())
        num_removed += sum(event["type"] == "BlockRemoved" for event in events)
        if events:
            router.receive(router.next_number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, events, 0]))
        if step % 50 == 49:
            blocks = resumable_blocks(cache)
            assert router.resumable() == blocks
            num_compared += len(blocks)
    assert num_removed > num_steps / 10
    assert num_compared > num_steps / 10
    for block in router.resumable():
        if router.blocks[0][block]["extra"] is None:  # no salt: the hash follows from the tokens
            tokens = router.tokens_of(block)
            assert block_hash(block_keys(array("I", tokens).tobytes(), "", BLOCK)[-1]) == block
            assert cache.find([*tokens, 0], PrefixContent(), len(tokens)).known == len(tokens)
    scheduler.drop_resume_points()
    for event in maker.events(cache.drain_changes()):
        router.receive(router.next_number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event], 0]))
    assert router.resumable() == set()


def some_changes() -> list[Any]:
    """Two points, at 5 and at 4 tokens, of which the first is removed."""
    units = array("I", [1, 2, 3, 4, 5]).tobytes()
    return [PointStored(7, 5, 5, "", (), 0, 0, units), PointStored(8, 4, 4, "", (), 7, 4, b""), PointRemoved(7)]


def other_point(number: int) -> PointStored:
    return PointStored(number, 2, 2, "", (), 0, 0, array("I", [number, number]).tobytes())


LAST = block_hash(block_keys(array("I", [1, 2, 3, 4]).tobytes(), "", 2)[-1])


def received(socket: Any) -> list[bytes]:
    """Return the parts of the next message."""
    assert socket.poll(60_000)
    parts: list[bytes] = socket.recv_multipart()
    return parts


def test_events_travel_over_zmq_and_are_replayed(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(True, endpoint=endpoint, replay_endpoint=replay, topic="kv@host:8000@gemma", buffer_steps=3)
    publisher = KVEventPublisher(config, block_tokens=2)
    context = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.connect(endpoint)
        client = context.socket(zmq.DEALER)
        client.connect(replay)
        client.send_multipart((b"", (0).to_bytes(8, "big")))
        _, number, payload = received(client)
        router = Router()
        router.receive(number, payload)
        assert received(client)[1:] == [(-1).to_bytes(8, "big", signed=True), b""]
        ids = count(100)
        while not subscriber.poll(20):  # a subscription takes a while to reach the publisher
            publisher.publish([other_point(next(ids))])
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b"kv@host:8000@gemma"
        publisher.publish(some_changes())
        seen = [number]
        while True:
            _, number, payload = received(subscriber)
            seen.append(number)
            if any(LAST in event["block_hashes"] for event in msgspec.msgpack.decode(payload)[1]):
                break
        numbers = [int.from_bytes(number, "big") for number in seen]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        router.next_number = numbers[-1]
        router.receive(number, payload)
        assert router.resumable() == {LAST}
        assert router.tokens_of(LAST) == [1, 2, 3, 4]
        for _ in range(4):
            publisher.publish([other_point(next(ids))])
        for _ in range(4):
            received(subscriber)
        client.send_multipart((b"", (numbers[-1] + 3).to_bytes(8, "big")))
        replayed = [received(client)[1] for _ in range(3)]
        assert [int.from_bytes(number, "big", signed=True) - numbers[-1] for number in replayed[:2]] == [3, 4]
        assert replayed[2] == (-1).to_bytes(8, "big", signed=True)
        client.send_multipart((b"", (0).to_bytes(8, "big")))  # only the last three are kept
        replayed = [received(client)[1] for _ in range(4)]
        assert [int.from_bytes(number, "big", signed=True) - numbers[-1] for number in replayed[:3]] == [2, 3, 4]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_blocks_of_a_run_travel_in_one_event() -> None:
    events = EventMaker(2).events(some_changes())
    assert [event["type"] for event in events] == ["BlockStored", "BlockStored"]
    assert [len(event["block_hashes"]) for event in events] == [2, 1]
    assert events[0]["parent_block_hash"] is None
    assert events[0]["token_ids"] == [1, 2, 3, 4]
    assert [event["group_idx"] for event in events] == [0, 1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "truncated"),
        ('{"port": 1}', "unknown field"),
        ('{"hwm": "many"}', "Expected `int`"),
        ('{"publisher": "nats"}', "expected zmq or null"),
        ('{"buffer_steps": 0}', "above 0"),
    ],
)
def test_bad_settings_are_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_kv_events(text)


def test_settings_have_vllms_names_and_defaults() -> None:
    assert read_kv_events(None) is None
    assert read_kv_events("{}") is None
    assert read_kv_events('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    config = read_kv_events('{"enable_kv_cache_events": true, "topic": "kv"}')
    assert config == KVEventsConfig(True, topic="kv")
    assert of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert of_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert of_rank("ipc:///tmp/kv", 1) == "ipc:///tmp/kv_dp1"
