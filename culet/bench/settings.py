"""The settings of a benchmark run. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from culet.bench.workloads import Workload, longest
from culet.config import Config, build_config, config_fields
from culet.errors import ConfigError
from culet.models.checkpoint import open_checkpoint

# The peer's settings, among them chunks of a fixed length. The user's settings take precedence.
PEER_SETTINGS: Mapping[str, Any] = {"enable_prefix_caching": False, "max_step_ms": 0}
PEER_MAX_MODEL_LEN = 34000


def bench_config(given: Mapping[str, Any], rows: Sequence[Workload]) -> Config:
    """Make a config from the given settings, with the peer's as defaults if the model and the rows allow them."""
    settings = {**PEER_SETTINGS, **given}
    if (limit := given.get("max_model_len")) and longest(rows) > limit:
        row = max(rows, key=lambda row: longest([row]))
        problem = f"rows: {row.label} needs {longest(rows)} tokens, but --max-model-len is {limit}"
        raise ConfigError(problem, hint=f"raise it to {longest(rows)}, or omit it")
    if "max_model_len" not in settings and longest(rows):
        limit = open_checkpoint(settings["model"], settings.get("revision")).spec.max_position
        # If a row is too long for the model, the engine raises.
        settings["max_model_len"] = max(longest(rows), min(PEER_MAX_MODEL_LEN, limit))
    return build_config(settings)


def all_settings(config: Config) -> dict[str, Any]:
    """Return every setting with its value."""
    return {name: getattr(getattr(config, part), name) for name, (part, _) in config_fields().items()}
