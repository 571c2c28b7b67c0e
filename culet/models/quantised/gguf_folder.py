"""Make a checkpoint folder for a GGUF file: config.json, tokenizer.json and the chat template from its metadata. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from culet import env
from culet.errors import CheckpointError
from culet.layers.weight.quantised.block_types import BITS
from culet.layers.weight.quantised.scheme import GGUF
from culet.models.quantised.gguf_file import GgufFile, read_gguf
from culet.version import __version__

GGUF_FILE = "model.gguf"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are matched as a whole
_SPACE = "\u2581"
_MAX_SIZE, _MAX_LAYERS = (1 << 31) - 1, 1 << 12
_OWN_TOKENIZER = "put the tokenizer.json of the model next to the file"
_TABLE, _PER_LAYER_TABLE = "model.embed_tokens", "model.embed_tokens_per_layer"
_UNROTATED = 1e29  # rope factors of dims that are not rotated are above this


def folder_of(path: Path) -> Path:
    """Return a folder under CULET_CACHE_DIR that stands for the file. Its tokenizer is the one next to the file, if any."""
    found = path.resolve()
    facts = found.stat()
    neighbour = found.parent / "tokenizer.json"
    changed = neighbour.stat().st_mtime_ns if neighbour.is_file() else 0
    key = f"{__version__} {found} {facts.st_size} {facts.st_mtime_ns} {changed}"
    folder = Path(env.CACHE_DIR.get()).expanduser() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if (folder / "config.json").is_file():
        return folder
    file = read_gguf(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / GGUF_FILE
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        if neighbour.is_file():
            (folder / "tokenizer.json").write_bytes(neighbour.read_bytes())
        else:
            _write_tokenizer(file, folder / "tokenizer.json")
        _write_json(folder / "generation_config.json", _generation_config(file))
        template = file.metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        _write_json(folder / "config.json", gguf_config(file))  # last, since it marks the folder as complete
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}", hint="set CULET_CACHE_DIR") from error
    return folder


def _write_json(path: Path, content: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content, indent=2), encoding="utf-8")
    part.rename(path)


def _bad(file: GgufFile, problem: str, hint: str = "convert the model again with a current llama.cpp") -> CheckpointError:
    return CheckpointError(f"{file.path}: {problem}", hint=hint)


def _value(file: GgufFile, key: str, default: Any = None) -> Any:
    value = file.value(key, default)
    if value is None:
        raise _bad(file, f"the metadata has no gemma4.{key}")
    return value


def _check_whole(file: GgufFile, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_SIZE:
        raise _bad(file, f"gemma4.{key}: got {str(value)[:80]}, expected a whole number of at most {_MAX_SIZE}")
    return value


def _whole(file: GgufFile, key: str, default: int | None = None) -> int:
    return _check_whole(file, key, _value(file, key, default))


def _real(file: GgufFile, key: str, default: float | None = None) -> float:
    value = _value(file, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(file, f"gemma4.{key}: got {str(value)[:80]}, expected a number")
    return value


def _per_layer(file: GgufFile, key: str, num_layers: int) -> list[int]:
    """Return a whole number for each layer. The file has one for all, or a list."""
    value = _value(file, key)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers:
        raise _bad(file, f"gemma4.{key} has {len(values)} entries, expected {num_layers}")
    return [_check_whole(file, key, each) for each in values]


def _sliding_layers(file: GgufFile, num_layers: int) -> list[bool]:
    """Return whether each layer's attention is sliding. Every model has layers of both kinds."""
    key = "attention.sliding_window_pattern"
    values = _value(file, key)
    if not isinstance(values, list) or len(values) != num_layers or set(values) != {True, False}:
        got = f"{len(values)} entries" if isinstance(values, list) else str(values)[:80]
        raise _bad(file, f"gemma4.{key}: got {got}, expected true or false for each of {num_layers} layers, and both of them")
    return values


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of the text decoder."""
    num_layers = _whole(file, "block_count")
    if not 0 < num_layers <= _MAX_LAYERS:
        raise _bad(file, f"gemma4.block_count: got {num_layers}, expected 1 to {_MAX_LAYERS}")
    is_sliding = _sliding_layers(file, num_layers)
    kv_heads = _per_layer(file, "attention.head_count_kv", num_layers)
    widths = _per_layer(file, "feed_forward_length", num_layers)
    num_shared = _whole(file, "attention.shared_kv_layers", 0)
    first_global, first_sliding = is_sliding.index(False), is_sliding.index(True)
    ple_dim = _whole(file, "embedding_length_per_layer_input", 0)
    table = file.tensors.get(f"{_TABLE}.weight")
    if table is None:
        raise _bad(file, "token_embd.weight is missing")
    k_eq_v = f"model.layers.{first_global}.self_attn.v_proj.weight" not in file.tensors
    head_dim = _whole(file, "attention.key_length")
    config: dict[str, Any] = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": table.shape[0],
        "vocab_size_per_layer_input": table.shape[0],
        "hidden_size": _whole(file, "embedding_length"),
        "intermediate_size": widths[0],
        "num_hidden_layers": num_layers,
        "num_attention_heads": _per_layer(file, "attention.head_count", num_layers)[0],
        "num_key_value_heads": kv_heads[first_sliding],
        "num_global_key_value_heads": kv_heads[first_global] if k_eq_v else None,
        "head_dim": _whole(file, "attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "attention_k_eq_v": k_eq_v,
        "sliding_window": _whole(file, "attention.sliding_window"),
        "max_position_embeddings": _whole(file, "context_length"),
        "layer_types": [_SLIDING if each else _FULL for each in is_sliding],
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": ple_dim,
        "rms_norm_eps": float(f"{_real(file, 'attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "final_logit_softcapping": file.value("final_logit_softcapping"),
        # The file does not say which layers let image tokens see a whole image. Only models without per-layer embeddings do.
        "use_bidirectional_attention": None if ple_dim else "vision",
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": _real(file, "rope.freq_base"),
                "partial_rotary_factor": _rotated_share(file, head_dim),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": _real(file, "rope.freq_base_swa", 10000.0)},
        },
        "eos_token_id": _end_tokens(file)[0],
        "tie_word_embeddings": True,
    }
    config["quantization_config"] = _quantisation(file)
    if num_experts := _whole(file, "expert_count", 0):
        config |= {
            "enable_moe_block": True,
            "num_experts": num_experts,
            "top_k_experts": _whole(file, "expert_used_count"),
            "moe_intermediate_size": _whole(file, "expert_feed_forward_length"),
        }
    return config


def _quantisation(file: GgufFile) -> dict[str, Any]:
    """Return the bits of each module that is not plain, under the name that other quantised checkpoints give it."""
    modules = {_module_of(name): BITS[tensor.kind] for name, tensor in file.tensors.items() if tensor.kind in BITS}
    return {
        "quant_method": GGUF,
        "module_bits": {name: bits for name, bits in modules.items() if name not in (_TABLE, _PER_LAYER_TABLE)},
        "table_bits": _bits_of(file, f"{_TABLE}.weight"),
        "per_layer_table_bits": _bits_of(file, f"{_PER_LAYER_TABLE}.weight"),
    }


def _module_of(tensor: str) -> str:
    """Return the name of a tensor's module. The first expert stands for all experts of a layer, which are one tensor here."""
    stem, _, last = tensor.rpartition(".")
    projection = {"gate_up_proj": "gate_proj", "down_proj": "down_proj"}.get(last)
    return stem if projection is None else f"{stem}.0.{projection}"


