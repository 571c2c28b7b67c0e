"""The process in which `check` compiles grammars.

It reads one JSON object per line. The first line is {"names": [...], "max_bytes": n}, with the special tokens and the limit on
the address space. Every later line holds the fields of a GrammarSpec. Each answer is {"error": text}. The text is empty if the
grammar compiles.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress

from culet.structured.compiled_grammar import GrammarFault, compile_grammar, index_vocabulary
from culet.types import GrammarSpec


def _reply(error: str) -> None:
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


def _check(spec: GrammarSpec, names: Sequence[str]) -> str:
    """Return why the grammar cannot be compiled, or "". A vocabulary of bytes and special tokens is enough to find out."""
    pieces = [name.encode() for name in names] + [bytes([byte]) for byte in range(256)]
    vocabulary = index_vocabulary(pieces, range(len(names)), [0])
    try:
        compile_grammar(spec, vocabulary)
    except GrammarFault as fault:
        return str(fault)
    except (RecursionError, MemoryError):
        return "the grammar is too large or is nested too deeply"
    return ""


def main() -> None:
    """Answer requests until stdin closes, which happens when the parent ends."""
    setup = json.loads(sys.stdin.readline())
    with suppress(ValueError, OSError):  # not every system supports these limits
        resource.setrlimit(resource.RLIMIT_AS, (setup["max_bytes"], setup["max_bytes"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply("")
    for line in sys.stdin:
        _reply(_check(GrammarSpec(**json.loads(line)), setup["names"]))


if __name__ == "__main__":
    main()
