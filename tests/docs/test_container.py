"""The Dockerfile and the compose file: linted, small, without root, and their steps run outside a container."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import ROOT, check_culet
from tests.docs.test_package import same_torch

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
BIN = Path(sysconfig.get_path("scripts"))


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, with continued lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def values(name: str) -> list[str]:
    return [value for instruction, value in instructions() if instruction == name]


def words(name: str) -> list[str]:
    """Return the words of the last instruction of this name, which is in JSON form."""
    parsed: list[str] = yaml.safe_load(values(name)[-1])
    return parsed


def test_dockerfile_is_linted() -> None:
    done = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_files_are_linted() -> None:
    files = [ROOT / "compose.yaml", ROOT / "compose.cpu.yaml"]
    done = subprocess.run([BIN / "compose-lint", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_finds_mistakes(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd / && apt-get install gcc\n")
    assert subprocess.run([BIN / "hadolint", tmp_path / "Dockerfile"], capture_output=True).returncode == 1


def test_the_image_is_small_and_not_root() -> None:
    assert len(values("FROM")) == 2, "what builds the wheel is not in the image"
    assert all("slim" in image for image in values("FROM"))
    assert values("USER") == ["1000"]
    assert all("--no-cache-dir" in step for step in values("RUN") if "pip " in step)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    copied = {word for step in values("COPY") if "--from" not in step for word in step.split()[:-1]}
    assert copied == {line[1:] for line in ignored if line.startswith("!")}


def test_the_command_exists() -> None:
    check_culet((*words("ENTRYPOINT"), *words("CMD")))
    check_culet((*words("ENTRYPOINT"), *COMPOSE["services"]["culet"]["command"]))


def test_compose_waits_for_the_model() -> None:
    culet, page = COMPOSE["services"]["culet"], COMPOSE["services"]["open-webui"]
    assert page["depends_on"]["culet"]["condition"] == "service_healthy"
    assert page["environment"]["OPENAI_API_BASE_URL"] == "http://culet:8000/v1"
    assert all(port.startswith("127.0.0.1:") for service in (culet, page) for port in service["ports"])
    assert "/cache" in culet["volumes"][0]
    assert int(culet["stop_grace_period"].removesuffix("s")) > 30


def test_compose_without_a_gpu() -> None:
    """The second file changes the one service that asks for a GPU: torch's CPU build, the built-in model, and no GPU."""
    text = (ROOT / "compose.cpu.yaml").read_text()
    assert "\n    deploy: !reset null\n" in text  # `!reset` removes what the first file sets
    override = yaml.safe_load(text.replace("!reset ", ""))["services"]
    asking = [name for name, service in COMPOSE["services"].items() if "deploy" in service]
    assert list(override) == asking == ["culet"]
    [index] = override["culet"]["build"]["args"].items()
    assert "=".join(index) in DOCKERFILE
    assert override["culet"]["command"] == ["${MODEL:-built-in}"]


@pytest.mark.slow
def test_its_steps_run_outside_a_container(tmp_path: Path, port: int) -> None:
    """Build the wheel from the copied files only, install it as the image does, start the entry point, and probe it.

    Steps that need root (apt-get, useradd) are left out, and the image's folders are below `tmp_path`.
    """
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for step in values("COPY"):
        *names, _ = step.split()
        for name in names if "--from" not in step else ():
            place = ROOT / name
            if place.is_dir():
                shutil.copytree(place, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(place, source)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= same_torch(tmp_path)
    variables |= {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    variables |= dict(word.split("=", 1) for word in shlex.split(values("ENV")[-1].replace("/cache", str(tmp_path / "cache"))))
    steps = [step for step in values("RUN") if step.startswith("pip ")]
    assert len(steps) == 3
    for step in steps:
        # The index of the image may be out of reach here, and pip is configured with one that is not.
        step = re.sub(r'--index-url "\$TORCH_INDEX"', "", step).replace("/wheels", str(wheels))
        done = subprocess.run(["bash", "-ec", step], cwd=source, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    command = [*words("ENTRYPOINT"), *words("CMD"), "--port", str(port)]
    probe = values("HEALTHCHECK")[-1].partition("CMD ")[2].replace("8000", str(port))
    server = subprocess.Popen(command, env=variables, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 300
        while subprocess.run(yaml.safe_load(probe), env=variables, cwd=tmp_path, capture_output=True).returncode != 0:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline
            time.sleep(1)
    finally:
        server.terminate()
    assert server.wait(60) == 0
