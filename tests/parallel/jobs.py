"""What ranks compute in tests. Each function runs on every rank with its group, or with None in the process of a test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from culet.config import build_config
from culet.engine.engine import Engine
from culet.engine.resolve import resolve
from culet.engine.start import worker
from culet.engine.start.worker import build_in_group
from culet.kernels.compiling import CompileCount
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import load_model
from culet.parallel.group import RankGroup
from culet.runner.runner import Runner
from culet.scheduler.stats import Counters
from culet.testing.tiny import write_checkpoint
from culet.types import FinishReason, SamplingParams, StepPlan
from tests.models.harness import Harness

CPU = torch.device("cpu")
# Gemma's structure with as many heads as four ranks need. The number of global KV heads is that of the published model.
SHAPES = {"12B": 1, "26B-A4B": 2, "31B": 4}


def write_model(folder: Path, shape: str) -> str:
    """Write a tiny checkpoint that amplifies rounding errors little.

    The logits of a plain tiny model reach 19, and one process differs from itself by 5e-5 if the chunks differ. With a milder
    softmax and smaller logits, an error of 1e-5 is not rounding.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": SHAPES[shape]}
    heads["intermediate_size"] = 256
    if shape == "26B-A4B":
        heads["moe_intermediate_size"] = 128  # int4 groups of 32 divide a rank's part
    path = write_checkpoint(folder / shape, shape, overrides=heads, dtype=torch.float32, towers=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    factors = {".q_norm.weight": 1 / 3, "language_model.norm.weight": 1 / 4}
    for name, tensor in tensors.items():
        tensor *= next((factor for ending, factor in factors.items() if name.endswith(ending)), 1.0)
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * seed + 11 * place * place + 3 * place) % 500 for place in range(length)]


def load(group: RankGroup | None, folder: str, quantization: str = "auto") -> Gemma4:
    checkpoint = open_checkpoint(folder)
    return load_model(checkpoint, dtype=torch.float32, device=CPU, quantization=quantization, progress=False, group=group)


def every_logit(group: RankGroup | None, folder: str, chunks: Sequence[int], quantization: str = "auto") -> Tensor:
    """Return the logits at all positions of one prompt that is computed in `chunks`."""
    harness = Harness(load(group, folder, quantization), num_slots=1, max_len=sum(chunks))
    return harness.all_logits(prompt(sum(chunks)), chunks)


def ragged_logits(group: RankGroup | None, folder: str) -> list[Tensor]:
    """Return logits of steps that mix long and short prompts, chunks, verify rows, decode rows and a restarted sequence."""
    harness = Harness(load(group, folder), num_slots=4, max_len=256)
    a, b, c, d = (harness.add(prompt(length, seed)) for seed, length in enumerate((200, 67, 130, 9)))
    found = harness.step([(a, 70, 1), (b, 64, 3), (d, 3, 3)])
    found += harness.step([(a, 59, 0), (b, 1, 1), (c, 129, 1), (d, 5, 2)])
    harness.drop(b)
    found += harness.step([(a, 70, 5), (b, 66, 1), (c, 1, 1), (d, 1, 1)])
    return found + harness.step([(a, 1, 1), (b, 1, 1)])


def held_bytes(group: RankGroup | None, folder: str) -> dict[str, int]:
    """Return the bytes of a rank's weights, by part."""
    model = load(group, folder)
    layer = model._layers[0]
    parts = {"all": model, "embedding": model.embedding, "mlp": layer.mlp, "sliding": layer.attention}
    parts |= {"global": model._layers[2].attention} | ({} if layer.experts is None else {"experts": layer.experts.stack})
    return {name: part.num_bytes for name, part in parts.items()}


@dataclass(frozen=True)
class Asked:
    """A request for a test engine."""

    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)


def run_engine(
    group: RankGroup | None, settings: Mapping[str, Any], rounds: Sequence[Sequence[Asked]]
) -> tuple[list[tuple[int, ...]], Counters]:
    """Return the output of every request and the counters. The requests of a round run together, one round after another.

    Each rank schedules for itself. The schedulers are equal, so their plans are too, as long as they do not depend on time.
    """
    config = build_config({"device": "cpu", "max_model_len": 512, "max_step_ms": 0, **settings})
    if group is None:
        engine = Engine(config, progress=False)
    else:
        setup = resolve(config, group.rank.index)
        engine = Engine(config, progress=False, make_worker=lambda num_slabs, _: build_in_group(setup, group, num_slabs))
    written: dict[str, list[int]] = {}
    for number, requests in enumerate(rounds):
        for index, asked in enumerate(requests):
            params = SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True, **{"temperature": 0.0, **asked.sampling})
            request = engine.rules.make_request(f"{number}.{index}", asked.prompt, params)
            written[request.request_id] = []
            engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                assert delta.finish_reason is not FinishReason.ERROR, delta
                written[delta.request_id] += delta.token_ids
    return [tuple(tokens) for tokens in written.values()], engine.stats().counters


def small_cache(settings: Mapping[str, Any], num_more: int) -> int:
    """Return the bytes of a cache for four sequences of one page per group, and a few more pages when they grow."""
    layout = resolve(build_config({"device": "cpu", **settings})).layout
    return (4 * len(layout.groups) + num_more) * layout.slab_bytes


def build_compiling(rank_index: int, **arguments: Any) -> Runner:
    """Build a rank that counts kernels as on a GPU: 5 or 6 during the start, and the last rank one more in each step."""
    count = CompileCount(compiled=5 + rank_index)
    worker._prepare_device = lambda setup: worker._PreparedDevice(0, count)
    runner = worker.build_rank(rank_index=rank_index, **arguments)

    def launch(plan: StepPlan) -> Any:
        if rank_index == 1:
            kernel, times = SimpleNamespace(hash=lambda: "", name="kernel"), SimpleNamespace(total=1e6)
            count.listen(src=kernel, times=times, cache_hit=False)
        return Runner.launch(runner, plan)

    runner.launch = launch  # type: ignore[method-assign, assignment]
    return runner


def build_odd(odd: str, folders: Sequence[str], settings: dict[str, Any], rank_index: int, **arguments: Any) -> Runner:
    """Build a rank in its own folder. Rank 1 has another setting or version if it is to be `odd`."""
    os.chdir(folders[rank_index])
    if rank_index == 1:
        settings |= {"enable_prefix_caching": False} if odd == "setting" else {}
        worker.__version__ = "0.0.0" if odd == "version" else worker.__version__
    return worker.build_rank(settings=settings, rank_index=rank_index, **arguments)


def differing_facts(group: RankGroup, facts: Sequence[Mapping[str, object]]) -> str:
    """Return the error of ranks that disagree, or ""."""
    try:
        group.check_same(facts[group.rank.index])
    except Exception as error:
        return str(error)
    return ""
