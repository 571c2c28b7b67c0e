"""Serve the web page at `/` with its files, examples, rendered Markdown and plots, and the API's description at `/docs`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.answers.parts import BigAnswer
from culet.serve.api.endpoint import Endpoint, json_response, read_body
from culet.serve.api.fields import Text
from culet.serve.http_errors import HttpError
from culet.serve.plot_history import PlotPoint
from culet.serve.service import Service

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page loads nothing from other hosts, runs no inline scripts or styles, and cannot be framed. Text that a model writes
# therefore cannot send data elsewhere.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _read_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the files that a browser loads."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(tuple(_KINDS)):
            yield f"{prefix}{entry.name}", entry.read_bytes()


_FOLDER = files("culet.serve").joinpath("page")
_FILES = dict(_read_files(_FOLDER))
MAX_TEXTS = 64  # in one request


class Example(Struct):
    """A prompt that suits the model, and its title."""

    title: str
    prompt: str


class Examples(Struct):
    """The prompts that an empty chat offers."""

    examples: list[Example]


class MarkdownRequest(Struct):
    """The body of POST /markdown."""

    texts: Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]


class MarkdownAnswer(Struct):
    """For each text its blocks, each as [first line, node]. A node is a text, or [name, attributes, child, ...]."""

    documents: list[list[tuple[int, Any]]]


class Totals(Struct):
    """Counts since the engine started."""

    requests: int
    output_tokens: int
    prefix_hit_share: float
    preemptions: int


class Samples(Struct):
    """The points that a page has not seen yet, and the current counts."""

    uptime_s: float
    has_plan: bool  # whether /plan.svg exists
    totals: Totals
    samples: list[PlotPoint]


def _file(name: str) -> Response:
    kind = _KINDS[name[name.rindex(".") :]]
    return Response(_FILES[name], media_type=kind, headers=_HEADERS)


async def page(service: Service, request: Request) -> Response:
    """Return the web page, with a chat and plots of the engine."""
    return _file("index.html")


async def docs(service: Service, request: Request) -> Response:
    """Return the page that shows the OpenAPI document. It needs no key, but the document that it loads does."""
    return _file("docs.html")


async def page_file(service: Service, request: Request) -> Response:
    """Return a static file of the web page."""
    name = request.path_params["name"]
    if name not in _FILES:
        raise HttpError(404, "file not found", code="not_found")
    return _file(name)


async def plot_points(service: Service, request: Request) -> Response:
    """Return data for the page's plots: the state of the engine once per second, after `?since=` (seconds since 1970)."""
    try:
        since = float(request.query_params.get("since", "0"))
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise BadRequest("since: expected seconds since 1970")
    stats = service.engines.stats
    counters = None if stats is None else stats.scheduler.counters
    totals = Totals(
        requests=service.num_finished,
        output_tokens=0 if stats is None else stats.num_generated_tokens,
        prefix_hit_share=0.0 if counters is None else counters.prefix_hit_tokens / max(1, counters.prefix_query_tokens),
        preemptions=0 if counters is None else counters.preemptions,
    )
    facts = service.engines.facts
    has_plan = facts is not None and bool(facts.plan_svg)
    return json_response(Samples(time.time() - service.started_at, has_plan, totals, service.plot_history.since(since)))


_EXAMPLES = msgspec.json.decode(_FOLDER.joinpath("examples.json").read_bytes(), type=dict[str, list[Example]])


async def examples(service: Service, request: Request) -> Response:
    """Return example prompts that the model answers well."""
    return json_response(Examples(_EXAMPLES["built-in" if service.is_built_in else "other"]))


async def markdown(service: Service, request: Request) -> Response:
    """Return Markdown as trees of elements, with highlighted code and MathML. The web page shows answers with it."""
    num_bytes = len(await request.body())
    service.markdown.check_size(num_bytes)
    body = await read_body(service, request, MarkdownRequest)
    return BigAnswer([await service.markdown.render(body.texts, num_bytes)])


ENDPOINTS = (
    Endpoint("GET", "/", page),
    Endpoint("GET", "/docs", docs),
    Endpoint("GET", "/page/{name:path}", page_file),
    Endpoint("GET", "/examples", examples, answer=Examples),
    Endpoint("POST", "/markdown", markdown, body=MarkdownRequest, answer=MarkdownAnswer),
    Endpoint("GET", "/samples", plot_points, answer=Samples),
)
PUBLIC_PATHS = ("/", "/docs", *(f"/page/{name}" for name in _FILES))
