"""The details that implementers of Gemma 4 most often get wrong. Each test makes the mistake, and a comparison must detect it.

The eighth (stop and suppressed tokens, the empty thought) is in test_traps_engine.py, the ninth (assistants) in
test_traps_mtp.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from culet.attention import torch_cpu
from culet.errors import CheckpointError
from culet.kernels.dispatch import eager_kernels
from culet.kernels.eager import fused as eager_fused
from culet.kernels.eager import ops as eager_ops
from culet.layers import attention
from culet.layers.experts import Experts
from culet.layers.weight import plain
from culet.models import gemma4
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.spec import ModelSpec
from culet.models.weights import load_model
from tests.models import tiny_checkpoints as tiny
from tests.models.harness import Harness

LENGTH = 3 * tiny.WINDOW + 5
SEEN = 1e-2  # a mistake causes at least a hundred times the tolerance


def load(shape: str, *, latent: bool = False, change: Callable[[ModelSpec], ModelSpec] = lambda spec: spec) -> Gemma4:
    checkpoint = open_checkpoint(str(tiny.checkpoint_folder(shape)))
    checkpoint = dataclasses.replace(checkpoint, spec=change(checkpoint.spec))
    return load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), latent=latent)


def error_of(model: Gemma4, shape: str) -> float:
    """Return the largest difference from transformers' logits, as a share of the largest logit."""
    token_ids = tiny.telling_prompt(shape, LENGTH)
    want = tiny.oracle_logits(tiny.oracle(shape), token_ids)
    got = Harness(model, num_slots=1).all_logits(token_ids)
    return float((got - want).abs().max() / want.abs().max())


@functools.cache
def clean_error(shape: str, latent: bool = False) -> float:
    return error_of(load(shape, latent=latent), shape)


@pytest.fixture(autouse=True)
def _untouched_models_agree() -> None:
    """The same comparison passes without a mistake, so a failure is due to the mistake."""
    assert all(clean_error(shape) <= 1e-4 for shape in tiny.SHAPES)


def spring(monkeypatch: pytest.MonkeyPatch, op: str, trap: Callable[..., Any]) -> None:
    """Replace an op with `trap` wherever models and other ops find it."""
    for module in (eager_ops, eager_fused, eager_kernels()):
        if hasattr(module, op):
            monkeypatch.setattr(module, op, trap)


