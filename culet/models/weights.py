"""Fill a model or a drafter from safetensors files. Names and shapes are checked first, then tensors are read one by one.

Each file is memory-mapped and closed before the next one is opened. So the host needs memory for the largest file in addition
to the weights. Weights of the vision and audio parts are skipped by name, and nothing is allocated for them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from culet.errors import CheckpointError, ConfigError
from culet.layers.weight.byte_sizes import stored_bytes
from culet.layers.weight.placement import FLOATS, INTEGERS, Placement
from culet.layers.weight.quantised.choose import SKIPPED, StoredFormats, rounded
from culet.layers.weight.quantised.gguf import BlockSlice
from culet.layers.weight.weights import Weights
from culet.log import chose
from culet.models.checkpoint import Checkpoint
from culet.models.folder import GGUF_SUFFIX, read_json, read_model_config
from culet.models.gemma4 import Gemma4
from culet.models.quantised.config import read_quantisation, trained_file
from culet.models.quantised.gguf_file import GgufFile, read_gguf
from culet.models.random_weights import draw_model
from culet.models.spec import ModelSpec
from culet.parallel.group import RankGroup
from culet.parallel.rank import ONLY_RANK

AUTO = "auto"  # keep the precision of the checkpoint
PLAIN_TYPES = FLOATS | INTEGERS
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The longest comes first, because the decoder of a wrapped model has the longer prefix.
_PREFIXES = ("model.language_model.", "model.")
_TOWERS = re.compile(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\.")
_HEAD = "lm_head"  # stored by some tools, although it equals the embedding table
_NUM_LISTED = 5  # number of names that an error lists
_LISTED_CHARS = 100  # characters of each of them
_MAX_NAME_BYTES = 255  # of a file name, the limit of common file systems
_SCANNED = 1 << 24  # values that are checked at a time


@dataclass(frozen=True)
class _Stored:
    """The description of a tensor in a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return stored_bytes(self.dtype, self.shape)


class Fillable(Protocol):
    """A model that can be filled from a checkpoint."""

    def placements(self) -> dict[str, Placement]: ...

    def finish(self) -> None: ...


M = TypeVar("M", bound=Fillable)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    latent: bool = True,
    quantization: str = AUTO,
    progress: bool = True,
    group: RankGroup | None = None,
) -> Gemma4:
    """Load the checkpoint's decoder onto `device`, ready to run with activations in `dtype`.

    With a `quantization` of fp8 or int4, plain weights are quantised while they are loaded. With a `group` of ranks, only this
    rank's part is loaded.
    """
    if quantization != AUTO and checkpoint.random is None:
        _explain_rounding(quantization, checkpoint)
    rank = ONLY_RANK if group is None else group.rank
    weights = Weights(dtype, torch.device(device), rank, group)
    if checkpoint.random is not None:
        return draw_model(checkpoint.spec, checkpoint.random, choose_rounding(weights, quantization), latent=latent)

    def build(weights: Weights) -> Gemma4:
        return Gemma4(checkpoint.spec, weights, latent=latent)

    def match(names: Iterable[str]) -> dict[str, str]:
        return _match_names(names, checkpoint.spec)

    return load_weights(checkpoint.folder, build, match, weights, quantization=quantization, progress=progress)


def _explain_rounding(quantization: str, checkpoint: Checkpoint) -> None:
    if quantization == "fp8":
        chose("weights", "fp8", "each row of a matrix gets a scale; tables, norms and the router keep their precision")
        return
    better = trained_file(checkpoint.config)
    such_as = "" if better is None else f", such as {better}"
    chose("weights", "int4", f"rounded to nearest in groups of 32; quantisation-aware training gives better files{such_as}")


def choose_rounding(weights: Weights, quantization: str) -> Weights:
    """Return `weights` for plain values that are quantised while they are loaded, unless `quantization` is auto."""
    return weights if quantization == AUTO else replace(weights, choose_format=rounded(quantization))


def load_weights(
    folder: Path,
    build: Callable[[Weights], M],
    match: Callable[[Iterable[str]], dict[str, str]],
    weights: Weights,
    *,
    quantization: str = AUTO,
    progress: bool = True,
) -> M:
    """Build a model from `weights` with `build`, fill it from the files in `folder`, and finish it.

    `match` selects the stored names to read and returns a map of placement name -> stored name. `folder` may be a GGUF file.
    """
    stored = _read_headers(folder)
    chosen = {local: name for local, name in match(stored).items() if name.rpartition(".")[2] not in SKIPPED}
    weights = _choose_formats(folder, weights, stored, chosen, quantization)
    # Build on the meta device first, so that a checkpoint that does not match raises before memory is allocated.
    places = build(replace(weights, device=torch.device("meta"))).placements()
    _check(folder, places, stored, chosen)
    _check_scales(folder, places, stored, chosen)
    model = build(weights)
    _stream(model.placements(), stored, chosen, progress, "Loading" if quantization == AUTO else "Quantising")
    model.finish()
    return model


