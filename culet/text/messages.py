"""Check chat messages and tools before a template sees them. Each error names the offending field."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from culet.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_OPTIONS = ("enable_thinking", "preserve_thinking")  # which clients may set
MEDIA_PARTS = frozenset({"image", "audio", "video"})  # templates write a placeholder for each. Their content is elsewhere.


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Check the messages and return them as plain dicts. The role `model` becomes `assistant`.

    The arguments of a tool call may be a mapping or JSON text. The process that renders the template checks them.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise BadRequest(f"messages: got {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise BadRequest("messages: got an empty list, expected at least one message")
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return _with_named_results(checked)


def _with_named_results(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assign each tool result to its call, and put the results in the order of their calls.

    A prompt has no ids, so only the order tells the model which call a result belongs to. Clients that run tools in parallel
    send results in the order in which the tools finish.
    """
    named: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
        found = list(group)
        if role == "tool":
            places = _assign(found, calls)
            if len(found) < len(calls):  # the model would match results with the wrong calls
                call = calls[min(set(range(len(calls))) - set(places))]
                problem = f"messages: the call of {call['function']['name']} with the id {call['id']!r} has no result"
                raise BadRequest(problem, hint="send a result for each call of a turn, or for none")
            if calls:
                _move_text_to_calls(named)
            if not any(map(_has_media, found)):  # the media themselves stay in the order of the request
                found = [found[index] for index in sorted(range(len(found)), key=places.__getitem__)]
        elif role == "assistant":
            calls = [call for message in found for call in message.get("tool_calls") or ()]
        else:
            calls = []
        named += found
    return named


def _move_text_to_calls(messages: list[dict[str, Any]]) -> None:
    """Merge assistant messages after a call into the message with the call. Templates expect the result right after it."""
    later = []
    while not messages[-1].get("tool_calls"):
        later.append(messages.pop())
    calling = messages[-1]
    for message in reversed(later):
        contents = [content for content in (calling.get("content"), message.get("content")) if content]
        if all(isinstance(content, str) for content in contents):
            calling["content"] = "".join(contents)
        else:
            calling["content"] = [part for content in contents for part in _parts_of(content)]


def _parts_of(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] in MEDIA_PARTS for part in content)


