"""Small random checkpoints with the structure of the five real ones, saved with transformers' `save_pretrained`.

They reveal every mistake. Norm weights, layer scalars and the router's scales are drawn from 0.5 to 1.5. q_norm is large
enough that attention is peaked, logits are large enough that the softcap bends them, and the hidden size is not a square,
so that rounding the embedding scale shows. Wrapped checkpoints have vision and audio towers, and the wrapped one with KV
sharing also has dead k/v weights, as the published files do.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Gemma4VisionConfig,
)

SHAPES = ("E2B", "E4B", "12B", "26B-A4B", "31B")
WINDOW = 16
VOCAB = 160
PEAK = 1.0  # factor on q_norm: scores spread by 4 (sliding) and 5.7 (global), and the best key gets 0.7 of the weight


def _kinds(sliding: int, repeats: int) -> list[str]:
    return ([*["sliding_attention"] * sliding, "full_attention"]) * repeats


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 80,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 10.0,
}
_SMALL = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB}
_LARGE = {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
_TEXT: dict[str, dict[str, Any]] = {
    "E2B": _BASE
    | _SMALL
    | {"num_key_value_heads": 1, "layer_types": _kinds(4, 3), "num_kv_shared_layers": 10, "use_double_wide_mlp": True},
    "E4B": _BASE | _SMALL | {"layer_types": _kinds(5, 3), "num_kv_shared_layers": 6},
    "12B": _BASE | _LARGE | {"layer_types": _kinds(2, 2), "num_global_key_value_heads": 1},
    "26B-A4B": _BASE
    | _LARGE
    | {
        "layer_types": _kinds(2, 2),
        "num_global_key_value_heads": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 24,
    },
    "31B": _BASE
    | _LARGE
    | {
        "layer_types": _kinds(2, 2),
        "num_global_key_value_heads": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size_per_layer_input": 0,
    },
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "position_embedding_size": 4,
}
_AUDIO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
# Outside the vocabulary, since no test sends media.
_MEDIA_IDS = {"image_token_id": 1000, "video_token_id": 1001, "audio_token_id": 1002}


@functools.cache
def _root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="culet-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def text_config(shape: str, **changes: Any) -> Any:
    """Return the transformers config of a shape's decoder."""
    values = _TEXT[shape] | changes
    values["num_hidden_layers"] = len(values["layer_types"])
    return (Gemma4UnifiedTextConfig if shape == "12B" else Gemma4TextConfig)(**values)


def build(shape: str, **changes: Any) -> Any:
    """Build an unsaved transformers model of a shape, with weights that reveal mistakes."""
    torch.manual_seed(1 + SHAPES.index(shape))
    text = text_config(shape, **changes)
    if shape == "12B":
        config = Gemma4UnifiedConfig(text_config=text, vision_config=None, audio_config=None, **_MEDIA_IDS)
        model = Gemma4UnifiedForConditionalGeneration(config)
    elif shape == "E4B":
        model = Gemma4ForCausalLM(text)
    else:
        audio = Gemma4AudioConfig(**_AUDIO) if shape == "E2B" else None
        config = Gemma4Config(text_config=text, vision_config=Gemma4VisionConfig(**_VISION), audio_config=audio, **_MEDIA_IDS)
        model = Gemma4ForConditionalGeneration(config)
    randomise(model)
    return model.eval()


@torch.no_grad()
def randomise(model: Any) -> None:
    """Draw every weight of the decoder so that no mistake stays hidden."""
    decoder = model.model if isinstance(model, Gemma4ForCausalLM) else model.model.language_model
    for name, weight in [*decoder.named_parameters(), *decoder.named_buffers()]:
        if name.endswith(("norm.weight", "layer_scalar", "router.scale", "per_expert_scale")) or "layernorm" in name:
            weight.uniform_(0.5, 1.5)
            if name.endswith("q_norm.weight"):
                weight.mul_(PEAK)
        elif name.endswith(("inv_freq", "embed_scale")):
            continue
        elif name == "embed_tokens.weight":
            weight.normal_(0, 3 * weight.shape[-1] ** -0.5)
        elif name == "embed_tokens_per_layer.weight":
            weight.normal_(0, decoder.config.hidden_size_per_layer_input**-0.5)
        elif name.endswith("router.proj.weight"):
            weight.normal_(0, 2)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)