def trap_values(monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., Tensor], only_k_eq_v: bool = True) -> None:
    """Let `spoil(k, v, qkv, weight, rope, heads)` compute the values that layers store and read (pages without latent)."""
    original = eager_ops.prepare_qkv

    def prepare_qkv(
        qkv: Tensor, weight: Tensor, rope: Any, planes: Tensor, where: Any, heads: Any, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = original(qkv, weight, rope, planes, where, heads, *rest)
        if heads.k_eq_v or not only_k_eq_v:
            v = spoil(k, v, qkv, weight, rope, heads)
            eager_ops.store(planes, torch.stack((k, v), 1), where)
        return q, k, v

    spring(monkeypatch, "prepare_qkv", prepare_qkv)


def key_as_value(k: Tensor, v: Tensor, qkv: Tensor, weight: Tensor, rope: Any, heads: Any) -> Tensor:
    return torch.cat((k[..., -heads.rotated_dims :], k[..., : -heads.rotated_dims]), -1)


def weighted_value(k: Tensor, v: Tensor, qkv: Tensor, weight: Tensor, rope: Any, heads: Any) -> Tensor:
    return v * weight[heads.num_heads :]


def rotated_value(k: Tensor, v: Tensor, qkv: Tensor, weight: Tensor, rope: Any, heads: Any) -> Tensor:
    rot = eager_ops._rotate(v[..., : heads.rotated_dims], rope)
    return torch.cat((rot, v[..., heads.rotated_dims :]), -1)


def raw_value(k: Tensor, v: Tensor, qkv: Tensor, weight: Tensor, rope: Any, heads: Any) -> Tensor:
    return qkv.unflatten(-1, (-1, heads.head_dim))[:, -heads.num_kv_heads :]


# 1: K = V does not mean K == V.
@pytest.mark.parametrize("shape", ["12B", "26B-A4B", "31B"])
@pytest.mark.parametrize("spoil", [key_as_value, weighted_value, rotated_value])
def test_k_eq_v_is_not_k_is_v(shape: str, spoil: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    trap_values(monkeypatch, spoil)
    assert error_of(load(shape), shape) > SEEN


def test_latent_needs_the_key_norm_in_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the same detail for the latent. Plain columns are stored unweighted, so queries must carry the key norm."""
    assert clean_error("31B", latent=True) <= 1e-4
    model = load("31B", latent=True)
    for layer in model._layers:
        heads = layer.attention.heads
        if heads.latent:
            layer.attention.norm_weight[: heads.num_heads] = layer.attention.q_norm
    assert error_of(model, "31B") > SEEN


# 2: proportional rope.
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_rope_exponent_over_the_head_dim(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gemma4.inverse_frequencies

    def compact(theta: float, head_dim: int, rotated_dims: int, factor: float, device: torch.device) -> Tensor:
        return original(theta, rotated_dims, rotated_dims, factor, device)

    monkeypatch.setattr(gemma4, "inverse_frequencies", compact)
    assert error_of(load(shape), shape) > SEEN


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_rope_pairs_across_the_head(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain_first(head_dim: int, rotated: int, num_heads: int = 1) -> Tensor:
        return torch.arange(num_heads * head_dim).view(num_heads, head_dim).roll(-rotated, 1).flatten()

    def rotated_first(head_dim: int, rotated: int, num_heads: int = 1) -> Tensor:
        return torch.arange(num_heads * head_dim)

    monkeypatch.setattr(attention, "plain_first", plain_first)
    monkeypatch.setattr(attention, "rotated_first", rotated_first)
    assert error_of(load(shape), shape) > SEEN


# 3: scale 1, weights w and not 1 + w, v_norm everywhere.
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_attention_scale_is_one(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.functional.scaled_dot_product_attention

    def scaled(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, scale: float) -> Tensor:
        return original(q, k, v, attn_mask=attn_mask, scale=scale * q.shape[-1] ** -0.5)

    monkeypatch.setattr(torch_cpu.F, "scaled_dot_product_attention", scaled)
    assert error_of(load(shape), shape) > SEEN


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_norm_weight_is_not_one_plus_w(shape: str) -> None:
    model = load(shape)
    for layer in model._layers:
        layer.post_mlp_norm.add_(1.0)
    assert error_of(model, shape) > SEEN


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_values_are_normed(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trap_values(monkeypatch, raw_value, only_k_eq_v=False)
    assert error_of(load(shape), shape) > SEEN


# 4: layer_scalar scales the stream, not the block's output.
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_layer_scalar_scales_the_stream(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = eager_ops.residual_norm

    def residual_norm(
        x: Tensor, delta: Tensor, weight: Tensor, scalar: Tensor | None, next_weight: Tensor | None, eps: float
    ) -> Any:
        return original(x, delta, weight if scalar is None else weight * scalar, None, next_weight, eps)

    spring(monkeypatch, "residual_norm", residual_norm)
    assert error_of(load(shape), shape) > SEEN


def test_layer_scalar_comes_after_the_per_layer_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = eager_ops.residual_norm

    def residual_norm(
        x: Tensor, delta: Tensor, weight: Tensor, scalar: Tensor | None, next_weight: Tensor | None, eps: float
    ) -> Any:
        if scalar is not None:  # x + norm(delta) * weight * scalar, where the stream was scaled before
            return original(x * scalar, delta, weight, None, next_weight, eps)
        return original(x, delta, weight, scalar, next_weight, eps)

    spring(monkeypatch, "residual_norm", residual_norm)
    assert error_of(load("E2B"), "E2B") > SEEN


# 5: KV sharing.
@pytest.mark.parametrize("shape", ["E2B", "E4B"])
def test_kv_source_is_the_last_of_its_kind(shape: str) -> None:
    def first_of_its_kind(spec: ModelSpec) -> ModelSpec:
        layers = [
            layer
            if layer.owns_kv
            else dataclasses.replace(layer, kv_source=next(s.index for s in spec.layers if s.window == layer.window))
            for layer in spec.layers
        ]
        return dataclasses.replace(spec, layers=tuple(layers))

    model = load(shape, change=first_of_its_kind)
    if shape == "E2B":  # only one global layer owns KV, so only sliding layers can read the wrong one
        assert {layer.kv_source for layer in model.spec.layers if layer.is_global} == {4}
    assert error_of(model, shape) > SEEN


def test_unused_weights_of_shared_layers_are_ignored(tmp_path: Path) -> None:
    """The published files have k/v weights for KV-shared layers. NaN there must change nothing."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny.checkpoint_folder("E2B"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    dead = [
        name for name in tensors if ".layers.14.self_attn." in name and name.split(".")[-2] in ("k_proj", "v_proj", "k_norm")
    ]
    assert len(dead) == 3
    for name in dead:
        tensors[name].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    assert error_of(model, "E2B") <= 1e-4


def test_shared_layers_have_double_wide_mlps() -> None:
    def narrow(spec: ModelSpec) -> ModelSpec:
        width = spec.layers[0].mlp_width
        return dataclasses.replace(spec, layers=tuple(dataclasses.replace(layer, mlp_width=width) for layer in spec.layers))

    with pytest.raises(CheckpointError, match="wrong shape"):
        load("E2B", change=narrow)


# 6: experts.
def test_router_reads_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda self, residual, normed: original(self, normed, normed))
    assert error_of(load("26B-A4B"), "26B-A4B") > SEEN


