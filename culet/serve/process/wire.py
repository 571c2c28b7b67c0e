"""What the web process and the engine's process say to each other: msgpack structs over a Unix socket, each with its length.

The socket is one end of a pair that the web process makes and the engine's process inherits: it has no name, so nobody else
can connect to it, and its end of file tells either side at once that the other is gone. Nothing is ever unpickled: bytes
that do not fit these structs are an error.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from culet.config import Config
from culet.errors import InternalError
from culet.scheduler.stats import SchedulerStats
from culet.types import FinishReason, ModelDefaults, Request

_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 28  # far above the longest prompt: a longer frame is no frame of ours

Logprobs = dict[int, float]  # token id -> log-probability, the chosen token first


class Script(Struct, frozen=True):
    """What the fake engine answers, in place of a model: request i gets answer i modulo their number, over and over."""

    answers: tuple[tuple[int, ...], ...]  # token ids; a stop token of the request among them ends its sample
    step_s: float = 0.0  # seconds that each step takes
    tokens_per_step: int = 1  # of each sample
    num_pages: int = 1024  # a running sample holds one for every 16 of its tokens, the prompt's included
    max_model_len: int = 32768


# From the web process


class Start(Struct, tag="start", frozen=True):
    """The first message: what to load. With a `script` no model is loaded and the fake engine answers."""

    config: Config
    log_level: str = "info"
    log_form: str = "text"
    script: Script | None = None


class Submit(Struct, tag="submit", frozen=True):
    """A request, complete."""

    request: Request


class Cancel(Struct, tag="cancel", frozen=True):
    """End a request, or one sample of it; it may have ended by itself."""

    request_id: str
    sample: int | None = None
    reason: FinishReason = FinishReason.CANCEL


class Stop(Struct, tag="stop", frozen=True):
    """End the process; what still runs is dropped."""


Command = Start | Submit | Cancel | Stop


# From the engine's process


class GroupFacts(Struct, frozen=True):
    """One KV group: its layers, and who computes their attention."""

    name: str
    num_layers: int
    page_tokens: int
    window: int | None
    backend: str
    why: str


class Ready(Struct, tag="ready", frozen=True):
    """The model is loaded and warm: what the web process must know of it."""

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
    groups: tuple[GroupFacts, ...] = ()
    start_s: dict[str, float] = {}  # seconds of each part of the start
    plan_svg: str = ""  # layers against attention backends, as a picture


class Failed(Struct, tag="failed", frozen=True):
    """The process ends, for this reason; `kind` is the name of a class in culet.errors."""

    kind: str
    message: str
    hint: str = ""


class Delta(Struct, array_like=True, frozen=True, gc=False):
    """`culet.types.TokenDelta`, as it travels."""

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    error: str = ""
    queue_s: float = 0.0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


class Deltas(Struct, tag="deltas", frozen=True):
    """All that one step brought."""

    deltas: list[Delta]


class Refused(Struct, tag="refused", frozen=True):
    """A request was not taken; `kind` is the name of a class in culet.errors."""

    request_id: str
    kind: str
    message: str
    hint: str = ""


class Stats(Struct, tag="stats", frozen=True):
    """How the engine stands: sent every half second while it works, and when it has become idle."""

    scheduler: SchedulerStats
    num_prompt_tokens: int  # of all requests that were taken
    num_generated_tokens: int
    memory_bytes: int  # of the process, resident


Report = Ready | Failed | Deltas | Refused | Stats

_encoder = msgspec.msgpack.Encoder()
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytearray:
    """`message` as bytes, its length in front."""
    buffer = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return buffer


class FrameReader:
    """Bytes in, as they come; whole messages out."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decode = decoder.decode
        self._buffer = bytearray()

    def push(self, data: bytes) -> list[Any]:
        """The messages that `data` completes."""
        self._buffer += data
        messages, begin, size = [], 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while size - begin >= _LENGTH_BYTES:
                length = int.from_bytes(view[begin : begin + _LENGTH_BYTES], "big")
                if length > MAX_FRAME_BYTES:
                    raise InternalError(f"a message of {length} bytes between the processes, at most {MAX_FRAME_BYTES}")
                end = begin + _LENGTH_BYTES + length
                if end > size:
                    break
                messages.append(self._decode(view[begin + _LENGTH_BYTES : end]))
                begin = end
        del self._buffer[:begin]
        return messages
