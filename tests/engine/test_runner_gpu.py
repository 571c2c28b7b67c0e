"""The engine on a GPU against the engine on a CPU: kernels, graphs, look-ahead, and all that scheduling does to a sequence.

Checkpoints are those of tests/models with heads that the tensor cores take. Weights are bfloat16, so that both sides have the
same ones; the CPU runs them in float32, and says how far below its favourite each of the GPU's tokens lies.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import SHAPES, WINDOW, folder_of, prompt  # isort: skip
from tiny_checkpoints import _root, build  # isort: skip

from culet import LLM, SamplingParams
from culet.cache.spec import plan_cache
from culet.errors import InternalError
from culet.models.checkpoint import open_checkpoint
from culet.types import PageTable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS = (1, 7, WINDOW, WINDOW + 1, 3 * WINDOW + 5, 5 * WINDOW)
NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Warm enough that sequences wander: a greedy one of these models soon repeats itself, and would with a broken cache too.
DRAWN = SamplingParams(temperature=1.3, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
BFLOAT16_ERROR = 0.15  # of a log-probability, root mean square
SETTINGS = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128, "kv_cache_memory_bytes": 64 << 20}
PLAIN = {"enforce_eager": True, "async_scheduling": False}
EXACT = [shape for shape in SHAPES if shape != "26B-A4B"]  # grouped experts multiply in tf32, which may choose other tokens


@functools.cache
def checkpoint(shape: str) -> Path:
    folder = _root() / f"{shape}-gpu"
    build(shape, head_dim=32, global_head_dim=64).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(folder_of("31B") / name, folder / name)
    return folder


@functools.cache
def on_cpu(shape: str) -> LLM:
    return LLM(str(checkpoint(shape)), device="cpu", dtype="float32", max_model_len=256)


@functools.cache
def on_gpu(shape: str, dtype: str = "bfloat16", **settings: Any) -> LLM:
    return LLM(str(checkpoint(shape)), device="cuda", dtype=dtype, **(SETTINGS | settings))


@functools.cache
def prompts_of() -> tuple[list[int], ...]:
    return tuple(prompt(length, 3) for length in LENGTHS)


def tokens_of(llm: LLM, prompts: Any, params: SamplingParams = DRAWN) -> list[tuple[int, ...]]:
    return [sample.token_ids for result in llm.generate(list(prompts), params) for sample in result.samples]


@functools.cache
def expected(shape: str) -> list[tuple[int, ...]]:
    answers = tokens_of(on_cpu(shape), prompts_of())
    assert all(len(set(answer)) > NUM_TOKENS // 4 for answer in answers)
    return answers


def check_answers(shape: str, results: Any, tolerance: float = BFLOAT16_ERROR) -> None:
    """The log-probabilities that were reported with an answer, against what the CPU computes for prompt and answer."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    errors = []
    for result in results:
        token_ids = [*result.prompt_token_ids, *result.token_ids]
        [judged] = on_cpu(shape).generate([token_ids], params)
        scores = (judged.prompt_logprobs or ())[len(result.prompt_token_ids) - 1 :]
        assert len(scores) == len(result.token_ids)
        for score, own, token in zip(scores, result.logprobs, result.token_ids, strict=True):
            errors.append(own[token] - score[token])
    error = torch.tensor(errors).square().mean().sqrt().item()
    assert error <= tolerance, f"{shape}: log-probabilities are off by {error:.4f}"


# Against the CPU


