"""LLM end to end, on the CPU in float32, compared with transformers' greedy tokens and log-probabilities."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import culet
from culet import LLM, SamplingParams
from culet.cache.spec import plan_cache
from culet.engine.jobs import _warn_of_remote_code
from culet.errors import BadRequest, InternalError
from culet.models.checkpoint import open_checkpoint
from culet.types import StepPlan, TokenDelta
from tests.engine.llm.oracle import EOS, SHAPES, VOCAB, WINDOW, assert_greedy, folder_of, oracle_logprobs, prompt
from tests.matrix import matrix

NUM_TOKENS = 16
LENGTHS = (1, 7, WINDOW, WINDOW + 1, 3 * WINDOW + 5, 5 * WINDOW)  # shorter than, equal to and several times the window
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@functools.cache
def make(shape: str, **settings: object) -> LLM:
    return LLM(str(folder_of(shape)), **{"device": "cpu", "dtype": "float32", "max_model_len": 512, **settings})


def prompts_of() -> list[list[int]]:
    """Return the same prompts for all tests, so that transformers computes each answer once."""
    return [prompt(length) for length in LENGTHS]


def check_greedy(llm: LLM, shape: str, prompts: list[list[int]]) -> None:
    for result, token_ids in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
        assert_greedy(shape, token_ids, result.token_ids)
        assert len(result.token_ids) == NUM_TOKENS
        assert result.prompt_token_ids == tuple(token_ids)
        assert result.finish_reason == "length"


def check_scores(llm: LLM, shape: str, prompts: list[list[int]]) -> None:
    """Like check_greedy, and also compare the top five log-probabilities at every position with transformers."""
    for result in llm.generate(prompts, dataclasses.replace(GREEDY, logprobs=5)):
        token_ids = list(result.prompt_token_ids)
        assert_greedy(shape, token_ids, result.token_ids)
        want = oracle_logprobs(shape, [*token_ids, *result.token_ids])[len(token_ids) - 1 : -1]
        for scores, row in zip(result.logprobs, want, strict=True):
            for token_id, score in scores.items():
                assert abs(score - float(row[token_id])) <= 1e-4 * float(want.abs().max())


def cache_of(shape: str, num_slabs: int, *, latent: bool = True) -> int:
    spec = open_checkpoint(str(folder_of(shape))).spec
    return num_slabs * plan_cache(spec.kv_specs(4, latent=latent)).slab_bytes


def crossing_prompt(shape: str) -> list[int]:
    """Return a prompt whose answer crosses a page a few steps after it starts, which admission does not foresee."""
    spec = open_checkpoint(str(folder_of(shape))).spec
    return prompt(min(group.page_tokens for group in plan_cache(spec.kv_specs(4)).groups) - 11)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_transformers(shape: str) -> None:
    """Run a short and a long prompt alone, then all in one ragged batch."""
    llm = make(shape, enable_prefix_caching=False)
    for token_ids in (prompts_of()[0], prompts_of()[4]):
        check_greedy(llm, shape, [token_ids])
    check_greedy(llm, shape, prompts_of())


@matrix({"shape": list(SHAPES), "num_tokens": [7, 33]})
def test_chunked(shape: str, num_tokens: int) -> None:
    """Run chunks of odd sizes that share steps with decode, with fewer slots than requests."""
    llm = make(shape, max_num_batched_tokens=num_tokens, max_num_seqs=4, enable_prefix_caching=False)
    check_greedy(llm, shape, prompts_of())
    assert llm.engine.stats().counters.steps > sum(LENGTHS) // num_tokens


@pytest.mark.parametrize("shape", ["12B", "26B-A4B", "31B"])
def test_without_latent(shape: str) -> None:
    check_greedy(make(shape, latent=False), shape, prompts_of())


@matrix({"shape": list(SHAPES), "prefix_caching": [False, True]})
def test_after_preemption(shape: str, prefix_caching: bool) -> None:
    """The cache is too small for all. Preempted sequences are recomputed with the same results."""
    settings = {"kv_cache_memory_bytes": cache_of(shape, 7), "max_num_batched_tokens": 64, "max_model_len": 160}
    llm = make(shape, **settings, enable_prefix_caching=prefix_caching)
    before = llm.engine.stats().counters.preemptions
    check_scores(llm, shape, [crossing_prompt(shape)] * 4 + prompts_of())
    assert llm.engine.stats().counters.preemptions > before


@pytest.mark.parametrize("shape", SHAPES)
def test_after_a_prefix_hit(shape: str) -> None:
    llm = make(shape)
    first = prompts_of()[-1]
    check_greedy(llm, shape, [first])
    again = llm.generate([first], GREEDY)[0]
    assert again.num_cached_tokens > 0
    assert_greedy(shape, first, again.token_ids)
    check_scores(llm, shape, [first])
    # The next turn, where the first answer is part of the prompt.
    turn = [*first, *again.token_ids, *prompt(9, 5)]
    result = llm.generate([turn], dataclasses.replace(GREEDY, max_tokens=16))[0]
    assert result.num_cached_tokens > len(first)
    assert_greedy(shape, turn, result.token_ids)


@pytest.mark.parametrize("choice", ["fp8", "sliding=fp8"])
def test_fp8_cache(choice: str) -> None:
    """An fp8 cache takes half the bytes and changes logits, but prefix hits, chunks and preemption read the same keys."""
    plain = make("31B", kv_cache_dtype=choice, enable_prefix_caching=False)
    sizes = [group.spec.itemsize for group in plain.engine._worker.pool.layout.groups]
    assert sizes == [1, 1 if choice == "fp8" else 4]
    params = dataclasses.replace(GREEDY, max_tokens=1, logprobs=5)
    wanted = plain.generate(prompts_of(), params)
    slab = plain.engine._worker.pool.layout.slab_bytes
    llm = make("31B", kv_cache_dtype=choice, kv_cache_memory_bytes=20 * slab, max_num_batched_tokens=33, max_model_len=160)
    for _ in range(2):
        got = llm.generate(prompts_of(), params)
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs[0][mine.token_ids[0]] == pytest.approx(theirs.logprobs[0][mine.token_ids[0]], abs=0.02)
    assert any(result.num_cached_tokens for result in got)


def test_old_config_form() -> None:
    llm = LLM(str(folder_of("31B", "old")), device="cpu", max_model_len=256)
    token_ids = prompts_of()[4]
    assert_greedy("31B", token_ids, llm.generate([token_ids], GREEDY)[0].token_ids)


# Samples, seeds, log-probabilities


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make("31B")


def test_n_samples_fork_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=5, seed=3, temperature=1.0, max_tokens=40, ignore_eos=True)
    forks = llm.engine.stats().counters.forks
    [result] = llm.generate([prompt(37, 7)], params)
    assert llm.engine.stats().counters.forks == forks + 4
    assert len(result.samples) == 5
    assert len({sample.token_ids for sample in result.samples}) == 5
    assert (result.text, result.token_ids) == (result.samples[0].text, result.samples[0].token_ids)
    assert [output.index for output in result.outputs] == [0, 1, 2, 3, 4]
    # Sample 0 is the same as with n=1.
    assert llm.generate([prompt(37, 7)], dataclasses.replace(params, n=1))[0].token_ids == result.token_ids


def test_greedy_samples_are_equal(llm: LLM) -> None:
    [result] = llm.generate([prompts_of()[4]], dataclasses.replace(GREEDY, n=3))
    assert len({sample.token_ids for sample in result.samples}) == 1
    assert_greedy("31B", prompts_of()[4], result.token_ids)


def test_seeds_do_not_depend_on_the_batch(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in range(6)]
    prompts = prompts_of()
    together = [result.token_ids for result in llm.generate(prompts, params)]
    alone = [llm.generate([token_ids], own)[0].token_ids for token_ids, own in zip(prompts, params, strict=True)]
    small = make("31B", max_num_batched_tokens=11, max_num_seqs=3)
    assert together == alone
    assert together == [result.token_ids for result in small.generate(prompts, params)]


def test_without_a_seed_draws_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert len({llm.generate([prompt(5)], params)[0].token_ids for _ in range(4)}) > 1


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    token_ids = prompt(30, 10)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=4, ignore_eos=True)
    [result] = llm.generate([token_ids], params)
    expected = oracle_logprobs("31B", [*token_ids, *result.token_ids])
    assert len(result.logprobs) == 12
    for index, (token_id, entry) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        row = expected[len(token_ids) - 1 + index]
        assert next(iter(entry)) == token_id
        assert set(entry) == {token_id, *row.topk(4).indices.tolist()}
        for each, value in entry.items():
            assert value == pytest.approx(float(row[each]), abs=2e-4)


def test_prompt_logprobs(llm: LLM) -> None:
    token_ids = prompt(45, 11)
    [result] = llm.generate([token_ids], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True))
    expected = oracle_logprobs("31B", token_ids)
    assert len(result.prompt_logprobs) == len(token_ids) - 1
    for index, entry in enumerate(result.prompt_logprobs):
        token_id = token_ids[index + 1]
        assert entry[token_id] == pytest.approx(float(expected[index, token_id]), abs=2e-4)


def test_no_logprobs_unless_requested(llm: LLM) -> None:
    [result] = llm.generate([prompt(5)], SamplingParams(max_tokens=2))
    assert result.logprobs is None
    assert result.prompt_logprobs is None


def test_logit_bias_and_penalties_take_effect(llm: LLM) -> None:
    [biased] = llm.generate([prompt(8)], SamplingParams(temperature=0, max_tokens=5, logit_bias={77: 100.0}))
    assert list(biased.token_ids) == [77] * 5
    penalties = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 50.0}
    [once] = llm.generate([prompt(8)], SamplingParams(temperature=0, max_tokens=30, **penalties))
    assert len(set(once.token_ids)) > 20


def test_sampling_follows_the_distribution(llm: LLM) -> None:
    """With many seeds at temperature 1 and no truncation, frequencies of the top tokens match the model's probabilities."""
    token_ids = prompt(12, 13)
    count = 600
    params = [SamplingParams(seed=seed, max_tokens=1, top_k=0, top_p=1.0, temperature=1.0) for seed in range(count)]
    drawn = [result.token_ids[0] for result in llm.generate([token_ids] * count, params)]
    expected = oracle_logprobs("31B", token_ids)[-1].exp()
    for token_id in expected.topk(3).indices.tolist():
        p = float(expected[token_id])
        assert drawn.count(token_id) == pytest.approx(count * p, abs=5 * math.sqrt(count * p * (1 - p)) + 1)


