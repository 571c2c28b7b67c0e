"""API keys: whose request it is, what that key may do, and how much of the server it may use.

Keys come from `--api-key` (or CULET_API_KEY) and from a TOML file (`--api-key-file`), which is read again on SIGHUP. A bad file
changes nothing. Only digests of keys are kept. A key's name is public: it appears in the log and in the metrics.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from culet.errors import ConfigError, CuletError
from culet.log import logger
from culet.serve.http_errors import HttpError

CALLER = "culet.caller"  # scope key of the Caller
MAX_KEYS = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_LIMIT = 10**12
_LIMIT_NAMES = ("requests_per_minute", "tokens_per_minute", "concurrency")
_EXAMPLE = 'example: [[key]], name = "alice", sha256 = "..."'
# With several keys, one key may use this many times what is left of the queue, so that there is always room for another key.
_QUEUE_SHARE = 8


@dataclass(frozen=True)
class ApiKey:
    """One key, without its text."""

    name: str  # of at most 64 letters, digits and . _ -
    digest: bytes  # SHA-256 of the key
    priority: bool = False  # whether its requests may set `priority`
    cache_salt: str = ""  # keys with the same salt share cached prefixes; by default the name
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and generated tokens
    concurrency: int | None = None  # samples that run or wait at the same time


class _Bucket:
    """An allowance per minute, which can be saved up for a minute. It may go below zero, and is then paid back first."""

    def __init__(self, now: float) -> None:
        self._spent = 0.0
        self._at = now

    def wait_s(self, per_minute: int, now: float) -> float:
        """Return how many seconds to wait until something is left, or 0.0."""
        self._spent = max(0.0, self._spent - (now - self._at) * per_minute / 60)
        self._at = now
        return max(0.0, self._spent - per_minute + 1) * 60 / per_minute

    def spend(self, amount: int) -> None:
        self._spent += amount


class KeyUsage:
    """What one key uses now. Kept by name when keys are read again."""

    def __init__(self, now: float) -> None:
        self.num_samples = 0  # in flight
        self.requests, self.tokens = _Bucket(now), _Bucket(now)
        self.refused = dict.fromkeys(_LIMIT_NAMES, 0)  # by the name of the limit


@dataclass(frozen=True)
class Caller:
    """Who sent a request: a key with its usage, or anybody if no keys are set."""

    usage: KeyUsage
    key: ApiKey | None = None
    is_alone: bool = True  # whether there are no other keys
    clock: Callable[[], float] = time.monotonic

    @property
    def name(self) -> str:
        return "" if self.key is None else self.key.name

    def salt(self, given: str | None) -> str:
        """Return the salt of a request's cached prefixes. With several keys, no key sees what another one cached."""
        own = "" if self.key is None or self.is_alone else self.key.cache_salt or self.key.name
        # A name has no slash, so no given salt can look like another key's.
        return f"{own}/{given or ''}" if own or given else ""

    def check_priority(self, priority: int) -> None:
        """Raise if the request sets a priority that its key may not set. Someone alone on the server may."""
        if priority and not self.is_alone and self.key is not None and not self.key.priority:
            raise HttpError(
                403,
                f"priority: got {priority}, but the key {self.name!r} may not set it",
                hint="omit the field, or set priority = true for this key in the file of --api-key-file",
                code="priority_not_allowed",
            )

    def count_request(self) -> None:
        """Count an HTTP request. Raise a 429 if the key has sent too many."""
        if self.key is not None and self.key.requests_per_minute is not None:
            self._check_bucket(self.usage.requests, "requests_per_minute", self.key.requests_per_minute)
            self.usage.requests.spend(1)

    def begin(self, num_prompt_tokens: int, num_samples: int, *, num_in_flight: int, capacity: int) -> None:
        """Count a generation that is about to be submitted. Raise a 429 if it exceeds a limit of the key.

        The server has `num_in_flight` samples of all keys and room for `capacity`.
        """
        usage, key = self.usage, self.key
        if key is not None and key.concurrency is not None and usage.num_samples + num_samples > key.concurrency:
            raise self._refuse("concurrency", f"{key.concurrency} samples at the same time", 1.0)
        if key is not None and key.tokens_per_minute is not None:
            self._check_bucket(usage.tokens, "tokens_per_minute", key.tokens_per_minute)
        if not self.is_alone and usage.num_samples + num_samples > _QUEUE_SHARE * (capacity - num_in_flight):
            problem = (
                f"the key {self.name!r} has {usage.num_samples} samples running or waiting, which fills its part of the queue"
            )
            raise HttpError(429, problem, hint="try again later", code="queue_full")
        usage.num_samples += num_samples
        usage.tokens.spend(num_prompt_tokens)

    def end(self, num_samples: int, num_generated_tokens: int) -> None:
        """Count the end of a generation, and the tokens it generated."""
        self.usage.num_samples -= num_samples
        self.usage.tokens.spend(num_generated_tokens)

    def _check_bucket(self, bucket: _Bucket, name: str, limit: int) -> None:
        wait_s = bucket.wait_s(limit, self.clock())
        if wait_s > 0:
            raise self._refuse(name, f"{limit} {name.replace('_', ' ')}", wait_s)

    def _refuse(self, limit: str, allowed: str, wait_s: float) -> HttpError:
        self.usage.refused[limit] += 1
        return HttpError(
            429,
            f"{limit}: the key {self.name!r} is limited to {allowed}",
            hint=f"wait, or raise {limit} for this key in the file of --api-key-file",
            code="rate_limit_exceeded",
            retry_after_s=max(1, math.ceil(wait_s)),
        )