@pytest.mark.parametrize("shape", EXACT)
def test_float32_tokens_are_those_of_the_cpu(shape: str) -> None:
    llm = on_gpu(shape, "float32")
    assert tokens_of(llm, prompts_of()) == expected(shape)
    assert [tokens_of(llm, [one])[0] for one in prompts_of()] == expected(shape)  # with prefix hits this time
    assert llm.engine.stats().counters.prefix_hits > 0
    check_answers(shape, llm.generate(list(prompts_of()), DRAWN), 1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_answers(shape: str) -> None:
    llm = on_gpu(shape)
    check_answers(shape, llm.generate(list(prompts_of()), DRAWN))
    for one in prompts_of()[2:5]:
        check_answers(shape, llm.generate([one], DRAWN))


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_close_as_that_of_transformers(shape: str) -> None:
    """Log-probabilities at every position of a prompt: our error against float32, and that of transformers' bfloat16."""
    from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration

    kinds = {"E4B": Gemma4ForCausalLM, "12B": Gemma4UnifiedForConditionalGeneration}
    model = kinds.get(shape, Gemma4ForConditionalGeneration).from_pretrained(
        checkpoint(shape), dtype=torch.bfloat16, attn_implementation="eager"
    )
    token_ids = prompt(5 * WINDOW, 3)
    with torch.inference_mode():
        theirs = model.cuda().eval()(input_ids=torch.tensor([token_ids], device="cuda"), use_cache=False).logits[0]
        theirs = theirs.float().log_softmax(-1).cpu()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=8)
    [exact], [ours] = (llm.generate([token_ids], params) for llm in (on_cpu(shape), on_gpu(shape)))
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    for index, (want, got) in enumerate(zip(exact.prompt_logprobs or (), ours.prompt_logprobs or (), strict=True)):
        for token in set(want) & set(got):
            errors["ours"].append(abs(got[token] - want[token]))
            errors["theirs"].append(abs(float(theirs[index, token]) - want[token]))
    assert len(errors["ours"]) > 5 * len(token_ids)
    rms = {name: torch.tensor(values).square().mean().sqrt().item() for name, values in errors.items()}
    assert rms["ours"] <= 1.25 * rms["theirs"] + 1e-3, rms


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.02), ("bfloat16", 0.4)])
@pytest.mark.parametrize("shape", ["E4B", "31B"])
def test_fp8_cache(shape: str, dtype: str, tolerance: float) -> None:
    """Both round keys and values alike, but those on an edge between two numbers of e4m3."""
    cpu = LLM(str(checkpoint(shape)), device="cpu", dtype="float32", max_model_len=256, kv_cache_dtype="fp8")
    gpu = on_gpu(shape, dtype, kv_cache_dtype="fp8", max_num_batched_tokens=48)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    errors = []
    for token_ids in prompts_of()[2:]:
        [want], [got] = cpu.generate([token_ids], params), gpu.generate([token_ids], params)
        scores = zip(token_ids[1:], want.prompt_logprobs or (), got.prompt_logprobs or (), strict=True)
        errors += [mine[token] - theirs[token] for token, theirs, mine in scores]
        if want.token_ids == got.token_ids:
            errors += [b[t] - a[t] for t, a, b in zip(want.token_ids, want.logprobs, got.logprobs, strict=True)]
    assert torch.tensor(errors).square().mean().sqrt().item() <= tolerance


# What scheduling does


@pytest.mark.parametrize("shape", ["E2B", "31B"])
def test_chunks_and_preemption(shape: str) -> None:
    spec = open_checkpoint(str(checkpoint(shape))).spec
    slab_bytes = plan_cache(spec.kv_specs(4)).slab_bytes
    small = {"kv_cache_memory_bytes": 8 * slab_bytes, "max_num_batched_tokens": 33, "max_model_len": 128}
    llm = on_gpu(shape, "float32", **small, enable_prefix_caching=False)
    prompts = [prompts_of()[4]] * 4 + list(prompts_of())
    assert tokens_of(llm, prompts) == [expected(shape)[4]] * 4 + expected(shape)
    assert llm.engine.stats().counters.preemptions > 0


@pytest.mark.parametrize("shape", ["E4B", "12B"])
def test_samples_and_draws(shape: str) -> None:
    """The same seeds draw the same tokens as on the CPU: top-k and top-p, all tokens, penalties, bias, wide top-k."""
    for params in (
        SamplingParams(n=3, seed=5, temperature=1.0, top_k=16, top_p=0.9, max_tokens=20),
        SamplingParams(seed=6, temperature=0.8, top_k=0, top_p=1.0, min_p=0.02, max_tokens=20),
        SamplingParams(seed=7, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={9: 3.0}, max_tokens=20),
        SamplingParams(seed=8, temperature=1.2, top_k=0, top_p=0.8, max_tokens=20),
    ):
        prompts = list(prompts_of())[1:5]
        assert tokens_of(on_gpu(shape, "float32"), prompts, params) == tokens_of(on_cpu(shape), prompts, params)


