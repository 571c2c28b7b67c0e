"""Every environment variable that Culet reads. The reference page is generated from `VARIABLES`."""

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
        """Return False if the variable is empty, `0`, `false` or `no`, and True otherwise."""
        return self.get().lower() not in ("", "0", "false", "no")


LOG_LEVEL = Variable("CULET_LOG_LEVEL", "info", "Lowest level to log: debug, info, warning or error.")
CACHE_DIR = Variable("CULET_CACHE_DIR", "~/.cache/culet", "Folder for compiled kernels and other files that can be rebuilt.")
CHECK_PAGES = Variable("CULET_CHECK_PAGES", "0", "Set to 1 to check every page index and position before each launch.")
API_KEY = Variable(
    "CULET_API_KEY", "", "API keys that clients of `culet serve` must send, separated by commas; --api-key takes precedence."
)
OTEL_ENDPOINT = Variable(
    "OTEL_EXPORTER_OTLP_ENDPOINT", "", "Where `culet serve` sends OpenTelemetry traces; if empty, none are sent."
)
OTEL_TRACES_ENDPOINT = Variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "The same for traces only, with the full path.")
NO_COLOR = Variable("NO_COLOR", "", "Any value turns colour off.")
HUB_OFFLINE = Variable("HF_HUB_OFFLINE", "0", "Set to 1 to stay offline: only downloaded models are used.")

VARIABLES = (LOG_LEVEL, CACHE_DIR, CHECK_PAGES, API_KEY, OTEL_ENDPOINT, OTEL_TRACES_ENDPOINT, NO_COLOR, HUB_OFFLINE)
