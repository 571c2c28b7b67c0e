"""Child processes and programs import nothing from the working directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import culet
from culet.child import child_environment, python_command
from culet.structured.check import GrammarCheck
from culet.text.template import ChatTemplate
from culet.types import GrammarSpec
from tests import forking
from tests.matrix import matrix

ROOT = Path(culet.__file__).parents[1]
MODULES = ("torch", "jinja2", "llguidance", "msgspec", "click", "numpy", "json", "typing")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: modules that leave a mark when they are imported, and a clone named `culet`."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(9)\n")
    (tmp_path / "culet" / "culet").mkdir(parents=True)
    (tmp_path / "culet" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forking, "forker", None)  # forks import nothing
    return tmp_path


def ran(folder: Path) -> str:
    """Return which modules of the working directory were imported."""
    mark = folder / "ran"
    return mark.read_text() if mark.exists() else ""


@pytest.fixture(params=[None, "", ".", ":{root}", "{root}:", "{root}:.", "{root}"])
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """PYTHONPATH in all its forms. An empty entry means the working directory."""
    given: str | None = request.param
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given.format(root=ROOT))
    return given


def test_grammar_and_template_processes(trap: Path, environment: str | None) -> None:
    GrammarCheck((), patience=60).check(GrammarSpec(kind="regex", text="a+"))
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, origin="test", empty_thought=False)
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"
    template.close()
    assert ran(trap) == ""


REPORT = "import json, sys, culet; print(json.dumps([sys.path, culet.__file__, sys.argv]))"
RUN = 'runpy.run_module(module, run_name="__main__", alter_sys=True)'


def test_a_child_gets_this_culet_and_a_safe_path(trap: Path, environment: str | None) -> None:
    *python, main, folder, module, first = python_command("culet.serve.process.engine", "first")
    assert RUN in main
    command = [*python, main.replace(RUN, REPORT), folder, module, first]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True)
    path, file, arguments = json.loads(done.stdout)
    assert Path(file) == Path(culet.__file__)
    assert arguments == ["-c", "first"]
    assert not {str(trap), "", "."} & set(path)
    assert ran(trap) == ""


def test_the_operators_own_folders_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(tmp_path), ".", "src", "/opt/site"]))
    assert child_environment()["PYTHONPATH"] == os.pathsep.join([str(tmp_path), "/opt/site"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    assert "PYTHONPATH" not in child_environment()


# Python itself imports from the working directory before it runs a module (`python -m`), but only from its standard library.
EARLY = ("json", "typing")
SCRIPT = "import sys; from culet.cli.main import main; sys.exit(main())"


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which this culet is installed, as a path at the end of `sys.path`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(ROOT)!r})")
    return {**os.environ, "PYTHONPATH": str(folder)}


@matrix({"path": ["", ":", ":/nowhere:", "::/nowhere", ":."], "as_module": [True, False]})
def test_the_program_itself(trap: Path, installed: dict[str, str], path: str, *, as_module: bool) -> None:
    for name in EARLY:
        (trap / f"{name}.py").unlink()
    environment = dict(installed)
    environment["PYTHONPATH"] += path
    if as_module:
        command = [sys.executable, "-m", "culet.cli.main"]
    else:
        script = trap.parent / f"{trap.name}-bin"  # the console script is not in the working directory
        script.mkdir()
        (script / "culet").write_text(SCRIPT)
        command = [sys.executable, str(script / "culet")]
    # The doctor imports all of the modules, which takes seconds. If one of them is found in the working directory, so is click.
    command, said = ([*command, "doctor"], "torch") if path == "" else ([*command, "--version"], culet.__version__)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran(trap) == ""
    assert said in done.stdout, done.stderr


def test_a_script_next_to_a_clone(trap: Path, installed: dict[str, str]) -> None:
    """A regular package on the path wins over a folder without `__init__.py`, even one that comes earlier."""
    for name in MODULES:
        (trap / f"{name}.py").unlink()
    (trap / "script.py").write_text("import culet; from culet import SamplingParams; print(culet.__file__)")
    done = subprocess.run([sys.executable, "script.py"], env=installed, capture_output=True, text=True)
    assert done.stdout.strip() == culet.__file__, done.stderr


def test_no_other_code_starts_python() -> None:
    """Every child is started by `culet.child`, so that none is forgotten."""
    files = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in (ROOT / "culet").rglob("*.py")}
    users = {name for name, text in files.items() if re.search(r"sys\.executable|(import|from) multiprocessing", text)}
    assert users == {"culet/child.py", "culet/cli/doctor.py"}  # the doctor prints it
