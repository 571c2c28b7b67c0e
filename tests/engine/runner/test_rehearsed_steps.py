"""Every step of a rehearsal runs, whatever the budget is."""

from __future__ import annotations

import torch

from culet.attention.torch_cpu import TorchCPUBackend
from culet.cache.spec import plan_cache
from culet.config import ScheduleConfig
from culet.engine.start.rehearsal import Rehearsal
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from tests.engine.llm.oracle import folder_of
from tests.matrix import matrix
from tests.unit.engine.test_rehearsal import SAMPLING


@matrix({"max_num_seqs, budget": [(1, 1), (3, 40), (4, 300)], "shape": ["E2B", "26B-A4B"]})
def test_every_step_runs(shape: str, max_num_seqs: int, budget: int) -> None:
    checkpoint = open_checkpoint(str(folder_of(shape)))
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    layout = plan_cache(model.spec.kv_specs(4, latent=True))
    backends = [TorchCPUBackend(group, model.spec.layers[0].num_heads) for group in layout.groups]
    schedule = ScheduleConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    rehearsal = Rehearsal(model, layout, backends, schedule, SAMPLING, max_model_len=200, has_graphs=False)
    runner = rehearsal._runner()
    for plan in rehearsal._ladder():
        runner.launch(plan).result()
