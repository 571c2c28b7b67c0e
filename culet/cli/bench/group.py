"""`culet bench`: measure the engine and its kernels, and compare them with the hardware's limit and a peer's results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from culet import env
from culet.cli.bench.draft import bench_draft
from culet.cli.bench.serve import bench_serve
from culet.cli.options import config_options, given
from culet.config import config_fields
from culet.errors import ConfigError, InternalError
from culet.version import __version__

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from culet.bench.attention_cases import AttentionShape
    from culet.bench.kernels import KernelCase, KernelLine
    from culet.bench.offline import Measured
    from culet.bench.workloads import Workload
    from culet.config import Config
    from culet.hardware import Peaks


@click.group()
def bench() -> None:
    """Measure the speed of Culet, or of any OpenAI-compatible server.

    \b
    Examples:
      culet bench offline google/gemma-4-E4B-it
      culet bench offline --random 31B --rows tpot,ttft --json 31B.json --plot 31B.svg
      culet bench serve --num-prompts 500 --max-concurrency 64
      culet bench kernels --shape 31B.global
    """


bench.add_command(bench_serve)
bench.add_command(bench_draft)


def peak_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add options for the GPU's peak rates, for GPUs that Culet does not know."""
    for option in (
        click.option("--tflops", type=click.FLOAT, help="Peak bf16 TFLOP/s of this GPU, to compute the floor."),
        click.option("--bandwidth", type=click.FLOAT, help="Peak memory bandwidth of this GPU in TB/s, to compute the floor."),
    ):
        command = option(command)
    return command


