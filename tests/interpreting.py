"""Run tests in Triton's interpreter.

Triton chooses the interpreter when kernels are imported, so the test file is run again in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str, marked: str = "not slow") -> None:
    """Run the tests of `file` with these marks in the interpreter. Fail if any test fails or none runs."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marked, file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
