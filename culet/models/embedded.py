"""The model that comes with Culet, and its drafters: where they are in the package. No torch.

`built-in` is the model, `built-in:assistant` its MTP assistant and `built-in:dflash` its DFlash drafter. They are ordinary
checkpoints; `training/` makes them.
"""

from __future__ import annotations

from pathlib import Path

from culet.config import BUILT_IN
from culet.errors import CheckpointError
from culet.log import logger
from culet.registry import lookup

FOLDER = Path(__file__).parent.parent / "embedded"
NAMES = {BUILT_IN: "target", f"{BUILT_IN}:assistant": "assistant", f"{BUILT_IN}:dflash": "dflash"}


def is_embedded(model: str) -> bool:
    """Does `model` name a part of the package; a folder of the same name is written ./built-in."""
    return model.partition(":")[0] == BUILT_IN


def embedded_folder(model: str) -> Path:
    """The folder of the built-in model or of one of its drafters."""
    folder = FOLDER / lookup("model", model, NAMES)
    if not (folder / "config.json").is_file():
        hint = "name a checkpoint, as in --model google/gemma-4-E2B-it, or train the built-in one: training/README.md"
        raise CheckpointError(f"{model}: this installation came without the built-in model's weights", hint=hint)
    return folder


def introduce() -> None:
    """Say that the built-in model runs, and how to name a real one."""
    logger.info(
        "model: Culet's built-in one, which is small and knows little; name a real one as --model google/gemma-4-E2B-it"
    )
