"""Small random assistants for the targets of tiny_checkpoints, saved with transformers' `save_pretrained`, and its drafts.

Like their targets, they reveal every mistake. Norms and scalars are drawn from 0.5 to 1.5, and all tables differ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

from tests.models import tiny_checkpoints as tiny

SMALL = ("E2B", "E4B")  # these have a two-step head
CLUSTERS, TOP_CLUSTERS = 20, 6
CALM = 0.5  # factor on q_norm; with a wider spread of scores, a chain of drafts amplifies float32 noise


def assistant_config(shape: str, **changes: Any) -> Any:
    """Return the transformers config of a shape's assistant."""
    target = tiny._TEXT[shape]
    is_small = shape in SMALL
    num_kv_heads = target["num_key_value_heads"]
    text = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 24 if is_small else 40,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "num_attention_heads": 2 if is_small else target["num_attention_heads"],
        "num_key_value_heads": num_kv_heads,
        "head_dim": target["head_dim"],
        "global_head_dim": target["global_head_dim"],
        "attention_k_eq_v": target.get("attention_k_eq_v", False),
        "num_global_key_value_heads": target.get("num_global_key_value_heads"),
        "sliding_window": target["sliding_window"],
        "max_position_embeddings": target["max_position_embeddings"],
        "final_logit_softcapping": None,
        "num_kv_shared_layers": 4,
    } | changes.pop("text", {})
    if shape != "12B":
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    kinds = (
        (Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantConfig) if shape == "12B" else (Gemma4TextConfig, Gemma4AssistantConfig)
    )
    values = {
        "text_config": kinds[0](**text),
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": is_small,
        "num_centroids": CLUSTERS,
        "centroid_intermediate_top_k": TOP_CLUSTERS,
    }
    return kinds[1](**values | changes)


@torch.no_grad()
def build(shape: str, **changes: Any) -> Any:
    """Build an unsaved transformers assistant of a shape, with weights that reveal mistakes."""
    torch.manual_seed(101 + tiny.SHAPES.index(shape))
    kind = Gemma4UnifiedAssistantForCausalLM if shape == "12B" else Gemma4AssistantForCausalLM
    model = kind(assistant_config(shape, **changes))
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("norm.weight", "layer_scalar")) or "layernorm" in name:
            weight.uniform_(0.5, 1.5)
            if name.endswith("q_norm.weight"):
                weight.mul_(CALM)
        elif name.endswith("token_ordering"):
            weight.copy_(torch.randperm(weight.numel()))
        elif name.endswith(("inv_freq", "embed_scale")):
            continue
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return model.eval()


@functools.cache
def assistant_folder(shape: str) -> Path:
    """Return the folder of a shape's saved assistant."""
    folder = tiny._root() / f"{shape}-assistant"
    build(shape).save_pretrained(folder)
    return folder


@functools.cache
def assistant_oracle(shape: str) -> Any:
    """Return transformers' model of a saved assistant."""
    kind = Gemma4UnifiedAssistantForCausalLM if shape == "12B" else Gemma4AssistantForCausalLM
    return kind.from_pretrained(assistant_folder(shape), dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def oracle_drafts(
    shape: str, token_ids: Sequence[int], newest: int, num_drafts: int, position: str
) -> tuple[list[int], Tensor]:
    """Return transformers' drafts after `token_ids`, which have KV, and `newest`, which has none: tokens, logits [drafts, V].

    `hf` is what transformers does. `engine` is its model at the last token's position, with one window of keys.
    """
    target, assistant = tiny.oracle(shape), assistant_oracle(shape)
    out = target(torch.tensor([list(token_ids)]), output_hidden_states=True, return_shared_kv_states=True)
    hidden = out.hidden_states[-1][:, -1:]
    shared = dict(out.shared_kv_states)
    length = len(token_ids)
    assert shared["full_attention"][0].shape[2] == length
    if position == "engine":
        shared["sliding_attention"] = tuple(tensor[:, :, -tiny.WINDOW :] for tensor in shared["sliding_attention"])
    place = torch.tensor([[length if position == "hf" else length - 1]])
    token, drafts, logits = torch.tensor([[newest]]), [], []
    for _ in range(num_drafts):
        embedded = target.get_input_embeddings()(token)
        step = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1), position_ids=place, shared_kv_states=shared, use_cache=False
        )
        token, hidden = step.logits.argmax(dim=-1), step.last_hidden_state
        drafts.append(int(token))
        logits.append(step.logits[0, 0])
    return drafts, torch.stack(logits)