@bench.command()
@click.argument("source", metavar="[MODEL]", required=False)
@click.option(
    "--random", "variant", metavar="NAME", help="Use random weights with the dimensions of E2B, E4B, 12B, 26B-A4B or 31B."
)
@click.option(
    "--num-layers", type=click.IntRange(min=1), help="With --random: number of layers, if fewer than the variant has."
)
@click.option(
    "--draw",
    type=click.Choice(["normal", "narrow", "uniform"]),
    default="normal",
    help="Distribution of random weights: N(0, 0.02), uniform within 1e-3, or uniform for norms and scalars too.",
)
@click.option(
    "--rows", default=None, help="What to measure, as in tpot,ttft,chat,summarise,start or tpot:8x1000+256,ttft:1x8000."
)
@click.option(
    "--best-of",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of runs for rows with a single sequence; the best run is reported.",
)
@click.option(
    "--check/--no-check",
    default=True,
    help="Check the tokens of a smaller twin of the model against an eager model. [default: on]",
)
@click.option(
    "--check-layers",
    type=click.IntRange(min=1),
    help="Number of layers of the twin. [default: the fewest that keep the model's page sizes]",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the results to FILE as JSON, after each row.")
@click.option(
    "--plot", "plot_file", metavar="FILE", help="Plot the results against the floor and write the plot to FILE as SVG."
)
@peak_options
@config_options
def offline(
    source: str | None,
    variant: str | None,
    num_layers: int | None,
    draw: str,
    json_file: str | None,
    plot_file: str | None,
    **options: Any,
) -> None:
    """Time requests through LLM.generate: time per token, time to the first token, and throughput.

    \b
    Rows:
      tpot        ms per output token: 1, 8 and 32 sequences of 1000 + 256 tokens, and 1 of 32000 + 256
      ttft        ms to the first token after prompts of 1000, 8000 and 32000 tokens
      chat        output tokens per second of 80 concurrent requests of 1000 + 1000 tokens
      summarise   the same with 8000 + 1000 tokens
      image:...   ms of the vision tower per image; also ms to the first token, and requests per second
      start       seconds from loading to the first accepted request, with and without compiled kernels

    \b
    Examples:
      culet bench offline google/gemma-4-E4B-it --rows tpot,ttft
      culet bench offline --random 31B --json 31B.json --plot 31B.svg
      culet bench offline --random 26B-A4B --rows tpot:4x2000+128,throughput:64x500+500
      culet bench offline --random 31B --rows image:8x1@280+64,image:4x16@280+64
    """
    from culet.bench.settings import bench_config
    from culet.bench.workloads import DEFAULT_ROWS, parse_rows

    rows = parse_rows(DEFAULT_ROWS if options["rows"] is None else options["rows"])
    files = _Files(json_file, plot_file)
    chosen = given(options, config_fields())
    chosen["model"] = _model_name(source or chosen.get("model"), variant, num_layers, draw)
    config = bench_config(chosen, rows)
    _Offline(config, rows, files, options).run()


def _model_name(model: str | None, variant: str | None, num_layers: int | None, draw: str) -> str:
    """Return the name of a checkpoint, or `random:...`."""
    from culet.models.random_checkpoint import PREFIX, random_name

    if (model is None) == (variant is None):
        problem = "no model was given" if model is None else f"got both the model {model} and --random {variant}"
        raise ConfigError(problem, hint="pass a checkpoint, or --random with one of E2B, E4B, 12B, 26B-A4B, 31B")
    if variant is None:
        assert model is not None
        if num_layers is not None and not model.startswith(PREFIX):
            raise ConfigError("num-layers: only random weights can have fewer layers", hint="use it with --random NAME")
        return model
    return random_name(variant, num_layers=num_layers, draw=draw)


class _Files:
    """The files that results are written to. Raises on bad paths before anything is measured."""

    def __init__(self, json_file: str | None, plot_file: str | None) -> None:
        self.json = Path(json_file) if json_file else None
        self.plot = Path(plot_file) if plot_file else None
        for path in (self.json, self.plot):
            if path is not None and path.is_dir():
                raise ConfigError(f"cannot write {path}: it is a folder", hint="pass the name of a file")
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"cannot write {path}: its folder does not exist", hint="pass a file in an existing folder")

    def write_json(self, document: dict[str, Any]) -> None:
        if self.json is not None:
            _write(self.json, json.dumps(document, indent=1) + "\n")

    def write_plot(self, picture: str) -> None:
        if self.plot is not None:
            _write(self.plot, picture)
            click.echo(f"wrote {self.plot}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="pass a file in a writable folder") from error


class _Offline:
    """One run of `bench offline`. Files are updated after every row."""

    def __init__(self, config: Config, rows: list[Workload], files: _Files, options: dict[str, Any]) -> None:
        from culet.bench.report import Line, Setting
        from culet.bench.settings import all_settings
        from culet.engine.resolve import resolve_device, resolve_dtype
        from culet.models.checkpoint import open_checkpoint
        from culet.models.towers.spec import read_towers

        self.config, self.rows, self.files, self.options = config, rows, files, options
        device = resolve_device(config.model.device)
        name = device_name(device)
        peaks = _peaks(name, options)
        if files.plot is not None and peaks is None:
            raise ConfigError(f"plot: no floor is known for {name}", hint="pass --bandwidth and --tflops")
        checkpoint = open_checkpoint(config.model.model, config.model.revision)
        self.setting = Setting(
            model=config.model.model,
            spec=checkpoint.spec,
            vision=read_towers(checkpoint.config).vision,
            device=name,
            peaks=peaks,
            dtype=str(resolve_dtype(config.model.dtype, device)).removeprefix("torch."),
            latent=config.cache.latent,
            settings=all_settings(config),
            versions=versions(),
        )
        self.lines: list[Line] = []

    def run(self) -> None:
        from culet.bench import report
        from culet.bench.offline import run_rows

        options = self.options
        layers = options["check_layers"]
        run_rows(
            self.config, self.rows, best_of=options["best_of"], check=options["check"], check_layers=layers, report=self._note
        )
        print_table(report.table(self.lines, self.setting), report.remarks(self.lines))
        wrong = [line.row.label for line in self.lines if line.right is False]
        if wrong:
            raise InternalError(f"wrong tokens in {', '.join(wrong)}, so their times do not count")

    def _note(self, measured: Measured) -> None:
        from culet.bench import report

        self.lines.append(report.line_of(measured, self.setting))
        self.files.write_json(report.document(self.lines, self.setting))
        if len(self.lines) == len(self.rows):
            self.files.write_plot(report.draw(self.lines, f"{self.setting.model} on {self.setting.device}"))


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _peaks(name: str, options: dict[str, Any]) -> Peaks | None:
    from culet.hardware import Peaks, find_peaks

    bandwidth, tflops = options["bandwidth"], options["tflops"]
    if bandwidth is None and tflops is None:
        return find_peaks(name)
    if not (bandwidth and tflops and bandwidth > 0 and tflops > 0):
        raise ConfigError(
            "bandwidth and tflops: expected both flags, with positive numbers", hint="example: --bandwidth 3.35 --tflops 700"
        )
    return Peaks(bandwidth * 1e12, tflops * 1e12)


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"culet": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = "none"
    return found


def print_table(table: Table, remarks: list[str]) -> None:
    """Print a table to stdout, in colour if it is a terminal and NO_COLOR is not set."""
    from rich.console import Console

    is_plain = not sys.stdout.isatty() or env.NO_COLOR.get() != ""
    console = Console(highlight=False, color_system=None if is_plain else "auto", width=None if sys.stdout.isatty() else 160)
    with console.capture() as captured:
        console.print(table)
        for remark in remarks:
            console.print(remark, markup=False, soft_wrap=True)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()), color=False if is_plain else None)


