"""Batched generation with the target in training, for outputs to train drafters on and for samples to read.

Prompts are padded to rows of equal length. Each row's next token goes where its text ends.

Shapes: B rows · P longest prompt · T prompt and output · D model · H head size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from training.models.model import KV, Target, Turn, blocks_of, rms
from training.models.shapes import SLIDING

PREFILL_ROWS = 512  # prompts per pass; attention scores of all prompts would fill the memory


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy. The other defaults are the model's."""

    temperature: float = 1.0
    top_k: int = 40
    top_p: float = 0.9


def draw(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Draw a token for each row, [B]."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    best, ids = (logits_BV / sampling.temperature).topk(min(sampling.top_k, logits_BV.shape[-1]), dim=-1)
    chance = best.softmax(-1)
    chance = chance.masked_fill(chance.cumsum(-1) - chance >= sampling.top_p, 0.0)
    return ids.gather(1, torch.multinomial(chance, 1, generator=generator)).squeeze(1)


class Seen(NamedTuple):
    """Rows [tokens, D] of a picture for each prompt. They take the place of the tokens `image_id`."""

    features: Sequence[Tensor]
    image_id: int


@torch.no_grad()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: Sampling,
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
    suppress: Sequence[int] = (),
    seen: Seen | None = None,
) -> list[list[int]]:
    """Return the outputs of the prompts, up to and including the stop token. `seen` is what the prompts show."""
    device, window = target.embedding.device, target.shape.window
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = -(-int(lengths.max()) // window) * window
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)
    hidden, caches = _prefill(target, ids, longest + max_new, dtype, seen)
    last_BD = hidden[rows, lengths - 1]
    turn = target.turns(longest + max_new, device)
    stops = torch.tensor(target.shape.eos_token_ids, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    drawn = []
    for number in range(max_new):
        logits = target.logits(last_BD)
        if suppress:
            logits[:, list(suppress)] = float("-inf")
        token_B = draw(logits, sampling, generator).masked_fill(done, 0)
        drawn.append(token_B)
        done = done | torch.isin(token_B, stops)
        if number % 16 == 15 and bool(done.all()):
            break
        last_BD = _decode(target, token_B, lengths + number, caches, turn, dtype)
    out = torch.stack(drawn, 1).tolist()
    stop_set = set(target.shape.eos_token_ids)
    return [_until_stop(tokens, stop_set) for tokens in out]


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


def _prefill(target: Target, ids_BP: Tensor, length: int, dtype: torch.dtype, seen: Seen | None) -> tuple[Tensor, list[KV]]:
    """Return the prompts' hidden states and each layer's KV with room for `length` tokens, computed in groups of rows."""
    B, P = ids_BP.shape
    turn = target.turns(P, ids_BP.device)
    caches = [
        KV(*(torch.zeros(B, length, block.head_dim, dtype=dtype, device=ids_BP.device) for _ in range(2)))
        for block in blocks_of(target.blocks)
    ]
    hidden = []
    for begin in range(0, B, PREFILL_ROWS):
        rows = slice(begin, begin + PREFILL_ROWS)
        ids, first = ids_BP[rows], torch.zeros_like(ids_BP[rows])
        x = target.embed(ids, dtype)
        if seen is not None:
            x[ids == seen.image_id] = torch.cat(list(seen.features[rows])).to(dtype)
        for block, cache in zip(blocks_of(target.blocks), caches, strict=True):
            x, kv = block(x, turn[block.kind], first)
            cache.k[rows, :P], cache.v[rows, :P] = kv
        hidden.append(rms(x, target.final_gain, target.shape.eps))
    return torch.cat(hidden), caches


def _decode(
    target: Target, token_B: Tensor, position_B: Tensor, caches: list[KV], turn: dict[str, Turn], dtype: torch.dtype
) -> Tensor:
    """Return hidden states [B, D] of one more token per row, whose KV is added to the caches."""
    x = target.embed(token_B[:, None], dtype)
    here = {kind: Turn(table.cos[position_B, None], table.sin[position_B, None]) for kind, table in turn.items()}
    rows = torch.arange(len(token_B), device=token_B.device)
    reach = int(position_B.max()) + 1
    key_T = torch.arange(reach, device=token_B.device)
    for block, cache in zip(blocks_of(target.blocks), caches, strict=True):
        q, own = block.project(rms(x, block.input_gain, block.eps), here[block.kind])
        assert own is not None
        cache.k[rows, position_B], cache.v[rows, position_B] = own.k[:, 0], own.v[:, 0]
        visible = key_T <= position_B[:, None]
        if block.kind == SLIDING:
            visible = visible & (key_T > position_B[:, None] - block.window)
        scores = (q[:, 0] @ cache.k[:, :reach].transpose(1, 2)).float().masked_fill(~visible[:, None], float("-inf"))
        out = scores.softmax(-1).to(dtype) @ cache.v[:, :reach]
        x = block.finish(x, out.flatten(1)[:, None])
    return rms(x[:, 0], target.final_gain, target.shape.eps)
