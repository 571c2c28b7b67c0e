"""`culet quantize`: write a quantised copy of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from culet.layers.weight.quantised.scheme import ROUNDINGS


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path())
@click.option("--format", "precision", type=click.Choice(tuple(ROUNDINGS)), required=True, help="Precision of the matrices.")
@click.option("--revision", help="Branch, tag or commit of a model on the Hub.")
@click.option("--device", default="auto", show_default=True, help="Device that rounds the weights: auto, cpu, cuda or cuda:N.")
def quantize(model: str, out: str, precision: str, revision: str | None, device: str) -> None:
    """Write a copy of MODEL in fp8 or int4 to the new folder OUT.

    \b
    Examples:
      culet quantize google/gemma-4-31B-it ./31B-fp8 --format fp8
      culet quantize ./my-gemma ./my-gemma-int4 --format int4
      culet quantize built-in ./small-int4 --format int4

    The copy is in the compressed-tensors format, which vLLM and transformers also read. The experts of the 26B-A4B are written
    one by one. Before transformers reads them, a program must register how to join them, as docs/guides/quantised-weights.md
    shows. Otherwise transformers starts with random experts and reports no error.

    Only matrices are quantised. They are rounded to nearest: fp8 with a scale per row, int4 with a scale per 32 values.
    Google's int4 files, from quantisation-aware training, are better.
    """
    from culet.engine.resolve import resolve_device
    from culet.models.checkpoint import open_checkpoint
    from culet.models.quantised.write import write_quantised

    checkpoint = open_checkpoint(model, revision)
    size = write_quantised(checkpoint, Path(out).expanduser(), precision, resolve_device(device))
    click.echo(f"{size / 1e9:.2f} GB of weights written to {out}")
