"""Reduce JSON schemas to cases, which have no references, `allOf`, `anyOf` or `oneOf`.

A value fits a schema if it fits one of its cases, and a case if it fits all of its keywords. Keywords beside each other hold
together, so a sibling of `anyOf` is part of each of its cases, and members of an `enum` that do not fit the other keywords are
left out. Keywords that are not understood (`not`, `if`, `contains`, `uniqueItems`, `dependentRequired` and others) are ignored,
and `oneOf` counts as `anyOf`. Schemas of properties and items stay schemas. They are reduced when a grammar needs them.

Schemas come from clients and are not trusted. Anything malformed is ignored, and the work is counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from culet.errors import BadRequest
from culet.structured.schema.numbers import Bound, exact, least_common_multiple, tightest_high, tightest_low
from culet.structured.schema.patterns import FORMATS, expression, search_expression
from culet.text.tool_schema import follow

MAX_COUNT = 4096  # Larger bounds on lengths and counts are not enforced.
_MAX_DEPTH = 64  # of alternatives inside each other. Below that, any value is allowed.
_MAX_CASES = 1000  # of one schema. The parser's row holds 2,000 items.
_MAX_WORK = 200_000  # cases that are joined and values that are checked, of all tools together
NUMBERS = frozenset({"integer", "fraction"})  # A schema's `number` is either.
TYPES = frozenset({"string", "boolean", "null", "array", "object"}) | NUMBERS
_TYPES_OF = {"number": NUMBERS, **{name: frozenset({name}) for name in TYPES - {"fraction"}}}
_ANNOTATIONS = frozenset({"$ref", "title", "description", "default", "examples", "deprecated", "$comment"})
_TYPES_OF_VALUES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object", int: "integer"}

_NULL = {"type": "null"}

Schema = Any  # a JSON schema as a client sent it: a mapping, true or false, or something malformed


@dataclass(frozen=True)
class Case:
    """One alternative of a schema. A keyword counts only for values of its type."""

    types: frozenset[str] = TYPES
    values: tuple[Any, ...] | None = None  # the only values
    min_length: int = 0
    max_length: int | None = None
    patterns: frozenset[str] = frozenset()  # expressions that match whole strings
    low: Bound | None = None
    high: Bound | None = None
    multiple: Fraction | None = None
    arrays: tuple[Mapping[str, Any], ...] = ()  # schemas with keywords for the items of an array
    min_items: int = 0
    max_items: int | None = None
    objects: tuple[Mapping[str, Any], ...] = ()  # schemas with keywords for the properties of an object
    required: frozenset[str] = frozenset()
    min_properties: int = 0
    max_properties: int | None = None

    @cached_property
    def value_keys(self) -> frozenset[str]:
        return frozenset(map(value_key, self.values or ()))

    @property
    def key(self) -> tuple[Any, ...]:
        """A key. Two cases of a schema share it if they allow the same values."""
        values = None if self.values is None else self.value_keys
        fields = (self.types, values, self.min_length, self.max_length, self.patterns, self.low, self.high, self.multiple)
        counts = (self.min_items, self.max_items, self.required, self.min_properties, self.max_properties)
        return (*fields, *counts, tuple(map(id, self.arrays)), tuple(map(id, self.objects)))

    @property
    def meant_types(self) -> frozenset[str]:
        """The types to write. A schema that names no type means the one that its keywords are for."""
        if self.types != TYPES:
            return self.types
        meant: set[str] = set()
        if self.patterns or self.min_length or self.max_length is not None:
            meant.add("string")
        if self.low or self.high or self.multiple:
            meant |= NUMBERS
        if self.arrays or self.min_items or self.max_items is not None:
            meant.add("array")
        if self.objects or self.required or self.min_properties or self.max_properties is not None:
            meant.add("object")
        return frozenset(meant) or TYPES


class Reducer:
    """Reduces the schemas of one tool to cases."""

    def __init__(self, root: Schema, budget: Budget) -> None:
        self._root, self._budget = root, budget
        self._known: dict[tuple[int, ...], list[Case]] = {}
        self._open: set[int] = set()  # ids of the schemas that are being reduced
        self._depth = 0

    def fitting_cases(self, schemas: Sequence[Schema]) -> list[Case]:
        """Return the cases of values that fit all of the schemas, with all constants in one case, and only those that fit.

        There are none if no value fits.
        """
        others, values = [], {}
        for case in self.cases(schemas):
            if case.values is None:
                others.append(case)
                continue
            rest = replace(case, values=None)
            values.update({value_key(value): value for value in case.values if self._fits(value, rest)})
        return [*others, Case(values=tuple(values.values()))] if values else others

    def resolved(self, schemas: Sequence[Schema]) -> list[Schema]:
        """Return schemas with the target of each one that is only a reference, because a target may have many references."""
        found = []
        for schema in schemas:
            seen = set[int]()
            while (
                isinstance(schema, Mapping) and "$ref" in schema and _ANNOTATIONS.issuperset(schema) and id(schema) not in seen
            ):
                seen.add(id(schema))
                schema = follow(schema["$ref"], self._root)
            found.append(schema)
        return found

    def cases(self, schemas: Sequence[Schema]) -> list[Case]:
        """Return the cases of values that fit all of the schemas. Some may have no value after all."""
        return self._reduce(schemas)[0]

    def _reduce(self, schemas: Sequence[Schema]) -> tuple[list[Case], bool]:
        """Return the cases, and whether they are whole.

        They are not if a schema refers to one that is being reduced. Then they hold only there and must not be kept.
        """
        key = key_of(schemas)
        if key in self._known:
            return self._known[key], True
        if self._depth >= _MAX_DEPTH:
            return [Case()], True
        case, choices, parts = Case(), [], set[int]()
        waiting = list(schemas)
        while waiting:
            schema = waiting.pop()
            if schema is False:
                return [], True
            if not isinstance(schema, Mapping) or id(schema) in parts:
                continue
            if id(schema) in self._open:  # A schema that refers to itself allows nothing in addition.
                return [], False
            parts.add(id(schema))
            self._budget.spend()
            joined = join(case, _own_case(schema))
            if joined is None:
                return [], True
            case = joined
            also = [*([follow(schema["$ref"], self._root)] if "$ref" in schema else ()), *listed_in(schema, "allOf")]
            listed = [choice for name in ("anyOf", "oneOf") if (choice := listed_in(schema, name))]
            if schema.get("nullable") is True:  # Then null fits even if it does not fit the others.
                choices += [[*choice, _NULL] for choice in (*listed, *([part] for part in also))]
            else:
                waiting += also
                choices += listed
        cases, is_whole = self._choose(case, choices, parts) if choices else ([case], True)
        if is_whole:
            self._known[key] = cases
        return cases, is_whole

    def _choose(self, case: Case, choices: Sequence[Sequence[Schema]], parts: set[int]) -> tuple[list[Case], bool]:
        """Return the cases of a case in which one schema of each choice holds as well."""
        cases, is_whole = [case], True
        self._open |= parts
        self._depth += 1
        try:
            for listed in choices:
                branches: list[Case] = []
                for branch in listed:
                    found, is_known = self._reduce((branch,))
                    branches += found
                    is_whole = is_whole and is_known
                cases = self._product(cases, _with_joined_constants(branches))
        finally:
            self._depth -= 1
            self._open -= parts
        return cases, is_whole

    def _product(self, left: Sequence[Case], right: Sequence[Case]) -> list[Case]:
        cases: dict[tuple[Any, ...], Case] = {}
        for case in left:
            for other in right:
                self._budget.spend(1 + len(case.values or ()) + len(other.values or ()))
                joined = join(case, other)
                if joined is not None:
                    cases.setdefault(joined.key, joined)
                if len(cases) > _MAX_CASES:
                    raise BadRequest(f"the schemas are too complex: one has more than {_MAX_CASES} alternatives")
        return list(cases.values())

    def accepts(self, value: object, schemas: Sequence[Schema]) -> bool:
        """Return whether a value fits all of the schemas."""
        return any(self._fits(value, case) for case in self.cases(schemas))

    def _fits(self, value: object, case: Case) -> bool:
        self._budget.spend()
        if type_of(value) not in case.types or (case.values is not None and value_key(value) not in case.value_keys):
            return False
        if isinstance(value, str):
            return fits_count(len(value), case.min_length, case.max_length) and all(
                (known := expression(f"/{pattern}/")) is None or known.matches(value) for pattern in case.patterns
            )
        if isinstance(value, list):
            return fits_count(len(value), case.min_items, case.max_items) and all(
                self.accepts(item, item_schemas(case, place)) for place, item in enumerate(value)
            )
        if isinstance(value, dict):
            return (
                fits_count(len(value), case.min_properties, case.max_properties)
                and case.required <= set(value)
                and all(self.accepts(inner, self.property_schemas(case, key)) for key, inner in value.items())
                and all(self.accepts(key, name_schemas(case)) for key in value)
            )
        number = exact(value)
        if number is None:
            return True
        is_low = case.low is not None and (number < case.low.value or (number == case.low.value and case.low.is_open))
        is_high = case.high is not None and (number > case.high.value or (number == case.high.value and case.high.is_open))
        return not is_low and not is_high and (case.multiple is None or number % case.multiple == 0)

    def property_schemas(self, case: Case, key: str) -> list[Schema]:
        """Return the schemas of a property's value."""
        schemas: list[Schema] = []
        for part in case.objects:
            properties, patterns = part.get("properties"), part.get("patternProperties")
            found = [properties[key]] if isinstance(properties, Mapping) and key in properties else []
            for pattern, schema in patterns.items() if isinstance(patterns, Mapping) else ():
                known = compiled_pattern(pattern)
                if known is not None and known.matches(key):
                    found.append(schema)
            schemas += found or ([part["additionalProperties"]] if "additionalProperties" in part else [])
        return schemas


