"""Culet's rounding errors in float32 are no larger than those of transformers. Both are measured against float64.

The errors depend on the CPU, because matrix products add in another order on each. So they are compared with each other.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.engine.media import media_rig
from tests.engine.media.media_rig import VOCAB, Prompt, ask, clip, image, make, oracle, oracle_logprobs, run, table, text

MARGIN = 2.0  # the ratios on a Neoverse N1 are 0.85 to 1.04


class Float64(TorchFunctionMode):
    """Computes in float64 what code converts to float32, such as transformers' norms and angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        named = {name: self._wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._wider, args), **named)

    @staticmethod
    def _wider(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


def exact_logprobs(shape: str, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return what transformers computes from the same weights if its towers and decoder are float64 throughout."""
    model = copy.deepcopy(oracle(shape)).double()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with monkeypatch.context() as patch, Float64():
            patch.setattr(media_rig, "oracle", lambda shape: model)
            patch.setattr(media_rig, "_rows", media_rig._rows.__wrapped__)
            return oracle_logprobs.__wrapped__(shape, prompt)
    finally:
        torch.set_default_dtype(default)


def size_of(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


@pytest.mark.parametrize("shape", ["E4B", "31B"])
def test_errors_are_those_of_float32(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [
        Prompt.of(shape, text(60, 1)),
        Prompt.of(shape, text(9), image(2, 3, 1), text(6, 1)),
        Prompt.of(shape, text(18), image(5, 8, 3), text(19, 5)),
    ]
    if shape == "E4B":
        prompts.append(Prompt.of(shape, text(5), clip(84), text(7, 7)))
    engine = make(shape)
    told = run(engine, *(ask(engine, str(index), prompt, prompt_logprobs=VOCAB) for index, prompt in enumerate(prompts)))
    for prompt, answer in zip(prompts, told, strict=True):
        exact = exact_logprobs(shape, prompt, monkeypatch)[:-1]
        assert exact.dtype == torch.float64
        own, usual = size_of(table(answer.scores) - exact), size_of(oracle_logprobs(shape, prompt)[:-1] - exact)
        assert 0 < own < MARGIN * usual
