"""The process that turns Markdown into trees. `renderer.py` starts it.

Each line is {"texts": [...]}, and each answer {"json": ...} with the documents as JSON text, which is sent on unread. The first
answer says that the process is ready. Parsers, lexers and LaTeX can be slow on hostile text, so the caller sets a time limit
and ends the process when it is exceeded. The memory is limited here.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress

from culet.serve.markdown.document import parse

_MAX_BYTES = 1 << 30  # of address space
_MAX_ANSWER_CHARS = 4 << 20
_ALARM_S = 60  # ends this process if the parent is gone and cannot do it


def _answer(line: bytes) -> dict[str, str]:
    documents = []
    for text in json.loads(line)["texts"]:
        try:
            documents.append(parse(text))
        except RecursionError:  # lists or quotes in lists in lists ...
            documents.append([[0, ["p", {}, text]]])
    answer = json.dumps({"documents": documents}, ensure_ascii=False, separators=(",", ":"))
    return {"json": answer} if len(answer) <= _MAX_ANSWER_CHARS else {"error": "the answer is too long"}


def main() -> None:
    """Answer until stdin closes, which happens when the parent ends."""
    with suppress(ValueError, OSError):  # not every system supports this limit
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    _answer(b'{"texts": ["```python\\n1\\n```\\n$x$"]}')  # loads what is loaded lazily
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        signal.alarm(_ALARM_S)
        try:
            reply = _answer(line)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}"}
        signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
