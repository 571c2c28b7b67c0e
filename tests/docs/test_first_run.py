"""`make run`: it serves, asks, prints the answer, the speed and the page's address, and leaves no server behind."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.ports import Claim

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/first_run.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT_S = 300.0


def is_open(url: str) -> bool:
    try:
        return httpx.get(f"{url}/live", trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def page_of(output: str) -> str:
    [url] = re.findall(r"^page: +(http://\S+)", output, re.MULTILINE)
    return str(url)


def test_make_run_calls_the_script() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\nrun:")[1].split("\n\n")[0]
    assert "scripts/make-venv $(VENV)" in recipe
    assert "scripts/first_run.py" in recipe


def run(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, str(port)]
    return subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_without_a_terminal_it_ends(port: int) -> None:
    done = run(port)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert list(lines) == ["question", "answer", "speed", "page"]
    assert lines["answer"].strip()
    assert re.search(r"\d+ tokens/s.*\d+ of \d+ tokens were drafted", lines["speed"])
    assert not is_open(page_of(done.stdout))


@pytest.mark.slow
def test_at_a_terminal_it_stays_until_ctrl_c() -> None:
    """The first port is taken here, so the other one is used."""
    with Claim(2) as claim, socket.create_server(("127.0.0.1", claim.port)):
        process_id, descriptor = pty.fork()
        if process_id == 0:
            os.execve(sys.executable, [sys.executable, str(SCRIPT), str(claim.port), str(claim.port + 1)], ENVIRONMENT)
        shown, deadline = "", time.monotonic() + LIMIT_S
        while "Ctrl-C" not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([descriptor], [], [], 0.2)[0]:
                shown += os.read(descriptor, 65536).decode()
        url = page_of(shown.replace("\r", ""))
        assert url.endswith(f":{claim.port + 1}")
        assert "<html" in httpx.get(url, trust_env=False).text
        os.kill(process_id, signal.SIGINT)
        _, status = os.waitpid(process_id, 0)
        os.close(descriptor)
        assert os.waitstatus_to_exitcode(status) == 0
        assert not is_open(url)


def test_a_server_that_fails_is_reported(port: int) -> None:
    """A broken setting ends the server, and the script shows its log and fails."""
    done = run(port, CULET_LOG_LEVEL="nonsense")
    assert done.returncode == 1
    assert "error: the server did not start" in done.stderr