class KeyRing:
    """All keys of the server."""

    def __init__(self, given: str = "", file: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Use the keys in `given`, separated by commas, and those in `file`. Raise a ConfigError if the file is bad."""
        self._given = [key for part in given.split(",") if (key := part.strip())]
        self._file = None if file is None else Path(file).expanduser()
        self._clock = clock
        self._usage: dict[str, KeyUsage] = {}
        self._anybody = Caller(KeyUsage(clock()), clock=clock)
        self._callers: dict[bytes, Caller] = {}
        self._use(self._read())

    def __bool__(self) -> bool:
        return bool(self._callers)

    @property
    def has_file(self) -> bool:
        return self._file is not None

    def names(self) -> list[str]:
        return [caller.name for caller in self._callers.values()]

    def usage(self) -> Mapping[str, KeyUsage]:
        """What each key uses, by name. Includes keys that were removed."""
        return self._usage

    def reload(self) -> bool:
        """Read the file again. If it is bad, log why and keep all keys as they are. Return whether it was read."""
        try:
            keys = self._read()
        except CuletError as error:
            logger.error("the API keys were not changed: %s", error.message)
            return False
        self._use(keys)
        logger.info("reloaded %d API keys", len(keys))
        return True

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return who sent these headers. Raise a 401 if keys are set and the headers have none of them."""
        if not self._callers:
            return self._anybody
        sent = headers.get(b"x-api-key", b"").decode("latin-1").strip()
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            sent = token.strip()
        # Looking up a digest reveals nothing about a key by its timing, because nobody can choose the digest's bytes.
        caller = self._callers.get(_digest(sent))
        if caller is None:
            problem = "the API key is invalid" if sent else "the API key is missing"
            raise HttpError(401, problem, hint="send the key in the header Authorization: Bearer KEY", code="invalid_api_key")
        return caller

    @property
    def anybody(self) -> Caller:
        """The caller of paths that need no key."""
        return self._anybody

    def _read(self) -> list[ApiKey]:
        keys = [ApiKey(f"key-{number}", _digest(key)) for number, key in enumerate(dict.fromkeys(self._given), 1)]
        if self._file is not None:
            keys += read_key_file(self._file)
        for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
            if len(set(values)) < len(values):
                twice = next(key.name for place, key in enumerate(keys) if values[place] in values[:place])
                raise ConfigError(f"api-key-file: two entries have the same {what} (see {twice!r})", hint="remove one of them")
        return keys

    def _use(self, keys: list[ApiKey]) -> None:
        """Replace all keys at once. A key that keeps its name keeps its usage."""
        for key in keys:
            self._usage.setdefault(key.name, KeyUsage(self._clock()))
        is_alone = len(keys) < 2
        self._callers = {key.digest: Caller(self._usage[key.name], key, is_alone, self._clock) for key in keys}


def read_key_file(path: Path) -> list[ApiKey]:
    """Read a TOML file with a table `[[key]]` per key. Errors name the entry and the field."""
    try:
        mode = path.stat().st_mode
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"api-key-file: {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise ConfigError(f"api-key-file: {path}: not valid TOML: {error}", hint=_EXAMPLE) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("api-key-file: %s: other users may read or change this file (chmod 600 prevents it)", path)
    entries = values.get("key")
    if set(values) != {"key"} or not isinstance(entries, list) or not 1 <= len(entries) <= MAX_KEYS:
        raise ConfigError(f"api-key-file: {path}: expected 1 to {MAX_KEYS} tables [[key]] and nothing else", hint=_EXAMPLE)
    return [_read_key(f"api-key-file: {path}: key {number}", entry) for number, entry in enumerate(entries, 1)]


def _read_key(where: str, entry: object) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: got {type(entry).__name__}, expected a table", hint=_EXAMPLE)
    known = ["key", "sha256", *(field.name for field in fields(ApiKey) if field.name != "digest")]
    for field in entry:
        if field not in known:
            raise ConfigError(f"{where}: unknown field {field!r}", hint=f"known fields: {', '.join(known)}")
    name = entry.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"{where}: name: got {name!r}, expected up to 64 letters, digits and . _ -")
    priority = entry.get("priority", False)
    if not isinstance(priority, bool):
        raise ConfigError(f"{where}: priority: got {priority!r}, expected true or false")
    salt = entry.get("cache_salt", "")
    if not isinstance(salt, str) or (salt and _NAME.fullmatch(salt) is None):
        raise ConfigError(f"{where}: cache_salt: expected up to 64 letters, digits and . _ -")
    limits = {limit: _limit(where, entry, limit) for limit in _LIMIT_NAMES}
    return ApiKey(name, _read_digest(where, entry), priority, salt, **limits)


def _read_digest(where: str, entry: Mapping[str, Any]) -> bytes:
    """Return the digest of a key that is given as text or as its SHA-256. Errors never show it."""
    key, sha256 = entry.get("key"), entry.get("sha256")
    if (key is None) == (sha256 is None):
        raise ConfigError(f"{where}: expected either key or sha256", hint="sha256 is printed by: printf %s KEY | sha256sum")
    if sha256 is not None:
        if not isinstance(sha256, str) or _DIGEST.fullmatch(sha256) is None:
            raise ConfigError(f"{where}: sha256: expected 64 hexadecimal digits")
        return bytes.fromhex(sha256)
    if not isinstance(key, str) or not key or key != key.strip() or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where}: key: expected printable ASCII characters without spaces at its ends")
    return _digest(key)


def _limit(where: str, entry: Mapping[str, Any], name: str) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_LIMIT:
        raise ConfigError(f"{where}: {name}: got {value!r}, expected a whole number above 0", hint="omit it for no limit")
    return value


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()
