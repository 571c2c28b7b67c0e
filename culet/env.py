"""Every environment variable Culet reads, declared once.

The reference page of environment variables is generated from `VARIABLES`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default and meaning."""

    name: str
    default: str
    doc: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def is_set(self) -> bool:
        """True for any value but empty, `0`, `false` and `no`."""
        return self.get().lower() not in ("", "0", "false", "no")


LOG_LEVEL = Variable("CULET_LOG_LEVEL", "info", "Lowest level that is logged: debug, info, warning or error.")
CACHE_DIR = Variable("CULET_CACHE_DIR", "~/.cache/culet", "Folder for compiled kernels and other things that can be rebuilt.")
CHECK_PAGES = Variable(
    "CULET_CHECK_PAGES", "0", "1 checks every page index and position before a launch and raises on a bad one."
)
API_KEY = Variable(
    "CULET_API_KEY", "", "Key, or several separated by commas, that clients of `culet serve` must send; --api-key comes first."
)
OTEL_ENDPOINT = Variable(
    "OTEL_EXPORTER_OTLP_ENDPOINT", "", "Where `culet serve` sends traces (OpenTelemetry); none without it."
)
OTEL_TRACES_ENDPOINT = Variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "The same for traces alone, with the whole path.")
NO_COLOR = Variable("NO_COLOR", "", "Any value turns colour off.")
HUB_OFFLINE = Variable("HF_HUB_OFFLINE", "0", "1 keeps Culet off the network: only downloaded models are used.")

VARIABLES = (LOG_LEVEL, CACHE_DIR, CHECK_PAGES, API_KEY, OTEL_ENDPOINT, OTEL_TRACES_ENDPOINT, NO_COLOR, HUB_OFFLINE)
