"""The generated reference pages match the code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_reference_pages_are_up_to_date():
    command = [sys.executable, ROOT / "scripts/make_reference.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + "run `make reference`"