class Budget:
    """Counts the work for all tools of a request, so that no schema takes much more time than its size suggests."""

    def __init__(self) -> None:
        self._num_steps = 0

    def spend(self, num_steps: int = 1) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_WORK:
            raise BadRequest("the schemas are too complex: their alternatives have too many combinations")


def join(case: Case, other: Case) -> Case | None:
    """Return the case of values that fit both cases, or None if there are none."""
    types = case.types & other.types
    values = case.values if other.values is None else other.values
    if case.values is not None and other.values is not None:
        values = tuple(value for value in case.values if value_key(value) in other.value_keys)
    if not types or (values is not None and not values):
        return None
    both = [multiple for multiple in (case.multiple, other.multiple) if multiple is not None]
    return Case(
        types=types,
        values=values,
        min_length=max(case.min_length, other.min_length),
        max_length=_least(case.max_length, other.max_length),
        patterns=case.patterns | other.patterns,
        low=tightest_low(case.low, other.low),
        high=tightest_high(case.high, other.high),
        multiple=least_common_multiple(*both) if len(both) == 2 else next(iter(both), None),
        arrays=_without_repeats((*case.arrays, *other.arrays)),
        min_items=max(case.min_items, other.min_items),
        max_items=_least(case.max_items, other.max_items),
        objects=_without_repeats((*case.objects, *other.objects)),
        required=case.required | other.required,
        min_properties=max(case.min_properties, other.min_properties),
        max_properties=_least(case.max_properties, other.max_properties),
    )