# Streams


def test_stream_gives_what_generate_gives(llm: LLM) -> None:
    token_ids = prompt(18, 14)
    [whole] = llm.generate([token_ids], GREEDY)
    deltas = list(llm.stream(token_ids, GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert len(deltas) > 10, "token by token, not all at once"


def test_closing_a_stream_cancels(llm: LLM) -> None:
    before = llm.engine.stats().counters
    stream = llm.stream(prompt(18, 15), GREEDY)
    next(stream)
    stream.close()
    assert next(stream, None) is None
    while llm.engine.has_work:
        llm.engine.step()
    after = llm.engine.stats()
    assert after.counters.cancelled == before.cancelled + 1
    assert after.num_running == 0
    assert after.num_free_pages + after.num_resume_point_pages == after.num_pages


def test_dropping_an_unread_stream_cancels(llm: LLM) -> None:
    before = llm.engine.stats().counters.cancelled
    llm.stream(prompt(18, 16), GREEDY)  # dropped immediately
    assert llm.engine.stats().counters.cancelled == before + 1
    assert not llm.engine.has_work


def test_streams_can_be_interleaved(llm: LLM) -> None:
    short, long = prompts_of()[1], prompts_of()[4]
    first, second = llm.stream(short, GREEDY), llm.stream(long, GREEDY)
    got: dict[str, list[int]] = {"first": [], "second": []}
    for _ in range(10):
        got["first"] += next(first).token_ids
        got["second"] += next(second).token_ids
    check_greedy(llm, "31B", [prompts_of()[3]])
    got["first"] += [token for delta in first for token in delta.token_ids]
    got["second"] += [token for delta in second for token in delta.token_ids]
    for token_ids, name in ((short, "first"), (long, "second")):
        assert len(got[name]) == NUM_TOKENS
        assert_greedy("31B", token_ids, got[name])


def test_more_prompts_than_the_queue_can_hold() -> None:
    llm = make("E4B", max_queue_len=2, max_num_seqs=2)
    prompts = [*prompts_of(), *prompts_of()]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for token_ids, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 8
        assert_greedy("E4B", token_ids, result.token_ids)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_an_error_in_a_step_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("31B", max_num_seqs=3)

    def fail(plan: object) -> None:
        raise InternalError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._worker, "launch", fail)
        with pytest.raises(InternalError, match="gone"):
            llm.generate([prompt(5), prompt(6)], GREEDY)
    assert not llm.engine.has_work
    check_greedy(llm, "31B", [prompts_of()[3]])


@pytest.mark.parametrize("kind", ["default", "ignored", "own"])
def test_ctrl_c_takes_effect_after_the_step(llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ignores it goes on ignoring it, and the handler of one that has its own is called."""
    seen, inner = [], llm.engine.step

    def step() -> list[TokenDelta]:
        signal.raise_signal(signal.SIGINT)
        seen.append("after the signal")
        return inner()

    monkeypatch.setattr(llm.engine, "step", step)
    handlers = {"default": signal.default_int_handler, "ignored": signal.SIG_IGN, "own": lambda *_: seen.append("own handler")}
    before = signal.signal(signal.SIGINT, handlers[kind])
    params = dataclasses.replace(GREEDY, max_tokens=1)
    try:
        with pytest.raises(KeyboardInterrupt) if kind == "default" else contextlib.nullcontext():
            llm.generate([[5, 6, 7]], params)
        assert signal.getsignal(signal.SIGINT) is handlers[kind]
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen[0] == "after the signal"
    assert ("own handler" in seen) == (kind == "own")
    assert not llm.engine.has_work or kind == "default"


def test_several_threads(llm: LLM) -> None:
    """Calls and streams of several threads run together, with the same results as alone."""
    params = [SamplingParams(seed=seed, max_tokens=16, ignore_eos=True) for seed in range(4)]
    alone = [llm.generate(prompts_of(), own) for own in params]
    streamed = [token for delta in llm.stream(prompts_of()[1], params[0]) for token in delta.token_ids]
    results: dict[int, list[tuple[int, ...]]] = {}

    def work(number: int) -> None:
        if number < len(params):
            results[number] = [result.token_ids for result in llm.generate(prompts_of(), params[number])]
        else:
            results[number] = [tuple(delta.token_ids) for delta in llm.stream(prompts_of()[1], params[0])]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(params) + 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, own in enumerate(alone):
        assert results[number] == [result.token_ids for result in own]
    for number in (4, 5):
        assert [token for token_ids in results[number] for token in token_ids] == streamed
    assert not llm.engine.has_work


def test_a_failed_step_ends_the_calls_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("31B", max_num_seqs=5)
    launch, num_left = llm.engine._worker.launch, 20

    def fail(plan: StepPlan) -> object:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise InternalError("the device is gone")
        return launch(plan)

    errors: list[InternalError] = []

    def work() -> None:
        try:
            llm.generate([prompt(5)], dataclasses.replace(GREEDY, max_tokens=200))
        except InternalError as error:
            errors.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._worker, "launch", fail)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 3
    assert not llm.engine.has_work
    check_greedy(llm, "31B", [prompts_of()[3]])


# vLLM's interface


def test_names_of_vllm(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [result] = llm.generate(["hello world"], sampling_params=params, use_tqdm=False)
    assert result.outputs[0].text == result.text
    assert result.prompt == "hello world"
    token_ids = list(result.prompt_token_ids)
    for given in ({"prompt_token_ids": token_ids}, {"prompt": "hello world"}, [{"prompt_token_ids": token_ids}]):
        assert llm.generate(given, params)[0].token_ids == result.token_ids
    assert llm.get_tokenizer().decode(result.token_ids, skip_special_tokens=True) == result.text
    for bad in ({"text": "x"}, {"prompt": "x", "prompt_embeds": []}):
        with pytest.raises(BadRequest, match="expected prompt or prompt_token_ids"):
            llm.generate([bad], params)


def test_structured_outputs_as_a_mapping(llm: LLM) -> None:
    [result] = llm.generate([prompt(5)], SamplingParams(max_tokens=8, structured_outputs={"choice": ["a", "b"]}))
    assert result.text in ("a", "b")
    with pytest.raises(BadRequest, match="structured_outputs: got 'pattern', expected one of: json"):
        SamplingParams(structured_outputs={"pattern": "a"})


def test_trust_remote_code_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_remote_code.cache_clear()
    for _ in range(2):
        LLM(str(folder_of("31B")), trust_remote_code=True, device="cpu", max_model_len=64).close()
    said = [record.levelname for record in caplog.records if "trust_remote_code has no effect" in record.getMessage()]
    assert said == ["WARNING"]


def test_the_package_lists_its_names() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs"} <= set(dir(culet))
    assert Path(culet.__file__).with_name("py.typed").exists()


def test_chat_template_kwargs(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0, max_tokens=2)
    [plain], [thinking] = llm.chat(messages, params), llm.chat(messages, params, enable_thinking=True)
    [same] = llm.chat(messages, params, chat_template_kwargs={"enable_thinking": True})
    assert same.prompt_token_ids == thinking.prompt_token_ids != plain.prompt_token_ids


# Text and chat


def test_text_prompts_start_with_bos(llm: LLM) -> None:
    [result] = llm.generate("hello world", SamplingParams(max_tokens=1))
    assert result.prompt_token_ids[0] == 2
    assert llm.engine.tokenizer.decode(result.prompt_token_ids) == "hello world"
    [explicit] = llm.generate("<bos>hello world", SamplingParams(max_tokens=1))
    assert explicit.prompt_token_ids == result.prompt_token_ids


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    [result] = llm.generate([prompt(9, 22)], GREEDY)
    assert result.text == llm.engine.tokenizer.decode(result.token_ids)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    single, double = llm.chat([messages, [*messages, {"role": "assistant", "content": "yes"}, *messages]], params)
    [alone] = llm.chat(messages, params)
    assert alone.token_ids == single.token_ids
    rendered = llm.engine.tokenizer.decode(alone.prompt_token_ids, skip_special=False)
    assert rendered.startswith("<bos><|turn>user\nhello<turn|>\n<|turn>model\n")
    assert len(double.prompt_token_ids) > len(alone.prompt_token_ids)
    streamed = [token for delta in llm.stream(messages, params) for token in delta.token_ids]
    assert streamed == list(alone.token_ids)


def test_ends_at_eos_unless_ignored(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={EOS: 100.0})
    [result] = llm.generate([prompt(9)], params)
    assert (list(result.token_ids), result.text, result.finish_reason) == ([EOS], "", "stop")
    [result] = llm.generate([prompt(9)], dataclasses.replace(params, ignore_eos=True))
    assert (list(result.token_ids), result.finish_reason) == ([EOS] * 20, "length")


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    llm = make("31B", max_model_len=48)
    token_ids = prompts_of()[3]
    [result] = llm.generate([token_ids], SamplingParams(temperature=0, ignore_eos=True))
    assert len(result.token_ids) == 48 - len(token_ids)
    assert_greedy("31B", token_ids, result.token_ids)


def test_vocabulary_size_is_the_models(llm: LLM) -> None:
    assert llm.engine.spec.vocab_size == VOCAB


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread. With small tensors, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
