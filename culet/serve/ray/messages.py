"""What the ingress and the engine replicas send each other, as msgpack."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from culet.cache.changes import PrefixChange
from culet.types import Request, TokenDelta


@dataclass(frozen=True)
class Route:
    """The first argument of every call to an engine. The router reads it."""

    replica_id: str = ""  # only this replica can answer, or any if empty
    prompt_len: int = 0
    num_samples: int = 1
    max_num_seqs: int = 1  # of a replica
    overlaps: dict[str, tuple[int, int]] = field(default_factory=dict)  # replica id -> (resume, known), see `Overlap`
    loads: dict[str, int] = field(default_factory=dict)  # replica id -> samples that this ingress has there


class Order(Struct, frozen=True):
    """A request. Clocks differ between machines, so the time that is left replaces its deadline."""

    request: Request
    left_s: float


class Part(Struct, frozen=True):
    """Some of the answer."""

    replica_id: str
    deltas: list[TokenDelta] = []
    refusal: tuple[str, str, str] | None = None  # kind, message and hint of an error
    starts_over: bool = False  # forget all parts so far, because the engine has died and another one answers


class Log(Struct, frozen=True):
    """How the prefix cache of a replica has changed."""

    replica_id: str
    next_number: int  # to ask for next
    changes: list[PrefixChange]
    is_whole: bool  # the changes begin with an empty cache
