"""The most tokens of a chunk with an image that runs in one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from culet import hardware
from culet.config import build_config
from culet.engine.resolve import Setup, resolve
from culet.engine.start.parts import leg_tokens
from culet.parallel.rank import Rank

MODELS = ("E2B", "E4B", "12B", "26B-A4B", "31B")


def setup_for(model: str, **settings: Any) -> Setup:
    """Return the setup of a model as if there was a GPU."""
    setup = resolve(build_config({"model": f"random:{model}", "device": "cpu"} | settings))
    return replace(setup, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "capability_of", lambda device=None: hardware.HOPPER)


def test_the_larger_the_model_the_shorter_the_chunks() -> None:
    """An image of the default budget with a short text has about 300 tokens, and no image has more than 1,120."""
    found = {model: leg_tokens(setup_for(model)) for model in MODELS}
    assert found == {"E2B": 0, "E4B": 0, "12B": 357, "26B-A4B": 1269, "31B": 133}


def test_a_slower_gpu_cuts_shorter_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "capability_of", lambda device=None: hardware.ADA)
    assert 0 < leg_tokens(setup_for("31B")) < 133


@pytest.mark.parametrize("settings", [{"max_step_ms": 0}, {"language_model_only": True}, {"quantization": "fp8"}], ids=str)
def test_settings_that_switch_it_off(settings: dict[str, Any]) -> None:
    assert leg_tokens(setup_for("31B", **settings)) == 0


def test_cpus_ranks_few_layers_and_drafters() -> None:
    setup = setup_for("31B")
    assert leg_tokens(replace(setup, device=torch.device("cpu"))) == 0
    assert leg_tokens(replace(setup, rank=Rank(0, 2))) == 0
    assert leg_tokens(setup_for("31B,layers=6")) == 0, "a chunk may have more legs than layers"
    drafting = {"speculative_config": {"method": "mtp", "model": "random:"}}
    assert leg_tokens(setup_for("31B", **drafting)) == 0
