"""`culet bench draft`: measure the cost of drafting and its speedup at a fixed acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from culet.cli.options import config_options, given
from culet.config import build_config, config_fields
from culet.errors import ConfigError

RANDOM_ASSISTANT = '{"method": "mtp", "model": "random:", "num_speculative_tokens": 3}'


@click.command("draft")
@click.argument("source", metavar="MODEL")
@click.option("--num-seqs", default="1,8,32", show_default=True, help="Numbers of sequences to time, separated by commas.")
@click.option(
    "--prompt-len", type=click.IntRange(min=1), default=1000, show_default=True, help="Number of tokens before the first draft."
)
@click.option(
    "--accept",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Number of drafts that every verify step accepts.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the results to FILE as JSON, after each line.")
@config_options
def bench_draft(source: str, num_seqs: str, prompt_len: int, accept: int, json_file: str | None, **options: Any) -> None:
    """Time draft rounds, verify steps and plain steps. The number of accepted drafts is fixed, so random weights will do.

    \b
    Examples:
      culet bench draft random:31B
      culet bench draft random:E4B --num-seqs 1,8 --accept 3 --json e4b.json
      culet bench draft random:26B-A4B --speculative-config '{"method": "dflash", "model": "random:"}'
    """
    from culet.bench.draft import DraftBench

    counts = _read_counts(num_seqs)
    chosen = given(options, config_fields()) | {"model": source}
    chosen.setdefault("speculative_config", RANDOM_ASSISTANT)
    bench = DraftBench(build_config(chosen), max_num_seqs=max(counts))
    bench.compile(counts, prompt_len)
    lines = []
    click.echo("sequences  plain ms  round ms  decode graph  verify graph  draft graph  tokens/round  speedup")
    for count in counts:
        line = bench.measure(count, prompt_len=prompt_len, num_accepted=accept)
        lines.append(line.as_dict())
        graphs = "".join(
            f"{'-' if ms is None else f'{ms:.3f}':>14}"
            for ms in (line.decode_graph_ms, line.verify_graph_ms, line.draft_graph_ms)
        )
        click.echo(f"{count:>9}{line.plain_ms:>10.3f}{line.round_ms:>10.3f}{graphs}{accept + 1:>14}{line.speedup:>9.2f}")
        if json_file is not None:
            Path(json_file).write_text(json.dumps({"model": source, "prompt_len": prompt_len, "lines": lines}, indent=1))


def _read_counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"num-seqs: got {text!r}, expected positive numbers separated by commas", hint="example: 1,8,32")
    return [int(word) for word in words]
