"""`culet plan` with a drafter: its attention is planned separately and shown beside the target's."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from culet.cache.spec import plan_cache
from culet.cli.main import run
from culet.config import DraftChoice
from culet.drafters.base import DRAFTERS, cache_specs, open_drafter, plan_drafter_attention, target_groups
from culet.errors import ConfigError
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what `culet plan` prints."""

    def call(*words: str) -> str:
        assert run(["plan", *words]) == 0
        return capsys.readouterr().out

    return call


def config(method: str, **more: object) -> str:
    return json.dumps({"method": method, "model": "random:", **more})


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("method", DRAFTERS)
def test_every_variant_with_every_drafter(name: str, method: str) -> None:
    """Every drafter in the table puts its layers after the target's, uses groups that exist, and counts its bytes."""
    target = read_spec(VARIANTS[name])
    drafter = open_drafter(DraftChoice(method, "random:"), target)
    layout = plan_cache(cache_specs(target, drafter, 2, latent=True))
    plain = plan_cache(target.kv_specs(2))
    readers = drafter.readers(layout)
    assert drafter.method == method
    assert drafter.max_drafts > 0
    assert set(readers) <= {group.name for group in layout.groups}
    assert all(layer >= len(target.layers) for layers in readers.values() for layer in layers)
    # The target's groups and slab are the same as without a drafter.
    assert [(group.name, group.layers, group.page_tokens) for group in target_groups(layout)] == [
        (group.name, group.layers, group.page_tokens) for group in plain.groups
    ]
    assert layout.slab_bytes == plain.slab_bytes
    assert drafter.reads_target_pages == (len(layout.groups) == len(plain.groups))
    assert all(tap < len(target.layers) for tap in drafter.taps)
    planned = plan_drafter_attention(drafter, layout, "cpu")
    assert [group.backend for group in planned.groups] == ["torch_cpu"] * len(readers)
    assert all(group.need.num_heads == drafter.num_heads for group in planned.groups)


def test_side_by_side(plan: Callable[..., str]) -> None:
    text = plan("31B", "--gpu", "h200", "--speculative-config", config("mtp"))
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["target"], ["mtp"])]
    assert [row[:4] for row in rows[:4]] == [
        ["target", "sliding", "triton", "50"],
        ["target", "global", "triton", "10"],
        ["mtp", "sliding", "triton", "3"],
        ["mtp", "global", "triton", "1"],
    ]
    assert "up to 3 drafts per round, reads the target's pages" in text
    assert "target" not in plan("31B", "--gpu", "h200").splitlines()[6]


def test_without_weights(plan: Callable[..., str]) -> None:
    text = plan("31B", "--gpu", "h200", "--speculative-config", '{"method": "suffix"}')
    assert "suffix, no weights: up to 8 drafts per round, reads the request's own text, 0.000 GB of weights" in text


def test_as_json(plan: Callable[..., str]) -> None:
    with_drafter = json.loads(plan("E4B", "--gpu", "h200", "--json", "--speculative-config", config("mtp")))
    without = json.loads(plan("E4B", "--gpu", "h200", "--json"))
    assert without["drafter"] is None
    drafter = with_drafter["drafter"]
    assert (drafter["method"], drafter["max_drafts"], drafter["reads_target_pages"]) == ("mtp", 3, True)
    assert drafter["attention"][0]["num_heads"] == 4
    assert round(drafter["weight_bytes"] / 2e6, 1) == 78.5
    assert with_drafter["fits"][0]["weight_bytes"] - without["fits"][0]["weight_bytes"] == drafter["weight_bytes"]


def test_an_explicit_backend_is_used_or_refused(plan: Callable[..., str]) -> None:
    """The drafter's backend does not determine the target's, nor the other way round."""
    chosen = json.loads(
        plan("31B", "--gpu", "h200", "--json", "--speculative-config", config("mtp", attention_backend="torch_cpu"))
    )
    assert {group["backend"] for group in chosen["drafter"]["attention"]} == {"torch_cpu"}
    assert {group["backend"] for group in chosen["attention"]} == {"triton"}
    target = read_spec(VARIANTS["31B"])
    drafter = open_drafter(DraftChoice("mtp", "random:"), target)
    layout = plan_cache(cache_specs(target, drafter, 2, latent=True))
    with pytest.raises(ConfigError, match=r"speculative-config: .*'triton' does not support layer 60 \(sliding"):
        plan_drafter_attention(drafter, layout, "cpu", "triton")
