"""Sharpen a written target: multiply its logits by a factor, and log it.

    python -m training.sharpen --work out/training --to 1.8

Greedy answers do not change (up to ties). Draws at temperature 1 become more coherent, and more of their drafts are accepted.
The factor is applied to the gains of the final norm.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from training.learning.loop import Log

FINAL_NORM = "model.norm.weight"


def sharpness_of(work: Path) -> float:
    """Return the target's sharpness according to the last entry in the log."""
    entries = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    return float([entry["sharpness"] for entry in entries if "sharpness" in entry][-1])


def sharpen(work: Path, sharpness: float) -> None:
    """Scale the written target from its current sharpness to `sharpness`."""
    path = work / "embedded" / "target" / "model.safetensors"
    before = sharpness_of(work)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    gains = tensors[FINAL_NORM]
    tensors[FINAL_NORM] = (gains.float() * (sharpness / before)).to(gains.dtype)
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)
    Log(work / "log.jsonl").write(stage="target", event="sharpened", before=before, sharpness=sharpness)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.sharpen", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of a run")
    parser.add_argument("--to", type=float, required=True, help="factor on the trained logits")
    given = parser.parse_args()
    sharpen(given.work, given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
