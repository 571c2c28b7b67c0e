"""Turn Markdown into trees within bounds: one process at a time, a time limit for each request, and a short queue."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from culet.errors import BadRequest
from culet.line_process import LineProcess, Stopper
from culet.text.text_queue import TextQueue

_WORKER = "culet.serve.markdown.worker"
_MAX_WAITING = 64  # requests; a page that is refused shows plain text and asks again
_MAX_WAITING_MB = 8
_encoder = msgspec.json.Encoder()


class MarkdownRenderer:
    """Renders Markdown in a process, which is started by the first request and again after it was ended."""

    def __init__(self, *, max_kb: int, time_limit_s: float) -> None:
        self._max_bytes, self._time_limit_s = max_kb << 10, time_limit_s
        self._queue = TextQueue(1, max_waiting=_MAX_WAITING, max_waiting_mb=_MAX_WAITING_MB, purpose="rendered")
        self._process: LineProcess | None = None

    def check_size(self, num_bytes: int) -> None:
        """Raise if a request of this size is too large. Call it before the request is decoded."""
        if num_bytes > self._max_bytes:
            raise BadRequest(
                f"texts: got {num_bytes} bytes, but the maximum is {self._max_bytes}",
                hint="send less at once, or raise the limit with --limits markdown_kb=N",
            )

    async def render(self, texts: Sequence[str], num_bytes: int) -> bytes:
        """Return the documents as JSON. `num_bytes` is the size of the request. Raise if rendering takes too long."""
        return await self._queue.run(lambda stopper: self._ask(texts, stopper), num_bytes)

    def close(self) -> None:
        """End the process."""
        self._queue.close()
        if (process := self._process) is not None:
            process.end()

    def _ask(self, texts: Sequence[str], stopper: Stopper) -> bytes:
        process = self._process
        if process is None or not process.is_alive:
            process = self._process = LineProcess(_WORKER, "renders Markdown")
        try:
            with stopper.watch(process):
                reply = process.ask(_encoder.encode({"texts": texts}), self._time_limit_s)
        except OSError as error:  # includes TimeoutError
            process.end()
            self._process = None
            is_late = isinstance(error, TimeoutError)
            problem = f"was stopped after {self._time_limit_s:g} s" if is_late else "failed"
            raise BadRequest(f"texts: rendering {problem}", hint="show the text as it is") from error
        if "error" in reply:
            raise BadRequest(f"texts: rendering failed: {reply['error']}", hint="show the text as it is")
        return str(reply["json"]).encode()
