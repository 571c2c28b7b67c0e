"""`culet plan`: show which attention backends a model would use and how much fits into memory.

It reads only `config.json` and needs no GPU, weights or torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from culet import env
from culet.attention.picture import draw
from culet.cache.spec import DTYPE_NAMES
from culet.cli.planning.facts import (
    Facts,
    draft_bytes,
    exchanges_of,
    fit_of,
    gather,
    report,
    shares_of,
    weights_of,
)
from culet.cli.planning.ranks import cache_share
from culet.config import CacheConfig, MediaConfig, build_config
from culet.errors import FAILED, ConfigError
from culet.hardware import GPUS
from culet.layers.weight.quantised.scheme import ROUNDINGS
from culet.models.sizes import pages_of_sequence

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GB, MB = 1_000_000_000, 1_000_000
_DTYPE = click.Choice(("auto", "bfloat16", "float32"))


@click.command()
@click.argument("model")
@click.option(
    "--gpu", default="auto", show_default=True, metavar="NAME", help=f"GPU to plan for: auto, cpu, {', '.join(GPUS)}."
)
@click.option(
    "--gpu-memory-utilization",
    type=float,
    help=f"Fraction of the GPU's memory to use. [default: {CacheConfig().gpu_memory_utilization}]",
)
@click.option("--dtype", type=_DTYPE, help="Precision of weights and activations. [default: auto]")
@click.option(
    "--quantization",
    type=click.Choice(("auto", *ROUNDINGS)),
    help="Precision to which unquantised weights are quantised. [default: auto, that of the checkpoint]",
)
@click.option(
    "--head-quantization",
    type=click.Choice(("auto", *ROUNDINGS)),
    help="Precision to which the embedding table (also the head) is quantised. [default: auto]",
)
@click.option(
    "--kv-cache-dtype",
    help="Precision of the KV cache: auto, fp8, or sliding=fp8,global=auto. [default: auto, the same as the weights]",
)
@click.option("--latent/--no-latent", default=None, help="Store K and V of K=V layers once. [default: on]")
@click.option("--max-model-len", type=int, help="Maximum length of prompt plus output, in tokens. [default: the model's limit]")
@click.option(
    "--max-num-batched-tokens", type=int, help="Maximum number of new tokens in one step. [default: 8192, or 2048 below 40 GiB]"
)
@click.option("--max-num-seqs", type=int, help="Maximum number of sequences that run at the same time. [default: 128]")
@click.option(
    "--seq-len", "seq_lens", type=int, multiple=True, help="Show how many sequences of this length fit. May be repeated."
)
@click.option(
    "--attention-backend", help="Attention backend: auto, one for all layers, or sliding=NAME,global=NAME. [default: auto]"
)
@click.option(
    "--speculative-config",
    metavar="JSON",
    help="Also plan for a drafter, given as an object with method, model and other keys.",
)
@click.option("--tensor-parallel-size", type=int, help="Number of GPUs that share each layer. [default: 1]")
@click.option("--language-model-only", is_flag=True, default=None, help="Plan for the text decoder without its towers.")
@click.option(
    "--limit-mm-per-prompt",
    metavar="JSON",
    help="Maximum number of items per kind in a prompt, as a JSON object with image, video and audio; 0 turns a kind off.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Also draw the plan and write it to FILE as SVG.")
def plan(model: str, gpu: str, seq_lens: tuple[int, ...], as_json: bool, svg: str | None, **options: Any) -> None:
    """Show how much of a model fits on a GPU, and how it would run.

    \b
    Examples:
      culet plan 31B --gpu rtx4090 --quantization int4
      culet plan ./my-gemma --gpu h100 --tensor-parallel-size 4 --seq-len 4000 --json
      culet plan 31B --gpu h200 --speculative-config '{"method": "mtp", "model": "random:"}'

    MODEL is one of E2B, E4B, 12B, 26B-A4B and 31B, a checkpoint folder, a config.json, or a name on the Hub. Neither weights
    nor a GPU are needed. The exit code is 1 if the model does not fit.
    """
    config = build_config({name: value for name, value in options.items() if value is not None})
    facts = gather(model, gpu, config, seq_lens)
    if svg is not None:
        _write_picture(facts, Path(svg))
    if as_json:
        click.echo(json.dumps(report(facts), indent=2))
    else:
        _print_tables(facts)
    if not model_fits(facts):
        click.get_current_context().exit(FAILED)


def model_fits(facts: Facts) -> bool:
    """Return whether the model fits with these settings, together with one sequence of the requested length, if any."""
    longest: int = fit_of(facts, False, facts.latent)["longest_sequence"]
    return longest >= (facts.config.model.max_model_len or 1)


def _write_picture(facts: Facts, path: Path) -> None:
    owners = [layer.index for layer in facts.spec.layers if layer.owns_kv]
    title = f"{facts.name} on {facts.gpu.name} ({facts.gpu.arch.name}): attention by layer"
    try:
        path.write_text(draw(facts.attention, owners, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"svg: cannot write {path}: {error.strerror}", hint="pass a file in a writable folder") from error
    click.echo(f"wrote {path}", err=True)


# The plan as tables


def _print_tables(facts: Facts) -> None:
    """Print the tables to stdout, in colour if it is a terminal and NO_COLOR is not set."""
    from rich.console import Console

    is_plain = not sys.stdout.isatty() or env.NO_COLOR.get() != ""
    console = Console(highlight=False, color_system=None if is_plain else "auto", width=None if sys.stdout.isatty() else 100)
    with console.capture() as captured:
        gpu, memory = facts.gpu, f"{facts.gpu.memory_bytes / GB:.1f} GB"
        _line(console, f"{facts.name} on {gpu.name} ({gpu.arch.name}, {memory})")
        head = "" if facts.head_precision == "auto" else f", head {facts.head_precision}"
        _line(
            console,
            f"weights {facts.precision}{head}, KV cache {facts.kv_dtype}, up to {facts.max_model_len:,} tokens per sequence\n",
        )
        _print_attention(console, facts)
        _print_cache(console, facts)
        _print_weights(console, facts)
        if facts.num_ranks > 1:
            _print_ranks(console, facts)
        _print_fits(console, facts)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()), color=None if not is_plain else False)


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Make a table with words in its `left` columns and numbers in its `right` columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _print_attention(console: Console, facts: Facts) -> None:
    """Print the attention plans of the target and, if there is one, of the drafter."""
    plans = {"target": facts.attention} | ({facts.drafter.method: facts.draft_attention} if facts.drafter else {})
    words = ("model", "group", "backend") if facts.drafter else ("group", "backend")
    table = _table("Attention", words, ("layers", "head dim", "query/KV heads", "window"))
    rows = [(name, group) for name, plan in plans.items() if plan is not None for group in plan.groups]
    for name, group in rows:
        need = group.need
        heads, window = f"{need.num_heads}/{need.num_kv_heads}", str(need.window or "none")
        names = (name, need.group) if facts.drafter else (need.group,)
        table.add_row(*names, group.backend, str(len(need.layers)), str(need.head_dim), heads, window)
    console.print(table)
    for name, group in rows:
        prefix = f"{name}, " if facts.drafter else ""
        _line(console, f"  {prefix}{group.need.group}: {group.backend}, {group.why}")
        for other, reason in group.others.items():
            _line(console, f"    not {other}: {reason}")
    if facts.drafter is not None:
        drafter = facts.drafter
        pages = "reads the target's pages" if drafter.reads_target_pages else "has its own pages"
        pages = pages if drafter.readers(facts.layout) else "reads the request's own text"
        size = f"{draft_bytes(facts) / GB:.3f} GB of weights"
        _line(console, f"  {drafter.method}, {drafter.model}: up to {drafter.max_drafts} drafts per round, {pages}, {size}")
    _line(console, "")


def _print_cache(console: Console, facts: Facts) -> None:
    """Print the KV cache with one column per group of layers."""
    layout = facts.layout
    slab = layout.slab_bytes
    table = _table("KV cache", ("",), [group.name for group in layout.groups] + ["per sequence"])

    def row(name: str, cells: Sequence[str], total: str = "") -> None:
        table.add_row(name, *cells, total)

    groups = layout.groups
    row("stored as", [f"latent of {group.spec.width}" if group.spec.latent else "K and V" for group in groups])
    row("precision", [DTYPE_NAMES[group.spec.itemsize] for group in groups])
    row("layers that keep KV", [str(len(group.layers)) for group in groups])
    row("bytes per token", [f"{group.bytes_per_token:,}" for group in groups])
    windows = [group.window * group.bytes_per_token if group.window else 0 for group in groups]
    row("MB of a full window", [f"{size / MB:,.1f}" if size else "-" for size in windows])
    row(f"tokens per page (a slab of {slab / MB:.2f} MB)", [str(group.page_tokens) for group in groups])
    row("bytes wasted per slab", [f"{layout.waste(group):,}" for group in groups])
    for length in facts.seq_lens:
        pages = [pages_of_sequence(group, length) for group in groups]
        row(f"MB at {length:,} tokens", [f"{count * slab / MB:,.1f}" for count in pages], f"{sum(pages) * slab / MB:,.1f}")
    console.print(table)


def _print_weights(console: Console, facts: Facts) -> None:
    weights = weights_of(facts)
    table = _table("Weights", ("part",), ("parameters", "GB"))

    def row(name: str, sizes: Sequence[dict[str, int]]) -> None:
        total = sum(size["bytes"] for size in sizes)
        table.add_row(name, f"{sum(size['parameters'] for size in sizes):,}", f"{total / GB:.3f}")

    for part, size in weights["text"].items():
        row(part, [size])
    row("text decoder", list(weights["text"].values()))
    for part, size in weights["towers"].items():
        row(f"{part} tower ({'loaded' if size['is_loaded'] else 'not loaded'})", [size])
    console.print(table)


def _print_ranks(console: Console, facts: Facts) -> None:
    """Print what each rank holds and why, and what the ranks exchange in a step."""
    shares = shares_of(facts)
    table = _table(f"Each of {facts.num_ranks} ranks", ("part", "shared", "why"), ("GB per rank",))
    for share in shares:
        table.add_row(share.part, share.how, share.why, f"{share.rank_bytes / GB:.3f}")
    table.add_row("all weights", "", "", f"{sum(share.rank_bytes for share in shares) / GB:.3f}")
    for group in facts.layout.groups:
        table.add_row(f"{group.name} KV cache", *cache_share(group, facts.num_ranks), "")
    console.print(table)
    _print_exchanges(console, facts)


def _print_exchanges(console: Console, facts: Facts) -> None:
    """Print what the ranks exchange in a step, how, and how long that takes at the link's rate."""
    link = facts.gpu.link
    rate = "an unknown link" if link is None else f"{link.name}, {link.bytes_per_s / GB:g} GB/s"
    over = f" over {rate}" if facts.gpu.arch.is_gpu else ""
    numbers = ("tokens", "all-reduces", "MB reduced", "MB moved", "MB gathered", "ms at the link's rate")
    table = _table(f"Exchanges per step{over}", ("all-reduce",), numbers)
    for each in exchanges_of(facts):
        seconds = "-" if each.link_s is None else f"{1e3 * each.link_s:.3f}"
        sizes = [f"{size / MB:.2f}" for size in (each.reduced_bytes, each.moved_bytes, each.gathered_bytes)]
        table.add_row(each.method, str(each.num_tokens), str(each.num_reductions), *sizes, seconds)
    console.print(table)
    notes = ["Moved and gathered bytes are those that each rank receives."]
    if facts.gpu.arch.is_gpu:
        notes += [
            "Without symmetric memory, which is tried at start, NCCL adds all sizes.",
            "Rates are those of data sheets. Each all-reduce also takes a fixed time, which depends on the machine.",
        ]
    if facts.drafter is not None and facts.drafter.reads_target_pages:
        notes.append("The drafter's rounds have exchanges of their own, which are not counted.")
    _line(console, "\n".join(notes) + "\n")


