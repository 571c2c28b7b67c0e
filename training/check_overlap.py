"""Check that the quality gate's phrasings, number pairs and tool names are not in the packed training data.

    python -m training.check_overlap [out/pack]     exit code 1 if there is an overlap

It decodes and searches every document of the training split. It also draws training scenes, and looks in them for the scenes
of the gate's pictures and for combinations of shape, word, number and colour that are held out.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.data.held_out import EVERYDAY, TEST_TOOL, counts_held_out, gate_turns, normalised
from training.data.kinds.arithmetic import mentions_held_out
from training.data.pictures.chats import gate_picture
from training.data.pictures.scenes import draw_scene, held_out_in, scene_content
from training.picture_gate import read_questions

NUM_SCENES = 200_000
_USER = re.compile(r"<\|turn>user\n(.*?)<turn\|>", re.DOTALL)


def documents(folder: Path, part: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the texts of a part of the training split."""
    tokens = np.load(folder / "train" / f"{part}.npy", mmap_mode="r")
    ends = np.load(folder / "train" / f"{part}.ends.npy").tolist()
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        yield tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False)


def faults(text: str) -> Iterator[str]:
    """Yield what a document contains that it must not."""
    turns = _USER.findall(text)
    for turn in turns:
        if normalised(turn) in gate_turns() - EVERYDAY:
            yield "phrasing"
        if counts_held_out(turn):
            yield "number pair in a story"
    if any(mentions_held_out(line) for line in text.split("\n")):
        yield "number pair"
    if TEST_TOOL.search(text):
        yield "tool name"


def picture_faults(num_scenes: int, seed: str = "overlap") -> Counter[str]:
    """Count what is wrong in training scenes: held-out combinations, and scenes of the gate."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    gate = {scene_content(gate_picture(line["seed"])[0]) for line in read_questions()}
    for _ in range(num_scenes):
        scene = draw_scene(rng)
        found["held-out combination"] += any(True for _ in held_out_in(scene))
        found["scene of the gate"] += scene_content(scene) in gate
    return +found


def main() -> None:
    """Check every part, print a table, and fail if there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m training.check_overlap", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack", nargs="?", type=Path, default=Path("out/pack"), help="a folder of training.data.pack")
    folder = parser.parse_args().pack
    if not (folder / "pack.json").exists():
        parser.error(f"{folder} has no pack; create it with python -m training.data.pack")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    total: Counter[str] = Counter()
    parts = sorted(path.name.removesuffix(".ends.npy") for path in (folder / "train").glob("*.ends.npy"))
    for part in parts:
        overlaps: Counter[str] = Counter()
        count = 0
        for text in documents(folder, part, tokenizer):
            count += 1
            for fault in faults(text):
                overlaps[fault] += 1
                if overlaps[fault] <= 3:
                    print(f"{part}: {fault}: {text[:400]!r}")
        print(f"{part}: {count} documents, {dict(overlaps) or 'no overlap'}")
        total += overlaps
    in_pictures = picture_faults(NUM_SCENES)
    print(f"pictures: {NUM_SCENES} scenes, {dict(in_pictures) or 'no overlap'}")
    total += in_pictures
    print(f"{len(gate_turns())} turns of the gate compared; {sum(total.values())} faults")
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
