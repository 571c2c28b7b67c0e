"""Culet as a Ray Serve application: web front ends without torch are the ingress, and engines are the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any] | None = None) -> Any:
    """Return the application for `serve run` and `serve deploy`. The guide on replicas lists the arguments."""
    from culet.serve.ray.app import build

    return build(args or {})
