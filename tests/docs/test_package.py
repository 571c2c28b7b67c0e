"""The wheel: its metadata, what is inside, and that it works where nothing else of this repository is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

from culet import __version__

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "culet")  # what the Dockerfile copies, too


def environment_without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def same_torch(folder: Path) -> dict[str, str]:
    """Return variables that make pip install the build of torch that runs the tests. PyPI's build for GPUs takes 3 GB."""
    path = folder / "constraints.txt"
    path.write_text(f"torch=={version('torch')}\n")
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} https://download.pytorch.org/whl/cpu/torch/"
    return {"PIP_CONSTRAINT": str(path), "PIP_FIND_LINKS": links.strip()}


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed and return its stdout."""
    variables = environment_without_paths() | environment
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, *, with_weights: bool) -> Path:
    """Copy the sources to a folder and build the wheel there. Without weights, their files are empty."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    if not with_weights:
        for path in source.rglob("*.safetensors"):
            path.write_bytes(b"")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", ".", cwd=source)
    [path] = (source / "dist").glob("culet-*.whl")
    return path


@pytest.fixture(scope="module")
def light_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with empty weights, which is built quickly."""
    return build_wheel(tmp_path_factory.mktemp("source"), with_weights=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source"), with_weights=True)


def test_version_is_a_release() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{__version__}]" in changelog


def test_metadata(light_wheel: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", light_wheel, cwd=light_wheel.parent)
    with zipfile.ZipFile(light_wheel) as archive:
        text = archive.read(f"culet-{__version__}.dist-info/METADATA").decode()
        scripts = archive.read(f"culet-{__version__}.dist-info/entry_points.txt").decode()
    metadata = Parser().parsestr(text)
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.12"} <= set(metadata.get_all("Classifier") or ())
    assert "culet = culet.cli.main:main" in scripts


def test_everything_is_inside(light_wheel: Path) -> None:
    """Every file of the package is in the wheel, and nothing else is."""
    with zipfile.ZipFile(light_wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("culet/")}
    present = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "culet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == present
    assert packed > {
        "culet/py.typed",
        "culet/text/gemma4.jinja",
        "culet/serve/page/index.html",
        "culet/embedded/target/model.safetensors",
        "culet/embedded/assistant/model.safetensors",
        "culet/embedded/dflash/model.safetensors",
    }


@pytest.mark.slow
def test_the_unpacked_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """Without the repository on the path, the package answers from its own files."""
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", target, wheel, cwd=tmp_path)
    code = (
        "import culet, pathlib\n"
        "from culet.serve import web_page\n"
        "print(pathlib.Path(culet.__file__).parent.parent)\n"
        "[result] = culet.LLM(device='cpu').chat([{'role': 'user', 'content': 'What is 12 + 5?'}])\n"
        "print(result.text)\n"
    )
    place, answer = run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).splitlines()
    assert Path(place) == target
    assert answer


@pytest.mark.slow
def test_installs_into_a_clean_environment(wheel: Path, tmp_path: Path, port: int) -> None:
    """pip finds all dependencies, and the installed command serves, answers and shows its page."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    run(folder / "bin/pip", "install", "-q", "--no-compile", wheel, cwd=tmp_path, **same_torch(tmp_path))
    assert run(folder / "bin/culet", "--version", cwd=tmp_path) == f"culet {__version__}\n"
    assert run(folder / "bin/culet", "generate", "Hello", cwd=tmp_path).strip()
    answer = run(folder / "bin/python", ROOT / "scripts/first_run.py", port, cwd=tmp_path)
    assert "tokens/s" in answer
