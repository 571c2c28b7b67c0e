"""Command-line options for config fields and sampling parameters, and the file that `culet serve --config` reads."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any, TypeVar

import click

from culet import env
from culet.cli.vllm_flags import ADVICE
from culet.config import JSON_SETTINGS, PARTS, SERVE_PARTS, Config, build_config, config_fields
from culet.errors import ConfigError
from culet.log import setup_logging
from culet.types import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_CLICK_TYPES: dict[str, click.ParamType] = {"int": click.INT, "float": click.FLOAT, "str": click.STRING}

# (name, type, help). The names are those of SamplingParams.
_SAMPLING: tuple[tuple[str, click.ParamType, str], ...] = (
    ("max_tokens", click.INT, "Maximum number of tokens to generate (default: up to the end of the context)."),
    ("temperature", click.FLOAT, "Sampling temperature; 0 is greedy (default: the model's)."),
    (
        "top_p",
        click.FLOAT,
        "Sample from the most likely tokens up to this total probability; 0 is greedy (default: the model's).",
    ),
    ("top_k", click.INT, "Sample from this many of the most likely tokens; 0 means all (default: the model's)."),
    ("min_p", click.FLOAT, "Drop tokens whose probability is below this fraction of the most likely token's."),
    ("repetition_penalty", click.FLOAT, "Values above 1 make tokens that have already occurred less likely."),
    ("presence_penalty", click.FLOAT, "Amount to subtract from the logit of every token that was generated before."),
    ("frequency_penalty", click.FLOAT, "Amount to subtract from a token's logit once for each time it was generated."),
    ("seed", click.INT, "Seed for repeatable output (default: random)."),
    ("n", click.INT, "Number of samples per prompt (default: 1)."),
    (
        "logprobs",
        click.INT,
        "Report the log-probabilities of the chosen token and of this many of the most likely tokens (with --json).",
    ),
)


def config_options(command: F) -> F:
    """Add one flag per config field, with its type and help text."""
    return _options_of(PARTS, command)


def serve_options(command: F) -> F:
    """Add one flag per setting of the web server."""
    return _options_of(SERVE_PARTS, command)


def _options_of(parts: Mapping[str, type], command: F) -> F:
    for _, entry in reversed(config_fields(parts).values()):
        command = _config_option(entry)(command)
    return command


def _config_option(entry: Field[Any]) -> Callable[[F], F]:
    name, kind = entry.name, str(entry.type).split(" | ")[0]
    flag = entry.metadata["flag"] or "--" + name.replace("_", "-")
    help_text: str = entry.metadata["doc"]
    default = entry.default if kind != "bool" else "on" if entry.default else "off"
    if default not in (None, ""):
        elsewhere = entry.metadata["elsewhere"]
        help_text = f"{help_text} [default: {default}{elsewhere and '; ' + elsewhere}]"
    if kind == "bool":
        return click.option(flag, name, default=None, help=help_text)
    flags = ("--model", "-m") if flag == "MODEL" else (flag,)
    choices = entry.metadata["choices"]
    return click.option(
        *flags, name, type=click.Choice(choices) if choices else _CLICK_TYPES[kind], default=None, help=help_text
    )


def sampling_options(command: F) -> F:
    """Add one flag per sampling parameter."""
    repeated = click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text. May be repeated.")
    ids = click.option(
        "--stop-token-id", "stop_token_ids", type=click.INT, multiple=True, help="Stop at this token. May be repeated."
    )
    eos = click.option("--ignore-eos", is_flag=True, default=None, help="Continue after an end-of-text token.")
    for option in (eos, ids, repeated):
        command = option(command)
    for name, kind, help_text in reversed(_SAMPLING):
        command = click.option("--" + name.replace("_", "-"), name, type=kind, default=None, help=help_text)(command)
    return command


def verbose_option(command: F) -> F:
    """Add the flag for commands whose output is an answer: they log only warnings without it. See `log_if`."""
    text = "Also log what Culet chooses and measures. [default: off, unless CULET_LOG_LEVEL is set]"
    return click.option("--verbose/--quiet", "-v/-q", default=None, help=text)(command)


def log_if(verbose: bool | None) -> None:
    """Log as usual if the user asked for it, by the flag or by CULET_LOG_LEVEL, and otherwise only warnings."""
    asked = env.LOG_LEVEL.name in os.environ if verbose is None else verbose
    setup_logging(None if asked else "warning")


def given(options: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `options` among `names` that the user gave."""
    return {name: value for name, value in options.items() if name in names and value is not None and value != ()}


def config_of(options: Mapping[str, Any]) -> Config:
    """Return the Config for a command's options. The default model is the built-in one."""
    return build_config(given(options, config_fields()))


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """Return the SamplingParams for a command's options."""
    return SamplingParams(**given(options, SamplingParams.__dataclass_fields__))


# Settings from a file


def read_settings(path: Path, command: click.Command) -> dict[str, Any]:
    """Return the options of `command` that a YAML file sets. Its keys are the long flags without their dashes in front."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not valid YAML: {error}", hint="example: port: 8080") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"config: {path} holds {_kind(values)}, expected KEY: VALUE lines", hint="example: port: 8080")
    known = _names_by_flag(command)
    settings = {}
    for key, value in (values or {}).items():
        flag = str(key).replace("_", "-")
        if flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            hint = ADVICE.get(f"--{flag}") or (
                f"did you mean {near[0]}?" if near else "keys are the flags of `culet serve --help`"
            )
            raise ConfigError(f"config: {path} has the unknown key {str(key)!r}", hint=hint)
        if value is not None:
            settings[known[flag]] = _as_flag_value(known[flag], value)
    return settings


def _names_by_flag(command: click.Command) -> dict[str, str]:
    """Return the names of a command's options by their long flags, except `--config` itself."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    flags = {flag[2:]: str(option.name) for option in options for flag in option.opts if flag.startswith("--")}
    del flags["config"]
    return flags


def _as_flag_value(name: str, value: Any) -> Any:
    """Return a list or mapping of the file as the text that the flag takes, and other values as they are."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value) if name in JSON_SETTINGS else ",".join(f"{key}={part}" for key, part in value.items())
    return value


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"only {value!r}"
