"""Store a little held-out text in the repository, so that the gate runs without the training text.

python -m training.held_out --pack out/pack
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from training.learning.batches import load_parts

KEPT = Path(__file__).parent / "questions" / "held_out.npz"


def keep(pack: Path, path: Path, num_tokens: int) -> None:
    """Write whole documents of each held-out part in order, up to `num_tokens` per part."""
    arrays = {}
    for name, part in load_parts(pack / "held_out").items():
        short = [(begin, end) for begin, end in zip(part.starts, part.ends, strict=True) if end - begin <= num_tokens // 4]
        kept, size = [], 0
        for begin, end in short:
            if size + end - begin <= num_tokens:
                kept.append((begin, end))
                size += end - begin
        learnt = np.ones(len(part.tokens), bool) if part.learnt is None else part.learnt
        for kind, values in (("tokens", part.tokens), ("learnt", learnt)):
            arrays[f"{name}.{kind}"] = np.concatenate([values[begin:end] for begin, end in kept])
        arrays[f"{name}.ends"] = np.cumsum([end - begin for begin, end in kept])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.held_out", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pack", type=Path, required=True, help="folder of the training text")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens per part at most (default: 8000)")
    given = parser.parse_args()
    keep(given.pack, KEPT, given.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
