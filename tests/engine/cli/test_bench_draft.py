"""`culet bench draft` on a small model at a forced acceptance, with output as JSON and as a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from culet.bench import draft
from culet.cli.main import run
from culet.config import build_config
from culet.layers.weight.quantised.matrices import QuantisedMatrix, QuantisedTable
from culet.testing.tiny import write_checkpoint


@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_lines(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(draft, "NUM_ROUNDS", 6)
    monkeypatch.setattr(draft, "WARM_ROUNDS", 1)
    folder, json_file = write_checkpoint(tmp_path / "model", "31B"), tmp_path / "lines.json"
    choice = json.dumps({"method": method, "model": "random:", "num_speculative_tokens": 3})
    words = ["--device", "cpu", "--num-seqs", "1,2", "--prompt-len", "20", "--max-model-len", "200", "--json", str(json_file)]
    assert run(["bench", "draft", str(folder), "--speculative-config", choice, *words]) == 0
    lines = json.loads(json_file.read_text())["lines"]
    assert [line["num_seqs"] for line in lines] == [1, 2]
    for line in lines:
        assert line["speedup"] == pytest.approx(3 * line["plain_ms"] / line["round_ms"])
        assert line["draft_graph_ms"] is None  # a CPU has no graphs
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_weights_are_rounded_as_the_settings_say(tmp_path: Path) -> None:
    choice = {"method": "dflash", "model": "random:", "num_speculative_tokens": 3}
    settings = {"model": str(write_checkpoint(tmp_path / "model", "31B")), "device": "cpu", "speculative_config": choice}
    rounded = {"quantization": "int4", "head_quantization": "fp8"}
    model = draft.DraftBench(build_config({**settings, **rounded}), max_num_seqs=1).model
    assert isinstance(model.embedding, QuantisedTable)
    assert any(isinstance(module, QuantisedMatrix) for module in model.modules())


def test_bad_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "draft", "random:31B", "--num-seqs", "1,x"]) == 2
    assert "num-seqs: got '1,x'" in capsys.readouterr().err
