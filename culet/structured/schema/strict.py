"""Find the keywords of a tool's JSON schema that the grammar of its calls does not enforce. A strict tool may not use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from culet.structured.schema.cases import Schema, count_of, listed_in, stated_types
from culet.structured.schema.numbers import exact
from culet.structured.schema.patterns import FORMATS, search_expression
from culet.structured.schema.rules import MAX_COUNTED, MAX_FACTOR
from culet.text.tool_schema import follow

_IGNORED = (
    *("not", "if", "oneOf", "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("unevaluatedProperties", "dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def unenforced(root: Schema) -> list[str]:
    """List the unenforced keywords of a schema and of every schema that it contains or refers to."""
    found: dict[str, None] = {}
    seen = set[int]()
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, Mapping) and id(schema) not in seen:
            seen.add(id(schema))
            found.update(dict.fromkeys(_own(schema, root)))
            waiting += _inside(schema, root)
    return sorted(found)


def _inside(schema: Mapping[str, Any], root: Schema) -> Iterator[Schema]:
    for key in ("properties", "patternProperties"):
        yield from schema[key].values() if isinstance(schema.get(key), Mapping) else ()
    for key in ("items", "prefixItems", "anyOf", "allOf"):
        yield from listed_in(schema, key)
    for key in ("items", "additionalItems", "additionalProperties", "propertyNames"):
        yield schema.get(key)
    yield follow(schema.get("$ref"), root)


def _own(schema: Mapping[str, Any], root: Schema) -> Iterator[str]:
    """Yield the unenforced keywords of one schema, but not those of the schemas inside it."""
    yield from (key for key in _IGNORED if schema.get(key, False) is not False)
    yield from (key for key in _COUNTS if key in schema and count_of(schema, key) is None)
    reference = schema.get("$ref", "#")
    if follow(reference, root) is None or not f"{reference}/".startswith("#/"):  # it leads nowhere, or to an anchor
        yield "$ref"
    name = schema.get("format")
    if isinstance(name, str) and name not in FORMATS and "string" in stated_types(schema):
        yield "format"
    patterns = schema.get("patternProperties")
    if "pattern" in schema and not _is_known(schema["pattern"]):
        yield "pattern"
    if isinstance(patterns, Mapping) and not all(map(_is_known, patterns)):
        yield "patternProperties"
    multiple = exact(schema.get("multipleOf"))
    if "multipleOf" in schema and (multiple is None or max(multiple.numerator, multiple.denominator) > MAX_FACTOR):
        yield "multipleOf"
    properties = schema.get("properties")
    num_keys = len(properties) if isinstance(properties, Mapping) else 0
    yield from (key for key in ("minProperties", "maxProperties") if num_keys * (count_of(schema, key) or 0) > MAX_COUNTED)


def _is_known(pattern: object) -> bool:
    """Return whether a pattern can be translated to a grammar."""
    return isinstance(pattern, str) and search_expression(pattern) is not None
