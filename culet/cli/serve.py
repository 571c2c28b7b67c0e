"""`culet serve`: run an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from culet.cli.options import config_of, config_options, given, read_settings, serve_options
from culet.cli.vllm_flags import VllmCommand
from culet.config import SERVE_PARTS, Config, ServeConfig, build_serve_config, config_fields
from culet.errors import ConfigError
from culet.log import logger, setup_logging

# Flags of `vllm serve` for things that Culet always does. They are accepted and ignored.
_ALWAYS_ON = ("--enable-auto-tool-choice", "--trust-remote-code", "--disable-log-requests", "--enable-chunked-prefill")
_ALWAYS_GEMMA = ("--tool-call-parser", "--reasoning-parser")


def _compatible(command: Any) -> Any:
    """Accept flags of `vllm serve` that Culet does not need, and hide them from the help."""
    for flag in _ALWAYS_ON:
        command = click.option(flag, is_flag=True, default=None, hidden=True)(command)
    for flag in _ALWAYS_GEMMA:
        command = click.option(flag, default=None, hidden=True)(command)
    return command


@click.command(cls=VllmCommand)
@click.argument("model_name", metavar="[MODEL]", required=False)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="YAML file with settings: keys are the flags below, without the dashes in front. The command line takes precedence.",
)
@serve_options
@config_options
@_compatible
@click.pass_context
def serve(context: click.Context, model_name: str | None, config_file: Path | None, **options: Any) -> None:
    """Serve a model over HTTP with OpenAI-compatible APIs.

    \b
    Examples:
      culet serve google/gemma-4-E4B-it
      culet serve ./my-gemma --port 8080 --served-model-name gemma --max-model-len 32768
      culet serve google/gemma-4-31B-it --host 0.0.0.0 --max-num-seqs 64   (with CULET_API_KEY set)
      culet serve --config culet.yaml --port 8081

    The server listens on 127.0.0.1 by default. Thinking, tool calls and prefix caching need no flags. Ctrl-C lets running
    requests finish; a second Ctrl-C stops immediately.
    """
    if model_name and options.get("model"):
        raise ConfigError("model: got two values, one as an argument and one as --model", hint="pass only one of them")
    options = given({**options, "model": model_name or options.get("model")}, options)
    from_file = read_settings(config_file, context.command) if config_file else {}
    try:
        config, settings = _build({**from_file, **options})
    except ConfigError as error:
        name = error.message.partition(":")[0].replace("-", "_")
        if name in from_file and name not in options:
            error.message = f"{config_file}: {error.message}"
        raise

    from culet.serve.server import serve as run

    run(config, settings)


def _build(options: dict[str, Any]) -> tuple[Config, ServeConfig]:
    """Return the settings of the engine and of the web server, and start to log in the form that they ask for."""
    settings = build_serve_config(given(options, config_fields(SERVE_PARTS)))
    setup_logging(form=settings.log_format)
    config = config_of(options)
    _check_parsers(options)
    return config, settings


def _check_parsers(options: dict[str, Any]) -> None:
    for flag in _ALWAYS_GEMMA:
        name = options.get(flag[2:].replace("-", "_"))
        if name not in (None, "gemma4"):
            raise ConfigError(
                f"{flag[2:]}: got {name!r}, expected gemma4, the only format that Culet parses", hint="omit the flag"
            )
    if options.get("trust_remote_code"):
        logger.warning("trust-remote-code: this flag is ignored, because Culet never runs code from a checkpoint")
