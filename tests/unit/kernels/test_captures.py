"""`side_by_side` without a graph, and the workspaces of launches that run side by side."""

from __future__ import annotations

import pytest
import torch

from culet.kernels.captures import side_by_side


def test_both_results_outside_a_capture() -> None:
    calls: list[str] = []

    def call(name: str) -> str:
        calls.append(name)
        return name.upper()

    first, second = side_by_side(lambda: call("experts"), lambda: call("mlp"), torch.device("cpu"))
    assert (first, second) == ("EXPERTS", "MLP")
    assert calls == ["experts", "mlp"]


def test_the_router_and_linear_layers_share_no_memory() -> None:
    pytest.importorskip("triton")
    from culet.kernels.triton.experts import route
    from culet.kernels.triton.linear.few_tokens import workspace

    x, router, out = torch.zeros(32, 2816), torch.zeros(128, 2816), (torch.zeros(32, 8), torch.zeros(32, 8))
    (launch,) = route.describe_route(x, router, torch.ones(128), out, 1e-6)
    assert launch.arguments["SPLIT"] > 1
    parts, arrivals = workspace(x.device)
    assert launch.arguments["parts"].data_ptr() != parts.data_ptr()
    assert launch.arguments["arrivals"].data_ptr() != arrivals.data_ptr()