def test_experts_have_their_own_input_norm() -> None:
    model = load("26B-A4B")
    for layer in model._layers:
        layer.pre_experts_norm.copy_(layer.pre_mlp_norm)
    assert error_of(model, "26B-A4B") > SEEN


def test_experts_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    original = eager_ops.route

    def route(x: Tensor, router: Tensor, expert_scale: Tensor, top_k: int, eps: float) -> tuple[Tensor, Tensor]:
        return original(x, router, torch.ones_like(expert_scale), top_k, eps)

    spring(monkeypatch, "route", route)
    assert error_of(load("26B-A4B"), "26B-A4B") > SEEN


def test_expert_scale_comes_after_renormalisation() -> None:
    """The mistake shows only in the router, because the norm after the experts removes a common factor of a token's weights."""
    x = torch.randn(50, 80, generator=torch.Generator().manual_seed(4))
    layer = tiny.oracle("26B-A4B").model.language_model.layers[0]
    with torch.no_grad():
        _, want, want_experts = layer.router(x)
    experts = load("26B-A4B")._layers[0].experts
    assert experts is not None
    weights, chosen = experts.router.route(x, experts.expert_scale, experts.top_k, experts.eps)
    assert torch.equal(chosen, want_experts)
    torch.testing.assert_close(weights, want, atol=1e-5, rtol=1e-5)
    assert ((weights / weights.sum(-1, keepdim=True)) - want).abs().max() > SEEN


def test_post_norms_are_not_swapped() -> None:
    model = load("26B-A4B")
    for layer in model._layers:
        layer.post_dense_norm, layer.post_experts_norm = layer.post_experts_norm, layer.post_dense_norm
    assert error_of(model, "26B-A4B") > SEEN


def test_joint_norm_follows_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake sums the dense MLP and the experts without their own norms."""
    spring(monkeypatch, "sum_norms", lambda a, b, weight_a, weight_b, eps: a + b)
    assert error_of(load("26B-A4B"), "26B-A4B") > SEEN


# 7: the embedding's scale is rounded to the weights' precision.
@pytest.mark.parametrize("shape", ["E2B", "31B"])
def test_embedding_scale_is_rounded(shape: str) -> None:
    checkpoint = open_checkpoint(str(tiny.checkpoint_folder(shape, dtype="bfloat16")))
    model = load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    oracle = tiny.oracle(shape, dtype="bfloat16", run_dtype="bfloat16")
    token_ids = torch.tensor(tiny.prompt(40))
    with torch.no_grad():
        want = oracle.get_input_embeddings()(token_ids)
    assert torch.equal(model.embedding.embed(token_ids), want)
    unrounded = (model.embedding.tensor[token_ids].float() * model.spec.hidden_size**0.5).bfloat16()
    assert not torch.equal(unrounded, want)


@pytest.mark.parametrize(("hidden_size", "scale"), [(1536, 39.25), (2560, 50.5), (3840, 62.0), (2816, 53.0), (5376, 73.5)])
def test_embedding_scales_of_the_real_models(hidden_size: int, scale: float) -> None:
    assert plain.rounded(hidden_size**0.5, torch.bfloat16) == scale


# 10: head_dim and num_key_value_heads are those of sliding layers, and windows include the query itself.
@pytest.mark.parametrize("difference", [-1, 1])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_window_counts_the_query(shape: str, difference: int) -> None:
    def moved(spec: ModelSpec) -> ModelSpec:
        layers = [
            layer if layer.window is None else dataclasses.replace(layer, window=layer.window + difference)
            for layer in spec.layers
        ]
        return dataclasses.replace(spec, layers=tuple(layers))

    assert error_of(load(shape, change=moved), shape) > 10 * 1e-4


def test_global_kv_heads_are_ignored_without_k_eq_v(tmp_path: Path) -> None:
    """An E4B-like config sets num_global_key_value_heads although K and V have their own projections."""
    shutil.copytree(tiny.checkpoint_folder("E4B", "old"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_global_key_value_heads"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    assert {layer.num_kv_heads for layer in model.spec.layers} == {2}
    assert error_of(model, "E4B") <= 1e-4
