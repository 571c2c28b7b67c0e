"""Fixtures that several packages share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """The keys by which Triton tells the kernels of all launches apart. No kernel runs."""
    torch = pytest.importorskip("torch")
    launch = pytest.importorskip("culet.kernels.triton.launch")
    keys: set[tuple[object, ...]] = set()

    def note(self: Any) -> None:
        key, _ = self._key()
        assert key is not None
        keys.add(key)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch.Launch, "run", note)
    return keys
