"""Find the built-in model and its drafters in the package. No torch.

`built-in` is the model, `built-in:assistant` is its MTP assistant, and `built-in:dflash` is its DFlash drafter. They are
ordinary checkpoints that `training/` writes.
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
    """Return whether `model` names a part of the package. Write ./built-in for a folder of the same name."""
    return model.partition(":")[0] == BUILT_IN


def embedded_folder(model: str) -> Path:
    """Return the folder of the built-in model or of one of its drafters."""
    folder = FOLDER / lookup("model", model, NAMES)
    if not (folder / "config.json").is_file():
        hint = "pass a checkpoint, such as --model google/gemma-4-E2B-it, or train the built-in model (see training/README.md)"
        raise CheckpointError(f"{model}: this installation does not include the weights of the built-in model", hint=hint)
    return folder


def introduce() -> None:
    """Tell the user that the built-in model is running, and how to choose a real one."""
    logger.info(
        "model: using the built-in model, which is small and knows little; choose a real one with --model google/gemma-4-E2B-it"
    )
