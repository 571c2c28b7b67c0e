"""The settings that a benchmark runs with. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from culet.bench.workloads import Workload, longest
from culet.config import Config, build_config, config_fields
from culet.models.checkpoint import open_checkpoint

# As the peer ran; what the user gives comes first.
PEER_SETTINGS: Mapping[str, Any] = {"enable_prefix_caching": False}
PEER_MAX_MODEL_LEN = 34000


def bench_config(given: Mapping[str, Any], rows: Sequence[Workload]) -> Config:
    """The settings to measure with: those given, and the peer's for the rest, as far as model and rows allow."""
    settings = {**PEER_SETTINGS, **given}
    if "max_model_len" not in settings and longest(rows):
        limit = open_checkpoint(settings["model"], settings.get("revision")).spec.max_position
        # Rows beyond the model's reach are left for the engine to refuse in its own words.
        settings["max_model_len"] = max(longest(rows), min(PEER_MAX_MODEL_LEN, limit))
    return build_config(settings)


def all_settings(config: Config) -> dict[str, Any]:
    """Every setting, given or not."""
    return {name: getattr(getattr(config, part), name) for name, (part, _) in config_fields().items()}


def given_settings(config: Config) -> dict[str, Any]:
    """What was given, as `build_config` takes it."""
    return {name: value for name, value in all_settings(config).items() if name in config.given}
