"""POST /tokenize and /detokenize: convert between text and token ids."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.api.endpoint import Endpoint, decode, json_response
from culet.serve.api.fields import Text, TokenId
from culet.serve.api.openai_chat import Message, TemplateOptions, Tool
from culet.serve.service import Service


class TokenizeRequest(Struct):
    """The body of POST /tokenize, with a text or the messages of a chat."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool = True


class DetokenizeRequest(Struct):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 21)]
    model: Annotated[str, Meta(max_length=256)] | None = None


class TokenizeAnswer(Struct):
    """Token ids and their number, and the size of the context."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Struct):
    """The text of the token ids."""

    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation rendered by the chat template."""
    body = decode(TokenizeRequest, await request.body())
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("body: expected either prompt or messages, but not both")
    if body.messages is not None:
        options = body.chat_template_kwargs
        tokens = await service.encode_chat(
            body.messages,
            tools=body.tools or None,
            enable_thinking=options.enable_thinking if options is not None else None,
            add_generation_prompt=body.add_generation_prompt,
        )
    else:
        tokens = await service.encode_text(body.prompt or "", add_bos=body.add_special_tokens)
    return json_response(TokenizeAnswer(len(tokens), service.rules.max_model_len, tokens))


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    body = decode(DetokenizeRequest, await request.body())
    service.check_model(body.model)
    return json_response(DetokenizeAnswer(await service.decode_tokens(body.tokens)))


ENDPOINTS = (
    Endpoint("POST", "/tokenize", tokenize, body=TokenizeRequest, answer=TokenizeAnswer),
    Endpoint("POST", "/detokenize", detokenize, body=DetokenizeRequest, answer=DetokenizeAnswer),
)