def _own_case(schema: Mapping[str, Any]) -> Case:
    """Return the case of a schema's own keywords."""
    multiple = exact(schema.get("multipleOf"))
    case = Case(
        types=stated_types(schema),
        min_length=count_of(schema, "minLength") or 0,
        max_length=count_of(schema, "maxLength"),
        patterns=frozenset(_patterns(schema)),
        low=_bound(schema, "minimum", "exclusiveMinimum", 1),
        high=_bound(schema, "maximum", "exclusiveMaximum", -1),
        multiple=multiple if multiple is not None and multiple > 0 else None,
        arrays=(schema,) if not schema.keys().isdisjoint(("items", "prefixItems")) else (),
        min_items=count_of(schema, "minItems") or 0,
        max_items=count_of(schema, "maxItems"),
        objects=(schema,) if not schema.keys().isdisjoint(_OBJECT_KEYWORDS) else (),
        required=frozenset(key for key in listed_in(schema, "required") if isinstance(key, str)),
        min_properties=count_of(schema, "minProperties") or 0,
        max_properties=count_of(schema, "maxProperties"),
    )
    values = schema.get("enum")
    if "const" in schema:
        known = value_key(schema["const"])
        values = [value for value in values if value_key(value) == known] if isinstance(values, list) else [schema["const"]]
    elif not isinstance(values, list):
        return case
    return replace(case, types=TYPES, values=tuple(value for value in values if type_of(value) in case.types))


