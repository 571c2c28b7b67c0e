"""A DFlash drafter in plain dense torch and float32. It computes one sequence with its whole context, without cache or pages.

It is written from the description of the published drafters and shares no code with Culet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class DFlashOracle:
    """The checkpoint in `folder`, with the target's embedding table and its scale."""

    def __init__(self, folder: Path, table: Tensor, scale: float) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.table, self.scale = table.float(), scale
        self.taps: list[int] = self.config["dflash_config"]["target_layer_ids"]

    def logits(self, tapped: dict[int, Tensor], newest: int) -> Tensor:
        """Return logits [block, V] of a block that begins with `newest`, after the context with the given tapped streams."""
        w, config = self.weights, self.config
        context = self.norm(torch.cat([tapped[tap] for tap in self.taps], -1).float() @ w["fc.weight"].T, "hidden_norm")
        past, block = context.shape[0], config["block_size"]
        ids = torch.tensor([newest] + [config["dflash_config"]["mask_token_id"]] * (block - 1))
        position = torch.arange(past + block)
        x = self.table[ids] * self.scale
        for index, kind in enumerate(config["layer_types"]):
            at = f"layers.{index}."
            a = self.norm(x, f"{at}input_layernorm")
            both = torch.cat((context, a))
            q = self.heads(a, f"{at}self_attn.q_proj", config["num_attention_heads"])
            k = self.heads(both, f"{at}self_attn.k_proj", config["num_key_value_heads"])
            v = self.heads(both, f"{at}self_attn.v_proj", config["num_key_value_heads"])
            q = self.rope(self.norm(q, f"{at}self_attn.q_norm"), position[past:])
            k = self.rope(self.norm(k, f"{at}self_attn.k_norm"), position)
            distance = position[past:, None] - position[None, :]
            seen = torch.ones_like(distance, dtype=torch.bool)
            if kind == "sliding_attention":
                seen &= distance < config["sliding_window"]
            if config["dflash_config"].get("is_causal", kind == "sliding_attention"):
                seen &= distance >= 0
            repeat = q.shape[1] // k.shape[1]
            scores = torch.einsum("qnh,knh->nqk", q, k.repeat_interleave(repeat, 1)) * config["head_dim"] ** -0.5
            weight = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out = torch.einsum("nqk,knh->qnh", weight, v.repeat_interleave(repeat, 1)).flatten(1)
            x = x + out @ w[f"{at}self_attn.o_proj.weight"].T
            b = self.norm(x, f"{at}post_attention_layernorm")
            gate, up = b @ w[f"{at}mlp.gate_proj.weight"].T, b @ w[f"{at}mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T
        logits = self.norm(x, "norm") @ self.table.T
        cap = config["final_logit_softcapping"]
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).pow(-0.5) * self.weights[f"{name}.weight"]

    def heads(self, x: Tensor, name: str, count: int) -> Tensor:
        return (x @ self.weights[f"{name}.weight"].T).unflatten(-1, (count, self.config["head_dim"]))

    def rope(self, x: Tensor, position: Tensor) -> Tensor:
        size = self.config["head_dim"]
        inverse = self.config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = (position.double()[:, None] * inverse).float()[:, None]
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
