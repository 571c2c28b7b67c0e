"""`culet plan`: show which attention backends a model would use and how much fits into memory.

It reads only `config.json` and needs no GPU, weights or torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from culet import env
from culet.attention.picture import draw
from culet.attention.plan import AttentionPlan, plan_attention
from culet.cache.spec import CacheLayout, plan_cache, stored_as
from culet.config import CacheConfig, Config, ModelConfig, build_config
from culet.drafters.base import DrafterPlan, cache_specs, open_drafter, plan_drafter_attention, target_groups
from culet.errors import FAILED, CheckpointError, ConfigError
from culet.hardware import GPUS, Gpu, find_gpu
from culet.layers.weight.byte_sizes import bytes_per_value
from culet.models.folder import read_config
from culet.models.sizes import Room, pages_of_sequence, slabs_of_sequence, text_weights, tower_weights, working_bytes
from culet.models.spec import ModelSpec, read_spec
from culet.models.variants import VARIANTS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GB, MB = 1_000_000_000, 1_000_000
DEFAULT_SEQ_LENS = (2000, 8192, 32768)
_ITEMSIZES = {"bfloat16": 2, "float32": 4}
_NAMES = {1: "fp8_e4m3", 2: "bfloat16", 4: "float32"}
_DTYPE = click.Choice(("auto", "bfloat16", "float32"))


@dataclass(frozen=True)
class Facts:
    """The plan before it is written as JSON, tables or a picture."""

    name: str
    spec: ModelSpec
    towers: dict[str, int]  # number of elements in the vision and audio towers
    gpu: Gpu
    config: Config
    dtype: str
    kv_dtype: str
    seq_lens: tuple[int, ...]
    layouts: dict[bool, CacheLayout]  # with (True) and without the latent
    attention: AttentionPlan  # for the layout that would be used
    drafter: DrafterPlan | None = None
    draft_attention: AttentionPlan | None = None  # planned separately from the target's

    @property
    def latent(self) -> bool:
        """Whether the layout that would be used stores K and V of K=V layers once."""
        return self.config.cache.latent

    @property
    def layout(self) -> CacheLayout:
        return self.layouts[self.latent]

    @property
    def max_model_len(self) -> int:
        return self.config.model.max_model_len or self.spec.max_position


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
@click.option("--dtype", type=_DTYPE, help="Precision of the weights. [default: auto]")
@click.option(
    "--kv-cache-dtype",
    help="Precision of the KV cache: auto, fp8, or sliding=fp8,global=auto. [default: auto, the same as the weights]",
)
@click.option("--latent/--no-latent", default=None, help="Store K and V of K=V layers once. [default: on]")
@click.option("--max-model-len", type=int, help="Maximum length of prompt plus output, in tokens. [default: the model's limit]")
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Also draw the plan and write it to FILE as SVG.")
def plan(model: str, gpu: str, seq_lens: tuple[int, ...], as_json: bool, svg: str | None, **options: Any) -> None:
    """Show which attention backends a model would use, and how much fits into memory.

    \b
    Examples:
      culet plan 31B --gpu h200
      culet plan ./my-gemma --gpu rtx4090 --seq-len 4000 --json
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
    """Return whether the text decoder fits, with one sequence of the length that was asked for, or of any length."""
    longest: int = _fit(facts, True, facts.latent)["longest_sequence"]
    return longest >= (facts.config.model.max_model_len or 1)


def gather(model: str, gpu_name: str, config: Config, seq_lens: Sequence[int] = ()) -> Facts:
    """Read the model's config and plan for it."""
    name, values = _find_model(model)
    spec = read_spec(values)
    gpu = find_gpu(gpu_name)
    auto = "bfloat16" if gpu.arch.has_bfloat16 else "float32"
    dtype = auto if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    drafts = config.draft.choice
    drafter = None if drafts is None else open_drafter(drafts, spec)
    kept = {latent: cache_specs(spec, drafter, _ITEMSIZES[dtype], latent=latent) for latent in (True, False)}
    layouts = {latent: plan_cache(stored_as(specs, config.cache.kv_cache_dtype)) for latent, specs in kept.items()}
    layout = layouts[config.cache.latent]
    groups = target_groups(layout)
    readers = {group.name: spec.readers(group.layers) for group in groups}
    choice = config.model.attention_backend
    return Facts(
        name=name,
        spec=spec,
        towers=tower_weights(values),
        gpu=gpu,
        config=config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        seq_lens=_check_lengths(config.model, spec, seq_lens),
        layouts=layouts,
        attention=plan_attention(groups, spec.layers[0].num_heads, gpu, choice, readers=readers),
        drafter=drafter,
        draft_attention=None
        if drafter is None or drafts is None
        else plan_drafter_attention(drafter, layout, gpu, drafts.attention_backend),
    )