def _with_joined_constants(cases: Sequence[Case]) -> list[Case]:
    """Return cases with all plain constants in one of them, because there may be thousands of constants, but not of cases."""
    others, values = [], {}
    for case in cases:
        if case.values is not None and replace(case, values=None) == Case():
            values.update({value_key(value): value for value in case.values})
        else:
            others.append(case)
    return [*others, Case(values=tuple(values.values()))] if values else others


_OBJECT_KEYWORDS = ("properties", "additionalProperties", "patternProperties", "propertyNames")


def stated_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the keyword `type` allows."""
    stated = schema.get("type")
    names = [name.lower() for name in (stated if isinstance(stated, list) else [stated]) if isinstance(name, str)]
    if not names:
        return TYPES
    types = frozenset[str]().union(*(_TYPES_OF.get(name, TYPES) for name in names))
    return types | {"null"} if schema.get("nullable") is True else types


def _patterns(schema: Mapping[str, Any]) -> Iterable[str]:
    pattern, name = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and (text := search_expression(pattern)) is not None:
        yield text
    if isinstance(name, str) and name in FORMATS:
        yield FORMATS[name]


def _bound(schema: Mapping[str, Any], name: str, open_name: str, sign: int) -> Bound | None:
    """Return the tighter one of two bounds. In older schemas, the open one is true or false and says how to read the other."""
    value, open_value = exact(schema.get(name)), exact(schema.get(open_name))
    closed = None if value is None else Bound(value, schema.get(open_name) is True)
    if open_value is None:
        return closed
    if closed is not None and (closed.value - open_value) * sign > 0:
        return closed
    return Bound(open_value, True)


def count_of(schema: Mapping[str, Any], key: str) -> int | None:
    """Return a limit on a length or count. Return None if there is none, or if it cannot be enforced."""
    value = exact(schema.get(key))
    return int(value) if value is not None and value.denominator == 1 and 0 <= value <= MAX_COUNT else None


def _least(first: int | None, other: int | None) -> int | None:
    return min((bound for bound in (first, other) if bound is not None), default=None)


def listed_in(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under a key, or an empty list."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _without_repeats(schemas: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple({id(schema): schema for schema in schemas}.values())


def type_of(value: object) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return _TYPES_OF_VALUES.get(type(value), "")


def fits_count(count: int, low: int, high: int | None) -> bool:
    return count >= low and (high is None or count <= high)


def value_key(value: object) -> str:
    """Return a key, equal for values that JSON schemas take as equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(value_key, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{value_key(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def key_of(schemas: Iterable[Schema]) -> tuple[int, ...]:
    """Return a key of schemas that hold together. It is valid as long as the schemas exist."""
    return tuple(sorted({id(schema) for schema in schemas if schema is False or isinstance(schema, Mapping)}))


def compiled_pattern(pattern: str) -> Any:
    """Return the expression of a schema's pattern, or None if it cannot be translated."""
    text = search_expression(pattern)
    return None if text is None else expression(f"/{text}/")


def prefix_of(part: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of an array's first items. Older schemas list them in `items`."""
    return listed_in(part, "prefixItems") or listed_in(part, "items")


def rest_of(part: Mapping[str, Any]) -> Schema:
    """Return the schema of the other items, or None."""
    return part.get("additionalItems") if isinstance(part.get("items"), list) else part.get("items")


def is_open(schema: Schema) -> bool:
    """Return whether a schema is there and is not false."""
    return schema is not None and schema is not False


def item_schemas(case: Case, place: int) -> list[Schema]:
    """Return the schemas of an array's item."""
    prefixes = [(prefix_of(part), part) for part in case.arrays]
    return [prefix[place] if place < len(prefix) else rest_of(part) for prefix, part in prefixes]


def name_schemas(case: Case) -> list[Schema]:
    """Return the schemas of an object's keys."""
    return [part["propertyNames"] for part in case.objects if "propertyNames" in part]
