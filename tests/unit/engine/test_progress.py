"""How a start that gets on can be told from one that hangs."""

from __future__ import annotations

from pathlib import Path

import torch

from culet.engine.start.times import StartTimes
from culet.models.checkpoint import open_checkpoint
from culet.models.weight_files import read_headers
from culet.models.weights import load_model
from culet.parallel.progress import progress
from culet.testing.tiny import write_checkpoint


def test_every_part_and_every_tensor_counts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", "31B", dtype=torch.float32)
    times, before = StartTimes(), progress()
    with times.part("weights"):
        assert progress() == ("weights", before.num_marks + 1)
        load_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"), progress=False)
    assert progress().part == "weights"
    assert progress().num_marks > before.num_marks + len(read_headers(folder)) / 2
