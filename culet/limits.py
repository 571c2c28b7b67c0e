"""What one client may ask of the server, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

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
