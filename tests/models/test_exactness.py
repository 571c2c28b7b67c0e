"""The decoder compared with transformers, on small checkpoints with the structure of the real ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import AFTER_FINAL_NORM, Gemma4
from culet.models.weights import load_model
from tests.matrix import matrix
from tests.models import tiny_checkpoints as tiny
from tests.models.bfloat16 import QuickBFloat16
from tests.models.harness import Harness

SHAPES = tiny.SHAPES
WINDOW = tiny.WINDOW
LENGTHS = (WINDOW - 5, WINDOW, 4 * WINDOW + 6)
K_EQ_V = ("12B", "26B-A4B", "31B")
# The latent makes a difference only if K = V.
SHAPE_LATENT = [(shape, True) for shape in SHAPES] + [(shape, False) for shape in K_EQ_V]


@functools.cache
def culet_model(shape: str, latent: bool = True, form: str = "new", dtype: str = "float32") -> Gemma4:
    checkpoint = open_checkpoint(str(tiny.checkpoint_folder(shape, form, dtype)))
    return load_model(checkpoint, dtype=getattr(torch, dtype), device=torch.device("cpu"), latent=latent)


@functools.cache
def expected(shape: str, length: int, seed: int = 0) -> tuple[list[int], Tensor]:
    """Return a prompt and its float32 logits from transformers."""
    token_ids = tiny.telling_prompt(shape, length, seed)
    return token_ids, tiny.oracle_logits(tiny.oracle(shape), token_ids)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error, size = float((got - want).abs().max()), float(want.abs().max())
    assert error <= 1e-4 * size, f"max |a - b| is {error:.2e}, {error / size:.2e} of max |b|"


@pytest.mark.parametrize(("shape", "latent"), SHAPE_LATENT)
@pytest.mark.parametrize("length", LENGTHS)
def test_one_chunk(shape: str, latent: bool, length: int) -> None:
    token_ids, want = expected(shape, length)
    assert_close(Harness(culet_model(shape, latent)).all_logits(token_ids), want)


@matrix({"shape, latent": SHAPE_LATENT, "page_tokens": [4, 12]})
def test_odd_chunks(shape: str, latent: bool, page_tokens: int) -> None:
    token_ids, want = expected(shape, LENGTHS[-1])
    harness = Harness(culet_model(shape, latent), page_tokens=page_tokens)
    assert_close(harness.all_logits(token_ids, (7, 1, 23, 16, 17, 1, 5)), want)
    assert_close(harness.all_logits(token_ids, (1,) * 20 + (33, 17)), want)


@matrix({"shape, latent": SHAPE_LATENT, "first": [WINDOW - 7, 2 * WINDOW + 1, 3 * WINDOW]})
def test_prefill_then_decode(shape: str, latent: bool, first: int) -> None:
    """Run chunks with no logits or one, so that tails and unstored keys occur, then single tokens and a verify."""
    token_ids, want = expected(shape, LENGTHS[-1])
    harness = Harness(culet_model(shape, latent))
    track = harness.add(token_ids)
    got, positions = [], []
    sizes = [(first, 0), (6, 1), (1, 1), (1, 1), (4, 4), (1, 1)]
    sizes.append((len(token_ids) - sum(size for size, _ in sizes), 2))
    for size, num_logits in sizes:
        got.append(harness.step([(track, size, num_logits)])[0])
        positions += range(track.start - num_logits, track.start)
    assert_close(torch.cat(got), want[positions])


@pytest.mark.parametrize(("shape", "latent"), SHAPE_LATENT)
def test_ragged_batch(shape: str, latent: bool) -> None:
    """One step holds very different rows: long and short prompts, decodes, verifies, and a finished neighbour."""
    lengths = (LENGTHS[-1], 9, WINDOW, 40, 2 * WINDOW + 3)
    wanted = [expected(shape, length, seed) for seed, length in enumerate(lengths)]
    harness = Harness(culet_model(shape, latent), page_tokens=4)
    tracks = [harness.add(token_ids) for token_ids, _ in wanted]
    rounds = 0
    while any(track.start < len(track.tokens) for track in tracks):
        parts = []
        for index, track in enumerate(tracks):
            left = len(track.tokens) - track.start
            size = min(left, ((29, 0), (1, 1), (7, 2), (1, 1), (17, 1))[(index + rounds) % 5][0])
            logits = min(size, ((29, 0), (1, 1), (7, 2), (1, 1), (17, 1))[(index + rounds) % 5][1])
            if size:
                parts.append((track, size, logits))
        for (track, _, num_logits), got in zip(parts, harness.step(parts), strict=True):
            want = wanted[track.slot][1][track.start - num_logits : track.start]
            if num_logits:
                assert_close(got, want)
        rounds += 1
    assert rounds > 5


@pytest.mark.parametrize("shape", SHAPES)
def test_config_forms(shape: str) -> None:
    """The published config keys and per_layer_config describe the same model."""
    old, new = culet_model(shape, form="old"), culet_model(shape)
    assert old.spec == new.spec
    token_ids, want = expected(shape, LENGTHS[-1])
    assert_close(Harness(old).all_logits(token_ids), want)


@pytest.mark.parametrize("shape", SHAPES)
def test_recomputed_after_preemption(shape: str) -> None:
    token_ids, want = expected(shape, LENGTHS[-1])
    harness = Harness(culet_model(shape))
    track, other = harness.add(token_ids), harness.add(token_ids)
    harness.step([(track, 40, 1), (other, 31, 0)])
    harness.step([(track, 1, 1), (other, 1, 1)])
    harness.drop(track)
    (got,) = harness.step([(track, 60, 1)])
    assert_close(got, want[59:60])
    got, other_got = harness.step([(track, 1, 1), (other, 1, 1)])
    assert_close(got, want[60:61])
    assert_close(other_got, want[32:33])


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_transformers(shape: str) -> None:
    """Generate 24 tokens after ragged prompts, across the window's edge."""
    prompts = [tiny.telling_prompt(shape, length, 5) for length in (5, WINDOW - 3, 2 * WINDOW + 3)]
    got = Harness(culet_model(shape)).greedy(prompts, 24, chunk=13)
    for prompt, tokens in zip(prompts, got, strict=True):
        logits = tiny.oracle_logits(tiny.oracle(shape), prompt + tokens)[len(prompt) - 1 : -1]
        best = logits.topk(2)
        for place, token in enumerate(tokens):
            is_tie = best.values[place, 0] - best.values[place, 1] < 1e-4 * logits.abs().max()
            assert token == best.indices[place, 0] or is_tie


