"""Write Lark rules for values in the form of Gemma 4's tool calls, from JSON schemas.

    {key:value,...}   [value,...]   <|"|>text<|"|>   5   true   null

Declared keys are sorted without regard to case, as in training and in the prompt, and those that a schema does not name come
after them. Keys are bare if they can be read back that way, otherwise between quote tokens. Strings are between two quote
tokens, without escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from culet.errors import BadRequest
from culet.structured.schema.cases import (
    MAX_COUNT,
    NUMBERS,
    TYPES,
    Budget,
    Case,
    Reducer,
    Schema,
    is_open,
    item_schemas,
    key_of,
    name_schemas,
    prefix_of,
    rest_of,
)
from culet.structured.schema.endless import endless_rules
from culet.structured.schema.numbers import (
    Bound,
    decimal_text,
    divided,
    range_body,
    tightest_high,
    tightest_low,
    whole_bounds,
)
from culet.structured.schema.patterns import expression, search_expression
from culet.text.tool_calls import MAX_NESTING
from culet.types import MAX_GRAMMAR_CHARS

# The keys of one object. Each key is a rule inside the rule of the key before it, and llguidance follows rules recursively.
_MAX_KEYS = 1000
_MAX_OPTIONAL = 400  # Each optional key is 4 items of the parser's row, which holds 2,000.
MAX_COUNTED = 1000  # Numbers of properties are enforced if keys times bound are at most this.
_MAX_MULTIPLE = 10**18 - 1  # the greatest number of which multiples are written
MAX_FACTOR = 10**4  # Multiples of larger numbers, or of numbers with more digits, are not enforced.
_PART_OF_KEY = r"""[^\s\x00-\x1f{}\[\],:"'<>|]"""
_BARE_KEY = re.compile(rf"{_PART_OF_KEY}+(?: {_PART_OF_KEY}+)*")
_MAX_KEY_CHARS = 128  # of keys that a schema does not name, without the spaces in bare keys
_OTHER_KEY = rf"{_PART_OF_KEY}(?: ?{_PART_OF_KEY}){{0,{_MAX_KEY_CHARS - 1}}}"
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which cannot be encoded
_QUOTE = '<|"|>'
_MAX_CONSTANTS = 500  # arrays and objects in one enum
_MAX_NUMBER = 10**300  # Larger numbers are not read back as numbers.
_OBJECT, _STRING = {"type": "object"}, {"type": "string"}
COMMON = rf"""
any: {_QUOTE} TEXT? {_QUOTE} | NUMBER | "true" | "false" | "null" | any_object | any_array
any_object: "{{" (any_pair ("," any_pair)*)? "}}"
any_pair: KEY ":" any
any_array: "[" (any ("," any)*)? "]"
TEXT: /(.|\n)+/
KEY: /{_OTHER_KEY}/
NUMBER: /-?(0|[1-9][0-9]{{0,17}})(\.[0-9]{{1,17}})?([eE][+-]?[0-9]{{1,2}})?/
INTEGER: /-?(0|[1-9][0-9]{{0,17}})/
NEVER: /a/ & /b/
"""


class Rules:
    """Grammar rules built from schemas. A rule that no value fits is None."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._num_chars = 0
        self._budget = Budget()
        self._reducer = Reducer({}, self._budget)
        self._written: dict[tuple[int, ...], str | None] = {}  # the rules of the current tool by their schemas
        self._open: dict[tuple[int, ...], str] = {}  # schemas that are being written, and the rule's name if it is needed
        self._has_cycle = False
        self._endless: frozenset[tuple[int, ...]] = frozenset()  # schemas that no value of finite size fits
        self._depth = 0  # the number of objects and arrays around the current value
        self._deepest = 0  # the greatest depth in the schema that is being written
        self._levels: dict[tuple[int, ...], int] = {}  # the depth of each written schema, with the value around it

    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def add(self, name: str, body: str) -> str:
        self._rules[name] = body
        self._num_chars += len(name) + len(body)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise too_large()
        return name

    def _new(self, body: str) -> str:
        return self.add(f"r{len(self._rules)}", body)

    def _terminal(self, body: str) -> str:
        return self.add(f"S{len(self._rules)}", body)

    def of_arguments(self, schema: Mapping[str, Any]) -> str | None:
        """Return a rule for a tool's arguments."""
        self._reducer = Reducer(schema, self._budget)
        self._has_cycle, self._endless = False, frozenset()
        others, num_chars = dict(self._rules), self._num_chars  # the rules of other tools
        rule = self._arguments(schema)
        own = {name: body for name, body in self._rules.items() if name not in others} if self._has_cycle else {}
        endless = endless_rules(own)
        if not endless:
            return rule
        # Nothing fits these schemas. Where they are optional, they are left out, so all rules are written again without them.
        self._endless = frozenset(key for key, name in self._written.items() if name is None or name in endless)
        self._rules, self._num_chars = others, num_chars
        return self._arguments(schema)

    def _arguments(self, schema: Mapping[str, Any]) -> str | None:
        self._written, self._open, self._levels = {}, {}, {}
        self._deepest = 0
        rules = []
        for case in self._reducer.fitting_cases((schema, _OBJECT)):
            has_keys = case.values or case.required or case.min_properties or any(map(_offers_keys, case.objects))
            rules.append(self._case(case) if has_keys else '"{" "}"')  # a tool without parameters
        return self._any_of(rules)

    def _of(self, schemas: Sequence[Schema]) -> str | None:
        """Return a rule or literal for a value that fits all of the schemas."""
        schemas = self._reducer.resolved(schemas)
        key = key_of(schemas)
        if key in self._written:
            self._reach(self._levels[key])
            return self._written[key]
        if not key:
            return "any"
        if key in self._endless:
            return None
        if key in self._open:  # its body refers to it
            self._has_cycle = True
            name = self._open[key] = self._open[key] or self._new("NEVER")
            return name
        self._open[key] = ""
        self._depth += 1
        outer, self._deepest = self._deepest, self._depth
        try:
            rule = self._any_of([self._case(case) for case in self._reducer.fitting_cases(schemas)])
        finally:
            self._depth -= 1
            name = self._open.pop(key)
        self._levels[key] = self._deepest - self._depth
        self._deepest = max(outer, self._deepest)
        if name and rule is not None:
            rule = self.add(name, rule)
        self._written[key] = rule
        return rule

    def _reach(self, levels: int) -> None:
        """Count levels of objects and arrays below the current depth. A schema that refers to itself counts once."""
        self._deepest = max(self._deepest, self._depth + levels)
        if self._deepest > MAX_NESTING:
            raise BadRequest(
                f"the schema has values that are nested deeper than {MAX_NESTING} levels",
                hint='nest objects and arrays less, or use tool_choice "auto", which then allows any arguments for this tool',
            )

    def _any_of(self, rules: Sequence[str | None]) -> str | None:
        given = list(dict.fromkeys(rule for rule in rules if rule is not None))
        if not given:
            return None
        return "any" if "any" in given else given[0] if len(given) == 1 else self._new(" | ".join(given))

    def _case(self, case: Case) -> str | None:
        if case.values is not None:
            return self._constants(case.values)
        types = case.meant_types
        if types == TYPES:
            return "any"
        self._reach(0 if types.isdisjoint(("array", "object")) else 1)
        writers: dict[str, Callable[[Case], str | None]] = {
            "string": self._string,
            "boolean": lambda case: self._new('"true" | "false"'),
            "null": lambda case: '"null"',
            "array": self._array,
            "object": self._object,
        }
        rules = [write(case) for name, write in writers.items() if name in types]
        if types & NUMBERS:
            rules.append(self._number(case, whole="fraction" not in types))
        return self._any_of(rules)

    # Strings, numbers and constants

    def _constants(self, values: Sequence[object]) -> str | None:
        # Texts and bare words are terminals, because a rule cannot have thousands of alternatives.
        texts = [literal(value) for value in values if isinstance(value, str) and value and _is_writable(value)]
        words = [value for value in values if not isinstance(value, str | list | dict)]
        others = [value for value in values if isinstance(value, list | dict) or value == ""]
        if len(others) > _MAX_CONSTANTS:
            raise BadRequest(
                f"the schemas are too large: an enum has {len(others)} arrays and objects, at most {_MAX_CONSTANTS}"
            )
        self._reach(max(map(_nesting, others), default=0))
        parts = [_constant(value) for value in others]
        if texts:
            parts.append(f"({_QUOTE} {self._terminal(' | '.join(texts))} {_QUOTE})")
        if known := [text for text in map(_constant, words) if text is not None]:
            parts.append(self._terminal(" | ".join(known)))
        return self._any_of(parts)

    def _string(self, case: Case) -> str | None:
        low, high = case.min_length, case.max_length
        if high is not None and low > high:
            return None
        if not low and high is None and not case.patterns:
            return self._new(f"{_QUOTE} TEXT? {_QUOTE}")
        may_be_empty = not low
        parts = [rf"/(.|\n){{{max(1, low)},{'' if high is None else high}}}/"] if low or high is not None else []
        if case.patterns:
            parts = [f"/{pattern}/" for pattern in sorted(case.patterns)] + (parts or [r"/(.|\n)+/"])
            known = expression(" & ".join(parts))
            whole = [expression(part) for part in parts[:-1]]
            may_be_empty = may_be_empty and all(pattern is None or pattern.matches("") for pattern in whole)
            if known is not None and known.is_empty:
                high = 0
        if high == 0:
            return f"({_QUOTE} {_QUOTE})" if may_be_empty else None
        return self._new(f"{_QUOTE} {self._terminal(' & '.join(parts))}{'?' if may_be_empty else ''} {_QUOTE}")

    def _number(self, case: Case, *, whole: bool) -> str | None:
        if case.multiple is not None and max(case.multiple.numerator, case.multiple.denominator) <= MAX_FACTOR:
            return self._multiple(case, case.multiple, whole=whole)
        if case.low is None and case.high is None:
            return "INTEGER" if whole else "NUMBER"
        body = range_body(case.low, case.high, whole=whole)
        return None if body is None else self._terminal(body)

    def _multiple(self, case: Case, multiple: Fraction, *, whole: bool) -> str | None:
        """Return a rule for the multiples of a number. llguidance supports them only inside a JSON schema."""
        low = tightest_low(case.low, Bound(Fraction(-_MAX_MULTIPLE)))
        high = tightest_high(case.high, Bound(Fraction(_MAX_MULTIPLE)))
        if whole:
            multiple = Fraction(multiple.numerator)  # the integers among the multiples
        least, most = whole_bounds(divided(low, multiple), divided(high, multiple))
        if least is None or most is None or least > most:
            return None
        bounds = f'"minimum":{decimal_text(least * multiple)},"maximum":{decimal_text(most * multiple)}'
        kind = "integer" if multiple.denominator == 1 else "number"
        return self._new(f'%json {{"type":"{kind}",{bounds},"multipleOf":{decimal_text(multiple)}}}')

    # Arrays and objects

    def _array(self, case: Case) -> str | None:
        low, high = case.min_items, case.max_items
        num_first = max((len(prefix_of(part)) for part in case.arrays), default=0)
        if num_first and low <= num_first and not any(is_open(rest_of(part)) for part in case.arrays):
            high = min(high, num_first) if high is not None else num_first  # Items that are not listed are not written.
        if high is not None and low > high:
            return None
        item = self._of(item_schemas(case, num_first))
        if not num_first:
            items = self._repeated("", item, low, high)
            return None if items is None else self._new(f'"[" {items} "]"')
        if num_first > _MAX_KEYS:
            raise BadRequest(f"the schemas are too large: an array has {num_first} items, but the maximum is {_MAX_KEYS}")
        rest = self._repeated('","', item, max(0, low - num_first), None if high is None else max(0, high - num_first))
        for place in reversed(range(num_first if high is None else min(num_first, high))):
            item = self._of(item_schemas(case, place))
            taken = None if item is None or rest is None else self._new(f"{_comma(place)}{item} {rest}")
            rest = taken if place < low else f"({taken})?" if taken else ""
        return None if rest is None else self._new(f'"[" {rest} "]"')

    def _repeated(self, comma: str, item: str | None, low: int, high: int | None) -> str | None:
        """Return a body for a number of items. There is a comma before each of them, or only between them."""
        if item is None or high == 0:
            return None if low else ""
        if comma:
            return f"({comma} {item}){_times(low, high)}"
        more = self._repeated('","', item, max(0, low - 1), None if high is None else high - 1)
        return f"{item} {more}" if low else f"({item} {more})?"

    def _object(self, case: Case) -> str | None:
        """Return a rule for an object. Its declared keys are sorted, and optional keys may be missing."""
        names = self._reducer.fitting_cases([*name_schemas(case), _STRING])
        properties = [part["properties"] for part in case.objects if isinstance(part.get("properties"), Mapping)]
        keys = [*(key for part in properties for key in part), *sorted(case.required)]
        if name_schemas(case):
            keys += [key for name in names for key in name.values or ()]
            keys = [key for key in dict.fromkeys(keys) if self._reducer.accepts(key, name_schemas(case))]
        pairs: dict[str, str] = {}
        for key in _in_order(dict.fromkeys(keys)):
            value = self._of(self._reducer.property_schemas(case, key)) if _is_writable(key) else None
            if value is not None:
                pairs[key] = self._new(f"{_key(key)} {value}")
        if not case.required <= pairs.keys():
            return None
        others = self._other_pairs(case, set(keys), names)
        if not pairs and others == "any_pair" and not case.min_properties and case.max_properties is None:
            return "any_object"
        num_optional = len(pairs) - len(case.required)
        if len(pairs) > _MAX_KEYS or num_optional > _MAX_OPTIONAL:
            raise BadRequest(
                f"the schemas are too large: an object has {len(pairs)} properties, {num_optional} of them optional, "
                f"but the maximum is {_MAX_KEYS}, {_MAX_OPTIONAL} of them optional",
                hint='divide the object, or use tool_choice "auto", which then allows any arguments for this tool',
            )
        low, high = case.min_properties, case.max_properties
        if high is not None and high >= len(pairs) and others is None:
            high = None
        if low <= len(case.required):
            low = 0
        is_counted = len(pairs) * max(low, high or 0) <= MAX_COUNTED
        body = self._pairs(pairs, case.required, others, (low, high) if is_counted else (0, None))
        return None if body is None else self._new(f'"{{" {body} "}}"')

    def _pairs(
        self, pairs: dict[str, str], required: frozenset[str], others: str | None, bounds: tuple[int, int | None]
    ) -> str | None:
        """Return a body for the pairs of an object. For each key and number of pairs before it, there is a rule for the rest.

        Numbers above the bounds count as one. Without bounds there are two numbers: no pair, and some.
        """
        low, high = bounds
        most = max(1, low, high or 0)
        ends: list[str | None] = []
        for count in range(most + 1):
            left = None if high is None else high - count
            ends.append(self._repeated('","' if count else "", others, max(0, low - count), left))
        for key in reversed(pairs):
            before, ends = ends, []
            for count in range(most + 1):
                after = before[min(count + 1, most)]
                is_full = high is not None and count >= high
                comma = _comma(count)
                taken = None if after is None or is_full else f"{comma}{pairs[key]} {after}".rstrip()
                left_out = None if key in required else before[count]
                if taken is not None and left_out is not None and count == most and after == left_out:
                    ends.append(self._new(f"({comma}{pairs[key]})? {after}"))
                    continue
                given = [text for text in (taken, left_out) if text]
                body = " | ".join(given)
                if left_out == "":
                    body = f"({body})?" if body else ""
                ends.append(self._new(body) if body else None if taken is None and left_out is None else "")
        return ends[0]

    def _other_pairs(self, case: Case, declared: set[str], names: Sequence[Case]) -> str | None:
        """Return a rule for a pair whose key is not declared, or None if there are no such pairs."""
        if not declared and not any(map(_offers_keys, case.objects)):
            return None if any(part.get("additionalProperties") is False for part in case.objects) else "any_pair"
        excluded = f" & ~({' | '.join(map(literal, sorted(filter(_is_writable, declared))))})" if declared else ""
        if any(name.patterns for name in names):
            excluded += "".join(f" & /{pattern}/" for name in names for pattern in sorted(name.patterns))
        elif name_schemas(case) and not any(name.values is None for name in names):
            return None  # All keys are declared.
        rules = []
        patterns = {
            pattern: text
            for part in case.objects
            if isinstance(part.get("patternProperties"), Mapping)
            for pattern in part["patternProperties"]
            if (text := search_expression(pattern)) is not None
        }
        for own in patterns:  # Keys that match several patterns are not written.
            value = self._of(self._schemas_of_pattern(case, own))
            unlike = "".join(f" & ~/{text}/" for pattern, text in patterns.items() if pattern != own)
            rules.append(self._other_pair(f" & /{patterns[own]}/{unlike}{excluded}", value))
        if any(is_open(part.get("additionalProperties")) for part in case.objects):
            value = self._of([part["additionalProperties"] for part in case.objects if "additionalProperties" in part])
            unlike = "".join(f" & ~/{text}/" for text in patterns.values())
            rules.append(self._other_pair(unlike + excluded, value))
        return self._any_of(rules)

    def _schemas_of_pattern(self, case: Case, pattern: str) -> list[Schema]:
        """Return the schemas of a value whose key matches one pattern."""
        schemas = []
        for part in case.objects:
            patterns = part.get("patternProperties")
            if isinstance(patterns, Mapping) and pattern in patterns:
                schemas.append(patterns[pattern])
            elif "additionalProperties" in part:
                schemas.append(part["additionalProperties"])
        return schemas

    def _other_pair(self, conditions: str, value: str | None) -> str | None:
        """Return a rule for a pair whose key meets conditions. It is bare, or quoted if no bare key meets them."""
        if value is None:
            return None
        if not conditions:
            return "any_pair" if value == "any" else self._new(f'KEY ":" {value}')
        bare = f"/{_OTHER_KEY}/{conditions}"
        known = expression(bare)
        if known is None or not known.is_empty:
            return self._new(f'{self._terminal(bare)} ":" {value}')
        quoted = rf"/(.|\n){{1,{_MAX_KEY_CHARS}}}/{conditions}"
        known = expression(quoted)
        if known is not None and known.is_empty:
            return None
        return self._new(f'{_QUOTE} {self._terminal(quoted)} {_QUOTE} ":" {value}')


def too_large() -> BadRequest:
    return BadRequest(
        f"the schemas are too large: expanded to a grammar, they have more than {MAX_GRAMMAR_CHARS} characters",
        hint='send smaller schemas, or use tool_choice "auto", which then allows any arguments for the largest tools',
    )


def literal(text: str) -> str:
    return json.dumps(text)


def _offers_keys(part: Mapping[str, Any]) -> bool:
    """Return whether a schema names keys, or says that there may be others."""
    return is_open(part.get("additionalProperties")) or any(
        part.get(key) for key in ("properties", "patternProperties", "propertyNames")
    )


def _comma(place: int) -> str:
    return '"," ' if place else ""


def _times(low: int, high: int | None) -> str:
    return "*" if not low and high is None else f"{{{low},{'' if high is None else min(high, MAX_COUNT)}}}"


def _key(key: str) -> str:
    """Return a key with its colon."""
    if _BARE_KEY.fullmatch(key):
        return literal(key + ":")
    return f'{_QUOTE} {literal(key)} {_QUOTE} ":"' if key else f'{_QUOTE} {_QUOTE} ":"'


def _is_writable(text: str) -> bool:
    """Return whether a text has no half of a character."""
    return _SURROGATE.search(text) is None


def _nesting(value: object) -> int:
    """Return how many arrays and objects are inside each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_nesting, inner), default=0)


def _in_order(keys: Iterable[str]) -> list[str]:
    """Sort keys as Jinja's `dictsort` does in the chat template. Keys that differ only in case keep their order."""
    return sorted(keys, key=str.lower)


def _constant(value: object) -> str | None:
    """Return a sequence of literals and quote tokens for a constant, or None if it cannot be written."""
    if isinstance(value, str):
        text = literal(value) + " " if value else ""
        return f"({_QUOTE} {text}{_QUOTE})" if _is_writable(value) else None
    if isinstance(value, list):
        inner = [_constant(item) for item in value]
        opens, closes = "[]"
    elif isinstance(value, dict):
        pairs = [(key, _constant(value[key])) for key in _in_order(value)]
        inner = [f"{_key(key)} {text}" if text is not None and _is_writable(key) else None for key, text in pairs]
        opens, closes = "{}"
    elif isinstance(value, int | float) and not abs(value) < _MAX_NUMBER:  # or not a number
        return None
    else:
        return literal(json.dumps(value))
    texts = [text for text in inner if text is not None]
    middle = ' "," '.join(texts)
    return f'("{opens}" {middle} "{closes}")' if len(texts) == len(inner) else None
