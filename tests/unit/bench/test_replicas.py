"""benchmarks/replicas.py ends with an error if two engines are not as much faster as asked."""

from __future__ import annotations

import pytest

from benchmarks.replicas import check_ratio


def test_the_least_ratio() -> None:
    check_ratio(1.6, 1.6)
    check_ratio(0.5, None)
    with pytest.raises(SystemExit, match=r"got a ratio of 1\.59, expected at least 1\.6"):
        check_ratio(1.59, 1.6)