def _find_model(model: str) -> tuple[str, dict[str, Any]]:
    """Return (name, config.json) for a folder, a file, a variant or a model on the Hub."""
    by_name = {name.lower(): name for name in VARIANTS} | {"26b": "26B-A4B"}
    if not Path(model).exists() and model.lower() in by_name:
        name = by_name[model.lower()]
        return f"Gemma 4 {name}", VARIANTS[name]
    try:
        return model, read_config(model)
    except CheckpointError as error:
        if "/" not in model and not Path(model).exists():
            error.hint = f"pass one of {', '.join(VARIANTS)}, a checkpoint folder, a config.json, or a model on the Hub"
        raise


def _check_lengths(config: ModelConfig, spec: ModelSpec, seq_lens: Sequence[int]) -> tuple[int, ...]:
    """Return the given sequence lengths, or the defaults that are within the limit. Raise if a length is over the limit."""
    limit = spec.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max-model-len: got {config.max_model_len}, but the model's positions end at {limit}", hint=f"use at most {limit}"
        )
    limit = config.max_model_len or limit
    for length in seq_lens:
        if not 1 <= length <= limit:
            raise ConfigError(f"seq-len: got {length}, expected a whole number from 1 to {limit}")
    return tuple(dict.fromkeys(seq_lens)) or tuple(length for length in DEFAULT_SEQ_LENS if length <= limit) or (limit,)


# The plan as data


def report(facts: Facts) -> dict[str, Any]:
    """Return the plan as one JSON object. Its keys are stable."""
    spec = facts.spec
    return {
        "model": {
            "name": facts.name,
            "architecture": spec.architecture,
            "num_layers": len(spec.layers),
            "max_position": spec.max_position,
            "image_attention": spec.image_attention,
        },
        "gpu": {"name": facts.gpu.name, "arch": facts.gpu.arch.name, "memory_bytes": facts.gpu.memory_bytes},
        "settings": {
            "dtype": facts.dtype,
            "kv_cache_dtype": facts.kv_dtype,
            "latent": facts.latent,
            "gpu_memory_utilization": facts.config.cache.gpu_memory_utilization,
            "max_model_len": facts.max_model_len,
            "attention_backend": facts.config.model.attention_backend,
        },
        "attention": _attention(facts.attention),
        "drafter": _drafter(facts),
        "weights": _weights(facts),
        "cache": [_cache(facts, latent) for latent in (True, False)],
        "fits": [_fit(facts, text_only, latent) for text_only in (True, False) for latent in (True, False)],
    }


def _attention(plan: AttentionPlan) -> list[dict[str, Any]]:
    return [
        {
            "group": group.need.group,
            "layers": list(group.need.layers),
            "head_dim": group.need.head_dim,
            "num_heads": group.need.num_heads,
            "num_kv_heads": group.need.num_kv_heads,
            "window": group.need.window,
            "latent": group.need.latent,
            "backend": group.backend,
            "why": group.why,
            "others": dict(group.others),
        }
        for group in plan.groups
    ]


def _drafter(facts: Facts) -> dict[str, Any] | None:
    drafter = facts.drafter
    if drafter is None or facts.draft_attention is None:
        return None
    return {
        "method": drafter.method,
        "model": drafter.model,
        "max_drafts": drafter.max_drafts,
        "reads_target_pages": drafter.reads_target_pages,
        "taps": list(drafter.taps),
        "attention": _attention(facts.draft_attention),
        "weight_bytes": _draft_bytes(facts),
    }


def _draft_bytes(facts: Facts) -> int:
    return 0 if facts.drafter is None else facts.drafter.weight_bytes(_ITEMSIZES[facts.dtype])


def _weights(facts: Facts) -> dict[str, Any]:
    """Return the parameters and bytes of each part of the text decoder and the towers."""
    each = bytes_per_value(_ITEMSIZES[facts.dtype])
    text, towers = text_weights(facts.spec), facts.towers
    return {
        "text": {part: {"parameters": count, "bytes": round(count * each)} for part, count in text.items()},
        "towers": {part: {"parameters": count, "bytes": round(count * each)} for part, count in towers.items()},
        "text_bytes": round(sum(text.values()) * each),
        "tower_bytes": round(sum(towers.values()) * each),
    }


