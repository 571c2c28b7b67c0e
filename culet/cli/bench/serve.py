"""`culet bench serve`: load-test any server with an OpenAI-compatible API."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from culet import env
from culet.errors import ConfigError


class _Rate(click.ParamType):
    """Requests per second, or `inf`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(value)
        except ValueError:
            rate = 0.0
        if not rate > 0:
            self.fail(f"got {value!r}, expected a number above 0, or inf", param, ctx)
        return rate


_COUNT = click.IntRange(min=1)
# Options that mean nothing for a dataset. One that is given by mistake is refused, because a run can take an hour.
_OF_AGENT = ("agent_history", "agent_sessions", "agent_turns", "agent_result_len", "agent_tools")
_OF_PROMPTS = ("num_prompts", "input_len", "range_ratio", "prefix_len", "request_rate", "burstiness", "metric_percentiles")
_UNUSED = {
    "random": ("num_chats", *_OF_AGENT),
    "mixed": _OF_AGENT,
    "agent": ("num_chats", "save_detailed", "backend", *_OF_PROMPTS),
}


@click.command("serve")
@click.option("--base-url", default=None, help="Address of the server. [default: http://HOST:PORT]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Host of the server, unless --base-url is set.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the server.")
@click.option("--model", default="", help="Model name. [default: the first that the server lists]")
@click.option(
    "--backend",
    type=click.Choice(["openai", "openai-chat", "vllm"]),
    default="openai",
    show_default=True,
    help="API to use: openai and vllm call /v1/completions, and openai-chat calls /v1/chat/completions.",
)
@click.option(
    "--dataset-name",
    "--dataset",
    "dataset_name",
    type=click.Choice(["random", "mixed", "agent"]),
    default="random",
    show_default=True,
    help="Kind of load: random prompts, random prompts beside running chats, or sessions of an agent.",
)
@click.option("--num-prompts", type=_COUNT, default=200, show_default=True, help="Number of requests to send.")
@click.option(
    "--random-input-len", "input_len", type=_COUNT, default=1024, show_default=True, help="Number of tokens per prompt."
)
@click.option(
    "--random-output-len", "output_len", type=_COUNT, default=128, show_default=True, help="Number of tokens per answer."
)
@click.option(
    "--random-range-ratio",
    "range_ratio",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=0.0,
    show_default=True,
    help="Multiply both lengths by a random factor between 1 - R and 1 + R.",
)
@click.option(
    "--random-prefix-len",
    "prefix_len",
    type=click.IntRange(0),
    default=0,
    help="Number of tokens in a prefix that all prompts share.",
)
@click.option("--num-chats", type=_COUNT, default=31, show_default=True, help="mixed: number of chats that run all the time.")
@click.option(
    "--agent-history",
    default="20000,60000,120000",
    show_default=True,
    help="agent: tokens of history before the first turn, one run each.",
)
@click.option("--agent-sessions", type=_COUNT, default=10, show_default=True, help="agent: number of interleaved sessions.")
@click.option("--agent-turns", type=_COUNT, default=5, show_default=True, help="agent: number of turns of each session.")
@click.option("--agent-result-len", type=_COUNT, default=500, show_default=True, help="agent: tokens of each tool result.")
@click.option("--agent-tools", type=_COUNT, default=12, show_default=True, help="agent: number of tools.")
@click.option(
    "--request-rate", type=_Rate(), default="inf", show_default=True, help="Requests per second; inf sends all at once."
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0.0, min_open=True),
    default=1.0,
    show_default=True,
    help="Burstiness of the arrivals: 1 is a Poisson process, and smaller values are burstier.",
)
@click.option("--max-concurrency", type=_COUNT, default=None, help="Maximum number of requests in flight.")
@click.option(
    "--num-warmups",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Number of requests to send before the measurement.",
)
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Let every answer run to its full length. [default: on]")
@click.option("--temperature", type=click.FloatRange(0.0), default=0.0, show_default=True, help="Sampling temperature.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for prompts and arrival times.")
@click.option("--metric-percentiles", default="99", show_default=True, help="Percentiles to show, as in 50,90,99.")
@click.option("--extra-body", default="", metavar="JSON", help="Additional fields for every request, as a JSON object.")
@click.option("--api-key", default=None, help="API key of the server. [default: CULET_API_KEY]")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.0, min_open=True),
    default=3600.0,
    help="Timeout for each request, in seconds.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the results to FILE as JSON.")
