"""Run real clients against a running server with the built-in model, and write the outcome to docs/guides/clients.md.

    make test-clients                  all clients
    make test-clients CLIENTS=ollama   only those with this name; the others keep their last outcome

Each client has its own virtual environment under .venv-clients, because their requirements conflict. They are installed in
their latest versions, from PyPI and npm.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".venv-clients"
TRIALS = FOLDER / "trials.json"  # the last outcome of every client
PAGE = ROOT / "docs/guides/clients.md"
BEGIN, END = "<!-- outcome: written by make test-clients -->", "<!-- end of the outcome -->"
START_LIMIT_S, CLIENT_LIMIT_S = 600, 1800
COLUMNS = {"plain": "answer", "stream": "streaming", "tools": "tools", "structured": "structured output"}


class Trial(TypedDict):
    """One run of a client. The outcome is what went wrong by the name of the check, or "" where nothing did."""

    version: str
    date: str
    outcome: dict[str, str]


@dataclass(frozen=True)
class Client:
    """A client, or one of its ways to talk to a server."""

    name: str
    script: str
    packages: tuple[str, ...]  # the first one's version is shown. One from npm starts with "npm:".
    arguments: tuple[str, ...] = ()
    note: str = ""


_LANGCHAIN = ("langchain", "langchain-openai", "langchain-anthropic")
_LITELLM = ("litellm", "mcp")  # its tool calls import mcp
_AI_SDK = ("npm:ai",)
CLIENTS = (
    Client("openai", "use_openai.py", ("openai", "pydantic")),
    Client("anthropic", "use_anthropic.py", ("anthropic",)),
    Client("litellm", "use_litellm.py", _LITELLM, ("openai",)),
    Client("litellm, Anthropic's API", "use_litellm.py", _LITELLM, ("anthropic",)),
    Client("langchain-openai", "use_langchain.py", (_LANGCHAIN[1], *_LANGCHAIN), ("openai",)),
    Client("langchain-anthropic", "use_langchain.py", (_LANGCHAIN[2], *_LANGCHAIN), ("anthropic",)),
    Client("llama-index", "use_llama_index.py", ("llama-index-core", "llama-index-llms-openai-like")),
    Client("instructor", "use_instructor.py", ("instructor",)),
    Client("pydantic-ai", "use_pydantic_ai.py", ("pydantic-ai-slim", "pydantic-ai-slim[openai]")),
    Client("openai-agents", "use_openai_agents.py", ("openai-agents",), ("responses",), note="the responses API"),
    Client("openai-agents, chat", "use_openai_agents.py", ("openai-agents",), ("chat",), note="chat completions"),
    Client("AI SDK", "ai_sdk", _AI_SDK, ("openai-compatible",), note="@ai-sdk/openai-compatible"),
    Client("AI SDK, OpenAI", "ai_sdk", _AI_SDK, ("openai",), note="@ai-sdk/openai, the responses API"),
    Client("AI SDK, Anthropic", "ai_sdk", _AI_SDK, ("anthropic",), note="@ai-sdk/anthropic"),
    Client("ollama", "use_ollama.py", ("ollama",)),
    Client("lm-eval", "use_lm_eval.py", ("lm-eval", "lm-eval[api]"), (str(ROOT / "tests/serve/lm_eval_task"),)),
    Client("guidellm", "use_guidellm.py", ("guidellm",), (str(ROOT / "culet/embedded/target"),), note="a benchmark"),
)


def main() -> None:
    wanted = sys.argv[1:]
    chosen = [client for client in CLIENTS if not wanted or any(name in client.name for name in wanted)]
    if not chosen:
        sys.exit(
            f"error: no client is called {' or '.join(wanted)}\nhint: the clients are {', '.join(c.name for c in CLIENTS)}"
        )
    tried: dict[str, Trial] = json.loads(TRIALS.read_text()) if TRIALS.exists() else {}
    has_failed = False
    with running_server("built-in", "--store-responses") as url, running_server(*seeing_model()) as seeing_url:
        for client in chosen:
            version, outcome = install(client), run(client, url, seeing_url)
            tried[client.name] = {"version": version, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "outcome": outcome}
            TRIALS.write_text(json.dumps(tried, indent=1))
            for check, problem in outcome.items():
                has_failed = has_failed or bool(problem)
                print(f"  {check}: {problem or 'works'}", file=sys.stderr, flush=True)
    write_page(tried)
    sys.exit(1 if has_failed else 0)


def seeing_model() -> tuple[str, ...]:
    """Write a tiny random model that sees images, and return what serves it."""
    folder = FOLDER / "seeing"
    command = [sys.executable, "-m", "culet.testing.tiny", str(folder), "--shape", "E4B", "--towers"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return (str(folder), "--served-model-name", "seeing", "--max-model-len", "2048")


@contextmanager
def running_server(model: str, *options: str) -> Iterator[str]:
    """Serve a model and yield the server's address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{Path(model).name}.log").open("w") as log:
        command = [sys.executable, "-m", "culet.cli.main", "serve", model, "--port", str(port), *options]
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_ready(server, url, Path(log.name))
            yield url
        finally:
            server.terminate()
            server.wait(60)


