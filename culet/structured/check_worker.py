"""The process in which `check` compiles grammars.

It reads one JSON object per line. The first line is {"names": [...], "max_bytes": n}, with the special tokens and the limit on
the address space. Every later line holds the fields of a GrammarSpec or of a ToolForm. Each answer has the fields of a Verdict.
The error is empty if the grammar compiles. The text is the grammar of a ToolForm. If that is lenient, tools that cannot be held
to their schemas are free in it.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from llguidance import LLTokenizer

from culet.errors import BadRequest
from culet.structured.compiled_grammar import GrammarFault, compile_grammar, index_vocabulary
from culet.structured.tool_grammar import expand
from culet.types import GrammarSpec

_STACK_BYTES = 4 << 20
_MAX_CALLS = 3000  # Python's recursion limit. A schema with the greatest depth allowed needs about half of it.
_PLACE = re.compile(r"^line \d+, column \d+: ")


def _reply(**verdict: Any) -> None:
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()


def _check(form: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the answer for a form. A vocabulary of bytes and special tokens is enough to find out whether it compiles."""
    pieces = [name.encode() for name in names] + [bytes([byte]) for byte in range(256)]
    vocabulary = index_vocabulary(pieces, range(len(names)), [0])
    verdict = _compile(form, vocabulary)
    if "error" in verdict and form.get("is_lenient"):
        return _free_some(form, vocabulary)
    if "error" in verdict and "tools" in form:
        verdict["field"] = _field_at_fault(form, vocabulary)
    return verdict


def _free_some(form: Mapping[str, Any], vocabulary: LLTokenizer) -> dict[str, Any]:
    """Return the answer for a form in which some tools are free.

    These are tools that cannot be used alone, and as many of the largest as necessary. Expanding is much faster than compiling.
    """
    free = dict.fromkeys(form.get("free", ()), "")
    sizes: dict[str, int] = {}

    def try_alone(vocabulary: LLTokenizer | None) -> None:
        for tool in form["tools"]:
            name = tool["function"]["name"]
            verdict = {} if name in free else _compile({"tools": [tool]}, vocabulary)
            sizes[name] = len(verdict.get("text", ""))
            if "error" in verdict:
                free[name] = verdict["error"]

    def without(count: int) -> dict[str, str]:
        """Return the tools that are free if the largest `count` of the others are."""
        largest = sorted(sizes.keys() - free.keys(), key=lambda name: (-sizes[name], name))
        return {**free, **dict.fromkeys(largest[:count], "the schemas of all tools together are too large")}

    try_alone(None)
    few, many = 0, len(sizes.keys() - free.keys())  # The fewest that suffice are between them.
    while few < many:
        middle = (few + many) // 2
        verdict = _compile({**form, "free": list(without(middle))}, None)
        few, many = (middle + 1, many) if "error" in verdict else (few, middle)
    free = without(many)
    verdict = _compile({**form, "free": list(free)}, vocabulary)
    if "error" in verdict:
        try_alone(vocabulary)
        verdict = _compile({**form, "free": list(free)}, vocabulary)
    return {**verdict, "free_tools": free}


def _compile(form: Mapping[str, Any], vocabulary: LLTokenizer | None) -> dict[str, str]:
    """Return an error, or the text of a ToolForm. Without a vocabulary, a ToolForm is only expanded."""
    try:
        spec = expand(form) if "tools" in form else GrammarSpec(**form)
        if vocabulary is not None:
            compile_grammar(spec, vocabulary)
    except GrammarFault as fault:
        is_own = "tools" not in form  # otherwise the grammar is not the client's, and neither are the lines in it
        return {"error": str(fault) if is_own else f"its schema cannot be used: {_PLACE.sub('', str(fault))}"}
    except BadRequest as error:
        return {"error": error.message, "hint": error.hint}
    except ValueError as error:  # a schema that is not JSON
        return {"error": f"not valid JSON: {error}"}
    except (RecursionError, MemoryError):
        return {"error": "the grammar is too large or is nested too deeply"}
    return {"text": spec.text if "tools" in form else ""}


def _field_at_fault(form: Mapping[str, Any], vocabulary: LLTokenizer) -> str:
    """Return the field of the request that keeps a ToolForm from compiling: its document, one tool, or all tools together."""
    document = form.get("document")
    if document is not None and "error" in _compile(document, vocabulary):
        return str(document["field"])
    for index, tool in enumerate(form["tools"]):
        if form.get("name") in (None, tool["function"]["name"]) and "error" in _compile({"tools": [tool]}, vocabulary):
            return f"tools[{index}]"
    return "tools"


def main() -> None:
    """Answer requests until stdin closes, which happens when the parent ends."""
    setup = json.loads(sys.stdin.readline())
    with suppress(ValueError, OSError):  # not every system supports these limits
        resource.setrlimit(resource.RLIMIT_AS, (setup["max_bytes"], setup["max_bytes"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(_MAX_CALLS)
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
