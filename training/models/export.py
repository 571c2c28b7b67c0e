"""Write trained modules as checkpoints: published tensor names, bfloat16 safetensors and config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from training.models.drafters import Assistant, DFlash
from training.models.model import Block, Target, blocks_of
from training.models.tower import Seer, Tower

_MULTIMODAL = "model.language_model."  # the decoder's prefix in models with towers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
Trained = Target | Assistant | DFlash | Seer


class Stored(NamedTuple):
    """A tensor of a checkpoint: a parameter times a constant."""

    name: str
    parameter: nn.Parameter
    constant: float = 1.0


# Attribute -> published name and, for gains, the constant they are multiplied by.
_MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_DFLASH_GAINS = {
    "q_gain": "self_attn.q_norm",
    "k_gain": "self_attn.k_norm",
    "input_gain": "input_layernorm",
    "pre_mlp_gain": "post_attention_layernorm",
}
_GAINS = {
    "q_gain": ("self_attn.q_norm", "q_constant"),
    "k_gain": ("self_attn.k_norm", ""),
    "input_gain": ("input_layernorm", ""),
    "post_attention_gain": ("post_attention_layernorm", "post_constant"),
    "pre_mlp_gain": ("pre_feedforward_layernorm", ""),
    "post_mlp_gain": ("post_feedforward_layernorm", "post_constant"),
}


def _block_parameters(block: Block, prefix: str) -> Iterator[Stored]:
    for name, published in _MATRICES.items():
        if hasattr(block, name):
            yield Stored(f"{prefix}{published}.weight", getattr(block, name))
    for name, (published, constant) in _GAINS.items():
        if hasattr(block, name):
            yield Stored(f"{prefix}{published}.weight", getattr(block, name), getattr(block, constant) if constant else 1.0)
    yield Stored(f"{prefix}layer_scalar", block.scalar)


def _decoder_parameters(module: Target | Assistant, prefix: str = "model.") -> Iterator[Stored]:
    yield Stored(f"{prefix}embed_tokens.weight", module.embedding)
    yield Stored(f"{prefix}norm.weight", module.final_gain, module.final_constant)
    for index, block in enumerate(blocks_of(module.blocks)):
        yield from _block_parameters(block, f"{prefix}layers.{index}.")


def _tower_parameters(tower: Tower) -> Iterator[Stored]:
    yield Stored("model.vision_tower.patch_embedder.input_proj.weight", tower.input)
    yield Stored("model.vision_tower.patch_embedder.position_embedding_table", tower.position_embedding)
    yield Stored("model.embed_vision.embedding_projection.weight", tower.project, tower.row_scale)
    for index, layer in enumerate(tower.layers):
        prefix = f"model.vision_tower.encoder.layers.{index}."
        for name, published in _MATRICES.items():
            yield Stored(f"{prefix}{published}.linear.weight", getattr(layer, name))
        for name, (published, constant) in _GAINS.items():
            factor = getattr(layer, constant) if constant else 1.0
            yield Stored(f"{prefix}{published}.weight", getattr(layer, name), factor)


def _dflash_parameters(drafter: DFlash) -> Iterator[Stored]:
    yield Stored("fc.weight", drafter.fc)
    yield Stored("hidden_norm.weight", drafter.hidden_gain)
    yield Stored("norm.weight", drafter.final_gain)
    for index, layer in enumerate(drafter.layers):
        for name, published in (_MATRICES | _DFLASH_GAINS).items():
            yield Stored(f"layers.{index}.{published}.weight", getattr(layer, name))


def stored_parameters(module: Trained) -> Iterator[Stored]:
    """Yield every tensor of the module's checkpoint with its parameter."""
    if isinstance(module, DFlash):
        yield from _dflash_parameters(module)
        return
    if isinstance(module, Seer):
        yield from _decoder_parameters(module.target, _MULTIMODAL)
        yield from _tower_parameters(module.tower)
        return
    yield from _decoder_parameters(module)
    if isinstance(module, Assistant):
        yield Stored("pre_projection.weight", module.pre)
        yield Stored("post_projection.weight", module.post)


def round_to_bfloat16(module: nn.Module) -> None:
    """Round a module's parameters to bfloat16, as in its exported weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())


def write_checkpoint(
    folder: Path, config: Mapping[str, object], module: Trained, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        name: (parameter.detach() * constant).to("cpu", dtype).contiguous()
        for name, parameter, constant in stored_parameters(module)
    }
    path = folder / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it readable only by its owner


@torch.no_grad()
def read_weights(module: Trained, folder: Path) -> None:
    """Load a checkpoint written by `write_checkpoint` into `module`. A target may be in a checkpoint with a tower."""
    tensors = load_file(str(folder / "model.safetensors"))
    if isinstance(module, Target):
        tensors = {name.replace(_MULTIMODAL, "model."): tensor for name, tensor in tensors.items()}
    for name, parameter, constant in stored_parameters(module):
        parameter.copy_(tensors[name].to(parameter.device).float() / constant)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files, the chat template and the sampling defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
