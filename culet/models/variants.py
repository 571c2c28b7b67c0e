"""The `config.json` of the five Gemma 4 models in the published form, so that `culet plan` needs no download."""

from __future__ import annotations

from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"

_VISION_SMALL: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "use_clipped_linears": True,
    "standardize": False,
}
_VISION_LARGE: dict[str, Any] = _VISION_SMALL | {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "use_clipped_linears": False,
    "standardize": True,
}
_AUDIO: dict[str, Any] = {
    "model_type": "gemma4_audio",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "conv_kernel_size": 5,
    "subsampling_conv_channels": [128, 32],
    "use_clipped_linears": True,
    "output_proj_dims": 1536,
}
_VISION_UNIFIED: dict[str, Any] = {
    "model_type": "gemma4_unified_vision",
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
}
_AUDIO_UNIFIED: dict[str, Any] = {"model_type": "gemma4_unified_audio", "audio_embed_dim": 640}

_TEXT: dict[str, Any] = {
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "rope_parameters": {
        _FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
# Values that the two small models share, and values that the three large ones share.
_SMALL: dict[str, Any] = {
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "hidden_size_per_layer_input": 256,
    "use_bidirectional_attention": None,
}
_LARGE: dict[str, Any] = {
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
}


def _config(text: dict[str, Any], pattern: int, vision: dict[str, Any], audio: dict[str, Any] | None) -> dict[str, Any]:
    """Return the whole file. Every `pattern`-th layer is global."""
    is_unified = vision["model_type"] == "gemma4_unified_vision"
    model_type = "gemma4_unified" if is_unified else "gemma4"
    architecture = "Gemma4UnifiedForConditionalGeneration" if is_unified else "Gemma4ForConditionalGeneration"
    layer_types = [_SLIDING if (index + 1) % pattern else _FULL for index in range(text["num_hidden_layers"])]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "eos_token_id": [1, 106],
        "text_config": _TEXT | text | {"model_type": f"{model_type}_text", "layer_types": layer_types},
        "vision_config": vision,
        "audio_config": audio,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "E2B": _config(
        _SMALL
        | {
            "num_hidden_layers": 35,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
        5,
        _VISION_SMALL,
        _AUDIO,
    ),
    "E4B": _config(
        _SMALL
        | {
            "num_hidden_layers": 42,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        },
        6,
        _VISION_SMALL,
        _AUDIO,
    ),
    "12B": _config(
        _LARGE
        | {
            "num_hidden_layers": 48,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
        },
        6,
        _VISION_UNIFIED,
        _AUDIO_UNIFIED,
    ),
    "26B-A4B": _config(
        _LARGE
        | {
            "num_hidden_layers": 30,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        6,
        _VISION_LARGE,
        None,
    ),
    "31B": _config(
        _LARGE
        | {
            "num_hidden_layers": 60,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
        6,
        _VISION_LARGE,
        None,
    ),
}


def variant_of(hidden_size: object, num_layers: object) -> str | None:
    """Return the name of the model with these dimensions, or None if it is none of them."""
    for name, config in VARIANTS.items():
        if (config["text_config"]["hidden_size"], config["text_config"]["num_hidden_layers"]) == (hidden_size, num_layers):
            return name
    return None
