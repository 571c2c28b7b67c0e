"""A small tokenizer like Gemma's: BPE with a mark for spaces, byte fallback, single digits.

python -m training.data.tokenizer [FILE.jsonl ...]      writes out/tokenizer from the corpus and from rendered chats

The special tokens have Gemma 4's own ids. Byte tokens are ordinary, because decoding would drop them as special tokens.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from culet.testing.tiny import SPACE_MARK as MARK
from culet.testing.tiny import SPECIAL_TOKENS, make_tokenizer, tokenizer_config
from culet.text.template import BUILT_IN
from training.data.sources import OUT

VOCAB_SIZE = 8192
NUM_RESERVED = max(token_id for token_id in SPECIAL_TOKENS if token_id < 200) + 1
FOLDER = OUT / "tokenizer"
# Words with the space before them, contractions, single digits and single marks. No merge crosses these borders, so numbers and
# JSON are always written with the same tokens.
CUTS = rf"'(?:s|t|re|ve|m|ll|d)(?!\p{{L}})|{MARK}?\p{{L}}+|\p{{N}}|{MARK}?[^\p{{L}}\p{{N}}{MARK}\n]|\n+|{MARK}+"


def build(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Build a tokenizer with exactly `vocab_size` tokens, trained on `texts`, which must not contain special tokens."""
    normalizer = normalizers.Replace(" ", MARK)
    cuts = pre_tokenizers.Split(Regex(CUTS), "isolated")
    learner = Tokenizer(models.BPE())
    learner.normalizer, learner.pre_tokenizer = normalizer, cuts
    num_special = NUM_RESERVED + 256
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_special, show_progress=False, limit_alphabet=160, min_frequency=2, initial_alphabet=["\n"]
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]

    pieces = [SPECIAL_TOKENS.get(token_id, f"<unused{token_id}>") for token_id in range(NUM_RESERVED)]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    # Add media tokens, which this model never sees, then padding if the text was too small for the vocabulary.
    media = [name for name in SPECIAL_TOKENS.values() if name not in pieces]
    pieces = pieces[: vocab_size - len(media)] + media
    pieces += [f"<unused{index}>" for index in range(len(pieces), vocab_size)]
    vocab = set(pieces)
    merges = [tuple(merge) for merge in learnt["merges"]]
    merges = [merge for merge in merges if "".join(merge) in vocab and merge[0] in vocab and merge[1] in vocab]
    tokenizer = make_tokenizer(pieces, merges)
    tokenizer.pre_tokenizer = cuts
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint files that belong to the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {**tokenizer_config(2048), "mask_token": "<mask>", "clean_up_tokenization_spaces": False},
    )
    ends = [tokenizer.token_to_id(name) for name in ("<eos>", "<turn|>", "<|tool_response>")]
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": tokenizer.token_to_id("<bos>"),
            "eos_token_id": ends,
            "pad_token_id": tokenizer.token_to_id("<pad>"),
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 40,
            "top_p": 0.9,
        },
    )
    shutil.copy(BUILT_IN, folder / "chat_template.jinja")


def training_texts(extra: list[Path]) -> Iterator[str]:
    """Return a shuffled sample of the corpus and all of `extra` (lines with "text" or "turns")."""
    limits = {"python-doc": 400, "postgresql-doc": 200, "kjv": 40, "moby-dick": 150, "wordnet": 2000}
    texts = []
    for path in [*sorted((OUT / "corpus").glob("*.jsonl")), *extra]:
        documents = [json.loads(line) for line in path.read_text().splitlines()]
        random.Random(path.name).shuffle(documents)
        for document in documents[: limits.get(path.stem)]:
            texts.append(document["text"] if "text" in document else "\n".join(document["turns"]))
    random.Random(0).shuffle(texts)
    return iter(texts)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Write out/tokenizer."""
    tokenizer = build(training_texts([Path(name) for name in sys.argv[1:]]))
    write(tokenizer, FOLDER)
    sample = "\n".join(list(training_texts([]))[:300])
    num_tokens = len(tokenizer.encode(sample, add_special_tokens=False).ids)
    print(f"{FOLDER}: {tokenizer.get_vocab_size()} tokens, {len(sample) / num_tokens:.2f} characters a token")


if __name__ == "__main__":
    main()
