"""Define endpoints, parse their requests and write their answers."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.generation import Origin
from culet.serve.http.json_cost import JsonCost
from culet.serve.keys import CALLER, Caller
from culet.serve.service import Service

T = TypeVar("T", bound=Struct)
encoder = msgspec.json.Encoder()
_decoders: dict[type[Struct], msgspec.json.Decoder[Any]] = {}
SMALL_BODY = 64 << 10  # decoded at once, whatever is in it
_MAX_PROBLEM_CHARS = 500  # of an error message, which may quote the client's own text
_OTHER_VALUE = re.compile(r"invalid (?:enum )?value (.*)", re.DOTALL)
_TOOL_TYPE = re.compile(r"tools\[\d+\]\.type")
_OTHER_TOOL = "the server runs no tools itself, so declare a function, and run it in the client"
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SIMILAR = 0.88  # how alike a misspelt name and the right one are at least, as difflib measures it
# Comparing names takes time, so a request has only this many unknown names compared, and only short ones.
_MAX_UNKNOWN, _MAX_NAME_CHARS = 8, 64
_OTHER_FIELDS = frozenset({"models"})  # not misspelt, although they look like it. OpenRouter has this one.
# The decoder holds the GIL, so two at a time would only stop the event loop for longer.
decoding_thread = ThreadPoolExecutor(1, "decode")


@dataclass(frozen=True)
class Endpoint:
    """One path and method. To refuse a request, `handle` raises a CuletError, which the middleware turns into a reply.

    `body` and `answer` are the structs of the request and the answer in the OpenAPI document. `body_type` is the content type
    that requests must have. An endpoint that `only_refuses` explains why the server lacks it.
    """

    method: str
    path: str
    handle: Callable[[Service, Request], Awaitable[Response]]
    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    body_type: str = "application/json"
    only_refuses: bool = False


async def read_body(service: Service, request: Request, kind: type[T]) -> T:
    """Read the request's body as a `kind`. Raise a BadRequest if it does not match, or would take too long to decode."""
    body = await request.body()
    if len(body) <= SMALL_BODY:
        return decode(kind, body)
    cost, max_cost = JsonCost(), service.limits.json_values
    for begin in range(0, len(body), SMALL_BODY):
        cost.push(body[begin : begin + SMALL_BODY])
        if cost.cost > max_cost:
            raise BadRequest(
                f"body: more than {max_cost} values, where each list or object counts as eight",
                hint="send less at once, or raise the limit with --limits json_values=N",
            )
        await asyncio.sleep(0)  # other clients have their turn
    return await asyncio.get_running_loop().run_in_executor(decoding_thread, decode, kind, body)


def decode(kind: type[T], body: bytes | bytearray) -> T:
    """Parse `body` as a `kind`. If it does not match, raise a BadRequest that names the field."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        request: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `")
        path = place.rstrip("`").removeprefix("$").removeprefix(".")
        problem = f"{problem[:1].lower()}{problem[1:_MAX_PROBLEM_CHARS]}"
        if (value := _OTHER_VALUE.match(problem)) is not None and (choices := _choices_at(kind, path)):
            problem = f"got {value[1]}, expected {'one of: ' if len(choices) > 1 else ''}{', '.join(choices)}"
        hint = _OTHER_TOOL if _TOOL_TYPE.fullmatch(path) else ""
        raise BadRequest(f"{path or 'body'}: {problem}", hint=hint) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRequest(f"body: not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("body: the JSON is nested too deeply") from None
    _check_spelling(kind, _top_level.decode(body))  # the decoder above does not tell which fields it skipped
    return request


def _check_spelling(kind: type[Struct], given: Mapping[str, object]) -> None:
    """Raise if a field is probably misspelt. Other unknown fields are ignored."""
    unknown = given.keys() - _names_of(kind) - _OTHER_FIELDS
    for name in itertools.islice(unknown, _MAX_UNKNOWN):
        if len(name) <= _MAX_NAME_CHARS and (meant := _meant_by(kind, name)) is not None:
            raise BadRequest(f"{name}: unknown field", hint=f"did you mean {meant}?")


@cache
def _names_of(kind: type[Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


@lru_cache(maxsize=1024)
def _meant_by(kind: type[Struct], name: str) -> str | None:
    """Return the field whose name differs from `name` by one letter or two, if there is one."""
    likely = [known for known in _names_of(kind) if abs(len(known) - len(name)) <= 1 and known[0] == name[:1]]
    return next(iter(difflib.get_close_matches(name, likely, 1, _SIMILAR)), None)


def _choices_at(kind: type[Struct], path: str) -> list[str]:
    """Return the values that a field accepts, if they are a fixed set. `path` is such as `tools[0].type`."""
    types: list[Any] = [_type_info(kind)]
    names = re.findall(r"[^.\[\]]+", path)
    for number, name in enumerate(names):
        types = _members(types)
        structs = [found for found in types if isinstance(found, inspect.StructType)]
        is_last = number == len(names) - 1
        tags = [str(found.tag) for found in structs if found.tag_field == name and found.tag is not None]
        if is_last and tags:
            return tags
        lists = [found.item_type for found in types if isinstance(found, inspect.ListType) and name.isdecimal()]
        types = lists + [field.type for found in structs for field in found.fields if field.encode_name == name]
    return [str(value) for found in _members(types) if isinstance(found, inspect.LiteralType) for value in found.values]


def _members(types: Sequence[Any]) -> list[Any]:
    """Return types without unions and annotations."""
    found: list[Any] = []
    for entry in types:
        inner = entry.type if isinstance(entry, inspect.Metadata) else entry
        found += _members(inner.types) if isinstance(inner, inspect.UnionType) else [inner]
    return found


_type_info = cache(inspect.type_info)


def json_response(answer: object, status: int = 200) -> Response:
    """Return a response with `answer`, a struct or plain data, as JSON."""
    return Response(encoder.encode(answer), status_code=status, media_type="application/json")


def origin_of(request: Request, *, priority: int = 0, cache_salt: str | None = None) -> Origin:
    """Return who sent this request, with the fields of its body that depend on it. Raise if its key may not set a priority.

    The id is that in the log. The client also receives it as `x-request-id`.
    """
    caller: Caller = request.scope[CALLER]
    caller.check_priority(priority)
    return Origin(request.scope["request_id"], caller, priority, caller.salt(cache_salt))
