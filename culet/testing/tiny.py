"""Write a small checkpoint with the structure of Gemma 4 and random weights.

    python -m culet.testing.tiny FOLDER --shape 31B

The folder gets config.json in the form of the published checkpoints, model.safetensors with the published tensor names,
tokenizer.json with Gemma 4's special tokens, and generation_config.json. The model writes noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from culet.errors import CheckpointError, CuletError, exit_code
from culet.layers.weight.weights import Weights
from culet.models.spec import LayerSpec, ModelSpec, read_spec
from culet.models.towers.spec import read_towers
from culet.models.towers.towers import Towers
from culet.registry import lookup

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Each shape has the structure of a published model, with small numbers.
_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": None,
    "sliding_window": 32,
    "max_position_embeddings": 2048,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
_SMALL = {
    "hidden_size_per_layer_input": 16,
    "use_bidirectional_attention": None,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
}
SHAPES: dict[str, dict[str, Any]] = {
    "E2B": _BASE | _SMALL | {"num_key_value_heads": 1, "use_double_wide_mlp": True},
    "E4B": _BASE | _SMALL,
    "12B": _BASE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "26B-A4B": _BASE
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "31B": _BASE | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_key_value_heads": 4},
}

_TOWERS: dict[str, dict[str, Any]] = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 256,
    },
    "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
}
_UNIFIED_TOWERS: dict[str, dict[str, Any]] = {
    "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32},
    "audio_config": {},
}

# These are Gemma 4's own ids, except for media tokens, whose real ids are outside a small vocabulary.
_FIRST_IDS: dict[int, tuple[str, ...]] = {
    0: ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
    46: ("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    98: ("<|think|>",),
    100: ("<|channel>", "<channel|>"),
    105: ("<|turn>", "<turn|>"),
    110: ("<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
}
SPECIAL_TOKENS = {first + index: name for first, names in _FIRST_IDS.items() for index, name in enumerate(names)}
SPACE_MARK = "\u2581"
_NUM_RESERVED = 120  # ids below this are special or unused; 256 bytes and the learned tokens follow

_TEXT = """
A culet is the small facet at the point of a cut gem. The stone is held to the wheel, and each facet is ground and polished
in turn: first the table, then the crown, then the pavilion, and at the very end the point. Light that enters through the
table is thrown back by the facets below, and so the stone seems to burn from within. A cutter who hurries spoils the stone.
What is the capital of France? The capital of France is Paris. What is seven times eight? Seven times eight is fifty-six.
The quick brown fox jumps over the lazy dog, while the dog is thinking about the fox. Why is the sky blue? Because the air
scatters blue light more than red light. Tell me a story about a diamond. Once upon a time there was a diamond that nobody
could cut. Many came to the mountain and went away again; then came a woman with a wheel and a great deal of patience.
def main(): print("Hello, world!") for i in range(10): total = total + i; return total. 0 1 2 3 4 5 6 7 8 9
"""


def write_checkpoint(
    folder: str | Path,
    shape: str = "31B",
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    towers: bool = False,
) -> Path:
    """Write a checkpoint of `shape` (a key of SHAPES) to `folder`. `overrides` replaces keys in its text_config.

    With `towers`, it also sees images and video, and hears if the published model does.
    """
    text_config = lookup("shape", shape, SHAPES) | dict(overrides or {})
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be created: {error.strerror}", hint="pass a writable folder") from error
    vocab_size, words = _write_tokenizer(folder, text_config.get("vocab_size"))
    config = _config(shape, text_config | {"vocab_size": vocab_size}, dtype)
    if towers:
        found = _UNIFIED_TOWERS if shape == "12B" else _TOWERS
        config |= {name: section for name, section in found.items() if name != "audio_config" or shape in ("E2B", "E4B", "12B")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(shape))
    tensors = _draw_weights(read_spec(config), words, dtype, seed) | _draw_towers(config, dtype, seed)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def _config(shape: str, text: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json in the published form, with a text_config and separate keys for the head dims of global layers."""
    unified = shape == "12B"
    dtype_name = str(dtype).removeprefix("torch.")
    text_config = {
        "model_type": "gemma4_unified_text" if unified else "gemma4_text",
        "dtype": dtype_name,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "num_hidden_layers": len(text["layer_types"]),
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size_per_layer_input": text["vocab_size"],
        **text,
    }
    if unified:  # this architecture has no per-layer embeddings, shared KV or experts
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"):
            text_config.pop(key, None)
        for key in ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"):
            text_config.pop(key, None)
    ids = {name: token_id for token_id, name in SPECIAL_TOKENS.items()}
    return {
        "architectures": ["Gemma4UnifiedForConditionalGeneration" if unified else "Gemma4ForConditionalGeneration"],
        "model_type": "gemma4_unified" if unified else "gemma4",
        "dtype": dtype_name,
        "text_config": text_config,
        "vision_config": None,
        "audio_config": None,
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
        "video_token_id": ids["<|video|>"],
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }


