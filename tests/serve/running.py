"""Real servers for tests: `culet serve` in its own process, with an engine process behind it.

With a script (`culet.serve.process.wire.Script`, the token ids of the answers), the fake engine runs and no model is loaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from openai import DefaultHttpxClient, OpenAI

from tests.forking import children, start_server
from tests.ports import Claim

_SERVE = """
import json, sys
import msgspec
from culet.cli.main import report
from culet.config import build_config, build_serve_config
from culet.errors import CuletError, exit_code
from culet.log import setup_logging
from culet.serve.server import serve
from culet.serve.process.wire import Script
given = json.loads(sys.argv[1])
setup_logging(form=given["settings"].get("log_format", "text"))
try:
    serve(build_config(given["config"]), build_serve_config(given["settings"]), msgspec.convert(given["script"], Script | None))
except CuletError as error:
    report(error.message, error.hint)
    sys.exit(exit_code(error))
"""
_ENGINE = "culet.serve.process.engine"
START_LIMIT_S = 40.0
PATIENCE = 12  # limits suit an idle machine; multiply them by this to allow for a busy one


def wait_for(condition: Callable[[], Any], limit_s: float = 10.0, what: str = "it") -> Any:
    """Poll `condition` until it returns a true value."""
    deadline = time.monotonic() + PATIENCE * limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE * limit_s:g} s for {what}"
        time.sleep(0.05)
    return value


class Running:
    """A running server. Use it with `with`, or call `stop`."""

    def __init__(
        self,
        folder: Path,
        *,
        script: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        is_fresh: bool = False,
    ) -> None:
        """`is_fresh`: never fork the server (see `tests.forking`)."""
        self._claim = Claim()
        self.port = self._claim.port
        self.url = f"http://127.0.0.1:{self.port}"
        given = {
            "config": {"model": str(folder), **(config or {})},
            "settings": {"port": self.port, "served_model_name": "gemma", **(settings or {})},
            "script": script,
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self.key = str((settings or {}).get("api_key") or "none").split(",")[0]
        headers = {"authorization": f"Bearer {self.key}"}
        # Without `verify=False`, each client would load certificates, which takes longer than most requests.
        self.http = httpx.Client(base_url=self.url, timeout=300, headers=headers, verify=False)
        command = [sys.executable, "-c", _SERVE, json.dumps(given)]
        self._is_fresh = is_fresh or bool(environment)
        self.process = self._start(command, {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})
        if wait:
            self.wait_ready()

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        forked = None if self._is_fresh else start_server(command[2], command[3], self._log.fileno(), environment)
        return forked or subprocess.Popen(command, stderr=self._log, env=environment)

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log()
            try:
                return self.http.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_ready, START_LIMIT_S, "the server")

    def log(self) -> str:
        """Return the server's log so far."""
        self._log.seek(0)
        return self._log.read()

    def openai(self, **options: Any) -> OpenAI:
        """Return the official client, without retries."""
        options = {"max_retries": 0, "http_client": DefaultHttpxClient(verify=False), **options}
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        """Send a chat request as plain HTTP."""
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}], **fields})

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.http.get("/stats").json()
        return stats

    def engine_ids(self) -> list[int]:
        """Return the process ids of the engines."""
        return children(self.process.pid, _ENGINE)

    def engine_id(self) -> int:
        """Return the process id of the engine."""
        ids = self.engine_ids()
        assert ids, "no engine process"
        return ids[0]

    def memory_bytes(self) -> int:
        """Return the resident memory of the web and engine processes together."""
        pages = (
            int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) for process_id in (self.process.pid, self.engine_id())
        )
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def is_at_rest(self) -> bool:
        """Return whether nothing is running or waiting, and every page is free or held only by resume points."""
        stats = self.stats()
        now = stats.get("scheduler")
        if now is None:  # it has just started
            return False
        pages = now["num_free_pages"] + now["num_resume_point_pages"]
        requests = stats["requests"]
        idle = not (now["num_running"] or now["num_waiting"] or requests["in_flight"] or requests["samples_in_flight"])
        return idle and pages == now["num_pages"] and not any(now["num_held_pages"].values())

    def check_well(self, limit_s: float = 5.0) -> None:
        """Check that no page leaked, /health is fine, and a request is answered."""
        wait_for(self.is_at_rest, limit_s, "pages to come back")
        assert self.http.get("/health").status_code == 200
        answer = self.chat(max_tokens=2)
        assert answer.status_code == 200, answer.text
        wait_for(self.is_at_rest, limit_s, "pages to come back")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, limit_s: float = 20.0) -> int:
        """Wait until the server has ended and return its exit code."""
        return self.process.wait(PATIENCE * limit_s)

    def stop(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
