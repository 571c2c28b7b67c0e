"""The small endpoints: models, tokens, health, version, and how the server stands."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet import __version__
from culet.errors import BadRequest
from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.api.protocol import DetokenizeRequest, TokenizeRequest, decode
from culet.serve.errors import HttpRefusal
from culet.serve.process.client import State
from culet.serve.service import Service
from culet.text.tokenizer import check_token_ids


class ModelCard(Struct):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "culet"


class ModelList(Struct):
    """Every name under which the model is served."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(Struct):
    """Token ids, and how many fit."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Struct):
    """The text of token ids."""

    prompt: str


async def list_models(service: Service, request: Request) -> Response:
    """The names under which the model is served."""
    return json_response(ModelList([_card(service, name) for name in service.names]))


async def show_model(service: Service, request: Request) -> Response:
    """One of them."""
    return json_response(_card(service, service.check_model(request.path_params["name"])))


def _card(service: Service, name: str) -> ModelCard:
    facts = service.engine.facts
    return ModelCard(name, int(service.started_at), None if facts is None else facts.max_model_len)


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a text, or of a conversation through the chat template."""
    body = decode(TokenizeRequest, await request.body())
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("body: expected either prompt or messages")
    if body.messages is not None:
        options = body.chat_template_kwargs
        tokens = await service.encode_chat(
            msgspec.to_builtins(body.messages),
            tools=msgspec.to_builtins(body.tools) if body.tools else None,
            enable_thinking=options.enable_thinking if options is not None else None,
            add_generation_prompt=body.add_generation_prompt,
        )
    else:
        tokens = await service.encode_text(body.prompt or "", add_bos=body.add_special_tokens)
    return json_response(TokenizeAnswer(len(tokens), service.rules.max_model_len, tokens))


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids, special tokens written out."""
    body = decode(DetokenizeRequest, await request.body())
    service.check_model(body.model)
    tokens = check_token_ids(body.tokens, service.rules.vocab_size) if body.tokens else ()
    return json_response(DetokenizeAnswer(service.tokenizer.decode(tokens, skip_special=False)))


async def health(service: Service, request: Request) -> Response:
    """200 while the engine lives, also while it loads; 503 when it is dead or hangs."""
    if not service.is_healthy:
        raise HttpRefusal(503, "the engine is dead", code="engine_unavailable")
    return json_response({"status": "ok", "engine": service.engine.state})


async def ready(service: Service, request: Request) -> Response:
    """200 once the model is loaded and warm, until the server is told to stop; else 503."""
    if not service.is_ready:
        state = "draining" if service.is_draining else service.engine.state
        raise HttpRefusal(503, f"not ready: {state}", code="not_ready")
    return json_response({"status": "ready"})


async def version(service: Service, request: Request) -> Response:
    """The version of Culet."""
    return json_response({"version": __version__})


async def stats(service: Service, request: Request) -> Response:
    """How the server stands, for its web page and for people: see `describe`."""
    return json_response(describe(service))


async def plan_picture(service: Service, request: Request) -> Response:
    """The attention plan as an SVG picture: layers against backends."""
    facts = service.engine.facts
    if facts is None or not facts.plan_svg:
        raise HttpRefusal(404, "there is no plan yet", code="not_found")
    return Response(facts.plan_svg, media_type="image/svg+xml")


def describe(service: Service) -> dict[str, Any]:
    """Everything that changes, in one object: counts since the start, and what is so now."""
    engine = service.engine
    facts, latest = engine.facts, engine.stats
    answer: dict[str, Any] = {
        "time": time.time(),
        "uptime_s": time.time() - service.started_at,
        "state": "draining" if service.is_draining else engine.state.value,
        "models": service.names,
        "requests": {
            "in_flight": engine.num_in_flight,
            "samples_in_flight": service.num_samples,
            "finished": service.num_finished,
        },
        "engine_restarts": service.num_restarts,
    }
    if latest is not None and engine.state is not State.DEAD:
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
    return answer


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, answer=ModelList),
    Endpoint("GET", "/v1/models/{name:path}", show_model, answer=ModelCard),
    Endpoint("POST", "/tokenize", tokenize, body=TokenizeRequest, answer=TokenizeAnswer),
    Endpoint("POST", "/detokenize", detokenize, body=DetokenizeRequest, answer=DetokenizeAnswer),
    Endpoint("GET", "/health", health),
    Endpoint("GET", "/ready", ready),
    Endpoint("GET", "/version", version),
    Endpoint("GET", "/stats", stats),
    Endpoint("GET", "/plan.svg", plan_picture),
)
