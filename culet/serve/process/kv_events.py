"""KV events: tell third-party routers over ZMQ which prompts this engine can resume, in the form that vLLM uses.

A message has three parts: the topic, a sequence number (8 bytes, big-endian) and a batch in msgpack, `[time, events, rank]`.
Events are maps, such as `{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...],
"block_size": ...}`. A block is as long as a page of the global layers.

Routers count the blocks that a prompt has in common with the ones they know. A Gemma model cannot resume after any of these
blocks, only where a resume point reaches. So blocks are published in two groups:

- Group 0 (`full_attention`) has every run of blocks that a resume point begins with.
- Group 1 (`sliding_window`, a window of one block) has the blocks after which a prompt can be resumed, and the last full block
  of every point, which stands for the tokens after it. A router that knows groups looks there for the last block of a match.

Whoever misses messages asks the replay socket. A request is `[b"", start number]`, and the answer is one message
`[b"", number, batch]` for each one that is still kept, then `[b"", -1, b""]`.

An engine that is started again has an empty cache, and its subscribers must forget what they know of it:

- The first event is `AllBlocksCleared`. It is sent once the subscribers of the earlier process have had time to reconnect. The
  first batch with blocks repeats it, for those that took longer.
- Numbers begin with the time of the start, so they are higher than those of the earlier process. A subscriber that follows them
  sees a gap and asks for a replay, which begins with `AllBlocksCleared`.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from culet.cache.changes import PointStored, PrefixChange
from culet.cache.content import UNIT
from culet.cache.mirror import PrefixMirror
from culet.cache.point_tree import MIN_SHARED
from culet.errors import ConfigError

RUNS, POINTS = 0, 1  # the groups
_END = (-1).to_bytes(8, "big", signed=True)
_HINT = """example: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}"""
_SCHEMES = ("tcp://", "ipc://", "inproc://")
_ERROR_HINTS = {  # of opening an endpoint
    errno.EADDRINUSE: "choose another port, or end the program that has this one",
    errno.EADDRNOTAVAIL: "use * or an address of this machine in the endpoint",
    errno.ENODEV: "use * or an address of this machine in the endpoint",
    errno.EACCES: "choose a port above 1023, or a folder that may be written to",
    errno.ENOENT: "create the folder of the ipc:// path",
}
_POLL_S = 0.05
_RECONNECT_S = 1.0  # ZMQ tries to connect again every 0.1 s, unless a subscriber has chosen otherwise
_CLEARED = {"type": "AllBlocksCleared"}


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


def check_kv_events(text: str | None, *, num_engines: int, has_prefix_caching: bool) -> KVEventsConfig | None:
    """Read `--kv-events-config` for a server. Raise before a model is loaded if its engines could not publish."""
    config = read_kv_events(text)
    if config is None:
        return None
    if not has_prefix_caching:
        raise ConfigError(
            "kv-events-config: there are no events with no-enable-prefix-caching",
            hint="omit --kv-events-config or --no-enable-prefix-caching",
        )
    users: dict[str, str] = {}
    for rank in range(num_engines):
        for what, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
            if endpoint is None:
                continue
            if not endpoint.startswith(_SCHEMES):
                raise ConfigError(
                    f"kv-events-config: {what}: got {endpoint!r}, expected tcp://HOST:PORT or ipc://PATH", hint=_HINT
                )
            place = _place(of_rank(endpoint, rank))
            if place is None or (what == "endpoint" and not is_bound(endpoint)):
                continue
            user = f"{what} of engine {rank}"
            if place in users:
                raise ConfigError(
                    f"kv-events-config: {place} is the {users[place]} and the {user}, since engine i adds i",
                    hint=f"choose ports for endpoint and replay_endpoint that differ by {num_engines} or more",
                )
            users[place] = user
    return config


def try_endpoints(config: KVEventsConfig, num_engines: int) -> None:
    """Open the endpoints of this machine's engines for a moment. Raise if one of them cannot be opened.

    An ipc:// path is left alone, because listening there takes it away from whoever listens now.
    """
    import zmq

    for rank in range(num_engines):
        for endpoint, listens in ((config.endpoint, is_bound(config.endpoint)), (config.replay_endpoint, True)):
            if endpoint is not None and not endpoint.startswith("ipc://"):
                context = zmq.Context()
                try:
                    _open(context.socket(zmq.PUB), of_rank(endpoint, rank), listens=listens)
                finally:
                    context.destroy(linger=0)


def _open(socket: Any, address: str, *, listens: bool) -> None:
    """Listen at an address or connect to it."""
    import zmq

    if "[" in address:  # only then, because a machine may have no IPv6
        socket.setsockopt(zmq.IPV6, 1)
    try:
        (socket.bind if listens else socket.connect)(address)
    except zmq.ZMQError as error:
        code = error.errno or 0
        hint = _ERROR_HINTS.get(code, _HINT)
        raise ConfigError(f"kv-events-config: cannot use {address!r}: {zmq.strerror(code)}", hint=hint) from None


def is_bound(endpoint: str) -> bool:
    """Return whether the engine listens here for subscribers. As in vLLM, any other address is one that a router listens on."""
    return any(part in endpoint for part in ("*", "::", "0.0.0.0", "ipc://", "inproc://"))


def _place(address: str) -> str | None:
    """Return what only one socket can listen on, or None if the system chooses a free port."""
    if not address.startswith("tcp://"):
        return address
    port = address.rpartition(":")[2]
    return f"port {port}" if port.isdecimal() and int(port) else None


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


def block_keys(units: bytes, salt: str, block_tokens: int) -> list[bytes]:
    """Return the keys of the blocks that a content fills, each chained from the one before. The first is the salt's."""
    size = UNIT * block_tokens
    keys = [_digest(salt.encode("utf-8", "surrogatepass"))]
    for begin in range(0, len(units) - size + 1, size):
        keys.append(_digest(keys[-1] + units[begin : begin + size]))
    return keys


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def block_hash(key: bytes) -> int:
    """Return the hash of a block, the first 64 bits of its key."""
    return int.from_bytes(key[:8], "big")


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a resume point."""

    keys: list[bytes]
    resumable: range  # numbers of blocks after which a prompt that has them can be resumed


class EventMaker:
    """Turns changes of the prefix cache into events."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._mirror = PrefixMirror()
        self._points: dict[int, _Blocks] = {}
        self._counts: tuple[Counter[bytes], Counter[bytes]] = Counter(), Counter()  # by group, points that have the block

    def events(self, changes: Iterable[PrefixChange]) -> list[dict[str, Any]]:
        """Return the events, with consecutive blocks of a run in one event."""
        events: list[dict[str, Any]] = []
        for change in changes:
            if isinstance(change, PointStored):
                self._mirror.apply([change])
                self._store(events, change)
            else:
                self._remove(events, change.point_id)
                self._mirror.apply([change])
        return events

    def _store(self, events: list[dict[str, Any]], point: PointStored) -> None:
        units = self._mirror.content_of(point.point_id)
        keys = block_keys(units, point.salt, self._block_tokens)
        last = len(keys) - 1
        # A prompt that goes on like the point resumes after its last block in any case, and after others if they are stored.
        first = max(1, -(-max(point.earliest, MIN_SHARED) // self._block_tokens))
        blocks = _Blocks(keys, range(max(1, min(first, last)), last + 1))
        self._points[point.point_id] = blocks
        is_run = False
        for number in range(1, last + 1):
            self._counts[RUNS][keys[number]] += 1
            is_new = self._counts[RUNS][keys[number]] == 1
            if is_new:
                event = self._stored(point, units, keys, number, RUNS)
                if is_run:
                    for name in ("block_hashes", "token_ids", "extra_keys"):
                        events[-1][name] += event[name]
                else:
                    events.append(event)
            is_run = is_new
        for number in blocks.resumable:
            self._counts[POINTS][keys[number]] += 1
            if self._counts[POINTS][keys[number]] == 1:
                events.append(self._stored(point, units, keys, number, POINTS))

    def _remove(self, events: list[dict[str, Any]], point_id: int) -> None:
        blocks = self._points.pop(point_id)
        for group, numbers in ((POINTS, blocks.resumable), (RUNS, range(1, len(blocks.keys)))):
            counts = self._counts[group]
            for number in reversed(numbers):
                key = blocks.keys[number]
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
                    events.append(_removed(key, group))

    def _stored(self, point: PointStored, units: bytes, keys: list[bytes], number: int, group: int) -> dict[str, Any]:
        size = self._block_tokens
        begin, end = (number - 1) * size, number * size
        extra = [keys[0].hex()] if point.salt else []
        extra += [key.hex() for start, length, key in point.media if start < end and start + length > begin]
        return {
            "type": "BlockStored",
            "block_hashes": [block_hash(keys[number])],
            "parent_block_hash": block_hash(keys[number - 1]) if number > 1 else None,
            "token_ids": array("I", units[UNIT * begin : UNIT * end]).tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [extra or None],
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention" if group == RUNS else "sliding_window",
            "kv_cache_spec_sliding_window": None if group == RUNS else size,
        }


def _removed(key: bytes, group: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block_hash(key)], "medium": "GPU", "group_idx": group}


class KVEventPublisher:
    """Sends events in its own thread. Slow subscribers cost the engine nothing."""

    def __init__(self, config: KVEventsConfig, block_tokens: int, rank: int = 0) -> None:
        import zmq

        self._config, self._rank = config, rank
        self._maker = EventMaker(block_tokens)
        self._queue: queue.Queue[list[PrefixChange] | None] = queue.Queue(config.max_queue_size)
        self._first: list[tuple[int, bytes]] = []  # the first message, which is always kept
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)  # those after it
        # Microseconds, because no engine sends a million batches per second. This is below 2**53, so JSON can carry it too.
        self._next_number = time.time_ns() // 1000
        context = zmq.Context()
        self._context = context
        self._publisher, self._replay = context.socket(zmq.PUB), None
        self._publisher.set_hwm(config.hwm)
        try:
            _open(self._publisher, of_rank(config.endpoint, rank), listens=is_bound(config.endpoint))
            if config.replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                # A whole answer fits, even if ZMQ has not noticed yet that the one before was read.
                self._replay.set_hwm(2 * config.buffer_steps + 4)
                _open(self._replay, of_rank(config.replay_endpoint, rank), listens=True)  # at any address, as in vLLM
        except ConfigError:
            context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: list[PrefixChange]) -> None:
        """Send what has changed. Wait only if `max_queue_size` batches are waiting, since each one builds on the last."""
        self._queue.put(changes)

    def close(self) -> None:
        """Send what is waiting and end the thread."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        time.sleep(_RECONNECT_S)  # the subscribers of an earlier process need this long to reconnect
        self._first.append(self._send([_CLEARED]))
        repeated = [_CLEARED]
        while True:
            try:
                changes = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                self._answer()
                continue
            if changes is None:
                return
            if events := self._maker.events(changes):
                self._sent.append(self._send(repeated + events))
                repeated = []
            self._answer()

    def _send(self, events: list[dict[str, Any]]) -> tuple[int, bytes]:
        """Send a batch. Return its number and its bytes."""
        batch = msgspec.msgpack.encode([time.time(), events, self._rank])
        number, self._next_number = self._next_number, self._next_number + 1
        self._publisher.send_multipart((self._config.topic.encode(), number.to_bytes(8, "big"), batch))
        return number, batch

    def _answer(self) -> None:
        """Answer the requests that wait at the replay socket."""
        if self._replay is None:
            return
        while self._replay.poll(0):
            client, *_, start = self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, batch in [*self._first, *self._sent]:
                if number >= first:
                    self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
            self._replay.send_multipart((client, b"", _END, b""))
