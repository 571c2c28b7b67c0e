"""POST /tokenize and /detokenize: convert between text and token ids. GET /tokenizer_info: the names of special tokens.

A client decides how many tokens there are, so the answers are built in short turns of the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.answers.parts import BigAnswer, Part
from culet.serve.api.chat_request import check_chat
from culet.serve.api.endpoint import Endpoint, encoder, json_response, read_body
from culet.serve.api.fields import CountOrNone, Effort, MediaFields, TemplateOptions, Text, TokenId, thinking_of
from culet.serve.api.openai.chat import Message, NamedChoice, Reasoning, Tool, continued, tool_fields
from culet.serve.api.refused import Refused, refuse_unsupported
from culet.serve.service import Service
from culet.text.tokenizer import IncrementalDecoder, Tokenizer, check_token_ids, no_tokenizer

MAX_IDS = 1 << 18  # the longest context of the models
_STEP_TOKENS = 1024


class TokenizeRequest(Struct):
    """The body of POST /tokenize, with a text or the messages of a chat.

    A client may send the whole body of a chat. Fields that change its prompt count or are refused, and the others are ignored.
    """

    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None  # with none, the prompt has no tools
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: CountOrNone = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends with the last message, which the answer would continue
    mm_processor_kwargs: MediaFields | None = None
    return_token_strs: bool | None = False
    chat_template: Refused = UNSET
    documents: Refused = UNSET
    enable_thinking: Refused = UNSET
    think: Refused = UNSET
    system: Refused = UNSET
    functions: Refused = UNSET
    input: Refused = UNSET
    input_ids: Refused = UNSET
    prompt_embeds: Refused = UNSET
    truncate_prompt_tokens: Refused = UNSET
    multi_modal_data: Refused = UNSET
    image_data: Refused = UNSET
    video_data: Refused = UNSET
    audio_data: Refused = UNSET
    media_io_kwargs: Refused = UNSET
    session_params: Refused = UNSET
    extra_body: Refused = UNSET


class DetokenizeRequest(Struct):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    skip_special_tokens: bool | None = False
    model: Annotated[str, Meta(max_length=256)] | None = None


class TokenizeAnswer(Struct):
    """Token ids and their number, and the size of the context. `token_strs` are the texts of the tokens, if requested."""

    count: int
    max_model_len: int
    token_strs: list[str] | None
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
    refuse_unsupported(body, thinks=service.settings.enable_thinking)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("body: expected either prompt or messages, but not both")
    return await _tokenize(service, body)


async def _tokenize(service: Service, body: TokenizeRequest) -> Response:
    if body.messages is not None:
        options = body.chat_template_kwargs or TemplateOptions()
        asked = body.reasoning or Reasoning()
        is_on = asked.enabled if options.enable_thinking is None else options.enable_thinking
        thinking = thinking_of(service, effort=body.reasoning_effort or asked.effort, budget=asked.max_tokens, is_on=is_on)
        budget = thinking.budget if body.thinking_token_budget is None else body.thinking_token_budget
        tools = [] if body.tool_choice == "none" else [tool_fields(tool) for tool in body.tools or ()]
        await check_chat(service, body.messages, tools)
        last_text = continued(
            body.messages, is_asked=body.continue_final_message, add_generation_prompt=body.add_generation_prompt
        )
        prompt = await service.prompts.encode_chat(
            body.messages,
            tools=tools or None,
            enable_thinking=False if budget == 0 else thinking.is_on,  # as in a chat
            add_generation_prompt=body.add_generation_prompt,
            options=options.variables(),
            continued=last_text,
            media=(body.mm_processor_kwargs or MediaFields()).options(),
        )
        tokens = prompt.token_ids
    else:
        tokens = await service.prompts.encode_text(body.prompt or "", add_bos=body.add_special_tokens)
    parts: list[Part] = [b'{"count":%d,"max_model_len":%d,"token_strs":' % (len(tokens), service.rules.max_model_len)]
    async for pieces in service.turns.run(_encode_ids(tokens, service.tokenizer if body.return_token_strs else None)):
        parts += pieces
    return BigAnswer(parts)


def _encode_ids(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[bytes]:
    """Yield the rest of a TokenizeAnswer as JSON, from its `token_strs` on. Without a tokenizer, there are none."""
    if tokenizer is None:
        yield b"null"
    else:
        yield from _encode_list(token_ids, lambda step: [tokenizer.piece(each).decode(errors="replace") for each in step])
    yield b',"tokens":'
    yield from _encode_list(token_ids, lambda step: step)
    yield b"}"


def _encode_list(token_ids: Sequence[int], convert: Callable[[Sequence[int]], Sequence[object]]) -> Iterator[bytes]:
    """Yield the converted token ids as a JSON list."""
    yield b"["
    for begin in range(0, len(token_ids), _STEP_TOKENS):
        data = encoder.encode(convert(token_ids[begin : begin + _STEP_TOKENS]))[1:-1]
        yield b"," + data if begin else data
    yield b"]"


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    body = await read_body(service, request, DetokenizeRequest)
    service.check_model(body.model)
    if not service.tokenizer.has_text:
        raise no_tokenizer("tokens: they stand for text")
    parts: list[Part] = [b'{"prompt":"']
    decoder = IncrementalDecoder(service.tokenizer, skip_special=bool(body.skip_special_tokens))
    async for pieces in service.turns.run(_decode_ids(decoder, body.tokens, service.rules.vocab_size)):
        parts += pieces
    return BigAnswer([*parts, b'"}'])


def _decode_ids(decoder: IncrementalDecoder, token_ids: Sequence[int], vocab_size: int) -> Iterator[bytes]:
    """Yield the text of token ids as JSON, without quotes."""
    for begin in range(0, len(token_ids), _STEP_TOKENS):
        step = token_ids[begin : begin + _STEP_TOKENS]
        text = decoder.push(check_token_ids(step, vocab_size, "tokens", begin))
        yield encoder.encode(text)[1:-1]
    yield encoder.encode(decoder.flush())[1:-1]


ENDPOINTS = (
    Endpoint("GET", "/tokenizer_info", tokenizer_info, answer=TokenizerInfo),
    Endpoint("POST", "/tokenize", tokenize, body=TokenizeRequest, answer=TokenizeAnswer),
    Endpoint("POST", "/detokenize", detokenize, body=DetokenizeRequest, answer=DetokenizeAnswer),
)
