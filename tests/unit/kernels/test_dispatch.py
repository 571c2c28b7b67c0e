"""Every op has a kernel on the GPU, with the parameters of its eager twin."""

from __future__ import annotations

import inspect

import pytest
import torch

from culet.errors import ConfigError
from culet.kernels import dispatch
from culet.kernels.eager import fused as eager_fused
from culet.kernels.eager import ops as eager_ops


def test_cpu_and_meta_are_eager() -> None:
    for device in ("cpu", torch.device("meta")):
        ops = dispatch.for_device(device)
        assert ops.rms_norm is eager_ops.rms_norm
        assert ops.gated_linear is eager_fused.gated_linear


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match="kernel device"):
        dispatch.for_device("xpu")


@pytest.mark.parametrize("name", list(dispatch.eager_ops()))
def test_every_op_on_the_gpu(name: str) -> None:
    pytest.importorskip("triton")
    served = getattr(dispatch.for_device("cuda"), name)
    if name in dispatch.EAGER_ON_GPU:
        assert served is dispatch.eager_ops()[name]
        return
    assert served.__module__.startswith("culet.kernels.triton."), f"{name} would run as torch ops on a GPU"
    eager = inspect.signature(dispatch.eager_ops()[name]).parameters
    assert list(inspect.signature(served).parameters) == list(eager)


def test_a_missing_kernel_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "TRITON_MODULES", ("norms.residual",))
    dispatch.triton_kernels.cache_clear()
    try:
        with caplog.at_level("WARNING", logger="culet"):
            ops = dispatch.for_device("cuda")
            dispatch.for_device("cuda")
        assert ops.gelu_mul is eager_ops.gelu_mul
        assert ops.rms_norm is not eager_ops.rms_norm
        (record,) = caplog.records
        assert "gelu_mul" in record.getMessage()
        assert "rms_norm" not in record.getMessage()
    finally:
        dispatch.triton_kernels.cache_clear()
