"""What one client may ask of the server, and how long it may take. Also reads settings that hold several limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from culet.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What one client may ask of the server, and how long it may take. `--limits n=4,body_mb=64` changes some of them."""

    body_mb: int = 16  # size of a request
    bodies_mb: int = 128  # size of all requests that are being read or prepared
    json_values: int = 300_000  # in one request. A list or an object counts as eight.
    messages: int = 4096  # in one chat
    tools: int = 128  # in one chat
    prompts: int = 128  # in one completions request
    n: int = 16  # samples of one prompt
    stops: int = 16  # stop strings
    logprobs: int = 20  # most likely tokens to report for each position
    logit_bias: int = 1024  # tokens with a bias
    prompt_bytes: int = 16  # size of messages and tools as JSON, per token of the context
    waiting_prompts: int = 4096  # that wait to be tokenized, short and long ones each
    waiting_prompt_mb: int = 32  # total size of these, short and long ones each
    connections: int = 4096  # open at once
    header_s: int = 10  # for a client to send its request headers
    body_s: int = 30  # for a client to send the request body
    write_s: int = 60  # for a client to read what was sent to it
    grammar_s: int = 5  # to compile one schema, regex or grammar, counted from the arrival of its request
    grammars: int = 64  # requests that wait for a new grammar to be compiled
    tool_kb: int = 1024  # JSON of all tools in one request
    answer_mb: int = 32  # log-probabilities and repeated prompts in one answer
    answers_mb: int = 64  # the same, of all answers that are being built
    stored: int = 1024  # responses that are kept with --store-responses
    stored_mb: int = 64  # their size
    stored_s: int = 3600  # for how long one is kept after its last use
    markdown_kb: int = 256  # of text that the web page has rendered at once
    markdown_s: int = 5  # to render it
    step_s: int = 300  # for one step of the engine before it counts as dead

    def __post_init__(self) -> None:
        if self.bodies_mb < self.body_mb:
            raise ConfigError(f"limits: bodies_mb: got {self.bodies_mb}, expected at least body_mb, which is {self.body_mb}")


def read_limits(text: str) -> Limits:
    """Parse `name=number,...`, with defaults for the rest. Errors name the bad part."""
    return Limits(
        **read_numbers("limits", text, sorted(entry.name for entry in fields(Limits)), hint="example: n=4,body_mb=64")
    )


def read_numbers(setting: str, text: str, names: Sequence[str], *, hint: str) -> dict[str, int]:
    """Parse `name=number,...`, the value of `setting`. The `hint` is for numbers that are not above 0."""
    numbers: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names:
            raise ConfigError(f"{setting}: unknown name {name!r}", hint=f"known names: {', '.join(names)}")
        if not value.isdecimal() or not 0 < int(value) < 2**31:
            raise ConfigError(f"{setting}: {name}: got {value!r}, expected a whole number above 0", hint=hint)
        numbers[name] = int(value)
    return numbers


MEDIA_KINDS = ("image", "video", "audio")
_MEDIA_HINT = """example: {"image": 4, "video": 1, "audio": 0}; 0 turns a kind off"""


def read_media_limits(text: str) -> dict[str, int]:
    """Parse the JSON object of `--limit-mm-per-prompt`. Errors name the bad key."""
    values = read_object(name := "limit-mm-per-prompt", text, _MEDIA_HINT)
    for kind, most in values.items():
        if kind not in MEDIA_KINDS:
            raise ConfigError(f"{name}: unknown kind {kind!r}", hint=f"known kinds: {', '.join(MEDIA_KINDS)}")
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise ConfigError(f"{name}: {kind}: got {most!r}, expected a whole number, 0 or more", hint=_MEDIA_HINT)
    return values


def read_object(name: str, text: str, hint: str) -> dict[str, Any]:
    """Parse the JSON object of a setting."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ConfigError(f"{name}: not valid JSON: {problem}", hint=hint) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: got {type(values).__name__}, expected a JSON object", hint=hint)
    return values