@functools.cache
def checkpoint_folder(shape: str, form: str = "new", dtype: str = "float32") -> Path:
    """Return the folder of a shape's saved checkpoint.

    `form` "old" has the published config keys, "new" has per_layer_config.
    """
    folder = _root() / f"{shape}-{form}-{dtype}"
    build(shape).to(getattr(torch, dtype)).save_pretrained(folder)
    if shape == "E2B":
        add_dead_weights(folder)
    if form == "old":
        to_old_form(folder)
    return folder


def add_dead_weights(folder: Path) -> None:
    """Give KV-shared layers the unused k/v weights of the published checkpoints."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for layer in range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"]):
        size = text["head_dim"] if text["layer_types"][layer] == "sliding_attention" else 2 * text["head_dim"]
        prefix = f"model.language_model.layers.{layer}.self_attn."
        for part in ("k_proj", "v_proj"):
            tensors[f"{prefix}{part}.weight"] = torch.randn(text["num_key_value_heads"] * size, text["hidden_size"])
        tensors[f"{prefix}k_norm.weight"] = torch.rand(size)
    save_file(tensors, file, metadata={"format": "pt"})


def to_old_form(folder: Path) -> None:
    """Rewrite config.json with the keys of the published checkpoints."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    override = next(iter(text.pop("per_layer_config").values()))
    text["global_head_dim"] = override.get("head_dim", text["head_dim"])
    text["num_global_key_value_heads"] = override.get("num_key_value_heads")
    path.write_text(json.dumps(config))


@functools.cache
def oracle(shape: str, form: str = "new", dtype: str = "float32", run_dtype: str = "float32") -> Any:
    """Return transformers' model of a saved checkpoint."""
    kinds = {"E4B": Gemma4ForCausalLM, "12B": Gemma4UnifiedForConditionalGeneration}
    folder = checkpoint_folder(shape, form, dtype)
    kind = kinds.get(shape, Gemma4ForConditionalGeneration)
    return kind.from_pretrained(folder, dtype=getattr(torch, run_dtype), attn_implementation="eager").eval()


@torch.no_grad()
def oracle_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' float32 logits [T, V] of a prompt at every position."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@functools.cache
def telling_prompt(shape: str, length: int, seed: int = 0) -> list[int]:
    """Return random token ids for which the MoE model's choice of experts does not depend on float32 noise.

    When two router logits are nearly equal, two implementations that differ in the last bit may choose different experts and
    then diverge for good. That says nothing about either.
    """
    for attempt in range(100):
        token_ids = prompt(length, seed + 100 * attempt)
        if shape != "26B-A4B" or router_gap(oracle(shape), token_ids) > MIN_ROUTER_GAP:
            return token_ids
    raise AssertionError("no prompt with clear choices of experts")


MIN_ROUTER_GAP = 5e-5


def router_gap(model: Any, token_ids: list[int]) -> float:
    """Return the smallest distance between the last logit that chose an expert and the first that did not."""
    gaps: list[float] = []

    def look(module: Any, _inputs: Any, outputs: Any) -> None:
        ranked = outputs[0].log().sort(-1, descending=True).values
        top_k = module.config.top_k_experts
        gaps.append(float((ranked[:, top_k - 1] - ranked[:, top_k]).min()))

    routers = [layer.router for layer in model.model.language_model.layers]
    hooks = [router.register_forward_hook(look) for router in routers]
    oracle_logits(model, token_ids)
    for hook in hooks:
        hook.remove()
    return min(gaps)
