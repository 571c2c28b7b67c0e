"""`culet serve`: run an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import click

from culet.cli.options import config_of, config_options, given, serve_options
from culet.config import SERVE_PARTS, build_serve_config, config_fields
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


@click.command()
@click.argument("model_name", metavar="[MODEL]", required=False)
@serve_options
@config_options
@_compatible
def serve(model_name: str | None, **options: Any) -> None:
    """Serve a model over HTTP with OpenAI-compatible APIs.

    \b
    Examples:
      culet serve google/gemma-4-E4B-it
      culet serve ./my-gemma --port 8080 --served-model-name gemma --max-model-len 32768
      culet serve google/gemma-4-31B-it --host 0.0.0.0 --max-num-seqs 64   (with CULET_API_KEY set)

    The server listens on 127.0.0.1 by default. Thinking, tool calls and prefix caching need no flags. Ctrl-C lets running
    requests finish; a second Ctrl-C stops immediately.
    """
    if model_name and options.get("model"):
        raise ConfigError("model: got two values, one as an argument and one as --model", hint="pass only one of them")
    settings = build_serve_config(given(options, config_fields(SERVE_PARTS)))
    setup_logging(form=settings.log_format)
    config = config_of({**options, "model": model_name or options.get("model")})
    _check_parsers(options)

    from culet.serve.server import serve as run

    run(config, settings)


def _check_parsers(options: dict[str, Any]) -> None:
    for flag in _ALWAYS_GEMMA:
        name = options.get(flag[2:].replace("-", "_"))
        if name not in (None, "gemma4"):
            raise ConfigError(
                f"{flag[2:]}: got {name!r}, expected gemma4, the only format that Culet parses", hint="omit the flag"
            )
    if options.get("trust_remote_code"):
        logger.warning("trust-remote-code: this flag is ignored, because Culet never runs code from a checkpoint")
