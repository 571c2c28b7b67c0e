"""Write a DFlash drafter with random weights for any target. It has everything that a real one has, except good guesses.

    python -m culet.testing.random_dflash FOLDER --target random:31B

The folder gets model.safetensors, and config.json in the published form with the published proportions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from culet.drafters.dflash.spec import make_config, read_dflash
from culet.errors import CheckpointError, CuletError, exit_code
from culet.models.checkpoint import open_checkpoint
from culet.models.folder import read_config
from culet.models.random_checkpoint import PREFIX
from culet.models.spec import ModelSpec, read_spec

# Small enough for tests, with windows shorter than prompts and heads that differ from the target's.
TINY: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "block_size": 8,
}


def write_dflash(
    folder: str | Path,
    target: ModelSpec,
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Write a drafter for `target` to `folder`. `overrides` replaces keys in its config.json. `TINY` makes it small."""
    from safetensors.torch import save_file

    folder = Path(folder)
    config = make_config(target, **dict(overrides or {})) | {"dtype": str(dtype).removeprefix("torch.")}
    spec = read_dflash(config, target)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in spec.tensor_shapes():
        if len(shape) == 1:
            tensors[name] = (torch.rand(shape, generator=generator) + 0.5).to(dtype)
        else:
            tensors[name] = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)  # preserves magnitudes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except OSError as error:
        problem = error.strerror or str(error)
        raise CheckpointError(f"{folder}: cannot be written: {problem}", hint="pass a writable folder") from error
    return folder


def _target_spec(model: str) -> ModelSpec:
    return open_checkpoint(model).spec if model.startswith(PREFIX) else read_spec(read_config(model))


def main() -> int:
    """Write a checkpoint. Print the folder to stdout and everything else to stderr."""
    parser = argparse.ArgumentParser(prog="python -m culet.testing.random_dflash", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", help="folder to write to; created if it does not exist")
    parser.add_argument("--target", required=True, help="model to draft for: a folder, a name on the Hub, or random:31B")
    parser.add_argument("--tiny", action="store_true", help="use a few narrow layers instead of the published proportions")
    parser.add_argument("--seed", type=int, default=0, help="seed for the random weights (default: 0)")
    arguments = parser.parse_args()
    try:
        overrides = TINY if arguments.tiny else {}
        folder = write_dflash(arguments.folder, _target_spec(arguments.target), overrides=overrides, seed=arguments.seed)
    except CuletError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    print("wrote a random DFlash drafter; it drafts noise", file=sys.stderr)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
