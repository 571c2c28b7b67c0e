"""A DFlash drafter on a GPU: kernels and graphs give the blocks of the dense oracle, and the output stays the same."""

from __future__ import annotations

import pytest
import torch

from culet import LLM
from culet.attention.triton import TritonBackend
from culet.config import ScheduleConfig
from culet.engine.start.rehearsal import Rehearsal
from culet.kernels.captures import Captures
from culet.kernels.compiling import use_disk_cache
from culet.runner import deferred_kv
from tests import samplings
from tests.engine.drafting.dflash_rig import MAX_LEN, Pauses, Rig, assert_like_oracle, make_pair, make_request
from tests.engine.drafting.gpu_drafts import GIVEN, GREEDY, TARGET
from tests.engine.runner.real_steps import make_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module", params=["E2B", "31B"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    pair = make_pair(folder, request.param, torch.device("cuda"), TARGET, head_dim=32, block_size=16)
    compile_kernels(pair)
    return pair


def make_rig(pair, **settings):
    return Rig(pair, budget=40, max_num_seqs=4, backend=TritonBackend, target_backend=TritonBackend, has_spare=True, **settings)


def compile_kernels(pair):
    """Compile the kernels of the rigs' steps and rounds in parallel, as an engine does, and keep them on disk.

    One by one they take minutes.
    """
    use_disk_cache()
    runner = make_rig(pair).runner
    group = next(group for group in runner.pool.layout.groups if group.name == "dflash")
    drafter = pair.spec.build(pair.model, {group.index: TritonBackend(group, pair.spec.num_heads)}, progress=False)
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=40)
    layout, backends = runner.pool.layout, runner.target.backends
    trial = Rehearsal(
        pair.model, layout, backends, schedule, samplings.GREEDY, max_model_len=MAX_LEN, has_graphs=True, drafter=drafter
    )
    trial.compile_kernels()


@pytest.mark.parametrize("is_fixed", [False, True])
def test_blocks(pair, is_fixed):
    """Launched one by one, and in padded shapes. A GPU's float32 products differ from a CPU's in the last bits."""
    asked = [make_request(f"r{length}", make_prompt(length), 12) for length in (1, 30, 75)]
    rig = make_rig(pair)
    if is_fixed:
        rig.runner.use_fixed_shapes()
    rig.run(*asked)
    assert_like_oracle(pair, rig.rounds, at_least=20, tolerance=2e-2)
    rig.check_pages()


def test_blocks_after_pauses(pair, monkeypatch):
    """Steps that keep the drafter's features and deferred writes both run as graphs, with prefix hits on what was written."""
    monkeypatch.setattr(deferred_kv, "MAX_RING_LEN", 4)
    rig = make_rig(pair, policy=Pauses(), prefix_caching=True, ahead=True)
    fixed, captures = rig.runner.use_fixed_shapes(), Captures(torch.device("cuda"))
    fixed.steps.capture(captures)
    fixed.deferred.capture(captures)
    prompts = [make_prompt(length) for length in (1, 30, 45)]
    for turn in range(2):
        out = rig.run(*[make_request(f"{turn}-{index}", prompt, 30) for index, prompt in enumerate(prompts)])
        prompts = [[*prompt, *out[f"{turn}-{index}", 0], 130 + index] for index, prompt in enumerate(prompts)]
    assert rig.scheduler.counters.prefix_hits == 3
    assert_like_oracle(pair, rig.rounds, at_least=20, tolerance=2e-2)
    rig.check_pages()


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_output_is_the_same(pair, enforce_eager):
    """Whole engines in float32, with and without graphs. A drafter changes no token."""
    prompts = [make_prompt(length) for length in (1, 30, 75)]
    given = GIVEN | {"enforce_eager": enforce_eager}
    folder = str(pair.folder.parent / "target")
    draft = {"method": "dflash", "model": str(pair.folder), "adaptive": False}
    plain = [result.token_ids for result in LLM(folder, **given).generate(prompts, GREEDY)]
    llm = LLM(folder, **given, speculative_config=draft)
    for _ in range(2):  # the second time from the prefix cache
        assert [result.token_ids for result in llm.generate(prompts, GREEDY)] == plain
    assert llm.engine.stats().counters.verifies
