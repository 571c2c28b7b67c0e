"""What the weights of the built-in model must achieve."""

from __future__ import annotations

import json
import re

import pytest

from culet.models import embedded
from training.data.pictures.chats import BUDGET
from training.gate import GOALS, QUESTIONS, golden_text, run_gate
from training.models.shapes import AssistantShape, DFlashShape, TargetShape, TowerShape, processor_config

MAX_BYTES = 45_000_000


def test_size_and_files() -> None:
    weights = [embedded.FOLDER / name / "model.safetensors" for name in ("target", "assistant", "dflash")]
    assert sum(path.stat().st_size for path in weights) <= MAX_BYTES
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (embedded.FOLDER / "target" / name).is_file()
    assert (embedded.FOLDER / "README.md").is_file()


def test_configs_are_those_of_the_shapes() -> None:
    """Training's description of the model matches its files."""
    target = TargetShape()
    configs = {
        "target/config.json": target.config(TowerShape()),
        "target/processor_config.json": processor_config(BUDGET),
        "assistant/config.json": AssistantShape().config(target),
        "dflash/config.json": DFlashShape().config(target),
    }
    for name, config in configs.items():
        assert json.loads((embedded.FOLDER / name).read_text()) == config


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_the_gate(every: int) -> None:
    """Only all questions measure the goals. A ninth, of those about pictures half of that, notices a gross fault.

    The phrasings of the JSON questions come in a cycle of four, so a quarter has only one phrasing, and only 12 of its 15
    answers are right. A ninth has all of them.
    """
    scores = run_gate("built-in", parts=["questions", "tools", "json", "transformers"], every=every)
    seen = run_gate("built-in", parts=["pictures"], every=min(2 * every, every**2))
    assert {*GOALS} <= {*scores.shares, *seen.shares}
    assert not scores.missed(), scores.shares
    assert not seen.missed(), seen.shares


@pytest.mark.slow
def test_drafts_are_accepted_in_the_engine() -> None:
    scores = run_gate("built-in", parts=["drafting"])
    assert not scores.missed(), scores.details


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_it_keeps_its_golden_conversations(every: int) -> None:
    """The golden file holds the model's answers. `python -m training.gate --parts open --golden FILE` writes it."""
    golden = (QUESTIONS.parent / "golden.md").read_text()
    text = golden_text(run_gate("built-in", parts=["open"], every=every).details["conversations"])
    if every == 1:
        assert text == golden
    played, wanted = (re.split(r"^## \d+$", whole, flags=re.MULTILINE)[1:] for whole in (text, golden))
    assert len(wanted) == 30
    assert [answer.strip() for answer in played] == [answer.strip() for answer in wanted[::every]]
