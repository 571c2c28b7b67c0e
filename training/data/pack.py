"""All training data as token arrays: `python -m training.data.pack [--tokenizer] [--parts P,Q]` writes out/pack.

    {train,held_out}/<part>.npy       uint16 tokens, documents one after the other
    {train,held_out}/<part>.ends.npy  uint32, where each document ends
    {train,held_out}/<part>.loss.npy  uint8, 1 for what the model writes; conversations only
    pack.json                         counts, shares of the tokens to show, what was dropped, and the sources
    tokenizer/                        the files of the tokenizer

`--tokenizer` trains a new tokenizer on a sample of everything; otherwise out/tokenizer is used.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from culet.testing.tiny import SPECIAL_TOKENS
from training.data import tokenizer as own_tokenizer
from training.data.chats import Chat, Encoder
from training.data.corpus import CORPUS
from training.data.held_out import fault, without_faults
from training.data.mixture import MADE_PARTS, PARTS, Part, texts
from training.data.sources import OUT

PACK = OUT / "pack"
MAX_TOKENS = 2048
_SPECIAL = re.compile("|".join(re.escape(name) for name in SPECIAL_TOKENS.values()))


def is_kept_out(text: str) -> bool:
    """Return whether a document belongs to the held-out split: one in a hundred, by the hash of its text."""
    return hashlib.sha256(text.encode()).digest()[0] * 256 + hashlib.sha256(text.encode()).digest()[1] < 655


def allowed(part: Part, *, seed: int, scale: float, dropped: Counter[str]) -> Iterator[str]:
    """Yield the documents of a part without duplicates and without anything held out for the gate."""
    seen: set[bytes] = set()
    for item, text in texts(part, seed=seed, scale=scale):
        if isinstance(item, str):
            clean = without_faults(item)
            dropped["number pair"] += clean != item.strip()
            text = f"<bos>{clean}<eos>"
        elif isinstance(item, Chat) and (reason := fault(item)):
            dropped[reason] += 1
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
        if digest in seen:
            dropped["repeated"] += 1
            continue
        seen.add(digest)
        yield text


def write_part(folder: Path, name: str, documents: list[tuple[list[int], list[bool] | None]]) -> dict[str, int]:
    """Write the arrays of one part and split. Return their counts."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = [np.asarray(tokens, dtype=np.uint16) for tokens, _ in documents]
    np.save(folder / f"{name}.npy", np.concatenate(ids) if ids else np.zeros(0, np.uint16))
    np.save(folder / f"{name}.ends.npy", np.cumsum([len(tokens) for tokens in ids], dtype=np.uint32))
    counts = {"documents": len(ids), "tokens": sum(map(len, ids))}
    masks = [np.asarray(mask, dtype=np.uint8) for _, mask in documents if mask is not None]
    if masks:
        np.save(folder / f"{name}.loss.npy", np.concatenate(masks))
        counts["written"] = int(sum(mask.sum() for mask in masks))
    return counts


