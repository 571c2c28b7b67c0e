"""Checkpoints of tests/models with a tokenizer added, and what transformers generates from them."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.models.tiny_checkpoints import SHAPES, VOCAB, WINDOW, checkpoint_folder, prompt
from tests.models.tiny_checkpoints import oracle as load_oracle

__all__ = ["SHAPES", "VOCAB", "WINDOW", "assert_greedy", "folder_of", "oracle_logprobs", "prompt"]

EOS = 1
_SPECIAL = {
    0: "<pad>",
    EOS: "<eos>",
    2: "<bos>",
    3: "<unk>",
    105: "<|turn>",
    106: "<turn|>",
    100: "<|channel>",
    101: "<channel|>",
}


@functools.cache
def folder_of(shape: str, form: str = "new") -> Path:
    """Return a shape's checkpoint with a tokenizer whose other tokens are all separate words, and with one eos token."""
    source = checkpoint_folder(shape, form)
    folder = source.parent / f"{source.name}-with-tokenizer"
    shutil.copytree(source, folder)
    pieces = [_SPECIAL.get(token_id, f"\u2581w{token_id}") for token_id in range(VOCAB)]
    letters = [token_id for token_id in range(VOCAB) if token_id not in _SPECIAL]
    for token_id, letter in zip(letters, "abcdefghijklmnopqrstuvwxyz.,!?\n\u2581", strict=False):
        pieces[token_id] = letter
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in _SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS], "temperature": 1.0, "top_k": 64}))
    return folder


@functools.cache
def _model(shape: str) -> Any:
    return load_oracle(shape)


@contextmanager
def _router_margins(model: Any) -> Iterator[list[float]]:
    """Record how far the last chosen expert is ahead of the first one left out, for every token and layer in the context."""
    margins: list[float] = []

    def note(module: Any, inputs: Any, logits: torch.Tensor) -> None:
        best = logits.float().topk(top_k + 1).values
        margins.append(float((best[..., -2] - best[..., -1]).min()))

    top_k = getattr(model.config.get_text_config(), "top_k_experts", None)
    routers = [module.proj for name, module in model.named_modules() if name.endswith(".router")]
    hooks = [router.register_forward_hook(note) for router in routers]
    yield margins
    for hook in hooks:
        hook.remove()


def assert_greedy(shape: str, token_ids: Sequence[int], answer: Sequence[int]) -> None:
    """Check that each token of the answer is the one that transformers finds most likely after all tokens before it.

    Raise as well if a choice depends on the last bits of a float32.
    """
    logprobs, margin = _run(shape, (*token_ids, *answer))
    best = logprobs[len(token_ids) - 1 : -1].topk(2)
    assert list(answer) == best.indices[:, 0].tolist()
    margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
    assert margin > 1e-5, f"two best lie within {margin:g}, too close to call: take another prompt"


def oracle_logprobs(shape: str, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' log-probabilities [T, V] after each token."""
    return _run(shape, tuple(token_ids))[0]


@functools.cache
@torch.inference_mode()
def _run(shape: str, token_ids: tuple[int, ...]) -> tuple[torch.Tensor, float]:
    """Return the log-probabilities after each token, and the smallest margin between two experts."""
    model = _model(shape)
    with _router_margins(model) as margins:
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
    return logits[0].float().log_softmax(-1), min(margins, default=math.inf)
