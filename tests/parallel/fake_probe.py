"""Stands in for a rank of the probe. The environment says how it ends."""

from __future__ import annotations

import json
import os
import sys
import time

from culet.parallel.reduce.choice import PULL, PUSH, TORCH_OPS


def say(stage: str, seconds: float = 1e-5, problem: str = "") -> None:
    if sys.argv[1] == "0":
        print(json.dumps({"stage": stage, "seconds": seconds, "problem": problem}), flush=True)


def main() -> None:
    how = os.environ["FAKE_PROBE"]
    say("symmetric memory")
    say(PUSH, 3e-5)
    if how == "hangs":
        time.sleep(600)
    if how == "fails" and sys.argv[1] == "1":
        raise RuntimeError("no peer access")
    say(PULL, 2e-5)
    say(TORCH_OPS, 1e-4, "the two-shot sum was wrong" if how == "wrong" else "")


main()