def _choose_formats(
    folder: Path, weights: Weights, stored: dict[str, _Stored], chosen: dict[str, str], quantization: str
) -> Weights:
    """Return `weights` with the formats that the checkpoint has, or those that its plain weights are quantised to."""
    headers = {local: stored[name] for local, name in chosen.items()}
    quantisation = read_quantisation(read_model_config(folder))
    is_plain = quantisation is None and all(header.dtype in PLAIN_TYPES for header in headers.values())
    if quantization == AUTO:
        return weights if is_plain else replace(weights, choose_format=StoredFormats(quantisation, headers, chosen))
    if not is_plain:
        problem = f"quantization: got {quantization}, but the weights of {folder} are already quantised"
        raise ConfigError(problem, hint="omit --quantization, or pass the bfloat16 checkpoint")
    return choose_rounding(weights, quantization)


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Return every tensor in the folder's files by its stored name."""
    found: dict[str, _Stored] = {}
    for file in weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (an open file is not a dict)
                header = tensors.get_slice(name)
                found[name] = _Stored(file, tuple(header.get_shape()), str(header.get_dtype()))
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: those listed in the index, or the single file."""
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map: expected an object that maps tensor names to file names")
        names = sorted(set(weight_map.values()))
        odd = [name for name in names if not name.isprintable() or not 0 < len(name.encode()) <= _MAX_NAME_BYTES]
        if odd:
            problem = f"got {_listed([ascii(name) for name in odd], 'file name')}"
            raise CheckpointError(
                f"{folder / INDEX_FILE}: weight_map: {problem}, expected printable names of 1 to {_MAX_NAME_BYTES} bytes"
            )
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map: got {_listed(outside, 'file')} outside this folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            hint = "part of the model is missing: download it again"
            raise CheckpointError(f"{folder}: cannot find {_listed(missing, 'file')} listed in {INDEX_FILE}", hint=hint)
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    blocks = sorted(folder.glob("*.gguf"))
    if len(blocks) == 1:
        return blocks
    hint = f"expected {SINGLE_FILE}, {INDEX_FILE} with the files that it lists, or one GGUF file"
    raise CheckpointError(f"{folder}: the folder has no weights", hint=hint)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a memory-mapped safetensors or GGUF file. Errors name the file."""
    if file.suffix == GGUF_SUFFIX:
        yield _Blocks(read_gguf(file))
        return
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as error:
        problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "the file is damaged or incomplete: download it again"
        raise CheckpointError(f"{file}: cannot be read: {problem}", hint=hint) from error


