"""Servers shared by the tests in this folder. Each is started once, by the first test that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from culet.testing.tiny import write_checkpoint
from culet.text.tokenizer import Tokenizer
from tests.serve.running import Running

ANSWER = "The small facet at the point of a cut gem."
TINY = {"device": "cpu", "max_model_len": 2048, "max_num_seqs": 16, "max_queue_len": 64}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with a long context."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "31B", overrides={"max_position_embeddings": 32768})


@pytest.fixture(scope="session")
def encode(folder: Path) -> Callable[[str], list[int]]:
    """Return a function that encodes text in which special tokens are spelled out."""
    return Tokenizer(folder).encode


@pytest.fixture(scope="session")
def scripted(folder: Path, encode: Callable[[str], list[int]]) -> Callable[..., Running]:
    """Return a function that starts a server whose fake engine gives these answers in turn."""

    def start(
        *answers: str,
        settings: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        is_fresh: bool = False,
        **script: Any,
    ) -> Running:
        ids = [encode(answer) for answer in answers or (f"{ANSWER}<turn|>",)]
        return Running(folder, script={"answers": ids, **script}, settings=settings, config=config, is_fresh=is_fresh)

    return start


@pytest.fixture(scope="session")
def fake(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server that always answers ANSWER immediately. Grammars have time even if the machine is busy."""
    with scripted(settings={"limits": "grammar_s=60"}) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(folder: Path) -> Iterator[Running]:
    """A server with a real engine and a tiny random model. Grammars have time here too."""
    with Running(folder, config=TINY, settings={"limits": "grammar_s=60"}) as server:
        yield server


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose tiny random model sees and hears."""
    overrides = {"max_position_embeddings": 4096}
    folder = write_checkpoint(tmp_path_factory.mktemp("seeing"), "E4B", towers=True, overrides=overrides)
    config = {"device": "cpu", "max_model_len": 2048, "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 3}}
    with Running(folder, config=config) as server:
        yield server
