"""MTP drafters compared with the assistants of transformers, on small checkpoints with the structure of the real ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from culet.config import DraftChoice
from culet.drafters.base import open_drafter
from culet.drafters.mtp.spec import read_mtp
from culet.errors import CheckpointError, ConfigError
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from tests.matrix import matrix
from tests.models import tiny_assistants
from tests.models import tiny_checkpoints as tiny
from tests.models.draft_rig import DraftRig, choice_of, target_of

SHAPES = tiny.SHAPES
WINDOW = tiny.WINDOW
SHAPE_LATENT = [(shape, True) for shape in SHAPES] + [(shape, False) for shape in ("12B", "26B-A4B", "31B")]
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 4 * WINDOW + 6)
NUM_DRAFTS = 4


def assert_same_logits(got_KV: Tensor, want_KV: Tensor) -> None:
    """Check scored tokens to 1e-4 of the largest logit. In transformers all other tokens have smaller logits."""
    for got, want in zip(got_KV, want_KV, strict=True):
        seen = got.isfinite()
        error, size = float((got[seen] - want[seen]).abs().max()), float(want[seen].abs().max())
        assert error <= 1e-4 * size, f"max |a - b| is {error:.2e}, {error / size:.2e} of max |b|"
        if not bool(seen.all()):
            assert float(want[~seen].max()) < float(want[seen].min())


@matrix({"shape, latent": SHAPE_LATENT, "position": ["hf", "engine"]})
def test_drafts_of_a_batch(shape: str, latent: bool, position: str) -> None:
    """Rows shorter and longer than the window are drafted together, while transformers drafts them one by one."""
    prompts = [tiny.telling_prompt(shape, length) for length in LENGTHS]
    newest = [5 + 7 * row for row in range(len(prompts))]
    rig = DraftRig(shape, latent=latent, position=position)
    tokens, logits_RKV = rig.drafts(prompts, newest, NUM_DRAFTS)
    for row, token_ids in enumerate(prompts):
        want_tokens, want_KV = tiny_assistants.oracle_drafts(shape, token_ids, newest[row], NUM_DRAFTS, position)
        assert_same_logits(logits_RKV[row], want_KV)
        assert tokens[row] == want_tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", ["hf", "engine"])
def test_after_chunks(shape: str, position: str) -> None:
    """The drafter needs only the pages that the chunks of a prompt have written."""
    prompts = [tiny.telling_prompt(shape, 3 * WINDOW + 3), tiny.telling_prompt(shape, 2 * WINDOW)]
    tokens, logits_RKV = DraftRig(shape, position=position, page_tokens=12).drafts(prompts, [9, 11], 2, chunk=7)
    for row, token_ids in enumerate(prompts):
        want_tokens, want_KV = tiny_assistants.oracle_drafts(shape, token_ids, (9, 11)[row], 2, position)
        assert_same_logits(logits_RKV[row], want_KV)
        assert tokens[row] == want_tokens


def test_the_two_positions_differ() -> None:
    """The prompt is longer than the window, so that both the visible keys and the angle differ."""
    prompt = tiny.telling_prompt("31B", 4 * WINDOW)
    hf, engine = (DraftRig("31B", position=position).drafts([prompt], [9], 1)[1] for position in ("hf", "engine"))
    assert float((hf - engine).abs().max()) > 1e-2


@pytest.mark.parametrize("name", VARIANTS)
def test_published_shapes(name: str) -> None:
    """Check parameters and tensors of the five published assistants, computed from their dimensions."""
    target = read_spec(VARIANTS[name])
    is_small = name in tiny_assistants.SMALL
    layers = {layer.is_global: layer for layer in target.layers}
    config: dict[str, Any] = {
        "model_type": "gemma4_unified_assistant" if name == "12B" else "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": is_small,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": VARIANTS[name]["text_config"]
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "hidden_size": 256 if is_small else 1024,
            "intermediate_size": 2048 if is_small else 8192,
            "num_attention_heads": 4 if is_small else target.layers[0].num_heads,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "final_logit_softcapping": None,
        },
    }
    for key in ("quantization", "quantization_config", "compression_config"):
        with pytest.raises(CheckpointError, match=f"{key}: the format is MLX"):
            read_mtp(config | {key: {"bits": 4}}, target)
    spec = read_mtp(config, target)
    published = {"E2B": 77.7, "E4B": 78.5, "12B": 422.9, "26B-A4B": 419.7, "31B": 469.5}
    assert round(sum(spec.tensor_sizes().values()) / 1e6, 1) == published[name]
    sources = {"E2B": (13, 14), "E4B": (22, 23), "12B": (46, 47), "26B-A4B": (28, 29), "31B": (58, 59)}
    assert [layer.kv_source for layer in spec.decoder.layers] == [sources[name][0]] * 3 + [sources[name][1]]
    assert spec.decoder.layers[3].num_kv_heads == layers[True].num_kv_heads
    assert not any(layer.owns_kv for layer in spec.decoder.layers)
    # `random:` draws an assistant of the same shape.
    assert open_drafter(DraftChoice("mtp", "random:"), target).num_parameters() == spec.tensor_sizes()


def changed(shape: str, folder: Path, **changes: Any) -> DraftChoice:
    """Return the shape's assistant with other values in its config.json."""
    shutil.copytree(tiny_assistants.assistant_folder(shape), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    text = changes.pop("text_config", {})
    config |= changes
    config["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(config))
    return DraftChoice("mtp", str(folder))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma4"}, "model_type: got 'gemma4'"),
        ({"backbone_hidden_size": 96}, "backbone_hidden_size: got 96, but the target's hidden size is 80"),
        ({"text_config": {"vocab_size": 320}}, "vocab_size: got 320, but the target has 160"),
        ({"text_config": {"num_key_value_heads": 1}}, "sliding layers have num_kv_heads 1, but the target's have 2"),
        ({"text_config": {"head_dim": 32}}, "sliding layers have head_dim 32"),
        ({"text_config": {"sliding_window": 8}}, "sliding layers have window 8"),
        ({"text_config": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers: got 2"),
        ({"text_config": {"enable_moe_block": True}}, "enable_moe_block: got True"),
        ({"num_centroids": 21}, "num_centroids: got 21, which does not divide"),
        ({"centroid_intermediate_top_k": 40}, "centroid_intermediate_top_k: got 40"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size: got 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="drafter .*" + words.replace("(", "\\(")):
        open_drafter(changed("E4B", tmp_path / "a", **changes), target_of("E4B").spec)


def test_another_models_assistant_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the target"):
        open_drafter(choice_of("31B"), target_of("E4B").spec)
    with pytest.raises(CheckpointError, match="model_type"):
        open_drafter(DraftChoice("mtp", str(tiny.checkpoint_folder("31B"))), target_of("31B").spec)
    with pytest.raises(ConfigError, match="unknown speculative method"):
        open_drafter(DraftChoice("eagle", "x"), target_of("31B").spec)
    with pytest.raises(ConfigError, match="layers=2 is not an option, expected seed=N"):
        open_drafter(DraftChoice("mtp", "random:layers=2"), target_of("31B").spec)


def test_missing_and_strange_tensors_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_assistants.assistant_folder("E4B"), tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    spec = replace(choice_of("E4B"), model=str(folder))
    broken = {
        "1 tensor (post_projection.weight) missing": {k: v for k, v in tensors.items() if k != "post_projection.weight"},
        "1 tensor (model.extra) unexpected": tensors | {"model.extra": torch.ones(1)},
        "masked_embedding.token_ordering: I16": tensors
        | {"masked_embedding.token_ordering": tensors["masked_embedding.token_ordering"].short()},
    }
    for words, values in broken.items():
        save_file(values, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            open_drafter(spec, target_of("E4B").spec).build(target_of("E4B"), {})
        assert words in str(caught.value)
