"""Write a quantised copy of a plain checkpoint, in the form of compressed-tensors.

vLLM reads it too. So does transformers, but a program must register how to join experts (docs/guides/quantised-weights.md).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from culet.errors import CheckpointError, ConfigError
from culet.layers.weight.quantised.rounding import stored_parts
from culet.layers.weight.quantised.scheme import rounding_of
from culet.log import logger
from culet.models.checkpoint import Checkpoint
from culet.models.folder import CONFIG_FILE
from culet.models.quantised.config import CONFIG_KEYS, WRITTEN, read_quantisation
from culet.models.weight_files import INDEX_FILE, SINGLE_FILE, StoredTensor, listed, read_headers, shown
from culet.models.weights import PLAIN_TYPES, progress_bar

_SHARD_BYTES = 2 * 10**9  # the most that is held in memory
# Linear modules of the decoder. Everything else keeps its precision: tables, norms, the router and the towers.
_LINEAR = re.compile(
    r"(model\.language_model\.|model\.)(layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|per_layer_input_gate"
    r"|per_layer_projection)|per_layer_model_projection)\.weight"
)
_EXPERTS = re.compile(r"(model\.language_model\.|model\.)layers\.\d+\.experts\.(gate_up_proj|down_proj)")
_IGNORE = ("lm_head", "re:.*embed_tokens.*", "re:.*router.*", "re:.*vision.*", "re:.*audio.*")
_COPIED = (".json", ".jinja", ".model", ".txt")


def write_quantised(
    checkpoint: Checkpoint, target: Path, precision: str, device: torch.device, *, progress: bool = True
) -> int:
    """Write the checkpoint with its matrices in fp8 or int4 to `target`. Return the bytes of its weights."""
    if checkpoint.random is not None:
        raise ConfigError("quantize: got a model with random weights, which has no files", hint="pass a checkpoint folder")
    if read_quantisation(checkpoint.config) is not None:
        raise ConfigError(f"quantize: {shown(checkpoint.folder)} is already quantised", hint="pass the bfloat16 checkpoint")
    tensors = list(read_headers(checkpoint.folder).values())
    strange = [f"{tensor.name}: {tensor.dtype}" for tensor in tensors if tensor.dtype not in PLAIN_TYPES]
    if strange:
        problem = f"quantize: {shown(checkpoint.folder)} is already quantised: {listed(strange, 'tensor')}"
        raise ConfigError(problem, hint="pass the bfloat16 checkpoint")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"quantize: {target} already exists", hint="pass a new folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        try:
            return _write_all(checkpoint, tensors, target, precision, device, progress)
        except BaseException:  # what was written is of no use, and would be in the way of the next attempt
            for file in target.iterdir():
                file.unlink()
            raise
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from error


def _write_all(
    checkpoint: Checkpoint, tensors: list[StoredTensor], target: Path, precision: str, device: torch.device, progress: bool
) -> int:
    shards = _Shards(target)
    plain = _kept_plain(tensors, precision)
    with progress_bar("Quantising weights", sum(tensor.num_bytes for tensor in tensors), progress) as advance:
        for tensor in tensors:
            for name, value in _converted(tensor, precision, device, plain):
                shards.add(name, value)
            advance(tensor.num_bytes)
    shards.close()
    if plain:
        group = rounding_of(precision).scheme.group
        logger.info("%d matrices keep their precision, because groups of %d do not divide them", len(plain), group)
    if any(_EXPERTS.fullmatch(tensor.name) and tensor.name not in plain for tensor in tensors):
        logger.warning(
            "experts are written one by one, as vLLM reads them; transformers starts with random ones, without an error, "
            "unless a program registers how to join them: see docs/guides/quantised-weights.md"
        )
    for file in sorted(checkpoint.folder.iterdir()):
        if file.suffix in _COPIED and file.name not in (CONFIG_FILE, INDEX_FILE):
            shutil.copyfile(file, target / file.name)
    _write_config(checkpoint, target, precision, plain)
    return shards.total


def _kept_plain(tensors: list[StoredTensor], precision: str) -> list[str]:
    """Return the modules that keep their precision, because groups do not divide them. A layer's experts stay together."""
    fits = rounding_of(precision).fits
    odd = [tensor.name.removesuffix(".weight") for tensor in tensors if _is_matrix(tensor) and not fits(tensor.shape[-1])]
    layers = {name.rpartition(".")[0] for name in odd if _EXPERTS.fullmatch(name)}
    return [*odd, *(each.name for each in tensors if each.name.rpartition(".")[0] in layers and each.name not in odd)]


