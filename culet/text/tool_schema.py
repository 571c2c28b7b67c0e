"""Read the JSON schemas of tools to interpret arguments that the model wrote without quotes.

Schemas come from requests and are not trusted. Anything malformed is ignored, and references and alternatives are followed up
to a limit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote as unquote_url

_MAX_DEPTH = 16  # limit on nested references and alternatives
_MAX_ALTERNATIVES = 64
_MAX_NUMBER_CHARS = 400  # longer than any sensibly written finite number. Python refuses to parse much longer ones.
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which cannot be encoded
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")  # of a list in a reference
_LOOSE_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    dict: "object",
    list: "array",
}


def tool_schemas(tools: Iterable[Mapping[str, Any]] | None) -> dict[str, object]:
    """Map tool names to the JSON schemas of their parameters. The declarations are in OpenAI's format."""
    functions = [tool.get("function") or tool for tool in tools or ()]
    return {function["name"]: function.get("parameters") for function in functions if isinstance(function.get("name"), str)}


class Shape:
    """All schemas that may apply to a value, with references and alternatives resolved."""

    def __init__(self, schemas: Iterable[object], root: object) -> None:
        self._root = root
        self._schemas: list[Mapping[str, Any]] = []
        for schema in schemas:
            self._add(schema, 0)

    def of_property(self, name: str) -> Shape:
        """Return the shape of an object's property."""
        schemas = []
        for schema in self._schemas:
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                schemas.append(properties[name])
            else:
                schemas.append(schema.get("additionalProperties"))
        return Shape(schemas, self._root)

    def of_item(self, index: int) -> Shape:
        """Return the shape of an array's element."""
        schemas = []
        for schema in self._schemas:
            prefix = schema.get("prefixItems")
            in_prefix = isinstance(prefix, list) and index < len(prefix)
            schemas.append(prefix[index] if isinstance(prefix, list) and in_prefix else schema.get("items"))
        return Shape(schemas, self._root)

    def types(self) -> frozenset[str]:
        """Return the JSON types that the value may have. The set is empty if the schema does not say."""
        types: set[str] = set()
        for schema in self._schemas:
            stated = schema.get("type")
            names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
            own = {name.lower() for name in names if isinstance(name, str)}
            if not own:
                values = (
                    schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
                )
                own = {_JSON_TYPES.get(type(value), "object") for value in values}
            types |= own
        if types and any(schema.get("nullable") is True for schema in self._schemas):
            types.add("null")
        return frozenset(types)

    def _add(self, schema: object, depth: int) -> None:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or len(self._schemas) >= _MAX_ALTERNATIVES:
            return
        self._schemas.append(schema)
        if isinstance(schema.get("$ref"), str):
            self._add(follow(schema["$ref"], self._root), depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                for alternative in schema[key]:
                    self._add(alternative, depth + 1)


def bare_json(text: str, types: frozenset[str]) -> str:
    """Convert an unquoted value to JSON. Use a type that the schema allows if the text fits, else guess from the text.

    A JSON string in ASCII quotes is that string. If only strings are allowed, the value is one, even for `null` and `5`.
    """
    unquoted = unquote(text)
    if unquoted is not None:
        return json.dumps(unquoted, ensure_ascii=False)
    word = text.lower()
    if word in ("null", "none") and "null" in types:
        return "null"
    if word in ("true", "false") and "boolean" in types:
        return word
    if types & {"number", "integer"}:
        number = _loose_number(text, whole="number" not in types)
        if number is not None:
            return number
    if "string" not in types and (text in ("true", "false", "null") or _is_json_number(text)):
        return text
    return json.dumps(text, ensure_ascii=False)


def unquote(text: str) -> str | None:
    """Return the string that a JSON string literal stands for, or None if the text is not such a literal."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return None
    with suppress(ValueError):
        value = json.loads(text, strict=False)
        return _SURROGATE.sub("\ufffd", value) if isinstance(value, str) else None
    return None


def _is_json_number(text: str) -> bool:
    return _JSON_NUMBER.fullmatch(text) is not None and math.isfinite(float(text))


def _loose_number(text: str, *, whole: bool) -> str | None:
    """Return a number as JSON, or None. Accept forms such as +1, .5 and 007. 3.0 becomes 3 if an integer is expected."""
    if len(text) > _MAX_NUMBER_CHARS or not _LOOSE_NUMBER.fullmatch(text):
        return None
    value = float(text)
    if not math.isfinite(value):
        return None
    is_plain = text.lstrip("+-").isdecimal()
    if not is_plain and whole and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if _is_json_number(text):
        return text
    return str(int(text)) if is_plain else repr(value)


def follow(reference: object, root: Any) -> Any:
    """Return what a reference such as `#/$defs/City` or `#/properties/a/anyOf/0` leads to, or None if nothing is there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for key in unquote_url(reference[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(key)
        elif isinstance(target, list):
            target = target[int(key)] if _INDEX.fullmatch(key) and int(key) < len(target) else None
        else:
            return None
    return target
