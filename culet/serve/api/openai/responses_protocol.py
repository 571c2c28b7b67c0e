"""Define the body of POST /v1/responses and convert it to chat messages. Every list, text and number is bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, field, to_builtins

from culet.errors import BadRequest
from culet.serve.api.fields import (
    AudioData,
    Count,
    CountOrNone,
    Detail,
    Effort,
    PastToolName,
    SamplingFields,
    Schema,
    TemplateOptions,
    Text,
    ToolName,
)
from culet.serve.api.refused import Refused
from culet.structured.request_fields import SchemaText

Id = Annotated[str, Meta(max_length=256)]
MEDIA = ("input_image", "input_file", "input_audio")


class ResponsesPart(Struct):
    """A part of an item's content."""

    type: Literal[
        "input_text",
        "output_text",
        "text",
        "refusal",
        "summary_text",
        "reasoning_text",
        "input_image",
        "input_file",
        "input_audio",
    ]
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | None = None
    detail: Detail | None = None
    input_audio: AudioData | None = None
    file_data: Text | None = None
    file_url: Text | None = None
    file_id: Id | None = None
    filename: Annotated[str, Meta(max_length=1024)] | None = None


Parts = Annotated[list[ResponsesPart], Meta(max_length=1024)]


class InputItem(Struct):
    """A message, an earlier tool call, the output of a tool, or an earlier thought, depending on `type`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Parts | None = None
    summary: Parts | None = None
    id: Id | None = None
    call_id: Id | None = None
    name: PastToolName | None = None
    arguments: Text | None = None
    output: Text | Parts | None = None


class ResponsesTool(Struct):
    """A tool that the model may call."""

    name: ToolName
    type: Literal["function"] = "function"
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    input_schema: Refused = UNSET  # Anthropic's `parameters`
    inputSchema: Refused = UNSET  # the same in MCP


class ResponsesToolName(Struct):
    """The tool that must be called."""

    name: ToolName
    type: Literal["function"] = "function"


class TextFormat(Struct):
    """The required format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: Text | None = None
    schema_: SchemaText = field(name="schema", default=UNSET)
    strict: bool | None = None


class TextOptions(Struct):
    format: TextFormat | None = None
    verbosity: Refused = UNSET


class ReasoningOptions(Struct):
    """Whether the model thinks before it answers, and how much."""

    effort: Effort | None = None
    max_tokens: CountOrNone = None
    enabled: bool | None = None
    exclude: Refused = UNSET
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/responses."""

    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=65536)]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    constrain_tool_calls: bool | None = None  # hold tool calls to the declared tools
    unmarked_tool_calls: bool | None = None  # calls of declared tools count without the tokens around them
    tools: Annotated[list[ResponsesTool], Meta(max_length=4096)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolName | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: TemplateOptions | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=64)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: Effort | None = None
    store: bool | None = None  # whether to keep the response, if the server stores responses; by default it does
    background: bool | None = None
    previous_response_id: Id | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None
    ) = None
    user: Id | None = None
    conversation: Refused = UNSET


def messages_of(body: ResponsesRequest, max_items: int) -> list[dict[str, Any]]:
    """Return the input as chat messages. Raise if it has more than `max_items` items."""
    if not isinstance(body.input, str) and len(body.input) > max_items:
        raise BadRequest(f"input: got {len(body.input)} items, but the maximum is {max_items}")
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # before the next part of an answer
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if item.type == "reasoning":
            thoughts.append(text_of(item.content or item.summary))
            continue
        if item.type == "function_call_output":
            if item.call_id is None:
                raise BadRequest(f"{where}.call_id: the id of the call is required")
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output, f"{where}.output")}
            )
        elif item.type == "function_call":
            _add_call(messages, item, where)
        else:
            separator = "" if item.role == "assistant" else "\n"  # the parts of an answer are one text
            content = content_of(item.content, f"{where}.content", separator)
            if item.role == "assistant" and _awaits_text(messages):
                messages[-1]["content"] = content
            else:
                messages.append({"role": item.role or "user", "content": content})
        if messages[-1]["role"] == "assistant" and any(thoughts):
            known = [messages[-1]["reasoning_content"]] if "reasoning_content" in messages[-1] else []
            messages[-1]["reasoning_content"] = "\n".join([*known, *filter(None, thoughts)])
        thoughts = []  # a thought without an answer was cut, and does not belong to the next one
    if not messages:
        raise BadRequest("input: got no message, expected at least one")
    return messages


def _awaits_text(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message has only calls so far. Text that the model wrote after a call belongs to it."""
    return bool(messages) and "tool_calls" in messages[-1] and "content" not in messages[-1]


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Add a call to the preceding assistant message, or to a new one."""
    if item.name is None or item.call_id is None:
        raise BadRequest(f"{where}: a function_call needs a call_id and a name")
    call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments or "{}"}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    messages[-1].setdefault("tool_calls", []).append(call)


def content_of(content: str | list[ResponsesPart] | None, where: str, separator: str = "\n") -> str | list[dict[str, Any]]:
    """Return an item's content as text, or as parts if it has media. `where` names the content in errors."""
    if content is None or isinstance(content, str) or not any(part.type in MEDIA for part in content):
        return text_of(content, separator)
    return [
        to_builtins(part) | {"where": f"{where}[{index}]"} if part.type in MEDIA else {"type": "text", "text": text_of([part])}
        for index, part in enumerate(content)
    ]


def text_of(content: str | list[ResponsesPart] | None, separator: str = "\n") -> str:
    """Return the text of an item's content."""
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(part.text or part.refusal or "" for part in content)
