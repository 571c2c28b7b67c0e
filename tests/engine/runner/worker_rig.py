"""Runners for tests, built in a ProcessWorker's process. The arguments are plain data."""

from __future__ import annotations

from typing import Any

import torch

from culet.config import DraftChoice
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from culet.runner.runner import Runner
from culet.structured.compiler import GrammarCompiler, Vocabulary
from tests.engine.drafting.draft_drive import CPU, DraftDrive

END = 1


def often(place: int) -> bool:
    return place % 4 > 0


def make_drive(folder: str, known: dict[int, list[int]] | None = None, num_drafts: int = 3, **settings: Any) -> DraftDrive:
    """Make a scheduler and a runner for a tiny checkpoint. Drafts often follow the `known` sequences."""
    torch.set_num_threads(1)
    target = load_model(open_checkpoint(folder), dtype=torch.float32, device=CPU, progress=False)
    choice = DraftChoice("mtp", "random:", num_speculative_tokens=num_drafts) if num_drafts else None
    return DraftDrive(target, choice, known=known, is_told=often, prefix_caching=True, **settings)


def build(has_grammars: bool = True, **settings: Any) -> Runner:
    runner = make_drive(**settings).runner
    if has_grammars:
        # Token 2 + n is the byte n.
        runner.use_grammars(
            GrammarCompiler(
                Vocabulary(
                    size=runner.target.model.spec.vocab_size,
                    piece=lambda token_id: bytes([token_id - 2]) if 2 <= token_id < 258 else b"",
                    special_ids=frozenset({END}),
                    end_ids=(END,),
                )
            )
        )
    return runner
