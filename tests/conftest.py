"""The order of the test files, a quick collection, and a port."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from culet.kernels.compiling import hash_kernels
from tests.ports import Claim

gc.disable()  # test files import large packages, and nothing they make is garbage

ROOT = Path(__file__).parents[1]
# The files that take longest start first, so that no process is left with a long one at the end.
LONGEST_FIRST = (
    "tests/kernels/test_attention_aot.py",
    "tests/kernels/test_fused_aot.py",
    "tests/engine/drafting/test_dflash.py",
    "tests/engine/llm/test_llm.py",
    "tests/serve/page/test_answers.py",
    "tests/serve/page/test_conversations.py",
    "tests/engine/drafting/test_drafting.py",
    "tests/models/test_exactness.py",
    "tests/kernels/test_attention_triton.py",
    "tests/serve/test_faults.py",
    "tests/kernels/test_fused_triton.py",
    "tests/models/test_mtp.py",
    "tests/serve/clients/test_ollama_client.py",
    "tests/engine/llm/test_chat_reuse.py",
    "tests/engine/llm/test_structured.py",
    "tests/serve/hardening/test_supervision.py",
    "tests/training/test_training.py",
    "tests/models/traps/test_traps.py",
    "tests/serve/test_structured_requests.py",
    "tests/serve/hardening/test_answer_attacks.py",
    "tests/serve/test_start.py",
    "tests/engine/cli/test_bench_offline.py",
    "tests/engine/runner/test_runner.py",
    "tests/engine/drafting/test_drafters.py",
    "tests/training/test_embedded_model.py",
    "tests/engine/llm/test_look_ahead.py",
    "tests/engine/runner/test_open_rows.py",
    "tests/serve/agents/test_agents.py",
    "tests/engine/llm/test_stops.py",
    "tests/parallel/test_ranks.py",
    "tests/engine/drafting/test_held_output.py",
    "tests/training/test_seeing.py",
    "tests/docs/test_readme_picture.py",
    "tests/engine/drafting/test_drafting_embedded.py",
    "tests/unit/text/test_template.py",
    "tests/serve/test_responses.py",
    "tests/engine/runner/test_rehearsed_steps.py",
    "tests/docs/test_first_run.py",
    "tests/engine/drafting/test_suffix.py",
    "tests/engine/runner/test_fixed_steps.py",
    "tests/engine/cli/test_cli_runs.py",
    "tests/engine/media/test_exact.py",
    "tests/engine/drafting/test_round_kernels.py",
    "tests/serve/page/test_media_on_page.py",
    "tests/serve/hardening/test_http_bounds.py",
    "tests/serve/clients/test_refused_fields.py",
    "tests/kernels/test_linear_aot.py",
    "tests/kernels/quantised/test_quantised_aot.py",
    "tests/engine/scheduler/test_scheduler_walk.py",
    "tests/serve/hardening/test_logs.py",
    "tests/engine/media/test_reuse.py",
    "tests/serve/hardening/test_long_prompts.py",
    "tests/models/formats/test_gguf.py",
    "tests/engine/llm/test_build.py",
    "tests/models/test_tiny.py",
    "tests/serve/test_media.py",
    "tests/models/towers/test_tower_traps.py",
    "tests/engine/llm/test_llm_chat.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {ROOT / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    if torch.cuda.is_available() and any(item.get_closest_marker("gpu") for item in session.items):
        hash_kernels()  # as engines do. Otherwise, kernels that a test launches first have other names on disk.
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would start with the files that have most tests


@pytest.fixture
def port() -> Iterator[int]:
    """A port that only this test's server can listen on."""
    with Claim() as claim:
        yield claim.port
