"""What each rank stores, from configs alone: the cache's table, the weights, and `culet plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from culet.cache.pool import Pool
from culet.cache.spec import REPLICAS_HINT, RUN_TOKENS, CacheLayout, plan_cache, share_among
from culet.cli.plan import plan
from culet.cli.planning.facts import gather, shares_of
from culet.config import ServeConfig, build_config
from culet.drafters.mtp.model import MTPModel
from culet.drafters.mtp.plan import MTPPlan
from culet.engine.resolve import resolve
from culet.errors import ConfigError
from culet.layers.weight.weights import Weights
from culet.models.quantised.part_bytes import check_groups
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank
from culet.serve import service
from culet.testing.tiny import write_checkpoint


def layout_of(name: str, num_ranks: int) -> CacheLayout:
    return plan_cache(share_among(read_spec(VARIANTS[name]).kv_specs(2, latent=True), num_ranks))


@pytest.mark.parametrize(
    ("name", "num_ranks", "replicated", "split"),
    [("12B", 2, 10_240, 5_120), ("26B-A4B", 4, 6_400, 3_200), ("31B", 8, 12_800, 6_400)],
)
def test_bytes_of_the_global_cache(name: str, num_ranks: int, replicated: int, split: int) -> None:
    """A rank stores a token of the global cache in as many bytes as a copy of its head needs, but not every token."""
    layout = layout_of(name, num_ranks)
    sliding, full = layout.groups
    assert (full.stored_bytes, full.bytes_per_token) == (replicated, split)
    assert full.page_tokens == full.stored_tokens * 2
    assert full.stored_tokens % RUN_TOKENS == 0
    assert sliding.page_tokens == sliding.stored_tokens
    whole = layout_of(name, 1).groups[0]
    assert sliding.bytes_per_token * num_ranks == whole.bytes_per_token
    pool = Pool(layout, 3, torch.bfloat16, torch.device("meta"))
    planes = pool.planes(full.layers[0])
    assert planes.numel() * 2 * len(full.layers) == 3 * full.page_tokens * split


def test_one_rank_is_as_before() -> None:
    for name in VARIANTS:
        specs = read_spec(VARIANTS[name]).kv_specs(2, latent=True)
        assert [(spec.num_kv_heads, spec.token_shares) for spec in share_among(specs, 1)] == [
            (spec.num_kv_heads, 1) for spec in specs
        ]


@pytest.mark.parametrize(("name", "num_ranks"), [("12B", 16), ("31B", 3), ("26B-A4B", 6)])
def test_heads_that_cannot_be_shared(name: str, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"got {num_ranks}, but the sliding layers have .* KV heads") as caught:
        layout_of(name, num_ranks)
    assert "`culet serve --data-parallel-size` is for more GPUs" in caught.value.hint


def test_one_head_cannot_be_shared_at_all() -> None:
    """The built-in model has one sliding KV head."""
    with pytest.raises(ConfigError, match="got 2, but the sliding layers have 1 KV heads") as caught:
        resolve(build_config({"device": "cpu", "tensor_parallel_size": 2}))
    assert caught.value.hint == REPLICAS_HINT


def test_small_models_use_replicas(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "E4B")
    with pytest.raises(ConfigError, match="E2B and E4B are too small") as caught:
        resolve(build_config({"model": str(folder), "device": "cpu", "tensor_parallel_size": 2}))
    assert caught.value.hint == REPLICAS_HINT


def test_a_server_checks_the_ranks_before_it_starts_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("engines are made")

    monkeypatch.setattr(service, "Engines", refuse)
    with pytest.raises(ConfigError, match="got 2, but the sliding layers have 1 KV heads"):
        service.Service(build_config({"device": "cpu", "tensor_parallel_size": 2}), ServeConfig(data_parallel_size=2))


def test_groups_of_columns_that_ranks_would_cut(tmp_path: Path) -> None:
    """`culet serve` and `culet plan` refuse it alike, before a rank is started."""
    folder = str(write_checkpoint(tmp_path, "26B-A4B"))
    given = {"model": folder, "device": "cpu", "tensor_parallel_size": 2}
    resolve(build_config(given | {"quantization": "fp8"}))
    with pytest.raises(ConfigError) as caught:
        resolve(build_config(given | {"quantization": "int4"}))
    assert caught.value.message == (
        "tensor-parallel-size: got 2, but a rank's 48 of the 96 columns of layers.0.mlp.down_proj are not whole groups of 32"
    )
    assert caught.value.hint == f"{REPLICAS_HINT}, or --quantization fp8"
    with pytest.raises(ConfigError) as planned:
        run_plan(folder, "--gpu", "h100", "--quantization", "int4", "--tensor-parallel-size", "2")
    assert (planned.value.message, planned.value.hint) == (caught.value.message, caught.value.hint)


def test_how_many_ranks_keep_groups_whole() -> None:
    arguments = "26B-A4B", "--gpu", "h100", "--quantization", "int4", "--tensor-parallel-size"
    run_plan(*arguments, "2")
    for count in "4", "8":
        with pytest.raises(ConfigError, match="are not whole groups of 32") as caught:
            run_plan(*arguments, count)
        assert caught.value.hint == "use 2 GPUs, or --quantization fp8"
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}
    stored = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    config = VARIANTS["12B"] | {"quantization_config": stored}
    check_groups(read_spec(config), config, "auto", 8)
    config = VARIANTS["26B-A4B"] | {"quantization_config": stored}
    check_groups(read_spec(config), config, "auto", 1)
    with pytest.raises(ConfigError, match=r"1056 of the 2112 columns .* groups of 64") as caught:
        check_groups(read_spec(config), config, "auto", 2)
    assert caught.value.hint == f"{REPLICAS_HINT}, or another checkpoint"


def run_plan(*arguments: str) -> str:
    done = CliRunner().invoke(plan, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_plan_of_four_gpus() -> None:
    arguments = "31B", "--gpu", "h100", "--json"
    one, four = (json.loads(run_plan(*arguments, "--tensor-parallel-size", str(count))) for count in (1, 4))
    assert one["ranks"] is None
    ranks = four["ranks"]
    assert one["weights"] == four["weights"]
    text, everything = four["fits"][0], four["fits"][2]
    assert (text["text_only"], everything["text_only"], everything["latent"]) == (True, False, True)
    assert text["weight_bytes"] == pytest.approx(one["fits"][0]["weight_bytes"] / 4, rel=0.01)
    assert ranks["weight_bytes"] == everything["weight_bytes"] == text["weight_bytes"] + one["weights"]["tower_bytes"]
    shared = {share["part"]: share["how"] for share in ranks["weights"]}
    assert shared["token embedding"] == "by vocabulary"
    assert shared["attention"] == "by heads"
    assert shared["dense MLP"] == "by width"
    assert shared["norms"] == shared["vision tower"] == "whole on each rank"
    assert [group["how"] for group in ranks["cache"]] == ["by heads", "by heads"]
    assert [group["num_kv_heads"] for group in four["attention"]] == [4, 1]
    first = ranks["exchanges"][0]
    assert (first["num_tokens"], first["num_reductions"]) == (1, 121)
    assert first["reduced_bytes"] == 121 * 5376 * 2
    assert first["method"] == "one-shot"
    assert first["moved_bytes"] == 3 * first["reduced_bytes"]
    assert first["link_s"] == pytest.approx((first["moved_bytes"] + first["gathered_bytes"]) / 450e9)


def test_what_the_ranks_exchange() -> None:
    """In one shot, every rank receives all other tensors. Otherwise, each one adds its part and receives the other parts."""
    for count in (2, 4, 8):
        plan = json.loads(run_plan("31B", "--gpu", "h100", "--json", "--tensor-parallel-size", str(count)))
        exchanges = {each["num_tokens"]: each for each in plan["ranks"]["exchanges"]}
        assert [each["method"] for each in exchanges.values()] == ["one-shot", "one-shot", "two-shot", "two-shot", "NCCL"]
        for num_tokens, each in exchanges.items():
            factor = count - 1 if each["method"] == "one-shot" else 2 * (count - 1) / count
            assert each["moved_bytes"] == factor * each["reduced_bytes"] == factor * 121 * num_tokens * 5376 * 2
        # A step has as many rows of logits as sequences, by default 128. With 8 ranks, pairs also share tokens of 10 layers.
        weights = 2048 * 4 * 10 * 8 * (count - 1) if count == 8 else 0
        assert exchanges[2048]["gathered_bytes"] == 128 * 262144 * 4 * (count - 1) // count + weights
    few = "--max-num-seqs", "4", "--speculative-config", '{"method": "mtp", "model": "random:", "num_speculative_tokens": 3}'
    plan = json.loads(run_plan("31B", "--gpu", "h100", "--json", "--tensor-parallel-size", "2", *few))
    assert plan["ranks"]["exchanges"][-1]["gathered_bytes"] == 4 * 4 * 262144 * 4 // 2


@pytest.mark.parametrize("name", ["12B", "26B-A4B", "31B"])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_the_mtp_drafter_of_a_rank(name: str, num_ranks: int) -> None:
    """Its projections are whole on each rank, and so is a head of the target whose tokens ranks share."""
    choice = '{"method": "mtp", "model": "random:"}'
    facts = gather(name, "h100", build_config({"tensor_parallel_size": num_ranks, "speculative_config": choice}))
    assert isinstance(facts.drafter, MTPPlan)
    rank = Rank(0, num_ranks)
    weights = Weights(torch.bfloat16, torch.device("meta"), rank, None if num_ranks == 1 else RankGroup(rank))
    held = MTPModel(facts.drafter.spec, weights, latent=True).num_bytes
    assert next(share.rank_bytes for share in shares_of(facts) if share.part == "mtp") == pytest.approx(held, rel=1e-3)


def test_ranks_on_a_cpu_add_with_gloo() -> None:
    plan = json.loads(plan_json("cpu", 2))
    assert {each["method"] for each in plan["ranks"]["exchanges"]} == {"gloo"}
    assert {each["link_s"] for each in plan["ranks"]["exchanges"]} == {None}


def test_ranks_on_a_cpu_share_its_memory() -> None:
    one, two = (json.loads(plan_json("cpu", count)) for count in (1, 2))
    assert one["gpu"] == two["gpu"]
    assert two["fits"][0]["allowed_bytes"] == pytest.approx(one["fits"][0]["allowed_bytes"] / 2, abs=2)
    one, two = (json.loads(plan_json("h100", count)) for count in (1, 2))
    assert one["fits"][0]["allowed_bytes"] == two["fits"][0]["allowed_bytes"]


def plan_json(gpu: str, num_ranks: int) -> str:
    arguments = ["12B", "--gpu", gpu, "--tensor-parallel-size", str(num_ranks), "--json"]
    return CliRunner().invoke(plan, arguments, catch_exceptions=False).output  # it may not fit on this machine


def test_the_plan_says_why() -> None:
    text = " ".join(run_plan("12B", "--gpu", "h100", "--tensor-parallel-size", "2").split())
    assert "global KV cache by tokens 1 KV heads for 2 ranks: 2 ranks of a head take turns with runs of tokens" in text
    assert "Exchanges per step over NVLink 4, 450 GB/s" in text
    assert "What fits into each GPU" in text