@functools.cache
def exact_and_rounded(shape: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return transformers' logits of a prompt with weights in bf16, computed in float32 and in bf16."""
    exact, rounded = tiny.oracle(shape, dtype="bfloat16"), tiny.oracle(shape, dtype="bfloat16", run_dtype="bfloat16")
    token_ids = tiny.prompt(LENGTHS[-1], seed)
    with QuickBFloat16():
        found = tiny.oracle_logits(rounded, token_ids)
    return tiny.oracle_logits(exact, token_ids), found


@pytest.mark.parametrize("num_prompts", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shape", "latent"), SHAPE_LATENT)
def test_bfloat16_error(shape: str, latent: bool, num_prompts: int) -> None:
    """The root mean square error in bf16, over several prompts, is at most 1.2 times that of transformers."""
    model = culet_model(shape, latent, dtype="bfloat16")
    ours, theirs = [], []
    for seed in range(num_prompts):
        want, rounded = exact_and_rounded(shape, seed)
        theirs.append(rounded - want)
        with QuickBFloat16():
            ours.append(Harness(model, num_slots=1).all_logits(tiny.prompt(LENGTHS[-1], seed)) - want)
    our_error, their_error = (float(torch.cat(errors).square().mean().sqrt()) for errors in (ours, theirs))
    assert our_error > 0
    assert our_error <= 1.2 * their_error, f"{our_error:.4f} against {their_error:.4f}"


def decoder_of(model: Any) -> Any:
    return model.model if hasattr(model.model, "layers") else model.model.language_model


@pytest.mark.parametrize("shape", ["E2B", "31B"])
def test_taps(shape: str) -> None:
    """A tap holds the residual stream of all tokens at a layer's output, even if later layers run only on the tail."""
    token_ids, _ = expected(shape, LENGTHS[-1])
    oracle, outputs = tiny.oracle(shape), {}
    layers = decoder_of(oracle).layers
    taps = (0, 3, 4, len(layers) - 1)
    hooks = [
        layers[tap].register_forward_hook(lambda _m, _i, out, tap=tap: outputs.__setitem__(tap, out[0].clone())) for tap in taps
    ]
    tiny.oracle_logits(oracle, token_ids)
    for hook in hooks:
        hook.remove()
    last = [tapped_up_to(shape, token_ids, taps[:count], outputs) for count in range(len(taps) + 1)]
    for states in last[1:]:
        assert_close(states, last[0])


def tapped_up_to(shape: str, token_ids: list[int], taps: tuple[int, ...], outputs: dict[int, torch.Tensor]) -> torch.Tensor:
    """Compare the taps of a chunk with no logits and of a step with two. Return the last hidden states."""
    harness = Harness(culet_model(shape))
    track = harness.add(token_ids)
    for begin, end, num_logits in ((0, 5, 0), (5, len(token_ids), 2)):
        harness.step([(track, end - begin, num_logits)], taps=(*taps, AFTER_FINAL_NORM))
        tapped = harness.hidden.tapped
        for tap in taps:
            assert_close(tapped[tap], outputs[tap][begin:end])
        assert torch.equal(tapped[AFTER_FINAL_NORM], harness.hidden.last_LD)
    return harness.hidden.last_LD


@pytest.mark.parametrize("shape", ["E2B", "E4B"])
def test_only_the_tail_goes_on_behind_the_last_kv(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = culet_model(shape)
    seen: list[int] = []
    original = model.ops.gated_linear
    monkeypatch.setattr(model.ops, "gated_linear", lambda x, weight: seen.append(x.shape[0]) or original(x, weight))
    harness = Harness(model)
    track = harness.add(expected(shape, LENGTHS[-1])[0])
    owned, shared = model.num_kv_layers, model.spec.num_kv_shared
    harness.step([(track, 40, 0)])
    assert seen == [40] * (owned - 1)
    seen.clear()
    harness.step([(track, 9, 2)])
    assert seen == [9] * (owned - 1) + [2] * (1 + shared)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_layer_of_each_kind_calls_all_that_a_step_calls(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are compared by op and argument shapes, which determine the kernels that a GPU needs."""
    model = culet_model(shape)
    seen: set[object] = set()

    def listening(name: str, op: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            seen.add((name, *(tuple(value.shape) if isinstance(value, torch.Tensor) else type(value) for value in given)))
            return op(*given)

        return call

    for name in ("linear", "linear_parts", "gated_linear", "linear_gelu_times", "experts", "route", "prepare_q", "prepare_qkv"):
        monkeypatch.setattr(model.ops, name, listening(name, getattr(model.ops, name)))
    for name in ("residual_norm", "residual_norm_two", "residual_norm_joint"):
        monkeypatch.setattr(model.ops, name, listening(name, getattr(model.ops, name)))
    for num_new, num_logits in ((40, 0), (40, 1), (40, 40), (1, 1)):
        found = []
        for is_rehearsal in (False, True):
            harness = Harness(model)
            with model.one_of_each_kind() if is_rehearsal else nullcontext():
                harness.step([(harness.add(range(1, 41)), num_new, num_logits)], taps=(0, AFTER_FINAL_NORM))
            assert harness.hidden.tapped.keys() == {0, AFTER_FINAL_NORM}
            found.append(frozenset(seen))
            seen.clear()
        assert found[0] == found[1]
        assert found[0]


class LiveMemory(TorchDispatchMode):
    """Measures the peak bytes of the tensors that are created inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage()).data_ptr() not in given:
                self.live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.live = {address: entry for address, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(0, True), (1, False), (40, True)], id="few"),
        pytest.param([(0, False), (1, True), (40, False)], id="others", marks=pytest.mark.slow),
    ],
)
def test_one_layer_of_each_kind_takes_the_memory_of_all(shape: str, cases: list[tuple[int, bool]]) -> None:
    """This holds for prompts with no logits, few and all, and with taps that keep the stream of several layers."""
    model = culet_model(shape)
    for num_logits, has_taps in cases:
        taps = tuple(range(1, len(model.spec.layers), 2)) if has_taps else ()
        peaks = []
        for is_rehearsal in (False, True):
            harness = Harness(model)
            track, memory = harness.add(range(1, 41)), LiveMemory()
            with model.one_of_each_kind(taps) if is_rehearsal else nullcontext(), memory:
                harness.step([(track, 40, num_logits)], taps=taps)
            peaks.append(memory.peak)
        assert peaks[0] == peaks[1] > 0, (num_logits, taps)


def test_checkpoints_hide_nothing() -> None:
    """Attention is peaked, weights differ from their defaults, and the softcap changes the logits."""
    for shape in SHAPES:
        model = tiny.oracle(shape)
        token_ids, _ = expected(shape, LENGTHS[-1])
        with torch.no_grad():
            attentions = model(input_ids=torch.tensor([token_ids]), use_cache=False, output_attentions=True).attentions
        best = torch.stack([weights[..., WINDOW:, :].max(-1).values.mean() for weights in attentions]).mean()
        assert best > 0.6
        decoder = decoder_of(model)
        for name, weight in [*decoder.named_parameters(), *decoder.named_buffers()]:
            if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                assert 0.5 <= weight.min() <= weight.max() <= 1.5
                assert weight.numel() == 1 or weight.std() > 0.1
        logits = expected(shape, LENGTHS[-1])[1]
        assert logits.abs().max() > 0.5 * decoder.config.final_logit_softcapping
