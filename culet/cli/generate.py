"""`culet generate`: continue one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from culet.cli.chat_screen import loading
from culet.cli.options import config_of, config_options, log_if, sampling_of, sampling_options, verbose_option
from culet.config import BUILT_IN
from culet.errors import BadRequest
from culet.limits import MEDIA_KINDS

if TYPE_CHECKING:
    from culet.engine.jobs import Result, Sample


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--chat/--no-chat",
    "as_chat",
    default=None,
    help="Send the prompt as a user message through the chat template. [default: on for the built-in model, else off]",
)
@click.option("--image", "image", multiple=True, metavar="FILE", help="Include this image before the prompt; repeatable.")
@click.option("--video", "video", multiple=True, metavar="FILE", help="Include this video before the prompt; repeatable.")
@click.option("--audio", "audio", multiple=True, metavar="FILE", help="Include this recording before the prompt; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@verbose_option
@sampling_options
@config_options
def generate(prompt: str | None, as_chat: bool | None, as_json: bool, verbose: bool | None, **options: Any) -> None:
    """Continue a prompt from the command line or from stdin.

    \b
    Examples:
      culet generate "Hello"
      culet generate "Once upon a time" --model google/gemma-4-E2B --max-tokens 64
      culet generate --chat "Why is the sky blue?" -m google/gemma-4-E2B-it
      culet generate --chat "What is in the picture?" --image cat.jpg -m google/gemma-4-E2B-it
      cat notes.txt | culet generate -m ./my-gemma --temperature 0 --json > answer.json
    """
    files = {kind: options.pop(kind) for kind in MEDIA_KINDS}
    params = sampling_of(options)
    config = config_of(options)
    text = _read_prompt(prompt)
    if as_chat is None:
        as_chat = config.model.model == BUILT_IN  # which was trained to answer, not to continue text
    log_if(verbose)

    with loading(config.model.model):
        from culet.engine.llm import LLM

        llm = LLM.from_config(config)
    with llm:
        request = _chat_request(text, files) if as_chat else _plain_request(text, files)
        if as_json or params.n > 1:
            result = llm.chat(request, params)[0] if as_chat else llm.generate(request, params)[0]
            _print_result(result, as_json=as_json)
            return
        for delta in llm.stream(request, params):
            click.echo(delta.text, nl=False)
            sys.stdout.flush()
        click.echo()


def _chat_request(text: str, files: Mapping[str, Sequence[str]]) -> Any:
    parts: list[dict[str, Any]] = [
        {"type": kind, "path": path, "where": f"--{kind} {path}"} for kind in MEDIA_KINDS for path in files[kind]
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}]


def _plain_request(text: str, files: Mapping[str, Sequence[str]]) -> Any:
    """Return the prompt. Media come first, unless placeholders such as <|image|> in the text say where they are."""
    given = {kind: [Path(path) for path in files[kind]] for kind in MEDIA_KINDS if files[kind]}
    marks = "".join(f"<|{kind}|>" * len(paths) for kind, paths in given.items() if f"<|{kind}|>" not in text)
    return {"prompt": marks + text, "multi_modal_data": given} if given else text


def _read_prompt(prompt: str | None) -> str:
    """Return the argument, or stdin without its final newline."""
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise BadRequest("no prompt was given", hint='pass one as an argument, as in culet generate "...", or pipe it in')
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt on stdin is not valid UTF-8: {error}", hint="pipe UTF-8 text") from error


def _print_result(result: Result, *, as_json: bool) -> None:
    if not as_json:
        for sample in result.samples:
            click.echo(sample.text)
        return
    document = {
        "prompt_token_ids": list(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
        "samples": [_sample_document(sample) for sample in result.samples],
    }
    click.echo(json.dumps(_sample_document(result.samples[0]) | document, ensure_ascii=False))


def _sample_document(sample: Sample) -> dict[str, Any]:
    """Return a sample as a JSON object. Only chats have `reasoning` and `tool_calls`, where the model wrote any."""
    document: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "logprobs": None if sample.logprobs is None else [dict(entry) for entry in sample.logprobs],
    }
    if sample.stop_reason:
        document["stop_reason"] = sample.stop_reason
    if sample.reasoning:
        document["reasoning"] = sample.reasoning
    if sample.tool_calls:
        calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in sample.tool_calls]
        document["tool_calls"] = calls
    return document