@click.option("--save-detailed", is_flag=True, help="Include every answer in the JSON.")
def bench_serve(**options: Any) -> None:
    """Send load to a server and report the latency and throughput that clients see.

    \b
    Examples:
      culet bench serve --num-prompts 500 --random-input-len 1000 --random-output-len 200 --max-concurrency 64
      culet bench serve --base-url http://gpu1:8000 --backend openai-chat --request-rate 4
      culet bench serve --port 8000 --request-rate 10 --burstiness 0.5 --json out.json
      culet bench serve --dataset mixed --num-chats 31 --num-prompts 30 --request-rate 1 --random-input-len 8000
      culet bench serve --dataset agent --agent-history 20000,60000 --agent-sessions 10

    The report has the same figures and layout as that of `vllm bench serve`. Any server with an OpenAI-compatible API can be
    measured.
    """
    import asyncio

    from culet.bench.serve.figures import block, details, summarise
    from culet.bench.serve.load import run

    _check_used(options["dataset_name"])
    shares = _shares(options.pop("metric_percentiles"))
    json_file, detailed = options.pop("json_file"), options.pop("save_detailed")
    dataset, agent = options.pop("dataset_name"), _agent(options)
    options["num_chats"] = options["num_chats"] if dataset == "mixed" else 0
    load = _load(options)
    if dataset == "agent":
        _run_agent(load, agent, json_file)
        return
    outcome = asyncio.run(run(load, _progress(load.num_prompts)))
    figures = summarise(outcome, shares)
    click.echo(block(figures, shares))
    errors = [answer.error for answer in outcome.answers if answer.error]
    if errors:
        click.echo(f"{len(errors)} requests failed; the first error was: {errors[0]}", err=True)
    if outcome.chat_errors:
        click.echo(f"{len(outcome.chat_errors)} chats failed; the first error was: {outcome.chat_errors[0]}", err=True)
    if json_file:
        head = {"date": datetime.now().strftime("%Y%m%d-%H%M%S"), "endpoint_type": figures["backend"]}
        more = details(outcome) if detailed else {}
        _write(Path(json_file), {**head, **figures, **more})
    if not outcome.good:
        sys.exit(1)


def _check_used(dataset: str) -> None:
    """Raise if an option was given that has no effect on this dataset."""
    context = click.get_current_context()
    for param in context.command.params:
        is_given = context.get_parameter_source(param.name or "") is click.core.ParameterSource.COMMANDLINE
        if param.name in _UNUSED[dataset] and is_given:
            right = "agent" if param.name in _OF_AGENT else "mixed" if dataset == "random" else "random"
            hint = f"omit it, or use --dataset {right}"
            if param.name == "backend":
                hint = "omit it: an agent calls /v1/chat/completions"
            raise ConfigError(f"{param.opts[0].lstrip('-')}: has no effect on --dataset {dataset}", hint=hint)


def _agent(options: dict[str, Any]) -> Any:
    from culet.bench.serve.agent import MAX_HISTORY, AgentLoad

    text = options.pop("agent_history")
    lengths = tuple(int(part) for part in text.split(",")) if re.fullmatch(r"\d+(,\d+)*", text) else ()
    if not lengths or not all(0 < length <= MAX_HISTORY for length in lengths):
        expected = f"expected numbers of tokens from 1 to {MAX_HISTORY:,}, separated by commas"
        raise ConfigError(f"agent-history: got {text!r}, {expected}", hint="example: 20000,60000")
    return AgentLoad(
        lengths,
        options.pop("agent_sessions"),
        options.pop("agent_turns"),
        options.pop("agent_result_len"),
        options.pop("agent_tools"),
        options["output_len"],
    )


def _run_agent(load: Any, agent: Any, json_file: str | None) -> None:
    import asyncio

    from culet.bench.serve.agent import agent_block, run_agent

    num_requests = 2 * len(agent.history_lens) * agent.num_sessions * agent.num_turns
    turns: list[Any] = []
    try:
        asyncio.run(run_agent(load, agent, turns, _progress(num_requests)))
    finally:
        if figures := [turn.figures() for turn in turns]:
            click.echo(agent_block(figures))
            if num_found := sum(figure["uncached_hit_tokens"] for figure in figures):
                problem = f"the server found {num_found} tokens of prompts whose cache_salt was new to it"
                click.echo(f"warning: {problem}, so the times without the cache are too short", err=True)
            if json_file:
                date = datetime.now().strftime("%Y%m%d-%H%M%S")
                _write(Path(json_file), {"date": date, "agent": asdict(agent), "turns": figures})


def _load(options: dict[str, Any]) -> Any:
    from culet.bench.serve.client import Load

    host, port, base_url = options.pop("host"), options.pop("port"), options.pop("base_url")
    key = options.pop("api_key") or env.API_KEY.get().split(",")[0].strip()
    backend, extra = options.pop("backend"), options.pop("extra_body")
    try:
        fields = json.loads(extra) if extra else {}
    except ValueError as error:
        raise ConfigError(f"extra-body: not valid JSON: {error}", hint="example: '{\"top_k\": 1}'") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"extra-body: got {type(fields).__name__}, expected a JSON object", hint="example: '{\"top_k\": 1}'")
    return Load(
        base_url=base_url or f"http://{host}:{port}", is_chat=backend == "openai-chat", api_key=key, extra=fields, **options
    )


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 100 for share in shares):
        raise ConfigError(f"metric-percentiles: got {text!r}, expected numbers from 0 to 100", hint="example: 50,90,99")
    return shares


def _progress(count: int) -> Any:
    if not sys.stderr.isatty():
        return lambda done: None
    return lambda done: click.echo(f"\r{done}/{count} requests" + ("\n" if done == count else ""), nl=False, err=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="pass a file in a writable folder") from error
