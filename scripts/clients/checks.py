"""What every client is asked to do. Runs in the client's own virtual environment, which has no Culet."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import struct
import traceback
import zlib
from collections.abc import Callable
from typing import Any

URL = os.environ["CULET_URL"]
MODEL = os.environ["CULET_MODEL"]
SEEING_URL = os.environ["CULET_SEEING_URL"]  # a server whose model sees images, but answers nonsense
SEEING_MODEL = "seeing"
GREETING = "Hello! How are you?"
TRANSLATE = "Translate house to French."
PERSON = "Make JSON with the name and the age: Anna is 31 years old."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "The text"},
        "language": {"type": "string", "description": "The language"},
    },
    "required": ["text", "language"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "translate", "description": "Translate a word.", "parameters": PARAMETERS},
}
PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def translate(text: str, language: str) -> str:
    """Translate a word.

    Args:
        text: The text
        language: The language
    """
    CALLS.append((text, language))
    return "maison"


CALLS: list[tuple[str, str]] = []  # of `translate`, for clients that call tools themselves


def check_call(name: str, arguments: Any) -> None:
    """Check a tool call, whose arguments are JSON or an object."""
    arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    assert name == "translate", name
    assert set(arguments) == {"text", "language"}, arguments
    assert all(isinstance(value, str) for value in arguments.values()), arguments


def check_person(person: Any) -> None:
    """Check a structured answer, which is JSON, an object or an instance of a class."""
    if isinstance(person, str):
        person = json.loads(person)
    fields = person if isinstance(person, dict) else vars(person)
    assert isinstance(fields["name"], str), fields
    assert isinstance(fields["age"], int), fields


def image_base64() -> str:
    """Return a red picture of 48 x 48 pixels as a PNG in base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xff\0\0" * 48) * 48
    head = struct.pack(">IIBBBBB", 48, 48, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def check_seen(text: str, num_prompt_tokens: int) -> None:
    """Check an answer to a question with `image_base64`, which takes 256 tokens."""
    assert text.strip(), text
    assert num_prompt_tokens > 256, num_prompt_tokens


def check_stream(parts: Any) -> None:
    """Check that a text came in several parts."""
    texts = [part for part in parts if part]
    assert len(texts) > 1, texts
    assert "".join(texts).strip(), texts


def run(**checks: Callable[[], Any]) -> None:
    """Run the checks and print their outcome as JSON: "" or what went wrong."""
    outcome = {}
    for name, check in checks.items():
        try:
            result = check()
            if inspect.isawaitable(result):
                asyncio.run(_finish(result))
            outcome[name] = ""
        except Exception as error:
            traceback.print_exc()
            outcome[name] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(outcome))


async def _finish(work: Any) -> None:
    await work
