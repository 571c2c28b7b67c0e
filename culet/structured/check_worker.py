"""The process in which `check` compiles grammars.

It reads one JSON object per line. The first is {"names": [...], "max_bytes": n}: the special tokens and the limit of the
address space. Each further one holds the fields of a GrammarSpec and is answered by {"error": text}, empty if it compiles.
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
    """Why the grammar cannot be compiled, or nothing. A vocabulary of bytes and special tokens is enough to find out."""
    pieces = [name.encode() for name in names] + [bytes([byte]) for byte in range(256)]
    vocabulary = index_vocabulary(pieces, range(len(names)), [0])
    try:
        compile_grammar(spec, vocabulary)
    except GrammarFault as fault:
        return str(fault)
    except (RecursionError, MemoryError):
        return "nested too deeply, or too large"
    return ""


def main() -> None:
    """Answer until stdin closes, which it does when the parent ends."""
    setup = json.loads(sys.stdin.readline())
    with suppress(ValueError, OSError):  # not every system supports these limits
        resource.setrlimit(resource.RLIMIT_AS, (setup["max_bytes"], setup["max_bytes"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply("")
    for line in sys.stdin:
        _reply(_check(GrammarSpec(**json.loads(line)), setup["names"]))


if __name__ == "__main__":
    main()
