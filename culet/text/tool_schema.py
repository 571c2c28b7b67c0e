"""What a tool's JSON schema says of an argument that the model wrote without quotes.

The schema comes from a request, so nothing in it is trusted: what is not of the expected form says nothing, and references
and alternatives are followed up to a limit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_DEPTH = 16  # of references and alternatives within one another
_MAX_ALTERNATIVES = 64
_MAX_NUMBER_CHARS = 400  # above any finite number in a sensible form; Python refuses to read much longer ones
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
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


class Shape:
    """What a value may be: the schemas that may apply to it, with references and alternatives resolved."""

    def __init__(self, schemas: Iterable[object], root: object) -> None:
        self._root = root
        self._schemas: list[Mapping[str, Any]] = []
        for schema in schemas:
            self._add(schema, 0)

    def of_property(self, name: str) -> Shape:
        """The shape of an object's property."""
        found = []
        for schema in self._schemas:
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                found.append(properties[name])
            else:
                found.append(schema.get("additionalProperties"))
        return Shape(found, self._root)

    def of_item(self, index: int) -> Shape:
        """The shape of an array's element."""
        found = []
        for schema in self._schemas:
            first = schema.get("prefixItems")
            in_first = isinstance(first, list) and index < len(first)
            found.append(first[index] if isinstance(first, list) and in_first else schema.get("items"))
        return Shape(found, self._root)

    def types(self) -> frozenset[str]:
        """JSON types that the value may have; empty where the schema does not say."""
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
            if own and schema.get("nullable") is True:
                own.add("null")
            types |= own
        return frozenset(types)

    def _add(self, schema: object, depth: int) -> None:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or len(self._schemas) >= _MAX_ALTERNATIVES:
            return
        self._schemas.append(schema)
        if isinstance(schema.get("$ref"), str):
            self._add(_follow(schema["$ref"], self._root), depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                for alternative in schema[key]:
                    self._add(alternative, depth + 1)


def bare_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a value that came without quotes: of a type that the schema allows if it reads as one, else as it looks.

    Text for which only a string is allowed stays a string, `null` and `5` included.
    """
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


def _is_json_number(text: str) -> bool:
    return _JSON_NUMBER.fullmatch(text) is not None and math.isfinite(float(text))


def _loose_number(text: str, *, whole: bool) -> str | None:
    """JSON text of a number, also of forms such as +1, .5 and 007; 3.0 is 3 where a whole number is wanted."""
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


def _follow(reference: str, root: object) -> object:
    """What a reference such as `#/$defs/City` names within the same schema; None where there is nothing."""
    if not reference.startswith("#"):
        return None
    place = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, Mapping) else None
    return place
