"""A small training text with one rule, counting up, which is enough to see that training learns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from culet.testing.tiny import write_checkpoint
from training.models.export import TOKENIZER_FILES

FIRST_WORD = 400
SIZES = {"train": 400, "held_out": 40}


def write_pack(folder: Path) -> Path:
    """Write documents that count up from a random word, both plain ones and chats in which the model continues counting."""
    random = np.random.default_rng(0)
    for split, size in SIZES.items():
        (folder / split).mkdir(parents=True)
        for part in ("plain", "chat"):
            documents, learnt = [], []
            for _ in range(size):
                begin = FIRST_WORD + int(random.integers(4))
                words = list(range(begin, begin + int(random.integers(16, 40))))
                if part == "chat":
                    documents.append([2, 105, *words[:5], 106, 105, *words[5:], 106])
                    learnt.append([0] * 9 + [1] * (len(words) - 4))
                else:
                    documents.append([2, *words, 1])
                    learnt.append([1] * len(documents[-1]))
            np.save(folder / split / f"{part}.npy", np.concatenate(documents).astype(np.uint16))
            np.save(folder / split / f"{part}.ends.npy", np.cumsum([len(document) for document in documents]).astype(np.uint32))
            np.save(folder / split / f"{part}.loss.npy", np.concatenate(learnt).astype(np.uint8))
    weights = {"plain": {"weight_main": 1.0, "weight_last": 0.3}, "chat": {"weight_main": 1.0, "weight_last": 1.0}}
    (folder / "pack.json").write_text(json.dumps({"parts": weights}))
    tiny = write_checkpoint(folder / "tiny")
    (folder / "tokenizer").mkdir()
    for name in TOKENIZER_FILES:
        if (tiny / name).exists():
            (tiny / name).rename(folder / "tokenizer" / name)
    return folder