def pack_part(
    part: Part, folder: Path, *, seed: int, scale: float, tokenizer_folder: Path = own_tokenizer.FOLDER
) -> dict[str, Any]:
    """Write a part. Return its entry in pack.json."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    splits: dict[str, list[tuple[list[int], list[bool] | None]]] = {"train": [], "held_out": []}
    dropped: Counter[str] = Counter()
    for text in allowed(part, seed=seed, scale=scale, dropped=dropped):
        if "<|turn>" in text[:20]:
            tokens, mask = encoder.encode(text)
            documents: list[tuple[list[int], list[bool] | None]] = [(tokens, mask)]
        else:
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            documents = [(tokens[start : start + MAX_TOKENS], None) for start in range(0, len(tokens), MAX_TOKENS)]
        if len(documents[0][0]) > MAX_TOKENS:
            dropped["too long"] += 1
            continue
        splits["held_out" if is_kept_out(text) else "train"] += documents
    entry: dict[str, Any] = {"dropped": dict(dropped)}
    for split, documents in splits.items():
        entry[split] = write_part(folder / split, part.name, documents)
    return {**entry, "tokens": entry["train"]["tokens"], "documents": entry["train"]["documents"]}


def learn_tokenizer(seed: int) -> None:
    """Train the tokenizer on a tenth of the chats and dictionaries and a part of the prose."""

    def sample() -> Iterator[str]:
        for part in PARTS:
            scale = {"prose": 0.35, "dictionary": 0.3, "chitchat": 0.6, "distilled": 1.0}.get(part.name, 0.1)
            for _, text in texts(part, seed=seed, scale=scale):
                yield from (piece for piece in _SPECIAL.split(text) if piece)

    own_tokenizer.write(own_tokenizer.build(sample()), own_tokenizer.FOLDER)


def _pack_by_name(name: str, *, folder: Path, seed: int, scale: float) -> tuple[str, dict[str, Any]]:
    """Pack a part by its name in a worker process, because the functions of a Part cannot be pickled."""
    (part,) = [part for part in PARTS if part.name == name]
    entry = pack_part(part, folder, seed=seed, scale=scale)
    counts = f"{entry['documents']} documents, {entry['tokens'] / 1e6:.2f} M tokens"
    print(f"{name}: {counts}, dropped {entry['dropped']}", flush=True)
    return name, entry


def _pack_made(name: str, *, folder: Path, seed: int, scale: float, tokenizer_folder: Path) -> tuple[str, dict[str, Any]]:
    (part,) = [part for part in MADE_PARTS if part.name == name]
    return name, pack_part(part, folder, seed=seed, scale=scale, tokenizer_folder=tokenizer_folder)


def write_made(folder: Path, tokenizer_folder: Path, *, scale: float, jobs: int, seed: int = 0) -> None:
    """Write a pack of the parts that code makes, which needs no downloads, with the tokenizer of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    pack = functools.partial(_pack_made, folder=folder, seed=seed, scale=scale, tokenizer_folder=tokenizer_folder)
    with multiprocessing.Pool(jobs) as pool:
        entries = dict(pool.imap_unordered(pack, [part.name for part in MADE_PARTS], chunksize=1))
    set_weights(MADE_PARTS, entries, scale)
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer_folder / name, folder / "tokenizer" / name)
    (folder / "pack.json").write_text(json.dumps({"parts": entries}, indent=2) + "\n")


def set_weights(parts: Sequence[Part], entries: dict[str, dict[str, Any]], scale: float) -> None:
    """Add to each entry of pack.json its share of the tokens of each phase."""
    for phase, boosts in (("main", [part.boost_main for part in parts]), ("last", [part.boost_last for part in parts])):
        sizes = [entries[part.name]["tokens"] / (scale if part.is_made else 1) for part in parts]
        shown = [boost * size for boost, size in zip(boosts, sizes, strict=True)]
        for part, amount in zip(parts, shown, strict=True):
            entries[part.name][f"weight_{phase}"] = round(amount / sum(shown), 5)


def main() -> None:
    """Write out/pack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", action="store_true", help="train a new tokenizer")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the amount of generated data")
    parser.add_argument("--out", type=Path, default=PACK)
    parser.add_argument("--parts", help="write only these parts (comma-separated) into an existing pack")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tokenizer:
        learn_tokenizer(options.seed)
    folder = options.out
    folder.mkdir(parents=True, exist_ok=True)
    pack = functools.partial(_pack_by_name, folder=folder, seed=options.seed, scale=options.scale)
    wanted = options.parts.split(",") if options.parts else [part.name for part in PARTS]
    packed = json.loads((folder / "pack.json").read_text())["parts"] if options.parts else {}
    with multiprocessing.Pool(options.jobs) as pool:
        packed.update(pool.imap_unordered(pack, wanted, chunksize=1))
    entries = {part.name: packed[part.name] for part in PARTS}
    set_weights(PARTS, entries, options.scale)
    shutil.copytree(own_tokenizer.FOLDER, folder / "tokenizer", dirs_exist_ok=True)
    sources = json.loads((CORPUS / "manifest.json").read_text())
    (folder / "pack.json").write_text(json.dumps({"parts": entries, "sources": sources}, indent=2) + "\n")
    total = sum(entry["tokens"] for entry in entries.values())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {total / 1e6:.1f} M tokens, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
