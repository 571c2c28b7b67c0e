"""Find out at start what the GPUs of several ranks can do, in processes that may hang or crash without harm.

On some machines, GPUs cannot reach each other's memory, and on others reads hang or writes are slow. So `probe` runs the
kernels in a process for each rank (`probe_process.py`), and ends them if they take too long. What fails is not used.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from culet.child import child_environment, python_command
from culet.parallel.reduce.choice import Reductions, choose_reductions

LIMIT_S = 60.0  # for the start of the processes and all stages
_MODULE = "culet.parallel.reduce.probe_process"


def probe(num_ranks: int, *, has_nccl: bool, module: str = _MODULE, limit_s: float = LIMIT_S) -> Reductions:
    """Return what the first `num_ranks` GPUs can do. The first rank reports each stage as a line of JSON."""
    with tempfile.TemporaryDirectory(prefix="culet-") as folder:
        logs = [Path(folder) / f"log{index}" for index in range(num_ranks)]
        reports = Path(folder) / "reports"
        end = _run(
            [python_command(module, str(i), str(num_ranks), f"{folder}/ranks") for i in range(num_ranks)],
            reports,
            logs,
            limit_s,
        )
        lines = reports.read_bytes().splitlines()
    found = [msgspec.json.decode(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    return choose_reductions(found, end, has_nccl=has_nccl)


def _run(commands: Sequence[Sequence[str]], reports: Path, logs: Sequence[Path], limit_s: float) -> str:
    """Run a process for each rank. Return why they did not run to their end, or ""."""
    deadline = time.monotonic() + limit_s
    with ExitStack() as stack:
        processes = []
        for index, (command, log) in enumerate(zip(commands, logs, strict=True)):
            out = stack.enter_context(reports.open("wb")) if index == 0 else subprocess.DEVNULL
            errors = stack.enter_context(log.open("wb"))
            processes.append(
                subprocess.Popen(command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
            )
        try:
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"the next stage was ended, because the probe took longer than {limit_s:.0f} s"
        finally:
            for process in processes:
                process.kill()
                process.wait()
    failed = next((index for index, process in enumerate(processes) if process.returncode != 0), None)
    if failed is None:
        return ""
    message = (logs[failed].read_text(errors="replace").strip().splitlines() or ["it left no message"])[-1]
    return f"rank {failed} of the probe failed: {message}"
