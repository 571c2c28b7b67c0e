"""Instructor, with tool calls and with JSON schemas."""

import instructor
from checks import MODEL, PERSON, URL, check_person, run
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def fields():
    return {"model": MODEL, "messages": [{"role": "user", "content": PERSON}], "response_model": Person, "temperature": 0}


def client(mode: instructor.Mode):
    return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)


def plain() -> None:
    check_person(client(instructor.Mode.JSON_SCHEMA).chat.completions.create(**fields()))


def stream() -> None:
    parts = list(client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(**fields()))
    assert len(parts) > 1
    check_person(parts[-1])


def tools() -> None:
    check_person(client(instructor.Mode.TOOLS).chat.completions.create(**fields()))


run(plain=plain, stream=stream, tools=tools, structured=plain)
