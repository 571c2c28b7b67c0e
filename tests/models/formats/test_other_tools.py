"""Checkpoints of ModelOpt and of Google's QAT for phones, written by the formulas, and compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from culet.layers.weight.quantised.mobile import RangedMatrix, round_range
from culet.models.folder import read_config
from culet.models.quantised.config import read_quantisation
from tests.models.formats.comparing import PROMPT, assert_same_model, assert_same_values, load, logits_of
from tests.models.formats.writing import PREFIX, nvfp4_values, plain_tensors, write_folder, write_pair

# ModelOpt


def modelopt_nvfp4(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """Quantise with random codes: only the layout matters. NVIDIA leaves attention in bfloat16."""
    if "self_attn" in module:
        return None
    generator = torch.Generator().manual_seed(weight.numel())
    packed = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(weight.shape[0], weight.shape[1] // 16, generator=generator) + 0.5).to(torch.float8_e4m3fn)
    second = torch.tensor(0.02 + 0.001 * (weight.shape[0] % 7))
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.tensor(0.5)}
    return stored, nvfp4_values(packed, scale.float() * second)


def modelopt_fp8(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max().float() / 448
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    if module.endswith("k_proj"):
        stored["k_scale"] = torch.tensor(1.0)
    return stored, values.float() * scale


@pytest.mark.parametrize(("algorithm", "quantise"), [("NVFP4", modelopt_nvfp4), ("FP8", modelopt_fp8)])
def test_modelopt(algorithm: str, quantise: Any, tmp_path: Path) -> None:
    ignore = ["lm_head", "*self_attn*", "model.vision_tower*"] if algorithm == "NVFP4" else ["lm_head"]
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore}
    pair = write_pair(tmp_path, "31B", quantise, config)
    assert assert_same_model(pair.folder, pair.twin) >= 2 * 6


def test_modelopt_ignore_lists() -> None:
    """Stars stand for anything, and a name also for what is below it."""
    ignore = ["lm_head", "*self_attn*", "model.language_model.layers.1.mlp", "model.language_model.layers.2.mlp.down*"]
    found = read_quantisation({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}})
    assert found is not None
    kept = ("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj", "layers.2.mlp.down_proj")
    assert all(found.scheme_of(PREFIX + module) is None for module in kept)
    quantised = ("layers.10.mlp.up_proj", "layers.2.mlp.up_proj", "layers.12.mlp.down_proj")
    assert all(found.scheme_of(PREFIX + module) is not None for module in quantised)


def test_modelopt_with_a_file_of_its_own(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "31B", modelopt_fp8, {})
    config = json.loads((pair.folder / "config.json").read_text())
    del config["quantization_config"]
    (pair.folder / "config.json").write_text(json.dumps(config))
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (pair.folder / "hf_quant_config.json").write_text(json.dumps(described))
    assert assert_same_values(load(pair.folder), load(pair.twin)) >= 4 * 6
    read = read_quantisation(read_config(str(pair.folder)))  # for `culet plan`
    assert read is not None
    assert read.method == "modelopt"


# Google's QAT for phones


MOBILE = {
    "quant_method": "gemma",
    "num_bits": 4,
    "quantize_embeddings": True,
    "module_quant_configs": {r"\.down_proj$": {"num_bits": 2}, r"embed_tokens": {"num_bits": 8}, "o_proj": {"num_bits": 8}},
    "modules_to_not_convert": ["per_layer_model_projection"],
}


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack signed values of 2, 4 or 8 bits, the first in the lowest bits."""
    if bits == 8:
        return values.to(torch.int8)
    shifted = (values + (1 << (bits - 1))).to(torch.uint8).unflatten(-1, (-1, 8 // bits))
    return sum(shifted[..., index] << (bits * index) for index in range(8 // bits))  # type: ignore[return-value]


def rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed values, scales per row, and the weight that they stand for."""
    most = (1 << (bits - 1)) - 1
    scale = weight.float().abs().amax(1, keepdim=True) / max(most, 1)
    values = (weight.float() / scale).round().clamp(-most - 1, most)
    return pack_bits(values, bits), scale, values * scale


def write_mobile(root: Path, activation_scale: float) -> tuple[Path, Path]:
    """Write a checkpoint with its own int4 head, and a twin without: it has the head in place of the table."""
    plain, tensors = plain_tensors(root, "E2B")
    stored, twin = {}, {}
    tensors["lm_head.weight"] = tensors[PREFIX + "embed_tokens.weight"]
    for name, tensor in tensors.items():
        module, _, ending = name.rpartition(".")
        last = module.rpartition(".")[2]
        is_table = last.startswith("embed_tokens")
        bits = 8 if is_table or last == "o_proj" else 2 if last == "down_proj" else 4
        if ending != "weight" or tensor.dim() != 2 or last == "per_layer_model_projection":
            stored[name], twin[name] = tensor, tensor.float()
            continue
        packed, scale, twin[name] = rounded(tensor, bits)
        if is_table:
            stored |= {f"{module}.embedding_quantized": packed, f"{module}.embedding_scale": scale}
        else:
            scales = {f"{module}.{side}_activation_scale": torch.tensor(activation_scale) for side in ("input", "output")}
            stored |= {name: packed, f"{module}.weight_scale": scale} | scales
        if last == "k_proj":
            stored[f"{module.removesuffix('.k_proj')}.k_cache_scale"] = torch.tensor(1.0)
    folder = write_folder(root / "mobile", plain, stored, {"quantization_config": MOBILE, "tie_word_embeddings": False})
    return folder, write_folder(root / "twin", plain, twin, {})


def test_mobile_values_and_logits(tmp_path: Path) -> None:
    folder, twin = write_mobile(tmp_path, 0.0)
    model, plain = load(folder), load(twin)
    assert assert_same_values(model, plain) >= 4 * 9
    ids = torch.arange(300)
    assert torch.equal(model.embedding.embed(ids), plain.embedding.embed(ids))
    head = load_file(twin / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.head.inner.linear(torch.eye(128)).t(), head)
    # The twin has no head of its own, so its hidden states are compared through that of the model.
    plain.head = model.head
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-4)


def test_mobile_activations_are_rounded(tmp_path: Path) -> None:
    folder, twin = write_mobile(tmp_path, 0.125)
    model, plain = load(folder), load(twin)
    matrix, other = model._layers[0].mlp.down, plain._layers[0].mlp.down
    assert isinstance(matrix, RangedMatrix)
    x = torch.randn(5, other.layout.num_columns)
    scale = torch.tensor(0.125)
    assert torch.equal(matrix.linear(x), round_range(other.linear(round_range(x, scale)), scale))
    steps = matrix.linear(x) / scale
    assert torch.equal(steps, steps.round())
    assert float(round_range(torch.tensor([1e6, -1e6]), scale).abs().max()) == 128 * 0.125
    assert float(round_range(torch.tensor([0.3]), torch.tensor(0.0))) == pytest.approx(0.3)


@pytest.mark.slow
@pytest.mark.parametrize("activation_scale", [0.0, 2.0**-6])
def test_mobile_like_transformers(activation_scale: float, tmp_path: Path) -> None:
    """transformers reads the same file. With rounded activations, a step may fall to the other side."""
    from transformers import Gemma4ForConditionalGeneration

    folder, _ = write_mobile(tmp_path, activation_scale)
    reference = Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    got = logits_of(load(folder))
    if activation_scale == 0.0:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    else:
        assert torch.equal(got[0], wanted[0])
        assert float((got - wanted).abs().median()) <= activation_scale