def wait_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready"):
                return
        except OSError:
            time.sleep(1)
    sys.exit(f"error: the server did not start\nhint: see {log}")


def install(client: Client) -> str:
    """Install the latest version of a client, unless it is installed. Return the version."""
    package = client.packages[0]
    if package.startswith("npm:"):
        return install_from_npm(package.removeprefix("npm:"))
    venv = FOLDER / Path(client.script).stem.removeprefix("use_")
    python = venv / "bin/python"
    if not (venv / "installed").exists():
        uv = get_uv()
        subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, venv], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", python, *dict.fromkeys(client.packages)], check=True)
        (venv / "installed").touch()
    show = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()


def get_uv() -> Path:
    """Return uv, which installs much faster than pip."""
    venv = FOLDER / "uv"
    if not (venv / "bin/uv").exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/pip", "install", "-q", "uv"], check=True)
    return venv / "bin/uv"


def install_from_npm(package: str) -> str:
    folder = FOLDER / "ai_sdk"
    folder.mkdir(exist_ok=True)
    for file in (HERE / "ai_sdk").iterdir():
        shutil.copy(file, folder)
    if not (folder / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent"], cwd=folder, check=True)
    version: str = json.loads((folder / "node_modules" / package / "package.json").read_text())["version"]
    return version


def run(client: Client, url: str, seeing_url: str) -> dict[str, str]:
    """Run a client's checks. Return what went wrong by the name of the check, or "" where nothing did."""
    print(f"{client.name} ...", file=sys.stderr, flush=True)
    if client.script == "ai_sdk":
        command = ["node", str(FOLDER / "ai_sdk/use_ai_sdk.mjs"), *client.arguments]
    else:
        venv = FOLDER / Path(client.script).stem.removeprefix("use_")
        command = [str(venv / "bin/python"), str(HERE / client.script), *client.arguments]
    names = {"CULET_URL": url, "CULET_MODEL": "built-in", "CULET_SEEING_URL": seeing_url}
    environment = {**os.environ, **names, "PYTHONPATH": ""}
    log = FOLDER / f"{'_'.join([Path(client.script).stem, *(Path(name).name for name in client.arguments)])}.log"
    with log.open("w") as errors:
        try:
            done = subprocess.run(command, env=environment, stdout=-1, stderr=errors, text=True, timeout=CLIENT_LIMIT_S)
            outcome: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            outcome = {"plain": f"{type(error).__name__}; see {log}"}
    return outcome


def write_page(tried: dict[str, Trial]) -> None:
    """Write the last outcome of every client as a table between the marks of the page."""
    lines = [f"| client | version | tried | {' | '.join(COLUMNS.values())} | |", f"|---|---|---|{'---|' * len(COLUMNS)}---|"]
    for client in CLIENTS:
        if client.name not in tried:
            continue
        trial = tried[client.name]
        outcome = trial["outcome"]
        others = [check for check in outcome if check not in COLUMNS]
        notes = [client.note, *(f"{check.replace('_', ' ')}: {shown(outcome, check)}" for check in others)]
        cells = [shown(outcome, check) for check in COLUMNS]
        head = f"| {client.name} | {trial['version']} | {trial['date']} "
        lines.append(f"{head}| {' | '.join(cells)} | {', '.join(filter(None, notes))} |")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def shown(outcome: dict[str, str], check: str) -> str:
    return "-" if check not in outcome else "**fails**" if outcome[check] else "works"


if __name__ == "__main__":
    main()
