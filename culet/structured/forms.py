"""Read the request forms in which clients ask for structured output (`response_format`, `structured_outputs`)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from culet.errors import BadRequest
from culet.structured.check import GrammarCheck
from culet.types import MAX_CHOICES, MAX_GRAMMAR_CHARS, WHITE_SPACE, SamplingParams, StructuredOutputs

GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]


class NamedSchema(Struct):
    """A JSON schema in OpenAI's wrapper."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] = "answer"
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    schema_: dict[str, Any] | None = field(name="schema", default=None)
    strict: bool | None = None


class ResponseFormat(Struct):
    """OpenAI's form, for plain text, any JSON object, or a document that matches a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredFields(Struct, forbid_unknown_fields=True):
    """vLLM's form. Exactly one of these fields is set."""

    json: dict[str, Any] | GrammarText | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    choice: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=MAX_CHOICES)] | None
    ) = None


def form_of(response_format: ResponseFormat | None, fields: StructuredFields | None) -> StructuredOutputs | None:
    """Return the form that a request asks for, or None."""
    if fields is not None:
        if response_format is not None and response_format.type != "text":
            raise BadRequest("structured_outputs: cannot be combined with response_format")
        return StructuredOutputs(
            json=fields.json,
            json_object=bool(fields.json_object),
            regex=fields.regex,
            grammar=fields.grammar,
            choice=fields.choice,
        )
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return StructuredOutputs(json_object=True)
    named = response_format.json_schema
    if named is None:
        raise BadRequest("response_format.json_schema: a name and a schema are required")
    return schema_form(named.schema_, strict=bool(named.strict))


def schema_form(schema: dict[str, Any] | None, *, strict: bool) -> StructuredOutputs:
    """Return a form for documents that match a JSON schema. Unless strict, keywords that cannot be enforced are ignored."""
    return StructuredOutputs(json={} if schema is None else schema, strict=strict)


def or_calls(form: StructuredOutputs, calls: str) -> StructuredOutputs:
    """Return a form that also allows tool calls instead. The first of the Lark rules in `calls` must be named `calls`."""
    spec = form.spec()
    if spec.kind == "json_schema":
        schema = json.loads(spec.text)
        options = {"lenient": not spec.is_strict, "coerce_one_of": not spec.is_strict, "whitespace_pattern": WHITE_SPACE}
        document = "%json " + json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else schema)
    elif spec.kind == "regex":
        from llguidance import regex_to_lark  # only needed here

        document = f"/{regex_to_lark(spec.text, '')}/"
    elif form.choice is not None:
        document = " | ".join(json.dumps(text) for text in form.choice)
    else:
        return form  # a client's own grammar decides everything
    return StructuredOutputs(grammar=f"start: document | calls\ndocument: {document}\n{calls}")


async def admit(check: GrammarCheck, params: SamplingParams, *, after_thought: bool = False) -> SamplingParams:
    """Return the parameters, with `after_thought` set in the form if given.

    Raise if the form cannot be compiled within the limits. The event loop is not blocked.
    """
    form = params.structured_outputs
    if form is None:
        return params
    if after_thought:
        params = replace(params, structured_outputs=replace(form, after_thought=True))
    await asyncio.to_thread(check.check, form.spec())
    return params
