"""POST /tokenize and /detokenize: convert between text and token ids. GET /tokenizer_info: the names of special tokens.

A client decides how many tokens there are, so the answers are built in short turns of the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.answers.parts import BigAnswer, Part
from culet.serve.api.chat_request import check_chat
from culet.serve.api.endpoint import Endpoint, encoder, json_response, read_body
from culet.serve.api.fields import MediaFields, TemplateOptions, Text, TokenId
from culet.serve.api.openai.chat import Message, Tool, continued, tool_fields
from culet.serve.service import Service
from culet.text.tokenizer import IncrementalDecoder, Tokenizer, check_token_ids, no_tokenizer

MAX_IDS = 1 << 18  # the longest context of the models
_STEP_TOKENS = 1024


class TokenizeRequest(Struct):
    """The body of POST /tokenize, with a text or the messages of a chat."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends with the last message, which the answer would continue
    mm_processor_kwargs: MediaFields | None = None


class DetokenizeRequest(Struct):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    model: Annotated[str, Meta(max_length=256)] | None = None


class TokenizeAnswer(Struct):
    """Token ids and their number, and the size of the context."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Struct):
    """The text of the token ids."""

    prompt: str


class TokenizerInfo(Struct):
    """What a client needs to build prompts itself."""

    bos_token: str
    eos_token: str
    pad_token: str
    chat_template: str
    model_max_length: int
    tokenizer_class: str = "PreTrainedTokenizerFast"


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Return the special tokens and the chat template."""
    names, limit = service.template.special_tokens, service.rules.max_model_len
    bos, eos, pad = (names[f"{name}_token"] for name in ("bos", "eos", "pad"))
    return json_response(TokenizerInfo(bos, eos, pad, service.template.source, limit))


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation rendered by the chat template."""
    body = await read_body(service, request, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("body: expected either prompt or messages, but not both")
    return await _tokenize(service, body)


async def _tokenize(service: Service, body: TokenizeRequest) -> Response:
    if body.messages is not None:
        options = body.chat_template_kwargs or TemplateOptions()
        tools = [tool_fields(tool) for tool in body.tools or ()]
        await check_chat(service, body.messages, tools)
        prompt = await service.prompts.encode_chat(
            body.messages,
            tools=tools or None,
            enable_thinking=options.enable_thinking,
            add_generation_prompt=body.add_generation_prompt,
            options=options.variables(),
            continued=continued(body.messages, body.add_generation_prompt) if body.continue_final_message else None,
            media=(body.mm_processor_kwargs or MediaFields()).options(),
        )
        tokens = prompt.token_ids
    else:
        tokens = await service.prompts.encode_text(body.prompt or "", add_bos=body.add_special_tokens)
    answer = TokenizeAnswer(len(tokens), service.rules.max_model_len, [])
    parts: list[Part] = [encoder.encode(answer).removesuffix(b"]}")]
    async for pieces in service.turns.run(_encode_ids(tokens)):
        parts += pieces
    return BigAnswer([*parts, b"]}"])


def _encode_ids(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield token ids as JSON, without brackets."""
    for begin in range(0, len(token_ids), _STEP_TOKENS):
        data = encoder.encode(token_ids[begin : begin + _STEP_TOKENS])[1:-1]
        yield b"," + data if begin else data


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    body = await read_body(service, request, DetokenizeRequest)
    service.check_model(body.model)
    if not service.tokenizer.has_text:
        raise no_tokenizer("tokens: they stand for text")
    parts: list[Part] = [b'{"prompt":"']
    async for pieces in service.turns.run(_decode_ids(service.tokenizer, body.tokens, service.rules.vocab_size)):
        parts += pieces
    return BigAnswer([*parts, b'"}'])


def _decode_ids(tokenizer: Tokenizer, token_ids: Sequence[int], vocab_size: int) -> Iterator[bytes]:
    """Yield the text of token ids as JSON, without quotes."""
    decoder = IncrementalDecoder(tokenizer, skip_special=False)
    for begin in range(0, len(token_ids), _STEP_TOKENS):
        text = decoder.push(check_token_ids(token_ids[begin : begin + _STEP_TOKENS], vocab_size))
        yield encoder.encode(text)[1:-1]
    yield encoder.encode(decoder.flush())[1:-1]


ENDPOINTS = (
    Endpoint("GET", "/tokenizer_info", tokenizer_info, answer=TokenizerInfo),
    Endpoint("POST", "/tokenize", tokenize, body=TokenizeRequest, answer=TokenizeAnswer),
    Endpoint("POST", "/detokenize", detokenize, body=DetokenizeRequest, answer=DetokenizeAnswer),
)
