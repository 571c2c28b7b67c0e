"""Write quantised checkpoints with the packages that own the formats, together with plain twins of the same values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from culet.testing.tiny import write_checkpoint

PREFIX = "model.language_model."
# Widths that groups of 128 divide. Global heads of 256 move their rotated columns in runs of 32, as groups of 32 need.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 256}
SHAPES: dict[str, dict[str, Any]] = {
    "E2B": WIDE | {"hidden_size_per_layer_input": 32},
    "31B": WIDE | {"num_attention_heads": 8},
    "26B-A4B": WIDE | {"num_attention_heads": 4, "moe_intermediate_size": 128},
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "per_layer_input_gate")
LINEARS += ("per_layer_projection", "per_layer_model_projection")

# Returns the tensors that replace `weight`, by ending, and the weight that they stand for.
Quantise = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]


@dataclass(frozen=True)
class Pair:
    """A quantised checkpoint, its plain twin in float32, and the weights that the format's owner reads from it."""

    folder: Path
    twin: Path
    values: dict[str, Tensor]


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a module per expert, as quantised files have them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, (gate, up) in enumerate(chunk.chunk(2) for chunk in tensor):
                found |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{stem}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def join_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the experts of a layer in one, as plain files have them."""
    found, stacks = {}, {}
    for name, tensor in tensors.items():
        stem, _, rest = name.partition(".experts.")
        if rest:
            expert, projection, _ = rest.split(".")
            stacks.setdefault(f"{stem}.experts", {})[int(expert), projection] = tensor
        else:
            found[name] = tensor
    for stem, parts in stacks.items():
        count = 1 + max(expert for expert, _ in parts)
        both = [torch.cat((parts[expert, "gate_proj"], parts[expert, "up_proj"])) for expert in range(count)]
        found[f"{stem}.gate_up_proj"] = torch.stack(both)
        found[f"{stem}.down_proj"] = torch.stack([parts[expert, "down_proj"] for expert in range(count)])
    return found


def plain_tensors(root: Path, shape: str, seed: int = 0) -> tuple[Path, dict[str, Tensor]]:
    """Write a plain checkpoint. Return its folder and its tensors."""
    folder = write_checkpoint(root / "plain", shape, overrides=SHAPES[shape], seed=seed)
    return folder, load_file(folder / "model.safetensors")


def write_folder(target: Path, plain: Path, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Path:
    """Write tensors as a checkpoint with the other files of `plain`, and with `extra` keys in its config."""
    target.mkdir(parents=True, exist_ok=True)
    for file in plain.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    (target / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text()) | extra))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def write_pair(root: Path, shape: str, quantise: Quantise, config: dict[str, Any], *, seed: int = 0) -> Pair:
    """Write a checkpoint whose linear modules are quantised by `quantise`, and its twin."""
    plain, tensors = plain_tensors(root, shape, seed)
    stored, twin, values = {}, {}, {}
    for name, tensor in split_experts(tensors).items():
        module, _, ending = name.rpartition(".")
        is_linear = ending == "weight" and module.rpartition(".")[2] in LINEARS
        result = quantise(module, tensor) if is_linear else None
        if result is None:
            stored[name], twin[name] = tensor, tensor.float()
        else:
            parts, value = result
            stored |= {f"{module}.{part}": each for part, each in parts.items()}
            twin[name], values[module.removeprefix(PREFIX)] = value.float(), value
    folder = write_folder(root / "quantised", plain, stored, {"quantization_config": config})
    return Pair(folder, write_folder(root / "twin", plain, join_experts(twin), {}), values)


# compressed-tensors


def scheme_of(weights: dict[str, Any], form: str, activations: dict[str, Any] | None = None) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    inputs = None if activations is None else QuantizationArgs(**activations)
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs, format=form)


def compressed(weights: dict[str, Any], form: str) -> Quantise:
    """Quantise with compressed-tensors: its observer's scales, its packing, and its own decompression."""
    from compressed_tensors.compressors import BaseCompressor

    scheme = scheme_of(weights, form)
    compressor = BaseCompressor.load_from_registry(form)

    def quantise(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if weight.shape[1] % (weights.get("group_size") or 1):
            return None
        state = {"weight": weight.clone(), **qparams(weight, scheme.weights)}
        stored = dict(compressor.compress(dict(state), scheme))
        if form == "nvfp4-pack-quantized":  # the package rounds the scale to bfloat16, so the formula is the reference
            return stored, nvfp4_values(stored["weight_packed"], stored["weight_scale"].float() / stored["weight_global_scale"])
        wide = stored | {"weight_scale": stored["weight_scale"].float()}
        value = compressor.decompress(dict(wide), scheme)["weight"]
        rounded = compressor.decompress(dict(stored), scheme)["weight"]
        assert torch.equal(value.to(rounded.dtype), rounded), "the package's own result is the rounded one"
        return stored, value

    return quantise


def nvfp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """Dequantise e2m1 by its definition: sign, two bits of exponent and one of mantissa, even columns in the low nibble.

    `scale` is that of each group, with the global scale.
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    exponent, mantissa = codes >> 1 & 3, (codes & 1).float()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return torch.where(codes > 7, -size, size) * scale.repeat_interleave(16, 1)


def qparams(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Return the scales and zero points of minimum and maximum."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "block":
        rows, columns = (-(-size // 128) for size in weight.shape)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        grouped = padded.view(rows, 128, columns, 128).transpose(1, 2).flatten(2)
    elif strategy in ("group", "tensor_group"):
        grouped = weight.unflatten(-1, (-1, args.group_size))
    else:
        grouped = weight[:, None] if strategy == "channel" else weight.flatten()[None, None]
    low, high = grouped.amin(-1), grouped.amax(-1)
    extra: dict[str, Tensor] = {}
    if strategy == "tensor_group":
        extra["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).reshape(1).float()
        scale, zero = calculate_qparams(low, high, args, global_scale=extra["weight_global_scale"])
    else:
        scale, zero = calculate_qparams(low, high, args)
    if strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return {"weight_scale": scale if strategy == "tensor_group" else scale.to(weight.dtype), "weight_zero_point": zero} | extra


def ct_config(*groups: tuple[list[str], dict[str, Any], str], ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """Return a quantization_config with groups of (targets, weights, format)."""
    return {
        "quant_method": "compressed-tensors",
        "format": groups[0][2] if len({form for *_, form in groups}) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {"targets": targets, "weights": weights, "input_activations": None, "format": form}
            for index, (targets, weights, form) in enumerate(groups)
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
