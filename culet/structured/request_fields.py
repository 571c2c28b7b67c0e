"""Read the request forms in which clients ask for structured output (`response_format`, `structured_outputs`).

Schemas stay text. They are parsed in the process that checks grammars, because a client decides how large they are.
"""

from __future__ import annotations

from dataclasses import replace
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
    schema_: SchemaText = field(name="schema", default=UNSET)  # without the wrapper, as in llama.cpp
    value: SchemaText = UNSET  # the same in TGI
    strict: bool | None = None


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


def form_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredFields | None,
    aliases: FormAliases,
    own: GrammarSpec | None = None,
) -> GrammarSpec | None:
    """Return the form that a request asks for, or None. Raise if it asks for several.

    `own` is a form given in a field that exists only in this API.
    """
    given = {name: getattr(aliases, name) for name in FormAliases.__struct_fields__}
    given = {name: value for name, value in given.items() if _is_given(value)}
    response = None if response_format is None else _response_form(response_format)
    names = [form.field for form in (own, response) if form is not None]
    names += ["structured_outputs"] if structured_outputs is not None else []
    names += given
    if len(names) > 1:
        raise BadRequest(f"{names[-1]}: cannot be combined with {names[0]}")
    for name, value in given.items():
        return _structured_form(StructuredFields(**{name.removeprefix("guided_"): value}), name)
    if structured_outputs is not None:
        return _structured_form(structured_outputs)
    return response or own


def _is_given(value: object) -> bool:
    """Return whether the field of an alias has a value. Clients also send null, or an empty string, for none."""
    return given_schema(value) is not None if isinstance(value, Raw | UnsetType) else bool(value)


def _structured_form(fields: StructuredFields, alias: str = "") -> GrammarSpec:
    schema = given_schema(fields.json)
    try:
        form = StructuredOutputs(  # checks that exactly one field is given
            json=None if schema is None else {},
            json_object=bool(fields.json_object),
            regex=fields.regex,
            grammar=fields.grammar,
            choice=fields.choice,
        ).spec()
    except BadRequest as error:
        raise BadRequest(f"{alias}: {error.message.partition(': ')[2]}" if alias else error.message) from None
    form = replace(form, field=alias or form.field)
    return form if schema is None else schema_form(schema, form.field, strict=True)


def _response_form(asked: ResponseFormat) -> GrammarSpec | None:
    """Return the form that `response_format` asks for. Its schema may be in any of three places, but only in one of them."""
    named = asked.json_schema
    places = {
        "json_schema.schema": None if named is None else named.schema_,
        "schema": asked.schema_,
        "value": asked.value,
    }
    given = [name for name, schema in places.items() if given_schema(schema) is not None]
    if len(given) > 1:
        raise BadRequest(f"response_format.{given[1]}: cannot be combined with response_format.{given[0]}")
    if asked.type == "text" and (given or named is not None):
        place = given[0] if given else "json_schema"
        raise BadRequest(f"response_format.{place}: got a schema, but the type is text", hint="set the type to json_schema")
    if not given and (asked.type == "json_schema" or named is not None):
        hint = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}, with the JSON schema for {...}'
        raise BadRequest("response_format.json_schema.schema: a JSON schema is required", hint=hint)
    if asked.type == "text":
        return None
    if not given:
        return any_object("response_format")
    is_strict = bool(asked.strict or (named is not None and named.strict))
    form = schema_form(places[given[0]], "response_format", strict=is_strict)
    is_any = asked.type == "json_object" and not form.text.strip("{} \t\r\n")  # an empty schema does not ask for an object
    return any_object("response_format") if is_any else form


def any_object(field: str) -> GrammarSpec:
    """Return a form for any JSON object. `field` is the request's field that asks for it."""
    return replace(StructuredOutputs(json_object=True).spec(), field=field)


def schema_form(schema: Raw | UnsetType | None, field: str, *, strict: bool) -> GrammarSpec:
    """Return a form for documents that match a JSON schema. Unless strict, keywords that cannot be enforced are ignored.

    The schema is an object, or a string that holds the object as JSON. If it is missing, any document matches. `field` is the
    schema's field in the request, for errors.
    """
    given = given_schema(schema)
    if given is not None and memoryview(given).nbytes > 6 * MAX_GRAMMAR_CHARS:  # too long even if all characters are escaped
        raise _too_long(field)
    data = b"{}" if given is None else bytes(given)
    try:
        if data.startswith(b'"'):
            text = msgspec.json.decode(data, type=str)
        elif data.startswith(b"{"):
            text = data.decode()
        else:
            raise BadRequest(f"{field}: expected a JSON schema, which is an object")
    except (UnicodeError, msgspec.DecodeError) as error:
        raise BadRequest(f"{field}: not valid JSON: {error}") from None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _too_long(field)
    return GrammarSpec("json_schema", text, strict, field=field)


def _too_long(field: str) -> BadRequest:
    return BadRequest(f"{field}: expected at most {MAX_GRAMMAR_CHARS} characters", hint="send a smaller schema")


def given_schema(schema: Raw | UnsetType | None) -> Raw | None:
    """Return the schema, or None if it is missing or null."""
    return None if schema is None or isinstance(schema, UnsetType) or memoryview(schema) == b"null" else schema
