"""Read the request forms in which clients ask for structured output (`response_format`, `structured_outputs`).

Schemas stay text. They are parsed in the process that checks grammars, because a client decides how large they are.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from culet.errors import BadRequest
from culet.types import MAX_CHOICES, MAX_GRAMMAR_CHARS, GrammarSpec, StructuredOutputs

GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
SchemaText = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})] | UnsetType  # a JSON schema, not parsed


class NamedSchema(Struct):
    """A JSON schema in OpenAI's wrapper."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] = "answer"
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    schema_: SchemaText = field(name="schema", default=UNSET)
    strict: bool | None = None


class ResponseFormat(Struct):
    """OpenAI's form, for plain text, any JSON object, or a document that matches a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


AnySchema = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "string", "null"]})] | UnsetType  # or JSON in a string
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=MAX_CHOICES)]


class StructuredFields(Struct, forbid_unknown_fields=True):
    """vLLM's form. Exactly one of these fields is set."""

    json: AnySchema = UNSET
    json_object: bool | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None  # in Lark's notation, or GBNF
    choice: Choices | None = None


class FormAliases(Struct, kw_only=True):
    """Other names for the fields of `structured_outputs`: vLLM's older ones, SGLang's `regex` and llama.cpp's `grammar`."""

    guided_json: AnySchema = UNSET
    guided_regex: GrammarText | None = None
    guided_grammar: GrammarText | None = None
    guided_choice: Choices | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None

    def merged(self, fields: StructuredFields | None) -> StructuredFields | None:
        """Return `fields`, or the alias that the request has instead. Raise if it has several."""
        given = {name: getattr(self, name) for name in FormAliases.__struct_fields__}
        given = {name: value for name, value in given.items() if value is not None and value is not UNSET}
        if not given:
            return fields
        if fields is not None or len(given) > 1:
            names = [*(["structured_outputs"] if fields is not None else []), *given]
            raise BadRequest(f"{names[-1]}: cannot be combined with {names[0]}")
        ((name, value),) = given.items()
        return StructuredFields(**{name.removeprefix("guided_"): value})


def form_of(response_format: ResponseFormat | None, fields: StructuredFields | None) -> GrammarSpec | None:
    """Return the form that a request asks for, or None."""
    if fields is not None:
        if response_format is not None and response_format.type != "text":
            raise BadRequest("structured_outputs: cannot be combined with response_format")
        schema = given_schema(fields.json)
        form = StructuredOutputs(  # checks that exactly one field is given
            json=None if schema is None else {},
            json_object=bool(fields.json_object),
            regex=fields.regex,
            grammar=fields.grammar,
            choice=fields.choice,
        )
        return form.spec() if schema is None else schema_form(schema, strict=True)
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return StructuredOutputs(json_object=True).spec()
    named = response_format.json_schema
    if named is None:
        raise BadRequest("response_format.json_schema: a name and a schema are required")
    return schema_form(named.schema_, strict=bool(named.strict))


def schema_form(schema: Raw | UnsetType | None, *, strict: bool) -> GrammarSpec:
    """Return a form for documents that match a JSON schema. Unless strict, keywords that cannot be enforced are ignored.

    The schema is an object, or a string that holds the object as JSON. If it is missing, any document matches.
    """
    given = given_schema(schema)
    if given is not None and memoryview(given).nbytes > 6 * MAX_GRAMMAR_CHARS:  # too long even if all characters are escaped
        raise _too_long()
    data = b"{}" if given is None else bytes(given)
    try:
        if data.startswith(b'"'):
            text = msgspec.json.decode(data, type=str)
        elif data.startswith(b"{"):
            text = data.decode()
        else:
            raise BadRequest("JSON schema: expected an object")
    except (UnicodeError, msgspec.DecodeError) as error:
        raise BadRequest(f"JSON schema: not valid JSON: {error}") from None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _too_long()
    return GrammarSpec("json_schema", text, strict)


def _too_long() -> BadRequest:
    return BadRequest(f"JSON schema: expected at most {MAX_GRAMMAR_CHARS} characters", hint="send a smaller schema")


def given_schema(schema: Raw | UnsetType | None) -> Raw | None:
    """Return the schema, or None if it is missing or null."""
    return None if schema is None or isinstance(schema, UnsetType) or memoryview(schema) == b"null" else schema
