"""The process in which `check` compiles grammars.

It reads one JSON object per line. The first line is {"names": [...], "max_bytes": n}, with the special tokens and the limit on
the address space. Every later line holds the fields of a GrammarSpec or of a ToolForm. Each answer has an error, a hint and a
text. The error is empty if the grammar compiles. The text is the grammar of a ToolForm.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from culet.errors import BadRequest
from culet.structured.compiled_grammar import GrammarFault, compile_grammar, index_vocabulary
from culet.structured.tool_grammar import expand
from culet.types import GRAMMAR_FAULT, GrammarSpec

_STACK_BYTES = 4 << 20


def _reply(error: str = "", hint: str = "", text: str = "") -> None:
    sys.stdout.write(json.dumps({"error": error, "hint": hint, "text": text}) + "\n")
    sys.stdout.flush()


def _check(form: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return the answer for a form. A vocabulary of bytes and special tokens is enough to find out whether it compiles."""
    pieces = [name.encode() for name in names] + [bytes([byte]) for byte in range(256)]
    vocabulary = index_vocabulary(pieces, range(len(names)), [0])
    try:
        spec = expand(form) if "tools" in form else GrammarSpec(**form)
        compile_grammar(spec, vocabulary)
    except GrammarFault as fault:
        return {"error": f"{GRAMMAR_FAULT}{fault}"}
    except BadRequest as error:
        return {"error": error.message, "hint": error.hint}
    except ValueError as error:  # a schema that is not JSON
        return {"error": f"{GRAMMAR_FAULT}JSON schema: not valid JSON: {error}"}
    except (RecursionError, MemoryError):
        return {"error": f"{GRAMMAR_FAULT}the grammar is too large or is nested too deeply"}
    return {"text": spec.text if "tools" in form else ""}


def main() -> None:
    """Answer requests until stdin closes, which happens when the parent ends."""
    setup = json.loads(sys.stdin.readline())
    with suppress(ValueError, OSError):  # not every system supports these limits
        resource.setrlimit(resource.RLIMIT_AS, (setup["max_bytes"], setup["max_bytes"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply()
    for line in sys.stdin:
        # llguidance follows rules recursively. Here it has less stack than in the engine's threads, so that a grammar
        # which nests too deeply ends this process and never the engine.
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=lambda line=line: _reply(**_check(json.loads(line), setup["names"])))
        thread.start()
        thread.join()


if __name__ == "__main__":
    main()