def _print_fits(console: Console, facts: Facts) -> None:
    """Print what fits, for text only or all parts, with or without the latent.

    Columns that cannot differ are omitted, with a note.
    """
    has_latent = any(layer.k_eq_v for layer in facts.spec.layers)
    choices = [(text_only, latent) for text_only in (True, False) for latent in (True, False)]
    has_towers = bool(facts.loaded_towers.kinds)
    fits = [fit_of(facts, *choice) for choice in choices if (has_latent or choice[1]) and (has_towers or choice[0])]
    allowed = fits[0]["allowed_bytes"] / GB
    share = f"{facts.config.cache.gpu_memory_utilization:g} of {facts.rank_memory_bytes / GB:.1f} GB"
    if facts.num_ranks > 1:
        share = f"each {'GPU' if facts.gpu.arch.is_gpu else 'rank'}, {share}"
    names = [
        f"{'text only' if fit['text_only'] else 'all parts'},\n{'latent' if fit['latent'] and has_latent else 'K and V'}"
        for fit in fits
    ]
    table = _table(f"What fits into {share}", ("",), names)
    table.add_row("weights GB", *(f"{fit['weight_bytes'] / GB:.2f}" for fit in fits))
    table.add_row("activations GB, about", *(f"{fit['working_bytes'] / GB:.2f}" for fit in fits))
    for key, name in (("graph_bytes", "graphs, buffers GB, about"), ("media_cache_bytes", "cached media GB")):
        if any(fit[key] for fit in fits):
            table.add_row(name, *(f"{fit[key] / GB:.2f}" for fit in fits))
    table.add_row("KV cache GB", *(_cache_size(fit) for fit in fits))
    table.add_row("slabs", *(f"{fit['num_slabs']:,}" for fit in fits))
    table.add_row("longest sequence, tokens", *(f"{fit['longest_sequence']:,}" for fit in fits))
    for length in facts.seq_lens:
        table.add_row(f"sequences of {length:,}", *(f"{fit['sequences'][str(length)]:,}" for fit in fits))
        table.add_row("  tokens in total", *(f"{fit['tokens'][str(length)]:,}" for fit in fits))
    console.print(table)
    for note in _notes(facts, fits[0], has_latent, allowed):
        _line(console, note)


