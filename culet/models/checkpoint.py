"""Open a checkpoint: find its folder, and read its `config.json` and sampling defaults. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from culet.config import BUILT_IN
from culet.errors import BadRequest, CheckpointError
from culet.models.embedded import embedded_folder, introduce, is_embedded
from culet.models.folder import find_folder, read_json, read_model_config
from culet.models.random_checkpoint import PREFIX, RandomDraw, read_random
from culet.models.sizes import check_size
from culet.models.spec import ModelSpec, read_spec
from culet.types import ModelDefaults, SamplingParams

GENERATION_FILE = "generation_config.json"
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Checkpoint:
    """A Gemma 4 checkpoint on disk, or one with random weights and no files (`random`)."""

    folder: Path
    config: dict[str, Any]  # the contents of config.json
    spec: ModelSpec
    defaults: ModelDefaults
    random: RandomDraw | None = None

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer. A model with random weights borrows that of the built-in model."""
        return self.folder if self.random is None else embedded_folder(BUILT_IN)


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Open `model`, a folder or a hub id. A hub id is downloaded, unless the hub is offline.

    `random:31B` is a model with the 31B's dimensions and random weights, for measurements. See `random_checkpoint.py`.
    """
    if model.startswith(PREFIX):
        config, spec, draw = read_random(model)
        return Checkpoint(Path(model), config, spec, ModelDefaults(eos_token_ids=spec.eos_token_ids), random=draw)
    folder = find_folder(model, revision)
    if is_embedded(model):
        introduce()
    config = read_model_config(folder)
    spec = read_spec(config)
    check_size(spec)
    return Checkpoint(folder=folder, config=config, spec=spec, defaults=read_defaults(folder, spec))


def read_defaults(folder: Path, spec: ModelSpec) -> ModelDefaults:
    """Read the sampling defaults in `generation_config.json`.

    Missing values default to Gemma 4's own, and missing stop tokens to those in `config.json`.
    """
    path = folder / GENERATION_FILE
    if not path.exists():
        return ModelDefaults(eos_token_ids=spec.eos_token_ids)
    values = read_json(path)
    numbers: dict[str, Any] = {name: values[name] for name in _NUMBERS if values.get(name) is not None}
    try:
        SamplingParams(**numbers)
    except BadRequest as error:
        raise CheckpointError(f"{path}: {error.message}") from error
    do_sample = values.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise CheckpointError(f"{path}: do_sample: got {do_sample!r}, expected true or false")
    if do_sample is False:
        numbers["temperature"] = 0.0
    numbers["top_k"] = max(0, numbers.get("top_k", ModelDefaults.top_k))
    suppressed = _token_ids(path, values, "suppress_tokens")
    return ModelDefaults(
        **numbers,
        eos_token_ids=_token_ids(path, values, "eos_token_id") or spec.eos_token_ids,
        # Ids beyond the vocabulary are never drawn.
        suppress_token_ids=tuple(token_id for token_id in suppressed if token_id < spec.vocab_size),
    )


def _token_ids(path: Path, values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Read one id or a list of ids. Return () if the key is absent or null."""
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"{path}: {key}: got {token_id!r}, expected a token id or a list of token ids")
    return tuple(ids)
