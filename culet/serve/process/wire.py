"""The messages between the web process and the engine process.

They are msgpack structs over a Unix socket, each prefixed by its length. The web process creates a socket pair and the engine
process inherits one end. The socket has no name, so nothing else can connect to it. End of file tells either side at once that
the other is gone. Nothing is unpickled. Bytes that do not match these structs are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
from msgspec import Struct

from culet.cache.changes import PrefixChange
from culet.config import Config
from culet.frames import frame, frame_head
from culet.limits import Limits
from culet.media.items import MediaItem
from culet.scheduler.stats import SchedulerStats
from culet.types import FinishReason, ModelDefaults, Request, TokenDelta


class Script(Struct, frozen=True):
    """The answers of the fake engine. Request i gets answer i modulo the number of answers, repeated without end."""

    answers: tuple[tuple[int, ...], ...]  # Token ids. A stop token of the request ends the sample.
    step_s: float = 0.0  # duration of a step
    tokens_per_step: int = 1  # per sample
    num_pages: int = 1024  # A running sample holds one per 16 tokens, including the prompt.
    max_model_len: int = 32768


# From the web process


class Start(Struct, tag="start", frozen=True):
    """The first message, which says what to load. With a `script`, no model is loaded and the fake engine answers."""

    config: Config
    log_level: str = "info"
    log_form: str = "text"
    script: Script | None = None
    rank: int = 0  # which of several engines this is
    name: str = "the engine"  # in the log and in errors
    num_engines: int = 1  # on this machine, which share its memory
    reports_prefixes: bool = False  # send PrefixChanges
    kv_events: str | None = None  # see `kv_events.py`
    step_s: float = Limits.step_s  # for one step of the engine before it counts as dead


class Item(Struct, tag="item", frozen=True):
    """The content of an image, a video frame or an audio clip of the next request. Each is sent as a separate message."""

    item: MediaItem


class Submit(Struct, tag="submit", frozen=True):
    """Run a request, with the items that came before this message."""

    request: Request


class Cancel(Struct, tag="cancel", frozen=True):
    """End a request, or one sample of it. It may already have ended."""

    request_id: str
    sample: int | None = None
    reason: FinishReason = FinishReason.CANCEL


class Stop(Struct, tag="stop", frozen=True):
    """End the process. Running requests are dropped."""


Command = Start | Item | Submit | Cancel | Stop


def submit_frames(request: Request) -> Iterator[bytes | bytearray]:
    """Yield the bytes that submit a request. The content of its media is not copied, because that may take long."""
    for item in request.items:
        yield frame_head(Item(replace(item, data=b"")), len(item.data))
        yield item.data
    yield frame(Submit(replace(request, items=()) if request.items else request))


# From the engine process


class GroupFacts(Struct, frozen=True):
    """A KV group, with its layers and their attention backend."""

    name: str
    num_layers: int
    page_tokens: int
    window: int | None
    backend: str
    why: str


class Ready(Struct, tag="ready", frozen=True):
    """The model is loaded and warm. The fields are everything that the web process needs to know about it."""

    vocab_size: int
    defaults: ModelDefaults
    max_position: int
    max_model_len: int
    max_num_seqs: int
    max_queue_len: int
    device: str
    dtype: str
    num_pages: int
    page_bytes: int
    cache_tokens: int  # that fit at the same time if sequences are as long as they may get
    groups: tuple[GroupFacts, ...] = ()
    start_s: dict[str, float] = {}  # seconds that each part of the startup took
    plan_svg: str = ""  # a picture of the attention plan

    @property
    def block_tokens(self) -> int:
        """The size of a block for routers, which know only one size: a page of the global layers."""
        return next((group.page_tokens for group in self.groups if group.window is None), 0)

    @property
    def num_blocks(self) -> int:
        """The number of these blocks that fit. It is less than the number of pages, because sliding layers need pages, too."""
        return self.cache_tokens // max(1, self.block_tokens)


class Failed(Struct, tag="failed", frozen=True):
    """The process ends because of this error. `kind` is the name of a class in culet.errors."""

    kind: str
    message: str
    hint: str = ""


class Deltas(Struct, tag="deltas", frozen=True):
    """The result of one step, or a part of it."""

    deltas: list[TokenDelta]


MAX_SCORES = 1 << 12  # log-probabilities in one message, because decoding a message blocks the web process's event loop


def in_parts(deltas: list[TokenDelta]) -> Iterator[Deltas]:
    """Yield the messages for the result of a step. Several are needed only for many log-probabilities."""
    part: list[TokenDelta] = []
    num_scores = 0
    for delta in deltas:
        for piece in _pieces(delta) if delta.prompt_logprobs else (delta,):
            part.append(piece)
            if piece.logprobs or piece.prompt_logprobs:
                num_scores += sum(map(len, piece.logprobs)) + sum(map(len, piece.prompt_logprobs))
            if num_scores >= MAX_SCORES:
                yield Deltas(part)
                part, num_scores = [], 0
    if part:
        yield Deltas(part)


def _pieces(delta: TokenDelta) -> Sequence[TokenDelta]:
    """Divide a delta with the log-probabilities of a long prompt. Its tokens are in the last piece."""
    scores = delta.prompt_logprobs
    count = max(1, MAX_SCORES // max(1, len(scores[0])))
    first = [
        TokenDelta(delta.request_id, delta.sample, (), prompt_logprobs=scores[index : index + count])
        for index in range(0, len(scores) - count, count)
    ]
    return [*first, msgspec.structs.replace(delta, prompt_logprobs=scores[len(first) * count :])]


class Refused(Struct, tag="refused", frozen=True):
    """A request was refused. `kind` is the name of a class in culet.errors."""

    request_id: str
    kind: str
    message: str
    hint: str = ""


class Stats(Struct, tag="stats", frozen=True):
    """The state of the engine. Sent every half second while it works, and when it becomes idle."""

    scheduler: SchedulerStats
    num_prompt_tokens: int  # total of all accepted requests
    num_generated_tokens: int
    memory_bytes: int  # resident memory of the process
    num_dropped_lines: int = 0  # of its log


class PrefixChanges(Struct, tag="prefixes", frozen=True):
    """Additions to the prefix cache and removals from it, in order. They are sent before the deltas of the same step."""

    changes: list[PrefixChange]


Report = Ready | Failed | Deltas | Refused | Stats | PrefixChanges

command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
