"""GET /stats and /plan.svg: the state of the server as JSON, and the attention plan as a picture."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.engines.supervised import SupervisedEngine
from culet.serve.http_errors import HttpError
from culet.serve.process.client import State
from culet.serve.service import Service


async def stats(service: Service, request: Request) -> Response:
    """Return the state of the server, with counts since the start and the current load."""
    return json_response(_describe(service))


async def plan_picture(service: Service, request: Request) -> Response:
    """Return the attention plan as an SVG picture of layers and their backends."""
    facts = service.engines.facts
    if facts is None or not facts.plan_svg:
        raise HttpError(404, "the attention plan is not available yet", code="not_found")
    return Response(facts.plan_svg, media_type="image/svg+xml")


def _describe(service: Service) -> dict[str, Any]:
    engines = service.engines
    facts, latest = engines.facts, engines.stats
    answer: dict[str, Any] = {
        "time": time.time(),
        "uptime_s": time.time() - service.started_at,
        "state": "draining" if service.is_draining else engines.state.value,
        "models": service.names,
        "requests": {
            "in_flight": engines.num_in_flight,
            "samples_in_flight": service.num_samples,
            "finished": service.num_finished,
        },
        "engine_restarts": engines.num_restarts,
    }
    if latest is not None and engines.state is not State.DEAD:
        answer |= {
            "prompt_tokens": latest.num_prompt_tokens,
            "generated_tokens": latest.num_generated_tokens,
            "engine_memory_bytes": latest.memory_bytes,
            "scheduler": latest.scheduler,
        }
    if facts is not None:
        answer["engine"] = {
            "device": facts.device,
            "dtype": facts.dtype,
            "max_model_len": facts.max_model_len,
            "max_num_seqs": facts.max_num_seqs,
            "num_pages": facts.num_pages,
            "page_bytes": facts.page_bytes,
            "groups": facts.groups,
            "start_s": facts.start_s,
        }
    if len(engines.parts) > 1:
        answer["engines"] = [_describe_engine(part) for part in engines.parts]
    return answer


def _describe_engine(part: SupervisedEngine) -> dict[str, Any]:
    """Return the state of one of several engines."""
    answer: dict[str, Any] = {
        "state": part.state.value,
        "health": part.health,
        "in_flight": part.num_in_flight,
        "restarts": part.num_restarts,
    }
    if part.stats is not None and part.is_ready:
        answer |= {
            "prompt_tokens": part.stats.num_prompt_tokens,
            "generated_tokens": part.stats.num_generated_tokens,
            "scheduler": part.stats.scheduler,
        }
    return answer


ENDPOINTS = (
    Endpoint("GET", "/stats", stats),
    Endpoint("GET", "/plan.svg", plan_picture),
)
