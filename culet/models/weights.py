"""Fill a model or a drafter from its files. Names and shapes are checked first. Then tensors are read, file by file.

The host needs memory for the reads that are under way (`read_ahead.py`) in addition to the weights. Weights of the vision and
audio parts are skipped by name, and nothing is allocated for them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from culet.errors import CheckpointError, ConfigError
from culet.layers.weight.placement import FLOATS, INTEGERS, Placement
from culet.layers.weight.quantised.choose import SKIPPED, StoredFormats, rounded, with_rounded_head
from culet.layers.weight.quantised.scheme import HeadRounding, rounding_of
from culet.layers.weight.weights import Weights
from culet.log import chose
from culet.models.checkpoint import Checkpoint
from culet.models.folder import read_model_config
from culet.models.gemma4 import Gemma4
from culet.models.quantised.config import read_quantisation, trained_file
from culet.models.quantised.finite import find_not_finite
from culet.models.quantised.head import AUTO, already_quantised, head_rounding
from culet.models.random_weights import draw_model
from culet.models.read_ahead import plan_reads, run_reads
from culet.models.spec import ModelSpec
from culet.models.weight_files import StoredTensor, listed, read_headers, shown
from culet.parallel.group import RankGroup
from culet.parallel.progress import mark_progress
from culet.parallel.rank import ONLY_RANK

PLAIN_TYPES = FLOATS | INTEGERS
# The longest comes first, because the decoder of a wrapped model has the longer prefix.
_PREFIXES = ("model.language_model.", "model.")
_TOWERS = re.compile(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\.")
_HEAD = "lm_head"  # stored by some tools, although it equals the embedding table


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
    head_quantization: str = AUTO,
    progress: bool = True,
    group: RankGroup | None = None,
) -> Gemma4:
    """Load the checkpoint's decoder onto `device`, ready to run with activations in `dtype`.

    With a `quantization` of fp8 or int4, plain weights are quantised while they are loaded, and so is the head with such a
    `head_quantization`. With a `group` of ranks, only this rank's part is loaded.
    """
    head = head_rounding(checkpoint.spec, head_quantization)
    if checkpoint.random is None:
        _explain_rounding(quantization, head, checkpoint)
    rank = ONLY_RANK if group is None else group.rank
    weights = Weights(dtype, torch.device(device), rank, group)
    if checkpoint.random is not None:
        weights = choose_rounding(weights, quantization)
        weights = weights if head is None else _round_head(weights, head, (), "the model")
        return draw_model(checkpoint.spec, checkpoint.random, weights, latent=latent)

    def build(weights: Weights) -> Gemma4:
        return Gemma4(checkpoint.spec, weights, latent=latent)

    def match(names: Iterable[str]) -> dict[str, str]:
        return _match_names(names, checkpoint.spec)

    return load_weights(checkpoint.folder, build, match, weights, quantization=quantization, head=head, progress=progress)


def _explain_rounding(quantization: str, head: HeadRounding | None, checkpoint: Checkpoint) -> None:
    if quantization != AUTO:
        rounding = rounding_of(quantization)
        better = trained_file(checkpoint.config) if rounding.has_better_files else None
        such_as = "" if better is None else f", such as {better}"
        chose("weights", quantization, f"{rounding.words}{such_as}")
    if head is not None:
        chose("head", head.precision, rounding_of(head.precision).head_cost)


def choose_rounding(weights: Weights, quantization: str) -> Weights:
    """Return `weights` for plain values that are quantised while they are loaded, unless `quantization` is auto."""
    return weights if quantization == AUTO else replace(weights, choose_format=rounded(quantization))


def _round_head(weights: Weights, head: HeadRounding, stored_types: Collection[str], name: object) -> Weights:
    """Return `weights` that quantise the head while it is loaded. Errors call the checkpoint `name`."""
    choose_format = with_rounded_head(weights.choose_format, head, stored_types)
    if choose_format is None:
        raise already_quantised(head.precision, name)
    return replace(weights, choose_format=choose_format)


@dataclass(frozen=True)
class CheckedFiles(Generic[M]):
    """Files that were checked against their model. Nothing is on the device yet."""

    stored: dict[str, StoredTensor]
    chosen: dict[str, str]  # placement name -> stored name
    weights: Weights  # with the formats of the files, or those that plain weights are quantised to
    model: M  # on the meta device


def check_weights(
    folder: Path,
    build: Callable[[Weights], M],
    match: Callable[[Iterable[str]], dict[str, str]],
    weights: Weights,
    *,
    quantization: str = AUTO,
    head: HeadRounding | None = None,
) -> CheckedFiles[M]:
    """Raise unless the files in `folder` are those of the model that `build` makes from `weights`. The device is not used.

    `match` selects the stored names to read and returns a map of placement name -> stored name. `folder` may be a GGUF file.
    """
    stored = read_headers(folder)
    chosen = {local: name for local, name in match(stored).items() if name.rpartition(".")[2] not in SKIPPED}
    weights = _choose_formats(folder, weights, stored, chosen, quantization)
    if head is not None:
        stored_types = {stored[name].dtype for local, name in chosen.items() if local.rpartition(".")[0] == head.name}
        weights = _round_head(weights, head, stored_types, shown(folder))
    model = build(replace(weights, device=torch.device("meta")))
    places = model.placements()
    _check(folder, places, stored, chosen)
    _check_scales(folder, places, stored, chosen)
    return CheckedFiles(stored, chosen, weights, model)


def load_weights(
    folder: Path,
    build: Callable[[Weights], M],
    match: Callable[[Iterable[str]], dict[str, str]],
    weights: Weights,
    *,
    quantization: str = AUTO,
    head: HeadRounding | None = None,
    progress: bool = True,
) -> M:
    """Check the files in `folder`, build a model from `weights` with `build`, fill it from the files, and finish it."""
    files = check_weights(folder, build, match, weights, quantization=quantization, head=head)
    model = build(files.weights)
    words = "Loading weights" if quantization == AUTO and head is None else "Quantising weights"
    _fill(model.placements(), files.stored, files.chosen, weights.device, words=words, progress=progress)
    model.finish()
    return model


def _choose_formats(
    folder: Path, weights: Weights, stored: dict[str, StoredTensor], chosen: dict[str, str], quantization: str
) -> Weights:
    """Return `weights` with the formats that the checkpoint has, or those that its plain weights are quantised to."""
    headers = {local: stored[name] for local, name in chosen.items()}
    quantisation = read_quantisation(read_model_config(folder))
    is_plain = quantisation is None and all(header.dtype in PLAIN_TYPES for header in headers.values())
    if quantization == AUTO:
        return weights if is_plain else replace(weights, choose_format=StoredFormats(quantisation, headers, chosen))
    if not is_plain:
        problem = f"quantization: got {quantization}, but the weights of {shown(folder)} are already quantised"
        raise ConfigError(problem, hint="omit this setting, or pass the bfloat16 checkpoint")
    return choose_rounding(weights, quantization)


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


def explain_not_finite(folder: Path) -> CheckpointError:
    """Return the error for a model whose logits are not finite. It names the tensors with such values, if there are any."""
    found = find_not_finite(tensor for name, tensor in read_headers(folder).items() if not _TOWERS.match(name))
    if found:
        problem = f"{listed(found, 'tensor')} with values that are NaN or infinite, so the model's logits are not finite"
        return CheckpointError(f"{shown(folder)}: {problem}", hint="the checkpoint is damaged: download it again")
    problem = "the model's logits are not finite, although all of its weights are"
    return CheckpointError(
        f"{shown(folder)}: {problem}", hint="config.json may belong to another model; or try --dtype float32"
    )


def _check(folder: Path, places: dict[str, Placement], stored: dict[str, StoredTensor], chosen: dict[str, str]) -> None:
    """Raise if the checkpoint's tensors are not those of the model. The error lists the differences."""
    problems = []
    missing = [name for name in places if name not in chosen]
    if missing:
        problems.append(f"{listed(missing, 'tensor')} missing")
    unexpected = [chosen[name] for name in chosen if name not in places]
    if unexpected:
        problems.append(f"{listed(unexpected, 'tensor')} unexpected")
    known = [(name, stored[chosen[name]]) for name in places if name in chosen]
    misshapen = [
        f"{chosen[name]}: {list(tensor.shape)}, expected {list(places[name].shape)}"
        for name, tensor in known
        if not places[name].fits(tensor.shape)
    ]
    if misshapen:
        problems.append(f"{listed(misshapen, 'tensor')} with the wrong shape")
    strange = [f"{chosen[name]}: {tensor.dtype}" for name, tensor in known if tensor.dtype not in places[name].types]
    if strange:
        problems.append(f"{listed(strange, 'tensor')} of an unsupported type")
    if problems:
        hint = "config.json and the weights belong to different models, or the checkpoint is quantised or incomplete"
        raise CheckpointError(f"{shown(folder)}: {'; '.join(problems)}", hint=hint)


