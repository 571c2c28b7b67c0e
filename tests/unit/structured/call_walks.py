"""Random calls that a grammar allows, read back as the server reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from culet.structured.compiler import GrammarCompiler
from culet.structured.matcher import Phase, Vocabulary
from culet.text.tool_calls import CallReader
from culet.types import StructuredOutputs

SPECIAL = ("<pad>", "<eos>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>')
END, OPEN, CLOSE, QUOTE = 2, 3, 4, 5
WORDS = ("call:", "true", "null", "10", "ab", ",", "日本", "\n")
PIECES = [name.encode() for name in SPECIAL] + [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(len(PIECES), lambda index: PIECES[index], frozenset(range(6)), (1, END)))


def walk(compiler: GrammarCompiler, text: str, seed: int) -> list[int]:
    """Draw random tokens that the grammar allows. Closing tokens are made more likely so that calls end."""
    chance = random.Random(seed)
    matcher = compiler.start(StructuredOutputs(grammar=text).spec(), [9], 1)
    tokens: list[int] = []
    while matcher.phase is not Phase.ENDED:
        mask = compiler.masks([(matcher, 0)])[0]
        assert not matcher.fault, matcher.fault
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        closing = [token for token in allowed if PIECES[token] in (b"}", b"]", b",") or token in (QUOTE, END, CLOSE)]
        token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        tokens.append(token)
        matcher.accept([token])
        assert len(tokens) < 3000
    return tokens[:-1]


def read_calls(tokens: list[int], schemas: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the calls as the server reads them."""
    calls: list[tuple[str, Any]] = []
    pieces: list[str] = []
    reader: CallReader | None = None
    for token in tokens:
        if token == OPEN:
            reader, pieces = CallReader(schemas), []
            text = b""
        elif token == CLOSE:
            assert reader is not None
            pieces.append(reader.push_text(text.decode("utf-8", "replace")))
            assert reader.is_complete, reader.fault
            calls.append((reader.name or "", json.loads("".join(pieces))))
        elif token == QUOTE:
            assert reader is not None
            pieces += [reader.push_text(text.decode("utf-8", "replace")), reader.push_quote()]
            text = b""
        else:
            text += PIECES[token]
    return calls
