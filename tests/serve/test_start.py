"""How `culet serve` starts and fails to start, with a one-line error, a hint, and no process left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.serve.running import Running, wait_for


def culet_serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "culet.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CULET_LOG_LEVEL": "warning", **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "./nowhere: no such folder"),
        (["a", "--model", "b"], "model: got two values"),
        (["x", "--port", "70000"], "port: got 70000"),
        (["x", "--limits", "n=0"], "limits: n: got '0'"),
        (["x", "--limits", "bodies=3"], "limits: unknown name 'bodies'"),
        (["x", "--request-timeout", "nan"], "request-timeout: got nan"),
        (["x", "--tool-call-parser", "hermes"], "tool-call-parser: got 'hermes'"),
    ],
)
def test_invalid_settings(arguments: list[str], message: str) -> None:
    done = culet_serve(*arguments)
    lines = done.stderr.splitlines()
    assert done.returncode == (1 if "no such folder" in message else 2)
    assert message in lines[0]
    assert lines[0].startswith("error: ")
    assert len(lines) == 2
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize(
    ("endpoints", "arguments", "message"),
    [
        ("", ["--no-enable-prefix-caching"], "kv-events-config: there are no events with no-enable-prefix-caching"),
        (', "replay_endpoint": "tcp://*:5558"', ["--data-parallel-size", "2"], "kv-events-config: port 5558 is the "),
        (', "replay_endpoint": "*:5558"', [], "kv-events-config: replay_endpoint: got '*:5558', expected tcp://HOST:PORT or "),
    ],
)
def test_kv_events_that_cannot_be_published(folder: Path, endpoints: str, arguments: list[str], message: str) -> None:
    events = f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"{endpoints}}}'
    done = culet_serve(str(folder), "--device", "cpu", "--kv-events-config", events, *arguments)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines[0].startswith(f"error: {message}")
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2  # nothing was started


def test_a_chosen_template_with_an_error_of_syntax(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ bos_token }}\n{% for message in messages %}\n{% if %}\n", encoding="utf-8")
    done = culet_serve(str(folder), "--chat-template", str(template), "--device", "cpu")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[0].startswith("error: chat template (mine.jinja): ")
    assert lines[0].endswith("(line 3)")
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2


def test_a_checkpoints_template_with_an_error_of_syntax(
    folder: Path, tmp_path: Path, encode: Callable[[str], list[int]]
) -> None:
    """The server can still answer completions, and the log says so."""
    copied = shutil.copytree(folder, tmp_path / "model")
    (copied / "chat_template.jinja").write_text("{% if %}", encoding="utf-8")
    with Running(copied, script={"answers": [encode("Hi.<turn|>")]}) as server:
        assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert server.chat().status_code >= 400
        assert "chats are refused and only completions are answered: chat template (chat_template.jinja): " in server.log()


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        done = culet_serve(str(folder), "--port", str(port), "--enable-auto-tool-choice", "--tool-call-parser", "gemma4")
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_an_engine_that_is_killed_while_it_starts(folder: Path) -> None:
    """It has not died too often, so the exit code lets a supervisor try again."""
    with Running(folder, config={"device": "cpu"}, wait=False) as server:
        wait_for(server.engine_ids, what="the engine")
        os.kill(server.engine_id(), signal.SIGKILL)
        assert server.wait(120) == 3
        log = server.log()
        assert "the engine's process " in log
        assert "exited unexpectedly with exit code -9" in log
        assert "perhaps because the machine ran out of memory" in log


def test_errors_of_the_engine_are_reported_by_the_server(folder: Path, port: int) -> None:
    done = culet_serve(str(folder), "--port", str(port), "--max-model-len", "9999999", "--device", "cpu")
    assert done.returncode == 2
    assert "max-model-len: got 9999999" in done.stderr
    assert "Traceback" not in done.stderr


def test_summary_and_endpoints(folder: Path, port: int) -> None:
    """Run the command itself with a model. It logs its choices, and stops on Ctrl-C while idle."""
    command = [sys.executable, "-m", "culet.cli.main", "serve", str(folder), "--port", str(port), "--device", "cpu"]
    settings = ["--served-model-name", "gemma,other", "--max-model-len", "512"]
    process = subprocess.Popen(
        [*command, *settings], stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    get = httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False).get
    try:

        def status(path: str) -> int:
            try:
                return get(path).status_code
            except httpx.TransportError:
                return 0

        wait_for(lambda: status("/live") == 200, 30, "the server")
        assert status("/health") in (200, 503)
        wait_for(lambda: status("/health") == 200, 60, "the model")
        assert status("/ready") == 200
        assert [card["id"] for card in get("/v1/models").json()["data"]] == ["gemma", "other"]
        assert get("/plan.svg").text.startswith("<svg")
        assert set(get("/version").json()) == {"version"}
        groups = get("/stats").json()["engine"]["groups"]
        assert {group["name"] for group in groups} == {"sliding", "global"}
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    for words in ("gemma, other on cpu in float32", "sliding: 4 layers", "context: 512 tokens", f"http://127.0.0.1:{port}"):
        assert words in log


def test_stop_while_loading(folder: Path) -> None:
    with Running(folder, config={"device": "cpu"}, wait=False, is_fresh=True) as server:
        wait_for(server.engine_ids, 30, "the engine process")
        began = time.monotonic()
        time.sleep(0.5)
        server.signal(signal.SIGTERM)
        assert server.wait(10) in (0, -signal.SIGTERM)
        assert time.monotonic() - began < 60


def test_requests_while_loading(folder: Path) -> None:
    with Running(folder, config={"device": "cpu"}, wait=False, is_fresh=True) as server:

        def early() -> httpx.Response | None:
            try:
                return server.chat()
            except httpx.TransportError:
                return None

        answer = wait_for(early, 30, "the port")
        if answer.status_code != 200:  # otherwise the server was faster
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
            health = server.http.get("/health")
            assert health.status_code == 200 or "loading" in health.text  # it may be ready by now


def test_keys_from_the_environment(scripted: Callable[..., Running], folder: Path, encode: Callable[[str], list[int]]) -> None:
    script = {"answers": [encode("Hi.<turn|>")]}
    with Running(folder, script=script, environment={"CULET_API_KEY": "of-the-shell"}) as server:
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/v1/models", headers={"authorization": "Bearer of-the-shell"}).status_code == 200
        assert "of-the-shell" not in server.log()


def test_the_web_process_has_no_torch() -> None:
    code = "import sys, culet.serve.server; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