def _generation_config(shape: str) -> dict[str, Any]:
    """Return generation_config.json for an instruction-tuned checkpoint. The 12B also suppresses the media end tokens."""
    config: dict[str, Any] = {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": [1, 106, 50],
        "pad_token_id": 0,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
    if shape == "12B":
        config["suppress_tokens"] = [token_id for token_id, name in SPECIAL_TOKENS.items() if name in ("<image|>", "<audio|>")]
    return config


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(folder: Path, vocab_size: int | None) -> tuple[int, slice]:
    """Train a small BPE on the text above and write it in Gemma's form. Return the vocabulary size and the learned ids."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE_MARK)
    # Train on single words, so that no merge crosses a word boundary.
    words = [word for line in _TEXT.split("\n") for word in line.replace(" ", "\n ").split("\n") if word]
    learner.train_from_iterator(words, trainers.BpeTrainer(vocab_size=512, show_progress=False, special_tokens=[]))
    learned = json.loads(learner.to_str())["model"]

    pieces = [SPECIAL_TOKENS.get(token_id, f"<unused{token_id}>") for token_id in range(_NUM_RESERVED)]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    if "\n" not in pieces:
        pieces.append("\n")
    words_part = slice(_NUM_RESERVED + 256, len(pieces))
    size = vocab_size or -(-len(pieces) // 64) * 64
    if size < len(pieces):
        raise CheckpointError(f"vocab_size: got {size}, expected at least {len(pieces)}")
    pieces += [f"<unused{index}>" for index in range(len(pieces), size)]

    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    make_tokenizer(pieces, merges).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(1 << 30))
    return size, words_part


def make_tokenizer(pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """Make a BPE like Gemma's, with a mark for spaces, byte fallback and special tokens. Ids are indices into `pieces`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS.values()])
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Return tokenizer_config.json for such a tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "model_max_length": max_length,
    }


def _draw_weights(spec: ModelSpec, words: slice, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Draw every tensor of the decoder, by its published name."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(spec):
        if name.endswith(("norm.weight", "_1.weight", "_2.weight", "scale", "layer_scalar")):
            tensor = torch.rand(shape, generator=generator) + 0.5
        else:
            tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5  # preserves the magnitude of the stream
        if name.endswith("q_norm.weight"):
            tensor *= 3.0 * shape[-1] ** -0.5  # gives scores of a few units; sharper attention would amplify rounding errors
        if name == "norm.weight":
            tensor *= 4.0  # gives logits of a few units, so that the model has preferences
        if name == "embed_tokens.weight":
            tensor[: words.start] *= 0.2  # makes the model prefer printable tokens to bytes and unused ones
            tensor[words.stop :] *= 0.2
        tensors["model.language_model." + name] = tensor.to(dtype)
    return tensors


def _draw_towers(config: Mapping[str, Any], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Draw every tensor of the towers, by its published name. Norms are about 1, and bounds leave most values as they are."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    towers = Towers(read_towers(config), Weights(dtype, torch.device("cpu")))
    for name, placement in sorted(towers.placements().items()):
        if name.endswith(("_min", "_max")):
            tensor = torch.full(placement.shape, 8.0 if name.endswith("_max") else -8.0)
        elif len(placement.shape) < 2:
            tensor = torch.rand(placement.shape, generator=generator) + 0.5
        else:
            tensor = torch.randn(placement.shape, generator=generator) * placement.shape[-1] ** -0.5
        tensors[name] = tensor.to(dtype)
    return tensors


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names (without `model.language_model.`) and shapes of all tensors in a published text decoder."""
    D = spec.hidden_size
    yield "embed_tokens.weight", (spec.vocab_size, D)
    yield "norm.weight", (D,)
    if spec.ple_dim:
        yield "embed_tokens_per_layer.weight", (spec.ple_vocab_size, len(spec.layers) * spec.ple_dim)
        yield "per_layer_model_projection.weight", (len(spec.layers) * spec.ple_dim, D)
        yield "per_layer_projection_norm.weight", (spec.ple_dim,)
    for layer in spec.layers:
        for name, shape in _layer_shapes(spec, layer):
            yield f"layers.{layer.index}.{name}", shape


def _layer_shapes(spec: ModelSpec, layer: LayerSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, width = spec.hidden_size, layer.mlp_width
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    for norm in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
        yield f"{norm}.weight", (D,)
    yield "layer_scalar", (1,)
    yield "self_attn.q_proj.weight", (queries, D)
    yield "self_attn.o_proj.weight", (D, queries)
    yield "self_attn.q_norm.weight", (layer.head_dim,)
    # Published E2B and E4B files also have unused k and v weights for the layers that share KV.
    yield "self_attn.k_proj.weight", (keys, D)
    yield "self_attn.k_norm.weight", (layer.head_dim,)
    if not layer.k_eq_v:
        yield "self_attn.v_proj.weight", (keys, D)
    yield "mlp.gate_proj.weight", (width, D)
    yield "mlp.up_proj.weight", (width, D)
    yield "mlp.down_proj.weight", (D, width)
    if spec.ple_dim:
        yield "per_layer_input_gate.weight", (spec.ple_dim, D)
        yield "per_layer_projection.weight", (D, spec.ple_dim)
        yield "post_per_layer_input_norm.weight", (D,)
    if spec.moe is not None:
        moe = spec.moe
        yield "router.proj.weight", (moe.num_experts, D)
        yield "router.scale", (D,)
        yield "router.per_expert_scale", (moe.num_experts,)
        yield "experts.gate_up_proj", (moe.num_experts, 2 * moe.width, D)
        yield "experts.down_proj", (moe.num_experts, D, moe.width)
        for norm in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            yield f"{norm}.weight", (D,)


def main() -> int:
    """Write a checkpoint. Print the folder to stdout and everything else to stderr."""
    parser = argparse.ArgumentParser(prog="python -m culet.testing.tiny", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("folder", help="folder to write to; created if it does not exist")
    parser.add_argument("--shape", default="31B", help=f"structure of the model: {', '.join(SHAPES)} (default: 31B)")
    parser.add_argument("--towers", action="store_true", help="also write towers for images, video and audio")
    parser.add_argument("--seed", type=int, default=0, help="seed for the random weights (default: 0)")
    arguments = parser.parse_args()
    try:
        folder = write_checkpoint(arguments.folder, arguments.shape, seed=arguments.seed, towers=arguments.towers)
    except CuletError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    print(f"wrote a random {arguments.shape}-shaped checkpoint; it writes noise", file=sys.stderr)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
