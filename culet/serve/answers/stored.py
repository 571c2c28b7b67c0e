"""Responses that are kept in memory, so that a later request can continue them (`previous_response_id`).

Their number, their size and their age are bounded. Each API key sees only its own. When the memory is full, the key that uses
the most loses the response that it has not used for the longest time. So no key can push out what another key stored.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from culet.limits import Limits
from culet.serve.http_errors import HttpError

_NOT_STORED = "it was deleted, never stored, or dropped for space or age; --limits stored=N,stored_mb=N,stored_s=N keeps more"
_MESSAGE_BYTES = 1024  # what the containers of a message take in memory, at most


@dataclass
class StoredResponse:
    """A response with the messages that it added to the conversation."""

    answer: bytes  # as JSON
    messages: Sequence[Mapping[str, Any]]  # those of its request, then the model's
    previous_id: str | None  # the response that it continues
    used_at: float = 0.0

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + sum(map(_message_bytes, self.messages))


def _message_bytes(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    texts = [value for fields in (message, *parts) for value in fields.values() if isinstance(value, str)]
    calls = message.get("tool_calls") or ()
    texts += [call["function"]["arguments"] for call in calls]
    return _MESSAGE_BYTES * (1 + len(calls)) + sum(map(sys.getsizeof, texts))


class _Owner:
    """The responses of one key, the one used longest ago first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.sizes: dict[str, int] = {}
        self.num_bytes = 0

    def remove(self, response_id: str) -> None:
        del self.responses[response_id]
        self.num_bytes -= self.sizes.pop(response_id)

    def remove_first(self) -> None:
        self.remove(next(iter(self.responses)))


class StoredResponses:
    """All stored responses."""

    def __init__(self, limits: Limits, *, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_enabled, self._clock = enabled, clock
        self._max_count, self._max_bytes, self._max_age_s = limits.stored, limits.stored_mb << 20, limits.stored_s
        self._owners: dict[str, _Owner] = {}  # by the name of the key

    @property
    def num_responses(self) -> int:
        return sum(len(owner.responses) for owner in self._owners.values())

    @property
    def num_bytes(self) -> int:
        return sum(owner.num_bytes for owner in self._owners.values())

    def add(self, key: str, response_id: str, response: StoredResponse) -> bool:
        """Store a response of the key named `key`. Return whether it was stored, which one that is too large is not."""
        size = response.num_bytes
        if not self.is_enabled or size > self._max_bytes:
            return False
        owner = self._owners.setdefault(key, _Owner())
        response.used_at = self._clock()
        owner.responses[response_id], owner.sizes[response_id] = response, size
        owner.num_bytes += size
        self._expire()
        while self.num_responses > self._max_count:
            max(self._owners.values(), key=lambda each: len(each.responses)).remove_first()
        while self.num_bytes > self._max_bytes:
            max(self._owners.values(), key=lambda each: each.num_bytes).remove_first()
        return response_id in owner.responses

    def find(self, key: str, response_id: str) -> StoredResponse:
        """Return a response of this key. Raise a 404 if there is none."""
        self._expire()
        owner = self._owners.get(key)
        response = None if owner is None else owner.responses.get(response_id)
        if owner is None or response is None:
            hint = _NOT_STORED if self.is_enabled else "start the server with --store-responses"
            raise HttpError(404, f"the response {response_id[:100]!r} is not stored", hint=hint, code="response_not_found")
        response.used_at = self._clock()
        owner.responses.move_to_end(response_id)
        return response

    def history(self, key: str, response_id: str | None) -> list[Mapping[str, Any]]:
        """Return the messages of a response and of all that it continues, in order. Raise if one is not stored any more."""
        chain: list[StoredResponse] = []
        while response_id is not None:
            chain.append(self.find(key, response_id))
            response_id = chain[-1].previous_id
        return [message for response in reversed(chain) for message in response.messages]

    def delete(self, key: str, response_id: str) -> None:
        """Forget a response of this key. Raise a 404 if there is none."""
        self.find(key, response_id)
        self._owners[key].remove(response_id)

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age_s
        for key, owner in list(self._owners.items()):
            while owner.responses and next(iter(owner.responses.values())).used_at < oldest:
                owner.remove_first()
            if not owner.responses:
                del self._owners[key]
