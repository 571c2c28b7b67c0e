"""Find a model's folder on disk or on the hub, and read its JSON files. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from culet import env
from culet.errors import CheckpointError, ConfigError
from culet.models.embedded import embedded_folder, is_embedded
from culet.models.quantised.gguf_file import read_gguf
from culet.models.quantised.gguf_folder import folder_of, gguf_config

CONFIG_FILE = "config.json"
GGUF_SUFFIX = ".gguf"
_MODELOPT_FILE = "hf_quant_config.json"
# The files that serving reads. A hub repository may hold more, such as other formats or pictures.
_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_folder(model: str, revision: str | None = None) -> Path:
    """Return the folder of `model`, which is a folder, a part of the package, or a hub id.

    A hub id is downloaded, unless the hub is offline.
    """
    return _local_folder(model, revision) or _download(model, revision)


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Read the `config.json` of a folder or hub id, or the file itself. Weights are neither needed nor downloaded."""
    path = _local_path(model)
    if path is not None and path.is_file():
        return gguf_config(read_gguf(path)) if path.suffix == GGUF_SUFFIX else read_json(path)
    return read_model_config(_local_folder(model, revision) or _download(model, revision, only=(CONFIG_FILE, _MODELOPT_FILE)))


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` in a folder. Older ModelOpt checkpoints describe their quantisation in a file of its own."""
    config = read_json(folder / CONFIG_FILE)
    if config.get("quantization_config") is None and (folder / _MODELOPT_FILE).is_file():
        described = read_json(folder / _MODELOPT_FILE).get("quantization")
        if isinstance(described, dict):
            config["quantization_config"] = {"quant_method": "modelopt", **described}
    return config


def _local_path(model: str) -> Path | None:
    """Return the path that `model` names on disk, or None if it does not exist."""
    if not model:
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # an invalid file name, or no permission
        return None


def _local_folder(model: str, revision: str | None) -> Path | None:
    """Return the folder that `model` names, or None for a hub id."""
    if is_embedded(model):
        return embedded_folder(model)
    path = _local_path(model)
    if path is not None and path.is_dir():
        if revision is not None:
            raise ConfigError(f"revision: got {revision!r}, but {model} is a local folder", hint="omit the revision")
        if not (path / CONFIG_FILE).is_file():
            blocks = sorted(path.glob(f"*{GGUF_SUFFIX}"))
            hint = f"pass the file {blocks[0]}" if blocks else f"pass the folder with {CONFIG_FILE} and the .safetensors files"
            raise CheckpointError(f"{model}: the folder has no {CONFIG_FILE}", hint=hint)
        return path
    if path is not None and path.suffix == GGUF_SUFFIX:
        return folder_of(path)
    if path is not None:
        raise CheckpointError(f"{model} is a file, expected a checkpoint folder or a GGUF file", hint="pass its folder")
    if _HUB_ID.fullmatch(model) is None:
        hint = "pass an existing folder, or a model on the Hub such as google/gemma-4-E2B-it"
        raise CheckpointError(f"{model}: no such folder" if model else "no model was given", hint=hint)
    return None


def _download(model: str, revision: str | None, only: tuple[str, ...] = _FILES) -> Path:
    """Return the local folder of a hub model. Download what is missing, unless the hub is offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub import utils as hub

    is_offline = env.HUB_OFFLINE.is_set()
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=list(only), ignore_patterns=["*/*"], local_files_only=is_offline
        )
    except hub.GatedRepoError as error:
        hint = "accept the model's terms on its Hub page, then run `hf auth login`"
        raise CheckpointError(f"{model}: the Hub requires an account with access to this model", hint=hint) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{model}: the Hub has no revision {revision!r}", hint="pass a branch, tag or commit") from error
    except hub.RepositoryNotFoundError as error:
        hint = "check the name; a private model needs `hf auth login`"
        raise CheckpointError(f"{model} is neither a local folder nor a model on the Hub", hint=hint) from error
    except hub.LocalEntryNotFoundError as error:
        if is_offline:
            problem = (
                f"{model}: there is no such folder, no such model was downloaded before, and {env.HUB_OFFLINE.name} is set"
            )
        else:
            problem = f"{model}: there is no such folder, no such model was downloaded before, and the Hub cannot be reached"
        raise CheckpointError(problem, hint="pass an existing folder, or try again online") from error
    except Exception as error:
        # The network fails in many ways, each with its own exception. None of them is worth a traceback.
        raise CheckpointError(f"{model}: the download from the Hub failed: {_first_line(error)}") from error
    if not (Path(folder) / CONFIG_FILE).is_file():
        hint = "it is not a model, or only part of it was downloaded; download a GGUF file yourself, and pass its path"
        raise CheckpointError(f"{model}: the copy from the Hub has no {CONFIG_FILE}", hint=hint)
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(
            f"{path}: not valid JSON at {where}: {error.msg}", hint="download or write the file again"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or excessive numbers or nesting
        problem = "nested too deeply" if isinstance(error, RecursionError) else _first_line(error)
        raise CheckpointError(f"{path}: not valid JSON: {problem}", hint="download or write the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got {type(value).__name__}, expected a JSON object")
    return value
