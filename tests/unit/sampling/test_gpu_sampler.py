"""How draws are passed to the GPU's kernels. The eager sampler stands in for the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from culet.kernels.eager import sampling as eager_sampling
from culet.sampling import gpu_sampler, sampler
from culet.sampling.gpu_sampler import GpuSampler, is_served
from culet.sampling.sampler import History, TokenMasks, sample
from tests.samplings import PLAIN, draw_by_columns

BASE = replace(PLAIN, top_k=20, top_p=0.9, seed=2**64 - 5, sample=3)
KINDS = {
    "greedy": replace(BASE, temperature=0.0),
    "few": BASE,
    "all": replace(BASE, top_k=0, top_p=1.0, min_p=0.01, seed=7),
    "wide": replace(BASE, top_k=65, seed=8),
    "nucleus": replace(BASE, top_k=0, top_p=0.8, seed=9),
    "biased": replace(BASE, logit_bias=((5, 9.0), (6, float("-inf")))),
    "penalised": replace(BASE, repetition_penalty=1.5, frequency_penalty=0.7),
}


class Kernels:
    """Draws from the kernels' arguments as the kernels do, and counts the calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def draw(self, logits_RV: Tensor, columns: Any, positions_R: Tensor, *, has_few: bool, has_open: bool) -> Tensor:
        assert positions_R.dtype == torch.int32
        self.calls.append({"columns": columns, "has_few": has_few, "has_open": has_open})
        for heat, top_k in zip(columns.temperature_R.tolist(), columns.top_k_R.tolist(), strict=True):
            assert heat == 0 or (has_few if top_k > 0 else has_open)
        return draw_by_columns(logits_RV, columns, positions_R)

    def penalise(self, logits_RV: Tensor, tokens_SL: Tensor, some: Any, max_len: int, counts_HV: Tensor) -> None:
        lengths = some.lengths_H.tolist()
        assert max_len == max(lengths)
        assert len(lengths) <= counts_HV.shape[0] == gpu_sampler.PENALISED_ROWS
        self.calls.append({"penalised": len(lengths)})
        facts = zip(some.repetition_H.tolist(), some.frequency_H.tolist(), some.presence_H.tolist(), strict=True)
        settings = [replace(BASE, repetition_penalty=a, frequency_penalty=b, presence_penalty=c) for a, b, c in facts]
        history = History(tokens_SL, some.slots_H.tolist(), some.prompt_lens_H.tolist())
        rows = some.rows_H.long()
        logits_RV[rows] = sampler.adjust(logits_RV[rows], settings, lengths, history)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(gpu_sampler, "draw_by_kernels", kernels.draw)
    monkeypatch.setattr(gpu_sampler, "penalise", kernels.penalise)
    monkeypatch.setattr(gpu_sampler, "add_bias", eager_sampling.add_bias)
    monkeypatch.setattr(gpu_sampler, "apply_bitmask", eager_sampling.apply_bitmask)
    return kernels


def test_which_rows_the_kernels_serve() -> None:
    assert {name for name, sampling in KINDS.items() if not is_served(sampling)} == {"wide", "nucleus"}


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("names", [[name] for name in KINDS] + [list(KINDS), list(KINDS)[::-1], ["wide", "nucleus"]])
def test_draws_are_those_of_the_eager_sampler(names: list[str], has_masks: bool, kernels: Kernels) -> None:
    settings = [KINDS[name] for name in names]
    gpu = GpuSampler()
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        logits = 3 * torch.randn(len(names), 5000, generator=generator)
        history = History(
            torch.randint(0, 5000, (len(names), 50), generator=generator), list(range(len(names))), [9] * len(names)
        )
        positions = [20 + step + row for row in range(len(names))]
        positions_R = torch.tensor(positions, dtype=torch.int32) if step % 2 else None
        masks = None
        if has_masks:
            bits = torch.randint(-(2**31), 2**31, (1, 157), generator=generator, dtype=torch.int32)
            masks = TokenMasks([len(names) - 1], bits)
        wanted = sample(logits, settings, positions, history, masks=masks).tolist()
        assert gpu.sample(logits, settings, positions, history, positions_R, masks=masks).tolist() == wanted
        if masks is not None:
            assert bits[0, wanted[-1] // 32].item() >> wanted[-1] % 32 & 1


def test_logits_stay_where_log_probabilities_are_wanted(kernels: Kernels) -> None:
    logits = torch.randn(2, 300)
    before = logits.clone()
    settings = [KINDS["biased"], replace(KINDS["penalised"], logprobs=3)]
    history = History(torch.randint(0, 300, (2, 50)), [0, 1], [9, 9])
    masks = TokenMasks([0], torch.zeros(1, 10, dtype=torch.int32))
    GpuSampler().sample(logits, settings, [20, 21], history, masks=masks)
    assert torch.equal(logits, before)


def test_many_penalised_rows_go_in_pieces(kernels: Kernels) -> None:
    """This also holds after sequences have changed slots, as after a preemption."""
    settings = [replace(KINDS["penalised"], seed=row) for row in range(gpu_sampler.PENALISED_ROWS + 3)]
    gpu, tokens_SL = GpuSampler(), torch.randint(0, 300, (len(settings), 50))
    for slots in (list(range(len(settings))), list(range(len(settings)))[::-1]):
        logits, positions = torch.randn(len(settings), 300), [20 + row for row in range(len(settings))]
        history = History(tokens_SL, slots, [9] * len(settings))
        wanted = sample(logits, settings, positions, history).tolist()
        assert gpu.sample(logits, settings, positions, history).tolist() == wanted
    assert [call["penalised"] for call in kernels.calls if "penalised" in call] == [gpu_sampler.PENALISED_ROWS, 3] * 2


def test_settings_go_to_the_device_once(kernels: Kernels) -> None:
    gpu = GpuSampler()
    logits = torch.randn(2, 300)
    for settings in ([KINDS["few"], KINDS["greedy"]],) * 3:
        gpu.sample(logits, list(settings), [5, 6])
    gpu.sample(logits, [KINDS["few"], KINDS["all"]], [5, 6])
    gpu.sample(logits[:1], [KINDS["few"]], [5])
    kept = [call["columns"] for call in kernels.calls]
    assert kept[0] is kept[1] is kept[2]
    assert kept[3] is not kept[2]
    assert kept[4].top_k_R.shape == (1,)
    assert [(call["has_few"], call["has_open"]) for call in kernels.calls] == [(True, False)] * 3 + [
        (True, True),
        (True, False),
    ]
