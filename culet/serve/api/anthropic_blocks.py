"""The blocks of messages in Anthropic's API, and the parts of chat messages that they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from culet.errors import BadRequest
from culet.serve.api.fields import PastToolName, Text


class TextBlock(Struct, tag="text"):
    text: Text


class ThinkingBlock(Struct, tag="thinking"):
    """An earlier thought of the model."""

    thinking: Text
    signature: Text = ""


class RedactedBlock(Struct, tag="redacted_thinking"):
    """An encrypted thought. It is ignored."""

    data: Text = ""


class ToolUseBlock(Struct, tag="tool_use"):
    """An earlier tool call."""

    id: Annotated[str, Meta(max_length=256)]
    name: PastToolName
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]  # may be long, so it is parsed later


class ImageSource(Struct, omit_defaults=True):
    """Where an image is: in `data` as base64, or at a URL of a host that the server allows."""

    type: Literal["base64", "url"]
    data: Text | None = None
    media_type: Annotated[str, Meta(max_length=64)] | None = None  # ignored, because the data says what it is
    url: Text | None = None


class ImageBlock(Struct, tag="image"):
    """An image."""

    source: ImageSource


class ToolResultBlock(Struct, tag="tool_result"):
    """The output of a tool."""

    tool_use_id: Annotated[str, Meta(max_length=256)]
    content: Text | Annotated[list[TextBlock | ImageBlock], Meta(max_length=1024)] | None = None
    is_error: bool = False


class DocumentBlock(Struct, tag="document"):
    """A document. Not supported, and refused with an explanation."""


Block = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock


def text_of(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def part_of(block: TextBlock | ImageBlock, where: str) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if (source.data if source.type == "base64" else source.url) is None:
        raise BadRequest(f"{where}.source: got no {'data' if source.type == 'base64' else 'url'}")
    given = {"base64": source.data} if source.type == "base64" else {"url": source.url}
    return {"type": "image", "where": where, **given}


def result_of(block: ToolResultBlock, where: str) -> str | list[dict[str, Any]]:
    """Return the result of a tool as text, or as parts if it has images."""
    content = block.content or ""
    if isinstance(content, str):
        return f"error: {content}" if block.is_error else content
    if any(isinstance(part, ImageBlock) for part in content):
        parts = [part_of(part, f"{where}[{index}]") for index, part in enumerate(content)]
        return _failed(parts) if block.is_error else parts
    text = text_of([part for part in content if isinstance(part, TextBlock)])
    return f"error: {text}" if block.is_error else text


def _failed(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the result of a tool that failed: its first text begins with `error:`."""
    for index, part in enumerate(parts):
        if part["type"] == "text":
            return [*parts[:index], {**part, "text": f"error: {part['text']}"}, *parts[index + 1 :]]
    return [{"type": "text", "text": "error:"}, *parts]
