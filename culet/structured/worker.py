"""Compiles grammars in a process of its own, to see whether they can be; run by `grammar_check`, once per process.

One JSON object per line: the first {"names": [...], "max_bytes": n} of the special tokens and the address space, every further
one the fields of a GrammarSpec. Each is answered by {"error": why not, or nothing}.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress

from culet.structured.grammar_text import GrammarFault, compile_grammar, make_tokenizer
from culet.types import GrammarSpec


def _reply(error: str) -> None:
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


def _check(spec: GrammarSpec, names: Sequence[str]) -> str:
    """Why the grammar cannot be compiled; nothing if it can. A vocabulary of bytes and special tokens suffices to know."""
    pieces = [name.encode() for name in names] + [bytes([byte]) for byte in range(256)]
    tokenizer = make_tokenizer(pieces, range(len(names)), [0])
    try:
        compile_grammar(spec, tokenizer)
    except GrammarFault as fault:
        return str(fault)
    except (RecursionError, MemoryError):
        return "nested too deep, or too large"
    return ""


def main() -> None:
    """Answer until stdin ends, which it does when Culet is gone."""
    setup = json.loads(sys.stdin.readline())
    with suppress(ValueError, OSError):  # not every system can limit it
        resource.setrlimit(resource.RLIMIT_AS, (setup["max_bytes"], setup["max_bytes"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply("")
    for line in sys.stdin:
        _reply(_check(GrammarSpec(**json.loads(line)), setup["names"]))


if __name__ == "__main__":
    main()