def test_log_probabilities() -> None:
    params = dataclasses.replace(GREEDY, logprobs=3)
    [got], [want] = (llm.generate([prompts_of()[4]], params) for llm in (on_gpu("31B", "float32"), on_cpu("31B")))
    assert got.token_ids == want.token_ids
    for mine, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
        assert dict(mine) == pytest.approx(dict(theirs), abs=1e-3)


# Graphs and look-ahead


@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_and_look_ahead_change_nothing(shape: str) -> None:
    """Bit by bit: four sequences that begin and end together have the same shapes with and without."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    prompts = [prompt(20 + index, 9) for index in range(4)]
    plain = on_gpu(shape, **PLAIN).generate(prompts, params)
    for settings in ({"async_scheduling": False}, {"enforce_eager": True}, {}):
        got = on_gpu(shape, **settings).generate(prompts, params)
        assert [one.token_ids for one in got] == [one.token_ids for one in plain]
        assert [one.logprobs for one in got] == [one.logprobs for one in plain]


def test_decode_runs_in_graphs() -> None:
    engine = on_gpu("31B").engine
    fixed = engine._runner.fixed
    assert fixed is not None
    assert [bucket.num_rows for bucket in fixed.buckets] == [1, 2, 4, 8]
    assert fixed.num_captured == 4
    spare = engine._runner.pool._slabs[engine._runner.pool.spare_page]
    tokens_of(on_gpu("31B"), prompts_of()[:3])  # three rows in a bucket of four
    assert not spare.any()


@pytest.mark.parametrize("shape", ["E2B", "26B-A4B", "31B"])
def test_nothing_waits_for_the_device(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, mixed and decode steps are launched without a synchronisation; only results wait."""
    llm = on_gpu(shape)
    runner = llm.engine._runner
    launch, seen = runner.launch, []

    def strict(plan: Any) -> Any:
        seen.append(plan.num_tokens)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(runner, "launch", strict)
    params = [GREEDY, SamplingParams(seed=1, max_tokens=9), SamplingParams(seed=2, max_tokens=9, logprobs=2)] * 2
    llm.generate([prompt(length, 11) for length in LENGTHS], params)
    assert max(seen) > 100
    assert min(seen) < 6


# Memory and faults


def test_the_cache_takes_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    share = 0.05
    with caplog.at_level("INFO", logger="culet"):
        llm = LLM(
            str(checkpoint("31B")),
            device="cuda",
            gpu_memory_utilization=share,
            **{**SETTINGS, "kv_cache_memory_bytes": None},
        )
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "activations" in text
    assert "graphs" in text
    assert "ready after" in text
    total = torch.cuda.get_device_properties(0).total_memory
    arena = llm.engine._runner.pool._slabs.nbytes
    assert 0.7 * share * total < arena < share * total
    check_answers("31B", llm.generate(list(prompts_of()), DRAWN))


def test_a_bad_page_is_an_error_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = on_gpu("31B", **PLAIN)
    runner = llm.engine._runner
    launch = runner.launch

    def spoil(plan: Any) -> Any:
        row = plan.rows[0]
        tables = (row.tables[0], PageTable(0, (10**6,) * len(row.tables[1].pages)))
        return launch(dataclasses.replace(plan, rows=(dataclasses.replace(row, tables=tables), *plan.rows[1:])))

    with monkeypatch.context() as patch:
        patch.setenv("CULET_CHECK_PAGES", "1")
        patch.setenv("CULET_CACHE_DIR", str(tmp_path))
        patch.setattr(runner, "launch", spoil)
        with pytest.raises(InternalError, match=r"group global.*row 0.*page 1000000") as caught:
            tokens_of(llm, prompts_of()[:1])
    assert next((tmp_path / "dumps").iterdir()).name in caught.value.hint
    check_answers("31B", llm.generate(list(prompts_of()), DRAWN))  # nothing was launched: all is well