@bench.command()
@click.option("--shape", "shapes", multiple=True, help="Layers of a variant, as in 31B.global or E4B.sliding. May be repeated.")
@click.option(
    "--case",
    "cases",
    multiple=True,
    help="Case to time, as in 'decode 32@8000', 'verify 32x4@8000' or 'prefill 4x1000'. May be repeated.",
)
@click.option("--heads", type=click.INT, help="Number of query heads in a custom shape.")
@click.option("--kv-heads", type=click.INT, help="Number of KV heads in a custom shape.")
@click.option("--head-dim", type=click.INT, help="Head dimension of a custom shape.")
@click.option("--window", type=click.INT, help="Sliding window of a custom shape. [default: none]")
@click.option("--latent", is_flag=True, help="Store K and V once, in rows that are 5/4 of a head wide.")
@click.option(
    "--page-tokens", type=click.INT, help="Number of tokens per page. [default: the shape's, or 64 for a custom shape]"
)
@click.option("--rows", type=click.INT, help="Number of sequences in a custom case.")
@click.option(
    "--queries", type=click.INT, default=1, show_default=True, help="Number of query tokens per sequence in a custom case."
)
@click.option(
    "--keys", type=click.INT, default=0, show_default=True, help="Number of keys before the queries in a custom case."
)
@click.option("--ragged", is_flag=True, help="Give each sequence a random number of keys, up to --keys.")
@click.option("--backend", default="auto", show_default=True, help="Attention backend. With auto, Culet chooses.")
@click.option("--device", default="auto", show_default=True, help="Device to run on: auto, cpu, cuda or cuda:N.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=25, show_default=True, help="Number of replays; the median is reported."
)
@click.option("--check/--no-check", default=True, help="Check the results against float32. [default: on]")
@click.option("--json", "json_file", metavar="FILE", help="Write the results to FILE as JSON.")
@peak_options
def kernels(shapes: tuple[str, ...], cases: tuple[str, ...], json_file: str | None, **options: Any) -> None:
    """Time attention kernels, in the cases that were measured with another engine or with any shape.

    \b
    Examples:
      culet bench kernels
      culet bench kernels --shape 31B.global --case "decode 32@8000" --case "verify 32x4@8000"
      culet bench kernels --heads 16 --kv-heads 1 --head-dim 512 --latent --rows 64 --keys 20000 --ragged
    """
    from culet.bench.kernels import kernel_document, time_case
    from culet.engine.resolve import resolve_device

    files = _Files(json_file, None)
    device = resolve_device(options["device"])
    name = device_name(device)
    peaks = _peaks(name, options)
    lines: list[KernelLine] = []
    for shape_name, shape, case in _kernel_cases(shapes, cases, options):
        repeats, check = options["repeats"], options["check"]
        line = time_case(
            shape_name, shape, case, device=device, backend=options["backend"], repeats=repeats, check=check, peaks=peaks
        )
        lines.append(line)
        click.echo(f"{line.shape} {line.case}: {line.microseconds:.1f} us ({line.backend})", err=True)
        files.write_json(kernel_document(lines, name, versions()))
    print_table(kernel_table(lines, name), [])
    wrong = [f"{line.shape} {line.case}" for line in lines if line.is_right is False]
    if wrong:
        raise InternalError(f"wrong results in {', '.join(wrong)}, so their times do not count")


