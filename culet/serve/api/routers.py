"""GET /server_info, /model_info and /get_load, which routers ask for. The names and fields are those of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from culet import __version__
from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.process.wire import Stats
from culet.serve.service import Service, public_name
from culet.types import Request as Submitted


async def server_info(service: Service, request: Request) -> Response:
    """Return what a router wants to know about the server: names, sizes and the number of engines."""
    facts = service.engines.facts
    answer: dict[str, Any] = {
        **_model(service),
        "version": __version__,
        "status": "ready" if service.is_ready else service.health,
        "dp_size": service.settings.data_parallel_size,
        "tp_size": service.config.parallel.tensor_parallel_size,
        "enable_prefix_caching": service.config.cache.enable_prefix_caching,
    }
    if facts is not None:
        answer |= {
            "page_size": facts.block_tokens,
            "max_total_num_tokens": facts.cache_tokens,  # of one engine, as in SGLang
            "max_running_requests": facts.max_num_seqs,
            "max_queued_requests": facts.max_queue_len,
            "context_length": facts.max_model_len,
        }
    return json_response(answer)


async def model_info(service: Service, request: Request) -> Response:
    """Return what a router wants to know about the model."""
    return json_response(_model(service))


async def get_load(service: Service, request: Request) -> Response:
    """Return the load of each engine, as of its latest report. Routers for SGLang compare servers by the sum of `num_tokens`.

    `num_tokens` counts the tokens of running and waiting sequences: their prompts, cached or not, and their answers so far.
    `load` is what older routers read, the number of requests. As in the other fields, each sample counts as one.

    An engine that is restarted has no report, but the requests that wait for it count. Otherwise its server would seem to have
    less to do than others. One that is given up has no requests.
    """
    service.require_ready()
    parts = [(rank, part) for rank, part in enumerate(service.engines.parts) if not part.is_given_up]
    loads = [_load(rank, part.stats) if part.is_ready else _load_of_waiting(rank, part.unfinished) for rank, part in parts]
    return json_response(loads)


def _model(service: Service) -> dict[str, Any]:
    model = public_name(service.config.model.model)  # routers may fetch its tokenizer from the Hub
    return {
        "model_path": model,
        "tokenizer_path": model,
        "served_model_name": service.names[0],
        "is_generation": True,
        "model_type": "gemma4",
        "vocab_size": service.checkpoint.spec.vocab_size,
    }


def _load(rank: int, stats: Stats | None) -> dict[str, Any]:
    """Describe a ready engine, which has sent no report in its first moment."""
    if stats is None:
        return _load_of_waiting(rank, [])
    now = stats.scheduler
    num_used = now.num_pages - now.num_free_pages - now.num_resume_point_pages
    return {
        "dp_rank": rank,
        "load": now.num_running + now.num_waiting,
        "num_tokens": now.num_tokens,
        "num_reqs": now.num_running + now.num_waiting,
        "num_running_reqs": now.num_running,
        "num_waiting_reqs": now.num_waiting,
        "num_pages_used": num_used,
        "token_usage": num_used / max(1, now.num_pages),
    }


def _load_of_waiting(rank: int, requests: Sequence[Submitted]) -> dict[str, Any]:
    """Describe an engine in which no request runs yet."""
    num_waiting = sum(request.n for request in requests)
    return {
        "dp_rank": rank,
        "load": num_waiting,
        "num_tokens": sum(request.n * len(request.prompt_token_ids) for request in requests),
        "num_reqs": num_waiting,
        "num_running_reqs": 0,
        "num_waiting_reqs": num_waiting,
        "num_pages_used": 0,
        "token_usage": 0.0,
    }


ENDPOINTS = (
    Endpoint("GET", "/server_info", server_info),
    Endpoint("GET", "/get_server_info", server_info),
    Endpoint("GET", "/model_info", model_info),
    Endpoint("GET", "/get_model_info", model_info),
    Endpoint("GET", "/get_load", get_load),
)
