"""Convert earlier messages from the form that OpenAI clients send to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from culet.errors import BadRequest


def parse_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with their tool call arguments parsed. Clients send arguments as JSON text."""
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _parse_message(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = []
    for number, call in enumerate(calls):
        function = dict(call["function"])
        function["arguments"] = _parse_object(function.get("arguments"), f"{where}.tool_calls[{number}].function.arguments")
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}


def _parse_object(arguments: object, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BadRequest(f"{where}: not valid JSON") from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}: got {type(arguments).__name__}, expected a JSON object")
    return arguments
