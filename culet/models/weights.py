"""Fill a model, or a drafter, from safetensors files: checked by name and shape first, then streamed tensor by tensor.

Each file is mapped, not read, and let go before the next is opened, so that the host needs room for the largest file beside
the weights themselves. Weights of the vision and audio parts are passed over by name; nothing is allocated for them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open

from culet.errors import CheckpointError
from culet.layers.linear import Placement
from culet.models.checkpoint import Checkpoint, read_json
from culet.models.gemma4 import Gemma4
from culet.models.random_weights import draw_model
from culet.models.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Longest first: a wrapped model's decoder lies deeper than a text-only one's.
_PREFIXES = ("model.language_model.", "model.")
_TOWERS = re.compile(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\.")
_TIED_HEAD = "lm_head.weight"  # stored by some tools; it is the embedding table once more
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_INTS = {"I64": 8, "I32": 4}  # only where the place is one of integers
_NUM_LISTED = 5  # names that an error spells out


@dataclass(frozen=True)
class _Stored:
    """A tensor as a file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        size = (_FLOATS | _INTS).get(self.dtype, 1)
        for length in self.shape:
            size *= length
        return size


class Fillable(Protocol):
    """A module whose parameters a checkpoint fills."""

    def placements(self) -> dict[str, Placement]: ...

    def finish(self) -> None: ...


M = TypeVar("M", bound=Fillable)


def load_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, latent: bool = True, progress: bool = True
) -> Gemma4:
    """The checkpoint's decoder with its weights on `device` in `dtype`, ready to run."""
    if checkpoint.random is not None:
        return draw_model(checkpoint.spec, checkpoint.random, dtype=dtype, device=device, latent=latent)

    def build(where: torch.device) -> Gemma4:
        return Gemma4(checkpoint.spec, dtype=dtype, device=where, latent=latent)

    def match(names: Iterable[str]) -> dict[str, str]:
        return _match_names(names, checkpoint.spec)

    return load_weights(checkpoint.folder, build, match, device=device, progress=progress)


def load_weights(
    folder: Path,
    build: Callable[[torch.device], M],
    match: Callable[[Iterable[str]], dict[str, str]],
    *,
    device: torch.device,
    progress: bool = True,
) -> M:
    """What `build` makes on `device`, filled from `folder`'s files and finished.

    `match` gives, out of the names that are stored, those to read: by the name of their place.
    """
    stored = _read_headers(folder)
    chosen = match(stored)
    # On the meta device first: a checkpoint that does not fit is refused before memory is taken for it.
    _check(folder, build(torch.device("meta")).placements(), stored, chosen)
    model = build(torch.device(device))
    _stream(model.placements(), stored, chosen, progress)
    model.finish()
    return model


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor in the folder's files, by its name there."""
    found: dict[str, _Stored] = {}
    for file in _files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (an open file is no dict)
                part = tensors.get_slice(name)
                found[name] = _Stored(file, tuple(part.get_shape()), str(part.get_dtype()))
    return found


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights: those the index names, or the single one."""
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map: expected a table of tensor names and file names")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing:
            hint = "fetch the model again: part of it did not arrive"
            raise CheckpointError(f"{folder}: {_listed(missing, 'file')} named in {INDEX_FILE} missing", hint=hint)
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    hint = f"expected {SINGLE_FILE}, or {INDEX_FILE} with the files it names"
    raise CheckpointError(f"{folder}: no weights in the folder", hint=hint)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """A mapped safetensors file; whatever is wrong with it is said under its name."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as error:
        problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "the file is damaged or did not arrive in full: fetch it again"
        raise CheckpointError(f"{file}: cannot be read: {problem}", hint=hint) from error


def _match_names(stored: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """Decoder name -> stored name, of all tensors but the known dead ones."""
    dead = {
        f"layers.{layer.index}.self_attn.{part}.weight"
        for layer in spec.layers
        if not layer.owns_kv
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    chosen: dict[str, str] = {}
    for name in stored:
        if name == _TIED_HEAD or _TOWERS.match(name):
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        local = name.removeprefix(prefix) if prefix else name
        if local in dead and prefix:
            continue
        # A name without prefix, or one that is there under two, keeps its full form and so is found to be unexpected.
        chosen[name if not prefix or local in chosen else local] = name
    return chosen


def _listed(names: list[str], noun: str) -> str:
    """`3 tensors (a, b, c)`, the first few spelled out."""
    more = ", ..." if len(names) > _NUM_LISTED else ""
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} ({', '.join(names[:_NUM_LISTED])}{more})"


def _check(folder: Path, places: dict[str, Placement], stored: dict[str, _Stored], chosen: dict[str, str]) -> None:
    """Refuse a checkpoint whose tensors are not those of the model, with a list of what is wrong."""
    problems = []
    missing = [name for name in places if name not in chosen]
    if missing:
        problems.append(f"{_listed(missing, 'tensor')} missing")
    unexpected = [chosen[name] for name in chosen if name not in places]
    if unexpected:
        problems.append(f"{_listed(unexpected, 'tensor')} unexpected")
    known = [(name, stored[chosen[name]]) for name in places if name in chosen]
    misshapen = [
        f"{chosen[name]}: {list(there.shape)}, expected {list(places[name].target.shape)}"
        for name, there in known
        if there.shape != tuple(places[name].target.shape)
    ]
    if misshapen:
        problems.append(f"{_listed(misshapen, 'tensor')} misshapen")
    strange = [
        f"{chosen[name]}: {there.dtype}"
        for name, there in known
        if there.dtype not in (_FLOATS if places[name].target.is_floating_point() else _INTS)
    ]
    if strange:
        problems.append(f"{_listed(strange, 'tensor')} of a type that is not served")
    if problems:
        hint = "config.json and the weights are of different models, or the checkpoint is quantised or not complete"
        raise CheckpointError(f"{folder}: {'; '.join(problems)}", hint=hint)


def _stream(places: dict[str, Placement], stored: dict[str, _Stored], chosen: dict[str, str], progress: bool) -> None:
    """Copy each tensor to its place, file by file."""
    by_file: dict[Path, list[str]] = {}
    for name, there in chosen.items():
        by_file.setdefault(stored[there].file, []).append(name)
    bar = _bar() if progress and sys.stderr.isatty() else None
    total = sum(stored[there].num_bytes for there in chosen.values())
    with bar or nullcontext():
        task = None if bar is None else bar.add_task("Loading weights", total=total)
        for file, names in by_file.items():
            with _open(file) as tensors:
                for name in names:
                    places[name].fill(tensors.get_tensor(chosen[name]))
                    if bar is not None and task is not None:
                        bar.advance(task, stored[chosen[name]].num_bytes)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
