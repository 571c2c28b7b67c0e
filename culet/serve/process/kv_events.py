"""KV events: tell third-party routers over ZMQ which prompts this engine can resume, in the form that vLLM uses.

A message has three parts: the topic, a sequence number (8 bytes, big-endian) and a batch in msgpack, `[time, events, rank]`.
Events are maps, such as `{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...],
"block_size": ...}`. A block is a page of the prefix cache.

Routers count the blocks that a prompt has in common with the ones they know. A Gemma model cannot resume after any of these
blocks, only where there is a resume point. So blocks are published in two groups:

- Group 0 (`full_attention`) has every run of pages that a resume point begins with.
- Group 1 (`sliding_window`, a window of one block) has the last page of a run after which a point can resume. A router that
  knows groups looks there for the last block of a match only, and has no false hits.

Whoever misses messages asks the replay socket. A request is `[b"", start number]`, and the answer is one message
`[b"", number, batch]` for each one that is still kept, then `[b"", -1, b""]`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from culet.cache.changes import PageRemoved, PageStored, PointStored, PrefixChange
from culet.errors import ConfigError
from culet.log import logger

RUNS, POINTS = 0, 1  # the groups
_END = (-1).to_bytes(8, "big", signed=True)
_HINT = """example: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}"""
_POLL_MS = 50


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parsed `--kv-events-config`, with the names and defaults that vLLM has."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that are kept for the replay socket
    hwm: int = 100_000  # messages that wait for one subscriber before ZMQ drops some
    max_queue_size: int = 100_000  # batches that wait to be sent
    topic: str = ""


def read_kv_events(text: str | None) -> KVEventsConfig | None:
    """Parse the JSON object of `--kv-events-config`. Return None if no events are wanted."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text.encode(), type=KVEventsConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"kv-events-config: {error}", hint=_HINT) from None
    if config.publisher not in ("zmq", "null"):
        raise ConfigError(f"kv-events-config: publisher: got {config.publisher!r}, expected zmq or null", hint=_HINT)
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"kv-events-config: {name}: got {getattr(config, name)}, expected a number above 0", hint=_HINT)
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    try:
        import zmq  # noqa: F401
    except ImportError:
        raise ConfigError("kv-events-config: pyzmq is not installed", hint="pip install 'culet[kv-events]'") from None
    return config


def of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one of several engines. As in vLLM, its rank is added to the port or the name."""
    if not rank:
        return endpoint
    if endpoint.startswith("tcp://"):
        base, _, port = endpoint.rpartition(":")
        if not port.isdecimal():
            raise ConfigError(f"kv-events-config: endpoint: got {endpoint!r}, expected a port at its end", hint=_HINT)
        return f"{base}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


def block_hash(key: bytes) -> int:
    """Return the hash of a block, the first 64 bits of its page key."""
    return int.from_bytes(key[:8], "big")


class EventMaker:
    """Turns changes of the prefix cache into events."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._num_points: dict[bytes, int] = {}  # page key -> points after this run of pages
        self._pages: dict[bytes, PageStored] = {}

    def events(self, changes: Iterable[PrefixChange]) -> list[dict[str, Any]]:
        """Return the events, with consecutive blocks of a run in one event. Runs of no pages have no block."""
        events: list[dict[str, Any]] = []
        for change in changes:
            if not change.num_pages:
                continue
            if isinstance(change, PageStored):
                self._pages[change.key] = change
                self._store(events, change)
            elif isinstance(change, PageRemoved):
                del self._pages[change.key]
                events.append(_removed(change.key, RUNS))
            else:
                self._count_point(events, change.key, 1 if isinstance(change, PointStored) else -1)
        return events

    def _store(self, events: list[dict[str, Any]], page: PageStored) -> None:
        last = events[-1] if events else {}
        is_next = last.get("type") == "BlockStored" and last["group_idx"] == RUNS
        if is_next and last["block_hashes"][-1] == block_hash(page.parent) and page.num_pages > 1:
            last["block_hashes"].append(block_hash(page.key))
            last["token_ids"].extend(page.token_ids)
            last["extra_keys"].append(list(page.extra) or None)
        else:
            events.append(self._stored(page, RUNS))

    def _count_point(self, events: list[dict[str, Any]], key: bytes, change: int) -> None:
        before = self._num_points.get(key, 0)
        self._num_points[key] = before + change
        if before == 0:
            events.append(self._stored(self._pages[key], POINTS))
        elif before + change == 0:
            del self._num_points[key]
            events.append(_removed(key, POINTS))

    def _stored(self, page: PageStored, group: int) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [block_hash(page.key)],
            "parent_block_hash": block_hash(page.parent) if page.num_pages > 1 else None,
            "token_ids": list(page.token_ids),
            "block_size": self._page_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [list(page.extra) or None],
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention" if group == RUNS else "sliding_window",
            "kv_cache_spec_sliding_window": None if group == RUNS else self._page_tokens,
        }


def _removed(key: bytes, group: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block_hash(key)], "medium": "GPU", "group_idx": group}


class KVEventPublisher:
    """Sends events in a thread of its own. Subscribers that are slow cost the engine nothing."""

    def __init__(self, config: KVEventsConfig, page_tokens: int, rank: int = 0) -> None:
        import zmq

        self._config, self._rank = config, rank
        self._maker = EventMaker(page_tokens)
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        context = zmq.Context()
        self._context = context
        self._publisher, self._replay = context.socket(zmq.PUB), None
        self._publisher.set_hwm(config.hwm)
        self._bind(self._publisher, config.endpoint)
        if config.replay_endpoint is not None:
            self._replay = context.socket(zmq.ROUTER)
            self._bind(self._replay, config.replay_endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self._put([{"type": "AllBlocksCleared"}])  # an earlier process may have published on this endpoint

    def _bind(self, socket: Any, endpoint: str) -> None:
        import zmq

        address = of_rank(endpoint, self._rank)
        try:
            # As in vLLM, wildcards and local names are bound. Any other address is one that a router listens on.
            is_bound = any(part in address for part in ("*", "::", "0.0.0.0", "ipc://", "inproc://"))
            (socket.bind if is_bound else socket.connect)(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv-events-config: cannot use {address!r}: {error}", hint="choose another port") from None

    def publish(self, changes: list[PrefixChange]) -> None:
        """Send what has changed. Does not block."""
        events = self._maker.events(changes)
        if events:
            self._put(events)

    def close(self) -> None:
        """Send what is waiting and end the thread."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _put(self, events: list[dict[str, Any]]) -> None:
        batch = msgspec.msgpack.encode([time.time(), events, self._rank])
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            self._queue.put_nowait((number, batch))
        except queue.Full:  # the number is missing then, so that subscribers know
            logger.warning("KV events: a batch was dropped, because %d are waiting", self._config.max_queue_size)

    def _run(self) -> None:
        topic = self._config.topic.encode()
        while True:
            try:
                item = self._queue.get(timeout=_POLL_MS / 1e3)
            except queue.Empty:
                self._answer()
                continue
            if item is None:
                return
            number, batch = item
            self._sent.append(item)
            self._publisher.send_multipart((topic, number.to_bytes(8, "big"), batch))
            self._answer()

    def _answer(self) -> None:
        """Answer the requests that wait at the replay socket."""
        if self._replay is None:
            return
        while self._replay.poll(0):
            client, *_, start = self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, batch in list(self._sent):
                if number >= first:
                    self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
            self._replay.send_multipart((client, b"", _END, b""))
