"""KV events: a consumer that knows only the format agrees with the engine about what can be resumed."""

from __future__ import annotations

import random
import socket
import time
from array import array
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from culet.cache.changes import PointRemoved, PointStored
from culet.cache.content import PrefixContent
from culet.cache.prefix import PrefixCache
from culet.errors import ConfigError
from culet.serve.process.kv_events import (
    _RECONNECT_S,
    EventMaker,
    KVEventPublisher,
    KVEventsConfig,
    block_hash,
    block_keys,
    check_kv_events,
    of_rank,
    read_kv_events,
)
from culet.types import Drawn, StepResult
from tests.engine.scheduler.drive import make, make_request, try_add
from tests.ports import Claim

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


UNSEEN = 99  # no prompt has this token


def resumable_blocks(cache: PrefixCache) -> tuple[set[int], set[int]]:
    """Ask the engine after which blocks of its points it resumes a prompt: whatever follows, or if the point's rest follows.

    The rest is what the point has after its last full block.
    """
    always, with_rest = set(), set()
    for point in cache.resume_points():
        content = PrefixContent(point.salt)
        units = cache._tree.content_of(point.point_id)
        tokens = array("I", units).tolist()
        keys = block_keys(units, point.salt, BLOCK)
        for number in range(1, len(keys)):
            prompt = [*tokens[: number * BLOCK], UNSEEN]
            if cache.find(prompt, PrefixContent(point.salt), number * BLOCK).resume == number * BLOCK:
                always.add(block_hash(keys[number]))
        if len(keys) > 1 and cache.find([*tokens, UNSEEN], content, len(tokens)).resume == len(tokens):
            with_rest.add(block_hash(keys[-1]))
    return always, with_rest


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
    num_added = num_removed = num_always = num_with_rest = 0
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
            always, with_rest = resumable_blocks(cache)
            assert router.resumable() == always | with_rest
            num_always += len(always)
            num_with_rest += len(with_rest - always)
    assert num_removed > num_steps / 10
    assert num_always > num_steps / 10
    assert num_with_rest > num_steps / 20
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
        router.next_number = first = int.from_bytes(number, "big")
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
            if any(LAST in event.get("block_hashes", ()) for event in msgspec.msgpack.decode(payload)[1]):
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
        client.send_multipart((b"", (0).to_bytes(8, "big")))  # only the last three are kept, and what cleared all blocks
        replayed = [received(client)[1] for _ in range(5)]
        assert int.from_bytes(replayed[0], "big") == first
        assert [int.from_bytes(number, "big", signed=True) - numbers[-1] for number in replayed[1:4]] == [2, 3, 4]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_the_replay_socket_listens_at_any_address(tmp_path: Path, port: int) -> None:
    replay = f"tcp://127.0.0.1:{port}"
    config = KVEventsConfig(True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=replay)
    publisher = KVEventPublisher(config, block_tokens=2)
    context = zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.connect(replay)
        client.send_multipart((b"", (0).to_bytes(8, "big")))
        assert msgspec.msgpack.decode(received(client)[2])[1] == [{"type": "AllBlocksCleared"}]
    finally:
        publisher.close()
        context.destroy(linger=0)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(("wildcard", "here"), [("*", "127.0.0.1"), pytest.param("[::]", "[::1]", marks=NEEDS_IPV6)])
def test_the_second_engine_has_its_own_addresses_and_rank(wildcard: str, here: str) -> None:
    claim = Claim(4)
    port, replay = claim.port, claim.port + 2
    config = KVEventsConfig(True, endpoint=f"tcp://{wildcard}:{port}", replay_endpoint=f"tcp://{here}:{replay}")
    publisher = KVEventPublisher(config, block_tokens=2, rank=1)
    context = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.setsockopt(zmq.IPV6, 1)
        subscriber.connect(f"tcp://{here}:{port + 1}")
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.IPV6, 1)
        client.connect(f"tcp://{here}:{replay + 1}")
        client.send_multipart((b"", (0).to_bytes(8, "big")))
        for parts in received(subscriber), received(client):
            _, events, rank = msgspec.msgpack.decode(parts[2])
            assert (events, rank) == ([{"type": "AllBlocksCleared"}], 1)
    finally:
        publisher.close()
        context.destroy(linger=0)
        claim.close()