class _Blocks:
    """An open GGUF file, with the methods of an open safetensors file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._bytes = np.memmap(file.path, mode="r")

    def keys(self) -> list[str]:
        return list(self._file.tensors)

    def get_slice(self, name: str) -> BlockSlice:
        tensor = self._file.tensors[name]
        raw = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return BlockSlice(raw, tensor.shape, tensor.kind, tensor.values_per_block, tensor.bytes_per_block)

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[...]


def _match_names(stored: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """Return a map of decoder name -> stored name for all tensors, except those that no layer uses."""
    unused = {
        f"layers.{layer.index}.self_attn.{part}"
        for layer in spec.layers
        if not layer.owns_kv
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    chosen: dict[str, str] = {}
    for name in stored:
        if name.partition(".")[0] == _HEAD and spec.has_head:
            chosen[name] = name
            continue
        if name.partition(".")[0] == _HEAD or _TOWERS.match(name):
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        local = name.removeprefix(prefix) if prefix else name
        if local.rpartition(".")[0] in unused and prefix:
            continue
        local = local.replace(".moe.experts.", ".experts.")  # the name in early quantised files
        # A name without a prefix, or one stored under two prefixes, stays complete, so that it is reported as unexpected.
        chosen[name if not prefix or local in chosen else local] = name
    return chosen


def _listed(names: list[str], noun: str) -> str:
    """Format names as `3 tensors (a, b, c)`. A long list shows only the first few names."""
    more = ", ..." if len(names) > _NUM_LISTED else ""
    shown = [name if len(name) <= _LISTED_CHARS else f"{name[:_LISTED_CHARS]}..." for name in names[:_NUM_LISTED]]
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} ({', '.join(shown)}{more})"


def explain_not_finite(folder: Path) -> CheckpointError:
    """Return the error for a model whose logits are not finite. It names the tensors with such values, if there are any."""
    found = []
    for file in weight_files(folder):
        with _open(file) as tensors:
            names = [name for name in tensors.keys() if not _TOWERS.match(name)]  # noqa: SIM118 (an open file is not a dict)
            found += [name for name in names if not _is_finite(tensors.get_tensor(name))]
    if found:
        problem = f"{_listed(found, 'tensor')} with values that are NaN or infinite, so the model's logits are not finite"
        return CheckpointError(f"{folder}: {problem}", hint="the checkpoint is damaged: download it again")
    problem = "the model's logits are not finite, although all of its weights are"
    return CheckpointError(f"{folder}: {problem}", hint="config.json may belong to another model; or try --dtype float32")


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or all(
        bool(torch.isfinite(part.float()).all()) for part in tensor.flatten().split(_SCANNED)
    )


def _check(folder: Path, places: dict[str, Placement], stored: dict[str, _Stored], chosen: dict[str, str]) -> None:
    """Raise if the checkpoint's tensors are not those of the model. The error lists the differences."""
    problems = []
    missing = [name for name in places if name not in chosen]
    if missing:
        problems.append(f"{_listed(missing, 'tensor')} missing")
    unexpected = [chosen[name] for name in chosen if name not in places]
    if unexpected:
        problems.append(f"{_listed(unexpected, 'tensor')} unexpected")
    known = [(name, stored[chosen[name]]) for name in places if name in chosen]
    misshapen = [
        f"{chosen[name]}: {list(tensor.shape)}, expected {list(places[name].shape)}"
        for name, tensor in known
        if not places[name].fits(tensor.shape)
    ]
    if misshapen:
        problems.append(f"{_listed(misshapen, 'tensor')} with the wrong shape")
    strange = [f"{chosen[name]}: {tensor.dtype}" for name, tensor in known if tensor.dtype not in places[name].types]
    if strange:
        problems.append(f"{_listed(strange, 'tensor')} of an unsupported type")
    if problems:
        hint = "config.json and the weights belong to different models, or the checkpoint is quantised or incomplete"
        raise CheckpointError(f"{folder}: {'; '.join(problems)}", hint=hint)


def _by_file(names: Iterable[str], stored: dict[str, _Stored], chosen: dict[str, str]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name in names:
        files.setdefault(stored[chosen[name]].file, []).append(name)
    return files


def _check_scales(folder: Path, places: dict[str, Placement], stored: dict[str, _Stored], chosen: dict[str, str]) -> None:
    """Raise if a scale of quantised weights is not finite. It would spoil whole groups of weights."""
    found = []
    for file, names in _by_file((name for name in places if places[name].is_scale), stored, chosen).items():
        with _open(file) as tensors:
            found += [chosen[name] for name in names if not _is_finite(tensors.get_tensor(chosen[name]))]
    if found:
        problem = f"{_listed(found, 'scale')} with values that are NaN or infinite"
        raise CheckpointError(f"{folder}: {problem}", hint="the checkpoint is damaged: download it again")


def _stream(
    places: dict[str, Placement], stored: dict[str, _Stored], chosen: dict[str, str], progress: bool, verb: str
) -> None:
    """Copy each tensor into its placement, file by file. A rank reads only its own regions."""
    by_file = _by_file(chosen, stored, chosen)
    total = sum(stored[stored_name].num_bytes for stored_name in chosen.values())
    with progress_bar(f"{verb} weights", total, progress) as advance:
        for file, names in by_file.items():
            with _open(file) as tensors:
                for name in names:
                    places[name].fill(tensors.get_slice(chosen[name]))
                    advance(stored[chosen[name]].num_bytes)


@contextmanager
def progress_bar(words: str, total: int, is_wanted: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in a terminal. Yield the function that advances it by some bytes."""
    if not is_wanted or not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. It is read on request, whole or one matrix of a stack at a time."""

    name: str
    stored: _Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    def read(self, index: int | None = None) -> Tensor:
        with _open(self.stored.file) as tensors:
            value: Tensor = (
                tensors.get_tensor(self.name) if index is None else tensors.get_slice(self.name)[index : index + 1][0]
            )
        return value


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a checkpoint, file by file."""
    for name, stored in _read_headers(folder).items():
        yield StoredTensor(name, stored)
