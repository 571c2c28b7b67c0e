"""A model folder, found and understood: where its files are, what `config.json` says, and its sampling defaults. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from culet import env
from culet.errors import BadRequest, CheckpointError, ConfigError
from culet.models.embedded import embedded_folder, introduce, is_embedded
from culet.models.spec import ModelSpec, read_spec
from culet.types import ModelDefaults, SamplingParams

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# What serving reads; a hub repository may hold more, as other formats or pictures.
_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class RandomDraw:
    """How weights are drawn that no file holds; `random_weights.py` does it."""

    seed: int = 0
    kind: str = "normal"  # or "narrow", "uniform", "calm"


@dataclass(frozen=True)
class Checkpoint:
    """A Gemma 4 checkpoint on this machine's disk, or (`random`) one whose weights are drawn and which has no files."""

    folder: Path
    config: dict[str, Any]  # config.json as it is
    spec: ModelSpec
    defaults: ModelDefaults
    random: RandomDraw | None = None


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Find `model`, a folder or a hub id (then downloaded, unless the hub is offline), and read what it says.

    `random:31B` is a model of the 31B's dimensions with random weights, for measurements; see `random_checkpoint.py`.
    """
    if model.startswith("random:"):
        from culet.models.random_checkpoint import open_random

        return open_random(model)
    folder = find_folder(model, revision)
    if is_embedded(model):
        introduce()
    config = read_json(folder / CONFIG_FILE)
    spec = read_spec(config)
    return Checkpoint(folder=folder, config=config, spec=spec, defaults=read_defaults(folder, spec))


def find_folder(model: str, revision: str | None = None) -> Path:
    """The folder of `model`, which is one or names one on the hub: then downloaded, unless the hub is offline."""
    return _local_folder(model, revision) or _download(model, revision)


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """`config.json` alone, of a folder, of a hub id, or the file itself; no weights are needed or fetched."""
    path = _local_path(model)
    if path is not None and path.is_file():
        return read_json(path)
    folder = _local_folder(model, revision) or _download(model, revision, only=CONFIG_FILE)
    return read_json(folder / CONFIG_FILE)


def _local_path(model: str) -> Path | None:
    """What `model` names on this machine's disk; None where that is nothing."""
    if not model:
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name that no file can have, or a folder that may not be entered
        return None


def _local_folder(model: str, revision: str | None) -> Path | None:
    """The folder that `model` names; None where it is a hub id."""
    if is_embedded(model):
        return embedded_folder(model)
    path = _local_path(model)
    if path is not None and path.is_dir():
        if revision is not None:
            raise ConfigError(f"revision: got {revision!r}, but {model} is a local folder", hint="leave it away")
        if not (path / CONFIG_FILE).is_file():
            hint = f"name the folder that holds {CONFIG_FILE} and the .safetensors files"
            raise CheckpointError(f"{model}: the folder has no {CONFIG_FILE}", hint=hint)
        return path
    if path is not None:
        hint = "GGUF and other single-file formats are not read" if path.suffix == ".gguf" else "name the folder that it is in"
        raise CheckpointError(f"{model}: is a file, expected the folder of a checkpoint", hint=hint)
    if _HUB_ID.fullmatch(model) is None:
        hint = "name a folder that exists, or a model on the hub as google/gemma-4-E2B-it"
        raise CheckpointError(f"{model or 'no model'}: no such folder", hint=hint)
    return None


def _download(model: str, revision: str | None, only: str = "") -> Path:
    """The folder of hub model `model`: what was downloaded before, and, if the hub may be asked, what is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub import utils as hub

    is_offline = env.HUB_OFFLINE.is_set()
    patterns = [only] if only else list(_FILES)
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"], local_files_only=is_offline
        )
    except hub.GatedRepoError as error:
        hint = "accept the model's terms on its hub page, then `hf auth login`"
        raise CheckpointError(f"{model}: the hub asks for an account that may read it", hint=hint) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{model}: the hub has no revision {revision!r} of it", hint="name a branch, tag or commit"
        ) from error
    except hub.RepositoryNotFoundError as error:
        hint = "is the name right? A private model needs `hf auth login`"
        raise CheckpointError(f"{model}: neither a folder here nor a model on the hub", hint=hint) from error
    except hub.LocalEntryNotFoundError as error:
        if is_offline:
            problem = f"{model}: no such folder, not downloaded before, and {env.HUB_OFFLINE.name} keeps us from the hub"
        else:
            problem = f"{model}: no such folder, not downloaded before, and the hub cannot be reached"
        raise CheckpointError(problem, hint="name a folder that exists, or try again with the network") from error
    except Exception as error:
        # The network fails in many ways, and each brings its own exception; none of them is worth a traceback.
        raise CheckpointError(f"{model}: cannot be fetched from the hub: {_first_line(error)}") from error
    if not (Path(folder) / CONFIG_FILE).is_file():
        hint = "it is not a model, or only part of it was downloaded before"
        raise CheckpointError(f"{model}: the hub's copy has no {CONFIG_FILE}", hint=hint)
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(
            f"{path}: not valid JSON at {where}: {error.msg}", hint="fetch or write the file again"
        ) from error
    except (ValueError, RecursionError) as error:  # bytes that are no text, numbers or nestings beyond reason
        problem = "nested too deep" if isinstance(error, RecursionError) else _first_line(error)
        raise CheckpointError(f"{path}: not valid JSON: {problem}", hint="fetch or write the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got {type(value).__name__}, expected a JSON object")
    return value


def read_defaults(folder: Path, spec: ModelSpec) -> ModelDefaults:
    """Sampling defaults of `generation_config.json`; Gemma 4's own where it is silent, and `config.json`'s stop tokens."""
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
        # An id beyond the vocabulary is never drawn anyway.
        suppress_token_ids=tuple(token_id for token_id in suppressed if token_id < spec.vocab_size),
    )


def _token_ids(path: Path, values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of them, or () where the key is absent or null."""
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"{path}: {key}: got {token_id!r}, expected a token id or a list of them")
    return tuple(ids)