def _kernel_cases(
    shapes: tuple[str, ...], cases: tuple[str, ...], options: dict[str, Any]
) -> list[tuple[str, AttentionShape, KernelCase]]:
    """Return every given shape with every given case. By default, return the cases with a peer's results."""
    from culet.bench import kernels as kernels_module
    from culet.bench.peer import FA4, KERNEL_CASES

    custom_shape = _custom_shape(options)
    if custom_shape is not None and shapes:
        raise ConfigError("shape: got both a named shape and a custom one", hint="pass one or the other")
    page_tokens = options["page_tokens"]
    named = [(name, kernels_module.find_shape(name)) for name in shapes or (() if custom_shape else tuple(FA4))]
    if page_tokens is not None:
        from dataclasses import replace

        named = [(name, kernels_module.check_shape(replace(shape, page_tokens=page_tokens))) for name, shape in named]
    if custom_shape is not None:
        named = [("custom", custom_shape)]
    chosen = [kernels_module.parse_case(case) for case in cases]
    if options["rows"] is not None:
        chosen.append(
            kernels_module.make_kernel_case(options["rows"], options["queries"], options["keys"], ragged=options["ragged"])
        )
    elif options["ragged"] or options["keys"] or options["queries"] != 1:
        raise ConfigError(
            "rows: no value was given", hint="a custom case needs --rows; --queries, --keys and --ragged are optional"
        )
    chosen = chosen or [kernels_module.parse_case(case) for case in KERNEL_CASES]
    return [(name, shape, case) for name, shape in named for case in chosen]


def _custom_shape(options: dict[str, Any]) -> AttentionShape | None:
    """Return the custom shape from --heads, --kv-heads and --head-dim, or None if none of them is set."""
    numbers = {name: options[name] for name in ("heads", "kv_heads", "head_dim")}
    if all(value is None for value in numbers.values()):
        if options["window"] is not None or options["latent"]:
            raise ConfigError("heads: no value was given", hint="a custom shape needs --heads, --kv-heads and --head-dim")
        return None
    missing = [name for name, value in numbers.items() if value is None]
    if missing:
        hint = "a custom shape needs --heads, --kv-heads and --head-dim"
        raise ConfigError(f"{missing[0].replace('_', '-')}: no value was given", hint=hint)
    from culet.bench.attention_cases import AttentionShape
    from culet.bench.kernels import check_shape

    page_tokens = 64 if options["page_tokens"] is None else options["page_tokens"]
    return check_shape(
        AttentionShape(
            num_heads=numbers["heads"],
            num_kv_heads=numbers["kv_heads"],
            head_dim=numbers["head_dim"],
            window=options["window"],
            latent=options["latent"],
            page_tokens=page_tokens,
        )
    )


def kernel_table(lines: list[KernelLine], device: str) -> Table:
    """Make a table with one line per case."""
    from culet.bench.report import number, percent, plain_table

    with_peer, with_floor = (any(getattr(line, name) for line in lines) for name in ("fa4_us", "floor_us"))
    columns = ["us", "TB/s", "TFLOP/s"]
    columns += ["floor us", "of it"] if with_floor else []
    columns += ["FA4 us", "x", "Triton us", "x"] if with_peer else []
    table = plain_table(f"Attention on {device}", ("shape", "case", "backend"), [*columns, "error"])
    for line in lines:
        us = line.microseconds
        cells = [number(us), f"{line.num_bytes / us / 1e6:.2f}", f"{line.flops / us / 1e6:.0f}"]
        if with_floor:
            cells += [number(line.floor_us), percent(line.floor_us / us if line.floor_us else None)]
        if with_peer:
            for peer in (line.fa4_us, line.triton_us):
                cells += [number(peer), f"{peer / us:.2f}" if peer else "-"]
        table.add_row(line.shape, line.case, line.backend, *cells, "-" if line.error is None else f"{line.error:.1e}")
    return table
