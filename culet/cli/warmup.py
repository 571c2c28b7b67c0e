"""`culet warmup`: compile a model's kernels ahead of time."""

from __future__ import annotations

from typing import Any

import click

from culet.cli.options import config_of, config_options
from culet.errors import UnsupportedError


@click.command()
@click.argument("source", metavar="[MODEL]", required=False)
@config_options
def warmup(source: str | None, **options: Any) -> None:
    """Compile all kernels of a model for this GPU, and store them.

    They are stored under CULET_CACHE_DIR. Kernels depend on the model's shape, --max-num-seqs and --max-num-batched-tokens:
    use the values that you will serve with.

    \b
    Examples:
      culet warmup google/gemma-4-31B-it
      culet warmup random:26B-A4B
      culet warmup ./my-gemma --max-num-seqs 64
    """
    config = config_of(options | ({"model": source} if source is not None else {}))

    import torch

    from culet.engine.engine import Engine
    from culet.kernels.compiling import cache_folder

    if config.model.device == "cpu" or not torch.cuda.is_available():
        raise UnsupportedError(
            "warmup: this command needs a GPU, because a CPU has no kernels to compile",
            hint="run `culet doctor` to list the devices",
        )
    engine = Engine(config)
    seconds = engine.start_times.parts.get("kernels")  # None with ranks, which do not report it
    if engine.kernels_compiled:
        duration = "" if seconds is None else f" in {seconds:.1f} s"
        click.echo(f"{engine.kernels_compiled} kernels compiled{duration} and stored in {cache_folder()}")
    else:
        click.echo(f"nothing to compile: all kernels are already in {cache_folder()}")
