"""How Culet starts Python processes, so that they import this copy of Culet and nothing from the working directory.

`python -m module` puts the current folder first on `sys.path`. A downloaded model's folder could then bring its own `torch.py`,
and a clone named `culet` would hide the installed package. So children run with `-P`, get `culet` from the folder that this
process imported it from, and inherit only the absolute entries of PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from culet.errors import WorkerDied

_PR_SET_PDEATHSIG = 1
_FOLDER = str(Path(__file__).resolve().parents[1])  # where this culet is imported from
# Arguments: the folder of culet, the module to run, and the module's own arguments. The folder goes last on the path, where it
# hides nothing. The package itself is loaded by its file name.
_MAIN = """
import importlib.util, os, runpy, sys
folder, module = sys.argv[1:3]
package = os.path.join(folder, "culet")
init = os.path.join(package, "__init__.py")
spec = importlib.util.spec_from_file_location("culet", init, submodule_search_locations=[package])
sys.modules["culet"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["culet"])
if folder not in sys.path:
    sys.path.append(folder)
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of Culet as a program. Start it with `child_environment`."""
    return [sys.executable, "-P", "-c", _MAIN, _FOLDER, module, *arguments]


def start_bound_process(module: str, descriptor: int, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Run a module of Culet as a program that gets `descriptor`, also as its argument. It may bind itself to this process.

    `environment` adds variables to its environment. See `end_with_parent`: for the kernel, the parent is the thread that starts
    a process, so a thread that lives as long as this process starts it.
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            python_command(module, str(descriptor)),
            env={**child_environment(), **(environment or {})},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C goes to this process, which then ends the other
        )

    return _starter().submit(start).result()


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="starter")


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if this process is stopped. Only Linux can do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_connection(connection: socket.socket) -> None:
    """End this process as soon as the other end of `connection` closes, even while a model is loading."""
    hang_up = select.poll()
    hang_up.register(connection.fileno(), 0)

    def watch() -> None:
        hang_up.poll()
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def exit_error(process: subprocess.Popen[bytes], name: str, *, is_our_doing: bool = False) -> WorkerDied:
    """Return the error that says how a process has ended. `is_our_doing` means that this process has killed it."""
    was_killed = process.returncode == -signal.SIGKILL and not is_our_doing
    killed = "it was killed, perhaps because the machine ran out of memory (see `dmesg`)"
    problem = f"{name} {process.pid} exited unexpectedly with exit code {process.returncode}"
    return WorkerDied(problem, hint=killed if was_killed else "check its log")


def child_environment() -> dict[str, str]:
    """Return the environment of a child: this process's own, without a way to import from the working directory.

    PYTHONPATH keeps its absolute entries. An empty or relative entry means the working directory or a folder near it.
    PYTHONSAFEPATH passes the protection on to Python processes that the child's libraries start.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    folders = [folder for folder in environment.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(folder)]
    if folders:
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment


def leave_working_directory() -> None:
    """Take the working directory off this program's `sys.path`, unless PYTHONPATH names it as an absolute path.

    It is there if the program was started with `python -m`, or if PYTHONPATH has an empty entry, as `$PYTHONPATH:/folder` has
    if PYTHONPATH was not set. Modules that Python itself imported before this call cannot be protected. `python -P` can.
    """
    given = os.environ.get("PYTHONPATH", "")
    folders = given.split(os.pathsep) if given and not sys.flags.ignore_environment else []
    is_module = sys.argv[:1] == ["-m"] and not sys.flags.safe_path
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        return
    if here in folders:
        return
    for _ in range(is_module + sum(os.path.abspath(folder) == here for folder in folders)):
        if here in sys.path:
            sys.path.remove(here)
