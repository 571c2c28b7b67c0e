"""What the weights of the built-in model must achieve."""

from __future__ import annotations

import json

import pytest

from culet.models import embedded
from training.gate import run_gate
from training.models.shapes import AssistantShape, DFlashShape, TargetShape

MAX_BYTES = 36_000_000


def test_size_and_files() -> None:
    weights = [embedded.FOLDER / name / "model.safetensors" for name in ("target", "assistant", "dflash")]
    assert sum(path.stat().st_size for path in weights) <= MAX_BYTES
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (embedded.FOLDER / "target" / name).is_file()
    assert (embedded.FOLDER / "README.md").is_file()


def test_configs_are_those_of_the_shapes() -> None:
    """Training's description of the model matches its files."""
    target = TargetShape()
    configs = {"target": target.config(), "assistant": AssistantShape().config(target), "dflash": DFlashShape().config(target)}
    for name, config in configs.items():
        assert json.loads((embedded.FOLDER / name / "config.json").read_text()) == config


@pytest.mark.parametrize("part", ["questions", "tools", "json", "transformers"])
def test_the_gate(part: str) -> None:
    scores = run_gate("built-in", parts=[part])
    assert not scores.missed(), scores.shares


@pytest.mark.slow
def test_drafts_are_accepted_in_the_engine() -> None:
    scores = run_gate("built-in", parts=["drafting"])
    assert not scores.missed(), scores.details


def test_it_keeps_its_golden_conversations() -> None:
    """The golden file holds the model's answers. `python -m training.gate --parts open --golden FILE` writes it."""
    from training.gate import QUESTIONS, golden_text

    conversations = run_gate("built-in", parts=["open"]).details["conversations"]
    assert golden_text(conversations) == (QUESTIONS.parent / "golden.md").read_text()