def _by_file(names: Iterable[str], stored: dict[str, StoredTensor], chosen: dict[str, str]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name in names:
        files.setdefault(stored[chosen[name]].file, []).append(name)
    return files


def _check_scales(folder: Path, places: dict[str, Placement], stored: dict[str, StoredTensor], chosen: dict[str, str]) -> None:
    """Raise if a scale of quantised weights is not finite. It would spoil whole groups of weights."""
    names = [name for name in places if places[name].has_scales]
    divisors = frozenset(chosen[name] for name in names if places[name].is_divisor)
    found = find_not_finite((stored[chosen[name]] for name in names), divisors)
    if found:
        zero = ", or 0 although they divide" if divisors.intersection(found) else ""
        problem = f"{listed(found, 'tensor')} with scales that are NaN or infinite{zero}"
        raise CheckpointError(f"{shown(folder)}: {problem}", hint="the checkpoint is damaged: download it again")


def _fill(
    places: dict[str, Placement],
    stored: dict[str, StoredTensor],
    chosen: dict[str, str],
    device: torch.device,
    *,
    words: str,
    progress: bool,
) -> None:
    """Copy each tensor into its placement, file by file. A rank reads only its own regions."""
    names = [name for names in _by_file(chosen, stored, chosen).values() for name in names]
    reads = [read for name in names for read in plan_reads(stored[chosen[name]], places[name])]
    with progress_bar(words, sum(read.num_bytes for read in reads), progress) as advance:
        for read in run_reads(reads, device):
            advance(read.num_bytes)
            mark_progress()


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