def _assign(results: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]) -> list[int]:
    """Assign results to calls by id, otherwise by name. Results without a known id and a name get the remaining calls in order.

    Calls that share an id are answered in order. Templates look calls up by id, so those without an id of their own get one.
    Return the index of each result's call, or the number of calls if it has none.
    """
    by_id: dict[str, deque[int]] = {}
    by_name: dict[str, deque[int]] = {}
    for index, call in enumerate(calls):
        by_id.setdefault(call.get("id") or "", deque()).append(index)
        by_name.setdefault(call["function"]["name"], deque()).append(index)
    for call_id, indices in by_id.items():
        for index in indices if len(indices) > 1 or not call_id else ():
            calls[index]["id"] = f"{call_id}#{index}"
    by_id.pop("", None)
    remaining = dict.fromkeys(range(len(calls)))
    places = [len(calls)] * len(results)

    def give(number: int, index: int) -> None:
        result, places[number] = results[number], index
        remaining.pop(index, None)
        if result.get("tool_call_id") != calls[index]["id"] or not result.get("name"):
            result["name"], result["tool_call_id"] = calls[index]["function"]["name"], calls[index]["id"]

    named: list[int] = []
    nameless: list[int] = []
    for number, result in enumerate(results):
        if queue := by_id.get(result.get("tool_call_id") or ""):
            give(number, queue.popleft() if len(queue) > 1 else queue[0])
        else:
            (named if result.get("name") else nameless).append(number)
    for number in named:
        queue = by_name.get(results[number]["name"]) or deque()
        while queue and queue[0] not in remaining:
            queue.popleft()
        if queue:
            give(number, queue[0])
    for number, index in zip(nameless, list(remaining), strict=False):
        give(number, index)
    return places


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where}: got {type(message).__name__}, expected a mapping with role and content")
    role = "assistant" if message.get("role") == "model" else message.get("role")
    if role not in ROLES:
        got = "no role" if role is None else f"role {role!r}"
        raise BadRequest(f"{where}: got {got}, expected one of {', '.join(ROLES)}")
    checked = {**message, "role": role}
    for key in ("reasoning", "reasoning_content", "name", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            raise BadRequest(f"{where}.{key}: got {type(message[key]).__name__}, expected a string")
    if message.get("tool_calls") is not None:
        if role != "assistant":
            raise BadRequest(f"{where}: got tool_calls in a {role} message, but only assistant messages may have them")
        checked["tool_calls"] = _check_calls(message["tool_calls"], f"{where}.tool_calls")
    content = message.get("content")
    if content is None and role == "assistant":
        if not message.get("tool_calls") and not message.get("tool_responses"):
            checked["content"] = ""  # an empty answer, perhaps after a thought
    elif content is None:
        raise BadRequest(f"{where}: got no content, expected a string or a list of parts")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        checked["content"] = [_check_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    elif not (content is None or isinstance(content, str) or (role == "tool" and isinstance(content, Mapping))):
        raise BadRequest(f"{where}.content: got {type(content).__name__}, expected a string or a list of parts")
    return checked


def _check_part(part: object, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where}: got {type(part).__name__}, expected a mapping such as {{'type': 'text', 'text': ...}}")
    kind = part.get("type")
    if kind in MEDIA_PARTS:
        return {"type": kind}
    if kind != "text":
        raise BadRequest(f"{where}: got a part of type {kind!r}, expected one of text, {', '.join(sorted(MEDIA_PARTS))}")
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text: got {type(part.get('text')).__name__}, expected a string")
    return dict(part)


def _check_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise BadRequest(f"{where}: got {type(calls).__name__}, expected a list of calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}[{index}]: expected {{'function': {{'name': ..., 'arguments': {{...}}}}}}")
        if not isinstance(call.get("id"), str | None):
            raise BadRequest(f"{where}[{index}].id: got {type(call['id']).__name__}, expected a string")
    return [dict(call) for call in calls]


def continued_text(
    messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, field: str = "continue_final_message"
) -> str:
    """Return the text of the last message, which the answer continues. Several parts are one text. Errors name `field`."""
    if add_generation_prompt:
        problem = f"{field}: cannot be combined with add_generation_prompt"
        raise BadRequest(problem, hint="set add_generation_prompt to false")
    last: Mapping[str, Any] = messages[-1] if messages else {}
    content = last.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    given = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in given if isinstance(text, str)]
    text = "".join(texts) if len(texts) == len(parts) else ""
    if last.get("role") not in ("assistant", "model") or last.get("tool_calls") or not text:
        raise BadRequest(f"{field}: the last message must be the assistant's, with text and without tool_calls")
    return text


def read_template_options(options: object) -> dict[str, bool]:
    """Return the variables of a template that a caller sets. Those that are None are left out."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise BadRequest(f"chat_template_kwargs: got {type(options).__name__}, expected a mapping")
    for name, value in options.items():
        if name not in TEMPLATE_OPTIONS:
            raise BadRequest(f"chat_template_kwargs: got {name!r}, expected {' or '.join(TEMPLATE_OPTIONS)}")
        if not isinstance(value, bool | None):
            raise BadRequest(f"chat_template_kwargs.{name}: got {value!r}, expected True or False")
    return {name: value for name, value in options.items() if value is not None}


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check tools in OpenAI's format and return them as plain dicts. Return None if there are none."""
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise BadRequest(f"tools: got {type(tools).__name__}, expected a list of tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{index}]: expected {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}")
        if not isinstance(function.get("parameters"), Mapping | None):
            raise BadRequest(
                f"tools[{index}].function.parameters: got {type(function['parameters']).__name__}, expected a JSON schema"
            )
        _check_schema(function.get("parameters"), f"tools[{index}]")
    return [dict(tool) for tool in tools] or None


def _check_schema(schema: object, where: str) -> None:
    """Raise if what templates read of a tool's JSON schema has another type than they expect."""
    pending = [("", schema)]
    while pending:
        path, found = pending.pop()
        if not isinstance(found, Mapping):
            if not isinstance(found, bool | None):  # true and false are schemas too
                raise _bad_schema(where, path, found, "a JSON schema, which is an object")
            continue
        kind, properties = found.get("type"), found.get("properties")
        if not isinstance(kind, str | None) and not _is_texts(kind):
            raise _bad_schema(where, f"{path}.type", kind, "a string or a list of strings")
        if not isinstance(properties, Mapping | None):
            raise _bad_schema(where, f"{path}.properties", properties, "an object of JSON schemas by name")
        pending += [(f"{path}.properties.{name}", inner) for name, inner in (properties or {}).items()]
        if isinstance(found.get("items"), Mapping):
            pending.append((f"{path}.items", found["items"]))


def _is_texts(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(isinstance(text, str) for text in value)  # type: ignore[attr-defined]


def _bad_schema(where: str, path: str, found: object, expected: str) -> BadRequest:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    got = names.get(type(found), "a number" if isinstance(found, int | float) else type(found).__name__)
    return BadRequest(f"{where}: in its schema, {path.lstrip('.')[:256]} is {got}, expected {expected}")