def _cache_size(fit: dict[str, Any]) -> str:
    return f"{fit['missing_bytes'] / GB:.2f} short" if fit["missing_bytes"] else f"{fit['cache_bytes'] / GB:.2f}"


def _notes(facts: Facts, fit: dict[str, Any], has_latent: bool, allowed_gb: float) -> list[str]:
    """Return the notes below the table. `fit` is its best column."""
    notes = []
    if fit["weight_bytes"] > fit["allowed_bytes"]:
        notes.append(f"The weights alone, {fit['weight_bytes'] / GB:.1f} GB, do not fit into the usable {allowed_gb:.1f} GB.")
    elif fit["num_slabs"] == 0:
        notes.append("The weights fit, but nothing is left for the KV cache.")
    elif fit["longest_sequence"] < facts.max_model_len:
        longest = fit["longest_sequence"]
        notes.append(f"A sequence of {facts.max_model_len:,} tokens does not fit: the longest that fits has {longest:,}.")
    if not has_latent:
        notes.append("No layer has K=V, so the latent does not apply.")
    notes += _tower_notes(facts)
    if not facts.gpu.arch.is_gpu:
        notes.append("On a CPU, the cache takes at most a quarter of the free memory, unless --kv-cache-memory-bytes is set.")
    return notes


def _tower_notes(facts: Facts) -> list[str]:
    """Return what turning off each loaded tower would gain, and how to do it."""
    if not facts.towers.kinds:
        return ["The checkpoint has no vision or audio parts."]
    kinds = {"vision": ("image", "video"), "audio": ("audio",)}
    length, notes = facts.seq_lens[0], []
    with_all = fit_of(facts, False, facts.latent)
    for name in facts.loaded_towers.num_weights:
        limits = facts.config.media.limits | dict.fromkeys(kinds[name], 0)
        setting = json.dumps({kind: most for kind, most in limits.items() if most is not None})
        config = replace(facts.config, media=MediaConfig(limit_mm_per_prompt=setting))
        without = fit_of(replace(facts, config=config), False, facts.latent)
        gained = (without["cache_bytes"] - with_all["cache_bytes"]) / GB
        more = without["sequences"][str(length)] - with_all["sequences"][str(length)]
        room = f"{more:,} more sequence{'' if more == 1 else 's'} of {length:,} tokens"
        notes.append(f"Without the {name} tower: {gained:.2f} GB more KV cache, {room}")
        notes.append(f"  (--limit-mm-per-prompt '{setting}').")
    return notes