class Follower:
    """A subscriber that stays connected while engines come and go, and follows the numbers as vLLM's example does."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, replay: str | None) -> None:
        self.subscriber, self.client = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._connected = self.subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.subscriber.connect(endpoint)
        self.has_replay = replay is not None
        if replay is not None:
            self.client.connect(replay)
        self.last = -1
        self.blocks: set[int] = set()
        self.num_missed = 0

    def wait_connected(self) -> None:
        """Wait until the connection to a publisher that has started is made again, and its subscription has arrived."""
        assert self._connected.poll(60_000)
        self._connected.recv_multipart()
        time.sleep(0.5)  # nothing tells when the subscription arrives, which takes no time on an idle machine

    def follow(self, timeout_ms: int) -> bool:
        """Take the next message, after those that were missed. Return False if none comes in time."""
        if not self.subscriber.poll(timeout_ms):
            return False
        _, number_bytes, payload = self.subscriber.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        if self.has_replay and number > self.last + 1 and self.last >= 0:
            self.num_missed += 1
            self.client.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
            while (answer := received(self.client))[2]:
                self.take(int.from_bytes(answer[1], "big"), answer[2])
        self.take(number, payload)
        return True

    def take(self, number: int, payload: bytes) -> None:
        if self.has_replay and number <= self.last:
            return  # seen before
        self.last = number
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockStored":
                self.blocks |= set(event["block_hashes"])
            else:
                self.blocks -= set(event["block_hashes"])


def hash_of(number: int) -> int:
    """Return the hash of the only block of `other_point(number)`."""
    return block_hash(block_keys(array("I", [number, number]).tobytes(), "", 2)[-1])


@pytest.mark.parametrize("has_replay", [True, False])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_restarted_engine_has_none_of_the_old_blocks(tmp_path: Path, has_replay: bool, is_slow: bool) -> None:
    """A subscriber outlives an engine. It may connect again only after the new engine's first event."""
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(True, endpoint=endpoint, replay_endpoint=replay, buffer_steps=2)
    context = zmq.Context()
    follower = Follower(context, endpoint, replay if has_replay else None)
    publisher = KVEventPublisher(config, block_tokens=2)
    try:
        follower.wait_connected()
        for number in range(10, 15):
            publisher.publish([other_point(number)])
        while hash_of(14) not in follower.blocks:
            assert follower.follow(60_000)
        assert follower.blocks == {hash_of(number) for number in range(10, 15)}
        publisher.close()
        if is_slow:
            follower.subscriber.disconnect(endpoint)
        publisher = KVEventPublisher(config, block_tokens=2)
        if is_slow:
            time.sleep(_RECONNECT_S + 0.5)
            follower.subscriber.connect(endpoint)
        follower.wait_connected()
        publisher.publish([other_point(20)])
        while hash_of(20) not in follower.blocks:
            assert follower.follow(60_000)
        assert follower.blocks == {hash_of(20)}
        assert bool(follower.num_missed) is has_replay
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_whoever_missed_the_first_events_too_is_told_to_forget(tmp_path: Path) -> None:
    """More batches were sent since the restart than are kept. The replay still begins with the event that clears all blocks."""
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(True, endpoint=endpoint, replay_endpoint=replay, buffer_steps=2)
    context = zmq.Context()
    follower = Follower(context, endpoint, replay)
    publisher = KVEventPublisher(config, block_tokens=2)
    try:
        follower.wait_connected()
        publisher.publish([other_point(10)])
        while hash_of(10) not in follower.blocks:
            assert follower.follow(60_000)
        publisher.close()
        follower.subscriber.disconnect(endpoint)
        publisher = KVEventPublisher(config, block_tokens=2)
        for number in range(20, 25):
            publisher.publish([other_point(number)])
        time.sleep(_RECONNECT_S + 0.5)
        follower.subscriber.connect(endpoint)
        follower.wait_connected()
        publisher.publish([other_point(25)])
        assert follower.follow(60_000)
        assert follower.blocks == {hash_of(24), hash_of(25)}
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


def test_blocks_name_the_media_in_them_and_the_salt() -> None:
    media = ((1, 2, b"first"), (5, 9, b"second"))
    units = array("I", range(8)).tobytes()
    (whole, _) = EventMaker(2).events([PointStored(7, 8, 8, "", media, 0, 0, units)])
    first, second = b"first".hex(), b"second".hex()
    assert whole["extra_keys"] == [[first], [first], [second], [second]]
    (salted, _) = EventMaker(4).events([PointStored(7, 8, 8, "tenant", media[1:], 0, 0, units)])
    (salt,), also = salted["extra_keys"]
    assert also == [salt, second]
    assert "tenant" not in salt


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


EVENTS = '"enable_kv_cache_events": true'


@pytest.mark.parametrize(
    ("text", "num_engines", "problem"),
    [
        ('"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"', 2, "port 5558 is the .* engine 0 and .* engine 1"),
        ('"endpoint": "tcp://*:5559", "replay_endpoint": "tcp://127.0.0.1:5557"', 4, "port 5559 is the"),
        ('"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"', 1, "port 5557 is the"),
        ('"endpoint": "ipc:///tmp/kv", "replay_endpoint": "ipc:///tmp/kv_dp1"', 2, "/tmp/kv_dp1 is the"),
        ('"endpoint": "tcp://*:*"', 2, "expected a port at its end"),
    ],
)
def test_endpoints_that_collide_are_refused_at_once(text: str, num_engines: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check_kv_events(f"{{{EVENTS}, {text}}}", num_engines=num_engines, has_prefix_caching=True)
    if "is the" in problem:
        assert f"differ by {num_engines} or more" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "num_engines"),
    [
        ('"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"', 1),
        ('"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5559"', 2),
        ('"endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:5558"', 2),  # the first is a port of another machine
        ('"endpoint": "tcp://*:*", "replay_endpoint": "tcp://*:*"', 1),
    ],
)
def test_endpoints_that_do_not_collide_are_fine(text: str, num_engines: int) -> None:
    assert check_kv_events(f"{{{EVENTS}, {text}}}", num_engines=num_engines, has_prefix_caching=True) is not None


def test_events_need_prefix_caching() -> None:
    with pytest.raises(ConfigError, match=r"kv-events-config.*no-enable-prefix-caching"):
        check_kv_events(f"{{{EVENTS}}}", num_engines=1, has_prefix_caching=False)
    assert check_kv_events("{}", num_engines=1, has_prefix_caching=False) is None
    assert check_kv_events(None, num_engines=1, has_prefix_caching=False) is None


def test_settings_have_vllms_names_and_defaults() -> None:
    assert read_kv_events(None) is None
    assert read_kv_events("{}") is None
    assert read_kv_events('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    config = read_kv_events('{"enable_kv_cache_events": true, "topic": "kv"}')
    assert config == KVEventsConfig(True, topic="kv")
    assert of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert of_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert of_rank("ipc:///tmp/kv", 1) == "ipc:///tmp/kv_dp1"