def _cache(facts: Facts, latent: bool) -> dict[str, Any]:
    """Return the slab size, pages and bytes of a layout."""
    layout = facts.layouts[latent]
    return {
        "latent": latent,
        "slab_bytes": layout.slab_bytes,
        "groups": [
            {
                "group": group.name,
                "dtype": _NAMES[group.spec.itemsize],
                "num_kv_layers": len(group.layers),
                "window": group.window,
                "bytes_per_token": group.bytes_per_token,
                "page_tokens": group.page_tokens,
                "waste_bytes_per_slab": layout.waste(group),
                "bytes_per_window": None if group.window is None else group.window * group.bytes_per_token,
                "pages_per_sequence": {str(length): pages_of_sequence(group, length) for length in facts.seq_lens},
            }
            for group in layout.groups
        ],
        "bytes_per_sequence": {str(n): slabs_of_sequence(layout, n) * layout.slab_bytes for n in facts.seq_lens},
    }


def _fit(facts: Facts, text_only: bool, latent: bool) -> dict[str, Any]:
    """Return what fits into memory, with or without the towers and the latent."""
    schedule, weights = facts.config.schedule, _weights(facts)
    weight_bytes = weights["text_bytes"] + (0 if text_only else weights["tower_bytes"]) + _draft_bytes(facts)
    working = working_bytes(
        facts.spec,
        _ITEMSIZES[facts.dtype],
        num_tokens=min(schedule.max_num_batched_tokens, facts.max_model_len * schedule.max_num_seqs),
        num_seqs=schedule.max_num_seqs,
    )
    allowed = int(facts.gpu.memory_bytes * facts.config.cache.gpu_memory_utilization)
    room = Room(facts.layouts[latent], allowed - weight_bytes - working)
    counts = {length: room.sequences(length) for length in facts.seq_lens}
    return {
        "text_only": text_only,
        "latent": latent,
        "allowed_bytes": allowed,
        "weight_bytes": weight_bytes,
        "working_bytes": working,
        "cache_bytes": max(0, room.cache_bytes),
        "missing_bytes": max(0, -room.cache_bytes),
        "num_slabs": room.num_slabs,
        "longest_sequence": room.longest(facts.max_model_len),
        "sequences": {str(length): count for length, count in counts.items()},
        "tokens": {str(length): count * length for length, count in counts.items()},
    }


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
        _line(console, f"weights {facts.dtype}, KV cache {facts.kv_dtype}, up to {facts.max_model_len:,} tokens per sequence\n")
        _print_attention(console, facts)
        _print_cache(console, facts)
        _print_weights(console, facts)
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
        size = f"{_draft_bytes(facts) / GB:.3f} GB of weights"
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
    row("precision", [_NAMES[group.spec.itemsize] for group in groups])
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
    weights = _weights(facts)
    table = _table("Weights", ("part",), ("parameters", "GB"))

    def row(name: str, sizes: Sequence[dict[str, int]]) -> None:
        total = sum(size["bytes"] for size in sizes)
        table.add_row(name, f"{sum(size['parameters'] for size in sizes):,}", f"{total / GB:.3f}")

    for part, size in weights["text"].items():
        row(part, [size])
    row("text decoder", list(weights["text"].values()))
    for part, size in weights["towers"].items():
        row(f"{part} (not loaded when text-only)", [size])
    console.print(table)


def _print_fits(console: Console, facts: Facts) -> None:
    """Print what fits, for text only or all parts, with or without the latent.

    Columns that cannot differ are omitted, with a note.
    """
    has_latent = any(layer.k_eq_v for layer in facts.spec.layers)
    choices = [(text_only, latent) for text_only in (True, False) for latent in (True, False)]
    fits = [_fit(facts, *choice) for choice in choices if (has_latent or choice[1]) and (facts.towers or choice[0])]
    allowed, working = fits[0]["allowed_bytes"] / GB, fits[0]["working_bytes"] / GB
    share = f"{facts.config.cache.gpu_memory_utilization:g} of {facts.gpu.memory_bytes / GB:.1f} GB"
    names = [
        f"{'text only' if fit['text_only'] else 'all parts'},\n{'latent' if fit['latent'] and has_latent else 'K and V'}"
        for fit in fits
    ]
    table = _table(f"What fits into {share}", ("",), names)
    table.add_row("weights GB", *(f"{fit['weight_bytes'] / GB:.2f}" for fit in fits))
    table.add_row("activations GB, about", *(f"{working:.2f}" for _ in fits))
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
    if not facts.towers:
        notes.append("The checkpoint has no vision or audio parts.")
    if not facts.gpu.arch.is_gpu:
        notes.append("On a CPU, the cache takes at most a quarter of the free memory, unless --kv-cache-memory-bytes is set.")
    return notes


if __name__ == "__main__":
    from culet.cli.main import run

    sys.exit(run(["plan", *sys.argv[1:]]))