def _bits_of(file: GgufFile, name: str) -> int:
    """Return the bits of a tensor's values in memory, or 16 if it is plain."""
    tensor = file.tensors.get(name)
    return 16 if tensor is None else BITS.get(tensor.kind, 16)


def _rotated_share(file: GgufFile, head_dim: int) -> float:
    """Return the share of a global head's dims that rope rotates: those whose factor is not huge."""
    factors = file.rope_factors
    if factors is None:
        return 0.25
    offset, size = factors
    if size != head_dim // 2:
        raise _bad(file, f"rope_freqs has {size} factors, expected {head_dim // 2}")
    with file.path.open("rb") as stream:
        stream.seek(offset)
        values = struct.unpack(f"<{size}f", stream.read(4 * size))
    return sum(value < _UNROTATED for value in values) / size


def _end_tokens(file: GgufFile) -> list[int]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    found = [file.metadata[name] for name in names if isinstance(file.metadata.get(name), int)]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    found += [tokens.index(name) for name in ("<turn|>", "<|tool_response>") if name in tokens]
    return list(dict.fromkeys(found)) or [1]


def _generation_config(file: GgufFile) -> dict[str, Any]:
    return {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": _end_tokens(file)}


def _write_tokenizer(file: GgufFile, path: Path) -> None:
    """Write the file's vocabulary as tokenizer.json: a BPE with a mark for spaces and bytes for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens, merges, kinds = (_list_of(file, key, kind) for key, kind in (("tokens", str), ("merges", str), ("token_type", int)))
    if not tokens or not merges or len(kinds) != len(tokens):
        raise _bad(file, "the file has no complete tokenizer", _OWN_TOKENIZER)
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise _bad(file, "the merges of its tokenizer are not pairs", _OWN_TOKENIZER)
    unknown = "<unk>" if "<unk>" in vocab else None
    try:
        bpe = models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # the library raises bare Exception for any bad merge
        raise _bad(file, f"the tokenizer cannot be read: {error}", _OWN_TOKENIZER) from error
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    whole = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    # Tokens with markup such as <|channel> are special here, although llama.cpp shows them.
    special = [AddedToken(token, normalized=False, special=kind == _CONTROL or _is_markup(token)) for token, kind in whole]
    tokenizer.add_tokens([token for token in special if not token.special])
    tokenizer.add_special_tokens([token for token in special if token.special])
    tokenizer.save(str(path))


def _list_of(file: GgufFile, key: str, kind: type) -> list[Any]:
    """Return a list of the tokenizer, or [] if it is missing or has values of another type."""
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    return values if isinstance(values, list) and all(isinstance(value, kind) for value in values) else []


def _is_markup(token: str) -> bool:
    return token.startswith("<") and token.endswith(">") and "|" in token
