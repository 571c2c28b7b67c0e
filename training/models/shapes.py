"""Dimensions of the built-in model, its vision tower, its assistant and its DFlash drafter, with the config.json of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SLIDING, GLOBAL = "sliding_attention", "full_attention"
_PATTERN = {"s": SLIDING, "g": GLOBAL}


@dataclass(frozen=True)
class TargetShape:
    """A Gemma 4 decoder with K=V global layers and one KV head."""

    hidden_size: int = 256
    mlp_width: int = 768
    num_heads: int = 2
    pattern: str = "ssssgssssg"  # sliding and global layers, the last one global
    head_dim: int = 256
    global_head_dim: int = 512
    window: int = 256
    vocab_size: int = 8192
    max_position: int = 4096
    eps: float = 1e-6
    softcap: float = 30.0
    eos_token_ids: tuple[int, ...] = (1, 106, 50)

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def kinds(self) -> list[str]:
        return [_PATTERN[letter] for letter in self.pattern]

    def text_config(self) -> dict[str, Any]:
        return {
            "model_type": "gemma4_text",
            "dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_k_eq_v": True,
            "bos_token_id": 2,
            "eos_token_id": list(self.eos_token_ids),
            "pad_token_id": 0,
            "enable_moe_block": False,
            "final_logit_softcapping": self.softcap,
            "head_dim": self.head_dim,
            "global_head_dim": self.global_head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "hidden_size_per_layer_input": 0,
            "initializer_range": 0.02,
            "intermediate_size": self.mlp_width,
            "layer_types": self.kinds,
            "max_position_embeddings": self.max_position,
            "num_attention_heads": self.num_heads,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                GLOBAL: {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
                SLIDING: {"rope_theta": 10_000.0, "rope_type": "default"},
            },
            "sliding_window": self.window,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": None,
            "use_cache": True,
            "use_double_wide_mlp": False,
            "vocab_size": self.vocab_size,
            "vocab_size_per_layer_input": self.vocab_size,
        }

    def config(self, tower: TowerShape | None = None) -> dict[str, Any]:
        """Return config.json, with a tower in the form of multimodal models."""
        if tower is None:
            return {"architectures": ["Gemma4ForCausalLM"], **self.text_config()}
        return {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "dtype": "bfloat16",
            "text_config": self.text_config(),
            "vision_config": tower.config(),
            "audio_config": None,
            **MEDIA_TOKENS,
            "eos_token_id": list(self.eos_token_ids),
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class TowerShape:
    """A Gemma 4 vision tower, without clip bounds and without standardising."""

    hidden_size: int = 192
    num_layers: int = 6
    num_heads: int = 3
    head_dim: int = 64
    width: int = 512
    num_positions: int = 256
    out_size: int = 256  # the decoder's hidden size
    patch_size: int = 16
    pooling: int = 3
    rope_theta: float = 100.0
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "gemma4_vision",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.width,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_heads,
            "patch_size": self.patch_size,
            "pooling_kernel_size": self.pooling,
            "position_embedding_size": self.num_positions,
            "max_soft_tokens": 280,  # of an image. A key of Culet's: more would keep a CPU busy for minutes.
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "axial"},
            "standardize": False,
            "use_clipped_linears": False,
        }


# Ids that the built-in tokenizer has had from the beginning.
MEDIA_TOKENS = {
    "boi_token_id": 110,
    "eoi_token_id": 111,
    "image_token_id": 112,
    "boa_token_id": 113,
    "eoa_token_index": 114,
    "audio_token_id": 115,
    "video_token_id": 116,
}


def processor_config(budget: int) -> dict[str, Any]:
    """Return processor_config.json: an image and a frame have at most `budget` soft tokens unless a request says otherwise."""
    common = {"max_soft_tokens": budget, "patch_size": 16, "pooling_kernel_size": 3, "do_resize": True, "do_rescale": True}
    return {
        "processor_class": "Gemma4Processor",
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", "do_normalize": False, **common},
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor", "do_normalize": True, **common},
    }


@dataclass(frozen=True)
class AssistantShape:
    """An MTP assistant: a sliding and a global layer over the target's KV, with its own head."""

    hidden_size: int = 128
    mlp_width: int = 768
    num_heads: int = 2
    pattern: str = "sg"

    def config(self, target: TargetShape) -> dict[str, Any]:
        text = target.text_config() | {
            "final_logit_softcapping": None,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_width,
            "layer_types": [_PATTERN[letter] for letter in self.pattern],
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": len(self.pattern),
            "num_kv_shared_layers": len(self.pattern),
            "vocab_size_per_layer_input": 0,
        }
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": target.hidden_size,
            "dtype": "bfloat16",
            "text_config": text,
            "tie_word_embeddings": True,
            "use_ordered_embeddings": False,
        }


@dataclass(frozen=True)
class DFlashShape:
    """A DFlash drafter, which fills blocks of masks in one pass over features of some of the target's layers."""

    mlp_width: int = 640
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    pattern: str = "ssg"  # sliding layers read a block causally, global ones both ways
    window: int = 512
    block_size: int = 8
    mask_token_id: int = 4
    taps: tuple[int, ...] = (1, 3, 6, 8)
    rope_theta: float = 1_000_000.0
    eps: float = 1e-6

    def config(self, target: TargetShape) -> dict[str, Any]:
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.taps)},
            "dtype": "bfloat16",
            "final_logit_softcapping": target.softcap,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": target.hidden_size,
            "intermediate_size": self.mlp_width,
            "layer_types": [_PATTERN[letter] for letter in self.pattern],
            "max_position_embeddings": target.max_position,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": len(self.pattern),
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": target.num_layers,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "sliding_window": self.window,
            "tie_word_embeddings": True,
            "vocab_size": target.vocab_size,
        }


# For tests on a CPU: the same structure, trained in seconds.
MINI_TARGET = TargetShape(
    hidden_size=64, mlp_width=48, pattern="sgsg", head_dim=16, global_head_dim=32, window=16, vocab_size=832, max_position=256
)
MINI_ASSISTANT = AssistantShape(hidden_size=16, mlp_width=32)
MINI_DFLASH = DFlashShape(mlp_width=48, num_heads=4, num_kv_heads=2, head_dim=16, pattern="sg", window=32, taps=(0, 2))
MINI_TOWER = TowerShape(hidden_size=48, num_layers=2, num_heads=2, head_dim=24, width=64, out_size=64)
