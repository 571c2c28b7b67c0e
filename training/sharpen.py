"""Sharpen a target that is written already: its logits times a factor, and a line about it in the log.

    python -m training.sharpen --work out/training --to 1.8

Greedy answers stay what they were (up to ties); what is drawn at temperature 1 holds together better, and drafts of it are
accepted more often. The factor goes on the gains of the final norm.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from training.loop import Log

FINAL_NORM = "model.norm.weight"


def sharpness_of(work: Path) -> float:
    """What the log says of the target as it is: the last word counts."""
    entries = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    return float([entry["sharpness"] for entry in entries if "sharpness" in entry][-1])


def sharpen(work: Path, sharpness: float) -> None:
    """Scale the written target from the sharpness it has to `sharpness`."""
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
    parser.add_argument("--to", type=float, required=True, help="factor on the logits as they were trained")
    given = parser.parse_args()
    sharpen(given.work, given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