def _is_matrix(tensor: StoredTensor) -> bool:
    return _LINEAR.fullmatch(tensor.name) is not None or _EXPERTS.fullmatch(tensor.name) is not None


def _converted(tensor: StoredTensor, precision: str, device: torch.device, plain: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that replace a stored one."""
    module = tensor.name.removesuffix(".weight")
    if not _is_matrix(tensor) or module in plain:
        yield tensor.name, tensor.read()
    elif _EXPERTS.fullmatch(tensor.name):
        yield from _split_stack(tensor, precision, device)
    else:
        yield from _rounded(tensor, module, tensor.read().to(device), precision)


def _rounded(tensor: StoredTensor, module: str, matrix: Tensor, precision: str) -> Iterator[tuple[str, Tensor]]:
    parts = stored_parts(matrix, precision)
    if not bool(torch.isfinite(parts["weight_scale"]).all()):
        hint = "the checkpoint is damaged: download it again"
        raise CheckpointError(f"{tensor.file}: {tensor.name} has values that are NaN or infinite", hint=hint)
    for ending, value in parts.items():
        yield f"{module}.{ending}", value.cpu()


def _split_stack(tensor: StoredTensor, precision: str, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of each expert by themselves, the only form in which readers of compressed-tensors know experts."""
    stem, _, kind = tensor.name.rpartition(".")
    for expert in range(tensor.shape[0]):
        value = tensor.read(expert).to(device)
        parts = (
            {"down_proj": value} if kind == "down_proj" else dict(zip(("gate_proj", "up_proj"), value.chunk(2), strict=True))
        )
        for projection, matrix in parts.items():
            yield from _rounded(tensor, f"{stem}.{expert}.{projection}", matrix, precision)


def quantisation_config(precision: str, plain: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint. `plain` are modules that would match, but are not quantised."""
    scheme = rounding_of(precision).scheme
    weights: dict[str, Any] = {"num_bits": scheme.bits, "type": scheme.number, "strategy": scheme.scales}
    weights |= {"symmetric": not scheme.has_zero, "dynamic": False}
    if scheme.group:
        weights |= {"strategy": "group", "group_size": scheme.group}
    form = WRITTEN[scheme.number]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*_IGNORE, *plain],
        "kv_cache_scheme": None,
    }


def _write_config(checkpoint: Checkpoint, target: Path, precision: str, plain: list[str]) -> None:
    config = {key: value for key, value in checkpoint.config.items() if key not in CONFIG_KEYS}
    config["quantization_config"] = quantisation_config(precision, plain)
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Shards:
    """Collects tensors and writes a file whenever enough have come."""

    def __init__(self, folder: Path) -> None:
        self.total = 0
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, value: Tensor) -> None:
        self._pending[name] = value.contiguous()
        self._pending_bytes += value.nbytes
        if self._pending_bytes >= _SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        save_file(self._pending, self._folder / self._part(len(self._files)), metadata={"format": "pt"})
        self.total += self._pending_bytes
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _part(self, index: int) -> str:
        return f"part-{index}.safetensors"

    def close(self) -> None:
        """Write the rest, and give the files their names, which contain their number."""
        if self._pending:
            self._write()
        count = len(self._files)
        names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for index, name in enumerate(names):
            (self._folder / self._part(index)).rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            listed = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
