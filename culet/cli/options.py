"""Command-line options made from config fields, and those of the sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any, TypeVar

import click

from culet.config import PARTS, SERVE_PARTS, Config, build_config, config_fields
from culet.types import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_CLICK_TYPES: dict[str, click.ParamType] = {"int": click.INT, "float": click.FLOAT, "str": click.STRING}

# name, type, help; the names are those of SamplingParams
_SAMPLING: tuple[tuple[str, click.ParamType, str], ...] = (
    ("max_tokens", click.INT, "Most tokens to generate (default: up to the context's end)."),
    ("temperature", click.FLOAT, "0 is greedy (default: the model's)."),
    ("top_p", click.FLOAT, "Keep the likeliest tokens up to this total probability (default: the model's)."),
    ("top_k", click.INT, "Keep this many of the likeliest tokens; 0 keeps all (default: the model's)."),
    ("min_p", click.FLOAT, "Drop tokens less likely than this share of the likeliest one."),
    ("repetition_penalty", click.FLOAT, "Above 1 makes tokens that occurred less likely."),
    ("presence_penalty", click.FLOAT, "Taken off the logit of each token that was generated already."),
    ("frequency_penalty", click.FLOAT, "Taken off the logit once per time a token was generated."),
    ("seed", click.INT, "Makes the draws repeatable (default: a random seed)."),
    ("n", click.INT, "Samples to draw from one prompt (default: 1)."),
    ("logprobs", click.INT, "Report log-probabilities of the chosen and this many of the likeliest tokens (with --json)."),
)


def config_options(command: F) -> F:
    """Add one flag per config field: its doc line is the help, its type the value's, as `build_config` will check it."""
    return _options_of(PARTS, command)


def serve_options(command: F) -> F:
    """The same for the settings of the web server."""
    return _options_of(SERVE_PARTS, command)


def _options_of(parts: Mapping[str, type], command: F) -> F:
    for _, entry in reversed(config_fields(parts).values()):
        command = _config_option(entry)(command)
    return command


def _config_option(entry: Field[Any]) -> Callable[[F], F]:
    name, kind = entry.name, str(entry.type).split(" | ")[0]
    flag = entry.metadata["flag"] or "--" + name.replace("_", "-")
    help_text: str = entry.metadata["doc"]
    if kind == "bool":
        return click.option(flag, name, default=None, help=f"{help_text} [default: {'on' if entry.default else 'off'}]")
    flags = ("--model", "-m") if flag == "MODEL" else (flag,)
    if entry.default not in (None, ""):
        help_text = f"{help_text} [default: {entry.default}]"
    choices = entry.metadata["choices"]
    return click.option(
        *flags, name, type=click.Choice(choices) if choices else _CLICK_TYPES[kind], default=None, help=help_text
    )


def sampling_options(command: F) -> F:
    """Add the flags of SamplingParams."""
    repeated = click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
    ids = click.option(
        "--stop-token-id", "stop_token_ids", type=click.INT, multiple=True, help="End at this token; repeatable."
    )
    eos = click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-text token.")
    for option in (eos, ids, repeated):
        command = option(command)
    for name, kind, help_text in reversed(_SAMPLING):
        command = click.option("--" + name.replace("_", "-"), name, type=kind, default=None, help=help_text)(command)
    return command


def given(options: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that are among `names` and were given by the user."""
    return {name: value for name, value in options.items() if name in names and value is not None and value != ()}


def config_of(options: Mapping[str, Any]) -> Config:
    """The Config that the command's options ask for; without a model it is the built-in one."""
    return build_config(given(options, config_fields()))


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """The SamplingParams that the command's options ask for."""
    return SamplingParams(**given(options, SamplingParams.__dataclass_fields__))
